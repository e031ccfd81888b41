"""Sharded, split and pipelined models on covey: what they go through is what one process with the whole of it does."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from tests.support.torch_ranks import run_torch_ranks
from tests.torch.equality import (
    STEPS,
    Trace,
    adam,
    average,
    batch,
    moments,
    share,
    small_model,
    start,
    train,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

# Sharded data parallel


def sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for index in (0, 2, 4):
        fully_shard(model[index], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp2(rank: int, size: int, store: str) -> None:
    start(rank, size, store)
    mesh = init_device_mesh("cpu", (size,))
    rows, alone = share(rank, size), train(small_model())
    train(sharded(small_model(), mesh), rows=rows).close_to(alone)
    train(sharded(small_model(), mesh, reshard_after_forward=False), rows=rows).close_to(alone)

    halves = sharded(small_model(), mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
    ours = train(halves, rows=rows)
    ours.parameters, ours.moments = alone.parameters, alone.moments  # Adam makes steps of gradients near 0
    ours.close_to(alone, rtol=0.1, atol=0.02)


def accumulated(rank: int, size: int, store: str) -> None:
    """Two batches a step, of which the first stays unreduced."""
    start(rank, size, store)
    rows, model = share(rank, size), sharded(small_model(), init_device_mesh("cpu", (size,)))

    def in_two(model: Any, step: int) -> torch.Tensor:
        model.set_requires_gradient_sync(False)
        model(batch(step)[rows]).square().mean().backward()
        model.set_requires_gradient_sync(True)
        return model(batch(step + 50)[rows]).sin().mean()

    ours = train(model, in_two, rows=rows)
    alone = train(small_model(), lambda m, step: m(batch(step)).square().mean() + m(batch(step + 50)).sin().mean())
    ours.losses = alone.losses  # ours are of the second batch only
    ours.close_to(alone)


def hsdp(rank: int, size: int, store: str) -> None:
    """Replicas of pairs that share."""
    start(rank, size, store)
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
    train(sharded(small_model(), mesh), rows=share(rank, size)).close_to(train(small_model()))


def fsdp1(rank: int, size: int, store: str) -> None:
    start(rank, size, store)
    alone = small_model()
    expected = train(alone)
    model = FullyShardedDataParallel(small_model(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = adam(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step)[share(rank, size)]).square().mean()
        loss.backward()
        torch.testing.assert_close(average(loss), expected.losses[step])
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        ours = [whole(p) for p in model.parameters()]
    torch.testing.assert_close(ours, expected.parameters, rtol=1e-4, atol=1e-5)


# Split layers


class Block(nn.Module):
    """A sequence of 4 through a norm and two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def _sequence_loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step).reshape(3, 4, 8)).square().mean()


def tensor_parallel(rank: int, size: int, store: str) -> None:
    start(rank, size, store)
    mesh = init_device_mesh("cpu", (size,))
    model = parallelize_module(small_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model).close_to(train(small_model()))
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
    }
    sequence = parallelize_module(Block(), mesh, plan)

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        out = model(batch(step).reshape(3, 4, 8))
        return DTensor.from_local(out, mesh, [Shard(1)]).full_tensor().square().mean()

    train(sequence, loss_of).close_to(train(Block(), _sequence_loss))


def two_dimensions(rank: int, size: int, store: str) -> None:
    """FSDP2 across pairs of ranks that split layers between them."""
    start(rank, size, store)
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    data = mesh["data"]
    model = parallelize_module(small_model(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = sharded(model, data)
    train(model, rows=share(data.get_local_rank(), data.size())).close_to(train(small_model()))


# DTensor


def redistribute(rank: int, size: int, store: str) -> None:
    """From everything to everything, of a tensor whose rows and columns do not divide evenly, and its gradient back."""
    start(rank, size, store)
    meshes = [init_device_mesh("cpu", (size,))]
    if size == 4:
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns")))
    full = torch.arange(35.0).reshape(7, 5)
    solid = (Replicate(), Shard(0), Shard(1))
    for mesh in meshes:
        befores, afters = product((*solid, Partial()), repeat=mesh.ndim), product(solid, repeat=mesh.ndim)
        for before, after in product(befores, afters):  # none becomes partial: torch keeps that to itself
            moved = _placed(full, mesh, before).redistribute(mesh, after)
            assert moved.placements == after
            torch.testing.assert_close(moved.full_tensor(), full, msg=lambda text, b=before, a=after: f"{b} {a} {text}")
    leaf = distribute_tensor(full, meshes[0], [Shard(0)]).requires_grad_()
    (leaf.redistribute(meshes[0], [Shard(1)]).square().sum().full_tensor() / 2).backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), full)
    left, right = (distribute_tensor(full, meshes[0], [Shard(dim)]) for dim in (1, 0))
    torch.testing.assert_close((left @ right.t().redistribute(meshes[0], [Shard(0)])).full_tensor(), full @ full.t())


