from __future__ import annotations

from typing import Any

import msgspec
import pytest

from covey.base.errors import RemoteProtocolError
from covey.proto.commit import LENT_PHASES, Commit, Raised, Returned, Revoked, RunOperation
from covey.proto.views import judge
from covey.wire.membership import Fate, State, Verdict, View

LINEAGE = b"l" * 16


def view(number: int, *ranks: int, verdicts: tuple[Verdict, ...] = ()) -> View:
    return View(LINEAGE, number, ranks, ranks[0], verdicts)


class Ranks:
    """The same group at several members, and what each call said."""

    def __init__(self, size: int) -> None:
        self.members = [Commit(7, range(size), rank, view(0, *range(size))) for rank in range(size)]
        self.seen: list[list[Any]] = [[] for _ in self.members]

    def __getitem__(self, rank: int) -> Commit:
        return self.members[rank]

    def note(self, rank: int, outcome: Any) -> None:
        if outcome is not None:
            self.seen[rank].append(outcome)

    def start(self, *ranks: int, root: int = -1) -> None:
        for rank in ranks or range(len(self.members)):
            self.note(rank, self[rank].start(root))

    def complete(self, *ranks: int) -> None:
        for rank in ranks:
            assert self[rank].completed(self[rank].attempt)

    def passes(self, *ranks: int, pending: bool = False) -> None:
        """Let the barrier, which all have entered, let these members through."""
        for rank in ranks:
            self.note(rank, self[rank].passed(self[rank].attempt, pending))

    def change(self, number: int, *ranks: int) -> Verdict:
        """Freeze these members, judge, and install; return the verdict."""
        verdicts = judge({rank: (self[rank].freeze(),) for rank in ranks})
        for rank in ranks:
            self.note(rank, self[rank].install(view(number, *ranks, verdicts=verdicts)))
        return verdicts[0]

    def ends(self, rank: int) -> list[Any]:
        return [outcome for outcome in self.seen[rank] if not isinstance(outcome, RunOperation)]


def test_operations_run_complete_and_return_one_after_another() -> None:
    member = Commit(7, (4, 2), 2, view(3, 2, 4, 5))
    for sequence in (1, 2):
        assert member.start() == RunOperation(sequence, 3, (4, 2))
        assert member.completed(3)
        assert member.passed(3) == Returned(sequence, 3, (4, 2))
        assert member.returned == sequence


def test_an_operation_that_is_complete_with_all_who_are_left_returns_with_the_contributors_it_had() -> None:
    ranks = Ranks(3)
    ranks.start()
    ranks.complete(0, 1)
    assert ranks.change(1, 0, 1) == Verdict(7, 1, Fate.COMMIT)
    assert ranks.ends(0) == ranks.ends(1) == [Returned(1, 0, (0, 1, 2))]


def test_an_operation_that_one_had_returned_returns_with_all_and_the_next_is_redone() -> None:
    ranks = Ranks(3)
    ranks.start()
    ranks.complete(0, 1, 2)
    ranks.passes(0)
    ranks.start(0)
    assert ranks.change(1, 0, 1) == Verdict(7, 2, Fate.REDO)
    assert ranks.ends(0) == ranks.ends(1) == [Returned(1, 0, (0, 1, 2))]
    assert ranks.seen[0][-1] == RunOperation(2, 1, (0, 1))


def test_an_operation_without_its_root_raises_and_the_group_goes_on() -> None:
    ranks = Ranks(3)
    ranks.start(0, root=2)
    ranks.change(1, 0, 1)
    assert ranks.ends(0) == [Raised(1, 2)]
    ranks.start(1, root=2)
    assert ranks.ends(1) == [Raised(1, 2)], "a rank that asks for it later raises as well"
    ranks.start(0, 1)
    ranks.complete(0, 1)
    ranks.passes(0, 1)
    assert ranks.ends(0)[-1] == ranks.ends(1)[-1] == Returned(2, 1, (0, 1))


def test_who_is_behind_by_operations_that_raised_raises_them_too() -> None:
    ranks = Ranks(4)
    ranks.change(1, 0, 1, 2)
    for _ in range(2):
        ranks.start(0, 1, root=3)
    ranks.change(2, 0, 1, 2)
    for _ in range(2):
        ranks.start(2, root=3)
    assert ranks.ends(0) == ranks.ends(1) == ranks.ends(2) == [Raised(1, 3), Raised(2, 3)]


def test_an_operation_asked_for_while_frozen_begins_with_the_view() -> None:
    member = Commit(7, range(2), 0, view(0, 0, 1))
    assert member.freeze() == State(7, (0, 1), 0)
    assert member.start() is None
    assert member.freeze() == State(7, (0, 1), 0), "an answer stays what it was"
    assert member.install(view(1, 0)) == RunOperation(1, 1, (0,))


