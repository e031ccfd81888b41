"""Messages above `eager_bytes` through shared memory: the compiled executor moves them, and Python may finish them."""

from __future__ import annotations

import random
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.compiled import needs_native
from tests.support.values import LANES, same, values
from tests.support.waiting import DEADLINE

import covey
from covey.base.arithmetic import dtype_code
from covey.net.lanes.message_sockets import RingSocket
from covey.net.lanes.ring import memory_bytes
from covey.proto import message_stream
from covey.proto.matching import Matcher
from covey.proto.message_link import LentStreams, MessageSizes
from covey.runtime.group.internals import engine_of
from covey.runtime.messages.lending import short_sizes, unfinished_message
from covey.runtime.messages.message_lane import MessageLane
from covey.runtime.pool import POOLED_BYTES, pool
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARED = ["memory"] + [lanes for lanes in LANES if lanes == "shm"]
SMALL = {"eager_bytes": "4KiB", "credit_bytes": "64KiB", "ring_bytes": "16KiB"}
PIECE = 20_000
"""Neither a part nor a multiple of a ring."""
LENGTHS = [4097, PIECE, PIECE + 1, 3 * PIECE, 7 * PIECE - 5, 16 << 10, 100_000]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_stream, "PAYLOAD_PIECE_BYTES", PIECE)


def passed(group: covey.Group) -> int:
    """Return how many messages the compiled executor has moved since it was asked for anything else."""
    return sum(short.counts()[0] + short.counts()[2] for short in engine_of(group).routing.short.values())


def begin(group: covey.Group) -> None:
    for number in range(3):
        if group.rank == 0:
            group.send(np.arange(number + 1), 1)
            same(group.recv(1), np.arange(number + 2))
        else:
            same(group.recv(0), np.arange(number + 1))
            group.send(np.arange(number + 2), 0)


@pytest.mark.parametrize("lanes", SHARED)
def test_long_messages_need_no_messenger(lanes: str, executors: str) -> None:
    def body(group: covey.Group) -> None:
        peer = 1 - group.rank
        for number, length in enumerate(LENGTHS * 3):
            mine, theirs = (values(rank, (1, length), np.uint8, number) for rank in (group.rank, peer))
            out: Any = np.empty_like(theirs) if number % 2 else None
            if group.rank == 0:
                group.send(mine, peer, number % 3)
                same(group.recv(peer, number % 3, out=out), theirs)
            else:
                same(group.recv(peer, out=out), theirs)
                group.send(mine, peer, number % 3)
        if executors == "native":
            assert passed(group) >= 2 * (len(LENGTHS) * 3 - 1)
        counts = group.metrics().messages
        assert counts.sent == counts.received == 3 * len(LENGTHS)
        assert counts.sent_bytes == counts.received_bytes == 3 * sum(LENGTHS)
        group.barrier()

    run_threads(2, body, lanes=lanes, settings=SMALL)


def test_arrays_that_are_received_without_python_lie_in_blocks_of_the_pool(executors: str) -> None:
    def body(group: covey.Group) -> None:
        begin(group)
        for length, is_pooled in ((POOLED_BYTES - 1, False), (POOLED_BYTES, True), (100_000, True)):
            if group.rank == 0:
                group.send(values(0, (1, length), np.uint8, 1), 1)
                group.barrier()
                continue
            before = pool.used_bytes
            array = group.recv(0)
            same(array, values(0, (1, length), np.uint8, 1))
            assert (pool.used_bytes > before) == is_pooled, length
            group.barrier()

    run_threads(2, body, lanes="memory", settings={"ring_bytes": "1MiB"})


@pytest.mark.parametrize("lanes", SHARED)
@pytest.mark.parametrize("seed", range(3))
def test_other_threads_may_send_and_receive_meanwhile(seed: int, lanes: str) -> None:
    """Whatever they do takes the streams back, at any moment of the messages of the main thread."""

    def body(group: covey.Group) -> None:
        peer, rng = 1 - group.rank, random.Random(10 * seed + group.rank)
        begin(group)
        failed: list[BaseException] = []

        def chat() -> None:
            try:
                for number in range(12):
                    time.sleep(rng.random() / 300)
                    group.send_object(["a", number], peer, 7)
                    assert group.recv_object(peer, 7) == ["a", number]
                    group.iprobe(peer, 8)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=chat)
        thread.start()
        for number in range(40):
            mine, theirs = (values(rank, LENGTHS[number % 7], np.uint8, number) for rank in (group.rank, peer))
            if (group.rank + number) % 2:
                group.send(mine, peer, 1)
                same(group.recv(peer, 1), theirs)
            else:
                same(group.recv(peer, 1, out=np.empty_like(theirs)), theirs)
                group.send(mine, peer, 1)
        thread.join(DEADLINE)
        assert not failed, failed
        counts = group.metrics().messages
        assert (counts.sent, counts.received) == (3 + 40 + 12, 3 + 40 + 12)
        group.barrier()

    run_threads(2, body, lanes=lanes, settings=SMALL)


