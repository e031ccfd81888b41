"""The messages of which the streams of an operation are made: what a program sends is checked here before it is used.

Chunks are most of all bytes, so their frame is read and written by hand, without a copy; everything else goes through
protobuf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from covey.base.arithmetic import DTYPES
from covey.coordinator.refusal import Reason, RefusalError
from covey.gateway import gateway_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Array = np.ndarray[Any, np.dtype[Any]]

CHUNK_BYTES: Final = 1 << 20
"""Bytes of a chunk in an answer; a multiple of the size of every element."""
MOST_CHUNK_BYTES: Final = 2 << 20
"""Most bytes of a chunk in a request."""
STREAM_MESSAGE_BYTES: Final = MOST_CHUNK_BYTES + (1 << 12)
"""The largest message of a stream."""
MAX_DIMENSIONS: Final = 32
MOST_NUMBER: Final = 1 << 31
"""Ranks and tags are below this."""
_DTYPES: Final = {dtype.name: dtype for dtype in DTYPES}
_CHUNK_TAG: Final = b"\x12"
"""Field 2 of a Piece, with a length."""


@dataclass(frozen=True)
class ArrayKind:
    """The dtype and shape of an array that a program sends or receives."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size in bytes, however large the program says it is."""
        return math.prod(self.shape) * self.dtype.itemsize


def malformed(problem: str) -> RefusalError:
    """Return the refusal of a call that its program has to correct."""
    return RefusalError(Reason.MALFORMED, problem)


def decode_piece(data: bytes) -> pb.Start | memoryview:
    """Return what a program sends in a stream: its start, or the bytes of a chunk; RefusalError for anything else."""
    if data[:1] == _CHUNK_TAG:
        begin, length = _length(data)
        if begin + length == len(data):
            return _checked_chunk(memoryview(data)[begin:])
    try:
        piece = pb.Piece.FromString(data)
    except DecodeError:
        raise malformed("a message of the stream is no Piece of the gateway's protocol") from None
    part = piece.WhichOneof("part")
    if part == "start":
        found: pb.Start = piece.start
        return found
    if part == "chunk":
        return _checked_chunk(memoryview(piece.chunk))
    raise malformed("a message of the stream has neither a start nor a chunk")


def array_kind(start: pb.Start, most: int) -> ArrayKind:
    """Return which array a program announces; RefusalError if it cannot be, or has more than `most` bytes."""
    dtype = _DTYPES.get(start.dtype)
    if dtype is None:
        raise malformed(f"dtype {start.dtype[:40]!r} is none of {', '.join(_DTYPES)}")
    if len(start.shape) > MAX_DIMENSIONS:
        raise malformed(f"the shape has {len(start.shape)} dimensions; at most {MAX_DIMENSIONS} are possible")
    kind = ArrayKind(dtype, tuple(start.shape))
    check_size(kind.nbytes, most)
    if max(kind.shape, default=0) > most:  # beside a dimension of 0
        raise malformed(f"a dimension of the shape is above {most}")
    return kind


def check_size(nbytes: int, most: int) -> None:
    """Raise RefusalError if an array has more bytes than the gateway keeps for one."""
    if nbytes > most:
        raise RefusalError(
            Reason.FULL,
            f"an array of {nbytes} bytes is above this gateway's limit of {most}; cut it into several operations, or "
            "start the gateway with a larger --max-bytes",
        )


def number(what: str, value: int) -> int:
    """Return a rank or a tag; RefusalError if there can be none so large."""
    if value >= MOST_NUMBER:
        raise malformed(f"{what} {value} is above {MOST_NUMBER - 1}")
    return value


class Filling:
    """An array that is filled by the chunks of a stream, in order."""

    def __init__(self, array: Array) -> None:
        self._bytes = memoryview(array.reshape(-1).view(np.uint8))
        self._is_bool, self._filled = array.dtype == np.bool_, 0

    def add(self, chunk: memoryview) -> None:
        """Take the next bytes; RefusalError if the array has no room for them."""
        end = self._filled + len(chunk)
        if end > len(self._bytes):
            raise malformed(f"more bytes were sent than the {len(self._bytes)} that dtype and shape announce")
        self._bytes[self._filled : end] = chunk
        self._filled = end

    def check_full(self) -> None:
        """Raise RefusalError if bytes are missing at the end of the stream, or are no values of the dtype."""
        if self._filled < len(self._bytes):
            raise malformed(
                f"the stream ended after {self._filled} of the {len(self._bytes)} bytes that dtype and shape announce"
            )
        if self._is_bool and self._filled and int(np.frombuffer(self._bytes, np.uint8).max()) > 1:
            raise malformed("an element of dtype bool is a byte 0 or 1")


def result(kind: ArrayKind, contributors: Sequence[int] = (), *, source: int = 0, tag: int = 0) -> bytes:
    """Return the first message of an answer."""
    told = pb.Result(dtype=kind.dtype.name, shape=kind.shape, contributors=contributors, source=source, tag=tag)
    return bytes(pb.Piece(result=told).SerializeToString())


def chunks(array: Array) -> Iterator[bytes]:
    """Return the messages with the bytes of an array."""
    data = memoryview(array.reshape(-1).view(np.uint8))
    for begin in range(0, len(data), CHUNK_BYTES):
        chunk = data[begin : begin + CHUNK_BYTES]
        yield b"".join((_CHUNK_TAG, _varint(len(chunk)), chunk))


def _checked_chunk(chunk: memoryview) -> memoryview:
    if len(chunk) > MOST_CHUNK_BYTES:
        raise malformed(f"a chunk has {len(chunk)} bytes; at most {MOST_CHUNK_BYTES} are possible")
    return chunk


def _length(data: bytes) -> tuple[int, int]:
    """Return where the bytes of a field with a length begin, and how many it says there are."""
    length = 0
    for at, byte in enumerate(data[1:6]):
        length |= (byte & 0x7F) << (7 * at)
        if byte < 0x80:
            return at + 2, length
    return len(data), -1


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
