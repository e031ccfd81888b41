"""Codecs that store each element by itself, as a shorter float: half of the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from covey.compress import compiled, kernels
from covey.compress.codec import Codec

if TYPE_CHECKING:
    from covey.compress.codec import Bytes, Floats


@dataclass(frozen=True)
class FP16(Codec):
    """A float16 for each element: half of the bytes, 11 bits of precision. What is above 65504 becomes infinite."""

    name: ClassVar[str] = "fp16"

    @property
    def unit(self) -> int:
        """Return 1: each element stands by itself."""
        return 1

    def wire_bytes(self, count: int) -> int:
        """Return two bytes for each element."""
        return 2 * count

    def encode(self, x: Floats, wire: Bytes, salt: int = 0) -> None:
        """Write elements as float16, rounded to the nearest even."""
        kernels.encode_fp16(x, wire)

    def encode_fused(self, x: Floats, wire: Bytes, residual: Floats, salt: int = 0) -> bool:
        """Encode, and write the residual, in one pass, where that is compiled."""
        return compiled.encode_fused_cast("fp16", x, wire, residual)

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Overwrite `out` with the elements."""
        kernels.decode_fp16(wire, out)

    def decode_add(self, wire: Bytes, out: Floats) -> None:
        """Add the elements to `out`."""
        kernels.decode_add_fp16(wire, out)

    def error_bound(self, x: Floats) -> Floats:
        """Return half a unit in the last place of a float16; inf above 65504, where elements may become infinite."""
        return _bound(x, 2.0**-11, 2.0**-25, 65504.0)


@dataclass(frozen=True)
class BF16(Codec):
    """A bfloat16 for each element: half of the bytes, 8 bits of precision, and the range of float32."""

    name: ClassVar[str] = "bf16"

    @property
    def unit(self) -> int:
        """Return 1: each element stands by itself."""
        return 1

    def wire_bytes(self, count: int) -> int:
        """Return two bytes for each element."""
        return 2 * count

    def encode(self, x: Floats, wire: Bytes, salt: int = 0) -> None:
        """Write elements as bfloat16, rounded to the nearest even."""
        kernels.encode_bf16(x, wire)

    def encode_fused(self, x: Floats, wire: Bytes, residual: Floats, salt: int = 0) -> bool:
        """Encode, and write the residual, in one pass, where that is compiled."""
        return compiled.encode_fused_cast("bf16", x, wire, residual)

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Overwrite `out` with the elements."""
        kernels.decode_bf16(wire, out)

    def decode_add(self, wire: Bytes, out: Floats) -> None:
        """Add the elements to `out`."""
        kernels.decode_add_bf16(wire, out)

    def error_bound(self, x: Floats) -> Floats:
        """Return half a unit in the last place of a bfloat16; inf for the few elements that may become infinite."""
        return _bound(x, 2.0**-8, 2.0**-134, (2 - 2.0**-7) * 2.0**127)


@np.errstate(all="ignore")
def _bound(x: Floats, relative: float, absolute: float, largest: float) -> Floats:
    magnitude = np.abs(x)
    bounds = np.maximum(magnitude * np.float32(relative), np.float32(absolute))
    return np.where(magnitude <= np.float32(largest), bounds, np.float32(np.inf))
