"""The contract of every reader of bytes, for any bytes, and random inputs to try it with, reproducible by seed.

`BrokenContractError` says that a reader breaks it. Inputs are the valid ones of a target first, then mutated ones.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from typing import TYPE_CHECKING, Final

from covey.lab.fuzz.mutations import Mutator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.lab.fuzz.targets import Target

MUTATED_INPUT_BYTES: Final = 1 << 14
"""The largest valid input that is mutated: larger ones would take all the time."""
MEMORY_FACTOR: Final = 128
"""Bytes of memory for each byte of input: an empty dict is one byte of msgpack, and some eighty in memory."""
MEMORY_BASE: Final = 256 << 10
"""Additional bytes, for errors with their texts and for objects made at the first use of a function."""
SECONDS: Final = 1.0
"""Processor time of this thread, so that a pause of the machine does not count."""
SECONDS_PER_BYTE: Final = 1e-5


def inputs(target: Target, count: int, seed: int | str = 0) -> Iterator[bytes]:
    """Yield the valid inputs of a target, and `count` mutated ones."""
    chance = random.Random(f"{target.name} {seed}")
    mutator, seeds = Mutator(chance), target.seeds()
    yield from seeds
    small = [each for each in seeds if len(each) <= MUTATED_INPUT_BYTES]
    for _ in range(count):
        yield change(target, mutator, chance.choice(small), small)


def change(target: Target, mutator: Mutator, data: bytes, others: list[bytes]) -> bytes:
    """Return a mutated input of a target."""
    return mutator.bytes(data, others) if target.prefix < 0 else mutator.packed(data, others, target.prefix)


class BrokenContractError(AssertionError):
    """A reader of bytes broke its contract."""


def check(target: Target, data: bytes, *, is_measured: bool = False) -> bool:
    """Read an input as a target does; return whether it was accepted. `is_measured` also checks time and memory.

    The time includes what measuring the memory costs.
    """
    taken, value = _read_measured(target, data) if is_measured else _read(target, data)
    if taken and target.write is not None:
        written = target.write(value)
        is_taken, again = _read(target, written)
        if not is_taken or type(again) is not type(value) or target.write(again) != written:
            raise BrokenContractError(f"{target.name} read {value!r}, wrote it, and read {again!r}")
    return taken


def _read(target: Target, data: bytes) -> tuple[bool, object]:
    try:
        return True, target.read(data)
    except target.promised as error:
        return False, error
    except Exception as error:
        raise BrokenContractError(f"{target.name} raised {type(error).__name__}: {error}") from error


def _read_measured(target: Target, data: bytes) -> tuple[bool, object]:
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, began = tracemalloc.get_traced_memory()[0], time.thread_time()
        result = _read(target, data)
        took, peak = time.thread_time() - began, tracemalloc.get_traced_memory()[1] - before
    finally:
        if not was_tracing:
            tracemalloc.stop()
    if peak > MEMORY_BASE + MEMORY_FACTOR * len(data):
        raise BrokenContractError(f"{target.name} took {peak} bytes of memory for {len(data)} bytes of input")
    if took > SECONDS + SECONDS_PER_BYTE * len(data):
        raise BrokenContractError(f"{target.name} took {took:.2f} s for {len(data)} bytes of input")
    return result
