"""A device without hardware: it works late, in queues, and poisons memory that a program touches at the wrong time."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from covey.arrays.adapter import register_adapter

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    Array = np.ndarray[Any, np.dtype[Any]]

MOST_LAG: Final = 0.001
"""How long a piece of work may wait before it runs, in seconds."""
LIMIT: Final = 250.0
"""How long a thread waits for a queue of the device, in seconds."""


def poison(memory: Array) -> None:
    """Fill memory with values that no test expects: nan, or bytes of 0xA5."""
    if memory.dtype.kind in "fcV":
        memory[...] = np.nan
    else:
        memory.view(np.uint8)[...] = 1 if memory.dtype == np.bool_ else 0xA5


class FakeDevice:
    """A device with three queues, each in order: one for the work of the program, and two for copies, as GPUs have.

    Host memory of a copy is poisoned until the copy is there, and again after the copy back; an array is poisoned while
    a copy to it is under way. So what reads too early, or writes too late, is seen in the values. Close it, or use it
    in `with`.
    """

    def __init__(self, seed: int = 0) -> None:
        self._lags = random.Random(seed)
        self._lock = threading.Lock()
        self.work, self.leaving, self.coming = (Queue(self._lag) for _ in range(3))
        self.copies = 0
        """How many copies between the device and the host were begun."""
        register_adapter(FakeArray, FakeArrayAdapter())

    def array(self, values: Any) -> FakeArray:
        """Return a new array on the device with these values."""
        return FakeArray(self, np.array(values))

    def close(self) -> None:
        """Run what is queued, and end the threads of the device."""
        for queue in (self.work, self.leaving, self.coming):
            queue.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lag(self) -> float:
        with self._lock:
            return self._lags.random() * MOST_LAG


class Queue:
    """Work that the device does in order, on a thread of its own, each piece a moment late."""

    def __init__(self, lag: Callable[[], float]) -> None:
        self._lag, self._thread = lag, ThreadPoolExecutor(1, thread_name_prefix="covey-fake-device")
        self._last: Future[None] | None = None

    def add(self, work: Callable[[], None]) -> Future[None]:
        """Queue a piece of work; return what is done when the work is."""

        def run() -> None:
            time.sleep(self._lag())
            work()

        self._last = self._thread.submit(run)
        return self._last

    def mark(self) -> Callable[[], None]:
        """Return a function that waits for what is queued so far."""
        last = self._last
        return _nothing if last is None else lambda: last.result(LIMIT)

    def close(self) -> None:
        """Run what is queued, and end the thread."""
        self._thread.shutdown()


def _nothing() -> None:
    """Return at once: nothing was queued."""


class FakeArray:
    """An array on a `FakeDevice`. Nothing but the device reads its memory."""

    def __init__(self, device: FakeDevice, memory: Array) -> None:
        self.device, self._memory = device, memory
        self.shape, self.dtype = memory.shape, memory.dtype

    def add(self, other: Any) -> None:
        """Queue an addition to every element, in the work of the program."""

        def work() -> None:
            self._memory += other

        self.device.work.add(work)

    def __dlpack__(self, **_options: Any) -> Any:
        """Refuse: the memory is on the device."""
        raise BufferError("the array is on a fake device")

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the kind of a device that belongs to an extension, and its number."""
        return 12, 0

    def copy_from(self, other: FakeArray) -> None:
        """Queue a copy of another array, in the work of the program."""

        def work() -> None:
            self._memory[...] = other._memory

        self.device.work.add(work)

    def numpy(self) -> Array:
        """Return the values, after the work of the program that is queued."""
        found: list[Array] = []
        self.device.work.add(lambda: found.append(self._memory.copy())).result(LIMIT)
        return found[0]


class StagedFakeArray:
    """An array of a `FakeDevice` on its way through host memory (`covey.StagedArray`)."""

    def __init__(self, x: FakeArray) -> None:
        self._x, self._device = x, x.device
        self.host: Array = np.empty(x.shape, x.dtype)
        poison(self.host)
        self._mark = x.device.work.mark()

    def stage_in(self) -> Callable[[], None]:
        poison(self.host)
        mark = self._device.work.mark()
        self._device.copies += 1

        def copy() -> None:
            mark()
            self.host[...] = self._x._memory

        copied = self._device.leaving.add(copy)
        return lambda: copied.result(LIMIT)

    def stage_out(self) -> FakeArray:
        self._device.copies += 1

        def begin() -> None:
            self._mark()
            poison(self._x._memory)

        def copy() -> None:
            self._x._memory[...] = self.host
            poison(self.host)

        self._device.coming.add(begin)
        self._device.coming.add(copy)
        return self._x

    def order(self) -> None:
        self._device.work.add(self._device.coming.mark())

    def synchronise(self) -> None:
        self._device.coming.mark()()


class FakeArrayAdapter:
    """The `covey.ArrayAdapter` of arrays on a `FakeDevice`."""

    def view(self, x: FakeArray) -> None:
        return None

    def stage(self, x: FakeArray) -> StagedFakeArray:
        return StagedFakeArray(x)

    def new(self, values: Array, like: FakeArray) -> FakeArray:
        return like.device.array(values)
