"""What ranks do in the tests of the backend, each in a process of its own: `program(rank, size, store, ...)`."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.support.waiting import wait_until
from tests.torch.equality import batch, share, small_model, start, train
from torch.distributed.device_mesh import init_device_mesh

import covey
import covey.torch

if TYPE_CHECKING:
    from collections.abc import Iterator


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

    # Dtypes that gloo does not move, or does not reckon with.
    eight = torch.full((5,), float(rank)).to(torch.float8_e4m3fn)
    eights = [torch.zeros_like(eight) for _ in everyone]
    dist.all_gather(eights, eight)
    assert [one.float().tolist() for one in eights] == [[float(other)] * 5 for other in everyone]
    dist.broadcast(eight, size - 1)
    assert eight.float().tolist() == [size - 1.0] * 5
    with raises(TypeError, "float8_e4m3fn"):
        dist.all_reduce(eight)
    mine = torch.full((2,), complex(rank, -rank))
    outs = [torch.zeros_like(mine) for _ in everyone]
    dist.gather(mine, outs if rank == 0 else None)
    assert rank or [out.tolist() for out in outs] == [[complex(other, -other)] * 2 for other in everyone]
    short = torch.tensor([rank, 1, -3], dtype=torch.int16)
    dist.all_reduce(short)
    assert short.tolist() == [sum(everyone), size, -3 * size]

    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags, dist.ReduceOp.BOR)
    assert flags.tolist() == [True, True, False]

    x = torch.full((3,), rank + 1.0)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    assert x.tolist() == [0.5 * (sum(everyone) + size)] * 3
    part = torch.zeros(2)
    dist.reduce_scatter_single(part, torch.full((2 * size,), rank + 1.0), dist._make_nccl_premul_sum(0.5))
    assert part.tolist() == [0.5 * (sum(everyone) + size)] * 2

    rows = torch.zeros(1, 2 * size)  # as SyncBatchNorm has it: what counts is the order in memory
    dist.all_gather_single(rows, torch.full((1, 2), float(rank)))
    assert rows.tolist() == [[float(other) for other in everyone for _ in range(2)]]

    half = torch.full((3,), float(rank), dtype=torch.bfloat16)
    dist.all_reduce(half, dist.ReduceOp.AVG)
    assert half.tolist() == [sum(everyone) / size] * 3

    with raises(TypeError, "mean"):
        dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG)
    if size > 1:
        with raises(covey.ConfigError, "cannot be divided"):
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
    received_are_freed(right, left)


def received_are_freed(right: int, left: int) -> None:
    """Every tensor that was received is freed with the last reference to it: nothing waits for the collector."""
    given = torch.full((1 << 17,), 1.0)
    received: list[weakref.ref[torch.Tensor]] = []

    def room() -> torch.Tensor:
        got = torch.empty_like(given)
        received.append(weakref.ref(got))
        return got

    def batch() -> None:
        operations = [dist.P2POp(dist.isend, given, right), dist.P2POp(dist.irecv, room(), left)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def one_by_one(source: int | None) -> None:
        receiving = dist.irecv(room(), source)
        sending = dist.isend(given, right)
        receiving.wait()
        sending.wait()

    gc.collect()
    gc.disable()
    try:
        for exchange in (batch, partial(one_by_one, left), partial(one_by_one, None)):
            for _ in range(12):
                exchange()
            # The group, its thread and torch may still know what they did last.
            wait_until(lambda: sum(each() is not None for each in received) <= 2, f"{exchange} leaves tensors")
            dist.barrier()
    finally:
        gc.enable()


def groups(rank: int, size: int, store: str) -> None:
    """Groups of some ranks, of all of them again, of pairs, in meshes, by one name; and beside another backend's."""
    start(rank, size, store)
    pair = dist.new_group([0, 1])
    if rank < 2:
        x = torch.full((2,), float(rank))
        dist.all_reduce(x, group=pair)
        assert x.tolist() == [1.0, 1.0]
        for _ in range(2):  # the same name and the same ranks, again
            local = dist.new_group([0, 1], use_local_synchronization=True)
            dist.all_reduce(x, group=local)
            dist.destroy_process_group(local)
        assert x.tolist() == [4.0, 4.0]
    mine, every = dist.new_subgroups(group_size=2)
    assert [dist.get_process_group_ranks(each) for each in every] == [[0, 1], [2, 3]]
    x = torch.full((2,), float(rank))
    dist.all_reduce(x, group=mine)
    assert x.tolist() == [1.0 if rank < 2 else 5.0] * 2

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    x = torch.full((2,), 2.0**rank)
    dist.all_reduce(x, group=mesh.get_group("row"))
    assert x.tolist() == [5.0 if rank % 2 == 0 else 10.0] * 2
    dist.all_reduce(x, group=mesh.get_group("column"))
    assert x.tolist() == [15.0] * 2
    flat = mesh._flatten()
    dist.all_reduce(x, group=flat.get_group())
    assert x.tolist() == [60.0] * 2

    split = dist.group.WORLD.split_group([1, 0])
    assert (split is None) == (rank > 1)
    if split is not None:
        assert split.rank() == 1 - rank
        split.allreduce([x := torch.ones(1)]).wait()
        assert x.item() == 2
        split.shutdown()
    with raises(covey.ConfigError, "merge"):
        dist.group.WORLD.merge_remote_group(None, 1)

    other = dist.new_group([0, 2], backend="gloo")  # both in the middle of something
    if rank in (0, 2):
        x, y = torch.ones(2), torch.ones(3)
        works = [dist.all_reduce(x, group=other, async_op=True), dist.irecv(y, 2 - rank)]
        dist.send(torch.full((3,), 7.0 + rank), 2 - rank)
        for work in works:
            work.wait()
        assert (x.tolist(), y.tolist()) == ([2.0] * 2, [9.0 - rank] * 3)
        dist.destroy_process_group(other)
    dist.barrier()


