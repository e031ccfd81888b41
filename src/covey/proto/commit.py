"""One member's side of a group's operations that are all or nothing.

An operation is *running* until its whole result is in memory that nobody else can write, then *complete*. Whoever is
complete enters a barrier among all who take part, and nobody else does; whoever has *passed* it returns. So if anybody
returned, everybody was complete. What moves the bytes also runs the barrier, over lanes that are made anew for every
attempt, so that nothing of an older one can be taken for the present one. This core hears what became of it.

Before a member answers who proposes a view it is *frozen*: the attempt it is in can neither complete nor return any
more, so its answer stays true until a view is installed. The view's verdict then ends the operation or has it run again
as the attempt of that number:

- it returns what it has, if all who are left are complete, since one of the lost may have returned it;
- it is revoked if somebody gave up: this operation, or the next if this one returns, ends without a result on all
  members, and the group is over for good;
- it raises if its root is gone, and the group goes on;
- else it is tried again from the kept input, without the lost.

The barrier also carries whether anybody knows of a change that is waiting. What it says is known by all who pass it as
of the same operation, and sticks; to those who return by a verdict the view says what the foremost know. So all members
of a view that have returned the same operations know the same (`pending`), and loops that ask for it end together.
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
class Run:
    """Execute the operation among `live` from its kept input; nothing of an earlier attempt may be used."""

    sequence: int
    attempt: int
    live: tuple[int, ...]


@dataclass(slots=True)
class Returned:
    """The operation is over: its result, of these contributors, may be used and its input forgotten."""

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
    """Of the operation after the last that is over."""

    IDLE = enum.auto()
    """Nobody asked for it."""
    ASKED = enum.auto()
    """While frozen: it begins with the next view."""
    RUNNING = enum.auto()
    COMPLETE = enum.auto()


_IDLE, _ASKED, _RUNNING, _COMPLETE = _Phase


class Commit:
    """The operations of one group, one after another, at one member.

    Ranks are those of view 0. Whoever drives it, one call at a time, executes what `Run` says, tells when that is
    `completed`, and only if that was still in time runs the barrier and tells when it is `passed`; before `freeze` it
    stops both.
    """

    __slots__ = (
        "_over",
        "_phase",
        "_revoked_at",
        "_root",
        "attempt",
        "gives_up",
        "group",
        "is_frozen",
        "live",
        "me",
        "pending",
        "ranks",
        "returned",
    )

    def __init__(self, group: int, ranks: Sequence[int], me: int, view: View) -> None:
        """Begin in a view. If members that knew the group before have revoked it already, so it is here."""
        self.group, self.ranks, self.me = group, tuple(ranks), me
        self.returned = 0
        """The last operation that is over. One that was revoked does not count."""
        self.attempt = view.number
        self.live = self._living(view)
        """The ranks of the group that are in the view, in the group's order."""
        self.pending = False
        """All know of a waiting change, as of operation `returned`."""
        self.gives_up = False
        """This member wants the group revoked, or it is. If it is not, a view has to be asked for."""
        self.is_frozen = False
        self._over = 0
        """The last operation that is over by a view's word. Who has not asked for it yet will raise: if it had
        returned anywhere, it would be complete here."""
        self._revoked_at = 0
        """The first operation without an end of its own; 0: there is none."""
        self._phase, self._root = _IDLE, -1
        self._heed(view)

    @property
    def is_revoked(self) -> bool:
        """Whether the group is over for good. Operations that others had ended before may still have to end here."""
        return self._revoked_at > 0

    def start(self, root: int = -1) -> Run | Raised | Revoked | None:
        """Begin the next operation, and say what to do; None if frozen: `install` will say.

        Raises:
            RuntimeError: the last is not over.
        """
        if self._phase is not _IDLE:
            raise RuntimeError(f"operation {self.returned + 1} is not over")
        self._root = root
        if self.is_frozen:
            self._phase = _ASKED
            return None
        return self._begin()

    def completed(self, attempt: int) -> bool:
        """Note that the whole result of this attempt is here, where nobody else can write; False if it is too late."""
        if self._phase is not _RUNNING or attempt != self.attempt or self.is_frozen:
            return False
        self._phase = _COMPLETE
        return True

    def passed(self, attempt: int, pending: bool = False) -> Returned | None:
        """Note that all are complete in this attempt, and if any knows of a waiting change; None if it is too late.

        Raises:
            RuntimeError: this member is not complete, so it cannot have entered the barrier.
        """
        if self._phase is _IDLE or attempt != self.attempt or self.is_frozen:
            return None
        if self._phase is not _COMPLETE:
            raise RuntimeError(f"the barrier of operation {self.returned + 1} was entered before it was complete")
        self.pending |= pending
        return self._return(attempt, self.live)

    def give_up(self) -> None:
        """Want the operation in progress, or the next, to end without a result, and all that follow.

        Its deadline has passed, somebody revoked the group, the ranks called different things. The next view grants it
        if it is asked for before this member freezes; until then everything goes on, and may still return.
        """
        self.gives_up = True

    def disagree(self) -> None:
        """Give up the operation in progress because the ranks called it differently.

        None of them can pass its barrier, in which each compares its call with others, so none can have returned it;
        and what is here is not a result. So it does not count as complete, unless this member is frozen and has said
        that it is.
        """
        self.give_up()
        if self._phase is _COMPLETE and not self.is_frozen:
            self._phase = _RUNNING

    def freeze(self) -> State:
        """Stop the present attempt for good, and say how far this member is."""
        self.is_frozen = True
        is_trying = self._phase is _RUNNING or self._phase is _COMPLETE
        return State(
            self.group,
            self.ranks,
            max(self.returned, self._over),
            self.returned + 1 if is_trying else 0,
            self.attempt if is_trying else 0,
            self._phase is _COMPLETE,
            self._root if is_trying else -1,
            self.pending,
            self.gives_up,
        )

    def install(self, view: View) -> Run | Returned | Raised | Revoked | None:
        """Do what a view says, and thaw; return what becomes of the operation in progress, None if there is none.

        Raises:
            RemoteProtocolError: the view commits what is not complete here; whoever judged did not keep the rules.
        """
        attempt, live, sequence = self.attempt, self.live, self.returned + 1
        self.attempt, self.live, self.is_frozen = view.number, self._living(view), False
        verdict = self._heed(view)
        if self._phase is _IDLE:
            return None
        is_over = sequence < verdict.sequence or verdict.fate is Fate.COMMIT
        if is_over and self._phase is _COMPLETE:
            return self._return(attempt, live)
        if sequence == verdict.sequence and verdict.fate is Fate.RAISE:
            return self._raise()
        if is_over and not self.is_revoked and not self._is_headless():
            raise RemoteProtocolError(f"view {view.number} commits operation {sequence}, which is not complete here")
        return self._begin()

    # How it goes on.

    def _living(self, view: View) -> tuple[int, ...]:
        return tuple(rank for rank in self.ranks if rank in view.ranks)

    def _heed(self, view: View) -> Verdict:
        """Learn what a view says of the group, and return it; once the group is revoked, nothing more is said of it."""
        verdict = next((verdict for verdict in view.verdicts if verdict.group == self.group), None)
        if verdict is None or self.is_revoked:
            return Verdict(self.group, self.returned + 1, Fate.REDO)
        self.pending |= verdict.pending
        self._over = verdict.sequence - (verdict.fate in (Fate.REDO, Fate.REVOKE))
        if verdict.fate is Fate.REVOKE:
            self._revoked_at = verdict.sequence
            self.gives_up = True  # those who do not know the group yet learn it from every view to come
        return verdict

    def _is_headless(self) -> bool:
        return self._root >= 0 and self._root not in self.live

    def _begin(self) -> Run | Raised | Revoked:
        # What others have ended before the group was revoked has raised if it does not return. Who asks for something
        # else called it differently, and would wait for ever.
        if self._revoked_at and (self.returned + 1 >= self._revoked_at or not self._is_headless()):
            self._phase = _IDLE
            return Revoked(self.returned + 1)
        if self._is_headless():
            return self._raise()
        self._phase = _RUNNING
        return Run(self.returned + 1, self.attempt, self.live)

    def _return(self, attempt: int, contributors: tuple[int, ...]) -> Returned:
        self.returned += 1
        self._phase = _IDLE
        return Returned(self.returned, attempt, contributors)

    def _raise(self) -> Raised:
        self.returned += 1
        self._phase = _IDLE
        return Raised(self.returned, self._root)
