"""Every kind of operation in one process, as often as asked: `python -m covey.lab.soak --operations 200000`.

The ranks are threads, each of which has a whole node. All take the same operations from the same random numbers, check
every result, and compare what the process holds (memory, descriptors, threads) with what it held after the first part:
what grows with the number of operations is a leak, and one that hangs ends with an error at its deadline.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.errors import CoveyError
from covey.base.numbers import PRIORITIES
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.runtime.group.group import Group

LARGEST: Final = 200_000
"""Elements of the largest array. Sizes are log-uniform."""
EXTRA_BYTES: Final = 48 << 20
"""How much more memory the process may occupy than after the first part: what malloc keeps for each thread varies."""
EXTRA_OBJECTS: Final = 24
"""How many more descriptors and threads there may be: those of idle helpers end ten seconds after their last use."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Holdings:
    """What the process holds at one moment."""

    operations: int
    resident_bytes: int
    descriptors: int
    threads: int

    def __str__(self) -> str:
        return (
            f"{self.operations:,} operations: {self.resident_bytes >> 20} MiB, {self.descriptors} descriptors, "
            f"{self.threads} threads"
        )


@dataclass
class Soak:
    """A course of operations, and what was held meanwhile."""

    operations: int
    ranks: int = 3
    lanes: str = "shm"
    seed: int = 0
    parts: int = 20
    tell: Callable[[Holdings], None] | None = None
    held: list[Holdings] = field(default_factory=list)

    def run(self) -> list[Holdings]:
        """Perform the operations.

        Raises:
            ExceptionGroup: on some rank an operation failed, or what the process holds has grown.
        """
        run_threads(self.ranks, self._take_part, lanes=self.lanes, timeout=120 + self.operations / 20)
        return self.held

    def _take_part(self, group: Group) -> None:
        chance, course = random.Random(self.seed), Course(group)
        course.serve()
        group.barrier()
        for number in range(self.operations):
            name = chance.choice(course.names)
            size = int(LARGEST ** chance.random())
            root = chance.randrange(group.size)
            try:
                course.perform(name, number, size, root)
            except (CoveyError, AssertionError) as error:
                error.add_note(f"operation {number}, {name} of {size} elements, root {root}, seed {self.seed}")
                raise
            if (number + 1) % max(self.operations // self.parts, 1) == 0:
                group.barrier()
                if group.rank == 0:
                    self._look(number + 1)

    def _look(self, operations: int) -> None:
        now = Holdings(
            operations, resident_bytes(), len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
        )
        self.held.append(now)
        if self.tell is not None:
            self.tell(now)
        first = self.held[min(1, len(self.held) - 1)]
        assert now.resident_bytes <= first.resident_bytes + EXTRA_BYTES, f"memory grew from {first} to {now}"
        assert now.descriptors <= first.descriptors + EXTRA_OBJECTS, f"descriptors are left open: {first}, {now}"
        assert now.threads <= first.threads + EXTRA_OBJECTS, f"threads are left behind: {first}, {now}"


class Course:
    """The operations, each with a check of its result on every rank."""

    def __init__(self, group: Group) -> None:
        self._group, self._next, self._last = group, (group.rank + 1) % group.size, (group.rank - 1) % group.size
        self._kinds: dict[str, Callable[[int, int, int], None]] = {
            "all_reduce": self._all_reduce,
            "all_reduce, compressed": self._compressed,
            "all_reduce, two works": self._works,
            "reduce": self._reduce,
            "broadcast": self._broadcast,
            "all_gather": self._all_gather,
            "gather": self._gather,
            "scatter": self._scatter,
            "reduce_scatter": self._reduce_scatter,
            "all_to_all": self._all_to_all,
            "scan": self._scan,
            "barrier": self._barrier,
            "sync_gradients": self._sync_gradients,
            "all_gather_object": self._objects,
            "sendrecv": self._sendrecv,
            "send and recv": self._messages,
            "send, urgent": self._urgent_messages,
            "send_object": self._message_objects,
            "recv that is late": self._late,
            "call": self._call,
            "call, urgent": self._urgent_call,
            "call that fails": self._failed_call,
            "stream": self._stream,
            "store": self._store,
            "split": self._split,
        }
        self.names = list(self._kinds)

    def serve(self) -> None:
        """Register the functions that other ranks call."""

        def fail(number: int) -> None:
            raise ValueError(f"failure {number}")

        def parts(x: Array) -> Any:
            yield from np.array_split(x, 3)

        self._group.node.register("mirror", lambda x: x[::-1])
        self._group.node.register("fail", fail)
        self._group.node.register("parts", parts)

    def perform(self, name: str, number: int, size: int, root: int) -> None:
        """Perform one operation on this rank; raise AssertionError if its result is wrong."""
        self._kinds[name](number, size, root)

    def _given(self, rank: int, number: int, size: int) -> Array:
        """Return what a rank gives to an operation: small whole numbers, whose sums are exact."""
        return ((np.arange(size, dtype=np.int64) * (rank + 3) + number) % 1021).astype(np.float32)

    def _all(self, number: int, size: int) -> list[Array]:
        return [self._given(rank, number, size) for rank in range(self._group.size)]

    def _all_reduce(self, number: int, size: int, _: int) -> None:
        x = self._given(self._group.rank, number, size)
        same(self._group.all_reduce(x), sum(self._all(number, size)))

    def _compressed(self, number: int, size: int, _: int) -> None:
        x = self._given(self._group.rank, number, size)
        total = sum(self._all(number, size))
        got = self._group.all_reduce(x, compress="int8")
        assert np.max(np.abs(got - total)) <= 1021 * self._group.size / 32, "further off than int8 may be"

    def _works(self, number: int, size: int, _: int) -> None:
        works = [
            self._group.all_reduce(self._given(self._group.rank, each, size), async_op=True)
            for each in (number, number + 1)
        ]
        for each, work in zip((number, number + 1), works, strict=True):
            same(work.wait(), sum(self._all(each, size)))

    def _reduce(self, number: int, size: int, root: int) -> None:
        got = self._group.reduce(self._given(self._group.rank, number, size), root, "max")
        if self._group.rank == root:
            same(got, np.max(self._all(number, size), axis=0))

    def _broadcast(self, number: int, size: int, root: int) -> None:
        same(self._group.broadcast(self._given(self._group.rank, number, size), root), self._given(root, number, size))

    def _all_gather(self, number: int, size: int, _: int) -> None:
        for got, given in zip(
            self._group.all_gather(self._given(self._group.rank, number, size)), self._all(number, size), strict=True
        ):
            same(got, given)

    def _gather(self, number: int, size: int, root: int) -> None:
        got = self._group.gather(self._given(self._group.rank, number, size), root)
        if got is not None:
            same(np.concatenate(got), np.concatenate(self._all(number, size)))

    def _scatter(self, number: int, size: int, root: int) -> None:
        blocks = self._all(number, size) if self._group.rank == root else None
        same(self._group.scatter(blocks, root), self._given(self._group.rank, number, size))

    def _reduce_scatter(self, number: int, size: int, _: int) -> None:
        got = self._group.reduce_scatter(self._given(self._group.rank, number, size))
        same(got, np.array_split(sum(self._all(number, size)), self._group.size)[self._group.rank])

    def _all_to_all(self, number: int, size: int, _: int) -> None:
        mine = [self._given(self._group.rank, number + to, size) for to in range(self._group.size)]
        for rank, got in enumerate(self._group.all_to_all(mine)):
            same(got, self._given(rank, number + self._group.rank, size))

    def _scan(self, number: int, size: int, _: int) -> None:
        got = self._group.scan(self._given(self._group.rank, number, size))
        same(got, sum(self._all(number, size)[: self._group.rank + 1]))

    def _barrier(self, *_: int) -> None:
        self._group.barrier()

    def _sync_gradients(self, number: int, size: int, _: int) -> None:
        grads = {"weights": self._given(self._group.rank, number, size), "bias": self._given(self._group.rank, 5, 7)}
        self._group.sync_gradients(grads, "sum")
        same(grads["weights"], sum(self._all(number, size)))
        same(grads["bias"], sum(self._all(5, 7)))

    def _objects(self, number: int, *_: int) -> None:
        got = self._group.all_gather_object({"rank": self._group.rank, "number": number})
        assert got == [{"rank": rank, "number": number} for rank in range(self._group.size)]

    def _sendrecv(self, number: int, size: int, _: int) -> None:
        got = self._group.sendrecv(self._given(self._group.rank, number, size), self._next, self._last)
        same(got, self._given(self._last, number, size))

    def _messages(self, number: int, size: int, _: int) -> None:
        sending = self._group.send(self._given(self._group.rank, number, size), self._next, tag=3, async_op=True)
        same(self._group.recv(self._last, 3), self._given(self._last, number, size))
        sending.wait()

    def _urgent_messages(self, number: int, size: int, _: int) -> None:
        classes = sorted(PRIORITIES, key=lambda word: (number + len(word)) % 7)
        sending = [
            self._group.send(
                self._given(self._group.rank, number + tag, size), self._next, tag, priority=each, async_op=True
            )
            for tag, each in enumerate(classes)
        ]
        for tag in range(len(classes)):
            same(self._group.recv(self._last, tag), self._given(self._last, number + tag, size))
        for work in sending:
            work.wait()

    def _message_objects(self, number: int, *_: int) -> None:
        sending = self._group.send_object([self._group.rank, number], self._next, async_op=True)
        assert self._group.recv_object(self._last) == [self._last, number]
        sending.wait()

    def _late(self, *_: int) -> None:
        try:
            self._group.recv(self._last, 7, timeout=0.0005)
        except CoveyError:
            return
        raise AssertionError("a message came that no rank sent")

    def _call(self, number: int, size: int, _: int) -> None:
        x = self._given(self._group.rank, number, size)
        same(self._group.node.call(self._next, "mirror", x), x[::-1])

    def _urgent_call(self, number: int, size: int, _: int) -> None:
        x = self._given(self._group.rank, number, size)
        works = [self._group.node.call_async(self._next, "mirror", x, priority=each) for each in PRIORITIES]
        for work in works:
            same(work.wait(), x[::-1])

    def _failed_call(self, number: int, *_: int) -> None:
        heard = ""
        try:
            self._group.node.call(self._next, "fail", number)
        except CoveyError as error:
            heard = str(error)
        assert f"failure {number}" in heard, f"the function raised, and its caller heard {heard!r}"

    def _stream(self, number: int, size: int, _: int) -> None:
        x = self._given(self._group.rank, number, size)
        same(np.concatenate(list(self._group.node.stream(self._next, "parts", x))), x)

    def _store(self, number: int, _: int, root: int) -> None:
        store = self._group.node.store
        if self._group.rank == root:
            store.set(f"soak/{number % 50}", str(number))
        self._group.barrier()
        assert store.get(f"soak/{number % 50}") == str(number).encode()
        self._group.barrier()

    def _split(self, number: int, *_: int) -> None:
        part = self._group.split(self._group.rank % 2)
        assert part is not None
        with part:
            got = part.all_reduce(np.full(3, 1.0 + number % 7))
            same(got, np.full(3, part.size * (1.0 + number % 7)))


def same(got: Any, expected: Any) -> None:
    """Raise AssertionError unless two arrays are equal to the bit."""
    assert np.array_equal(got, expected), f"got {got}, expected {expected}"


def resident_bytes(figure: str = "VmRSS") -> int:
    """Return how much memory this process occupies; with "VmHWM", has occupied at most since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{figure}:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the system does not tell how much memory this process occupies")


def forget_peak() -> None:
    """Let the most memory that this process has occupied be what it occupies now."""
    Path("/proc/self/clear_refs").write_text("5")


class Peaks:
    """The most memory that operations of one kind take: `first` of them, and `others` after these."""

    def __init__(self, first: int = 50, others: int = 950, ranks: int = 3, lanes: str = "shm", seed: int = 0) -> None:
        self._first, self._others, self._ranks, self._lanes, self._seed = first, others, ranks, lanes, seed
        self.seen: dict[str, tuple[int, int]] = {}
        """By kind: both peaks, in bytes."""

    def run(self, names: Sequence[str] = ()) -> dict[str, tuple[int, int]]:
        """Perform operations of all kinds, or of some, with mixed sizes; return `seen`."""
        run_threads(self._ranks, lambda group: self._take_part(group, names), lanes=self._lanes, timeout=3600)
        return self.seen

    def _take_part(self, group: Group, names: Sequence[str]) -> None:
        chance, course = random.Random(self._seed), Course(group)
        course.serve()
        for name in names or course.names:
            peaks = []
            for count in (self._first, self._others):
                group.barrier()
                if group.rank == 0:
                    forget_peak()
                group.barrier()
                for number in range(count):
                    # The largest size comes among the first, so that what follows has no reason to take more.
                    size = LARGEST if number % 10 == 0 else int(LARGEST ** chance.random())
                    course.perform(name, number, size, chance.randrange(group.size))
                group.barrier()
                peaks.append(resident_bytes("VmHWM"))
            if group.rank == 0:
                self.seen[name] = peaks[0], peaks[1]


def main() -> None:
    """Run the course that the command line describes."""
    parser = argparse.ArgumentParser(prog="covey.lab.soak", description=__doc__)
    parser.add_argument("--operations", type=int, default=200_000)
    parser.add_argument("--ranks", type=int, default=Soak.ranks)
    parser.add_argument("--lanes", default=Soak.lanes)
    parser.add_argument("--seed", type=int, default=Soak.seed)
    options = parser.parse_args()
    began = time.monotonic()
    Soak(**vars(options), tell=lambda held: print(f"{time.monotonic() - began:6.0f} s  {held}", flush=True)).run()
    print(f"{options.operations:,} operations in {time.monotonic() - began:.0f} s, seed {options.seed}: all right")


if __name__ == "__main__":
    main()
