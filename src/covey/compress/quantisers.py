"""Codecs with one scale for each block of elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from covey.base.errors import ConfigError
from covey.compress import kernels
from covey.compress.codec import Codec

if TYPE_CHECKING:
    from covey.compress.codec import Bytes, Floats

BLOCK: Final = 256
"""Elements that share a scale. As int8, the scales add 1.6 % to the bytes."""
LARGEST_BLOCK: Final = 1 << 16
SEEDS: Final = 1 << 32


def check_block(name: str, block: int) -> None:
    """Raise ConfigError unless `block` is a valid number of elements per scale."""
    if not isinstance(block, int) or isinstance(block, bool) or block % 8 or not 0 < block <= LARGEST_BLOCK:
        raise ConfigError(f"{name}: block is {block!r}; give a multiple of 8 from 8 to {LARGEST_BLOCK}, like {BLOCK}")


def check_seed(name: str, seed: int) -> None:
    """Raise ConfigError unless `seed` is a valid seed."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < SEEDS:
        raise ConfigError(f"{name}: seed is {seed!r}; give an integer from 0 to {SEEDS - 1}")


def bound_of_blocks(x: Floats, block: int, steps: float, levels: float) -> Floats:
    """Return `steps` times the scale of each element's block, and inf where the block has a NaN or an infinity."""
    bounds = np.empty(x.size, np.float32)
    for start in range(0, x.size, block):
        part = x[start : start + block]
        magnitude = (part.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(keepdims=True)
        (scale,), _ = kernels.absmax_scales(magnitude, levels)
        bounds[start : start + block] = scale * np.float32(steps) if np.isfinite(scale) else np.inf
    return bounds


@dataclass(frozen=True)
class Int8(Codec):
    """An int8 for each element and a float32 scale for each block: a quarter of the bytes.

    The scale of a block is its largest magnitude divided by 127. Elements are rounded to the nearest multiple of it.
    With `stochastic`, they are rounded up or down at random, so that the expected value is exact.
    """

    block: int = BLOCK
    """Elements that share a scale, a multiple of 8."""
    stochastic: bool = False
    """Whether to round at random."""
    seed: int = 0
    """The seed of the random rounding."""

    name: ClassVar[str] = "int8"
    levels: ClassVar[int] = 127

    def __post_init__(self) -> None:
        check_block(self.name, self.block)
        check_seed(self.name, self.seed)
        if not isinstance(self.stochastic, bool):
            raise ConfigError(f"{self.name}: stochastic is {self.stochastic!r}; give True or False")

    @property
    def unit(self) -> int:
        """Return the elements of a block."""
        return self.block

    def wire_bytes(self, count: int) -> int:
        """Return a byte for each element, and four for each block."""
        return count + kernels.SCALE_BYTES * -(-count // self.block)

    def encode(self, x: Floats, wire: Bytes, salt: int = 0) -> None:
        """Write the scales and levels of `x`."""
        kernels.encode_int8(x, wire, self.block, self._key(salt))

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Overwrite `out` with levels times scales."""
        kernels.decode_int8(wire, out, self.block)

    def decode_add(self, wire: Bytes, out: Floats) -> None:
        """Add levels times scales to `out`."""
        kernels.decode_add_int8(wire, out, self.block)

    def error_bound(self, x: Floats) -> Floats:
        """Return half a step of each element's block, or a whole one if `stochastic`, and a little for rounding."""
        # Inverse, product and decoded value are each rounded: by half a unit in the last place of `levels` steps.
        steps = (1.0 if self.stochastic else 0.5) + self.levels * 2.0**-22
        return bound_of_blocks(x, self.block, steps, self.levels)

    def _key(self, salt: int) -> int | None:
        return kernels.random_key(self.seed, salt) if self.stochastic else None
