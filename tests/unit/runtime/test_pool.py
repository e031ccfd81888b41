"""Blocks of memory are lent once at a time, come back with the last array over them, and are kept within bounds."""

from __future__ import annotations

import gc
import mmap
import os
import random
import resource
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from covey.runtime.pool import LARGEST_FIT, POOLED_BYTES, BufferPool, Profile, block_bytes

if TYPE_CHECKING:
    from covey.runtime.pool import Bytes

KEEPING = Profile(kept_bytes=64 << 20, largest=16 << 20)


def address(array: np.ndarray[Any, Any]) -> int:
    """Return where an array begins."""
    return int(array.__array_interface__["data"][0])


def test_a_block_is_lent_again_once_the_last_view_of_it_is_dropped() -> None:
    pool = BufferPool(KEEPING)
    array = pool.take(100_000)
    first, view = address(array), array.view(np.float32).reshape(5, -1)[2:]
    assert (first % mmap.PAGESIZE, array.nbytes, pool.used_bytes) == (0, 100_000, block_bytes(100_000))
    view[...] = 7
    del array
    other = pool.take(100_000)
    assert address(other) != first
    other[:] = 1
    assert (view == 7).all()
    del view
    assert address(pool.take(90_000)) == first
    del other
    assert (pool.used_bytes, pool.idle_bytes) == (0, 2 * block_bytes(100_000))


def test_sizes_of_blocks_are_whole_pages_and_little_more_than_what_is_needed() -> None:
    for nbytes in (*range(POOLED_BYTES, POOLED_BYTES + 9000, 7), *(random.Random(1).choices(range(1 << 28), k=500))):
        size = block_bytes(max(nbytes, POOLED_BYTES))
        assert size % mmap.PAGESIZE == 0, nbytes
        assert nbytes <= size <= max(nbytes, POOLED_BYTES) * 1.25 + mmap.PAGESIZE, nbytes


def test_an_idle_block_serves_less_than_it_has_but_not_a_small_part_of_it() -> None:
    pool = BufferPool(KEEPING)
    large = pool.take(1 << 20)
    at = address(large)
    del large
    fitting = pool.take((1 << 20) // LARGEST_FIT)
    assert (address(fitting), pool.used_bytes) == (at, 1 << 20)
    del fitting
    pool.take((1 << 20) // LARGEST_FIT // 2)
    assert pool.idle_bytes == (1 << 20) + (1 << 17), "the large block stays whole for a payload that needs it"


def test_small_payloads_are_left_to_malloc() -> None:
    pool = BufferPool(KEEPING)
    arrays = [pool.take(nbytes) for nbytes in (0, 1, POOLED_BYTES - 1)]
    assert [array.nbytes for array in arrays] == [0, 1, POOLED_BYTES - 1]
    assert pool.used_bytes == 0


def test_idle_blocks_stay_within_the_profile_and_a_quarter_above_the_most_that_was_lent() -> None:
    pool = BufferPool(Profile(kept_bytes=3 << 20, largest=1 << 20))
    arrays = [pool.take(1 << 20) for _ in range(8)]
    arrays.append(pool.take(2 << 20))
    assert (pool.used_bytes, pool.most_bytes) == (10 << 20, 10 << 20)
    arrays.clear()
    assert (pool.used_bytes, pool.idle_bytes) == (0, 3 << 20), "three blocks of 1 MiB, and not the one of 2 MiB"
    pool.profile = Profile(kept_bytes=1 << 20, largest=1 << 20)
    assert pool.idle_bytes == 1 << 20
    pool = BufferPool(KEEPING)
    for nbytes in range(1 << 20, 9 << 20, 1 << 20):
        pool.take(nbytes)
        assert pool.idle_bytes <= pool.most_bytes * 5 // 4, nbytes
    pool.trim()
    assert (pool.idle_bytes, pool.profile) == (0, KEEPING)


def test_memory_that_the_system_does_not_have_is_an_error_and_nothing_is_lent() -> None:
    pool = BufferPool(KEEPING)
    for nbytes in (1 << 55, 1 << 62):
        with pytest.raises(MemoryError):
            pool.take(nbytes)
    assert (pool.used_bytes, pool.take(100_000).nbytes) == (0, 100_000)


def test_what_is_kept_is_given_back_before_there_is_no_memory() -> None:
    child = os.fork()
    if child == 0:
        pool = BufferPool(KEEPING)
        blocks = [pool.take(16 << 20) for _ in range(4)]
        blocks.clear()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * mmap.PAGESIZE + (8 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        is_right = pool.idle_bytes == 64 << 20
        try:
            is_right &= pool.take(60 << 20).nbytes == 60 << 20
        except MemoryError:
            is_right = False
        os._exit(0 if is_right and pool.idle_bytes == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_an_array_of_any_dtype_lies_in_a_block() -> None:
    pool = BufferPool(KEEPING)
    array = pool.array((3, 5, 1000), np.dtype(np.float32))
    assert (array.shape, array.dtype, pool.used_bytes) == ((3, 5, 1000), np.float32, block_bytes(60_000))
    assert (pool.array((), np.dtype(np.int64)).shape, pool.used_bytes) == ((), block_bytes(60_000))


def test_threads_that_pass_arrays_to_each_other_never_share_a_block() -> None:
    pool = BufferPool(Profile(kept_bytes=4 << 20, largest=1 << 20))
    passed: list[list[tuple[Bytes, int]]] = [[] for _ in range(4)]
    wrong: list[str] = []

    def work(number: int) -> None:
        chance = random.Random(number)
        for turn in range(400):
            array = pool.take(chance.randrange(POOLED_BYTES, 400_000))
            mark = (number * 61 + turn) % 251
            array[:] = mark
            passed[(number + 1) % 4].append((array, mark))
            if len(passed[number]) > chance.randrange(8):
                given, expected = passed[number].pop(chance.randrange(len(passed[number])))
                if not (given == expected).all():
                    wrong.append(f"thread {number}, turn {turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    passed.clear()
    assert pool.used_bytes == 0
    assert pool.idle_bytes <= 4 << 20


def test_a_destructor_may_take_and_drop_arrays_in_the_middle_of_a_take() -> None:
    pool, inside = BufferPool(KEEPING), 0

    def collected(phase: str, _: object) -> None:
        nonlocal inside
        if phase == "start":
            inside += pool._lock.locked()
            held.clear()
            assert pool.take(100_000).nbytes == 100_000

    held: list[Bytes] = []
    before = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        for nbytes in range(100_000, 160_000, 100):
            held.append(pool.take(nbytes))
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)
    held.clear()
    pool.take(100_000)
    assert inside, "no collection ran inside of the pool"
    assert pool.used_bytes == 0
