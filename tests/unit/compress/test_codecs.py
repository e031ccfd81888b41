"""What every codec promises: bytes that are written fully and add up, bounds for each element, honest NaN."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.support.in_turn import in_turn
from tests.unit.compress.arrays import around, decoded, encoded, finite_arrays, gradient, normal
from tests.unit.compress.codecs import BLOCKWISE, CODECS

from covey.compress.codec import Codec, chunk_elements, encode_with_residual
from covey.compress.quantisers import BF16, FP16

ARRAYS = finite_arrays()
every_codec = in_turn(codec=CODECS)


@every_codec
@in_turn(name=ARRAYS)
def test_no_element_is_further_off_than_its_bound(codec: Codec, name: str) -> None:
    x = ARRAYS[name]
    bound = codec.error_bound(x)
    assert bound.shape == x.shape
    assert bound.dtype == np.float32
    error = np.abs(around(codec, x, salt=9).astype(np.float64) - x)
    assert (error <= bound).all()
    assert np.isfinite(bound).all() or isinstance(codec, FP16 | BF16), "only casts can overflow"


@every_codec
@in_turn(seed=range(10))
def test_any_bit_patterns_are_within_their_bounds_or_visibly_not_finite(codec: Codec, seed: int) -> None:
    """All exponents, or five of them that follow each other: the latter meet every edge of scales and denormals."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, 2003, dtype=np.uint32)
    exponents = rng.integers(0, 252) + rng.integers(0, 5, bits.size, dtype=np.uint32)
    for x in (bits.view(np.float32), ((bits & 0x807FFFFF) | exponents.astype(np.uint32) << 23).view(np.float32)):
        y, bound = around(codec, x, seed), codec.error_bound(x)
        known = np.isfinite(bound)
        assert (np.abs(y[known].astype(np.float64) - x[known]) <= bound[known]).all()
        assert not np.isfinite(y[~np.isfinite(x)]).any()
        assert np.isnan(y[np.isnan(x)]).all()


@every_codec
def test_the_bound_is_not_much_above_the_worst_error(codec: Codec) -> None:
    """A bound of infinity would hold, too."""
    x = gradient(200_000, 3)
    error = np.abs(around(codec, x).astype(np.float64) - x)
    assert (error / codec.error_bound(x)).max() > 0.9


@every_codec
@in_turn(count=[0, 1, 3, 8, 255, 256, 257, 511, 512, 513, 100_003])
def test_all_bytes_are_written_and_depend_on_the_elements_only(codec: Codec, count: int) -> None:
    x = normal(count, 4)
    clean, dirty = np.zeros(codec.wire_bytes(count), np.uint8), np.full(codec.wire_bytes(count), 0xFF, np.uint8)
    for wire in (clean, dirty):
        codec.encode(x, wire, 7)
    assert clean.tobytes() == dirty.tobytes()
    assert codec.wire_bytes(0) == 0


@every_codec
def test_sizes_add_up_at_units(codec: Codec) -> None:
    for units in (0, 1, 2, 7):
        for rest in (0, 1, 2, 7, 8, 9, 255, 256, 70_001):
            first = units * codec.unit
            assert codec.wire_bytes(first + rest) == codec.wire_bytes(first) + codec.wire_bytes(rest)


