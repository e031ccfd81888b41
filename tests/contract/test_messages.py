"""sendrecv, probe, several arrays per message, cancelled works, and waiting for several works."""

from __future__ import annotations

import asyncio
import random
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.compiled import EXECUTORS, use_executors
from tests.support.sets import in_part, pairs
from tests.support.values import LANES, same, values
from tests.support.waiting import DEADLINE

import covey
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from covey import Group

on_lanes_in_turn = in_part("lanes", LANES)
LARGE = 200_000
"""Elements of a message that waits for its receiver."""


@pytest.mark.parametrize(("size", "lanes"), pairs([2, 3, 1], LANES))
def test_a_ring_of_exchanges_never_waits_in_vain(size: int, lanes: str) -> None:
    def body(group: Group) -> None:
        right, left = (group.rank + 1) % size, (group.rank - 1) % size
        for count in (0, 5, LARGE):
            same(
                group.sendrecv(values(group.rank, count, np.float32, 1), right, left),
                values(left, count, np.float32, 1),
            )
            out = np.empty(count)
            got = group.sendrecv(values(group.rank, count, np.float64, 2), right, left, 3, out=out)
            assert got is out
            same(out, values(left, count, np.float64, 2))
            got = group.sendrecv(values(group.rank, count, np.int8, 3), right, covey.ANY, group.rank, recv_tag=left)
            same(got, values(left, count, np.int8, 3))
        group.barrier()  # a rank that leaves ends the others' receives from any rank

    run_threads(size, body, lanes=lanes)


def test_an_exchange_that_cannot_end_fails_and_leaves_no_message_behind() -> None:
    def body(group: Group) -> None:
        if group.rank == 0:
            with pytest.raises(covey.DeadlineError):
                group.sendrecv(np.arange(3), 1, 1, tag=1, timeout=0.1)
        group.barrier()
        if group.rank == 1:
            same(group.recv(0, 1), np.arange(3))  # it was sent: only the answer was missing
            group.send(np.arange(4), 0, tag=2)
        else:
            same(group.recv(1, 2), np.arange(4))
        x = np.arange(4)
        with pytest.raises(covey.ConfigError, match="share memory"):
            group.sendrecv(x, 1 - group.rank, 1 - group.rank, out=x)
        with pytest.raises(covey.ConfigError, match="no rank 7"):
            group.sendrecv(x, 7, 1 - group.rank)
        group.barrier()
        assert group.iprobe() is None

    run_threads(2, body, lanes="unix")


@on_lanes_in_turn
def test_several_arrays_arrive_as_a_list_in_one_message(lanes: str) -> None:
    def body(group: Group) -> None:
        def arrays(rank: int, count: int) -> list[Any]:
            strided = values(rank, (count, 6), np.float32, 4)[:, ::2]
            return [
                values(rank, (count, 2), np.float64, 1),
                values(rank, 3, np.uint8, 2),
                strided,
                np.array(rank + 0.5),
            ]

        other = 1 - group.rank
        for count in (0, 1, 7, 9001):
            works = [group.send(arrays(group.rank, count), other, count, async_op=True)]
            works.append(group.send(tuple(arrays(group.rank, count)[:1]), other, count, async_op=True))
            found, one = group.recv(other, count), group.recv(other, count)
            covey.wait_all(works)
            assert isinstance(found, list)
            assert (len(found), len(one)) == (4, 1)
            for got, expected in zip(found, arrays(other, count), strict=True):
                same(got, expected)
                assert got.flags.writeable
                assert got.flags.aligned
        same(group.sendrecv([np.arange(3), np.arange(2.0)], other, other)[1], np.arange(2.0))
        group.send([1, 2, 3], other)
        same(group.recv(other), np.array([1, 2, 3]))  # numbers are one array

    run_threads(2, body, lanes=lanes)


def test_several_arrays_are_no_array_and_no_object() -> None:
    def body(group: Group) -> None:
        other = 1 - group.rank
        for tag in range(2):
            group.send([np.arange(3), np.arange(4)], other, tag)
        with pytest.raises(covey.MismatchError, match="recv wants"):
            group.recv(other, 0, out=np.empty(7, np.int64))
        with pytest.raises(covey.MismatchError, match=r"use recv$"):
            group.recv_object(other, 1)
        group.send_object([1], other, 2)
        with pytest.raises(covey.MismatchError, match="use recv_object"):
            group.recv(other, 2)

    run_threads(2, body, lanes="unix")


