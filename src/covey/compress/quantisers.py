"""Codecs that store each element in fewer bits.

`int8`, `int4`, `fp8` and `onebit` have one scale for each block of elements. Casts store each element by itself, as a
shorter float: half of the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Literal

import numpy as np

from covey.base.errors import ConfigError
from covey.compress import compiled, kernels
from covey.compress.codec import Codec
from covey.compress.kernels import random_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.compress.codec import Bytes, Floats

BLOCK: Final = 256
"""Elements that share a scale. As int8, the scales add 1.6 % to the bytes."""
LARGEST_BLOCK: Final = 1 << 16
SEEDS: Final = 1 << 32

_ROUNDING: Final = 2.0**-22
"""What rounding to float32 adds to an error, relative to the element: for inverse, product and decoded value."""


def check_block(name: str, block: object) -> None:
    """Raise ConfigError unless `block` is a valid number of elements per scale."""
    if not isinstance(block, int) or isinstance(block, bool) or block % 8 or not 0 < block <= LARGEST_BLOCK:
        raise ConfigError(f"{name}: block is {block!r}; give a multiple of 8 from 8 to {LARGEST_BLOCK}, like {BLOCK}")


def check_seed(name: str, seed: object) -> None:
    """Raise ConfigError unless `seed` is a valid seed."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < SEEDS:
        raise ConfigError(f"{name}: seed is {seed!r}; give an integer from 0 to {SEEDS - 1}")


def _wire_bytes(count: int, block: int, level_bytes: Callable[[int], int]) -> int:
    whole, rest = divmod(count, block)
    size = whole * (kernels.SCALE_BYTES + level_bytes(block))
    return size + kernels.SCALE_BYTES + level_bytes(rest) if rest else size


def _unknown_as_inf(bounds: Floats) -> Floats:
    bounds[~np.isfinite(bounds)] = np.inf
    return bounds


@dataclass(frozen=True)
class _Integers(Codec):
    """What `Int8` and `Int4` share: parameters, rounding and the bound of the error."""

    block: int = BLOCK
    """Elements that share a scale, a multiple of 8."""
    stochastic: bool = False
    """Whether to round at random."""
    seed: int = 0
    """The seed of the random rounding."""

    levels: ClassVar[int]
    """The highest level."""

    def __post_init__(self) -> None:
        check_block(self.name, self.block)
        check_seed(self.name, self.seed)
        if not isinstance(self.stochastic, bool):
            raise ConfigError(f"{self.name}: stochastic is {self.stochastic!r}; give True or False")
        if self.seed and not self.stochastic:
            raise ConfigError(f"{self.name}: a seed is only used with stochastic=True; add it, or leave out the seed")

    @property
    def unit(self) -> int:
        """Return the elements of a block."""
        return self.block

    @np.errstate(all="ignore")
    def error_bound(self, x: Floats) -> Floats:
        """Return half a step of each element's block, or a whole one if `stochastic`, and a little for rounding."""
        steps = (1.0 if self.stochastic else 0.5) + self.levels * _ROUNDING
        return _unknown_as_inf(kernels.scales_of(x, self.block, self.levels) * np.float32(steps))

    def _key(self, salt: int) -> int | None:
        return random_key(self.seed, salt) if self.stochastic else None


