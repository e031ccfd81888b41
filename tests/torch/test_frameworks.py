"""What frameworks that were written with gloo in mind do with a process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.support.sets import first
from tests.support.torch_ranks import run_torch_ranks
from tests.torch import frameworks
from torch.distributed import distributed_c10d as c10d

from covey import ConfigError
from covey.torch import replace
from covey.torch.backend.replacement import is_meant

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("backend", first(1, ["gloo", None, "cpu:gloo,cuda:nccl"]))
def test_a_program_that_asks_for_gloo_gets_covey_and_still_sees_gloo(backend: str | None) -> None:
    run_torch_ranks(3, frameworks.as_gloo, backend)


def test_covey_takes_the_place_only_of_the_named_backend() -> None:
    assert [is_meant(each, "gloo") for each in ("gloo", "cpu:gloo,cuda:nccl", "undefined")] == [True] * 3
    assert [is_meant(each, "gloo") for each in ("covey", "nccl", "cpu:covey,cuda:nccl", "fake")] == [False] * 4
    with pytest.raises(ConfigError, match="'mpi', only of gloo"):
        replace("mpi")
    assert not hasattr(c10d._new_process_group_helper, "__wrapped__")


@pytest.mark.parametrize(
    ("program", "size"),
    [
        (frameworks.integer_means, 3),
        (frameworks.builtin_hooks, 2),
        (frameworks.errors_of_torch, 2),
        (frameworks.endless_barriers, 2),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_ranks_get_what_gloo_or_nccl_would_give_them(program: Callable[..., Any], size: int) -> None:
    run_torch_ranks(size, program)


@pytest.mark.parametrize("dims", first(1, [4, 2]))
def test_batches_are_normalized_as_by_one_process_with_the_whole_batch(dims: int) -> None:
    run_torch_ranks(3, frameworks.batch_norm, dims)
