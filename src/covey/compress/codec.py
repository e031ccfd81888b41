"""The interface of a codec: floats in, a known number of bytes out, blockwise.

A codec has a fixed rate: the size of the encoded array follows from the number of elements alone. It works in units: a
range that starts at a multiple of `unit` is encoded independently of the elements before it. So a collective can cut
an array into ranges, and all ranks know the size of every encoded range in advance.
"""

from __future__ import annotations

import dataclasses
import functools
import keyword
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]

CHUNK: Final = 1 << 16
"""Elements that are handled at a time. With scratch memory they take 576 KiB, which stays in a second-level cache of
1 MiB; with half as many, the calls of numpy take a fifth longer."""


class Codec(ABC):
    """A way to write float32 arrays in fewer bytes. Subclass it for a codec of your own, as a frozen dataclass.

    Instances are values: equal parameters make equal codecs, and all ranks of a call must use equal ones.
    """

    name: ClassVar[str]
    """What the codec is called in settings: the name it is registered under."""
    is_lossy: ClassVar[bool] = True
    """Whether a decoded array can differ from the original. Error feedback is used for lossy codecs only."""

    @property
    @abstractmethod
    def unit(self) -> int:
        """Return how many elements are encoded together, at least 1."""

    @abstractmethod
    def wire_bytes(self, count: int) -> int:
        """Return the encoded size of `count` elements.

        Sizes add up at units: `wire_bytes(a + b) == wire_bytes(a) + wire_bytes(b)` if `a` is a multiple of `unit`.
        """

    @abstractmethod
    def encode(self, x: Floats, wire: Bytes, salt: int = 0) -> None:
        """Write all bytes of `wire`, which has `wire_bytes(x.size)` of them; `x` is contiguous and 1-d.

        A codec that rounds at random must give the same bytes for the same `x` and `salt`. Callers pass a salt from 0
        to 2**64 - 1 that differs by operation, rank and range.
        """

    @abstractmethod
    def decode(self, wire: Bytes, out: Floats) -> None:
        """Overwrite `out` with the elements encoded in `wire`. The bytes may come from a peer: any bytes are valid."""

    def decode_add(self, wire: Bytes, out: Floats) -> None:
        """Add the elements encoded in `wire` to `out`, in float32."""
        scratch = np.empty(min(out.size, chunk_elements(self)), np.float32)
        for start, stop in chunks(self, out.size):
            part = scratch[: stop - start]
            self.decode(wire[self.wire_bytes(start) : self.wire_bytes(stop)], part)
            with np.errstate(invalid="ignore", over="ignore"):
                np.add(out[start:stop], part, out=out[start:stop])

    def encode_fused(self, x: Floats, wire: Bytes, residual: Floats, salt: int = 0) -> bool:
        """Do what `encode_with_residual` does in one pass, if this codec can, and tell whether it was done.

        The result must be the same. The residual may be `x` itself.
        """
        return False

    @abstractmethod
    def error_bound(self, x: Floats) -> Floats:
        """Return for each element the largest possible difference between it and its decoded value.

        It is inf for elements that share a block with a NaN or an infinity.
        """

    def __str__(self) -> str:
        return call_text(self.name, self)


@functools.lru_cache(1024)
def check_sizes(codec: Codec, count: int) -> None:
    """Raise ConfigError unless the encoded parts of `count` elements are as long as the whole.

    Ranks cut an array at multiples of the unit. If the sizes did not add up there, they would send other bytes than
    they encoded.
    """
    unit, whole = codec.unit, _wire_bytes(codec, count)
    cuts = {0, count // unit * unit, count // unit // 2 * unit}
    cuts.update(unit << exponent for exponent in range(max(0, (count // unit).bit_length())))
    for cut in cuts:
        if _wire_bytes(codec, cut) + _wire_bytes(codec, count - cut) != whole:
            sizes = f"{cut} and {count - cut} elements take {codec.wire_bytes(cut)} and {codec.wire_bytes(count - cut)}"
            wrong = f"codec {codec}: wire_bytes does not add up at multiples of its unit, {unit}"
            raise ConfigError(f"{wrong}: {sizes} bytes, {count} elements {whole}")


def _wire_bytes(codec: Codec, count: int) -> int:
    nbytes = codec.wire_bytes(count)
    if not isinstance(nbytes, int | np.integer) or nbytes < 0:
        raise ConfigError(f"codec {codec}: wire_bytes({count}) is {nbytes!r}; return a number of bytes, from 0 up")
    return int(nbytes)


def encode_with_residual(codec: Codec, x: Floats, wire: Bytes, residual: Floats, salt: int = 0) -> None:
    """Encode `x` and set `residual` to what the encoding lost, `x` less the decoded array; 0 where that is not finite.

    The residual may be `x` itself.
    """
    if codec.encode_fused(x, wire, residual, salt):
        return
    codec.encode(x, wire, salt)
    scratch = np.empty(min(x.size, chunk_elements(codec)), np.float32)
    for start, stop in chunks(codec, x.size):
        decoded, rest = scratch[: stop - start], residual[start:stop]
        codec.decode(wire[codec.wire_bytes(start) : codec.wire_bytes(stop)], decoded)
        with np.errstate(invalid="ignore", over="ignore"):
            np.subtract(x[start:stop], decoded, out=rest)
        clear_non_finite(rest)


def clear_non_finite(x: Floats) -> None:
    """Set the elements that are NaN or infinite to 0."""
    finite = np.isfinite(x)
    if not finite.all():
        x[~finite] = 0.0


def chunk_elements(codec: Codec) -> int:
    """Return how many elements of an array are handled at a time: a multiple of the codec's unit near CHUNK."""
    return max(1, CHUNK // codec.unit) * codec.unit


def chunks(codec: Codec, count: int) -> list[tuple[int, int]]:
    """Return the ranges in which `count` elements are handled. All but the last have `chunk_elements(codec)`."""
    step = chunk_elements(codec)
    return [(start, min(start + step, count)) for start in range(0, count, step)]


def call_text(name: str, value: Any) -> str:
    """Return a frozen dataclass as the call that makes it: "int4(block=128)", "topk(0.01)", "fp8(e5m2)".

    Parameters that have their default are left out. Words, and parameters without a default, have no name before them,
    unless a parameter before them was left out.
    """
    arguments: list[str] = []
    is_in_order = True
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        if content == field.default:
            is_in_order = False
            continue
        is_word = isinstance(content, str) and content.isidentifier() and not keyword.iskeyword(content)
        shown = content if is_word else repr(content.item() if isinstance(content, np.generic) else content)
        is_in_order = is_in_order and not field.kw_only and (is_word or field.default is dataclasses.MISSING)
        arguments.append(shown if is_in_order else f"{field.name}={shown}")
    return f"{name}({', '.join(arguments)})" if arguments else name