@dataclass(frozen=True)
class Int8(_Integers):
    """An int8 for each element and a float32 scale for each block: a quarter of the bytes.

    The scale of a block is its largest magnitude divided by 127. Elements are rounded to the nearest multiple of it.
    With `stochastic`, they are rounded up or down at random, so that the expected value is exact.
    """

    name: ClassVar[str] = "int8"
    levels: ClassVar[int] = kernels.INT8_LEVELS

    def wire_bytes(self, count: int) -> int:
        """Return a byte for each element, and four for each block."""
        return _wire_bytes(count, self.block, kernels.int8_bytes)

    def encode(self, x: Floats, wire: Bytes, salt: int = 0) -> None:
        """Write the scale and the levels of each block."""
        kernels.encode_int8(x, wire, self.block, self._key(salt))

    def encode_fused(self, x: Floats, wire: Bytes, residual: Floats, salt: int = 0) -> bool:
        """Encode, and write the residual, in one pass, where that is compiled."""
        return compiled.encode_fused_blocks("int8", x, wire, residual, self.block, self._key(salt))

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Overwrite `out` with levels times scales."""
        kernels.decode_int8(wire, out, self.block)

    def decode_add(self, wire: Bytes, out: Floats) -> None:
        """Add levels times scales to `out`."""
        kernels.decode_add_int8(wire, out, self.block)


@dataclass(frozen=True)
class Int4(_Integers):
    """Four bits for each element and a float32 scale for each block: an eighth of the bytes.

    The scale of a block is its largest magnitude divided by 7. Elements are rounded as `Int8` rounds them.
    """

    name: ClassVar[str] = "int4"
    levels: ClassVar[int] = kernels.INT4_LEVELS

    def wire_bytes(self, count: int) -> int:
        """Return a byte for two elements, and four for each block."""
        return _wire_bytes(count, self.block, kernels.int4_bytes)

    def encode(self, x: Floats, wire: Bytes, salt: int = 0) -> None:
        """Write the scale and the levels of each block."""
        kernels.encode_int4(x, wire, self.block, self._key(salt))

    def encode_fused(self, x: Floats, wire: Bytes, residual: Floats, salt: int = 0) -> bool:
        """Encode, and write the residual, in one pass, where that is compiled."""
        return compiled.encode_fused_blocks("int4", x, wire, residual, self.block, self._key(salt))

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Overwrite `out` with levels times scales."""
        kernels.decode_int4(wire, out, self.block)

    def decode_add(self, wire: Bytes, out: Floats) -> None:
        """Add levels times scales to `out`."""
        kernels.decode_add_int4(wire, out, self.block)


@dataclass(frozen=True)
class FP8(Codec):
    """A float of eight bits for each element and a float32 scale for each block of 256: a quarter of the bytes.

    The format is "e4m3" (4 bits of exponent, 3 of mantissa) or "e5m2" (5 and 2). Small elements beside large ones keep
    their relative precision, which int8 does not give them.
    """

    form: Literal["e4m3", "e5m2"] = "e4m3"
    """The format."""

    name: ClassVar[str] = "fp8"

    def __post_init__(self) -> None:
        if self.form not in kernels.FP8_DTYPES:
            raise ConfigError(f"fp8: the format is {self.form!r}; give {' or '.join(kernels.FP8_DTYPES)}")

    @property
    def unit(self) -> int:
        """Return the elements of a block."""
        return BLOCK

    def wire_bytes(self, count: int) -> int:
        """Return a byte for each element, and four for each block."""
        return _wire_bytes(count, BLOCK, kernels.int8_bytes)

    def encode(self, x: Floats, wire: Bytes, salt: int = 0) -> None:
        """Write the scale and the small floats of each block."""
        kernels.encode_fp8(x, wire, BLOCK, self.form)

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Overwrite `out` with small floats times scales."""
        kernels.decode_fp8(wire, out, BLOCK, self.form)

    def decode_add(self, wire: Bytes, out: Floats) -> None:
        """Add small floats times scales to `out`."""
        kernels.decode_add_fp8(wire, out, BLOCK, self.form)

    @np.errstate(all="ignore")
    def error_bound(self, x: Floats) -> Floats:
        """Return half a unit in the last place of the small float, and a little for rounding."""
        unit, step = (2.0**-4, 2.0**-9) if self.form == "e4m3" else (2.0**-3, 2.0**-16)
        relative = unit / (1 + unit)  # halfway between a power of two and its neighbour, where it is greatest
        scales = kernels.scales_of(x, BLOCK, kernels.FP8_LEVELS[self.form])
        # 2**-149: near the smallest scale, decoded values are denormal.
        bounds = np.abs(x) * np.float32(relative + _ROUNDING) + scales * np.float32(step / 2) + np.float32(2.0**-149)
        return _unknown_as_inf(np.where(np.isfinite(scales), bounds, np.float32(np.inf)))


@dataclass(frozen=True)
class OneBit(Codec):
    """The sign of each element and the mean magnitude of each block: a 28th of the bytes, with blocks of 256.

    Use it with error feedback only: a decoded element has nothing but its sign in common with the original.
    """

    block: int = BLOCK
    """Elements that share a magnitude, a multiple of 8."""

    name: ClassVar[str] = "onebit"

    def __post_init__(self) -> None:
        check_block(self.name, self.block)

    @property
    def unit(self) -> int:
        """Return the elements of a block."""
        return self.block

    def wire_bytes(self, count: int) -> int:
        """Return a byte for eight elements, and four for each block."""
        return _wire_bytes(count, self.block, kernels.sign_bytes)

    def encode(self, x: Floats, wire: Bytes, salt: int = 0) -> None:
        """Write the mean magnitude and the signs of each block."""
        kernels.encode_signs(x, wire, self.block)

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Overwrite `out` with the magnitude of each block, with the signs."""
        kernels.decode_signs(wire, out, self.block)

    def decode_add(self, wire: Bytes, out: Floats) -> None:
        """Add the magnitude of each block to `out`, with the signs."""
        kernels.decode_add_signs(wire, out, self.block)

    @np.errstate(all="ignore")
    def error_bound(self, x: Floats) -> Floats:
        """Return how far the magnitude of each element is from the mean of its block."""
        bounds = np.empty(x.size, np.float32)
        for start in range(0, x.size, self.block):
            part = np.abs(x[start : start + self.block])
            bounds[start : start + self.block] = np.abs(part - kernels.mean_magnitudes(part[None]))
        return _unknown_as_inf(np.nextafter(bounds, np.float32(np.inf)))


