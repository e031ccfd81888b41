"""Who waits for whom, from answers that arrive at different moments."""

from __future__ import annotations

from covey.watch.waits import LinkLoad, LongOperation, RankPosition, long_operation, slow_link, slow_rank, waits
from covey.wire.progress import GroupProgress


def position(
    rank: int,
    sequence: int,
    age: float,
    *,
    is_running: bool,
    arrived: float = 100.0,
    asked: float | None = None,
    group: str = "run",
    is_silent: bool = False,
) -> RankPosition:
    progress = GroupProgress(group, rank, 4, sequence, 0, is_running, int(age * 1e9), 0)
    return RankPosition(rank, arrived, arrived if asked is None else asked, (progress,), is_silent=is_silent)


def test_ranks_in_an_operation_wait_for_the_one_that_has_not_begun_it() -> None:
    positions = [position(rank, 8, 5.0 + rank, is_running=True) for rank in range(3)]
    found = waits([*positions, position(3, 7, 9.0, is_running=False)])
    assert {rank: each.waits_for for rank, each in found.items()} == {0: (3,), 1: (3,), 2: (3,)}
    assert found[2].since == 7.0


def test_a_rank_in_an_earlier_operation_is_waited_for_too() -> None:
    found = waits([position(0, 8, 5.0, is_running=True), position(1, 7, 9.0, is_running=True)])
    assert found[0].waits_for == (1,)
    assert 1 not in found


def test_answers_of_a_fast_loop_that_differ_by_their_moment_mean_nothing() -> None:
    """Rank 1 answered before the operation of rank 0 began: it is not behind."""
    early = position(1, 500, 0.0001, is_running=False, arrived=100.0)
    assert waits([position(0, 9000, 0.001, is_running=True, arrived=100.7), early]) == {}
    assert waits([position(0, 9000, 0.8, is_running=True, arrived=100.7), early]) == {}
    assert waits([position(0, 9000, 1.2, is_running=True, arrived=100.7), early])[0].waits_for == (1,)


def test_an_answer_that_was_long_on_its_way_is_as_old_as_its_question() -> None:
    """Rank 1 was asked before the operation of rank 0 began, and its answer came late over a slow link."""
    waiting = position(0, 9, 1.0, is_running=True, arrived=102.0)
    assert waits([waiting, position(1, 8, 0.5, is_running=True, arrived=102.0, asked=100.5)]) == {}
    assert waits([waiting, position(1, 8, 0.5, is_running=True, arrived=102.0, asked=101.5)])[0].waits_for == (1,)


def test_ranks_that_are_all_in_one_long_operation_wait_for_nobody() -> None:
    assert waits([position(rank, 8, 30.0, is_running=True) for rank in range(4)]) == {}


def test_a_silent_rank_is_waited_for_from_what_is_known_of_it() -> None:
    silent = position(1, 7, 0.0, is_running=False, arrived=90.0, is_silent=True)
    found = waits([position(0, 8, 9.0, is_running=True), silent])
    assert found[0].waits_for == (1,)
    assert found[0].since == 9.0
    assert waits([silent]) == {}


def test_groups_of_other_names_are_not_compared() -> None:
    assert waits([position(0, 8, 5.0, is_running=True), position(1, 1, 5.0, is_running=False, group="other")]) == {}


def test_no_rank_and_one_rank_wait_for_nobody() -> None:
    assert waits([]) == {}
    assert waits([position(0, 8, 5.0, is_running=True)]) == {}
    assert slow_rank({}) is None
    assert slow_rank({0: 0.5}) is None


def test_the_slow_rank_is_the_one_that_is_hardly_ever_in_an_operation() -> None:
    assert slow_rank({0: 0.6, 1: 0.62, 2: 0.01, 3: 0.61}) == (2, 0.6)
    assert slow_rank({0: 0.6, 1: 0.62, 2: 0.4, 3: 0.61}) is None, "it waits as well"
    assert slow_rank({0: 0.05, 1: 0.06, 2: 0.0, 3: 0.05}) is None, "operations take little time"
    assert slow_rank({0: 0.3, 1: 0.0}) == (1, 0.3)


def test_a_link_is_waited_for_if_it_is_full_while_the_ranks_are_in_operations() -> None:
    full, idle = LinkLoad("a", "b", 2e5, 0.97, 4e5), LinkLoad("b", "a", 2e5, 0.3, 4e5)
    assert slow_link([full, idle], [0.9, 0.95, 0.9]) == full
    assert slow_link([full, idle], [0.2, 0.3, 0.9]) is None, "they compute"
    assert slow_link([idle], [0.9]) is None, "nothing is to be sent"
    small = LinkLoad("a", "b", 4e3, 1.0, 8.0)
    assert slow_link([small], [0.9]) is None, "it is the round trip"
    slower = LinkLoad("b", "c", 1e5, 0.9, 4e5)
    assert slow_link([full, slower], [0.9]) == slower
    assert slow_link([full], []) is None


def test_an_operation_that_all_ranks_are_in_for_long_is_told() -> None:
    inside = [position(rank, 8, 5.0 + rank, is_running=True) for rank in range(3)]
    assert long_operation(inside, 101.0) == LongOperation(0, 6.0), "the last that came is in it for 6 s"
    assert long_operation([*inside[:2], position(2, 8, 0.1, is_running=True)], 101.0) is None
    assert long_operation([*inside, position(3, 7, 5.0, is_running=True)], 101.0) is None
    assert long_operation([*inside, position(3, 8, 5.0, is_running=False)], 101.0) is None
    assert long_operation([*inside, position(3, 8, 5.0, is_running=True, is_silent=True)], 101.0) is None
    assert long_operation(inside[:1], 101.0) is None
