"""The model behind "auto": how long an all_reduce takes with each codec, and which codec finishes first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from covey.base.errors import ConfigError
from covey.compress.codec import Codec, call_text
from covey.compress.quantisers import BF16, FP8, FP16, Int4, Int8, OneBit

if TYPE_CHECKING:
    from collections.abc import Mapping

CODEC_ERRORS: Final[Mapping[Codec, float]] = {
    FP16(): 0.0003,
    BF16(): 0.002,
    Int8(): 0.0075,
    FP8(): 0.03,
    FP8("e5m2"): 0.06,
    Int4(): 0.13,
    OneBit(): 0.61,
}
"""The codecs to choose from, and the error of one encoding: root mean square, relative to that of normal numbers."""
SHARED: Final = "none: the ranks share memory"
LEAST_SAVED_SHARE: Final = 0.05
"""A codec must save this part of the time. The speeds are measured, and a few percent are within their noise."""


@dataclass(frozen=True)
class Auto:
    """Whichever codec finishes first by measurement, or none, with an error of at most `max_error`.

    The error is that of one encoding: its root mean square, relative to that of a normally distributed array.
    """

    max_error: float = 0.01
    """With 0.01, the choice is among fp16, bf16 and int8; with 0.15, fp8 and int4, too."""

    name: ClassVar[str] = "auto"

    def __post_init__(self) -> None:
        is_number = isinstance(self.max_error, int | float) and not isinstance(self.max_error, bool)
        if not is_number or not 0 < self.max_error <= 1:
            raise ConfigError(f"auto: max_error is {self.max_error!r}; give a part of the magnitude, like 0.01")
        object.__setattr__(self, "max_error", float(self.max_error))  # equal values have equal texts

    def __str__(self) -> str:
        return call_text(self.name, self)


class Speed(NamedTuple):
    """How fast the slowest rank runs a codec, in bytes of float32 per second."""

    encode: float
    decode_add: float


def plain_seconds(nbytes: int, ranks: int, bytes_per_second: float, latency: float) -> float:
    """Return how long a ring all_reduce of `nbytes` takes without a codec."""
    steps = 2 * (ranks - 1)
    return steps * (latency + nbytes / ranks / bytes_per_second)


def codec_seconds(
    codec: Codec, nbytes: int, ranks: int, bytes_per_second: float, latency: float, speed: Speed
) -> float:
    """Return the longest time that a ring all_reduce of `nbytes` of float32 takes with a codec.

    Every rank encodes the whole array once, in parts, adds the parts of the others and decodes the finished ones. That
    overlaps with the transfer; here the times are added, so that a codec is not chosen on a hope.
    """
    if ranks < 2:
        return 0.0
    count = nbytes // 4
    ratio = codec.wire_bytes(count) / nbytes if count else 1.0
    transfer = plain_seconds(math.ceil(nbytes * ratio), ranks, bytes_per_second, latency)
    others = (ranks - 1) / ranks
    return transfer + nbytes / speed.encode + 2 * others * nbytes / speed.decode_add


def choose(
    nbytes: int,
    ranks: int,
    bytes_per_second: float,
    latency: float,
    speeds: Mapping[Codec, Speed],
    max_error: float,
    itemsize: int = 4,
) -> tuple[Codec | None, str]:
    """Return the codec that finishes an all_reduce of floats first, or None, and the reason in words.

    All ranks must pass the same numbers, to choose alike.

    Args:
        nbytes: the size of the array in float32.
        ranks: how many ranks take part.
        bytes_per_second: what the slowest lane moves; `math.inf` for shared memory, where compression cannot gain.
        latency: seconds that the slowest lane takes for a small transfer.
        speeds: the codecs that were measured; others are not chosen.
        max_error: the largest error of one encoding, as in `Auto`.
        itemsize: the bytes of an element without a codec, like 2 for float16.
    """
    if ranks < 2:
        return None, "none: there is no other rank"
    if bytes_per_second == math.inf:
        return None, SHARED
    plain = plain_seconds(nbytes // 4 * itemsize, ranks, bytes_per_second, latency)
    times = {
        codec: codec_seconds(codec, nbytes, ranks, bytes_per_second, latency, speeds[codec])
        for codec, error in CODEC_ERRORS.items()
        if codec in speeds and error <= max_error
    }
    link = f"{bytes_per_second / 1e6:.4g} MB/s"
    if not times:
        return None, f"none: no measured codec has an error of at most {max_error:g}"
    best = min(times, key=lambda codec: (times[codec], CODEC_ERRORS[codec]))
    compared = f"{1e3 * times[best]:.3g} ms with {best}, {1e3 * plain:.3g} ms without, at {link}"
    if times[best] > (1 - LEAST_SAVED_SHARE) * plain:
        return None, f"none: {compared}"
    return best, f"{best}: {compared}"
