"""The loops of the codecs, in numpy, and the choice of a compiled loop where there is one.

Every function works on one-dimensional contiguous arrays, in chunks that stay in the second-level cache. A compiled
function gives the same bytes and bits; the ones here define them.

Blocks on the wire: a float32 scale in little-endian order, then the levels. The last block may be shorter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.compress.codec import CHUNK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from covey.compress.codec import Bytes, Floats

    Words = NDArray[np.uint32]

SCALE_BYTES: Final = 4
FLT_MIN: Final = np.float32(2.0**-126)
"""The smallest scale. Its inverse is finite, so that blocks of zeros and denormals need no special case."""
FLT_MAX: Final = np.finfo(np.float32).max
_WIRE_FLOAT: Final = np.dtype("<f4")
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_INFINITY: Final = np.uint32(0x7F800000)
_QUIET_NAN: Final = np.uint32(0x7FC00000).view(np.float32)


def largest_scale(levels: float) -> np.float32:
    """Return the greatest scale with which the highest level decodes to a finite number."""
    scale = FLT_MAX / np.float32(levels)
    while float(scale) * levels > float(FLT_MAX):
        scale = np.nextafter(scale, np.float32(0))
    return np.float32(scale)


@np.errstate(all="ignore")
def absmax_scales(magnitudes: Words, levels: float) -> tuple[Floats, Floats]:
    """Return the scale and its inverse for blocks with these greatest magnitudes, given as bit patterns.

    Bit patterns are ordered like the numbers; infinity follows the greatest number, and NaN follows infinity. A block
    with an infinity or a NaN has this as its scale, and 0 as its inverse.
    """
    absmax = magnitudes.view(np.float32)
    scales = np.clip(absmax / np.float32(levels), FLT_MIN, largest_scale(levels))
    inverses = np.float32(1) / scales
    poisoned = magnitudes >= _INFINITY
    if poisoned.any():
        scales[poisoned] = np.where(magnitudes[poisoned] == _INFINITY, np.float32(np.inf), _QUIET_NAN)
        inverses[poisoned] = 0.0
    return scales, inverses


def encode_int8(x: Floats, wire: Bytes, block: int, key: int | None = None) -> None:
    """Write levels from -127 to 127, one byte each; with a `key`, round at random."""

    def store(levels: Floats, room: Bytes) -> None:
        np.copyto(room.view(np.int8), levels, casting="unsafe")

    _quantise(x, wire, block, 127, store, key)


@np.errstate(all="ignore")
def decode_int8(wire: Bytes, out: Floats, block: int) -> None:
    """Overwrite `out` with what `encode_int8` wrote."""
    for levels, scales, target in _blocks(wire, out, block, _int8_bytes):
        np.copyto(target, levels.view(np.int8))
        np.multiply(target, scales, out=target)


@np.errstate(all="ignore")
def decode_add_int8(wire: Bytes, out: Floats, block: int) -> None:
    """Add what `encode_int8` wrote to `out`."""
    for levels, scales, target in _blocks(wire, out, block, _int8_bytes):
        values = levels.view(np.int8).astype(np.float32)
        np.multiply(values, scales, out=values)
        np.add(target, values, out=target)


def _int8_bytes(count: int) -> int:
    return count


def _int4_bytes(count: int) -> int:
    return (count + 1) // 2


def _blocks(
    wire: Bytes, x: Floats, block: int, level_bytes: Callable[[int], int]
) -> Iterator[tuple[Bytes, Floats, Floats]]:
    """Yield the levels, the scales and the elements of some blocks at a time, a row for each block.

    The scales, as a column, can be written, too. All rows that are yielded together have the same length.
    """
    size = SCALE_BYTES + level_bytes(block)
    rows = max(1, CHUNK // block)
    whole, rest = divmod(x.size, block)
    spans = [(start, min(start + rows, whole), block) for start in range(0, whole, rows)]
    for first, last, width in [*spans, *([(whole, whole + 1, rest)] if rest else [])]:
        lines = wire[first * size : last * size].reshape(last - first, -1)
        scales: Any = lines[:, :SCALE_BYTES].view(_WIRE_FLOAT)
        yield lines[:, SCALE_BYTES:], scales, x[first * block : last * block].reshape(last - first, width)


@np.errstate(all="ignore")
def _quantise(
    x: Floats, wire: Bytes, block: int, levels: int, store: Callable[[Floats, Bytes], None], key: int | None
) -> None:
    level_bytes = _int8_bytes if levels == 127 else _int4_bytes
    position = 0
    for room, wire_scales, source in _blocks(wire, x, block, level_bytes):
        bits = source.view(np.uint32) & _MAGNITUDE
        magnitudes = bits.max(axis=1)
        scales, inverses = absmax_scales(magnitudes, levels)
        values = np.multiply(source, inverses[:, None], out=bits.view(np.float32))
        if key is None:
            np.rint(values, out=values)  # at most `levels`: the product is off by a few units in the last place
        else:
            np.add(values, uniform(position, source.size, key).reshape(values.shape), out=values)
            np.clip(np.floor(values, out=values), -levels, levels, out=values)
        for row in np.flatnonzero(magnitudes >= _INFINITY):
            values[row] = np.where(np.isinf(source[row]) & np.isinf(scales[row]), np.sign(source[row]), 0.0)
        wire_scales[:, 0] = scales
        store(values, room)
        position += source.size


def mix(h: Words) -> Words:
    """Return a 32-bit hash of each word: the finaliser of murmur3."""
    h = h ^ (h >> np.uint32(16))
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return h


def random_key(seed: int, salt: int) -> int:
    """Return 32 bits that depend on all of `seed` (32 bits) and `salt` (64 bits)."""
    words = np.array([seed & 0xFFFFFFFF, ((salt >> 32) + 0x165667B1) & 0xFFFFFFFF], np.uint32)
    seeds, highs = mix(words)
    (lows,) = mix(np.array([seeds ^ np.uint32(salt & 0xFFFFFFFF)], np.uint32))
    return int(lows ^ highs)


def random_words(start: int, count: int, key: int) -> Words:
    """Return the hashes of the indices from `start` on, under a key."""
    indices = np.arange(start, start + count, dtype=np.uint64).astype(np.uint32)
    indices *= np.uint32(0x9E3779B1)
    indices += np.uint32(key)
    return mix(indices)


def uniform(start: int, count: int, key: int) -> Floats:
    """Return random numbers in [0, 1) for the elements from index `start` on."""
    return (random_words(start, count, key) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