class Cast(Codec):
    """Writes each element as a float of two bytes, rounded to the nearest even."""

    relative: ClassVar[float]
    """Half a unit in the last place, relative to the element."""
    absolute: ClassVar[float]
    """Largest absolute error for subnormal elements."""
    largest: ClassVar[float]
    """Elements above this may become infinite."""

    @property
    def unit(self) -> int:
        """Return 1: each element stands by itself."""
        return 1

    def wire_bytes(self, count: int) -> int:
        """Return two bytes for each element."""
        return 2 * count

    def encode_fused(self, x: Floats, wire: Bytes, residual: Floats, salt: int = 0) -> bool:
        """Encode, and write the residual, in one pass, where that is compiled."""
        return compiled.encode_fused_cast(self.name, x, wire, residual)

    @np.errstate(all="ignore")
    def error_bound(self, x: Floats) -> Floats:
        """Return half a unit in the last place; inf for elements that may become infinite."""
        magnitude = np.abs(x)
        bounds = np.maximum(magnitude * np.float32(self.relative), np.float32(self.absolute))
        return np.where(magnitude <= np.float32(self.largest), bounds, np.float32(np.inf))


@dataclass(frozen=True)
class FP16(Cast):
    """A float16 for each element: half of the bytes, 11 bits of precision. What is above 65504 becomes infinite."""

    name: ClassVar[str] = "fp16"
    relative: ClassVar[float] = 2.0**-11
    absolute: ClassVar[float] = 2.0**-25
    largest: ClassVar[float] = 65504.0

    def encode(self, x: Floats, wire: Bytes, salt: int = 0) -> None:
        """Write the elements."""
        kernels.encode_fp16(x, wire)

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Overwrite `out` with the elements."""
        kernels.decode_fp16(wire, out)

    def decode_add(self, wire: Bytes, out: Floats) -> None:
        """Add the elements to `out`."""
        kernels.decode_add_fp16(wire, out)


@dataclass(frozen=True)
class BF16(Cast):
    """A bfloat16 for each element: half of the bytes, 8 bits of precision, and the range of float32."""

    name: ClassVar[str] = "bf16"
    relative: ClassVar[float] = 2.0**-8
    absolute: ClassVar[float] = 2.0**-134
    largest: ClassVar[float] = (2 - 2.0**-7) * 2.0**127

    def encode(self, x: Floats, wire: Bytes, salt: int = 0) -> None:
        """Write the elements."""
        kernels.encode_bf16(x, wire)

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Overwrite `out` with the elements."""
        kernels.decode_bf16(wire, out)

    def decode_add(self, wire: Bytes, out: Floats) -> None:
        """Add the elements to `out`."""
        kernels.decode_add_bf16(wire, out)