@in_turn(codec=[codec for codec in CODECS if "stochastic" not in str(codec)])
def test_ranges_that_start_at_units_stand_by_themselves(codec: Codec) -> None:
    x = normal(3 * 65536 + 1001, 5)
    cut = 2 * codec.unit * (30_000 // codec.unit or 1)
    parts = [encoded(codec, x[:cut]), encoded(codec, x[cut:])]
    assert encoded(codec, x).tobytes() == b"".join(part.tobytes() for part in parts)
    whole = around(codec, x)
    assert whole[cut:].tobytes() == decoded(codec, parts[1], x.size - cut).tobytes()


@every_codec
def test_a_wire_at_any_address_is_the_same(codec: Codec) -> None:
    x = normal(1003, 6)
    room = np.zeros(codec.wire_bytes(x.size) + 3, np.uint8)
    for offset in (1, 2, 3):
        wire = room[offset : offset + codec.wire_bytes(x.size)]
        codec.encode(x, wire, 0)
        assert wire.tobytes() == encoded(codec, x).tobytes()
        assert decoded(codec, wire, x.size).tobytes() == around(codec, x).tobytes()


@every_codec
@in_turn(count=[0, 1, 7, 257, 70_001])
def test_decode_add_is_decode_and_then_add(codec: Codec, count: int) -> None:
    x, out = normal(count, 7), normal(count, 8)
    wire = encoded(codec, x)
    expected = out + decoded(codec, wire, count)
    codec.decode_add(wire, out)
    assert out.tobytes() == expected.tobytes()


@every_codec
@in_turn(value=[np.nan, -np.nan, np.inf, -np.inf])
@in_turn(index=[0, 300, 1002])
def test_what_is_not_finite_stays_visible_at_its_index(codec: Codec, value: float, index: int) -> None:
    x = normal(1003, 9)
    x[index] = value
    y, total = around(codec, x), np.ones(1003, np.float32)
    codec.decode_add(encoded(codec, x), total)
    for out in (y, total):
        assert not np.isfinite(out[index])
        assert np.isnan(out[index]) == (np.isnan(value) or codec.name == "onebit")
    first = index - index % codec.unit
    assert np.isfinite(np.delete(y, slice(first, first + codec.unit))).all(), "the poison spread to other blocks"
    assert np.isinf(codec.error_bound(x)[index])


@every_codec
def test_a_signalling_nan_is_a_nan(codec: Codec) -> None:
    x = normal(20, 10)
    x.view(np.uint32)[3] = 0x7FA00001
    assert np.isnan(around(codec, x)[3])


@in_turn(codec=BLOCKWISE)
def test_any_bytes_decode_without_a_warning(codec: Codec) -> None:
    """They may come from a peer with a bug, or with bad intent; a warning would be an error here."""
    rng = np.random.default_rng(11)
    for count in (1, 9, 1003):
        wire = rng.integers(0, 256, codec.wire_bytes(count), dtype=np.uint8)
        out = np.ones(count, np.float32)
        codec.decode(wire, out)
        codec.decode_add(wire, out)


@every_codec
def test_the_residual_is_what_the_encoding_lost(codec: Codec) -> None:
    x = gradient(chunk_elements(codec) + 70_001, 12)
    wire, residual = np.zeros(codec.wire_bytes(x.size), np.uint8), np.full(x.size, 5.0, np.float32)
    encode_with_residual(codec, x, wire, residual, 13)
    assert wire.tobytes() == encoded(codec, x, 13).tobytes()
    assert residual.tobytes() == (x - around(codec, x, 13)).tobytes()
    original = x.copy()
    encode_with_residual(codec, x, wire, x, 13)
    assert x.tobytes() == residual.tobytes(), "the residual may replace the array"
    assert wire.tobytes() == encoded(codec, original, 13).tobytes()


@every_codec
def test_the_residual_is_zero_where_it_is_not_finite(codec: Codec) -> None:
    x = normal(1003, 14)
    x[[1, 600]] = [np.nan, np.inf]
    residual = np.ones(x.size, np.float32)
    encode_with_residual(codec, x, np.zeros(codec.wire_bytes(x.size), np.uint8), residual)
    assert residual[1] == residual[600] == 0.0
    assert np.isfinite(residual).all()


@every_codec
def test_codecs_are_values(codec: Codec) -> None:
    assert codec == dataclasses.replace(codec)  # type: ignore[type-var]
    assert hash(codec) == hash(dataclasses.replace(codec))  # type: ignore[type-var]
    assert [each for each in CODECS if each == codec] == [codec]
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec.block = 3  # type: ignore[attr-defined]


def test_casts_round_to_the_nearest_even() -> None:
    ties = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519.0, 65520.0, 2.0**-25, 3 * 2.0**-25], np.float32)
    assert around(FP16(), ties).tolist() == [1.0, 1 + 2.0**-9, 65504.0, np.inf, 0.0, 2.0**-23]
    ties = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -3.4028235e38, 2.0**-134], np.float32)
    assert around(BF16(), ties).tolist() == [1.0, 1 + 2.0**-6, -np.inf, 0.0]
