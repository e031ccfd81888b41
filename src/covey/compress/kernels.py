"""The loops of the codecs, in numpy. They define the bytes and bits that a compiled loop must give, too.

All arrays are one-dimensional and contiguous. They are handled in chunks that stay in the second-level cache.

A block on the wire is a float32 scale in little-endian order, then the levels; the last block may be shorter. The scale
of a block with an infinity is infinity, and its levels are 1 and -1 for infinities, 0 for numbers, which decode to NaN.
The scale of a block with a NaN is NaN. (Blocks of `onebit` have NaN in both cases.)

Random numbers are a function of seed, salt and index: all ranks, and compiled loops, compute the same ones.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from covey.base.arithmetic import BFLOAT16
from covey.compress import compiled
from covey.compress.codec import CHUNK
from covey.compress.compiled import or_compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from covey.compress.codec import Bytes, Floats

    Indices = NDArray[np.int64]
    Store = Callable[[Floats, Bytes], None]
    Words = NDArray[np.uint32]

SCALE_BYTES: Final = 4
INT8_LEVELS: Final = 127
INT4_LEVELS: Final = 7
FP8_DTYPES: Final = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}
FP8_LEVELS: Final = {name: float(ml_dtypes.finfo(dtype).max) for name, dtype in FP8_DTYPES.items()}
_FLT_MIN: Final = np.float32(2.0**-126)
"""The smallest scale. Its inverse is finite, so that blocks of zeros and denormals need no special case."""
_FLT_MAX: Final = np.finfo(np.float32).max
_MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_INFINITY: Final = np.uint32(0x7F800000)
_QUIET_NAN: Final = np.uint32(0x7FC00000).view(np.float32)
_FP16: Final = np.dtype("<f2")
_FP8_VALUES: Final = {
    name: np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32) for name, dtype in FP8_DTYPES.items()
}
"""The numbers that the 256 bytes of a format stand for. A lookup is three times as fast as a conversion."""
_NIBBLES: Final = np.arange(256)
_INT4_PAIRS: Final = (
    np.stack([_NIBBLES % 16 - 8, _NIBBLES // 16 - 8], axis=1).astype(np.float32).view(np.uint64).reshape(-1)
)
"""For each byte the two floats that its nibbles stand for, as one word of eight bytes."""


def mix(words: Words) -> Words:
    """Return a 32-bit hash of each word: the finaliser of murmur3."""
    h = words ^ (words >> np.uint32(16))
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return h


def random_key(seed: int, salt: int) -> int:
    """Return 32 bits that depend on all bits of `seed` (32) and `salt` (64)."""
    words = np.array([seed & 0xFFFFFFFF, ((salt >> 32) + 0x165667B1) & 0xFFFFFFFF], np.uint32)
    hashed_seed, high = mix(words)
    (low,) = mix(np.array([hashed_seed ^ np.uint32(salt & 0xFFFFFFFF)], np.uint32))
    return int(low ^ high)


def random_words(start: int, count: int, key: int) -> Words:
    """Return 32 random bits for each index from `start` on."""
    indices = np.arange(start, start + count, dtype=np.uint64).astype(np.uint32)
    indices *= np.uint32(0x9E3779B1)
    indices += np.uint32(key)
    return mix(indices)


def uniform(start: int, count: int, key: int) -> Floats:
    """Return a random number in [0, 1) for each index from `start` on."""
    return (random_words(start, count, key) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def magnitudes(x: Floats) -> Words:
    """Return the bit patterns of |x|. They are ordered like the numbers, then come infinity and NaN."""
    return x.view(np.uint32) & _MAGNITUDE


@functools.cache
def largest_scale(levels: float) -> np.float32:
    """Return the greatest scale with which the highest level decodes to a finite number."""
    scale = np.float32(_FLT_MAX / np.float32(levels))
    return scale if float(scale) * levels <= float(_FLT_MAX) else np.nextafter(scale, np.float32(0))


@np.errstate(all="ignore")
def absmax_scales(absmax: Words, levels: float) -> tuple[Floats, Floats]:
    """Return the scales, and their inverses, of blocks whose greatest magnitudes have these bit patterns.

    The inverse is 0 for a block with an infinity or a NaN.
    """
    scales = np.clip(absmax.view(np.float32) / np.float32(levels), _FLT_MIN, largest_scale(levels))
    inverses = np.float32(1) / scales
    poisoned = absmax >= _INFINITY
    if poisoned.any():
        scales[poisoned] = np.where(absmax[poisoned] == _INFINITY, np.float32(np.inf), _QUIET_NAN)
        inverses[poisoned] = 0.0
    return scales, inverses


def scales_of(x: Floats, block: int, levels: float) -> Floats:
    """Return for each element the scale of its block."""
    if not x.size:
        return np.empty(0, np.float32)
    scales, _ = absmax_scales(np.maximum.reduceat(magnitudes(x), range(0, x.size, block)), levels)
    return np.repeat(scales, block)[: x.size]


def int8_bytes(count: int) -> int:
    """Return the bytes of so many levels of int8 or fp8."""
    return count


def int4_bytes(count: int) -> int:
    """Return the bytes of so many levels of int4."""
    return (count + 1) // 2


def sign_bytes(count: int) -> int:
    """Return the bytes of so many signs."""
    return (count + 7) // 8


@or_compiled(compiled.encode_int8)
def encode_int8(x: Floats, wire: Bytes, block: int, key: int | None = None) -> None:
    """Write levels from -127 to 127, one byte each, rounded to the nearest, or at random with a `key`."""

    def store(levels: Floats, room: Bytes) -> None:
        np.copyto(room.view(np.int8), levels, casting="unsafe")

    _encode_levels(x, wire, block, int8_bytes, INT8_LEVELS, _rounding(INT8_LEVELS, key), store)


@or_compiled(compiled.decode_int8)
def decode_int8(wire: Bytes, out: Floats, block: int) -> None:
    """Overwrite `out` with what `encode_int8` wrote."""
    _decode(wire, out, block, int8_bytes, _load_int8)


@or_compiled(compiled.decode_add_int8)
def decode_add_int8(wire: Bytes, out: Floats, block: int) -> None:
    """Add what `encode_int8` wrote to `out`."""
    _decode_add(wire, out, block, int8_bytes, _load_int8)


def _load_int8(room: Bytes, values: Floats) -> None:
    np.copyto(values, room.view(np.int8))


@or_compiled(compiled.encode_int4)
def encode_int4(x: Floats, wire: Bytes, block: int, key: int | None = None) -> None:
    """Write levels from -7 to 7, plus 8, two in a byte with the first in the low nibble; rounded as `encode_int8` does.

    The high nibble beside an odd last element is 0.
    """

    def store(levels: Floats, room: Bytes) -> None:
        rows, width = levels.shape
        nibbles = np.zeros((rows, width + width % 2), np.uint8)
        np.copyto(nibbles[:, :width], levels + np.float32(8), casting="unsafe")
        pairs = nibbles.view("<u2")
        np.copyto(room, pairs | pairs >> np.uint16(4), casting="unsafe")  # keeps the low byte

    _encode_levels(x, wire, block, int4_bytes, INT4_LEVELS, _rounding(INT4_LEVELS, key), store)


@or_compiled(compiled.decode_int4)
def decode_int4(wire: Bytes, out: Floats, block: int) -> None:
    """Overwrite `out` with what `encode_int4` wrote."""
    _decode(wire, out, block, int4_bytes, _load_int4)


@or_compiled(compiled.decode_add_int4)
def decode_add_int4(wire: Bytes, out: Floats, block: int) -> None:
    """Add what `encode_int4` wrote to `out`."""
    _decode_add(wire, out, block, int4_bytes, _load_int4)


def _load_int4(room: Bytes, values: Floats) -> None:
    if values.shape[1] % 2:
        np.copyto(values, np.take(_INT4_PAIRS, room).view(np.float32)[:, :-1])
    else:
        np.take(_INT4_PAIRS, room, out=values.view(np.uint64), mode="clip")  # this mode writes without a buffer


def encode_fp8(x: Floats, wire: Bytes, block: int, form: str) -> None:
    """Write elements as floats of one byte, scaled so that the greatest of a block is the greatest of the format."""
    largest = FP8_LEVELS[form]

    def limit(values: Floats, position: int) -> None:
        np.clip(values, -largest, largest, out=values)

    def store(levels: Floats, room: Bytes) -> None:
        np.copyto(room.view(FP8_DTYPES[form]), levels, casting="unsafe")

    _encode_levels(x, wire, block, int8_bytes, largest, limit, store)


def decode_fp8(wire: Bytes, out: Floats, block: int, form: str) -> None:
    """Overwrite `out` with what `encode_fp8` wrote."""
    _decode(wire, out, block, int8_bytes, _load_fp8(form))


def decode_add_fp8(wire: Bytes, out: Floats, block: int, form: str) -> None:
    """Add what `encode_fp8` wrote to `out`."""
    _decode_add(wire, out, block, int8_bytes, _load_fp8(form))


def _load_fp8(form: str) -> Callable[[Bytes, Floats], None]:
    def load(room: Bytes, values: Floats) -> None:
        np.take(_FP8_VALUES[form], room, out=values, mode="clip")

    return load


@np.errstate(all="ignore")
def encode_signs(x: Floats, wire: Bytes, block: int) -> None:
    """Write the mean magnitude of each block as its scale, and the sign bits, the first in the lowest bit."""
    for room, scales, source in _blocks(wire, x, block, sign_bytes):
        scales[:, 0] = mean_magnitudes(source)
        np.copyto(room, np.packbits(np.signbit(source), axis=1, bitorder="little"))


@np.errstate(all="ignore")
def mean_magnitudes(rows: Floats) -> Floats:
    """Return the mean of |x| for each row, summed in float64; NaN for a row with an infinity or a NaN."""
    means: Floats = (np.abs(rows).sum(axis=1, dtype=np.float64) / rows.shape[1]).astype(np.float32)
    means[~np.isfinite(means)] = _QUIET_NAN
    return means


def decode_signs(wire: Bytes, out: Floats, block: int) -> None:
    """Overwrite `out` with what `encode_signs` wrote."""
    _decode(wire, out, block, sign_bytes, _load_signs)


def decode_add_signs(wire: Bytes, out: Floats, block: int) -> None:
    """Add what `encode_signs` wrote to `out`."""
    _decode_add(wire, out, block, sign_bytes, _load_signs)


def _load_signs(room: Bytes, values: Floats) -> None:
    bits = np.unpackbits(room, axis=1, count=values.shape[1], bitorder="little").view(np.int8)
    np.copyto(values, np.int8(1) - bits - bits)


@np.errstate(all="ignore")
def encode_cast(x: Floats, wire: Bytes, dtype: np.dtype[Any]) -> None:
    """Write elements in a dtype of numpy, rounded to the nearest even; what is too large becomes infinity."""
    np.copyto(wire.view(dtype), x, casting="unsafe")


@np.errstate(all="ignore")
def decode_cast(wire: Bytes, out: Floats, dtype: np.dtype[Any]) -> None:
    """Overwrite `out` with what `encode_cast` wrote."""
    np.copyto(out, wire.view(dtype), casting="unsafe")


@np.errstate(all="ignore")
def decode_add_cast(wire: Bytes, out: Floats, dtype: np.dtype[Any]) -> None:
    """Add what `encode_cast` wrote to `out`."""
    elements = wire.view(dtype)
    for start in range(0, out.size, CHUNK):
        part = out[start : start + CHUNK]
        np.add(part, elements[start : start + CHUNK].astype(np.float32), out=part)


@or_compiled(compiled.encode_fp16)
@np.errstate(all="ignore")
def encode_fp16(x: Floats, wire: Bytes) -> None:
    """Write elements as float16. NaNs become quiet ones, with the upper bits of their payload."""
    halves = wire.view(_FP16)
    for start in range(0, x.size, CHUNK):
        # The product quiets a NaN that signals. Whether the cast does depends on how numpy was compiled.
        quiet = np.multiply(x[start : start + CHUNK], np.float32(1))
        encode_cast(quiet, halves[start : start + CHUNK].view(np.uint8), _FP16)


@or_compiled(compiled.decode_fp16)
@np.errstate(all="ignore")
def decode_fp16(wire: Bytes, out: Floats) -> None:
    """Overwrite `out` with what `encode_fp16` wrote. NaNs become quiet ones."""
    halves = wire.view(_FP16)
    for start in range(0, out.size, CHUNK):
        part = out[start : start + CHUNK]
        decode_cast(halves[start : start + CHUNK].view(np.uint8), part, _FP16)
        np.multiply(part, np.float32(1), out=part)


@or_compiled(compiled.decode_add_fp16)
def decode_add_fp16(wire: Bytes, out: Floats) -> None:
    """Add what `encode_fp16` wrote to `out`."""
    decode_add_cast(wire, out, _FP16)


@or_compiled(compiled.encode_bf16)
def encode_bf16(x: Floats, wire: Bytes) -> None:
    """Write elements as bfloat16."""
    encode_cast(x, wire, BFLOAT16)


@or_compiled(compiled.decode_bf16)
def decode_bf16(wire: Bytes, out: Floats) -> None:
    """Overwrite `out` with what `encode_bf16` wrote."""
    decode_cast(wire, out, BFLOAT16)


@or_compiled(compiled.decode_add_bf16)
def decode_add_bf16(wire: Bytes, out: Floats) -> None:
    """Add what `encode_bf16` wrote to `out`."""
    decode_add_cast(wire, out, BFLOAT16)


@or_compiled(compiled.top_indices)
def top_indices(x: Floats, k: int) -> Indices:
    """Return the indices of the `k` greatest magnitudes, ascending. NaN comes first, and of equals the lowest index."""
    if k >= x.size:
        return np.arange(x.size)
    bits = magnitudes(x)
    # Every 64th element tells a magnitude that a little more than k elements reach. A partition of these few is quick;
    # if the sample was not like the rest, all elements are partitioned.
    sample = bits[::64]
    surplus = min(sample.size, k * sample.size * 5 // (x.size * 4) + 8)
    chosen = np.flatnonzero(bits >= np.partition(sample, sample.size - surplus)[sample.size - surplus])
    if chosen.size < k:
        chosen = np.arange(x.size)
    bits = bits[chosen]
    least = np.partition(bits, bits.size - k)[bits.size - k]
    is_above = bits > least
    ties = np.flatnonzero(bits == least)[: k - np.count_nonzero(is_above)]
    is_above[ties] = True
    indices: Indices = chosen[is_above]
    return indices


def _blocks(
    wire: Bytes, x: Floats, block: int, level_bytes: Callable[[int], int]
) -> Iterator[tuple[Bytes, Floats, Floats]]:
    """Yield the levels, the scales as a column, and the elements of some blocks at a time, as views with a row each.

    The blocks that are yielded together have the same length: the last one, if it is shorter, comes alone.
    """
    size = SCALE_BYTES + level_bytes(block)
    rows = max(1, CHUNK // block)
    whole, rest = divmod(x.size, block)
    spans = [(first, min(first + rows, whole), block) for first in range(0, whole, rows)]
    for first, last, width in [*spans, *([(whole, whole + 1, rest)] if rest else [])]:
        lines = wire[first * size : last * size].reshape(last - first, -1)
        scales: Any = lines[:, :SCALE_BYTES].view("<f4")
        yield lines[:, SCALE_BYTES:], scales, x[first * block : last * block].reshape(last - first, width)


@np.errstate(all="ignore")
def _encode_levels(
    x: Floats,
    wire: Bytes,
    block: int,
    level_bytes: Callable[[int], int],
    largest: float,
    rounded: Callable[[Floats, int], None],
    store: Store,
) -> None:
    """Scale each block to magnitudes up to `largest`, round it in place with `rounded`, and `store` its levels."""
    position = 0
    scratch = np.empty(min(x.size, max(CHUNK, block)), np.uint32)
    for room, wire_scales, source in _blocks(wire, x, block, level_bytes):
        bits = scratch[: source.size].reshape(source.shape)
        np.bitwise_and(source.view(np.uint32), _MAGNITUDE, out=bits)
        absmax = bits.max(axis=1)
        scales, inverses = absmax_scales(absmax, largest)
        values = np.multiply(source, inverses[:, None], out=bits.view(np.float32))
        rounded(values, position)
        for row in np.flatnonzero(absmax >= _INFINITY):
            values[row] = np.where(np.isinf(source[row]) & np.isinf(scales[row]), np.sign(source[row]), 0.0)
        wire_scales[:, 0] = scales
        store(values, room)
        position += source.size


def _rounding(levels: int, key: int | None) -> Callable[[Floats, int], None]:
    """Return a function that rounds values in place: to the nearest even integer, or at random with a key."""

    def at_random(values: Floats, position: int) -> None:
        values += uniform(position, values.size, key or 0).reshape(values.shape)
        np.clip(np.floor(values, out=values), -levels, levels, out=values)

    def to_nearest(values: Floats, position: int) -> None:
        np.rint(values, out=values)  # within the levels: a value exceeds the highest by some units in the last place

    return to_nearest if key is None else at_random


@np.errstate(all="ignore")
def _decode(
    wire: Bytes, out: Floats, block: int, level_bytes: Callable[[int], int], load: Callable[[Bytes, Floats], None]
) -> None:
    for room, scales, target in _blocks(wire, out, block, level_bytes):
        load(room, target)
        np.multiply(target, scales, out=target)


@np.errstate(all="ignore")
def _decode_add(
    wire: Bytes, out: Floats, block: int, level_bytes: Callable[[int], int], load: Callable[[Bytes, Floats], None]
) -> None:
    scratch = np.empty(min(out.size, max(CHUNK, block)), np.float32)
    for room, scales, target in _blocks(wire, out, block, level_bytes):
        values = scratch[: target.size].reshape(target.shape)
        load(room, values)
        np.multiply(values, scales, out=values)
        np.add(target, values, out=target)
