from __future__ import annotations

from typing import Any

import msgspec
import pytest

from covey.base.errors import RemoteProtocolError
from covey.proto.commit import Commit, Raised, Returned, Revoked, Run
from covey.proto.views import judge
from covey.wire.membership import Fate, State, Verdict, View

LINEAGE = b"l" * 16


def view(number: int, *ranks: int, verdicts: tuple[Verdict, ...] = ()) -> View:
    return View(LINEAGE, number, ranks, ranks[0], verdicts)


class Crew:
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
        return [outcome for outcome in self.seen[rank] if not isinstance(outcome, Run)]


def test_operations_run_complete_and_return_one_after_another() -> None:
    member = Commit(7, (4, 2), 2, view(3, 2, 4, 5))
    for sequence in (1, 2):
        assert member.start() == Run(sequence, 3, (4, 2))
        assert member.completed(3)
        assert member.passed(3) == Returned(sequence, 3, (4, 2))
        assert member.returned == sequence


def test_an_operation_that_is_complete_with_all_who_are_left_returns_with_the_contributors_it_had() -> None:
    crew = Crew(3)
    crew.start()
    crew.complete(0, 1)
    assert crew.change(1, 0, 1) == Verdict(7, 1, Fate.COMMIT)
    assert crew.ends(0) == crew.ends(1) == [Returned(1, 0, (0, 1, 2))]


def test_an_operation_that_one_had_returned_returns_with_all_and_the_next_is_redone() -> None:
    crew = Crew(3)
    crew.start()
    crew.complete(0, 1, 2)
    crew.passes(0)
    crew.start(0)
    assert crew.change(1, 0, 1) == Verdict(7, 2, Fate.REDO)
    assert crew.ends(0) == crew.ends(1) == [Returned(1, 0, (0, 1, 2))]
    assert crew.seen[0][-1] == Run(2, 1, (0, 1))


def test_an_operation_without_its_root_raises_and_the_group_goes_on() -> None:
    crew = Crew(3)
    crew.start(0, root=2)
    crew.change(1, 0, 1)
    assert crew.ends(0) == [Raised(1, 2)]
    crew.start(1, root=2)
    assert crew.ends(1) == [Raised(1, 2)], "whoever asks for it later raises as well"
    crew.start(0, 1)
    crew.complete(0, 1)
    crew.passes(0, 1)
    assert crew.ends(0)[-1] == crew.ends(1)[-1] == Returned(2, 1, (0, 1))


def test_who_is_behind_by_operations_that_raised_raises_them_too() -> None:
    crew = Crew(4)
    crew.change(1, 0, 1, 2)
    for _ in range(2):
        crew.start(0, 1, root=3)
    crew.change(2, 0, 1, 2)
    for _ in range(2):
        crew.start(2, root=3)
    assert crew.ends(0) == crew.ends(1) == crew.ends(2) == [Raised(1, 3), Raised(2, 3)]


def test_an_operation_asked_for_while_frozen_begins_with_the_view() -> None:
    member = Commit(7, range(2), 0, view(0, 0, 1))
    assert member.freeze() == State(7, (0, 1), 0)
    assert member.start() is None
    assert member.freeze() == State(7, (0, 1), 0), "an answer stays what it was"
    assert member.install(view(1, 0)) == Run(1, 1, (0,))


def test_a_frozen_attempt_neither_completes_nor_returns() -> None:
    crew = Crew(2)
    crew.start()
    crew.complete(1)
    assert crew[0].freeze() == State(7, (0, 1), 0, 1, 0)
    assert crew[1].freeze() == State(7, (0, 1), 0, 1, 0, True)
    assert not crew[0].completed(0)
    assert crew[1].passed(0) is None
    assert crew[0].freeze() == State(7, (0, 1), 0, 1, 0)


def test_a_second_operation_at_once_is_an_error() -> None:
    crew = Crew(2)
    crew.start(0)
    with pytest.raises(RuntimeError, match="operation 1 is not over"):
        crew.start(0)


def test_a_barrier_that_is_entered_too_early_is_an_error() -> None:
    crew = Crew(2)
    crew.start(0)
    with pytest.raises(RuntimeError, match="barrier of operation 1 was entered before"):
        crew[0].passed(0)


def test_a_view_that_commits_what_is_not_complete_is_refused() -> None:
    crew = Crew(2)
    crew.start()
    with pytest.raises(RemoteProtocolError, match="commits operation 1, which is not complete"):
        crew[0].install(view(1, 0, verdicts=(Verdict(7, 1, Fate.COMMIT),)))


def test_what_a_view_raised_stays_raised_for_who_has_not_begun_it() -> None:
    crew = Crew(4)
    crew.start(1, root=3)
    assert crew.change(1, 0, 1, 2) == Verdict(7, 1, Fate.RAISE)
    crew[0].give_up()
    assert crew.change(2, 0, 2) == Verdict(7, 2, Fate.REVOKE), "although only rank 1 has raised it"
    crew.start(0, 2, root=3)
    crew.start(0, 2)
    assert crew.ends(0) == crew.ends(2) == [Raised(1, 3), Revoked(2)]


