"""Who waits for whom, from answers that arrive at different moments."""

from __future__ import annotations

from covey.watch.waits import RankPosition, slow_rank, waits
from covey.wire.progress import GroupProgress


def position(
    rank: int, sequence: int, age: float, *, is_running: bool, arrived: float = 100.0, group: str = "run", **more: bool
) -> RankPosition:
    progress = GroupProgress(group, rank, 4, sequence, 0, is_running, int(age * 1e9), 0)
    return RankPosition(rank, arrived, (progress,), **more)


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