def inside_and_across(rank: int, size: int, store: str) -> None:
    """Another backend has the group of all; covey has some of them, and then each of two columns."""
    start(rank, size, store, backend="gloo")
    some = dist.new_group([1, 2, 3], backend="covey")
    columns = [dist.new_group([column, column + 2], backend="covey") for column in (0, 1)]
    x = torch.full((2,), 2.0**rank)
    if rank:
        dist.all_reduce(x, group=some)
        assert x.tolist() == [14.0] * 2
    dist.all_reduce(x, group=columns[rank % 2])
    assert x.tolist() == [28.0 if rank % 2 else 15.0] * 2
    dist.all_reduce(x)
    assert x.tolist() == [86.0] * 2


def _census() -> tuple[int, list[str]]:
    """Return how many descriptors are open, and the names of the threads."""
    return len(os.listdir("/proc/self/fd")), sorted(thread.name for thread in threading.enumerate())


def dozens(rank: int, size: int, store: str) -> None:
    """Many groups at once, all of them at work, leave nothing behind."""
    start(rank, size, store)

    def use(group: Any, number: int) -> None:
        x, y = torch.full((300,), float(rank + number)), torch.zeros(3)
        future = dist.all_reduce(x, group=group, async_op=True).get_future()
        receiving = dist.irecv(y, (rank - 1) % size, group=group)
        dist.send(torch.full((3,), float(number)), (rank + 1) % size, group=group)
        receiving.wait()
        assert future.wait()[0][7].item() == sum(range(size)) + size * number
        assert y.tolist() == [number] * 3

    def live(count: int) -> tuple[int, list[str]]:
        made = [dist.new_group(list(range(size))) for _ in range(count)]
        for number, group in enumerate(made):
            use(group, number)
        peak = _census()
        for group in made:
            dist.destroy_process_group(group)
        return peak

    live(2)  # what the first groups open for all
    dist.barrier()
    before = _census()
    peak = live(36)
    dist.barrier()
    # A socket of the meeting may still have been closing when they were counted, or one of the last group's now.
    until = time.monotonic() + 500
    while (after := _census())[0] > before[0] or after[1] != before[1]:
        assert time.monotonic() < until, (before, after)
        time.sleep(0.01)
    assert len(peak[1]) > len(before[1])


