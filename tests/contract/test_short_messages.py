"""Messages through shared memory, which the compiled executor moves by itself while nothing else is under way."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from tests.support.compiled import takes_native
from tests.support.values import LANES, same, values
from tests.support.waiting import DEADLINE

import covey
from covey.base.arithmetic import DTYPES
from covey.runtime.group.internals import engine_of
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from covey import Group

SHARED = ["memory"] + [lanes for lanes in LANES if lanes == "shm"]
SEEDS = max(6, int(os.environ.get("COVEY_FUZZ_SEEDS", "0")) // 20)
"""Random orders of messages; `make sanitize` takes more."""
SMALL = {"eager_bytes": "8KiB", "credit_bytes": "64KiB"}


def passed(group: Group) -> int:
    """Return how many messages the compiled executor has moved since it was asked for anything else."""
    return sum(short.counts()[0] + short.counts()[2] for short in engine_of(group).routing.short.values())


class Message(NamedTuple):
    src: int
    dst: int
    tag: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def content(self, number: int) -> np.ndarray[Any, Any]:
        return values(self.src, self.shape, self.dtype, number)


def story(rng: random.Random, size: int, length: int) -> list[Message]:
    shapes: list[tuple[int, ...]] = [(), (1,), (3,), (2, 3), (0, 4), (17,), (2,) * 9, (900,), (3000,)]
    found = []
    for _ in range(length):
        src, dst = rng.sample(range(size), 2)
        found.append(Message(src, dst, rng.choice([0, 0, 0, 7]), rng.choice(DTYPES), rng.choice(shapes)))
    return found


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_messages_arrive_once_and_in_order(seed: int) -> None:
    """All ranks go through one list of messages; each sends and receives its own in one of several ways."""
    size = 2 + seed % 2
    told = story(random.Random(seed), size, 150)

    def body(group: Group) -> None:
        rng, sends = random.Random(1000 * seed + group.rank), []
        for number, message in enumerate(told):
            content = message.content(number)
            if message.src == group.rank:
                work = group.send(content, message.dst, message.tag, async_op=rng.random() < 0.2)
                sends += [work] if work is not None else []
            elif message.dst == group.rank:
                tag = rng.choice([message.tag, covey.ANY])
                if rng.random() < 0.1:
                    assert group.probe(message.src, tag).shape == message.shape
                if rng.random() < 0.1:
                    with pytest.raises(covey.DeadlineError):
                        group.recv(message.src, 99, timeout=0.003)
                if rng.random() < 0.5:
                    out = np.zeros_like(content)
                    assert group.recv(message.src, tag, out=out) is out
                    same(out, content)
                elif rng.random() < 0.2:
                    same(group.recv(message.src, tag, async_op=True).wait(), content)
                else:
                    same(group.recv(message.src, tag, timeout=rng.choice([None, DEADLINE])), content)
        covey.wait_all(sends)
        moved = group.metrics().messages
        mine = [(message.src, message.content(0).nbytes) for message in told if group.rank in message[:2]]
        assert moved.sent == sum(src == group.rank for src, _ in mine)
        assert moved.received_bytes == sum(nbytes for src, nbytes in mine if src != group.rank)
        group.barrier()

    run_threads(size, body, lanes=SHARED[seed % len(SHARED)], settings=SMALL)


@pytest.mark.parametrize("lanes", SHARED)
def test_repeated_short_messages_need_no_messenger(lanes: str, executors: str) -> None:
    def body(group: Group) -> None:
        peer = 1 - group.rank
        for number in range(600):
            mine, theirs = (values(rank, 50, np.float32, number) for rank in (group.rank, peer))
            if group.rank == 0:
                group.send(mine, peer)
                same(group.recv(peer), theirs)
            else:
                same(group.recv(peer, out=np.empty(50, np.float32)), theirs)
                group.send(mine, peer)
        assert (passed(group) >= 1190) == takes_native(executors, group.rank)
        group.barrier()

    run_threads(2, body, lanes=lanes, settings=SMALL)


@pytest.mark.parametrize("lanes", SHARED)
def test_a_rank_that_only_sends_gets_its_credit_back(lanes: str) -> None:
    def body(group: Group) -> None:
        content = [values(0, 500 + number % 7, np.int32, number) for number in range(400)]
        if group.rank == 0:
            for each in content:
                group.send(each, 1)
        else:
            for number, each in enumerate(content):
                if number % 100 == 50:
                    time.sleep(0.02)  # the sender runs out of credit
                same(group.recv(0), each)
        group.barrier()

    run_threads(2, body, lanes=lanes, settings=SMALL)


def begin_short_messages(group: Group) -> None:
    for number in range(3):
        if group.rank == 0:
            group.send(np.arange(number + 1), 1)
            same(group.recv(1), np.arange(number + 2))
        else:
            same(group.recv(0), np.arange(number + 1))
            group.send(np.arange(number + 2), 0)


def test_a_waiting_receive_lets_other_threads_send_and_receive() -> None:
    def body(group: Group) -> None:
        begin_short_messages(group)
        if group.rank == 1:
            for number in range(20):
                same(group.recv(0, 5), np.arange(number))
                group.send_object({"number": number}, 0, 6)
            group.send(np.arange(7), 0, 4)
            return
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(group.recv(1, 4, timeout=DEADLINE)))
        thread.start()
        for number in range(20):
            group.send(np.arange(number), 1, 5)
            assert group.recv_object(1, 6) == {"number": number}
        thread.join(DEADLINE)
        same(got[0], np.arange(7))

    run_threads(2, body)


@pytest.mark.parametrize("ending", ["close", "revoke", "timeout", "peer"])
def test_a_waiting_receive_ends_with_the_group_or_at_its_deadline(ending: str) -> None:
    def body(group: Group) -> str:
        begin_short_messages(group)
        if group.rank == 1:
            if ending == "peer":
                time.sleep(0.1)
                group.close()
            else:
                with pytest.raises(covey.CoveyError):
                    group.recv(0, 9, timeout=DEADLINE)
            return ""
        if ending in ("close", "revoke"):
            threading.Timer(0.1, group.close if ending == "close" else group.revoke).start()
        with pytest.raises(covey.CoveyError) as raised:
            group.recv(1, timeout=0.2 if ending == "timeout" else DEADLINE)
        group.close()
        return type(raised.value).__name__

    expected = {"close": "ClosedError", "revoke": "ClosedError", "timeout": "DeadlineError", "peer": "PeerLostError"}
    assert run_threads(2, body)[0] == expected[ending]


def test_a_message_of_another_kind_is_refused_and_the_next_one_arrives() -> None:
    def body(group: Group) -> None:
        begin_short_messages(group)
        if group.rank == 0:
            group.send(np.arange(4), 1)
            group.send(np.arange(5.0), 1)
        else:
            with pytest.raises(covey.MismatchError, match="recv wants"):
                group.recv(0, out=np.empty(4, np.float32))
            same(group.recv(0), np.arange(5.0))
        for bad in (-2, 1 << 63, "x"):
            with pytest.raises(covey.ConfigError):
                group.send(np.arange(3), 1 - group.rank, bad)  # type: ignore[arg-type]
        with pytest.raises(covey.ConfigError):
            group.recv(1 - group.rank, timeout=-1.0)
        with pytest.raises(TypeError, match="read-only"):
            group.recv(1 - group.rank, out=np.broadcast_to(np.arange(3), 3))
        group.barrier()

    run_threads(2, body)