@pytest.mark.parametrize("does", ["send", "recv"])
@pytest.mark.parametrize("ending", ["close", "revoke", "timeout", "peer"])
def test_a_long_message_ends_with_the_group_or_at_its_deadline(ending: str, does: str) -> None:
    """The peer does not receive it, or does not send the one that is waited for."""

    def body(group: covey.Group) -> str:
        begin(group)
        if group.rank == 1:
            if does == "recv":
                group.send(np.arange(50_000), 0)
            if ending == "peer":
                time.sleep(0.1)
                group.close()
            else:
                with pytest.raises(covey.CoveyError):
                    group.recv(0, 9, timeout=DEADLINE)
            return ""
        if does == "recv":
            same(group.recv(1), np.arange(50_000))
        if ending in ("close", "revoke"):
            threading.Timer(0.1, group.close if ending == "close" else group.revoke).start()
        seconds = 0.2 if ending == "timeout" else DEADLINE
        with pytest.raises(covey.CoveyError) as raised:
            group.send(np.arange(100_000), 1, timeout=seconds) if does == "send" else group.recv(1, timeout=seconds)
        group.close()
        return type(raised.value).__name__

    expected = {"close": "ClosedError", "revoke": "ClosedError", "timeout": "DeadlineError", "peer": "PeerLostError"}
    assert run_threads(2, body, settings=SMALL)[0] == expected[ending]


def test_a_long_message_of_another_kind_is_refused_and_the_next_one_arrives() -> None:
    def body(group: covey.Group) -> None:
        begin(group)
        if group.rank == 0:
            group.send(np.arange(4000), 1)  # `send` returns when the receiver has dropped it
            group.send(np.arange(5000.0), 1)
        else:
            with pytest.raises(covey.MismatchError, match="recv wants"):
                group.recv(0, out=np.empty(4000, np.float32))
            same(group.recv(0), np.arange(5000.0))
        group.barrier()

    run_threads(2, body, settings=SMALL)


RING = 16 << 10


class End:
    """One end of a pair of rings, whose streams can be lent to the compiled executor."""

    def __init__(self, memory: bytearray, doorbell: socket.socket, rank: int) -> None:
        self.made: list[Any] = []
        """What runs while an array is made, once each."""
        self.bell, self.rope = socket.socketpair()
        self.ring = RingSocket(memory, RING, doorbell, first=rank == 0, is_native=True)
        sizes = MessageSizes(eager_bytes=4096, credit_bytes=1 << 16)
        self.ring.prepare_short(
            self.bell.fileno(), self.bell.fileno(), short_sizes(sizes), spins=False, empty=self.empty
        )
        self.rank, self.matcher = rank, Matcher(rank, 2, sizes)
        self.matcher.lane_opened(1 - rank)
        self.lane = MessageLane(1 - rank, self.ring, self.matcher)

    def empty(self, shape: Any, dtype: Any) -> Any:
        while self.made:
            self.made.pop()()
        return np.empty(shape, dtype)

    def step(self) -> None:
        if self.ring.is_ready(sending=False):
            assert self.lane.read()
        self.lane.flush()

    def lend(self) -> Any:
        self.matcher.completed.clear()
        streams = self.matcher.lend(1 - self.rank)
        assert streams is not None
        self.ring.lend(streams)
        return self.ring.short

    def take_back(self) -> Any:
        streams, kept, unfinished, _ = self.ring.take_back()
        message = None if unfinished is None else unfinished_message(unfinished)
        return self.matcher.take_back(1 - self.rank, LentStreams(*streams), kept, message)

    def close(self) -> None:
        self.ring.close()
        self.bell.close()
        self.rope.close()


@pytest.fixture
def ends() -> Iterator[list[End]]:
    memory = bytearray(memory_bytes(RING))
    made = [End(memory, sock, rank) for rank, sock in enumerate(socket.socketpair())]
    for _ in range(2):
        for end in made:
            end.step()
    try:
        yield made
    finally:
        for end in made:
            end.close()


