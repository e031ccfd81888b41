"""`on_loss="continue"` under torch: steps finish among those who are left, and what is missing is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.torch_ranks import Lost, run_torch_ranks
from tests.torch import surviving

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ALL, LEFT = [0, 1, 2], [0, 1]


def is_close(got: list[Any], want: list[Any]) -> bool:
    return all(torch.allclose(*map(torch.tensor, pair), atol=1e-6) for pair in zip(got, want, strict=True))


def test_ddp_finishes_the_step_in_which_a_rank_is_killed_and_goes_on(promised: Callable[[float], float]) -> None:
    *survivors, lost = run_torch_ranks(3, surviving.lose_one_in_ddp)
    assert lost is Lost
    (first, _), (second, _) = survivors
    assert first == second
    # The last layer's bucket may have gone out before: whose gradients are in it depends on when the kill came.
    wanted = [surviving.train_alone([ALL, LEFT, LEFT, LEFT], 1, layers) for layers in ([], [2])]
    assert any(is_close(first, want) for want in wanted)
    assert max(seconds for _, seconds in survivors) < promised(5)


@pytest.mark.parametrize(
    ("everywhere", "inside"),
    [
        ("covey", "covey"),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in (("covey", "gloo"), ("gloo", "gloo"))),
    ],
)
def test_fsdp2_finishes_the_step_in_which_a_replica_is_killed_and_goes_on(
    everywhere: str, inside: str, promised: Callable[[float], float]
) -> None:
    *survivors, third, fourth = run_torch_ranks(4, surviving.lose_a_replica, everywhere, inside)
    assert third is fourth is Lost
    (first, _), (second, _) = survivors
    assert first == second
    want = surviving.train_alone([[0, 1, 2, 3], [0, 1], [0, 1], [0, 1]], 1, [])
    assert is_close(first, want)
    assert max(seconds for _, seconds in survivors) < promised(5)


def test_fsdp2_without_replicas_is_told_which_shard_is_lost(promised: Callable[[float], float]) -> None:
    *survivors, lost = run_torch_ranks(3, surviving.lose_a_shard)
    assert lost is Lost
    for text, seconds, total in survivors:
        assert "rank 2" in text
        assert "its part of all_gather" in text
        assert seconds < promised(5)
        assert total == [3.0, 3.0, 3.0]


def test_fsdp2_that_keeps_what_it_gathered_finishes_the_step_in_which_a_shard_is_lost(
    promised: Callable[[float], float],
) -> None:
    *survivors, lost = run_torch_ranks(3, surviving.lose_a_shard_after_forward)
    assert lost is Lost
    for rank, (gradients, text, seconds) in enumerate(survivors):
        assert is_close(gradients, surviving.gradients_alone(LEFT, 1, 3, rank))
        assert "rank 2" in text
        assert "its part of all_gather" in text
        assert seconds < promised(5)


@pytest.mark.parametrize("size", [3])
def test_what_means_something_without_the_lost_finishes_and_the_rest_names_them(size: int) -> None:
    first, lost, last = run_torch_ranks(size, surviving.name_the_missing)
    assert lost is Lost
    for rank, said in ((0, first), (2, last)):
        assert said["sum"] == [2.0, 2.0]
        assert said["contributors"] == [0, 2]
        assert said["mean"] == [1.0, 1.0]
        assert {said[name] for name in ("all_gather", "all_gather_object", "all_to_all", "broadcast", "send")} == {1}
        assert said["gather"] == (1 if rank == 0 else "fine")
        assert said["scattered"] == [2.0 * rank] * 3


def test_rare_meetings_average_over_those_who_are_left() -> None:
    *survivors, lost = run_torch_ranks(3, surviving.meet_rarely)
    assert lost is Lost
    assert survivors == [[pytest.approx(-0.5)] * 3] * 2


def test_groups_of_some_ranks_name_the_lost_by_their_own_numbers_and_a_group_of_the_others_has_no_holes(
    tmp_path: Path,
) -> None:
    returned = run_torch_ranks(4, surviving.work_in_groups, str(tmp_path))
    assert returned[1] is Lost
    for rank in (0, 2, 3):
        said = returned[rank]
        assert said["every"] == ([13.0, 3.0], [0, 2, 3])
        if rank == 3:  # 1 and 3 are ranks 0 and 1 of that group
            assert said["lost in"] == ([8.0, 1.0], [1])
            assert said["lost in, gathered"] == 0
            assert said["lost in, again"] == ([8.0, 1.0], [1])
        else:
            assert said["without"] == ([5.0, 2.0], [0, 1])
            assert said["without, gathered"] == [10.0, 12.0]
        assert said["holes"] == [1] * 9
        assert said["averaged share"] == pytest.approx([(2 * rank + more) * 8 / 3 for more in (0, 1)])
        assert rank != 2 or said["mean at 2"] == pytest.approx(5 / 3)
        assert said["given"] == 5.0 + rank
        assert said["sparse"] == [6.0, 0.0, 1.0, 1.0]
        assert said["left"] == ([13.0, 3.0], [0, 1, 2])
        assert said["objects"] == [{"rank": other} for other in (0, 2, 3)]
        assert said["loaded"] == (2, [0.0, 2.0, 4.0])