def test_a_frozen_attempt_neither_completes_nor_returns() -> None:
    ranks = Ranks(2)
    ranks.start()
    ranks.complete(1)
    assert ranks[0].freeze() == State(7, (0, 1), 0, 1, 0)
    assert ranks[1].freeze() == State(7, (0, 1), 0, 1, 0, True)
    assert not ranks[0].completed(0)
    assert ranks[1].passed(0) is None
    assert ranks[0].freeze() == State(7, (0, 1), 0, 1, 0)


def test_a_second_operation_at_once_is_an_error() -> None:
    ranks = Ranks(2)
    ranks.start(0)
    with pytest.raises(RuntimeError, match="operation 1 is not over"):
        ranks.start(0)


def test_a_barrier_that_is_entered_too_early_is_an_error() -> None:
    ranks = Ranks(2)
    ranks.start(0)
    with pytest.raises(RuntimeError, match="barrier of operation 1 was entered before"):
        ranks[0].passed(0)


def test_a_view_that_commits_what_is_not_complete_is_refused() -> None:
    ranks = Ranks(2)
    ranks.start()
    with pytest.raises(RemoteProtocolError, match="commits operation 1, which is not complete"):
        ranks[0].install(view(1, 0, verdicts=(Verdict(7, 1, Fate.COMMIT),)))


def test_what_a_view_raised_stays_raised_for_who_has_not_begun_it() -> None:
    ranks = Ranks(4)
    ranks.start(1, root=3)
    assert ranks.change(1, 0, 1, 2) == Verdict(7, 1, Fate.RAISE)
    ranks[0].give_up()
    assert ranks.change(2, 0, 2) == Verdict(7, 2, Fate.REVOKE), "although only rank 1 has raised it"
    ranks.start(0, 2, root=3)
    ranks.start(0, 2)
    assert ranks.ends(0) == ranks.ends(2) == [Raised(1, 3), Revoked(2)]


# Giving up.


def test_an_operation_that_one_gives_up_is_revoked_on_all_and_so_is_all_that_follows() -> None:
    ranks = Ranks(3)
    ranks.start(0, 1, root=2)
    ranks.complete(0)
    ranks[1].give_up()
    assert ranks.change(1, 0, 1) == Verdict(7, 1, Fate.REVOKE), "although the root is gone as well"
    assert ranks[0].is_revoked
    assert ranks[1].is_revoked
    for _ in range(2):
        ranks.start(0, 1)
    assert ranks.ends(0) == ranks.ends(1) == [Revoked(1)] * 3


def test_who_has_not_begun_what_is_revoked_is_revoked_when_it_does() -> None:
    ranks = Ranks(2)
    ranks.start(0)
    ranks[0].give_up()
    ranks.change(1, 0, 1)
    assert ranks.ends(0) == [Revoked(1)]
    assert ranks.ends(1) == []
    ranks.start(1)
    assert ranks.ends(1) == [Revoked(1)]


def test_an_operation_that_one_of_the_lost_may_have_returned_returns_and_the_next_is_revoked() -> None:
    ranks = Ranks(3)
    ranks.start()
    ranks.complete(0, 1, 2)
    ranks.passes(2)
    ranks[0].give_up()
    assert ranks.change(1, 0, 1) == Verdict(7, 2, Fate.REVOKE)
    ranks.start(0, 1)
    assert ranks.ends(0) == ranks.ends(1) == [Returned(1, 0, (0, 1, 2)), Revoked(2)]
    assert ranks[0].returned == 1


def test_who_is_behind_ends_what_the_others_ended_before_it_is_revoked() -> None:
    ranks = Ranks(4)
    ranks.start()
    ranks.complete(0, 1, 2, 3)
    ranks.passes(0)
    ranks[0].give_up()
    assert ranks.change(1, 0, 1, 2) == Verdict(7, 2, Fate.REVOKE)
    assert ranks.ends(1) == [Returned(1, 0, (0, 1, 2, 3))]
    ranks = Ranks(4)
    ranks.change(1, 0, 1, 2)
    ranks.start(0, root=3)
    ranks[2].give_up()
    assert ranks.change(2, 0, 1, 2) == Verdict(7, 2, Fate.REVOKE)
    ranks.start(1, root=3)
    ranks.start(1)
    assert ranks.ends(1) == [Raised(1, 3), Revoked(2)]


