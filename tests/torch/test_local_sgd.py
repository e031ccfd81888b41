"""Parameters that are averaged now and then, against the average computed in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.torch.gloo_ranks import be_a_rank, run_ranks

from covey.base.errors import ConfigError
from covey.torch.local_sgd import LocalSGD, flat, parts

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


if __name__ == "__main__":
    be_a_rank(body)
