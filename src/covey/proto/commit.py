"""One member's side of a group's atomic operations.

An operation is *running* until its whole result is in memory that no other rank can write, then *complete*. A complete
rank enters a barrier among all ranks of the attempt; a rank that has *passed* it returns. So if any rank returned, all
were complete. The executor that moves the bytes also runs the barrier, over lanes that are made anew for every attempt,
so that no byte of an older attempt is taken for the present one. It reports the outcome to this core.

Before a member answers the proposer of a view it is *frozen*: its attempt can neither complete nor return any more, so
its answer stays true until a view is installed. The verdict of the view then ends the operation, or runs it again as
the attempt of that number:

- it returns its result, if all remaining ranks are complete, because a lost rank may have returned it;
- it is revoked, if a rank gave up: this operation, or the next if this one returns, ends without a result on all
  members, and the group is over for good;
- it raises, if its root is gone, and the group goes on;
- otherwise it is tried again from the saved input, without the lost ranks.

The barrier also tells whether any rank knows of a change that waits. All ranks that pass it learn this with the same
operation, and keep it; a rank that returns by a verdict learns it from the view. So all members of a view that have
returned the same operations agree on `pending`, and loops that ask for it end together.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from covey.base.errors import RemoteProtocolError
from covey.wire.membership import Fate, State, Verdict, View

if TYPE_CHECKING:
    from collections.abc import Sequence

# Two of these are made for every operation, and a frozen dataclass takes three times as long to make.


@dataclass(slots=True)
class RunOperation:
    """Execute the operation among `live` from its saved input; nothing of an earlier attempt may be used."""

    sequence: int
    attempt: int
    live: tuple[int, ...]


@dataclass(slots=True)
class Returned:
    """The operation is over: its result, from these contributors, may be used and its saved input dropped."""

    sequence: int
    attempt: int
    contributors: tuple[int, ...]


@dataclass(slots=True)
class Raised:
    """The operation is over without a result: its root is gone. The group stays usable."""

    sequence: int
    root: int


@dataclass(slots=True)
class Revoked:
    """The operation is over without a result, on all members, and there will be no other in this group."""

    sequence: int


class _Phase(enum.Enum):
    """The phase of the first operation that is not over."""

    IDLE = enum.auto()
    """The caller has not started it."""
    ASKED = enum.auto()
    """Started while frozen: it begins with the next view."""
    RUNNING = enum.auto()
    COMPLETE = enum.auto()


_IDLE, _ASKED, _RUNNING, _COMPLETE = _Phase
LENT_PHASES = (_RUNNING, _COMPLETE)
"""What code that was lent the operations sets `phase` to, when it hands a running or a complete one over."""


class Commit:
    """The operations of one group, one after another, at one member.

    Ranks are those of view 0. The driver calls one method at a time. It executes what `RunOperation` says and calls
    `completed`; if that returns True, it runs the barrier and calls `passed`. It stops both before it calls `freeze`.
    """

    __slots__ = (
        "_over",
        "_revoked_at",
        "_root",
        "attempt",
        "gives_up",
        "group",
        "is_frozen",
        "live",
        "me",
        "pending",
        "phase",
        "ranks",
        "returned",
    )

    def __init__(self, group: int, ranks: Sequence[int], me: int, view: View) -> None:
        """Begin in a view. If members that had the group before have revoked it, it is revoked here, too."""
        self.group, self.ranks, self.me = group, tuple(ranks), me
        self.returned = 0
        """The last operation that is over, not counting a revoked one."""
        self.attempt = view.number
        self.live = self._living(view)
        """The ranks of the group that are in the view, in the group's order."""
        self.pending = False
        """Whether all ranks know of a waiting change, as of operation `returned`."""
        self.gives_up = False
        """Whether this member wants the group revoked, or it is. If it is not yet, a view has to be asked for."""
        self.is_frozen = False
        self._over = 0
        """The last operation that a view ended. A rank that has not started it yet will raise: had it returned on any
        rank, it would be complete here."""
        self._revoked_at = 0
        """The first revoked operation; 0 if there is none."""
        self.phase = _IDLE
        """Phase of the first operation that is not over. The compiled shortcut sets it, too: one of `LENT_PHASES`."""
        self._root = -1
        self._heed(view)

    @property
    def is_revoked(self) -> bool:
        """Whether the group is over for good. Operations that ended on other ranks may still have to end here."""
        return self._revoked_at > 0

    def start(self, root: int = -1) -> RunOperation | Raised | Revoked | None:
        """Begin the next operation, and return what to do; None if frozen: then `install` returns it.

        Raises:
            RuntimeError: the last operation is not over.
        """
        if self.phase is not _IDLE:
            raise RuntimeError(f"operation {self.returned + 1} is not over")
        self._root = root
        if self.is_frozen:
            self.phase = _ASKED
            return None
        return self._begin()

    def lend(self, started: int) -> bool:
        """Let other code perform the next operations; False if one is in progress, or something has to be decided.

        `started` is the number of operations that were started here. The other code performs operations without a root
        in this attempt, barrier and all, and sets `returned` after each. The driver stops it before it calls anything
        here. If it stops in the middle of an operation, it has set `phase`, and `resume` goes on.
        """
        if self.phase is not _IDLE or self.is_frozen or self.gives_up or self.returned != started:
            return False
        self._root = -1
        return True

    @property
    def is_complete(self) -> bool:
        """Whether the result of the operation in progress is here."""
        return self.phase is _COMPLETE

    def resume(self) -> RunOperation:
        """Return what to do with an operation that other code has begun."""
        return RunOperation(self.returned + 1, self.attempt, self.live)

    def completed(self, attempt: int) -> bool:
        """Note that the whole result of this attempt is here, where no other rank writes; False if it is too late."""
        if self.phase is not _RUNNING or attempt != self.attempt or self.is_frozen:
            return False
        self.phase = _COMPLETE
        return True

    def passed(self, attempt: int, pending: bool = False) -> Returned | None:
        """Note that all ranks are complete in this attempt, and whether a change waits; None if it is too late.

        Raises:
            RuntimeError: this member is not complete, so it cannot have entered the barrier.
        """
        if self.phase is _IDLE or attempt != self.attempt or self.is_frozen:
            return None
        if self.phase is not _COMPLETE:
            raise RuntimeError(f"the barrier of operation {self.returned + 1} was entered before it was complete")
        self.pending |= pending
        return self._return(attempt, self.live)

    def give_up(self) -> None:
        """Want the operation in progress, or the next, to end without a result, and all that follow.

        Reasons: its deadline has passed, a rank revoked the group, or the ranks called different operations. The next
        view grants it if this comes before this member freezes; until then operations go on, and may still return.
        """
        self.gives_up = True

    def disagree(self) -> None:
        """Give up the operation in progress because the ranks called it differently.

        No rank can pass its barrier, which compares the calls, so none can have returned it, and what is here is not a
        result. So it does not count as complete, unless this member is frozen and has reported it as complete.
        """
        self.give_up()
        if self.phase is _COMPLETE and not self.is_frozen:
            self.phase = _RUNNING

    def freeze(self) -> State:
        """Stop the present attempt for good, and return the state of this member."""
        self.is_frozen = True
        is_trying = self.phase is _RUNNING or self.phase is _COMPLETE
        return State(
            self.group,
            self.ranks,
            max(self.returned, self._over),
            self.returned + 1 if is_trying else 0,
            self.attempt if is_trying else 0,
            self.phase is _COMPLETE,
            self._root if is_trying else -1,
            self.pending,
            self.gives_up,
        )

    def install(self, view: View) -> RunOperation | Returned | Raised | Revoked | None:
        """Do what a view says, and unfreeze; return what to do with the operation in progress, None if there is none.

        Raises:
            RemoteProtocolError: the view commits an operation that is not complete here: its proposer broke the rules.
        """
        attempt, live, sequence = self.attempt, self.live, self.returned + 1
        self.attempt, self.live, self.is_frozen = view.number, self._living(view), False
        verdict = self._heed(view)
        if self.phase is _IDLE:
            return None
        is_over = sequence < verdict.sequence or verdict.fate is Fate.COMMIT
        if is_over and self.phase is _COMPLETE:
            return self._return(attempt, live)
        if sequence == verdict.sequence and verdict.fate is Fate.RAISE:
            return self._raise()
        if is_over and not self.is_revoked and not self._is_headless():
            raise RemoteProtocolError(f"view {view.number} commits operation {sequence}, which is not complete here")
        return self._begin()

    # Helpers

    def _living(self, view: View) -> tuple[int, ...]:
        return tuple(rank for rank in self.ranks if rank in view.ranks)

    def _heed(self, view: View) -> Verdict:
        """Note and return the verdict of a view on the group; after a revocation, verdicts do not matter any more."""
        verdict = next((verdict for verdict in view.verdicts if verdict.group == self.group), None)
        if verdict is None or self.is_revoked:
            return Verdict(self.group, self.returned + 1, Fate.REDO)
        self.pending |= verdict.pending
        self._over = verdict.sequence - (verdict.fate in (Fate.REDO, Fate.REVOKE))
        if verdict.fate is Fate.REVOKE:
            self._revoked_at = verdict.sequence
            self.gives_up = True  # ranks that do not have the group yet learn it from every later view
        return verdict

    def _is_headless(self) -> bool:
        return self._root >= 0 and self._root not in self.live

    def _begin(self) -> RunOperation | Raised | Revoked:
        # Operations that ended on other ranks before the revocation have raised if they do not return here. A rank that
        # starts another operation called it differently, and would wait for ever.
        if self._revoked_at and (self.returned + 1 >= self._revoked_at or not self._is_headless()):
            self.phase = _IDLE
            return Revoked(self.returned + 1)
        if self._is_headless():
            return self._raise()
        self.phase = _RUNNING
        return RunOperation(self.returned + 1, self.attempt, self.live)

    def _return(self, attempt: int, contributors: tuple[int, ...]) -> Returned:
        self.returned += 1
        self.phase = _IDLE
        return Returned(self.returned, attempt, contributors)

    def _raise(self) -> Raised:
        self.returned += 1
        self.phase = _IDLE
        return Raised(self.returned, self._root)
