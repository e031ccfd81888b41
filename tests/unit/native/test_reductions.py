"""The compiled executor combines arrays to the very bits of the Python executor: every dtype, operation and order."""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.compiled import needs_compiler, needs_native, shared_library
from tests.support.in_turn import in_turn

from covey.base.arithmetic import BFLOAT16, DTYPES, OPS, reduction
from covey.plan.moves import FINAL, LEFT_OPERAND, REDUCE
from covey.runtime.collectives.executor import apply
from covey.runtime.collectives.native_executor import native_reduction

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    Array = np.ndarray[Any, np.dtype[Any]]

SIZES = [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 1003]
HALVES = [np.dtype(np.float16), BFLOAT16]
MEANS = [2, 3, 7]
# Zeros, the smallest and largest subnormal, one and its neighbours, a third, the largest number, infinity, and nans
# that signal or do not, with and without payload: in float16, then in bfloat16. Each also with the other sign.
HALF_BITS = [0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x3C01, 0x3555, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7E01, 0x7FFF,
             0x007F, 0x0080, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FC3]  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def allowed(dtype: np.dtype[Any]) -> list[str]:
    return [op for op in OPS if _is_allowed(op, dtype)]


def _is_allowed(op: str, dtype: np.dtype[Any]) -> bool:
    try:
        reduction(op, dtype)
    except TypeError:
        return False
    return True


def in_python(op: str, mine: Array, piece: Array, *, is_left: bool, divides: bool, contributors: int) -> None:
    """Combine as the Python executor does when `piece` has arrived; `is_left` tells that it is the left operand."""
    action = REDUCE | (LEFT_OPERAND if is_left else 0) | (FINAL if divides else 0)
    apply(action, mine, piece, reduction(op, mine.dtype), contributors)


def compiled(op: str, mine: Array, piece: Array, *, is_left: bool, divides: bool, contributors: int) -> None:
    """Combine as the compiled executor does."""
    rule = native_reduction(reduction(op, mine.dtype), mine.dtype, contributors)
    left, right = (piece, mine) if is_left else (mine, piece)
    rule.combine(left.view(np.uint8), right.view(np.uint8), mine.view(np.uint8), divides, contributors)


def compare(op: str, mine: Array, piece: Array, contributors: int = 3) -> None:
    """Combine in the same memory, once by each executor, in both orders, and fail if a bit differs."""
    before = mine.copy()
    for is_left in (False, True):
        for divides in (False, True) if op == "mean" else (False,):
            how: dict[str, Any] = {"is_left": is_left, "divides": divides, "contributors": contributors}
            mine[...] = before
            in_python(op, mine, piece, **how)
            expected = mine.copy()
            mine[...] = before
            compiled(op, mine, piece, **how)
            check(mine, expected, before, piece, f"{op} of {mine.dtype} {how}")
    mine[...] = before


def check(got: Array, expected: Array, mine: Array, piece: Array, what: str) -> None:
    words = np.uint16 if got.itemsize == 2 else np.uint8
    differs = got.view(words) != expected.view(words)
    wrong = np.flatnonzero(differs)
    if wrong.size:
        at = wrong[0] * np.dtype(words).itemsize // got.itemsize
        raise AssertionError(
            f"{what}: {wrong.size} words differ, first at {at} of {got.size}: {mine[at]!r} and {piece[at]!r} give "
            f"{got[at : at + 1].tobytes().hex()} instead of {expected[at : at + 1].tobytes().hex()}"
        )


