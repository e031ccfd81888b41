"""Programs for ranks of torch that do what frameworks do with gloo."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.support.waiting import DEADLINE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import covey
from covey.torch import ProcessGroupCovey, SyncBatchNorm, replace
from covey.torch.backend.work import as_torchs


def as_gloo(rank: int, size: int, store: str, backend: str | None) -> None:
    """A program that asks for gloo gets covey, and what it does with gloo works."""
    replace("gloo")
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    assert dist.get_backend() == (backend or "undefined")
    halves = dist.new_group([0, 1], backend="gloo")
    named = dist.new_group(list(range(size)))
    mesh = init_device_mesh("cpu", (size,))
    for group in (dist.group.WORLD, named, mesh.get_group(), *([halves] if rank < 2 else [])):
        assert isinstance(group, ProcessGroupCovey)
    if rank < 2:
        assert dist.get_backend(halves) == "gloo"
        assert halves.name() == "gloo"
    x = torch.arange(5.0) * (rank + 1)
    issued = named._get_sequence_number_for_group()
    dist.all_reduce(x, group=named)
    named._set_sequence_number_for_group()
    assert named._get_sequence_number_for_group() == issued + 1
    assert x.tolist() == [k * size * (size + 1) / 2 for k in range(5)]


def endless_barriers(rank: int, size: int, store: str) -> None:
    """Lightning waits for rank 0 in a group whose deadline is 10,000 days, and calls the group's own barrier."""
    replace("gloo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    group = dist.new_group(timeout=timedelta(days=10000))
    group.monitored_barrier()
    dist.monitored_barrier(group)
    x = torch.arange(3.0) + rank
    for is_async in (False, True):
        work = dist.all_reduce(x, group=group, async_op=is_async)
        if is_async:
            work.wait()
    assert x.tolist() == [size * (k * size + size * (size - 1) / 2) for k in range(3)]
    said: list[object] = [None] * size
    dist.all_gather_object(said, {"rank": rank}, group=group)
    assert said == [{"rank": other} for other in range(size)]
    if rank == 0:
        dist.recv(x, 1, group=group)
    elif rank == 1:
        dist.send(x + rank, 0, group=group)
    group.monitored_barrier()
    dist.destroy_process_group(group)


def integer_means(rank: int, size: int, store: str) -> None:
    """Means of integers are rounded towards zero; views with strides, every width, every way to reduce."""
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size)
    unsigned = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64, *unsigned):
        sign = 1 if dtype in unsigned else -1
        rows = [torch.tensor([[sign * (3 * other + 2), other], [7, 5 * other]], dtype=dtype) for other in range(size)]
        total = torch.stack([row.long() for row in rows]).sum(0)
        mean = torch.div(total, size, rounding_mode="trunc").to(dtype)
        for is_async in (False, True):
            own = rows[rank].clone()
            work = dist.all_reduce(own, dist.ReduceOp.AVG, async_op=is_async)
            if is_async:
                work.wait()
            assert own.equal(mean)
        across = rows[rank].t().contiguous().t()
        dist.all_reduce(across, dist.ReduceOp.AVG)
        assert across.equal(mean)
        kept = rows[rank].clone()
        dist.reduce(kept, size - 1, dist.ReduceOp.AVG)
        assert kept.equal(mean if rank == size - 1 else rows[rank])
        part = torch.zeros(2, dtype=dtype)
        dist.reduce_scatter(part, [rows[rank][other % 2] for other in range(size)], dist.ReduceOp.AVG)
        sums = torch.stack([row[rank % 2].long() for row in rows]).sum(0)
        assert part.equal(torch.div(sums, size, rounding_mode="trunc").to(dtype))
        whole = torch.cat([rows[rank].view(-1)] * size)
        share = torch.zeros(4, dtype=dtype)
        dist.reduce_scatter_single(share, whole, dist.ReduceOp.AVG)
        assert share.equal(mean.view(-1))