class Driven:
    """Lets a thread move the bytes of an end while the block runs, and until an operation of this end is over."""

    def __init__(self, end: End, operation: Any, begins: threading.Event | None = None) -> None:
        self._end, self._operation, self._begins = end, operation, begins
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        if self._begins is not None:
            self._begins.wait(DEADLINE)
        while not self._is_over.is_set():
            self._end.step()
            time.sleep(20e-6)  # so that the other thread gets the GIL

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        finish(self._end, self._operation, lambda: time.sleep(1e-3))
        self._is_over.set()
        self._thread.join(DEADLINE)


def finish(end: End, operation: Any, step: Any) -> None:
    until = time.monotonic() + DEADLINE
    while operation not in end.matcher.completed:
        assert time.monotonic() < until
        step()


@needs_native
@pytest.mark.parametrize("does", ["send", "recv"])
def test_python_finishes_what_was_not_done_at_the_deadline(ends: list[End], does: str) -> None:
    """Deadlines of up to a millisecond end the call in the middle of its message, wherever it is."""
    here, there = ends
    rng, unfinished = random.Random(5), 0
    for number in range(25):
        content, out = values(number, 60_000, np.uint8), np.zeros(60_000, np.uint8)
        code, shape = dtype_code(content.dtype), content.shape
        if does == "send":
            theirs: Any = there.matcher.receive(0, 3, memoryview(out), (code, shape))
        else:
            theirs = there.matcher.send(memoryview(content), 0, 3, dtype_code=code, shape=shape, is_object=False)
        short = here.lend()
        with Driven(there, theirs):
            seconds = rng.choice([0.0, 0.0002, 0.0005, 0.001, DEADLINE])
            if does == "send":
                result = short.send(content, 3, seconds)
            else:
                result = short.receive(out, 3, time.monotonic() + seconds)
            mine = here.take_back()
            if result is False:  # the announcement has not come
                mine = here.matcher.receive(1, 3, memoryview(out), (code, shape))
            if mine is not None:
                unfinished += 1
                finish(here, mine, here.step)
            else:
                assert result is True or result is out
            finish(there, theirs, here.step)
        here.step()
        there.step()
        there.matcher.completed.clear()
        same(out, content)
    assert unfinished


@needs_native
def test_streams_that_another_thread_takes_back_while_an_array_is_made_are_left_alone(ends: list[End]) -> None:
    here, there = ends
    content = values(0, 60_000, np.uint8)
    code, shape = dtype_code(content.dtype), content.shape
    theirs = there.matcher.send(memoryview(content), 0, 3, dtype_code=code, shape=shape, is_object=False)
    short = here.lend()
    there.step()
    here.made.append(here.take_back)
    assert short.receive(None, 3, time.monotonic() + DEADLINE) is False
    assert here.made == []
    mine = here.matcher.receive(1, 3)
    with Driven(there, theirs):
        finish(here, mine, here.step)
        finish(there, theirs, here.step)
    assert mine.result is not None
    same(mine.result.data, content)


@needs_native
@pytest.mark.parametrize("does", ["send", "recv"])
def test_a_signal_handler_that_raises_ends_the_call(ends: list[End], does: str) -> None:
    here, there = ends
    short = here.lend()
    content = values(0, 60_000, np.uint8)
    if does == "recv":
        there.lend().send(content, 3, 0.0)

    def handler(*_: object) -> None:
        raise InterruptedError("by a signal")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        if does == "send":
            _, _, error = short.send(content, 3, 60.0)
        else:
            _, _, error = short.receive(np.empty_like(content), 3, time.monotonic() + DEADLINE)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert type(error) is InterruptedError
    assert here.take_back() is not None


@needs_native
def test_a_handler_that_does_not_raise_lets_the_call_go_on(ends: list[End]) -> None:
    here, there = ends
    content = values(0, 60_000, np.uint8)
    out = np.zeros_like(content)
    theirs = there.matcher.receive(0, 3, memoryview(out))
    short, is_handled = here.lend(), threading.Event()
    before = signal.signal(signal.SIGALRM, lambda *_: is_handled.set())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.03)
        with Driven(there, theirs, begins=is_handled):
            assert short.send(content, 3, 60.0) is True
    finally:
        signal.signal(signal.SIGALRM, before)
    same(out, content)
    assert here.take_back() is None
