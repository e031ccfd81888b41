"""Single-decree Paxos about the next view ("The Part-Time Parliament"), one member's two roles in it.

The *acceptor* promises ballots and accepts views; what it has bound itself to outlives its process (`Record`). The
*proposal* is the work of who started a ballot: gather promises, choose, gather acceptances. Ballots go on counting from
one view to the next, so who holds the highest is also who leads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.proto.views import judge, largest_company, next_tie_breaker
from covey.wire.membership import Promise, Record, Seat, Successor, View

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable


def first_record(members: Iterable[Seat], lineage: bytes, *, anchor: int = 0, has_keeper: bool = False) -> Record:
    """Return what a member of view 0 knows; `anchor` is its first tie-breaker and, without a keeper, leader."""
    seats = tuple(members)
    return Record(seats, View(lineage, 0, tuple(range(len(seats))), anchor), len(seats) if has_keeper else anchor)


def without(successor: Successor, lost: Collection[Seat]) -> Successor | None:
    """Return a generation without the members that were lost before it began; None if none is left."""
    members = tuple(member for member in successor.members if member not in lost)
    if len(members) == len(successor.members) or not members:
        return successor if members else None
    first = successor.members[successor.tie_breaker]
    tie_breaker = members.index(first) if first in members else 0
    return Successor(successor.generation, successor.lineage, members, tie_breaker)


class Acceptor:
    """What a member has bound itself to. Whoever changes it has the `record` made durable before anything is said."""

    def __init__(self, record: Record) -> None:
        self.members: tuple[Seat, ...] = record.members
        self.view = record.view
        self.promised = record.promised
        self.accepted_ballot = record.accepted_ballot
        self.accepted = record.accepted

    @property
    def record(self) -> Record:
        """What to write down."""
        return Record(self.members, self.view, self.promised, self.accepted_ballot, self.accepted)

    def accept(self, ballot: int, view: View) -> None:
        """Bind this member to a view in the promised ballot."""
        self.accepted_ballot, self.accepted = ballot, view

    def install(self, view: View) -> None:
        """Begin with the instance after `view`: nothing is accepted in it."""
        self.view, self.accepted_ballot, self.accepted = view, -1, None


class Proposal:
    """One ballot of this member's own for the view after `base`."""

    def __init__(
        self, ballot: int, base: View, now: float, is_well: Callable[[int], bool] = lambda _place: True
    ) -> None:
        """`is_well` tells what the proposer thinks of those who answered: they may have died since."""
        self.ballot, self.base = ballot, base
        self._is_well = is_well
        self.answers: dict[int, Promise] = {}
        self.view: View | None = None
        """What is proposed, once it is."""
        self.accepted_by: set[int] = set()
        self.changed_at = now
        """When an answer last told something new."""

    def answered(self, place: int, promise: Promise, now: float) -> None:
        """Take an answer of this ballot."""
        if self.answers.get(place) != promise:
            self.answers[place], self.changed_at = promise, now

    @property
    def found(self) -> View | None:
        """What was accepted in the latest ballot that anybody knows of: it may be decided, so it is to be proposed."""
        last = max(self.answers.values(), key=lambda answer: answer.accepted_ballot)
        return last.accepted if last.accepted_ballot >= 0 else None

    def company(self) -> tuple[int, ...]:
        """Return the most of those who could be in the view that all hear each other."""
        return largest_company(self._live(), self.base.tie_breaker)

    def left_out(self) -> Collection[int]:
        """Return those who could be in the view but would not be: some others do not hear them."""
        return self._live().keys() - self.company()

    def wish_of(self, company: Collection[int]) -> Successor | None:
        """Return the generation in which all of these want to go on, if they said the same one."""
        wishes = {self.answers[rank].successor for rank in company}
        return wishes.pop() if len(wishes) == 1 else None

    def awaits_wishes(self) -> bool:
        """Tell whether some want to go on in the next generation, and others are about to say that they do, too.

        A member that was stopped in the middle of an operation cannot know yet: its view has to tell what became of it.
        """
        answers = [self.answers[rank] for rank in self.company()]
        silent = [answer.states or () for answer in answers if answer.successor is None]
        is_any_stopped = any(state.sequence for states in silent for state in states)
        return 0 < len(silent) < len(answers) and not is_any_stopped

    def value(self, company: Collection[int], successor: Successor | None = None) -> View:
        """Return the view of these members, with what becomes of the operations of each group.

        Without any, the run is over. `successor` is the generation in which they go on, if this one ends.
        """
        base, number = self.base, self.base.number + 1
        if not company:
            is_finished = any(answer.is_finished for answer in self.answers.values())
            return View(base.lineage, number, (), base.tie_breaker, is_finished=is_finished)
        answers = {rank: states for rank in company if (states := self.answers[rank].states) is not None}
        tie_breaker = next_tie_breaker(base, company)
        return View(base.lineage, number, tuple(sorted(company)), tie_breaker, judge(answers), successor)

    def _live(self) -> dict[int, tuple[int, ...]]:
        candidates = ((place, answer) for place, answer in self.answers.items() if answer.states is not None)
        return {place: answer.hears for place, answer in candidates if self._is_well(place)}
