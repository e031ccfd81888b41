"""What the operations mean for every dtype, and that all ranks hold the very same bits."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from tests.support.sets import pairs
from tests.support.values import LANES, all_values, combined, same, values

import covey
from covey.base.arithmetic import BFLOAT16, DTYPES
from covey.plan import choose
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from covey import Group, Op

    Array = np.ndarray[Any, np.dtype[Any]]

OPS: tuple[Op, ...] = ("sum", "mean", "min", "max", "prod", "and", "or", "xor")
FLOATS = [np.dtype(name) for name in ("float16", ml_dtypes.bfloat16, "float32", "float64")]
COMPLEX = [np.dtype(name) for name in ("complex64", "complex128")]


def allowed(dtype: np.dtype[Any]) -> set[str]:
    """What the guide promises for each kind of number."""
    if dtype == np.bool_:
        return {"min", "max", "and", "or", "xor"}
    if dtype.kind in "iu":
        return {"sum", "prod", "min", "max", "and", "or", "xor"}
    if dtype.kind == "c":
        return {"sum", "mean", "prod"}
    return {"sum", "mean", "prod", "min", "max"}


@pytest.mark.parametrize(
    ("size", "lanes"),
    [
        (1, "memory"),
        (2, "unix"),
        (3, LANES[-1]),
        (4, "tcp"),
        pytest.param(5, "memory", marks=pytest.mark.thorough),
    ],
)
def test_every_operation_on_every_dtype_gives_numpy_s_result_or_a_type_error(size: int, lanes: str) -> None:
    def body(group: Group) -> None:
        me = group.rank
        for dtype in DTYPES:
            for op in OPS:
                x = values(me, 77, dtype, seed=3)
                if op not in allowed(dtype):
                    for call in (group.all_reduce, group.reduce_scatter):
                        with pytest.raises(TypeError, match=f"op='{op}' has no meaning for {dtype.name}"):
                            call(x, op)
                    continue
                arrays = all_values(size, 77, dtype, seed=3)
                expected = combined(op, arrays)
                same(group.all_reduce(x, op), expected)
                for algorithm in ("doubling", "direct", "ring"):
                    same(group.all_reduce(values(me, 77, dtype, seed=3), op, algorithm=algorithm), expected)
                same(group.reduce_scatter(values(me, 77, dtype, seed=3), op), np.array_split(expected, size)[me])
                x = group.reduce(values(me, 77, dtype, seed=3), size - 1, op)
                same(x, expected if me == size - 1 else arrays[me])
                if op != "mean":
                    same(group.scan(arrays[me], op), combined(op, arrays[: me + 1]))
                    if me:
                        same(group.exscan(arrays[me], op), combined(op, arrays[:me]))
                    else:
                        neutral = group.exscan(arrays[me], op)
                        same(combined(op, [neutral, arrays[0]]), arrays[0])

    run_threads(size, body, lanes=lanes)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_every_dtype_is_moved_unchanged(dtype: np.dtype[Any]) -> None:
    def body(group: Group) -> None:
        me, size = group.rank, group.size
        x = values(me, 1001, dtype)
        same(group.broadcast(x.copy(), 2), values(2, 1001, dtype))
        for rank, block in enumerate(group.all_gather(x)):
            same(block, values(rank, 1001, dtype))
        same(group.all_gather(x, out=np.empty((size, 1001), dtype)), np.stack(all_values(size, 1001, dtype)))
        for rank, block in enumerate(group.all_to_all([x[: 5 * to] for to in range(size)])):
            same(block, values(rank, 1001, dtype)[: 5 * me])

    run_threads(3, body)


def test_integers_wrap_around_as_numpy_s_do() -> None:
    def body(group: Group) -> None:
        for dtype in (np.int8, np.uint8, np.int64, np.uint64):
            most = np.full(9, np.iinfo(dtype).max, dtype)
            same(group.all_reduce(most.copy()), combined("sum", [most] * 3))
            same(group.all_reduce(most.copy(), "prod"), combined("prod", [most] * 3))

    run_threads(3, body)


def test_whole_numbers_do_not_wrap_around() -> None:
    """Each is one of up to 64 bits; what comes out may be longer, and is the same on all ranks."""
    most, least = 2**63 - 1, -(2**63)

    def body(group: Group) -> None:
        me, size = group.rank, group.size
        for algorithm in (None, "doubling", "direct", "ring"):
            assert group.all_reduce(most, algorithm=algorithm) == size * most
            assert group.all_reduce(least, algorithm=algorithm) == size * least
        assert group.all_reduce(most if me % 2 else least, async_op=True).wait() == sum(
            most if rank % 2 else least for rank in range(size)
        )
        assert group.all_reduce(most - me, "prod") == math.prod(most - rank for rank in range(size))
        assert group.all_reduce(np.int64(least), "prod", async_op=True).wait() == least**size
        assert group.all_reduce(-3 - me) == sum(-3 - rank for rank in range(size))
        assert group.all_reduce(True) == size
        assert group.all_reduce(np.uint8(200)) == 200 * size
        assert type(group.all_reduce(np.uint8(200))) is int
        assert group.all_reduce(most - me, "max") == most
        assert group.all_reduce(most, "mean") == pytest.approx(most)
        with pytest.raises(TypeError, match="does not fit into 64 bits"):
            group.all_reduce(2**63)
        with pytest.raises(covey.ConfigError, match="algorithm="):
            group.all_reduce(1, algorithm="none such")

    for size in (1, 2, 3, 5):
        run_threads(size, body)


@functools.lru_cache(maxsize=256)  # all ranks and algorithms look at the same numbers
def _awkward(rank: int, count: int, dtype: np.dtype[Any]) -> Array:
    """Ordinary numbers of very different sizes, zeros of both signs, infinities, and nans with payloads."""
    rng = np.random.default_rng([rank, count, 5])
    if dtype.kind == "c":
        half = np.dtype(f"f{dtype.itemsize // 2}")
        pairs = np.stack([_awkward(rank, count, half), _awkward(rank + 50, count, half)], axis=1)
        return np.ascontiguousarray(pairs).view(dtype).reshape(-1)
    with np.errstate(all="ignore"):
        x = (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)).astype(dtype)
    special = np.array([0.0, -0.0, np.inf, -np.inf], dtype)
    where = rng.random(count) < 0.3
    x[where] = rng.choice(special, count)[where]
    bits = x.view(f"u{dtype.itemsize}")
    nans = rng.random(count) < 0.1
    quiet = np.array(np.nan, dtype).view(bits.dtype)
    sign = np.where(rng.random(count) < 0.5, 1, 0).astype(bits.dtype) << (8 * dtype.itemsize - 1)
    payload = quiet | sign | rng.integers(1, 60, count).astype(bits.dtype)
    bits[nans] = payload[nans]
    return x


@pytest.mark.parametrize(("size", "lanes"), pairs([2, 4, 5], LANES))
def test_all_ranks_hold_the_same_bits_even_of_nans_and_zeros(size: int, lanes: str) -> None:
    cases = [
        (dtype, op, algorithm, count)
        for dtype in (*FLOATS, *COMPLEX)
        for op in ("sum", "mean", "prod", "min", "max")
        if op in allowed(dtype)
        for algorithm in choose.ALL_REDUCE_PLANS[size > 2 :]
        for count in (1, 1009, 20_011)
    ]

    def body(group: Group) -> list[bytes]:
        results = []
        for dtype, op, algorithm, count in cases:
            x = _awkward(group.rank, count, dtype).copy()
            group.all_reduce(x, op, algorithm=algorithm)
            results.append(x.tobytes())
        return results

    results = run_threads(size, body, lanes=lanes)
    for case, *bits in zip(cases, *results, strict=True):
        dtype = case[0]
        for rank, other in enumerate(bits):
            if other != bits[0]:
                here, there = np.frombuffer(bits[0], np.uint8), np.frombuffer(other, np.uint8)
                at = np.flatnonzero(here != there) // dtype.itemsize
                pytest.fail(f"{case}: ranks 0 and {rank} differ in element {at[0]}")


@pytest.mark.parametrize("lanes", ["memory", "unix"])
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_keep_the_same_nan_where_every_rank_has_its_own(size: int, lanes: str) -> None:
    def body(group: Group) -> list[bytes]:
        results = []
        for dtype, bits in (("f2", "u2"), ("f4", "u4"), ("f8", "u8")):
            for op in ("sum", "prod", "min", "max"):
                for algorithm in choose.ALL_REDUCE_PLANS[size > 2 :]:
                    for count in (1, 2, 3, 17):
                        x = np.full(count, np.nan, dtype)
                        x.view(bits)[...] += group.rank + 1
                        assert np.isnan(group.all_reduce(x, op, algorithm=algorithm)).all()
                        results.append(x.tobytes())
        return results

    first, *others = run_threads(size, body, lanes=lanes)
    assert all(other == first for other in others)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_half_precision_sums_are_rounded_at_most_once_per_contribution(size: int, dtype: np.dtype[Any]) -> None:
    half_ulp = float(ml_dtypes.finfo(dtype).eps) / 2
    count = 40_009

    def draw(rank: int) -> Array:
        return np.random.default_rng([rank, 9]).standard_normal(count).astype(dtype)

    def body(group: Group) -> None:
        exact = [draw(rank).astype(np.float64) for rank in range(size)]
        largest_partial = np.sum(np.abs(exact), axis=0)
        for algorithm in ("doubling", "direct", "ring"):
            op: Op
            for op, parts in (("sum", 1), ("mean", size)):
                x = group.all_reduce(draw(group.rank), op, algorithm=algorithm)
                error = np.abs(x.astype(np.float64) - np.sum(exact, axis=0) / parts)
                roundings = size - 1 + (op == "mean")
                assert np.all(error <= 1.01 * roundings * half_ulp * largest_partial / parts + 1e-7)

    run_threads(size, body)


def test_a_half_precision_mean_over_many_ranks_divides_exactly() -> None:
    def body(group: Group) -> None:
        for dtype in (np.float16, ml_dtypes.bfloat16):
            x = np.full(100, 3.0, dtype)
            same(group.all_reduce(x, "mean"), np.full(100, 3.0, dtype))
            x = np.full(100, 1.0 + group.rank, dtype)
            group.all_reduce(x, "mean", weight=group.rank + 1)
            expected = sum((rank + 1) ** 2 for rank in range(7)) / 28
            np.testing.assert_allclose(x.astype(np.float64), expected, rtol=2e-2)

    run_threads(7, body)


def test_float_warnings_stay_inside() -> None:
    def body(group: Group) -> None:
        big = np.array([3e38, np.inf if group.rank else -np.inf], np.float32)
        group.all_reduce(big)
        assert math.isinf(big[0])
        assert math.isnan(big[1])
        group.reduce(np.array([6e4], np.float16))
        group.scan(np.array([1e308]), "prod")
        group.reduce_scatter(np.full(4, 3e38, np.float32))

    run_threads(2, body)