def builtin_hooks(rank: int, size: int, store: str) -> None:
    """torch's built-in hooks of C++ average gradients, in half precision or not."""
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size)
    batches = [torch.linspace(-1, 1, 8).view(2, 4) * (other + 1) for other in range(size)]
    for kind, error in ((dist.BuiltinCommHookType.ALLREDUCE, 1e-6), (dist.BuiltinCommHookType.FP16_COMPRESS, 2e-3)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        alone = copy.deepcopy(model)
        spread = DistributedDataParallel(model)
        spread._register_builtin_comm_hook(kind)
        for _ in range(2):
            model.zero_grad()
            spread(batches[rank]).square().sum().backward()
        (sum(alone(batch).square().sum() for batch in batches) / size).backward()
        for own, whole in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(own.grad, whole.grad, rtol=error, atol=error)


def errors_of_torch(rank: int, size: int, store: str) -> None:
    """What covey raises in a process group is also what torch's own backends raise."""
    replace("gloo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    kept = dist.FileStore(f"{store}-late", size)
    dist.monitored_barrier(timeout=timedelta(seconds=DEADLINE))
    group = dist.new_group(list(range(size)))
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="rank 1") as late:
            dist.monitored_barrier(group, timeout=timedelta(seconds=0.5), wait_all_ranks=True)
        assert isinstance(late.value, covey.DeadlineError)
        assert isinstance(late.value, RuntimeError)
        assert late.value.late == (1,)
        again = pickle.loads(pickle.dumps(late.value))
        assert type(again) is covey.DeadlineError
        assert (again.late, str(again)) == (late.value.late, str(late.value))
        kept.set("late", "")
    kept.wait(["late"], timedelta(seconds=DEADLINE))
    group = dist.new_group(list(range(size)))
    for is_async, expected in ((False, covey.MismatchError), (True, covey.ClosedError)):
        with pytest.raises(dist.DistBackendError) as failed:  # a blocking one raises before `wait`
            dist.all_reduce(torch.ones(3 + rank), group=group, async_op=is_async).wait()
        assert isinstance(failed.value, expected)
    with pytest.raises(dist.DistNetworkError) as lost:
        raise as_torchs(covey.PeerLostError("rank 1 is lost", rank=1, host="north"))
    assert (lost.value.rank, lost.value.host, lost.value.remedy) == (1, "north", covey.PeerLostError.remedy)


def batch_norm(rank: int, size: int, store: str, dims: int) -> None:
    """Normalization over all ranks is that of one process with the whole batch; batches are uneven, one is empty."""
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size)
    counts = [0 if other == size - 1 and size > 2 else other + 2 for other in range(size)]
    shape = {2: (3,), 4: (3, 4, 5)}[dims]
    torch.manual_seed(7)
    batches = [torch.randn(count, *shape, dtype=torch.float64) * (k + 1) + 10 * k for k, count in enumerate(counts)]
    whole = torch.cat(batches).requires_grad_()
    plain = (nn.BatchNorm1d if dims == 2 else nn.BatchNorm2d)(3, momentum=None, dtype=torch.float64)
    with torch.no_grad():
        plain.weight.copy_(torch.tensor([0.5, -2.0, 3.0]))
        plain.bias.copy_(torch.tensor([1.0, 0.0, -1.0]))
    model = SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(copy.deepcopy(plain)))
    own = batches[rank].clone().requires_grad_()
    for _ in range(2):
        expected, result = plain(whole), model(own)
    first = sum(counts[:rank])
    mine = slice(first, first + counts[rank])
    assert torch.allclose(result, expected[mine])
    weights = torch.linspace(-1, 2, expected.numel(), dtype=torch.float64).view(expected.shape)
    (expected * weights).sum().backward()
    (result * weights[mine]).sum().backward()
    assert torch.allclose(own.grad, whole.grad[mine])
    layer = model[0]
    for gradient, whole_gradient in ((layer.weight.grad, plain.weight.grad), (layer.bias.grad, plain.bias.grad)):
        dist.all_reduce(gradient)
        assert torch.allclose(gradient, whole_gradient)
    assert torch.allclose(layer.running_mean, plain.running_mean)
    assert torch.allclose(layer.running_var, plain.running_var)
    assert layer.num_batches_tracked == plain.num_batches_tracked
    model.eval()
    plain.eval()
    assert torch.allclose(model(own), plain(whole)[mine])
    assert list(model.state_dict()) == [f"0.{name}" for name in plain.state_dict()]
