"""Programs of ranks whose tensors are not in host memory, or are said not to be."""

from __future__ import annotations

import copy
import os
import random
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tests.support.waiting import DEADLINE
from tests.torch import conformance
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from covey.arrays import torch_devices
from covey.torch.backend import operands

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

MOST_LAG = 0.001


class LaggingDevice:
    """Host memory as if it were a device's: copies happen late, on two threads, each in order.

    What nobody waits for is missed: rooms begin as rubbish, and results come to the tensors a moment after they were
    put.
    """

    def __init__(self, seed: int) -> None:
        self._lag = random.Random(seed)
        self._leaving, self._coming = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._last: Future[None] | None = None
        self._lock = threading.Lock()
        self.fetched = self.put_back = 0

    def room(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.full((tensor.numel(),), 99, dtype=tensor.dtype)

    def fetch(self, tensor: torch.Tensor, room: torch.Tensor) -> Callable[[], None]:
        self.fetched += 1
        copied = self._leaving.submit(self._copy, tensor, room.view(tensor.shape))
        return lambda: copied.result(DEADLINE)

    def mark(self, device: torch.device) -> None:
        return None

    def put(self, room: torch.Tensor, tensor: torch.Tensor, mark: None) -> None:
        with self._lock:
            self.put_back += 1
            self._last = self._coming.submit(self._copy, room.view(tensor.shape), tensor)

    @contextmanager
    def writing(self, device: torch.device, mark: None) -> Iterator[None]:
        self.settle(device)
        yield

    def order(self, device: torch.device) -> None:
        self.settle(device)

    def settle(self, device: torch.device) -> None:
        with self._lock:
            last = self._last
        if last is not None:
            last.result(DEADLINE)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        time.sleep(self._lag.random() * MOST_LAG)
        with torch.no_grad():
            target.copy_(source)


class QueuedDevice(LaggingDevice):
    """One that is given its work in advance: what reads and writes tensors runs when its turn comes, on a thread."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._kernels = ThreadPoolExecutor(1)
        self._queued: Future[Any] | None = None

    def launch(self, kernel: Callable[[], Any]) -> None:
        """Queue work of the caller's stream; this does not wait for it."""
        self._queued = self._kernels.submit(kernel)

    def finish(self) -> None:
        if self._queued is not None:
            self._queued.result(DEADLINE)

    def mark(self, device: torch.device) -> Any:
        return self._queued

    def fetch(self, tensor: torch.Tensor, room: torch.Tensor) -> Callable[[], None]:
        self._leaving.submit(self._wait_for, self._queued)
        return super().fetch(tensor, room)

    def put(self, room: torch.Tensor, tensor: torch.Tensor, mark: Any) -> None:
        self._coming.submit(self._wait_for, mark)
        super().put(room, tensor, None)

    def order(self, device: torch.device) -> None:
        last = self._last
        self.launch(lambda: self._wait_for(last))

    def _wait_for(self, queued: Future[Any] | None) -> None:
        if queued is not None:
            queued.result(DEADLINE)


def keep_queued_work_in_order(rank: int, size: int, store: str) -> list[Any]:
    """Return what the device reads after operations on tensors that it was still about to write before them."""
    device = torch_devices._adapters["cpu"] = QueuedDevice(rank)
    dist.init_process_group("cpu:covey", init_method=f"file://{store}", rank=rank, world_size=size)
    seen: list[Any] = []
    for _ in range(3):
        whole, own, total = torch.zeros(2 * size), torch.zeros(2), torch.zeros(2)

        def write(whole: torch.Tensor = whole, own: torch.Tensor = own, total: torch.Tensor = total) -> None:
            time.sleep(0.1 * rank)  # rank 1 is only about to write what rank 0 sends it already
            whole.fill_(-1.0)
            own.fill_(rank + 7.0)
            total.fill_(rank + 1.0)

        def read(whole: torch.Tensor = whole, own: torch.Tensor = own, total: torch.Tensor = total) -> None:
            seen.append([whole.tolist(), own.tolist(), total.tolist()])

        device.launch(write)
        dist.broadcast(own, src=0)
        dist.all_reduce(total)
        dist.all_gather_single(whole, own)
        device.launch(read)
    device.finish()
    return seen


def compare_lagging(rank: int, size: int, store: str, piece_bytes: int) -> dict[str, Any]:
    """Compare covey, through a device that lags, with gloo, which knows nothing of it; in pieces of `piece_bytes`."""
    device = torch_devices._adapters["cpu"] = LaggingDevice(rank)
    operands.DEVICE_PIECE_BYTES = piece_bytes  # type: ignore[misc]
    dist.init_process_group("cpu:covey", init_method=f"file://{store}", rank=rank, world_size=size)
    gloo = dist.new_group(backend="gloo")
    warnings.simplefilter("ignore", FutureWarning)  # torch calls its coalesced forms deprecated
    different, count = [], 0
    for name, case in conformance.compact_cases():
        want, got = (case(conformance.Seat(group, rank, size)) for group in (gloo, dist.group.WORLD))
        count += 1
        if not all(map(conformance._is_same, got, want)):
            different.append(f"{name}: covey {got}, gloo {want}")
    whole = conformance.values((1000,), rank)
    dist.all_reduce(whole)
    if not torch.equal(whole, sum(conformance.values((1000,), other) for other in range(size))):
        different.append("a thousand numbers in pieces")
    dist.destroy_process_group(gloo)
    return {"count": count, "different": different, "fetched": device.fetched, "put": device.put_back}


def lose_one(rank: int, size: int, store: str) -> list[Any]:
    """Rank 2 is killed while its input comes from the device; the others finish without it, in one piece."""
    device = torch_devices._adapters["cpu"] = LaggingDevice(rank)
    operands.DEVICE_PIECE_BYTES = 16  # type: ignore[misc]
    os.environ["COVEY_ON_LOSS"] = "continue"
    dist.init_process_group("cpu:covey", init_method=f"file://{store}", rank=rank, world_size=size)
    group, found = dist.group.WORLD.covey_group, []
    fetch, calls = (
        device.fetch,
        {
            "all_reduce": lambda x: dist.all_reduce(x, async_op=True),
            "again": lambda x: dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True),
        },
    )

    def fetch_and_die(tensor: torch.Tensor, room: torch.Tensor) -> Callable[[], None]:
        fetch(tensor, room)()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    for name, call in calls.items():
        x = conformance.values((1000,), rank)
        before = group.sequence
        if rank == 2:
            device.fetch = fetch_and_die  # type: ignore[method-assign]
        work = call(x)
        work.wait()
        found.append((name, group.sequence - before, work.contributors, x.tolist()))
    return found


