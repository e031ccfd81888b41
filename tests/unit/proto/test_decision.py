"""Members that vote, die and are started anew, told of each other in any order: a proposal has one outcome."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest

from covey.proto.decision import Decision
from covey.wire.formation import Answer, FoundingMember, Outcome, Row, Standing

if TYPE_CHECKING:
    from collections.abc import Iterator

PLAYS = 3000


def members(size: int) -> tuple[FoundingMember, ...]:
    return tuple(FoundingMember(bytes([rank]) * 32, bytes([rank]) * 16, str(rank), "host", b"") for rank in range(size))


class Vote:
    """One proposal that all have accepted, among members that hear little and die often."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        all_members = members(chance.randint(2, 5))
        self.decisions = [Decision(b"p" * 16, all_members, rank, Answer.ACCEPTED) for rank in range(len(all_members))]
        self.living = set(range(len(all_members)))
        self.ended: set[tuple[int, int]] = set()
        """Pairs of members: the first has met a later life of the second."""
        self.under_way: list[tuple[int, int, Standing]] = []

    def perform(self) -> None:
        chance = self.chance
        ranks = range(len(self.decisions))
        for _ in range(chance.randint(5, 80)):
            actor, other = chance.choice(sorted(self.living)), chance.choice(ranks)
            action = chance.choices(["send", "arrive", "ballot", "die", "meet"], [10, 20, 2, 1, 3])[0]
            if action == "send" and other != actor:
                self.under_way.append((actor, other, self.decisions[actor].standing()))
            elif action == "arrive" and self.under_way:
                self.arrive(*self.under_way.pop(chance.randrange(len(self.under_way))), all_here=chance.random() < 0.5)
            elif action == "ballot" and self.decisions[actor].outcome is Outcome.OPEN:
                self.decisions[actor].start_ballot()
            elif action == "die" and len(self.living) > 1:
                self.living.remove(actor)
            elif action == "meet" and other not in self.living:
                self.meet(actor, other)
            self.check()

    def arrive(self, source: int, target: int, standing: Standing, *, all_here: bool) -> None:
        if target not in self.living or (target, source) in self.ended:
            return
        decision = self.decisions[target]
        if decision.outcome is Outcome.OPEN:
            decision.heard(source, standing)
            decision.advance(all_here=all_here)
        elif standing.outcome is Outcome.OPEN:
            self.under_way.append((target, source, decision.standing()))

    def meet(self, actor: int, dead: int) -> None:
        self.ended.add((actor, dead))
        if self.decisions[actor].outcome is Outcome.OPEN:
            self.decisions[actor].met_later_life(dead)

    def finish(self) -> None:
        """Let all the dead be started anew and the living talk; then the proposal is decided."""
        for actor, other in itertools.product(sorted(self.living), range(len(self.decisions))):
            if other not in self.living:
                self.meet(actor, other)
        first = self.decisions[min(self.living)]
        for _ in range(6):
            if first.outcome is Outcome.OPEN:
                first.start_ballot()
                first.advance(all_here=False)
            for source, target in itertools.permutations(sorted(self.living), 2):
                self.arrive(source, target, self.decisions[source].standing(), all_here=False)
            self.check()
        assert all(self.decisions[rank].outcome is not Outcome.OPEN for rank in self.living), (
            "a member is left in doubt"
        )

    def check(self) -> None:
        found = {rank: self.decisions[rank].outcome for rank in sorted(self.living)}
        assert len(set(found.values()) - {Outcome.OPEN}) <= 1, f"two outcomes: {found}"


def votes() -> Iterator[Vote]:
    for seed in range(PLAYS):
        vote = Vote(seed)
        vote.perform()
        vote.finish()
        yield vote


def test_the_living_never_see_two_outcomes_and_are_not_left_in_doubt_when_the_dead_are_back() -> None:
    outcomes = [vote.decisions[min(vote.living)].outcome for vote in votes()]
    assert outcomes.count(Outcome.COMMIT) > PLAYS / 10
    assert outcomes.count(Outcome.ABORT) > PLAYS / 10


MUTANTS: dict[str, tuple[str, Any]] = {
    "votes in ballot 0 after it promised a later one": ("_may_confirm", lambda self: self._all_accepted()),
    "takes any half for a quorum": ("_is_quorum", lambda self, ranks: 2 * len(ranks) >= len(self.rows)),
    "takes some survivors for all": ("_are_survivors", lambda self, ranks: bool(self._ended)),
    "never lets survivors decide": ("_are_survivors", lambda self, ranks: False),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_these_votes_notice_a_member_that(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decision, *MUTANTS[mutant])
    with pytest.raises(AssertionError, match=r"two outcomes|left in doubt"):
        list(votes())


def test_without_trouble_no_ballot_needs_to_be_started() -> None:
    decisions = [Decision(b"p" * 16, members(3), rank, Answer.ACCEPTED) for rank in range(3)]
    for _ in range(2):  # accepts, then votes
        for source, target in itertools.permutations(range(3), 2):
            decisions[target].heard(source, decisions[source].standing())
            decisions[target].advance(all_here=True)
    assert {decision.outcome for decision in decisions} == {Outcome.COMMIT}
    assert {row.promised for decision in decisions for row in decision.rows} == {0}


def test_one_refusal_ends_a_proposal_and_passes_on_its_reason() -> None:
    first, second, third = (Decision(b"p" * 16, members(3), rank, Answer.ACCEPTED) for rank in range(3))
    first.heard(1, Standing(b"p" * 16, (Row(), Row(Answer.REFUSED, reason="no"), Row()), Outcome.OPEN))
    second.heard(2, third.standing())
    assert first.advance(all_here=True)
    assert first.outcome is Outcome.ABORT
    third.heard(0, first.standing())
    assert third.outcome is Outcome.ABORT
    assert third.rows[1].reason == "no"


def test_survivors_decide_only_when_all_of_them_take_no_more_words_from_the_dead() -> None:
    a, b, c, d = (Decision(b"p" * 16, members(4), rank, Answer.ACCEPTED) for rank in range(4))

    def tell(source: Decision, target: Decision) -> None:
        target.heard(source.rank, source.standing())
        target.advance(all_here=False)

    for decision in (b, c, d):
        tell(decision, a)
    tell(a, b)
    tell(b, a)
    assert (a.outcome, b.outcome) == (Outcome.COMMIT, Outcome.COMMIT)
    last_words = a.standing()  # still under way to d when a and b die; c meets their next lives first
    for dead in (0, 1):
        c.met_later_life(dead)
    c.start_ballot()
    for _ in range(2):
        tell(c, d)
        tell(d, c)
    assert (c.outcome, d.outcome) == (Outcome.OPEN, Outcome.OPEN), "d may yet hear what a and b have done"
    d.heard(0, last_words)
    for dead in (0, 1):
        d.met_later_life(dead)
    tell(d, c)
    assert (c.outcome, d.outcome) == (Outcome.COMMIT, Outcome.COMMIT)
