"""Codecs that store each element by itself, as a shorter float: half of the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from covey.compress import compiled, kernels
from covey.compress.codec import Codec

if TYPE_CHECKING:
    from covey.compress.codec import Bytes, Floats


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