def test_arrays_that_cannot_be_name_their_sender_and_later_messages_arrive() -> None:
    def body(group: Group) -> None:
        if group.rank == 1:
            forged = np.frombuffer(struct.pack("<B3xIBB6xQ", 4, 1, 0, 1, 1 << 40), np.uint8)
            group._messages._send(forged, 0, 1, 0, forged.shape, True, None, False)
            group.send([np.arange(3)], 0, 1)
        else:
            with pytest.raises(covey.RemoteProtocolError, match="rank 1 sent arrays that cannot be used"):
                group.recv(1, 1)
            same(group.recv(1, 1)[0], np.arange(3))

    run_threads(2, body, lanes="unix")


@on_lanes_in_turn
def test_a_probe_describes_the_message_that_the_next_receive_gets(lanes: str) -> None:
    def body(group: Group) -> None:
        if group.rank == 0:
            assert group.iprobe() is None
            group.barrier()
            info = group.probe()
            assert info == (1, 5, 12, False, np.dtype(np.float32), (3, 1))
            assert group.iprobe(1, 5) == info == group.probe(1, 5)
            assert group.iprobe(1, 6) is None
            same(group.recv(info.source, info.tag), np.ones((3, 1), np.float32))
            large = group.probe(tag=7, timeout=DEADLINE)
            assert (large.nbytes, large.shape) == (8 * LARGE, (LARGE,))
            assert group.probe(1, 8).is_object
            out = np.empty(large.shape, large.dtype)
            same(group.recv(tag=7, out=out), np.arange(LARGE))
            assert group.recv_object(1, 8) == "x"
            with pytest.raises(covey.DeadlineError):
                group.probe(timeout=0.05)
            with pytest.raises(covey.ConfigError, match="no rank 9"):
                group.iprobe(9)
            group.barrier()
        else:
            group.barrier()
            group.send(np.ones((3, 1), np.float32), 0, 5)
            work = group.send(np.arange(LARGE), 0, 7, async_op=True)
            group.send_object("x", 0, 8)
            work.wait()
            group.barrier()

    run_threads(2, body, lanes=lanes)


def test_a_message_is_seen_without_waiting_for_it() -> None:
    def body(group: Group) -> int:
        if group.rank == 1:
            group.send(np.arange(10), 0, 3)
            return 0
        looks = 0
        until = time.monotonic() + DEADLINE
        while (info := group.iprobe(1)) is None and time.monotonic() < until:
            looks += 1
            time.sleep(0.001)
        assert info is not None
        assert info.tag == 3
        same(group.recv(1), np.arange(10))
        return looks

    run_threads(2, body, lanes="unix")


def test_a_receive_and_a_probe_can_be_cancelled_and_the_message_goes_to_the_next() -> None:
    def body(group: Group) -> None:
        if group.rank == 0:
            out = np.zeros(LARGE)
            receive, probe = group.recv(1, 1, out=out, async_op=True), group.probe(1, 1, async_op=True)
            assert receive.cancel()
            assert probe.cancel()
            for work in (receive, probe):
                assert work.done()
                assert not work.cancel(), "it has ended"
                with pytest.raises(covey.CancelledError, match="was cancelled"):
                    work.wait()
            group.barrier()
            same(group.recv(1, 1), np.arange(float(LARGE)))
            assert not out.any()
        else:
            group.barrier()
            group.send(np.arange(float(LARGE)), 0, 1)

    run_threads(2, body, lanes="unix")


