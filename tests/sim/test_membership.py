"""Whole runs that lose members in a world with a virtual clock: whatever happens, there is one sequence of
views, and an operation ends in the same way on all members on which it ends.

A failing seed prints its story; `python -m covey.lab.churn --seed N` tells it again.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from tests.support.hash_seeds import printed_with_another_hash_seed
from tests.support.plays import performed
from tests.support.seeds import batches, seeds

from covey.lab.churn import Play, play_of
from covey.lab.invariants import BrokenError
from covey.lab.workers import Age, Bytes, Job, Token, Worker
from covey.proto import views
from covey.proto.ballot import PaxosAcceptor, Proposal
from covey.proto.commit import Commit
from covey.wire.membership import Fate, Record, State, Verdict, View, decode_membership, encode_membership


def perform(seed: int) -> Play:
    return performed(play_of(seed))


@pytest.mark.parametrize("batch", batches(3))
def test_two_hundred_runs_among_crashes_cuts_and_stops_keep_the_invariants(batch: int) -> None:
    totals = sum((perform(seed).count() for seed in range(200 * batch, 200 * batch + 200)), Counter[str]())
    assert all(
        totals[what] > 5 for what in ("views", "operations that raised", "groups that were revoked", "members excluded")
    ), totals
    assert totals["operations that returned"] > 1000


def test_runs_keep_the_invariants_when_messages_travel_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    outgoing = Worker.outgoing

    def travel(message: Any) -> Any:
        return message if isinstance(message, Bytes | Token) else decode_membership(encode_membership(message))

    monkeypatch.setattr(Worker, "outgoing", lambda self: [(to, travel(message)) for to, message in outgoing(self)])
    for seed in seeds(20):
        perform(seed)


# What a rule is for shows when it is gone.

Patches = list[tuple[Any, str, Any]]


def without_the_freeze() -> Patches:
    freeze = Commit.freeze

    def answer_and_go_on(self: Commit) -> State:
        state = freeze(self)
        self.is_frozen = False
        return state

    return [(Commit, "freeze", answer_and_go_on)]


def without_attempts() -> Patches:
    age = Job.age

    def of_any_attempt(self: Job, sequence: int, attempt: int) -> Age:
        return age(self, sequence, max(attempt, self.commit.attempt))

    return [(Job, "age", of_any_attempt)]


def without_the_knowledge_in_the_verdict() -> Patches:
    install = Commit.install

    def ignore_pending(self: Commit, view: View) -> Any:
        verdicts = tuple(msgspec.structs.replace(verdict, pending=False) for verdict in view.verdicts)
        return install(self, msgspec.structs.replace(view, verdicts=verdicts))

    return [(Commit, "install", ignore_pending)]


def without_the_commit_before_the_revocation() -> Patches:
    judge_group = views._judge_group

    def revoke_first(group: int, states: dict[int, State], clique: Any) -> Verdict:
        verdict = judge_group(group, states, clique)
        due = 1 + max(state.returned for state in states.values())
        return msgspec.structs.replace(verdict, sequence=due) if verdict.fate is Fate.REVOKE else verdict

    return [(views, "_judge_group", revoke_first)]


def without_the_verdict_in_the_view() -> Patches:
    found = vars(Proposal)["found"].fget
    assert found is not None

    def judge_again(self: Proposal) -> View | None:
        view: View | None = found(self)
        if view is None:
            return None
        here = {rank: one.states for rank, one in self.answers.items() if one.states is not None and rank in view.ranks}
        return msgspec.structs.replace(view, verdicts=views.judge(here))

    return [(Proposal, "found", property(judge_again))]


def half(view: View, ranks: Any) -> bool:
    return 2 * len(set(ranks) & set(view.ranks)) >= len(view.ranks)


CUTS = {"sizes": (3, 4), "faults": ("partition", "cut", "crash"), "gagging": 0.9}
LATE = {"sizes": (3, 5), "faults": ("crash",), "giving_up": 1.0}
MUTANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "takes any member for a quorum": ([(views, "is_quorum", lambda view, ranks: bool(ranks))], {}),
    "takes any half for a quorum": ([(views, "is_quorum", half)], {"sizes": (2, 4)}),
    "does not write down what it accepted": (
        [(PaxosAcceptor, "record", property(lambda self: Record(self.members, self.view, self.promised)))],
        CUTS,
    ),
    "does not write down what it promised": (
        [(PaxosAcceptor, "record", property(lambda self: msgspec.structs.replace(record(self), promised=0)))],
        CUTS,
    ),
    "does not finish what was accepted": ([(Proposal, "found", property(lambda self: None))], CUTS),
    "goes on after it answered": (without_the_freeze(), {}),
    "takes bytes of any attempt": (without_attempts(), {"sizes": (3, 5), "crawling": 1.0}),
    "judges again what was accepted": (without_the_verdict_in_the_view(), CUTS),
    "returns by a verdict and ignores what the others know": (without_the_knowledge_in_the_verdict(), {}),
    "revokes what one of the lost may have returned": (without_the_commit_before_the_revocation(), LATE),
}


def record(acceptor: PaxosAcceptor) -> Record:
    view = acceptor.view
    return Record(acceptor.members, view, acceptor.promised, acceptor.accepted_ballot, acceptor.accepted)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_simulation_notices_a_member_that(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patches, circumstances = MUTANTS[mutant]
    for name, value in circumstances.items():
        monkeypatch.setattr(Play, name, value)
    for owner, name, rule in patches:
        monkeypatch.setattr(owner, name, rule)
    for seed in range(1000):
        try:
            Play(seed).perform()
        except BrokenError:
            return
    pytest.fail(f"1000 runs with a member that {mutant}, and nothing was noticed")


@pytest.mark.parametrize("circumstances", [CUTS, LATE, {"sizes": (3, 5), "crawling": 1.0}, {"sizes": (2, 4)}])
def test_under_the_same_circumstances_real_members_keep_the_invariants(
    circumstances: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in circumstances.items():
        monkeypatch.setattr(Play, name, value)
    for seed in seeds(50):
        perform(8 * seed)


def test_a_run_is_the_same_whatever_the_hash_seed_is() -> None:
    story = play_of(5).story()
    there = printed_with_another_hash_seed("-m", "covey.lab.churn", "--seed", "5")
    assert there == story + "\n"
    assert "INSTALLS" in story
    assert "RETURNS" in story
    assert "IS REVOKED" in story
    assert story.endswith("all well")
