"""One member's side of a group's operations that are all or nothing.

An operation is *running* until its whole result is in memory that nobody else can write, then *complete*, and
*returned* when all others are known to be complete: the tokens of a dissemination barrier (Hensgen, Finkel and Manber,
1988) tell. So if anybody returned, everybody was complete.

Before a member answers who proposes a view it is *frozen*: the attempt it is in cannot complete, send a token or return
any more, so its answer stays true until a view is installed. The view's verdict then returns the operation, raises, or
has it run again as the attempt of that number. Bytes and tokens say which attempt they are of: what is older is
dropped, what is newer comes from a member that installed the view first, and is kept.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from covey.base.errors import RemoteProtocolError
from covey.wire.membership import Fate, State, Token, View

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Run:
    """Execute the operation among `live` from its kept input; nothing of an earlier attempt may be used."""

    sequence: int
    attempt: int
    live: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a token to a rank."""

    rank: int
    token: Token


@dataclass(frozen=True, slots=True)
class Returned:
    """The operation is over: its result, of these contributors, may be used and its input forgotten."""

    sequence: int
    attempt: int
    contributors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Raised:
    """The operation is over without a result: its root is gone. The group stays usable."""

    sequence: int
    root: int


Effect: TypeAlias = Run | Tell | Returned | Raised


class Age(enum.Enum):
    """When bytes that say which attempt they are of can be used."""

    PAST = enum.auto()
    """Never: drop them."""
    PRESENT = enum.auto()
    FUTURE = enum.auto()
    """When this member gets there."""


@dataclass(slots=True)
class _Operation:
    root: int
    is_running: bool = False
    """It was begun in the present attempt; not yet, if it was asked for while frozen."""
    is_complete: bool = False
    told: int = 0
    """Rounds of the barrier whose token was sent."""


class _Place:
    """Where this member stands among those of a view, and with whom it exchanges tokens."""

    def __init__(self, attempt: int, live: tuple[int, ...], me: int) -> None:
        self.attempt, self.live = attempt, live
        index, size = live.index(me), len(live)
        distances = [1 << round_ for round_ in range((size - 1).bit_length())]
        self.targets = [live[(index + distance) % size] for distance in distances]
        self.sources = [live[(index - distance) % size] for distance in distances]


class Commit:
    """The operations of one group, one after another, at one member. Drain `effects` after every call.

    Ranks are those of view 0. Whoever drives it stops its executor before `freeze`, and begins what `Run` says.
    """

    def __init__(self, group: int, ranks: Sequence[int], me: int, view: View) -> None:
        self.group, self.ranks, self.me = group, tuple(ranks), me
        self.returned = 0
        """The last operation that is over."""
        self._place = self._placed(view)
        self._operation: _Operation | None = None
        self._is_frozen = False
        self._tokens: dict[tuple[int, int], set[tuple[int, int]]] = {}
        """By sequence and attempt: rounds and senders."""
        self._effects: list[Effect] = []

    @property
    def attempt(self) -> int:
        """The number of the view."""
        return self._place.attempt

    @property
    def live(self) -> tuple[int, ...]:
        """The ranks of the group that are in the view, in the group's order."""
        return self._place.live

    def effects(self) -> list[Effect]:
        """Return what is to be done, in order, and forget it."""
        effects, self._effects = self._effects, []
        return effects

    # What happens.

    def start(self, root: int = -1) -> None:
        """Begin the next operation; RuntimeError if the last is not over. A frozen member begins it when it thaws."""
        if self._operation is not None:
            raise RuntimeError(f"operation {self.returned + 1} is not over")
        self._operation = _Operation(root)
        if not self._is_frozen:
            self._run()

    def completed(self, attempt: int) -> None:
        """The executor of this attempt has the whole result, where nobody else can write. Too late if frozen."""
        operation = self._operation
        if operation is not None and operation.is_running and attempt == self.attempt and not self._is_frozen:
            operation.is_complete = True
            self._advance()

    def received(self, rank: int, token: Token) -> None:
        """Take a token from a rank."""
        if self.age(token.sequence, token.attempt) is not Age.PAST:
            self._tokens.setdefault((token.sequence, token.attempt), set()).add((token.round, rank))
            self._advance()

    def freeze(self) -> State:
        """Stop the present attempt for good and say how far it is. The executor must have been stopped before."""
        self._is_frozen = True
        state = State(self.group, self.ranks, self.returned)
        if (operation := self._operation) is None or not operation.is_running:
            return state
        sequence = self.returned + 1
        return State(
            self.group, self.ranks, self.returned, sequence, self.attempt, operation.is_complete, operation.root
        )

    def install(self, view: View) -> None:
        """Do what a view says, and thaw.

        Raises:
            RemoteProtocolError: the view commits what is not complete here; whoever judged did not keep the rules.
        """
        operation, before, sequence = self._operation, self._place, self.returned + 1
        fates = [(verdict.sequence, verdict.fate) for verdict in view.verdicts if verdict.group == self.group]
        due, fate = fates[0] if fates else (sequence, Fate.REDO)
        self._place, self._is_frozen = self._placed(view), False
        self._tokens = {key: tokens for key, tokens in self._tokens.items() if key[1] >= view.number}
        if operation is None:
            return
        is_over = sequence < due or fate is Fate.COMMIT
        if is_over and operation.is_complete:
            self._return(before)
        elif (sequence == due and fate is Fate.RAISE) or self._is_headless(operation):
            self._raise()
        elif is_over:
            raise RemoteProtocolError(f"view {view.number} commits operation {sequence}, which is not complete here")
        else:
            self._operation = _Operation(operation.root)
            self._run()

    def age(self, sequence: int, attempt: int) -> Age:
        """Tell when bytes so marked can be used. Frozen, the present attempt is past."""
        if attempt < self.attempt + self._is_frozen or sequence <= self.returned:
            return Age.PAST
        is_now = attempt == self.attempt and sequence == self.returned + 1
        return Age.PRESENT if is_now and self._operation is not None and self._operation.is_running else Age.FUTURE

    # How it goes on.

    def _placed(self, view: View) -> _Place:
        return _Place(view.number, tuple(rank for rank in self.ranks if rank in view.ranks), self.me)

    def _is_headless(self, operation: _Operation) -> bool:
        return operation.root >= 0 and operation.root not in self.live

    def _run(self) -> None:
        operation = self._operation
        assert operation is not None
        if self._is_headless(operation):
            self._raise()
            return
        operation.is_running = True
        self._effects.append(Run(self.returned + 1, self.attempt, self.live))

    def _raise(self) -> None:
        assert self._operation is not None
        root, self._operation = self._operation.root, None
        self.returned += 1
        self._effects.append(Raised(self.returned, root))

    def _return(self, place: _Place) -> None:
        self._operation = None
        self.returned += 1
        self._tokens = {key: tokens for key, tokens in self._tokens.items() if key[0] > self.returned}
        self._effects.append(Returned(self.returned, place.attempt, place.live))

    def _advance(self) -> None:
        """Send the tokens that may be sent; return the operation when all have come."""
        operation, place = self._operation, self._place
        if operation is None or not operation.is_complete or self._is_frozen:
            return
        tokens = self._tokens.get((self.returned + 1, self.attempt), set())
        for round_, (target, source) in enumerate(zip(place.targets, place.sources, strict=True)):
            if round_ == operation.told:
                operation.told += 1
                self._effects.append(Tell(target, Token(self.group, self.returned + 1, self.attempt, round_)))
            if (round_, source) not in tokens:
                return
        self._return(place)