# On a real GPU


def compare_on_gpu(rank: int, size: int, store: str, piece_bytes: int) -> dict[str, Any]:
    """Compare covey on tensors of a GPU with covey on tensors of the host."""
    operands.DEVICE_PIECE_BYTES = piece_bytes  # type: ignore[misc]
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size)
    warnings.simplefilter("ignore", FutureWarning)
    seat = conformance.Seat(dist.group.WORLD, rank, size)
    different, count = [], 0
    for name, case in conformance.compact_cases():
        want = case(seat)
        with torch.device("cuda"):
            got = [tensor.cpu() for tensor in case(seat)]
        count += 1
        if not all(map(conformance._is_same, got, want)):
            different.append(f"{name}: on the GPU {got}, on the host {want}")
    # One rank's tensor may be on its GPU while another's is not.
    want = torch.arange(piece_bytes * 0.6)
    mixed = want.to("cuda" if rank == 0 else "cpu")
    dist.all_reduce(mixed, op=dist.ReduceOp.AVG)
    if not torch.equal(mixed.cpu(), want):
        different.append("mixed")
    return {"count": count, "different": different}


def keep_streams_in_order(rank: int, size: int, store: str) -> dict[str, float]:
    """Operations come after what the stream was given before, and before what it is given after; nothing else waits."""
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size)
    cycles = _cycles_per_second()
    other, times = torch.cuda.Stream(), {}
    for step in range(1, 6):
        if step == 3:  # by now lanes are open and there is memory, whose allocation waits for the device
            torch.cuda.synchronize()
            dist.barrier()
            with torch.cuda.stream(other):
                torch.cuda._sleep(int(4 * cycles))  # has nothing to do with us
        began = time.monotonic()
        x = torch.zeros(3_000_000, device="cuda")
        torch.cuda._sleep(int(0.2 * cycles))
        x += step * (rank + 1)
        work = dist.all_reduce(x, async_op=True)
        if step > 2:
            times[f"issued {step}"] = time.monotonic() - began
        work.wait()
        doubled = x * 2
        x.zero_()
        assert bool((doubled == 2 * step * sum(range(1, size + 1))).all()), doubled[:5]
    times["other still runs"] = float(not other.query())
    for _ in range(3):  # what is only written waits for what used its memory before
        whole, own = torch.zeros(size * 1000, device="cuda"), torch.full((1000,), rank + 1.0, device="cuda")
        torch.cuda._sleep(int(0.1 * cycles))
        whole.fill_(-1.0)
        dist.all_gather_into_tensor(whole, own.clone())
        dist.broadcast(own.zero_() if rank else own, src=0)
        assert whole.view(size, 1000).mean(1).tolist() == [float(other) for other in range(1, size + 1)]
        assert own.mean().item() == 1.0
    future = dist.all_reduce(torch.full((5,), 2.0, device="cuda"), async_op=True).get_future()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert future.wait()[0].tolist() == [2.0 * size] * 5
    # What is dropped before it is done keeps its memory until then.
    for number in range(50):
        work = dist.all_reduce(torch.full((100_000,), float(number), device="cuda"), async_op=True)
        kept = work.get_future() if number == 49 else None
    assert kept is not None
    assert kept.wait()[0][0].item() == 49.0 * size
    torch.cuda.synchronize()
    return times