# Giving up.


def test_an_operation_that_one_gives_up_is_revoked_on_all_and_so_is_all_that_follows() -> None:
    crew = Crew(3)
    crew.start(0, 1, root=2)
    crew.complete(0)
    crew[1].give_up()
    assert crew.change(1, 0, 1) == Verdict(7, 1, Fate.REVOKE), "although the root is gone as well"
    assert crew[0].is_revoked
    assert crew[1].is_revoked
    for _ in range(2):
        crew.start(0, 1)
    assert crew.ends(0) == crew.ends(1) == [Revoked(1)] * 3


def test_who_has_not_begun_what_is_revoked_is_revoked_when_it_does() -> None:
    crew = Crew(2)
    crew.start(0)
    crew[0].give_up()
    crew.change(1, 0, 1)
    assert crew.ends(0) == [Revoked(1)]
    assert crew.ends(1) == []
    crew.start(1)
    assert crew.ends(1) == [Revoked(1)]


def test_an_operation_that_one_of_the_lost_may_have_returned_returns_and_the_next_is_revoked() -> None:
    crew = Crew(3)
    crew.start()
    crew.complete(0, 1, 2)
    crew.passes(2)
    crew[0].give_up()
    assert crew.change(1, 0, 1) == Verdict(7, 2, Fate.REVOKE)
    crew.start(0, 1)
    assert crew.ends(0) == crew.ends(1) == [Returned(1, 0, (0, 1, 2)), Revoked(2)]
    assert crew[0].returned == 1


def test_who_is_behind_ends_what_the_others_ended_before_it_is_revoked() -> None:
    crew = Crew(4)
    crew.start()
    crew.complete(0, 1, 2, 3)
    crew.passes(0)
    crew[0].give_up()
    assert crew.change(1, 0, 1, 2) == Verdict(7, 2, Fate.REVOKE)
    assert crew.ends(1) == [Returned(1, 0, (0, 1, 2, 3))]
    crew = Crew(4)
    crew.change(1, 0, 1, 2)
    crew.start(0, root=3)
    crew[2].give_up()
    assert crew.change(2, 0, 1, 2) == Verdict(7, 2, Fate.REVOKE)
    crew.start(1, root=3)
    crew.start(1)
    assert crew.ends(1) == [Raised(1, 3), Revoked(2)]


def test_a_revoked_group_stays_revoked_where_it_was_whoever_is_lost() -> None:
    crew = Crew(4)
    crew.change(1, 0, 1, 2)
    crew.start(0, root=3)
    crew[0].give_up()
    assert crew.change(2, 0, 1, 2) == Verdict(7, 2, Fate.REVOKE)
    assert crew.change(3, 1, 2) == Verdict(7, 2, Fate.REVOKE), "although nobody who is left has raised the first"
    crew.start(1, 2, root=3)
    crew.start(1, 2)
    assert crew.ends(1) == crew.ends(2) == [Raised(1, 3), Revoked(2)]
    late = Commit(7, range(4), 2, view(3, 1, 2, verdicts=(Verdict(7, 2, Fate.REVOKE),)))
    assert late.start(root=3) == Raised(1, 3), "who makes the group later learns it from the view"
    assert late.start() == Revoked(2)


def test_who_called_something_else_is_revoked_rather_than_left_waiting() -> None:
    crew = Crew(3)
    crew.change(1, 0, 1)
    crew.start(0, root=2)
    crew.start(1)
    crew[0].give_up()
    assert crew.change(2, 0, 1) == Verdict(7, 2, Fate.REVOKE)
    assert crew.ends(1) == [Revoked(1)]


def test_a_wish_that_comes_after_the_freeze_waits_for_the_next_view() -> None:
    crew = Crew(2)
    crew.start()
    verdicts = judge({rank: (crew[rank].freeze(),) for rank in (0, 1)})
    crew[0].give_up()
    for rank in (0, 1):
        crew.note(rank, crew[rank].install(view(1, 0, 1, verdicts=verdicts)))
    assert (crew[0].gives_up, crew[0].is_revoked) == (True, False)
    assert crew.change(2, 0, 1) == Verdict(7, 1, Fate.REVOKE)
    assert crew.ends(0) == crew.ends(1) == [Revoked(1)]


# What all know.


def test_a_change_that_one_knows_of_is_pending_for_all_as_of_the_same_operation() -> None:
    crew = Crew(4)
    crew.start()
    crew.complete(0, 1, 2, 3)
    crew.passes(0, 3, pending=True)
    assert [one.pending for one in crew.members] == [True, False, False, True]
    assert crew.change(1, 0, 1, 2) == Verdict(7, 2, Fate.REDO, True)
    assert [one.pending for one in crew.members] == [True, True, True, True]
    crew.start(0, 1, 2)
    crew.complete(0, 1, 2)
    crew.passes(0, 1, 2, pending=False)
    assert all(one.pending for one in crew.members), "it sticks"