def threads(rank: int, size: int, store: str) -> None:
    """A thread for each of several groups, all at once; and several on one, as long as all ranks issue in one order."""
    start(rank, size, store)
    count, steps = 6, 10
    mine = [dist.new_group(list(range(size))) for _ in range(count)]
    sums: list[list[float]] = [[] for _ in mine]

    def work(index: int) -> None:
        for step in range(steps):
            x, y = torch.full((1000,), float(step + index)), torch.zeros(size)
            dist.all_reduce(x, group=mine[index], async_op=step % 2 == 0)
            dist.all_gather_single(y, torch.full((1,), float(rank + index)), group=mine[index])
            sums[index].append(x[7].item() + y[-1].item())

    workers = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    workers += [threading.Thread(target=lambda: dist.all_reduce(torch.ones(1000))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sums == [[size * (step + index) + size - 1.0 + index for step in range(steps)] for index in range(count)]


def own_thread(rank: int, size: int, store: str) -> None:
    """Calls that torch waits for run on the thread that calls; only those that it does not wait for need another."""
    start(rank, size, store)
    dist.all_reduce(torch.ones(1))

    def others() -> list[str]:
        return sorted(thread.name for thread in threading.enumerate() if thread is not threading.current_thread())

    before = others()
    group, x, right, left = dist.new_group(list(range(size))), torch.ones(5), (rank + 1) % size, (rank - 1) % size
    for call in (
        lambda: dist.all_reduce(x, group=group),
        lambda: dist.broadcast(x, 1, group=group),
        lambda: dist.all_gather([torch.zeros(5) for _ in range(size)], x, group=group),
        lambda: dist.send(x, right, group=group) if rank else dist.recv(x, left, group=group),
        lambda: dist.recv(x, left, group=group) if rank else dist.send(x, right, group=group),
        lambda: dist.barrier(group=group),
    ):
        call()
        assert others() == before
    dist.all_reduce(torch.ones(100_000), group=group, async_op=True).wait()  # not over at once, as a small one may be
    assert len(others()) == len(before) + 1


def detailed(rank: int, size: int, store: str) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: torch looks closer, and everything works as before."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    start(rank, size, store)
    model = torch.nn.parallel.DistributedDataParallel(small_model(), find_unused_parameters=True)
    train(model, rows=share(rank, size)).close_to(train(small_model()))
    rows = [torch.zeros(12 // size, 8) for _ in range(size)]
    dist.all_gather(rows, batch(0)[share(rank, size)])
    torch.testing.assert_close(rows[1], batch(0)[share(1, size)])


# Failures


def come_late(rank: int, size: int, store: str) -> None:
    """Rank 1 does not come: the others are told so in time, by future and by wait; their next calls say why."""
    start(rank, size, store, timeout=timedelta(seconds=500))
    dist.barrier()
    gate = dist.new_group(list(range(size)))
    short = dist.new_group(list(range(size)), timeout=timedelta(seconds=0.5))
    if rank != 1:
        work = dist.all_reduce(torch.ones(3), group=short, async_op=True)
        future = work.get_future()
        with raises(covey.DeadlineError, "rank 1", "has not called it yet"):
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
    dist.barrier()


def disagree(rank: int, size: int, store: str) -> None:
    """Rank 2 calls something else than the others: all of them are told who called what."""
    start(rank, size, store)
    x, y, halves = torch.ones(3), torch.ones(4), torch.ones(3, dtype=torch.bfloat16)
    usual = partial(dist.all_reduce, x)
    for other, usually, words in (
        (partial(dist.all_reduce, halves), usual, "bfloat16[3]"),
        (partial(dist.all_reduce, y), usual, "float32[4]"),
        (partial(dist.all_reduce, x, dist.ReduceOp.MAX), usual, "op=max"),
        (partial(dist.barrier), usual, "barrier()"),
        (partial(dist.broadcast, x, 0), partial(dist.broadcast, x, 1), "root=0"),
    ):
        group = dist.new_group(list(range(size)))

        def differ(group: Any = group, call: Any = other if rank == 2 else usually) -> None:
            call(group=group)
            dist.barrier(group)  # who has only to send may have returned already

        with raises(covey.CoveyError, "rank 2 called", words):
            differ()
    group = dist.new_group(list(range(size)))
    dist.broadcast(x, rank, group=group)  # all of them only send
    dist.barrier()
    with raises(covey.MismatchError, "rank 2 called broadcast(float32[3], root=2)"):
        dist.destroy_process_group(group)
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


def again_and_again(rank: int, size: int, store: str) -> list[str]:
    """Meet three times over one store, which remembers; return the kinds of lanes."""
    meeting = dist.FileStore(f"{store}-port", size)
    port = 0 if rank == 0 else int(meeting.get("port"))
    kept = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=500), wait_for_workers=False)
    if rank == 0:
        meeting.set("port", str(kept.port))
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


def ask_who_is_late(rank: int, size: int, store: str) -> list[Any]:
    """Rank 2 does something else, and rank 3 is stopped: rank 0 finds out while rank 1 waits, and then all go on."""
    start(rank, size, store, timeout=timedelta(seconds=500))
    own, gate = dist.new_group([1, 2, 3, 0]), dist.new_group(list(range(size)))
    x = torch.ones(3)
    dist.all_reduce(x, group=own)
    assert covey.torch.who_is_late() == []
    pids: list[Any] = [None] * size
    dist.all_gather_object(pids, os.getpid(), group=gate)
    found: list[Any] = []
    if rank < 2:
        work = dist.broadcast(x, src=1, group=own, async_op=True)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 0:
        until = time.monotonic() + 500
        # Who is behind answers, unless this machine is busy with other things; who is stopped does not.
        while [(late.rank, late.answers) for late in found] != [(2, True), (3, False)] or not found[0].call:
            assert time.monotonic() < until, found
            found = covey.torch.who_is_late(own, timeout=0.5)
        while Path(f"/proc/{pids[3]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < until
            time.sleep(0.01)  # it may have been slow to stop itself
        os.kill(pids[3], signal.SIGCONT)
    if rank < 2:
        dist.barrier(group=gate)
        work.wait()
    else:
        dist.barrier(group=gate)
        dist.broadcast(x, src=1, group=own)
    if rank == 1:
        with raises(covey.ConfigError, "not"):
            covey.torch.who_is_late(dist.new_group([1], backend="gloo", use_local_synchronization=True))
    return [str(late) for late in found]
