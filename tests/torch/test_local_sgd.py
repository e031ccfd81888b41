"""Parameters that are averaged now and then, against the average computed in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.support.torch_ranks import run_torch_ranks
from tests.torch.gloo_ranks import be_a_rank, run_ranks
from torch.distributed.fsdp import fully_shard

from covey.base.errors import ConfigError
from covey.torch.training.local_sgd import LocalSGD, flat, parts

if TYPE_CHECKING:
    from pathlib import Path

EVERY, STEPS, SIZE = 3, 8, 3


def model_of(rank: int) -> torch.nn.Module:
    torch.manual_seed(rank)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()


def train(model: torch.nn.Module, rank: int, step: int) -> None:
    """One step of plain SGD on data that no other rank and no other step has."""
    data = torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * rank + step), dtype=torch.float64)
    gradients = torch.autograd.grad(model(data).square().sum(), list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter -= 0.05 * gradient


def body(rank: int) -> dict[str, Any]:
    model = model_of(rank)
    local = LocalSGD(model, every=EVERY)
    averaged = []
    for step in range(1, STEPS + 1):
        if step == 5:  # a new one, between two averages
            state, local = local.state_dict(), LocalSGD(kept := model_of(9), every=EVERY)
            kept.load_state_dict(model.state_dict())
            model = kept
            local.load_state_dict(state)
        train(model, rank, step)
        averaged.append(local.step())
    pair = dist.new_group([1, 2])
    if rank in (1, 2):
        within = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(within.weight, rank)
        averager = LocalSGD(within, every=1, process_group=pair)
        start = within.weight.tolist()
        with torch.no_grad():
            within.weight += rank
        averager.step()
        return {"model": model.state_dict(), "averaged": averaged, "pair": (start, within.weight.tolist())}
    return {"model": model.state_dict(), "averaged": averaged}


def test_ranks_meet_at_the_average_and_train_alone_between(tmp_path: Path) -> None:
    results = run_ranks("tests.torch.test_local_sgd", SIZE, tmp_path)
    models = [model_of(0) for _ in range(SIZE)]
    for step in range(1, STEPS + 1):
        for rank, model in enumerate(models):
            train(model, rank, step)
        if step % EVERY == 0:
            for together in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([p.detach() for p in together]).mean(0)
                for parameter in together:
                    parameter.data.copy_(mean)
    for rank, result in enumerate(results):
        assert result["averaged"] == [step % EVERY == 0 for step in range(1, STEPS + 1)]
        for name, expected in models[rank].state_dict().items():
            torch.testing.assert_close(result["model"][name], expected, rtol=1e-12, atol=1e-12)
    assert not torch.equal(results[0]["model"]["0.weight"], results[1]["model"]["0.weight"])  # two steps alone
    assert results[1]["pair"] == results[2]["pair"] == ([[1.0, 1.0]], [[2.5, 2.5]])


def test_a_row_of_tensors_keeps_shapes_and_widens_halves() -> None:
    tensors = [torch.arange(6.0).view(2, 3).t(), torch.tensor(7.0, dtype=torch.bfloat16), torch.empty(0)]
    row = flat(tensors)
    assert row.dtype == torch.float32
    assert all(torch.equal(part, tensor.float()) for part, tensor in zip(parts(row, tensors), tensors, strict=True))
    assert flat([*tensors, torch.zeros(1, dtype=torch.float64)]).dtype == torch.float64
    assert flat(tensors[:1]).data_ptr() != tensors[0].data_ptr()


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="every=0"):
        LocalSGD(model_of(0), every=0)
    with pytest.raises(ConfigError, match="no parameter"):
        LocalSGD(model_of(0).requires_grad_(False), every=1)
    complex_ = torch.nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ConfigError, match="weight is complex; averaging"):
        LocalSGD(complex_, every=1)


def change_what_is_trained(rank: int, size: int, store: str) -> dict[str, list[Any]]:
    """Freeze, thaw and add parameters of many kinds between averages; return where each of them was after each."""
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size)
    model = torch.nn.Module()
    model.trained = torch.nn.Parameter((torch.arange(6.0).view(2, 3) + rank).t())  # not contiguous
    model.frozen = torch.nn.Parameter(torch.full((), rank + 5.0, dtype=torch.float64), requires_grad=False)
    model.whole = torch.nn.Parameter(torch.tensor([2**40 + 3 + rank]), requires_grad=False)  # no float32 has it
    model.spiral = torch.nn.Parameter(torch.tensor([complex(rank, 1 - rank)]), requires_grad=False)
    model.register_buffer("own", torch.tensor(float(rank)))
    local = LocalSGD(model, every=1)
    found: dict[str, list[Any]] = {}

    def note() -> None:
        for name, tensor in model.state_dict().items():
            found.setdefault(name, []).append(tensor.tolist())

    note()
    for turn in range(3):
        if turn == 1:
            model.frozen.requires_grad_(True)
            model.trained.requires_grad_(False)
        if turn == 2:
            model.added = torch.nn.Parameter(torch.full((4,), 7.0 * rank))
        with torch.no_grad():
            for parameter in (model.trained, model.frozen):
                parameter += rank
        assert local.step()
        note()
    sharded = fully_shard(torch.nn.Linear(4, 4))
    for is_trained in (True, False):
        with pytest.raises(ConfigError, match="weight is sharded; averaging over ranks needs whole"):
            LocalSGD(torch.nn.Sequential(sharded.requires_grad_(is_trained), torch.nn.Linear(1, 1)), every=1)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter of the model requires a gradient"):
        local.step()
    return found


def test_all_begin_with_rank_0s_parameters_and_average_those_that_are_trained_at_the_moment() -> None:
    for rank, found in enumerate(run_torch_ranks(SIZE, change_what_is_trained)):
        moves = (0.0, 1.0, 1.0 + rank, 1.0 + 2 * rank)
        assert found == {
            "trained": [[[more, more + 3], [more + 1, more + 4], [more + 2, more + 5]] for more in moves],
            "frozen": [5.0, 5.0 + rank, 7.0, 8.0],
            "whole": [[2**40 + 3]] * 4,
            "spiral": [[1j]] * 4,
            "own": [rank] * 4,
            "added": [[7.0] * 4],
        }


if __name__ == "__main__":
    be_a_rank(body)
