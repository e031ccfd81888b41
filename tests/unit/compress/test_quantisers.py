"""Quantisers against the slowest obvious version of each rule."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.compress.arrays import around, decoded, encoded, finite_arrays, normal

from covey.compress.quantisers import Int8

ARRAYS = finite_arrays()


def block_int8(x: np.ndarray) -> bytes:
    """Return the wire of one finite block, element by element."""
    scale = np.float32(max(np.float32(np.abs(x).max() / np.float32(127)), np.float32(2.0**-126)))
    inverse = np.float32(1) / scale
    levels = [int(np.clip(np.rint(value * inverse), -127, 127)) for value in x]
    return scale.tobytes() + bytes(level & 0xFF for level in levels)


@pytest.mark.parametrize("name", sorted(ARRAYS.keys() - {"greatest"}))
@pytest.mark.parametrize("block", [8, 256])
def test_int8_writes_a_scale_and_the_levels_of_each_block(name: str, block: int) -> None:
    x = ARRAYS[name][:3000]
    expected = b"".join(block_int8(x[start : start + block]) for start in range(0, x.size, block))
    assert encoded(Int8(block=block), x).tobytes() == expected


def test_the_greatest_float_stays_finite() -> None:
    """The nearest scale would decode 127 levels to infinity, so that the scale below it is used."""
    assert np.isfinite(around(Int8(), ARRAYS["greatest"])).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_an_infinity_arrives_and_makes_its_block_nan(value: float) -> None:
    x = normal(600)
    x[300] = value
    y = around(Int8(), x)
    assert y[300] == value
    assert np.isnan(np.delete(y[256:512], 300 - 256)).all()
    assert np.isfinite(np.delete(y, slice(256, 512))).all()


def test_a_nan_makes_its_block_nan() -> None:
    x = normal(600)
    x[[300, 301, 302]] = [np.inf, np.nan, -np.inf]
    y = around(Int8(), x)
    assert np.isnan(y[256:512]).all()
    assert np.isfinite(np.delete(y, slice(256, 512))).all()
    assert encoded(Int8(), x)[260:264].tobytes() == bytes.fromhex("0000c07f")


def test_decode_add_adds_after_rounding_the_product() -> None:
    x, out = normal(70_001, 1), normal(70_001, 2)
    wire = encoded(Int8(), x)
    expected = out + decoded(Int8(), wire, x.size)
    Int8().decode_add(wire, out)
    assert out.tobytes() == expected.tobytes()
