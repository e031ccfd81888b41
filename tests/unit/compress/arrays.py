"""Arrays that codecs must handle, with names; values differ by position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from covey.compress.codec import Bytes, Codec, Floats

FLT_MAX = float(np.finfo(np.float32).max)


def normal(count: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def gradient(count: int, seed: int = 0) -> Floats:
    """Return numbers whose magnitudes span eight decades, as those of gradients do."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * 10.0 ** rng.uniform(-8, 0, count)).astype(np.float32)


def finite_arrays() -> dict[str, Floats]:
    arrays = {f"normal_{count}": normal(count, count) for count in (0, 1, 2, 7, 8, 9, 255, 256, 257, 1000, 40_001)}
    return {
        **arrays,
        "gradient": gradient(70_001),
        "zeros": np.zeros(300, np.float32),
        "minus_zeros": np.full(300, -0.0, np.float32),
        "denormals": (np.arange(600, dtype=np.float64) * 2.0**-149).astype(np.float32),
        "near_the_smallest_normal": (normal(600) * np.float32(2.0**-126)),
        "small_scales": normal(600) * np.float32(2.0**-119),
        "greatest": np.array([FLT_MAX, -FLT_MAX, 1.0, -1e30] * 100, np.float32),
        "large": normal(600) * np.float32(1e37),
        "one_of_each_block": np.eye(8, 256, dtype=np.float32).reshape(-1) * np.float32(3.0),
        "ties": (np.arange(-127, 128) / 2).astype(np.float32),
        "alternating": np.array([1.0, -1.0] * 333, np.float32),
    }


def encoded(codec: Codec, x: Floats, salt: int = 0) -> Bytes:
    """Return the wire of `x`; bytes that a codec forgets to write would be 0xa5."""
    wire = np.full(codec.wire_bytes(x.size), 0xA5, np.uint8)
    codec.encode(x, wire, salt)
    return wire


def decoded(codec: Codec, wire: Bytes, count: int) -> Floats:
    out = np.full(count, 123.0, np.float32)
    codec.decode(wire, out)
    return out


def around(codec: Codec, x: Floats, salt: int = 0) -> Floats:
    """Return `x` encoded and decoded."""
    return decoded(codec, encoded(codec, x, salt), x.size)
