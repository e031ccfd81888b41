"""Random bytes from a peer end a compiled lane or wait for more, and do nothing else. The seeds are fixed.

`COVEY_FUZZ_SEEDS` sets how many seeds there are; `make sanitize` takes many.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.contract.test_native_lanes import sealed_end
from tests.contract.test_sealed_lanes import LANE, SECRET, unix_pairs
from tests.support.compiled import needs_native
from tests.support.native_ends import NativeEnd, OtherHeaderError, transfers

from covey.net.lanes.lane import LaneClosedError
from covey.wire.seal import DIALLER, NEXT_KEY, RECORD_OVERHEAD_BYTES, SEALED_RECORD_LIMIT, Sealer, lane_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = needs_native

SEEDS = int(os.environ.get("COVEY_FUZZ_SEEDS", "40"))
DTYPES = [None, np.dtype(np.uint8), np.dtype(np.uint32), np.dtype(np.complex128)]
LENGTHS = [0, 1, 3, 4, 15, 16, 63, 64, 65, 80, 2048, 2112, 2113, 5000, 70_000]


@pytest.fixture
def ends() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice(LENGTHS))


def plausible(rng: random.Random, wanted: list[Any]) -> bytes:
    """Return bytes of which a part is what the receiver waits for."""
    data = b"".join(each.header + each.payload.tobytes() for each in wanted)
    if rng.random() < 0.5:
        at = rng.randrange(len(data))
        data = data[:at] + noise(rng) + data[at + rng.choice(LENGTHS) :]
    return data if rng.random() < 0.5 else data[: rng.randrange(len(data) + 1)] + noise(rng)


def deliver(end: NativeEnd, sock: socket.socket, data: bytes, rng: random.Random, *, closes: bool) -> None:
    """Send `data` in random portions, and receive after each of them."""
    left = memoryview(data)
    with contextlib.suppress(LaneClosedError, OtherHeaderError):
        while left:
            with contextlib.suppress(BlockingIOError):
                left = left[sock.send(left[: rng.choice([1, 7, 64, 4096, 1 << 17])]) :]
            end.advance()
            end.check_canaries()
        if closes:
            sock.shutdown(socket.SHUT_WR)
        for _ in range(3):
            end.advance()
    end.check_canaries()


def wanted_of(rng: random.Random) -> list[Any]:
    dtype = rng.choice(DTYPES)
    size = dtype.itemsize if dtype is not None else 1
    return transfers([rng.choice(LENGTHS) // size * size for _ in range(4)], dtype)


@pytest.mark.parametrize("make", [noise, plausible], ids=["noise", "plausible"])
def test_random_bytes_in_a_stream(ends: contextlib.ExitStack, make: Callable[..., bytes]) -> None:
    from covey.net.lanes.native import NativeStreamLane

    for seed in range(SEEDS):
        rng = random.Random(seed)
        wanted = wanted_of(rng)
        data = make(rng) if make is noise else make(rng, wanted)
        with contextlib.ExitStack() as stack:
            (near,), (far,) = unix_pairs(stack, 1)
            lane = NativeStreamLane(far, "unix")
            stack.callback(lane.close)
            end = NativeEnd(lane, [], wanted)
            stack.callback(end.close)
            lane.peek()
            deliver(end, near, data, rng, closes=rng.random() < 0.5)


def test_random_bytes_in_a_sealed_stream() -> None:
    for seed in range(SEEDS):
        rng = random.Random(seed)
        with contextlib.ExitStack() as stack:
            near, far = unix_pairs(stack, 1)
            end = NativeEnd(sealed_end(stack, far, is_native=True, dialler=False), [], wanted_of(rng))
            stack.callback(end.close)
            length = rng.choice(
                [0, 1, 64, 2112, SEALED_RECORD_LIMIT, SEALED_RECORD_LIMIT + 1, NEXT_KEY | 64, 0xFFFFFFFF]
            )
            deliver(end, near[0], struct.pack("<I", length) + noise(rng), rng, closes=rng.random() < 0.5)
            assert not end.done
            assert end.lane.peek() == b""


def test_random_records_of_a_peer_that_has_the_key() -> None:
    """A member that knows the secret and is out of its mind: its records open, but not as the plan says."""
    for seed in range(SEEDS):
        rng = random.Random(seed)
        wanted = wanted_of(rng)
        sealer = Sealer(lane_keys(SECRET, LANE, 0)[DIALLER], LANE, 0, DIALLER)
        plain, wire = plausible(rng, wanted) + b"\0", b""
        while plain:
            length = min(len(plain), max(1, rng.choice([*LENGTHS, 64 + len(wanted[0].payload)])))
            if rng.random() < 0.1:
                sealer.renew()
            record = memoryview(bytearray(length + RECORD_OVERHEAD_BYTES))
            sealer.seal(plain[:length], record)
            wire, plain = wire + bytes(record), plain[length:]
        with contextlib.ExitStack() as stack:
            near, far = unix_pairs(stack, 1)
            end = NativeEnd(sealed_end(stack, far, is_native=True, dialler=False), [], wanted)
            stack.callback(end.close)
            deliver(end, near[0], wire, rng, closes=rng.random() < 0.5)


def test_random_plans_are_refused_or_run(ends: contextlib.ExitStack) -> None:
    """Plans come from this process, but a mistake in one must not become a step outside of a buffer."""
    from covey.base.native import native

    module = native().module
    odd = [-1, 0, 1, 2, 3, 100, 1 << 20, 1 << 31, (1 << 31) - 1, 1 << 62, (1 << 63) - 1]
    for seed in range(5 * SEEDS):
        rng = random.Random(seed)
        sends = tuple(tuple(rng.choice(odd) for _ in range(5)) for _ in range(rng.randrange(3)))
        recvs = tuple(tuple(rng.choice(odd) for _ in range(6)) for _ in range(rng.randrange(3)))
        room = np.full(256, 0xA5, np.uint8)
        buffers = [room[64:192][: rng.choice([0, 1, 100])] for _ in range(rng.randrange(4))]
        runner = module.Runner(2)
        with contextlib.suppress(ValueError, OverflowError, MemoryError):
            plan = module.Plan(sends, recvs, tuple(rng.random() < 0.5 for _ in recvs))
            itemsize = rng.choice([1, 2, 20, 100])
            elements = [each if each.nbytes % itemsize else each.view(f"V{itemsize}") for each in buffers]
            undo = module.Undo() if rng.random() < 0.5 else None
            runner.start(plan, elements, None, 1, bytes(32), 0, undo, False, 0, 0, 0)
        runner.finish()
        assert np.all(room[:64] == 0xA5)
        assert np.all(room[192:] == 0xA5)
