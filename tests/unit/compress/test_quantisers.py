"""Quantisers against the slowest obvious version of each rule."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
from tests.support.in_turn import in_turn
from tests.unit.compress.arrays import around, encoded, finite_arrays, normal

from covey.base.errors import ConfigError
from covey.compress.kernels import random_key, uniform
from covey.compress.quantisers import FP8, Int4, Int8, OneBit

if TYPE_CHECKING:
    from covey.compress.codec import Codec

ARRAYS = {name: x[:3000] for name, x in finite_arrays().items()}
ALL_NAMES = in_turn(name=sorted(ARRAYS))
LARGEST_FLOAT = float(np.finfo(np.float32).max)


def scale_of(block: np.ndarray, levels: float) -> np.float32:
    scale = np.float32(np.abs(block).max() / np.float32(levels))
    if float(scale) * levels > LARGEST_FLOAT:
        scale = np.nextafter(scale, np.float32(0))  # the highest level must not decode to infinity
    return np.float32(max(scale, np.float32(2.0**-126)))


def blocks(x: np.ndarray, size: int) -> list[np.ndarray]:
    return [x[start : start + size] for start in range(0, x.size, size)]


@ALL_NAMES
@in_turn(size=[8, 256])
def test_int8_writes_a_scale_and_a_byte_for_each_element(name: str, size: int) -> None:
    expected = b""
    for block in blocks(ARRAYS[name], size):
        scale = scale_of(block, 127)
        levels = [int(np.clip(np.rint(value * (np.float32(1) / scale)), -127, 127)) for value in block]
        expected += scale.tobytes() + bytes(level & 0xFF for level in levels)
    assert encoded(Int8(block=size), ARRAYS[name]).tobytes() == expected


@ALL_NAMES
@in_turn(size=[8, 256])
def test_int4_writes_a_scale_and_a_nibble_for_each_element(name: str, size: int) -> None:
    expected = b""
    for block in blocks(ARRAYS[name], size):
        scale = scale_of(block, 7)
        nibbles = [8 + int(np.clip(np.rint(value * (np.float32(1) / scale)), -7, 7)) for value in block]
        pairs = zip(nibbles[::2], [*nibbles[1::2], 0], strict=False)
        expected += scale.tobytes() + bytes(low | high << 4 for low, high in pairs)
    assert encoded(Int4(block=size), ARRAYS[name]).tobytes() == expected


@ALL_NAMES
@pytest.mark.parametrize(
    ("codec", "dtype", "largest"),
    [(FP8(), ml_dtypes.float8_e4m3fn, 448.0), (FP8("e5m2"), ml_dtypes.float8_e5m2, 57344.0)],
    ids=str,
)
def test_fp8_writes_a_scale_and_a_small_float_for_each_element(
    name: str, codec: Codec, dtype: type, largest: float
) -> None:
    expected = b""
    for block in blocks(ARRAYS[name], 256):
        scale = scale_of(block, largest)
        levels = np.clip(block * (np.float32(1) / scale), -largest, largest)
        expected += scale.tobytes() + levels.astype(dtype).tobytes()
    assert encoded(codec, ARRAYS[name]).tobytes() == expected


@ALL_NAMES
@in_turn(size=[8, 256])
def test_onebit_writes_the_mean_magnitude_and_a_sign_for_each_element(name: str, size: int) -> None:
    x = ARRAYS[name]
    means = [math.fsum(abs(float(value)) for value in block) / block.size for block in blocks(x, size)]
    y = around(OneBit(block=size), x)
    assert (np.signbit(y) == np.signbit(x)).all()
    for block, mean in zip(blocks(y, size), means, strict=True):
        assert np.abs(block).tolist() == pytest.approx([mean] * block.size, rel=1e-7, abs=2.0**-150)
    assert encoded(OneBit(), np.array([1, -1, -1, 1, 1, 1, 1, -1, -1], np.float32))[4:].tolist() == [0b10000110, 1]


@pytest.mark.parametrize("codec", [Int8(), Int4(), FP8(), FP8("e5m2"), OneBit()], ids=str)
def test_the_greatest_float_stays_finite(codec: Codec) -> None:
    """With int8, the nearest scale would decode the highest level to infinity."""
    assert np.isfinite(around(codec, finite_arrays()["greatest"])).all()


@pytest.mark.parametrize("codec", [Int8(), Int4(), FP8(), FP8("e5m2")], ids=str)
def test_an_infinity_arrives_and_makes_its_block_nan(codec: Codec) -> None:
    x = normal(600)
    x[[300, 310]] = [np.inf, -np.inf]
    y = around(codec, x)
    assert y[[300, 310]].tolist() == [np.inf, -np.inf]
    assert np.isnan(np.delete(y[256:512], [300 - 256, 310 - 256])).all()


@pytest.mark.parametrize("codec", [Int8(), Int4(), FP8(), FP8("e5m2"), OneBit()], ids=str)
def test_a_nan_beside_infinities_makes_its_block_nan(codec: Codec) -> None:
    x = normal(600)
    x[[300, 301, 302]] = [np.inf, -np.nan, -np.inf]
    first = codec.wire_bytes(256)
    assert np.isnan(around(codec, x)[256:512]).all()
    assert encoded(codec, x)[first : first + 4].tobytes() == bytes.fromhex("0000c07f"), "one NaN for all"


def test_a_block_of_zeros_has_the_smallest_scale_and_decodes_to_plus_zero() -> None:
    for codec in (Int8(), Int4()):
        x = np.full(10, -0.0, np.float32)
        assert encoded(codec, x)[:4].view("<f4")[0] == np.float32(2.0**-126)
        assert around(codec, x).tobytes() == np.zeros(10, np.float32).tobytes()


def fmix(h: int) -> int:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ h >> shift) * factor) & 0xFFFFFFFF
    return h ^ h >> 16


@pytest.mark.parametrize(("seed", "salt"), [(0, 0), (3, 5), (2**32 - 1, 2**64 - 1), (7, 1 << 40)])
def test_random_numbers_are_the_hash_of_seed_salt_and_index(seed: int, salt: int) -> None:
    key = fmix(fmix(seed) ^ salt & 0xFFFFFFFF) ^ fmix((salt >> 32) + 0x165667B1 & 0xFFFFFFFF)
    assert random_key(seed, salt) == key
    start = 2**32 - 2  # the index wraps
    expected = [(fmix((start + i) * 0x9E3779B1 + key & 0xFFFFFFFF) >> 8) * 2.0**-24 for i in range(5)]
    assert uniform(start, 5, key).tolist() == expected


@pytest.mark.parametrize(("kind", "levels"), [(Int8, 127), (Int4, 7)])
def test_stochastic_levels_are_the_floor_of_value_plus_random_number(kind: type, levels: int) -> None:
    x = normal(70_000, 1)
    wire = encoded(kind(block=65536, stochastic=True, seed=3), x, salt=11)
    u = uniform(0, x.size, random_key(3, 11))
    first = slice(0, 65536)
    inverse = np.float32(1) / scale_of(x[first], levels)
    expected = np.clip(np.floor(x[first] * inverse + u[first]), -levels, levels)
    scale = scale_of(x[first], levels)
    assert around(kind(block=65536, stochastic=True, seed=3), x, salt=11)[first].tolist() == (expected * scale).tolist()
    assert wire.size == kind(block=65536).wire_bytes(70_000)
    rest = slice(65536, 70_000)
    scale = scale_of(x[rest], levels)
    expected = np.clip(np.floor(x[rest] * (np.float32(1) / scale) + u[rest]), -levels, levels)
    assert around(kind(block=65536, stochastic=True, seed=3), x, salt=11)[rest].tolist() == (expected * scale).tolist()


@pytest.mark.parametrize(("kind", "levels"), [(Int8, 127), (Int4, 7)])
@pytest.mark.parametrize("sign", [1, -1])
def test_stochastic_levels_stay_within_the_highest(kind: type, levels: int, sign: int) -> None:
    """The greatest element, divided by its scale, can exceed the highest level by a unit in the last place."""
    numbers = np.linspace(1, 2, 1000, dtype=np.float32)
    greatest = next(each for each in numbers if each * (np.float32(1) / scale_of(np.full(1, each), levels)) > levels)
    x = np.full(65536, sign * greatest, np.float32)
    value = x[0] * (np.float32(1) / scale_of(x[:1], levels))
    is_beyond = False
    for salt in range(64):
        is_beyond |= bool((np.abs(np.floor(value + uniform(0, x.size, random_key(0, salt)))) > levels).any())
        assert (around(kind(block=65536, stochastic=True), x, salt) == sign * levels * scale_of(x[:1], levels)).all()
    assert is_beyond, "these salts do not show it"


@pytest.mark.parametrize(("kind", "levels"), [(Int8, 127), (Int4, 7)])
def test_stochastic_rounding_is_unbiased(kind: type, levels: int) -> None:
    """The mean error is within three standard errors of zero, wherever elements lie between two levels."""
    x = np.concatenate([[1.0], np.linspace(-1, 1, 4095)]).astype(np.float32)
    codec = kind(block=4096, stochastic=True, seed=1)
    rounds = 200
    steps = x.astype(np.float64) / float(scale_of(x, levels))
    fraction = steps - np.floor(steps)
    mean = np.mean([around(codec, x, salt).astype(np.float64) - x for salt in range(rounds)], axis=0)
    variance = fraction * (1 - fraction) * float(scale_of(x, levels)) ** 2 / rounds
    for part in range(10):
        chosen = np.floor(10 * fraction) == part
        assert abs(mean[chosen].sum()) <= 3 * np.sqrt(variance[chosen].sum())


def test_random_rounding_differs_by_seed_salt_and_position() -> None:
    x = np.full(4096, 0.3, np.float32)
    x[::256] = 127.0  # a step of 1 in each block
    codecs = [Int8(stochastic=True, seed=seed) for seed in (0, 1)]
    assert len({encoded(codec, x, salt).tobytes() for codec in codecs for salt in (0, 1, 1 << 32)}) == 6
    levels = around(Int8(stochastic=True), x).reshape(16, 256)
    assert len({row.tobytes() for row in levels}) == 16
    assert encoded(Int8(stochastic=True), x, 5).tobytes() == encoded(Int8(stochastic=True), x, 5).tobytes()


@in_turn(kind=[Int8, Int4, OneBit])
@in_turn(block=[0, -8, 12, 65544, 256.0, "256", True])
def test_a_bad_block_is_named_with_what_is_valid(kind: type, block: object) -> None:
    with pytest.raises(ConfigError, match="give a multiple of 8 from 8 to 65536"):
        kind(block=block)


def test_bad_parameters_are_named() -> None:
    with pytest.raises(ConfigError, match="seed is -1; give an integer"):
        Int8(stochastic=True, seed=-1)
    with pytest.raises(ConfigError, match="seed is only used with stochastic=True"):
        Int4(seed=3)
    with pytest.raises(ConfigError, match="stochastic is 1; give True or False"):
        Int8(stochastic=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give e4m3 or e5m2"):
        FP8("e3m4")  # type: ignore[arg-type]
