"""What ranks do in the tests of the backend, each in a process of its own: `program(rank, size, store, ...)`."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import covey
import covey.torch

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = 4


def start(rank: int, size: int, store: str, **options: Any) -> None:
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size, **options)


@contextlib.contextmanager
def raises(kind: type[BaseException], *words: str) -> Iterator[None]:
    """Expect an exception whose message has all these words."""
    with pytest.raises(kind) as raised:
        yield
    assert all(word in str(raised.value) for word in words), str(raised.value)


# Methods that gloo has no like of


def beyond_gloo(rank: int, size: int, store: str) -> None:
    """What differs from gloo: uneven lists, stacked outputs, strides, odd dtypes, PREMUL_SUM."""
    start(rank, size, store)
    everyone = range(size)

    outs = [torch.zeros(other + 2 * rank + 1) for other in everyone]
    dist.all_to_all(outs, [torch.full((rank + 2 * other + 1,), 10.0 * rank + other) for other in everyone])
    assert [out.tolist() for out in outs] == [[10.0 * other + rank] * (other + 2 * rank + 1) for other in everyone]

    outs = [torch.zeros(other + 1) for other in everyone]
    dist.all_gather(outs, torch.full((rank + 1,), float(rank)))
    assert [out.tolist() for out in outs] == [[float(other)] * (other + 1) for other in everyone]

    stacked = torch.zeros(size, 3)
    dist.all_gather_single(stacked, torch.full((3,), float(rank)))
    assert stacked.tolist() == [[float(other)] * 3 for other in everyone]

    part = torch.zeros(rank + 1)
    dist.reduce_scatter(part, [torch.full((other + 1,), float(rank + other)) for other in everyone])
    assert part.tolist() == [float(sum(everyone) + size * rank)] * (rank + 1)

    # The output lies in the input.
    whole = torch.arange(2.0 * size) + rank
    dist.reduce_scatter_single(whole[2 * rank : 2 * rank + 2], whole)
    sums = [sum(2.0 * rank + column + other for other in everyone) for column in (0, 1)]
    assert whole[2 * rank : 2 * rank + 2].tolist() == sums

    grid = torch.zeros(4, 3)
    strided = grid.t()[1:]
    strided.fill_(rank + 1.0)
    dist.all_reduce(strided)
    dist.broadcast(grid[:, 0], 0)
    assert grid.tolist() == [[0.0, *[sum(everyone) + size] * 2]] * 4

    eight = torch.full((5,), float(rank)).to(torch.float8_e4m3fn)
    dist.broadcast(eight, size - 1)
    assert eight.float().tolist() == [size - 1.0] * 5

    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags, dist.ReduceOp.BOR)
    assert flags.tolist() == [True, True, False]

    x = torch.full((3,), rank + 1.0)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    assert x.tolist() == [0.5 * (sum(everyone) + size)] * 3

    half = torch.full((3,), float(rank), dtype=torch.bfloat16)
    dist.all_reduce(half, dist.ReduceOp.AVG)
    assert half.tolist() == [sum(everyone) / size] * 3

    with raises(TypeError, "mean"):
        dist.all_reduce(torch.ones(3, dtype=torch.int64), dist.ReduceOp.AVG)
    if size > 1:
        with raises(covey.ConfigError, "cannot be shared"):
            dist.group.WORLD.all_to_all_single(torch.zeros(size + 1), torch.zeros(size + 1))
    dist.all_reduce(x)  # a call that cannot work leaves the group as it was
    dist.barrier()


def messages(rank: int, size: int, store: str) -> None:
    """Point to point: order, tags, any source, batches, and collectives that do not wait for a receive."""
    start(rank, size, store)
    right, left = (rank + 1) % size, (rank - 1) % size

    late = torch.zeros(4)
    receiving = dist.irecv(late, left, tag=9)
    total = torch.ones(2)
    dist.all_reduce(total)  # is not held up by the receive
    assert total.tolist() == [size, size]
    assert not receiving.is_completed()
    dist.barrier()
    dist.send(torch.full((4,), 9.0 + rank), right, tag=9)
    receiving.wait()
    assert late.tolist() == [9.0 + left] * 4

    sends = [dist.isend(torch.full((1 << 17,), float(number)), right, tag=number % 2) for number in range(4)]
    rooms = {number: torch.zeros(1 << 17) for number in range(4)}
    receives = [dist.irecv(rooms[number], left, tag=number % 2) for number in (1, 0, 3, 2)]
    for work in (*sends, *receives):
        work.wait()
    assert all(bool((room == number).all()) for number, room in rooms.items())

    if rank == 0:
        seen = {}
        for _ in range(size - 1):
            room = torch.zeros(2, 2)
            source = dist.recv(room, tag=3)
            seen[source] = room[1, 1].item()
        assert seen == {other: 5.0 * other for other in range(1, size)}
    else:
        dist.send(torch.full((2, 2), 5.0 * rank), 0, tag=3)

    given, got = torch.full((3,), float(rank)), torch.zeros(3)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, given, right), dist.P2POp(dist.irecv, got, left)])
    for work in works:
        work.wait()
    assert got.tolist() == [float(left)] * 3
    dist.barrier()


def groups(rank: int, size: int, store: str) -> None:
    """Many groups, made and destroyed again, meshes, and threads that use them at the same time."""
    start(rank, size, store)
    from torch.distributed.device_mesh import init_device_mesh

    pair = dist.new_group([0, 1])
    for _ in range(12):
        fleeting = dist.new_group(list(range(size)))
        x = torch.ones(3)
        dist.all_reduce(x, group=fleeting)
        assert x.tolist() == [size] * 3
        dist.destroy_process_group(fleeting)
    if rank < 2:
        x = torch.full((2,), float(rank))
        dist.all_reduce(x, group=pair)
        assert x.tolist() == [1.0, 1.0]
        for _ in range(2):  # the same name and the same ranks, again
            local = dist.new_group([0, 1], use_local_synchronization=True)
            dist.all_reduce(x, group=local)
            dist.destroy_process_group(local)
        assert x.tolist() == [4.0, 4.0]
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
    x = torch.full((2,), float(rank))
    dist.all_reduce(x, group=mesh.get_group("replicate"))
    dist.all_reduce(x, group=mesh.get_group("shard"))
    assert x.tolist() == [sum(range(size))] * 2

    split = dist.group.WORLD.split_group([1, 0])
    assert (split is None) == (rank > 1)
    if split is not None:
        assert split.rank() == 1 - rank
        split.allreduce([x := torch.ones(1)]).wait()
        assert x.item() == 2
        split.shutdown()
    with raises(covey.ConfigError, "merge"):
        dist.group.WORLD.merge_remote_group(None, 1)

    # Two threads on two groups, and two on one: as long as all ranks issue in one order, nothing is refused.
    mine = [dist.new_group(list(range(size))) for _ in range(2)]
    sums: list[list[float]] = [[], []]

    def work(index: int) -> None:
        for step in range(20):
            x = torch.full((1000,), float(step + index))
            dist.all_reduce(x, group=mine[index])
            sums[index].append(x[7].item())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [[float(size * (step + index)) for step in range(20)] for index in range(2)]
    same = [threading.Thread(target=lambda: dist.all_reduce(torch.ones(1000))) for _ in range(4)]
    for thread in same:
        thread.start()
    for thread in same:
        thread.join()
    dist.barrier()


# Training


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def _batch(step: int) -> torch.Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step))


def _train(model: nn.Module, share: slice) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(_batch(step)[share]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _close(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        full = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        torch.testing.assert_close(full, theirs, rtol=1e-4, atol=1e-5, msg=name)


def train_ddp(rank: int, size: int, store: str) -> None:
    """DDP: plain, with hooks, with accumulation and unused parameters, with sparse gradients, on uneven inputs."""
    start(rank, size, store)
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    share, wrap = slice(rank, None, size), nn.parallel.DistributedDataParallel
    alone = _model()
    _train(alone, slice(None))

    plain = wrap(_model(), bucket_cap_mb=0.0005)
    _train(plain, share)
    _close(plain.module, alone)

    hooked = wrap(_model())
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    _train(hooked, share)
    _close(hooked.module, alone)

    powered = wrap(_model())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    powered.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    losses = _train(powered, share)
    assert losses[-1] < losses[0]

    accumulated, reference = wrap(_model(), find_unused_parameters=True), _model()
    with accumulated.no_sync():
        accumulated.module[:3](_batch(0)[share]).square().mean().backward()
    accumulated(_batch(1)[share]).square().mean().backward()
    reference[:3](_batch(0)).square().mean().backward()
    reference(_batch(1)).square().mean().backward()
    for mine, theirs in zip(accumulated.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)

    table = wrap(nn.Embedding(6, 3, sparse=True))
    table(torch.tensor([rank, 5])).sum().backward()
    assert table.module.weight.grad.to_dense()[:, 0].tolist() == [
        1 / size if row < size else float(row == 5) for row in range(6)
    ]

    uneven = wrap(_model())
    with uneven.join():
        for _ in range(1 + rank):
            uneven(_batch(0)[share]).sum().backward()

    zero = wrap(_model())
    optimizer = ZeroRedundancyOptimizer(zero.parameters(), torch.optim.AdamW, lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        zero(_batch(step)[share]).square().mean().backward()
        optimizer.step()
    _close(zero.module, alone)


def train_sharded(rank: int, size: int, store: str) -> None:
    """FSDP2, HSDP, tensor parallel, and DTensor in all directions."""
    start(rank, size, store)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    alone = _model()
    _train(alone, slice(None))
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    two = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
    for each in (mesh, two):
        model = _model()
        for index in (0, 2, 4):
            fully_shard(model[index], mesh=each)
        fully_shard(model, mesh=each)
        _train(model, slice(rank, None, size))
        _close(model, alone)

    split = parallelize_module(_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    _train(split, slice(None))
    _close(split, alone)

    whole = torch.arange(24.0).reshape(6, 4)
    for before in (Replicate(), Shard(0), Shard(1)):
        for after in (Replicate(), Shard(0), Shard(1)):
            moved = distribute_tensor(whole, mesh, [before]).redistribute(mesh, [after])
            torch.testing.assert_close(moved.full_tensor(), whole)
    summed = distribute_tensor(whole, mesh, [Shard(0)]).sum(0)
    assert summed.placements[0] == Partial() or size == 1
    for after in (Replicate(), Shard(0)):
        torch.testing.assert_close(summed.redistribute(mesh, [after]).full_tensor(), whole.sum(0))


# Failures


def lose_one(rank: int, size: int, store: str) -> list[str]:
    """The last rank is killed in the middle of backward; return what the others say, and within what time."""
    start(rank, size, store)
    model = nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=0.0005)
    _train(model, slice(rank, None, size))
    if rank == size - 1:
        model.module[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    began = time.monotonic()
    try:
        model(_batch(0)).sum().backward()
    except Exception as error:
        return [type(error).__name__, str(error), f"{time.monotonic() - began:.3f}"]
    return ["nothing", "", "0"]


def come_late(rank: int, size: int, store: str) -> None:
    """Rank 1 does not come: the others are told so in time, by future and by wait; their next calls say why."""
    start(rank, size, store, timeout=timedelta(seconds=60))
    dist.barrier()
    gate = dist.new_group(list(range(size)))
    short = dist.new_group(list(range(size)), timeout=timedelta(seconds=0.5))
    if rank != 1:
        work = dist.all_reduce(torch.ones(3), group=short, async_op=True)
        future = work.get_future()
        with raises(covey.DeadlineError, "rank 1", "did not come"):
            work.wait()
        with raises(RuntimeError, "rank 1"):
            future.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert isinstance(work.exception(), covey.DeadlineError)
        with raises(covey.ClosedError, "rank 1"):
            dist.all_reduce(torch.ones(3), group=short)
    dist.barrier(group=gate)
    if rank == 1:
        with raises(covey.DeadlineError, "rank 1"):
            dist.all_reduce(torch.ones(3), group=short)
    else:
        room = torch.zeros(1)
        waiting = dist.irecv(room, 1)
        with raises(covey.DeadlineError):
            waiting.wait(timedelta(seconds=0.05))
    dist.barrier(group=gate)
    if rank == 1:
        for other in range(size):
            if other != 1:
                dist.send(torch.ones(1), other)
    else:
        waiting.wait()
    # Different calls are named, on all ranks.
    wrong = dist.new_group(list(range(size)))
    with raises(covey.MismatchError, "int64[3]" if rank else "float32[3]"):
        dist.all_reduce(torch.ones(3, dtype=torch.int64 if rank else torch.float32), group=wrong)
    dist.barrier()


def abort_pending(rank: int, size: int, store: str) -> None:
    """Aborting a group ends what is pending in it, on all ranks."""
    start(rank, size, store)
    group = dist.new_group(list(range(size)))
    if rank:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        dist.send(torch.ones(1), 0)
        with raises(covey.ClosedError, "rank 0 revoked"):
            work.wait()
    else:
        dist.recv(torch.ones(1), 1)
        group.abort()
    dist.barrier()


# Meeting


def again_and_again(rank: int, size: int, store: str, host: str, port: int) -> list[str]:
    """Meet three times over one store, which remembers; return the kinds of lanes."""
    kept = dist.TCPStore(host, port, size, is_master=rank == 0, timeout=timedelta(seconds=30))
    kinds = []
    for turn in range(3):
        dist.init_process_group("covey", store=kept, rank=rank, world_size=size)
        x = torch.full((2,), float(rank + turn))
        dist.all_reduce(x)
        assert x.tolist() == [sum(range(size)) + size * turn] * 2
        kinds += sorted(set(dist.group.WORLD.covey_group.lanes().values()))
        dist.barrier()
        dist.destroy_process_group()
    kept.set(f"done/{rank}", "")
    if rank == 0:  # who has the store leaves last
        kept.wait([f"done/{other}" for other in range(size)])
    return kinds
