"""Programs of ranks that go on when others are lost (`on_loss="continue"`)."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tests.support.waiting import DEADLINE
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import covey
import covey.torch
from covey.torch import DiLoCo, LocalSGD
from covey.torch.training.hooks import rescale_hook

if TYPE_CHECKING:
    from collections.abc import Callable


def start(rank: int, size: int, store: str, backend: str = "covey") -> None:
    os.environ["COVEY_ON_LOSS"] = "continue"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)


def _model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return tuple(torch.randn(4, width, generator=generator) for width in (6, 3))


def _loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = _batch(rank, step)
    return nn.functional.mse_loss(model(inputs), targets)


def train_alone(contributing: list[list[int]], lost_at: int, lost_layers: list[int]) -> list[Any]:
    """Return the parameters after steps whose gradients are means over the ranks in `contributing`.

    In step `lost_at`, the layers of `lost_layers` were averaged before the loss, over the ranks of the step before.
    """
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step, ranks in enumerate(contributing):
        before = contributing[step - 1] if step == lost_at else ranks
        means: list[torch.Tensor] = []
        for group in (ranks, before):
            optimizer.zero_grad()
            for rank in group:
                (_loss(model, rank, step) / len(group)).backward()
            means.append([parameter.grad.clone() for parameter in model.parameters()])
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = means[1 if number // 2 in lost_layers else 0][number]
        optimizer.step()
    return [parameter.tolist() for parameter in model.parameters()]


def lose_one_in_ddp(rank: int, size: int, store: str) -> Any:
    """The last rank is killed in the middle of the second backward; return the parameters of the others after four."""
    start(rank, size, store)
    model = nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=0.0005)
    model.register_comm_hook(None, rescale_hook())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    longest = 0.0
    for step in range(4):
        if rank == size - 1 and step == 1:
            model.module[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        optimizer.zero_grad()
        began = time.monotonic()
        _loss(model, rank, step).backward()
        longest = max(longest, time.monotonic() - began)
        optimizer.step()
    return [parameter.tolist() for parameter in model.module.parameters()], longest


def lose_a_replica(rank: int, size: int, store: str, everywhere: str, inside: str) -> Any:
    """FSDP2 on two replicas of two shards: the second replica is killed in backward, the first one goes on.

    Replicas talk by covey, the shards of one by the backend `inside`; that of the group of all is `everywhere`.
    """
    start(rank, size, store, everywhere)
    mesh = dist.init_device_mesh(
        "cpu",
        (2, 2),
        mesh_dim_names=("replicate", "shard"),
        backend_override={"replicate": "covey", "shard": inside},
    )
    model = _model()
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    longest = 0.0
    for step in range(4):
        optimizer.zero_grad()
        began = time.monotonic()
        loss = _loss(model, rank, step)
        if rank >= 2 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        longest = max(longest, time.monotonic() - began)
        optimizer.step()
    whole = [
        parameter.full_tensor() if isinstance(parameter, DTensor) else parameter for parameter in model.parameters()
    ]
    return [parameter.tolist() for parameter in whole], longest


def lose_a_shard(rank: int, size: int, store: str) -> Any:
    """FSDP2 without replicas: with a rank, its shard is lost, and the others are told so instead of reckoning on."""
    start(rank, size, store)
    model = _model()
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer)
    fully_shard(model)
    _loss(model, rank, 0).backward()
    loss = _loss(model, rank, 1)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        loss.backward()
        _loss(model, rank, 2)
    except (covey.PeerLostError, RuntimeError) as error:
        # The group itself goes on: what needs no lost part works.
        x = torch.ones(3) * (rank + 1)
        dist.all_reduce(x)
        return str(error), time.monotonic() - began, x.tolist()
    return "nothing", 0.0, []


def lose_a_shard_after_forward(rank: int, size: int, store: str) -> Any:
    """FSDP2 that keeps what forward has gathered: the step finishes, and the next one is told whose shard is lost."""
    start(rank, size, store)
    model = _model()
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    loss = _loss(model, rank, 1)
    dist.barrier()  # all have gathered what they need
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    loss.backward()
    seconds = time.monotonic() - began
    gradients = [parameter.grad.to_local().tolist() for parameter in model.parameters()]
    try:
        _loss(model, rank, 2)
    except (covey.PeerLostError, RuntimeError) as error:
        return gradients, str(error), seconds
    return gradients, "nothing", seconds


def gradients_alone(ranks: list[int], step: int, size: int, shard: int) -> list[Any]:
    """Return a shard of the mean gradients over some ranks, of a model that nobody has trained."""
    model = _model()
    for rank in ranks:
        (_loss(model, rank, step) / len(ranks)).backward()
    return [torch.chunk(parameter.grad, size)[shard].tolist() for parameter in model.parameters()]


def name_the_missing(rank: int, size: int, store: str) -> Any:
    """Operations after a loss: those that mean something finish; those whose output would have a hole name the rank."""
    start(rank, size, store)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said: dict[str, Any] = {}
    x = torch.full((2,), float(rank))
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    said["sum"], said["contributors"] = x.tolist(), work.contributors
    average = torch.full((2,), float(rank))
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    said["mean"] = average.tolist()
    outs = [torch.full((1,), -1.0) for _ in range(size)]
    calls = {
        "all_gather": lambda: dist.all_gather(outs, torch.tensor([float(rank)])),
        "all_gather_object": lambda: dist.all_gather_object([None] * size, rank),
        "all_to_all": lambda: dist.all_to_all(outs, [torch.ones(1)] * size),
        "gather": lambda: dist.gather(torch.ones(1), outs if rank == 0 else None, dst=0),
        "broadcast": lambda: dist.broadcast(torch.ones(1), src=1),
        "send": lambda: dist.send(torch.ones(1), 1),
    }
    said |= {name: _lost_rank(call) for name, call in calls.items()}
    scattered = torch.zeros(3)
    dist.reduce_scatter(scattered, [torch.full((3,), float(place)) for place in range(size)])
    said["scattered"] = scattered.tolist()
    dist.barrier()
    return said


def meet_rarely(rank: int, size: int, store: str) -> list[float]:
    """What LocalSGD and DiLoCo average once a rank is lost: each of the others moved from 1 by its rank + 1."""
    start(rank, size, store)
    found = []
    models = [nn.Linear(1, 1, bias=False) for _ in range(3)]
    for model in models:
        nn.init.ones_(model.weight)
    inner = [torch.optim.SGD(model.parameters(), 1.0) for model in models]
    outer = [torch.optim.SGD(model.parameters(), 1.0) for model in models]
    helpers: list[LocalSGD | DiLoCo] = [
        LocalSGD(models[0], every=1),
        DiLoCo(models[1], inner[1], outer[1], every=1),
        DiLoCo(models[2], inner[2], outer[2], every=1, compress="int8"),
    ]
    dist.barrier()
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for model, optimizer, helper in zip(models, inner, helpers, strict=True):
        model.weight.grad = torch.full((1, 1), rank + 1.0)
        optimizer.step()
        helper.step()
        found.append(model.weight.item())
    return found


def work_in_groups(rank: int, size: int, store: str, folder: str) -> dict[str, Any]:
    """Rank 1 of four is killed: what groups of some ranks make of it, and a group of those who are left."""
    start(rank, size, store)
    lost_in, without, every = dist.new_group([1, 3]), dist.new_group([0, 2]), dist.new_group(list(range(size)))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said: dict[str, Any] = {}

    def add_up(name: str, group: Any, op: Any = dist.ReduceOp.SUM) -> None:
        x = torch.tensor([2.0**rank, 1.0])
        work = dist.all_reduce(x, op=op, group=group, async_op=True)
        work.wait()
        said[name] = x.tolist(), work.contributors

    add_up("every", every)
    if rank == 3:
        add_up("lost in", lost_in, dist.ReduceOp.AVG)
        said["lost in, gathered"] = _lost_rank(
            lambda: dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.ones(1), group=lost_in)
        )
        add_up("lost in, again", lost_in)
    else:
        add_up("without", without)
        parts = [torch.zeros(1), torch.zeros(1)]
        dist.all_gather(parts, torch.tensor([10.0 + rank]), group=without)
        said["without, gathered"] = [part.item() for part in parts]
    whole = [torch.zeros(1) for _ in range(size)]
    said["holes"] = [
        _lost_rank(call)
        for call in (
            lambda: dist.all_gather_single(torch.zeros(size), torch.ones(1)),
            lambda: dist.all_to_all_single(torch.zeros(size), torch.ones(size)),
            lambda: dist.reduce(torch.ones(1), 1),
            lambda: dist.gather(torch.ones(1), None, dst=1),
            lambda: dist.scatter(torch.zeros(1), None, src=1),
            lambda: dist.broadcast_object_list([None], src=1),
            lambda: dist.recv(torch.zeros(1), 1),
            lambda: dist.all_gather(whole, torch.ones(1), async_op=True).wait(),
            lambda: covey.torch.save({"step": 1}, folder, step=1),
        )
    ]
    share = torch.zeros(2)
    dist.reduce_scatter_single(share, torch.arange(2.0 * size) * (rank + 1), op=dist.ReduceOp.AVG)
    said["averaged share"] = share.tolist()
    mean = torch.tensor([float(rank)])
    dist.reduce(mean, 2, op=dist.ReduceOp.AVG)
    said["mean at 2"] = mean.item()
    given = torch.zeros(1)
    dist.scatter(given, [torch.tensor([5.0 + other]) for other in range(size)] if rank == 0 else None, src=0)
    said["given"] = given.item()
    entries = torch.sparse_coo_tensor([[rank, 0]], torch.tensor([1.0, rank]), (size,), check_invariants=True)
    dist.all_reduce(entries)
    said["sparse"] = entries.to_dense().tolist()

    left = dist.new_group(list(dist.group.WORLD.covey_group.contributors))
    add_up("left", left)
    objects: list[Any] = [None] * 3
    dist.all_gather_object(objects, {"rank": rank}, group=left)
    said["objects"] = objects
    for step, async_ in ((1, False), (2, True)):
        saving = covey.torch.save({"x": torch.arange(3.0) * step}, folder, step=step, process_group=left, async_=async_)
        saving.wait(DEADLINE)
    state = {"x": torch.zeros(3)}
    said["loaded"] = covey.torch.load(state, folder, process_group=left), state["x"].tolist()
    return said


def _lost_rank(call: Callable[[], Any]) -> int | str:
    try:
        call()
    except covey.PeerLostError as error:
        return error.rank
    return "fine"
