from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.support.in_turn import in_turn

from covey.base.arithmetic import DTYPES, OPS, identity, reduction
from covey.base.errors import ConfigError

CASES = list(itertools.product(DTYPES, OPS))
MEANINGFUL = {
    "bool": {"min", "max", "and", "or", "xor"},
    "integer": {"sum", "prod", "min", "max", "and", "or", "xor"},
    "float": {"sum", "mean", "prod", "min", "max"},
    "complex": {"sum", "mean", "prod"},
}


def family(dtype: np.dtype[Any]) -> str:
    return {"b": "bool", "i": "integer", "u": "integer", "c": "complex"}.get(dtype.kind, "float")


def draw(dtype: np.dtype[Any], seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 2 if dtype.kind == "b" else 5, 50).astype(dtype)


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_an_operation_without_meaning_for_a_dtype_is_a_type_error(dtype: np.dtype[Any], op: str) -> None:
    if op in MEANINGFUL[family(dtype)]:
        assert reduction(op, dtype).op == op
    else:
        with pytest.raises(TypeError, match=f"op='{op}' has no meaning for {dtype.name}"):
            reduction(op, dtype)


def test_an_unknown_operation_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"op='avg' is unknown; use one of sum, mean, .*xor"):
        reduction("avg", np.dtype(np.float32))


@pytest.mark.parametrize(("dtype", "op"), [case for case in CASES if case[1] in MEANINGFUL[family(case[0])]])
def test_combining_into_either_operand_gives_the_same(dtype: np.dtype[Any], op: str) -> None:
    rule = reduction(op, dtype)
    left, right = draw(dtype, 1), draw(dtype, 2)
    fresh, into_left, into_right = np.empty_like(left), left.copy(), right.copy()
    rule.combine(left, right, out=fresh)
    rule.combine(into_left, right, out=into_left)
    rule.combine(left, into_right, out=into_right)
    assert fresh.tobytes() == into_left.tobytes() == into_right.tobytes()
    assert fresh.dtype == dtype


@pytest.mark.parametrize(("dtype", "op"), [case for case in CASES if case[1] in MEANINGFUL[family(case[0])] - {"mean"}])
def test_the_identity_changes_nothing(dtype: np.dtype[Any], op: str) -> None:
    x = draw(dtype, 3)
    neutral = np.full_like(x, identity(op, dtype))
    assert neutral.dtype == dtype
    result = np.empty_like(x)
    reduction(op, dtype).combine(neutral, x, out=result)
    assert np.array_equal(result, x)
    reduction(op, dtype).combine(x, neutral, out=result)
    assert np.array_equal(result, x)


@in_turn(op=["min", "max"])
@in_turn(dtype=[d for d in DTYPES if d.kind in "iu"])
def test_the_identity_of_min_and_max_reaches_the_limits(dtype: np.dtype[Any], op: str) -> None:
    limits = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max], dtype)
    result = np.empty_like(limits)
    reduction(op, dtype).combine(limits, np.full_like(limits, identity(op, dtype)), out=result)
    assert np.array_equal(result, limits)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.kind not in "biu"], ids=lambda dtype: dtype.name)
def test_only_a_mean_divides(dtype: np.dtype[Any]) -> None:
    assert [op for op in ("sum", "mean", "prod") if reduction(op, dtype).divides] == ["mean"]
    x = np.array([0, 4, -2, 100], dtype)
    reduction("mean", dtype).average(x, np.array([0, 2, -10, 200], dtype), x, 3)
    assert x.dtype == dtype
    assert x.tolist() == [0, 2, -4, 100]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_half_precision_mean_is_divided_by_counts_that_the_dtype_cannot_hold(dtype: Any) -> None:
    x = np.array([257.0, 3.0], np.float32).astype(dtype)
    expected = ((x.astype(np.float32) + x.astype(np.float32)) / np.float32(257)).astype(dtype)
    reduction("mean", np.dtype(dtype)).average(x, x, x, 257)
    assert (x == expected).all()


def test_a_half_precision_mean_may_have_a_sum_that_the_dtype_cannot_hold() -> None:
    x = np.array([60000.0], np.float16)
    reduction("mean", x.dtype).average(x, x, x, 2)
    assert x == 60000.0