def test_a_revoked_group_stays_revoked_where_it_was_whoever_is_lost() -> None:
    ranks = Ranks(4)
    ranks.change(1, 0, 1, 2)
    ranks.start(0, root=3)
    ranks[0].give_up()
    assert ranks.change(2, 0, 1, 2) == Verdict(7, 2, Fate.REVOKE)
    assert ranks.change(3, 1, 2) == Verdict(7, 2, Fate.REVOKE), "although no remaining rank has raised the first"
    ranks.start(1, 2, root=3)
    ranks.start(1, 2)
    assert ranks.ends(1) == ranks.ends(2) == [Raised(1, 3), Revoked(2)]
    late = Commit(7, range(4), 2, view(3, 1, 2, verdicts=(Verdict(7, 2, Fate.REVOKE),)))
    assert late.start(root=3) == Raised(1, 3), "a rank that makes the group later learns it from the view"
    assert late.start() == Revoked(2)


def test_who_called_something_else_is_revoked_rather_than_left_waiting() -> None:
    ranks = Ranks(3)
    ranks.change(1, 0, 1)
    ranks.start(0, root=2)
    ranks.start(1)
    ranks[0].give_up()
    assert ranks.change(2, 0, 1) == Verdict(7, 2, Fate.REVOKE)
    assert ranks.ends(1) == [Revoked(1)]


def test_a_wish_that_comes_after_the_freeze_waits_for_the_next_view() -> None:
    ranks = Ranks(2)
    ranks.start()
    verdicts = judge({rank: (ranks[rank].freeze(),) for rank in (0, 1)})
    ranks[0].give_up()
    for rank in (0, 1):
        ranks.note(rank, ranks[rank].install(view(1, 0, 1, verdicts=verdicts)))
    assert (ranks[0].gives_up, ranks[0].is_revoked) == (True, False)
    assert ranks.change(2, 0, 1) == Verdict(7, 1, Fate.REVOKE)
    assert ranks.ends(0) == ranks.ends(1) == [Revoked(1)]


# What all know.


def test_a_change_that_one_knows_of_is_pending_for_all_as_of_the_same_operation() -> None:
    ranks = Ranks(4)
    ranks.start()
    ranks.complete(0, 1, 2, 3)
    ranks.passes(0, 3, pending=True)
    assert [one.pending for one in ranks.members] == [True, False, False, True]
    assert ranks.change(1, 0, 1, 2) == Verdict(7, 2, Fate.REDO, True)
    assert [one.pending for one in ranks.members] == [True, True, True, True]
    ranks.start(0, 1, 2)
    ranks.complete(0, 1, 2)
    ranks.passes(0, 1, 2, pending=False)
    assert all(one.pending for one in ranks.members), "it sticks"


def test_what_only_the_lost_know_is_pending_for_nobody() -> None:
    ranks = Ranks(3)
    ranks.start()
    ranks.complete(0, 1, 2)
    ranks.passes(2, pending=True)
    assert ranks.change(1, 0, 1) == Verdict(7, 1, Fate.COMMIT)
    assert [ranks[rank].pending for rank in (0, 1)] == [False, False]


def test_only_the_word_of_the_foremost_counts() -> None:
    states = {0: (State(7, (0, 1), 5, pending=False),), 1: (State(7, (0, 1), 4, 5, 0, True, pending=True),)}
    assert judge(states) == (Verdict(7, 6, Fate.REDO, False),)


# The schedules that break without a rule. Each is played with the rule, and without it.


@pytest.mark.parametrize("is_frozen", [True, False])
def test_who_goes_on_after_its_answer_returns_what_the_others_redo(is_frozen: bool) -> None:
    """Rank 2 has sent all its tokens and dies. Rank 1 says it is not complete; then its last bytes arrive."""
    ranks = Ranks(3)
    ranks.start()
    ranks.complete(0, 2)
    states = {rank: (ranks[rank].freeze(),) for rank in (0, 1)}
    ranks[1].is_frozen = is_frozen
    assert ranks[1].completed(0) is not is_frozen
    assert ranks[1].passed(0) == (None if is_frozen else Returned(1, 0, (0, 1, 2)))
    assert judge(states) == (Verdict(7, 1, Fate.REDO),), "this is what the others do"


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_barrier_of_an_older_attempt_would_speak_for_who_is_not_complete(is_marked: bool) -> None:
    """Rank 1 hears that all have passed attempt 0 when it has been frozen, and complete in attempt 1."""
    ranks = Ranks(3)
    ranks.start()
    ranks.complete(1)
    ranks.change(1, 0, 1)
    ranks.complete(1)
    ranks.note(1, ranks[1].passed(0 if is_marked else 1))
    assert ranks.ends(1) == ([] if is_marked else [Returned(1, 1, (0, 1))])
    if not is_marked:
        with pytest.raises(RemoteProtocolError, match="not complete here"):  # rank 1 returned, rank 0 never can
            ranks.change(2, 0, 1)