def test_what_only_the_lost_know_is_pending_for_nobody() -> None:
    crew = Crew(3)
    crew.start()
    crew.complete(0, 1, 2)
    crew.passes(2, pending=True)
    assert crew.change(1, 0, 1) == Verdict(7, 1, Fate.COMMIT)
    assert [crew[rank].pending for rank in (0, 1)] == [False, False]


def test_only_the_word_of_the_foremost_counts() -> None:
    states = {0: (State(7, (0, 1), 5, pending=False),), 1: (State(7, (0, 1), 4, 5, 0, True, pending=True),)}
    assert judge(states) == (Verdict(7, 6, Fate.REDO, False),)


# The schedules that break without a rule. Each is played with the rule, and without it.


@pytest.mark.parametrize("is_frozen", [True, False])
def test_who_goes_on_after_its_answer_returns_what_the_others_redo(is_frozen: bool) -> None:
    """Rank 2 has sent all its tokens and dies. Rank 1 says it is not complete; then its last bytes arrive."""
    crew = Crew(3)
    crew.start()
    crew.complete(0, 2)
    states = {rank: (crew[rank].freeze(),) for rank in (0, 1)}
    crew[1].is_frozen = is_frozen
    assert crew[1].completed(0) is not is_frozen
    assert crew[1].passed(0) == (None if is_frozen else Returned(1, 0, (0, 1, 2)))
    assert judge(states) == (Verdict(7, 1, Fate.REDO),), "this is what the others do"


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_barrier_of_an_older_attempt_would_speak_for_who_is_not_complete(is_marked: bool) -> None:
    """Rank 1 hears that all have passed attempt 0 when it has been frozen, and complete in attempt 1."""
    crew = Crew(3)
    crew.start()
    crew.complete(1)
    crew.change(1, 0, 1)
    crew.complete(1)
    crew.note(1, crew[1].passed(0 if is_marked else 1))
    assert crew.ends(1) == ([] if is_marked else [Returned(1, 1, (0, 1))])
    if not is_marked:
        with pytest.raises(RemoteProtocolError, match="not complete here"):  # rank 1 returned, rank 0 never can
            crew.change(2, 0, 1)


@pytest.mark.parametrize("is_in_view", [True, False])
def test_a_verdict_that_is_judged_again_differs_when_another_has_died(is_in_view: bool) -> None:
    """Ranks 0 and 1 are complete, 2 is not. View 1 is accepted and installed at 0 only; then 2 and the proposer die."""
    crew = Crew(4)
    crew.start()
    crew.complete(0, 1)
    states = {rank: (crew[rank].freeze(),) for rank in (0, 1, 2)}
    accepted = view(1, 0, 1, 2, verdicts=judge(states))
    again = msgspec.structs.replace(accepted, verdicts=judge({1: states[1]}))
    assert crew[0].install(accepted) == Run(1, 1, (0, 1, 2)), "rank 0 runs it again without rank 3"
    found = crew[1].install(accepted if is_in_view else again)
    assert found == (Run(1, 1, (0, 1, 2)) if is_in_view else Returned(1, 0, (0, 1, 2, 3)))


@pytest.mark.parametrize("is_tried_first", [True, False])
def test_a_revocation_that_comes_before_the_commit_takes_back_a_result(is_tried_first: bool) -> None:
    """All are complete and rank 2 has returned when it dies; the deadline of rank 0 passes meanwhile."""
    crew = Crew(3)
    crew.start()
    crew.complete(0, 1, 2)
    crew.passes(2)
    crew[0].give_up()
    verdicts = judge({rank: (crew[rank].freeze(),) for rank in (0, 1)})
    if not is_tried_first:
        verdicts = (Verdict(7, 1, Fate.REVOKE),)
    crew.note(1, crew[1].install(view(1, 0, 1, verdicts=verdicts)))
    assert (crew.ends(1) == crew.ends(2)) is is_tried_first


def test_an_operation_that_the_ranks_called_differently_never_returns() -> None:
    """All have what they take for a result, and wait in the barrier, which none can pass."""
    crew = Crew(3)
    crew.start()
    crew.complete(0, 1, 2)
    crew[1].disagree()
    assert crew.change(1, 0, 1, 2) == Verdict(7, 1, Fate.REVOKE)
    assert [crew.ends(rank) for rank in range(3)] == [[Revoked(1)]] * 3


def test_who_has_said_that_it_is_complete_stays_so_whatever_it_learns_then() -> None:
    crew = Crew(2)
    crew.start()
    crew.complete(0, 1)
    state = crew[0].freeze()
    crew[0].disagree()
    assert state.complete
    assert crew[0].freeze().complete
