"""One rank of one contender: waits on its socket without using the CPU, and runs rounds when told to.

Started as `python -m covey.lab.bench.worker ENGINE ADDRESS RANK SIZE FOLDER [--busy]`.

Inputs differ by rank and position, and the exact result of each operation is known. They are small whole numbers, so
every dtype holds their sums exactly and the order of additions does not matter.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import sys
import threading
import time
import traceback
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.lab.bench.engines import CollectiveEngine, Step, open_engine, partner
from covey.lab.bench.processes import EngineUp, Failed, Measured, PrepareOrder, RankChannel, TimeOrder, ValuesRight
from covey.lab.bench.sweep import MEASURED_DTYPES, MEASURED_OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

PIECE: Final = 1 << 18
"""Elements looked at together, so that checking a large result needs little memory."""
FAILURE_CHARACTERS = 8000
LIBRARY_CLOSE_SECONDS = 3.0
"""How long the library may take to close in good order after the front has ended."""


def pattern(rank: int, start: int, stop: int) -> NDArray[np.int64]:
    """Return elements start..stop of `rank`'s input: 0..7, hashed, so that shifted or swapped elements are noticed."""
    mixed = np.arange(start, stop, dtype=np.uint64) + np.uint64((rank + 1) << 40)
    for _ in range(2):
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(32)
    return (mixed & np.uint64(7)).astype(np.int64)


def fill(x: NDArray[Any], rank: int) -> None:
    """Write `rank`'s input into `x`."""
    for start in range(0, x.size, PIECE):
        stop = min(start + PIECE, x.size)
        x[start:stop] = pattern(rank, start, stop)


def expected(operation: str, rank: int, size: int, start: int, stop: int, part: int) -> NDArray[np.int64] | None:
    """Return elements start..stop of the result on `rank`; None if the operation does not define it.

    `part` is the length of one rank's share, for operations that cut or join buffers; a range never crosses a share.
    """
    match operation:
        case "all_reduce":
            return _summed(size, start, stop)
        case "reduce":
            return _summed(size, start, stop) if rank == 0 else None
        case "broadcast":
            return pattern(0, start, stop)
        case "all_gather":
            source, offset = divmod(start, part)
            return pattern(source, offset, offset + stop - start)
        case "reduce_scatter":
            return _summed(size, rank * part + start, rank * part + stop)
        case "all_to_all":
            source, offset = divmod(start, part)
            return pattern(source, rank * part + offset, rank * part + offset + stop - start)
        case "send_recv":
            peer = partner(rank, size)
            return None if peer == rank else pattern(peer, start, stop)
    return None


def first_wrong(operation: str, result: NDArray[Any], rank: int, size: int, part: int) -> str | None:
    """Describe the first element of `result` that is not what it must be; None if all are."""
    length = part * size if operation in ("all_gather", "all_to_all") else result.size
    if result.size != length:
        return f"{result.size} elements instead of {length}"
    for share in range(0, result.size, part):
        for start in range(share, min(share + part, result.size), PIECE):
            stop = min(start + PIECE, share + part, result.size)
            wanted = expected(operation, rank, size, start, stop, part)
            if wanted is None:
                continue
            wanted, got = wanted.astype(result.dtype), result[start:stop]
            if not np.array_equal(got, wanted):
                at = int(np.flatnonzero(got != wanted)[0])
                return f"element {start + at} of {result.size} is {got[at]}, not {wanted[at]}"
    return None


def _summed(size: int, start: int, stop: int) -> NDArray[np.int64]:
    total = pattern(0, start, stop)
    for rank in range(1, size):
        total += pattern(rank, start, stop)
    return total


def main(arguments: list[str]) -> None:
    """Open the engine, send Hello, and serve the front until it closes the connection."""
    engine_name, address, rank, size, folder, *flags = arguments
    busy = BusyThread() if flags == ["--busy"] else None
    engine = open_engine(engine_name, rank=int(rank), size=int(size), folder=folder)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        end_with(sock)
        channel = RankChannel(sock)
        channel.send(EngineUp(engine.rank, os.getpid(), engine.versions))
        try:
            serve(engine, channel, busy)
        except Exception:
            channel.send(Failed(traceback.format_exc()[-FAILURE_CHARACTERS:]))
            # The peers may be stuck in a collective with this rank; an orderly close could wait for them.
            os._exit(1)
        engine.close()