@pytest.mark.parametrize("executors", EXECUTORS)
def test_a_cancelled_await_swallows_no_message(executors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that comes later, nor one that came at the moment of cancelling."""
    use_executors(monkeypatch, executors)

    async def receive(group: Group) -> None:
        for count in (10, LARGE):
            with pytest.raises(TimeoutError):  # nothing was sent yet
                await asyncio.wait_for(group.recv(1, count, async_op=True), 0.01)
            group.barrier()
            same(group.recv(1, count), np.arange(float(count)))
            for out in (None, np.zeros(count)):
                await asyncio.sleep(0)
                work = group.recv(1, count, out=out, async_op=True)
                task = asyncio.ensure_future(asyncio.wait_for(work, None))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                group.barrier()
                assert work.wait_until_done(DEADLINE), "the loop stands still while the message comes"
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                with pytest.raises(covey.CancelledError):
                    work.wait()
                same(group.recv(1, count), np.arange(float(count)) + 1)
                same(group.recv(1, count), np.arange(float(count)) + 2)

    def body(group: Group) -> None:
        if group.rank == 0:
            asyncio.run(receive(group))
            return
        for count in (10, LARGE):
            group.barrier()
            group.send(np.arange(float(count)), 0, count)
            for _ in range(2):
                group.barrier()
                works = [group.send(np.arange(float(count)) + more, 0, count, async_op=True) for more in (1, 2)]
                for work in works:
                    work.wait()

    run_threads(2, body, lanes="unix")


@pytest.mark.parametrize("executors", EXECUTORS)
def test_messages_arrive_once_and_in_order_though_awaits_are_cancelled_at_random(
    executors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_executors(monkeypatch, executors)
    count = 60

    def size_of(number: int) -> int:
        return LARGE if number % 7 == 3 else 1 + number

    async def receive(group: Group, seed: int) -> tuple[int, int]:
        rng, cancelled = random.Random(seed), 0
        for number in range(count):
            while True:
                work = group.recv(1, async_op=True)
                task = asyncio.ensure_future(asyncio.wait_for(work, None))
                if cancelled < 20 * count:
                    for _ in range(rng.randrange(1, 12)):  # the first turn lets the await begin
                        await asyncio.sleep(0)
                    task.cancel()
                try:
                    got = await task
                except asyncio.CancelledError:
                    cancelled += 1
                    continue
                assert got.size == size_of(number), f"seed {seed}: message {number}"
                assert (got == number).all(), f"seed {seed}: message {number}"
                break
        return count, cancelled

    def body(group: Group) -> None:
        for seed in range(3):
            if group.rank == 0:
                asyncio.run(receive(group, seed))
            else:
                for number in range(count):
                    group.send(np.full(size_of(number), float(number)), 0)
            group.barrier()
        assert group.rank or group.iprobe() is None

    run_threads(2, body, lanes="unix")


def test_a_message_that_an_interrupted_call_has_received_goes_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: Group) -> None:
        if group.rank == 1:
            group.send(np.arange(5), 0, 3)
            group.send(np.arange(6), 0, 4)
            group.barrier()
            group.barrier()
            return
        group.barrier()
        messenger = group._engine.routing.messenger()
        drive = messenger._drive

        def interrupted(work: Any, deadline: float | None) -> None:
            drive(work, deadline)
            raise KeyboardInterrupt

        monkeypatch.setattr(messenger, "_drive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            group.recv(1, 3)
        monkeypatch.undo()
        same(group.recv(1, 3), np.arange(5))
        with pytest.raises(covey.DeadlineError):  # rank 1 does not receive
            group.sendrecv(np.zeros(LARGE), 1, 1, 9, recv_tag=4, timeout=0.2)
        same(group.recv(1, 4), np.arange(6))
        group.barrier()

    run_threads(2, body, lanes="unix")


def test_a_send_can_be_cancelled_only_before_it_is_announced() -> None:
    def body(group: Group) -> None:
        if group.rank == 0:
            announced = group.send(np.arange(LARGE), 1, 1, async_op=True)
            assert not announced.cancel(), "the receiver was told of it"
            small = [group.send(np.full(1 << 14, at, np.uint8), 1, 2, async_op=True) for at in range(8)]
            waiting = [work for work in small if not work.done()]
            assert 0 < len(waiting) < 8, "the receiver keeps 64 KiB"
            assert waiting[0].cancel()
            assert not small[0].cancel(), "it is done"
            group.barrier()
            group.send(np.array([99], np.uint8), 1, 2)
            covey.wait_all([announced, *(work for work in small if work is not waiting[0])])
        else:
            group.barrier()
            got: list[int] = []
            while not got or got[-1] != 99:
                got.append(int(group.recv(0, 2)[0]))
            assert sorted(got) == got
            assert len(got) == 8, "seven of eight, and the last: one was never sent"
            same(group.recv(0, 1), np.arange(LARGE))

    run_threads(2, body, lanes="unix", settings={"credit_bytes": "64KiB", "eager_bytes": "32KiB"})


def test_a_collective_cannot_be_cancelled() -> None:
    def body(group: Group) -> Any:
        works = [group.all_reduce(np.full(5, group.rank + at), async_op=True) for at in range(3)]
        assert not any(work.cancel() for work in works)
        return [float(work.wait()[0]) for work in works]

    assert run_threads(2, body) == [[1.0, 3.0, 5.0]] * 2


def test_a_thread_that_waits_for_a_cancelled_work_is_woken() -> None:
    def body(group: Group) -> None:
        work = group.recv(1 - group.rank, 1, async_op=True)
        errors: list[BaseException | None] = []
        thread = threading.Thread(target=lambda: errors.append(work.exception()), daemon=True)
        thread.start()
        time.sleep(0.05)
        assert work.cancel()
        thread.join(DEADLINE)
        assert isinstance(errors[0], covey.CancelledError)
        group.barrier()

    run_threads(2, body, lanes="unix")


def test_all_works_are_waited_for_and_the_first_failure_is_raised_with_the_others_noted() -> None:
    def body(group: Group) -> None:
        other = 1 - group.rank
        works = [group.all_reduce(np.full(3, group.rank + 1.0), async_op=True), group.recv(other, 1, async_op=True)]
        works.append(group.send(np.arange(2) + group.rank, other, 1, async_op=True))
        total, received, sent = covey.wait_all(works, timeout=DEADLINE)
        assert (float(total[0]), int(received[1]), sent) == (3.0, other + 1, None)
        assert covey.wait_all([]) == []
        late = group.recv(other, 2, async_op=True)
        with pytest.raises(covey.DeadlineError, match="1 of 2 works are not done"):
            covey.wait_all([works[0], late], timeout=0.05)
        second = group.recv(other, 3, async_op=True)
        late.cancel()
        second.cancel()
        with pytest.raises(covey.CancelledError) as caught:
            covey.wait_all([works[0], late, second])
        assert caught.value is late.exception()
        assert "with tag 3 was cancelled" in caught.value.__notes__[0]
        group.barrier()  # a rank that has left ends what the other one still expects from it

    run_threads(2, body, lanes="unix")


def test_the_first_work_that_ends_is_named_by_its_position() -> None:
    def body(group: Group) -> None:
        other = 1 - group.rank
        works = [group.recv(other, tag, async_op=True) for tag in range(3)]
        with pytest.raises(covey.DeadlineError, match="none of 3 works"):
            covey.wait_any(works, timeout=0.02)
        group.barrier()
        for tag in (1, 0, 2):
            group.send(np.array([tag]), other, tag)
            assert covey.wait_any([works[tag]], timeout=DEADLINE) == 0
            assert works[covey.wait_any(works)].done()
        assert covey.wait_any(works) == 0
        assert all(not work._callbacks for work in works)
        with pytest.raises(covey.ConfigError, match="at least one"):
            covey.wait_any([])

    run_threads(2, body, lanes="unix")


def test_groups_are_split_restored_and_closed_without_blocking_the_loop() -> None:
    has_gone_on = threading.Event()

    def body(group: Group) -> None:
        async def main() -> None:
            ticks = 0

            async def tick() -> None:
                nonlocal ticks
                while True:
                    ticks += 1
                    if group.rank == 0 and ticks > 5:
                        has_gone_on.set()
                    await asyncio.sleep(0.005)

            ticking = asyncio.create_task(tick())
            if group.rank == 1:  # rank 0 waits in the split, and its loop goes on
                assert await asyncio.to_thread(has_gone_on.wait, DEADLINE)
            async with await group.split_async(0) as half:
                state = {"w": np.full(4, float(half.rank))}
                await half.restore_async(state)
                assert state["w"].tolist() == [0.0] * 4
                assert await half.all_reduce(1, async_op=True) == 2
            with pytest.raises(covey.ClosedError):
                half.barrier()
            assert await group.split_async(None) is None
            ticking.cancel()

        asyncio.run(main())

    run_threads(2, body, lanes="unix")
