"""What the group tests share: values that differ by rank and position, and the obvious results."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.support.lane_pairs import usable_kinds

from covey.plan import choose

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Array = np.ndarray[Any, np.dtype[Any]]

LANES = [kind.name for kind in reversed(usable_kinds()) if not kind.extra]
"""The kinds of lanes that every installation has."""

UFUNCS: dict[str, Callable[..., Array]] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def values(rank: int, shape: int | tuple[int, ...], dtype: Any = np.float64, seed: int = 0) -> Array:
    """Return small whole numbers, so that sums and products of a few ranks are exact in every dtype."""
    return _numbers(rank, shape, np.dtype(dtype), seed).copy()


@functools.lru_cache(maxsize=128)  # all ranks of a test look at the same arrays
def _numbers(rank: int, shape: int | tuple[int, ...], dtype: np.dtype[Any], seed: int) -> Array:
    rng = np.random.default_rng([rank, seed])
    numbers = rng.integers(0, 2 if dtype.kind == "b" else 4, shape, np.uint8)  # eight to a draw
    if dtype.kind == "c":
        return (numbers + 1j * rng.integers(0, 3, shape, np.uint8)).astype(dtype)
    return numbers.astype(dtype)


def combined(op: str, arrays: Sequence[Array]) -> Array:
    """Combine the arrays of all ranks, in rank order."""
    total = functools.reduce(UFUNCS[op], arrays)
    return (total / len(arrays)).astype(total.dtype) if op == "mean" else total


def all_values(size: int, shape: int | tuple[int, ...], dtype: Any = np.float64, seed: int = 0) -> list[Array]:
    """Return what `values` gives to each rank."""
    return [values(rank, shape, dtype, seed) for rank in range(size)]


def total(op: str, size: int, shape: int | tuple[int, ...], dtype: Any = np.float64, seed: int = 0) -> Array:
    """Return what `op` makes of the `values` of the ranks below `size`: to look at, not to change."""
    with _one_at_a_time:  # the ranks of a test are threads, and ask at the same moment
        return _total(op, size, shape, np.dtype(dtype), seed)


_one_at_a_time = threading.Lock()


@functools.lru_cache(maxsize=24)  # all ranks of a test compare with the same array
def _total(op: str, size: int, shape: int | tuple[int, ...], dtype: np.dtype[Any], seed: int) -> Array:
    result = combined(op, [_numbers(rank, shape, dtype, seed) for rank in range(size)])
    result.flags.writeable = False
    return result


def same(actual: Any, expected: Array) -> None:
    """Fail unless `actual` is an array of the same dtype, shape and elements."""
    assert isinstance(actual, np.ndarray)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    wrong = np.flatnonzero(actual.reshape(-1) != expected.reshape(-1))
    if len(wrong):
        raise AssertionError(
            f"{len(wrong)} of {actual.size} elements differ, first at {wrong[:5]}: "
            f"{actual.reshape(-1)[wrong[:5]]} instead of {expected.reshape(-1)[wrong[:5]]}"
        )


def around_thresholds(size: int, itemsize: int, *, parts: int) -> list[int]:
    """Element counts where the choice of a plan, or the number of segments of one of its `parts`, changes."""
    edges = [
        choose.DEFAULT_PLAN_SIZES.doubling_bytes // itemsize,
        choose.DEFAULT_PLAN_SIZES.tree_bytes // itemsize,
        choose.DEFAULT_PLAN_SIZES.exchange_bytes // itemsize,
        parts * choose.DEFAULT_PLAN_SIZES.segment_bytes // itemsize,
    ]
    return sorted({0, 1, max(0, size - 1), size, 2 * size + 1, 1001, *edges, *(edge + 1 for edge in edges)})
