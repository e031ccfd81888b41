"""DDP on covey: losses, gradients and optimizer states are those of one process that sees the whole batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.support.torch_ranks import run_torch_ranks
from tests.torch.equality import Trace, adam, batch, moments, share, small_model, start, train, whole
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

wrap = partial(DistributedDataParallel, bucket_cap_mb=0.0005)  # several buckets, even of so few parameters


def plain(rank: int, size: int, store: str, options: dict[str, Any]) -> None:
    start(rank, size, store)
    train(wrap(small_model(), **options), rows=share(rank, size)).close_to(train(small_model()))


class Branches(nn.Module):
    """A common layer, one that some rows take, another for the others, and one that nobody ever uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.common = nn.Linear(8, 8)
        self.ways = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])
        self.unused = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        return self.ways[way](torch.tanh(self.common(x)))


def unused_parameters(rank: int, size: int, store: str) -> None:
    """Ranks take different ways, which change by step."""
    start(rank, size, store)

    def loss_on(who: int, model: nn.Module, step: int) -> torch.Tensor:
        return model(batch(step)[share(who, size)], (who + step) % 2).square().mean()

    alone = train(Branches(), lambda model, step: sum(loss_on(who, model, step) for who in range(size)) / size)
    model = wrap(Branches(), find_unused_parameters=True)
    ours = train(model, partial(loss_on, rank), rows=share(rank, size))
    ours.moments = ours.moments[: len(alone.moments)]  # who never gets a gradient has moments under DDP, of zeros
    ours.close_to(alone)


def accumulation(rank: int, size: int, store: str) -> None:
    """Two batches a step; the gradients of the first stay at home until those of the second go out."""
    start(rank, size, store)
    rows = share(rank, size)

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        first = model(batch(step)[rows]).square().mean()
        if not isinstance(model, DistributedDataParallel):
            return first + model(batch(step + 50)).sin().mean()
        with model.no_sync():
            first = model(batch(step)[rows]).square().mean()
            first.backward()
        return model(batch(step + 50)[rows]).sin().mean()

    ours = train(wrap(small_model()), loss_of, rows=rows)
    rows = slice(None)
    alone = train(small_model(), loss_of)
    ours.losses = alone.losses  # ours are of the second batch only
    ours.close_to(alone)


def autocast(rank: int, size: int, store: str) -> None:
    start(rank, size, store)
    rows = share(rank, size)

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch(step)[rows]).square().mean()

    ours = train(wrap(small_model()), loss_of, rows=rows)
    rows = slice(None)
    _close_in_half_precision(ours, train(small_model(), loss_of))


def _close_in_half_precision(ours: Trace, alone: Trace) -> None:
    """Adam turns a gradient that is nearly 0 into a step of either sign: losses and gradients are compared."""
    ours.parameters, ours.moments = alone.parameters, alone.moments
    ours.close_to(alone, rtol=0.05, atol=0.01)


def half_hook(rank: int, size: int, store: str) -> None:
    start(rank, size, store)
    model = wrap(small_model())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    _close_in_half_precision(train(model, rows=share(rank, size)), train(small_model()))


def power_hook(rank: int, size: int, store: str) -> None:
    """With matrices of full rank PowerSGD loses nothing.

    Its callbacks start operations. With several buckets those race with backward's own, on any backend: one bucket.
    """
    start(rank, size, store)
    model = wrap(small_model(), bucket_cap_mb=25)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=16, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, rows=share(rank, size)).close_to(train(small_model()), rtol=1e-3, atol=1e-4)
    assert state.compression_stats()[1] > 0


def sparse_gradients(rank: int, size: int, store: str) -> None:
    start(rank, size, store)
    table = wrap(nn.Embedding(6, 3, sparse=True))
    table(torch.tensor([rank, 5])).sum().backward()
    expected = torch.tensor([1 / size if row < size else float(row == 5) for row in range(6)])
    torch.testing.assert_close(table.module.weight.grad.to_dense()[:, 0], expected)