def specials(dtype: np.dtype[Any]) -> Array:
    """Return the values of a dtype that are most likely to go wrong."""
    if dtype.kind == "b":
        return np.array([False, True])
    if dtype.kind in "iu":
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        return np.array([0, 1, 2, 3, most, most - 1, least, least + 1, most // 2], dtype)
    if dtype.itemsize == 2:
        bits = np.array(HALF_BITS, np.uint16)
        return np.concatenate([bits, bits | 0x8000]).view(dtype)
    part = dtype if dtype.kind == "f" else np.dtype(f"f{dtype.itemsize // 2}")
    limits, word = np.finfo(part), np.dtype(f"u{part.itemsize}")
    quiet = np.array([np.nan], part).view(word)
    signals = (np.array([np.inf], part).view(word) + np.array(5, word)).view(part)
    numbers = [0.0, limits.smallest_subnormal, limits.tiny, 1.0, 1 / 3, 1 + limits.eps, limits.max, np.inf]
    parts = np.concatenate([np.array(numbers, part), (quiet + np.array([0, 1, 77], word)).view(part), signals])
    parts = np.concatenate([parts, -parts])
    assert np.isnan(parts).sum() == 8
    if dtype.kind == "f":
        return parts
    pairs = np.array(np.meshgrid(parts, parts)).reshape(2, -1).T
    return np.ascontiguousarray(pairs).view(dtype).reshape(-1)


def mixture(dtype: np.dtype[Any], size: int, seed: int) -> Array:
    """Return ordinary numbers of all magnitudes, with special values among them."""
    rng = np.random.default_rng([seed, size])
    bits = rng.integers(0, 2, size, np.uint8) if dtype.kind == "b" else rng.bytes(size * dtype.itemsize)
    values = np.frombuffer(bits, np.uint8).view(dtype).copy()
    chosen = rng.random(size) < 0.5
    values[chosen] = rng.choice(specials(dtype).view(f"V{dtype.itemsize}"), size).view(dtype)[chosen]
    return values


@needs_native
@in_turn(dtype=DTYPES)
def test_every_operation_gives_the_bits_of_the_python_executor_at_every_size(dtype: np.dtype[Any]) -> None:
    for op in allowed(dtype):
        for size in SIZES:
            for contributors in MEANS if op == "mean" else [2]:
                compare(op, mixture(dtype, size, 1), mixture(dtype, size, 2), contributors)


@needs_native
@in_turn(dtype=DTYPES)
def test_every_pair_of_special_values_is_combined_to_the_bits_of_the_python_executor(dtype: np.dtype[Any]) -> None:
    found = specials(dtype)
    if dtype.kind == "c":
        found = np.random.default_rng(5).permutation(found.view(f"V{dtype.itemsize}")).view(dtype)[:96]
    left, right = (
        np.ascontiguousarray(each).reshape(-1) for each in (np.repeat(found, found.size), np.tile(found, found.size))
    )
    for op in allowed(dtype):
        compare(op, left, right)


@needs_native
@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: dtype.name)
def test_every_half_with_every_special_half_is_combined_to_the_bits_of_the_python_executor(
    dtype: np.dtype[Any],
) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    for index, other in enumerate(specials(dtype).view(np.uint16)):
        for op in allowed(dtype):
            compare(op, every.copy(), np.full(1 << 16, other, np.uint16).view(dtype), MEANS[index % 3])


@needs_native
def test_halves_are_rounded_to_the_nearest_even_value() -> None:
    float16, bfloat16 = np.dtype(np.float16), BFLOAT16
    for dtype, one, tie, rounded in [
        (float16, 2048, 1, 2048),
        (float16, 2050, 1, 2052),
        (float16, 65504, 15, 65504),
        (float16, 65504, 16, np.inf),
        (bfloat16, 256, 1, 256),
        (bfloat16, 258, 1, 260),
    ]:
        mine, piece = np.full(40, one, dtype), np.full(40, tie, dtype)
        compare("sum", mine, piece)
        compiled("sum", mine, piece, is_left=False, divides=False, contributors=1)
        assert np.all(mine == dtype.type(rounded))


@needs_native
def test_what_does_not_fit_together_is_refused() -> None:
    rule = native_reduction(reduction("sum", np.dtype(np.float32)), np.dtype(np.float32), 2)
    four, eight = np.zeros(4, np.uint8), np.zeros(8, np.uint8)
    for left, right, out in [
        (four, four, eight),
        (eight, four, four),
        (four, eight, four),
        (four[:3], four[:3], four[:3]),
    ]:
        with pytest.raises(ValueError, match=r"\w"):
            rule.combine(left, right, out.copy(), False, 2)
    with pytest.raises(ValueError, match="no loop"):
        native_reduction(reduction("sum", np.dtype(np.float32)), np.dtype("datetime64[s]"), 2)


LOOPS = """
#include "reduce.c"
__attribute__((visibility("default")))
int run(int set, int is_bfloat16, int op, uint16_t *left, uint16_t *right, uint16_t *out, int64_t count, int keeps_left)
{
    half_loops *loops = set == 0 ? loops_plain : NULL;
#if HAS_X86
    if (set == 1 && __builtin_cpu_supports("avx2"))
        loops = loops_avx2;
    if (set == 2 && chosen_loops() == loops_avx512)
        loops = loops_avx512;
#endif
    if (loops != NULL)
        loops(is_bfloat16, (enum half_op)op, left, right, out, count, 3.0f, keeps_left);
    return loops != NULL;
}
"""


@needs_compiler
def test_the_loops_of_every_instruction_set_give_the_same_bits(tmp_path: Path) -> None:
    """The loops that this processor would not choose are tested as well, if it can run them."""
    run = ctypes.PyDLL(str(shared_library(tmp_path, LOOPS))).run
    every = np.arange((1 << 16) + 5, dtype=np.int64).astype(np.uint16)
    for dtype in HALVES:
        for other in specials(dtype).view(np.uint16):
            right = np.full_like(every, other)
            for op, keeps_left in itertools.product(range(5), (0, 1)):
                results = []
                for instructions in range(3):
                    out = np.zeros_like(every)
                    pointers = [ctypes.c_void_p(each.ctypes.data) for each in (every, right, out)]
                    how = (int(dtype == BFLOAT16), op, *pointers, ctypes.c_int64(every.size), keeps_left)
                    if run(instructions, *how):
                        results.append(out)
                for result in results[1:]:
                    wrong = np.flatnonzero(result != results[0])
                    assert not wrong.size, (dtype, op, hex(other), [hex(each[wrong[0]]) for each in (every, *results)])