def _placed(full: torch.Tensor, mesh: DeviceMesh, placement: tuple[Any, ...]) -> DTensor:
    """Return a tensor placed like that; where its sums are partial, the first rank along the mesh has it, others 0."""
    solid = [Replicate() if each.is_partial() else each for each in placement]
    local = distribute_tensor(full, mesh, solid).to_local()
    if any(each.is_partial() and mesh.get_local_rank(dim) for dim, each in enumerate(placement)):
        local = torch.zeros_like(local)
    return DTensor.from_local(local, mesh, placement, shape=full.shape, stride=full.stride())


# Pipelines


def pipeline(rank: int, size: int, store: str, schedule: Any, stages: int) -> None:
    """Layers in a row, `stages` of them on each rank."""
    start(rank, size, store)
    count = size * stages

    def layers() -> list[nn.Module]:
        torch.manual_seed(11)
        return [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(count)]

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    alone, own = nn.Sequential(*layers()), list(range(rank, count, size))
    targets = [batch(step + 70) for step in range(STEPS)]
    expected = train(alone, lambda model, step: loss_of(model(batch(step)), targets[step]))
    mine = [layers()[index] for index in own]
    optimizer = adam(nn.ModuleList(mine))
    parts = [PipelineStage(layer, index, count, torch.device("cpu")) for layer, index in zip(mine, own, strict=True)]
    schedule = schedule(parts if stages > 1 else parts[0], n_microbatches=4, loss_fn=loss_of)
    trace = Trace()
    for step in range(STEPS):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        given = (batch(step),) if rank == 0 else ()
        wanted = {"target": targets[step], "losses": losses} if own[-1] == count - 1 else {}
        schedule.step(*given, **wanted)
        if losses:
            trace.losses.append(torch.stack(losses).mean().detach())
        trace.gradients.append([whole(p.grad) for layer in mine for p in layer.parameters()])
        optimizer.step()
    trace.parameters = [whole(p) for layer in mine for p in layer.parameters()]
    trace.moments = moments(optimizer)
    here = {id(p) for index in own for p in alone[index].parameters()}
    is_here = [id(p) in here for p in alone.parameters()]
    expected.losses = expected.losses if trace.losses else []
    expected.gradients = [_chosen(step, is_here) for step in expected.gradients]
    expected.parameters = _chosen(expected.parameters, is_here)
    expected.moments = _chosen(expected.moments, [flag for flag in is_here for _ in range(3)])
    trace.close_to(expected)


def _chosen(tensors: list[torch.Tensor], flags: list[bool]) -> list[torch.Tensor]:
    return [tensor for tensor, flag in zip(tensors, flags, strict=True) if flag]


@pytest.mark.parametrize(
    ("program", "size"),
    [
        pytest.param(fsdp2, 2, marks=pytest.mark.thorough),
        (fsdp2, 3),
        pytest.param(accumulated, 2, marks=pytest.mark.thorough),
        pytest.param(hsdp, 4, marks=pytest.mark.thorough),
        pytest.param(fsdp1, 2, marks=pytest.mark.thorough),
        pytest.param(tensor_parallel, 2, marks=pytest.mark.thorough),
        pytest.param(two_dimensions, 4, marks=pytest.mark.thorough),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_sharded_model_trains_as_a_whole_one_does(program: Any, size: int) -> None:
    run_torch_ranks(size, program)


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.thorough)])
def test_a_dtensor_is_the_same_wherever_its_parts_are_moved(size: int) -> None:
    run_torch_ranks(size, redistribute)


@pytest.mark.parametrize(
    ("schedule", "size", "stages"),
    [
        pytest.param(ScheduleGPipe, 3, 1, marks=pytest.mark.thorough),
        (Schedule1F1B, 3, 1),
        pytest.param(Schedule1F1B, 2, 1, marks=pytest.mark.thorough),
        pytest.param(ScheduleInterleaved1F1B, 2, 2, marks=pytest.mark.thorough),
        (ScheduleInterleavedZeroBubble, 2, 2),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_pipeline_trains_as_its_layers_in_one_process_do(schedule: Any, size: int, stages: int) -> None:
    run_torch_ranks(size, pipeline, schedule, stages)