@pytest.mark.parametrize("is_in_view", [True, False])
def test_a_verdict_that_is_judged_again_differs_when_another_has_died(is_in_view: bool) -> None:
    """Ranks 0 and 1 are complete, 2 is not. View 1 is accepted and installed at 0 only; then 2 and the proposer die."""
    ranks = Ranks(4)
    ranks.start()
    ranks.complete(0, 1)
    states = {rank: (ranks[rank].freeze(),) for rank in (0, 1, 2)}
    accepted = view(1, 0, 1, 2, verdicts=judge(states))
    again = msgspec.structs.replace(accepted, verdicts=judge({1: states[1]}))
    assert ranks[0].install(accepted) == RunOperation(1, 1, (0, 1, 2)), "rank 0 runs it again without rank 3"
    found = ranks[1].install(accepted if is_in_view else again)
    assert found == (RunOperation(1, 1, (0, 1, 2)) if is_in_view else Returned(1, 0, (0, 1, 2, 3)))


@pytest.mark.parametrize("is_tried_first", [True, False])
def test_a_revocation_that_comes_before_the_commit_takes_back_a_result(is_tried_first: bool) -> None:
    """All are complete and rank 2 has returned when it dies; the deadline of rank 0 passes meanwhile."""
    ranks = Ranks(3)
    ranks.start()
    ranks.complete(0, 1, 2)
    ranks.passes(2)
    ranks[0].give_up()
    verdicts = judge({rank: (ranks[rank].freeze(),) for rank in (0, 1)})
    if not is_tried_first:
        verdicts = (Verdict(7, 1, Fate.REVOKE),)
    ranks.note(1, ranks[1].install(view(1, 0, 1, verdicts=verdicts)))
    assert (ranks.ends(1) == ranks.ends(2)) is is_tried_first


def test_an_operation_that_the_ranks_called_differently_never_returns() -> None:
    """All have what they take for a result, and wait in the barrier, which none can pass."""
    ranks = Ranks(3)
    ranks.start()
    ranks.complete(0, 1, 2)
    ranks[1].disagree()
    assert ranks.change(1, 0, 1, 2) == Verdict(7, 1, Fate.REVOKE)
    assert [ranks.ends(rank) for rank in range(3)] == [[Revoked(1)]] * 3


def test_who_has_said_that_it_is_complete_stays_so_whatever_it_learns_then() -> None:
    ranks = Ranks(2)
    ranks.start()
    ranks.complete(0, 1)
    state = ranks[0].freeze()
    ranks[0].disagree()
    assert state.complete
    assert ranks[0].freeze().complete


def test_operations_are_lent_only_while_nothing_is_in_progress_or_to_be_decided() -> None:
    ranks = Ranks(2)
    one = ranks[0]
    assert one.lend(0)
    assert not one.lend(1)  # an operation was started that is not over
    ranks.start(0)
    assert not one.lend(0)
    ranks.complete(0)
    ranks.passes(0)
    assert one.lend(1)
    one.freeze()
    assert not one.lend(1)
    one.install(view(1, 0, 1))
    assert one.lend(1)
    one.give_up()
    assert not one.lend(1)


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_lent_operation_that_is_handed_over_counts_as_begun_or_complete(is_complete: bool) -> None:
    """Rank 1 completes it; whether it returns or is tried again depends on how far the lent one of rank 0 is."""
    ranks = Ranks(3)
    ranks.start(root=1)
    ranks.complete(0, 1, 2)
    ranks.passes(0, 1, 2)
    assert ranks[0].lend(1)
    ranks[0].returned = 2  # one that was performed while it was lent
    ranks.start(1)
    ranks.complete(1)
    ranks.passes(1)
    ranks[0].phase = LENT_PHASES[is_complete]
    assert ranks[0].resume() == RunOperation(3, 0, (0, 1, 2))
    assert ranks[0].is_complete == is_complete
    ranks.start(1)
    ranks.complete(1)
    state = ranks[0].freeze()
    assert (state.returned, state.sequence, state.complete, state.root) == (2, 3, is_complete, -1)
    verdict = ranks.change(1, 0, 1)
    assert verdict.fate is (Fate.COMMIT if is_complete else Fate.REDO)
    assert ranks.seen[0][-1] == (Returned(3, 0, (0, 1, 2)) if is_complete else RunOperation(3, 1, (0, 1)))