def uneven_inputs(rank: int, size: int, store: str) -> None:
    """Rank r runs out of batches after r + 1 steps; those who have none count as zeros, or do not count."""
    start(rank, size, store)
    for they_count in (True, False):
        model, alone = wrap(small_model()), small_model()
        ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, alone))
        with model.join(divide_by_initial_world_size=they_count):
            for step in range(rank + 1):
                ours.zero_grad()
                model(batch(step)[share(rank, size)]).square().mean().backward()
                ours.step()
        for step in range(size):
            theirs.zero_grad()
            losses = [alone(batch(step)[share(who, size)]).square().mean() for who in range(step, size)]
            (sum(losses) / (size if they_count else len(losses))).backward()
            theirs.step()
        torch.testing.assert_close(list(map(whole, model.parameters())), list(map(whole, alone.parameters())))


def zero_redundancy(rank: int, size: int, store: str) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    start(rank, size, store)
    alone, model = small_model(), wrap(small_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    expected = train(alone, optimizer=(reference := adam(alone)))
    ours = train(model, rows=share(rank, size), optimizer=optimizer)
    assert 0 < len(moments(optimizer.optim)) < len(expected.moments)  # a rank keeps its part
    ours.moments = expected.moments
    ours.close_to(expected)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        got, want = optimizer.state_dict()["state"], reference.state_dict()["state"]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


class Compilable(nn.Module):
    """torch compiles no forward of its own modules unless one of ours calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = small_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def compiled(rank: int, size: int, store: str) -> None:
    """Both ways round: the compiler sees what DDP does in forward, and what it calls in backward."""
    from torch._dynamo.backends.debugging import aot_eager

    start(rank, size, store)
    alone = train(small_model())
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    for model in (
        torch.compile(wrap(Compilable(), bucket_cap_mb=1), backend=count),
        wrap(torch.compile(Compilable(), backend=count), bucket_cap_mb=1),
    ):
        graphs.clear()
        torch._dynamo.reset()  # it would use the graphs of the first for the second
        train(model, rows=share(rank, size)).close_to(alone)
        assert graphs


def refused(rank: int, size: int, store: str) -> None:
    """torch's words, whatever the backend: once it does these on the CPU, they belong among the programs above."""
    from torch.nn.parallel.distributed import _MixedPrecision

    start(rank, size, store)
    normal = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        wrap(normal)
    halves = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="cpu backend doesn't support events"):
        wrap(small_model(), mixed_precision=halves)(batch(0))


@pytest.mark.thorough
def test_torch_itself_refuses_sync_batch_norm_and_mixed_precision_of_ddp_on_the_cpu() -> None:
    run_torch_ranks(2, refused)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        pytest.param(1, {}, marks=pytest.mark.thorough),
        (2, {}),
        pytest.param(4, {}, marks=pytest.mark.thorough),
        pytest.param(2, {"bucket_cap_mb": 25}, marks=pytest.mark.thorough),
        (3, {"gradient_as_bucket_view": True}),
        (2, {"static_graph": True}),
    ],
    ids=str,
)
def test_ddp_trains_as_one_process_does(size: int, options: dict[str, Any]) -> None:
    run_torch_ranks(size, plain, options)


def compiled_by_inductor(rank: int, size: int, store: str) -> None:
    """The compiler that torch uses by default also compiles collectives that it sees."""
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    start(rank, size, store)
    alone = train(small_model())
    train(torch.compile(wrap(Compilable(), bucket_cap_mb=1)), rows=share(rank, size)).close_to(alone)

    @torch.compile
    def reduce(x: torch.Tensor) -> torch.Tensor:
        added = functional.all_reduce(2 * x, "sum", dist.group.WORLD)
        return functional.reduce_scatter_tensor(
            functional.all_gather_tensor(added + 1, 0, dist.group.WORLD), "sum", 0, dist.group.WORLD
        )

    expected = size * (2 * sum(range(1, size + 1)) + 1)
    torch.testing.assert_close(reduce(torch.full((4,), float(rank + 1))), torch.full((4,), float(expected)))


@pytest.mark.parametrize(
    ("program", "size"),
    [
        (unused_parameters, 3),
        (accumulation, 2),
        (autocast, 2),
        (half_hook, 2),
        (power_hook, 2),
        (sparse_gradients, 3),
        (uneven_inputs, 3),
        (zero_redundancy, 2),
        pytest.param(compiled, 2, marks=pytest.mark.thorough),
        pytest.param(compiled_by_inductor, 2, marks=pytest.mark.thorough),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_ddp_trains_as_one_process_does_with(program: Any, size: int) -> None:
    run_torch_ranks(size, program)
