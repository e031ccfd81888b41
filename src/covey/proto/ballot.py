"""Single-decree Paxos about the next view ("The Part-Time Parliament"), one member's two roles in it.

The *acceptor* promises ballots and accepts views; what it is bound to outlives its process (`Record`). The *proposal*
belongs to the member that started a ballot: it collects promises, chooses a view, and collects acceptances. Ballot
numbers keep growing from one view to the next, so the owner of the highest one also leads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.proto.views import judge, largest_clique, next_tie_breaker
from covey.wire.membership import MemberKey, Promise, Record, Successor, View

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable


def first_record(members: Iterable[MemberKey], lineage: bytes, *, anchor: int = 0, has_keeper: bool = False) -> Record:
    """Return the record of a member of view 0; `anchor` is the first tie-breaker and, without a keeper, the leader."""
    seats = tuple(members)
    return Record(seats, View(lineage, 0, tuple(range(len(seats))), anchor), len(seats) if has_keeper else anchor)


def without(successor: Successor, lost: Collection[MemberKey]) -> Successor | None:
    """Return a generation without members that were lost before it began; None if none remain."""
    members = tuple(member for member in successor.members if member not in lost)
    if len(members) == len(successor.members) or not members:
        return successor if members else None
    first = successor.members[successor.tie_breaker]
    tie_breaker = members.index(first) if first in members else 0
    return Successor(successor.generation, successor.lineage, members, tie_breaker)


class PaxosAcceptor:
    """What a member is bound to. After a change, `record` must be durable before anything is sent."""

    def __init__(self, record: Record) -> None:
        self.members: tuple[MemberKey, ...] = record.members
        self.view = record.view
        self.promised = record.promised
        self.accepted_ballot = record.accepted_ballot
        self.accepted = record.accepted

    @property
    def record(self) -> Record:
        """What to make durable."""
        return Record(self.members, self.view, self.promised, self.accepted_ballot, self.accepted)

    def accept(self, ballot: int, view: View) -> None:
        """Bind this member to a view in the promised ballot."""
        self.accepted_ballot, self.accepted = ballot, view

    def install(self, view: View) -> None:
        """Begin the instance after `view`, in which nothing is accepted yet."""
        self.view, self.accepted_ballot, self.accepted = view, -1, None


class Proposal:
    """One ballot of this member for the view after `base`."""

    def __init__(
        self, ballot: int, base: View, now: float, is_well: Callable[[int], bool] = lambda _rank: True
    ) -> None:
        """Begin without answers; `is_well` tells whether a rank that answered is still well."""
        self.ballot, self.base = ballot, base
        self._is_well = is_well
        self.answers: dict[int, Promise] = {}
        self.view: View | None = None
        """The proposed view, once there is one."""
        self.accepted_by: set[int] = set()
        self.changed_at = now
        """When an answer last changed something."""

    def answered(self, rank: int, promise: Promise, now: float) -> None:
        """Take an answer in this ballot."""
        if self.answers.get(rank) != promise:
            self.answers[rank], self.changed_at = promise, now

    @property
    def found(self) -> View | None:
        """The view accepted in the latest known ballot: it may be decided already, so it has to be proposed."""
        last = max(self.answers.values(), key=lambda answer: answer.accepted_ballot)
        return last.accepted if last.accepted_ballot >= 0 else None

    def clique(self) -> tuple[int, ...]:
        """Return the largest set of possible members that all hear each other."""
        return largest_clique(self._live(), self.base.tie_breaker)

    def left_out(self) -> Collection[int]:
        """Return the possible members that are not in the clique, because some others do not hear them."""
        return self._live().keys() - self.clique()

    def wish_of(self, clique: Collection[int]) -> Successor | None:
        """Return the generation in which all of these ranks want to go on, if they named the same one."""
        wishes = {self.answers[rank].successor for rank in clique}
        return wishes.pop() if len(wishes) == 1 else None

    def awaits_wishes(self) -> bool:
        """Tell whether some members have named the next generation, and the others are about to.

        A member that was stopped in an operation cannot name it yet: the view decides the operation first.
        """
        answers = [self.answers[rank] for rank in self.clique()]
        silent = [answer.states or () for answer in answers if answer.successor is None]
        is_any_stopped = any(state.sequence for states in silent for state in states)
        return 0 < len(silent) < len(answers) and not is_any_stopped

    def value(self, clique: Collection[int], successor: Successor | None = None) -> View:
        """Return the view of these members, with the fate of every group's operation.

        Without members, the run is over. `successor` is the next generation, if this one ends.
        """
        base, number = self.base, self.base.number + 1
        if not clique:
            is_finished = any(answer.is_finished for answer in self.answers.values())
            return View(base.lineage, number, (), base.tie_breaker, is_finished=is_finished)
        answers = {rank: states for rank in clique if (states := self.answers[rank].states) is not None}
        tie_breaker = next_tie_breaker(base, clique)
        return View(base.lineage, number, tuple(sorted(clique)), tie_breaker, judge(answers), successor)

    def _live(self) -> dict[int, tuple[int, ...]]:
        staying = ((rank, answer) for rank, answer in self.answers.items() if answer.states is not None)
        return {rank: answer.hears for rank, answer in staying if self._is_well(rank)}