def train_on_gpu(rank: int, size: int, store: str, how: str) -> float:
    """Return how far parameters are from those of one process that saw all batches."""
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size)
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(512) if how == "sync batch norm" else torch.nn.Identity()
    alone = torch.nn.Sequential(torch.nn.Linear(64, 512), norm, torch.nn.Tanh(), torch.nn.Linear(512, 8)).to("cuda")
    model = copy.deepcopy(alone)
    trained: torch.nn.Module = model
    if how in ("fsdp2", "hybrid"):  # hybrid: NCCL inside the box, covey across; here every box has one GPU, the same
        mesh = dist.init_device_mesh("cuda", (size,)) if how == "fsdp2" else hybrid_mesh(size, 1, "nccl")
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
        trained = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.05)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (trained, alone)]
    for step in range(5):
        batches = [torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(size)]
        for each, parts, optimizer in zip(
            (trained, alone), (batches[rank : rank + 1], batches), optimizers, strict=True
        ):
            optimizer.zero_grad()
            each(torch.cat(parts).to("cuda")).square().mean().backward()
            optimizer.step()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return max((a - b).abs().max().item() for a, b in zip(whole, alone.parameters(), strict=True))


def train_on_hybrid_mesh(rank: int, size: int, store: str) -> bool:
    """HSDP on two boxes of two: shards talk by gloo, in NCCL's place, replicas by covey; tell whether it is right."""
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size)
    mesh = hybrid_mesh(2, 2, "gloo")
    assert (dist.get_backend(mesh.get_group("across")), dist.get_backend(mesh.get_group("inside"))) == ("covey", "gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    alone = copy.deepcopy(model)
    fully_shard(model, mesh=mesh)
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    model(batches[rank]).square().mean().backward()
    alone(torch.cat(batches)).square().mean().backward()
    return all(
        torch.allclose(p.grad.full_tensor(), q.grad)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True)
    )


def hybrid_mesh(boxes: int, inside: int, backend: str) -> Any:
    """Return a mesh of `boxes` x `inside` whose rows talk by another backend, and whose columns by covey."""
    return dist.init_device_mesh(
        "cuda" if backend == "nccl" else "cpu",
        (boxes, inside),
        mesh_dim_names=("across", "inside"),
        backend_override={"across": "covey", "inside": backend},
    )


def _cycles_per_second() -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    end.synchronize()
    return 100_000_000 / (start.elapsed_time(end) / 1000)