def end_with(front: socket.socket) -> None:
    """End this process soon after the front closed the connection: a library may wait for a dead rank for ever."""
    poll = select.poll()
    poll.register(front, getattr(select, "POLLRDHUP", select.POLLHUP))

    def watch() -> None:
        poll.poll()
        time.sleep(LIBRARY_CLOSE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="front-watch", daemon=True).start()


def serve(engine: CollectiveEngine, channel: RankChannel, busy: BusyThread | None) -> None:
    """Carry out the orders of the front, with one answer for each."""
    round_of: Callable[[int], Measured] | None = None
    for order in channel.orders():
        match order:
            case PrepareOrder():
                round_of = None  # frees the last operation's buffers before the next ones are made
                round_of = prepare(engine, order, busy)
                channel.send(ValuesRight(engine.lanes()))
            case TimeOrder(iterations):
                if round_of is None:
                    raise RuntimeError("told to run before anything was prepared")
                channel.send(round_of(iterations))


def prepare(engine: CollectiveEngine, order: PrepareOrder, busy: BusyThread | None) -> Callable[[int], Measured]:
    """Bind the operation to fresh buffers, check one result, and return what times a round of it."""
    operation, elements = MEASURED_OPERATIONS[order.operation], order.elements
    part = elements // engine.size if operation.in_parts else elements
    x = np.empty(part if operation.name == "all_gather" else elements, MEASURED_DTYPES[order.dtype])
    out = np.empty(part if operation.name == "reduce_scatter" else elements, MEASURED_DTYPES[order.dtype])
    step, landed = engine.bind(operation.name, x, out)
    fill(x, engine.rank)
    out.fill(0)
    check(engine, operation.name, step, landed, part)
    # Sums of zeros stay zeros: no overflow, however often the operation is repeated in place.
    x.fill(0)
    fence = engine.barrier if operation.one_way else None
    halves = 2 if operation.name == "send_recv" else 1

    def round_of(iterations: int) -> Measured:
        with busy or nullcontext():
            engine.barrier()
            before = cpu_seconds() - (busy.cpu_seconds if busy else 0.0)
            nanoseconds = timed(step, iterations, fence)
            after = cpu_seconds() - (busy.cpu_seconds if busy else 0.0)
        return Measured([taken // halves for taken in nanoseconds], max(0.0, after - before) / halves)

    return round_of


def check(engine: CollectiveEngine, operation: str, step: Step, landed: NDArray[Any] | None, part: int) -> None:
    """Run the operation once; ArithmeticError if its result is wrong, so that no wrong operation is timed."""
    engine.barrier()
    returned = step()
    result = landed if landed is not None else returned
    array = np.concatenate(result) if isinstance(result, list) else np.asarray(result)
    if wrong := first_wrong(operation, array.reshape(-1), engine.rank, engine.size, max(1, part)):
        raise ArithmeticError(f"{operation} gave a wrong result on rank {engine.rank}: {wrong}")


def timed(step: Step, iterations: int, fence: Callable[[], None] | None) -> list[int]:
    """Return what each of `iterations` steps took, in nanoseconds."""
    clock, taken = time.perf_counter_ns, [0] * iterations
    for i in range(iterations):
        if fence is not None:
            fence()
        start = clock()
        step()
        taken[i] = clock() - start
    return taken


def cpu_seconds() -> float:
    """Return the user and system time of this process so far, all threads together."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class BusyThread:
    """A pure-Python thread that competes for the interpreter while a round runs, as a user's thread might."""

    def __init__(self) -> None:
        self.cpu_seconds = 0.0
        """Processor seconds of the thread itself, which do not count for the contender."""
        self._running = threading.Event()
        threading.Thread(target=self._count, name="busy", daemon=True).start()

    def __enter__(self) -> None:
        self._running.set()

    def __exit__(self, *exc_info: object) -> None:
        self._running.clear()

    def _count(self) -> None:
        counted = 0
        while self._running.wait():
            while self._running.is_set():
                for _ in range(1000):
                    counted += 1
                self.cpu_seconds = time.thread_time()


if __name__ == "__main__":
    main(sys.argv[1:])
