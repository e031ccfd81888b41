"""Frames, and decoding what a peer sent: whatever is wrong with it, the error is the same.

A frame is a length and that many bytes; the length is checked before memory is allocated. A message of a type that this
release does not know was sent by a later one. Its number says whether it may be skipped: the sender does without an
answer to a message of number OPTIONAL_TAGS or above.
"""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Final, TypeVar, cast

import msgspec

from covey.base.errors import RemoteProtocolError
from covey.base.version import check_format

if TYPE_CHECKING:
    from collections.abc import Hashable

    from msgspec.msgpack import Decoder


FRAME_LENGTH: Final = struct.Struct("<I")
HANDSHAKE_LIMIT: Final = 4096
"""Bytes accepted in a frame from an end that has not proved that it knows the token."""
CONTROL_LIMIT: Final = 4 << 20
"""Bytes accepted in a control frame from a member: one that describes all members of the largest view fits."""


def frame(body: bytes) -> bytes:
    """Return `body` with its length in front."""
    return FRAME_LENGTH.pack(len(body)) + body


class Framer:
    """Cuts a stream of bytes into frames, however the bytes arrive."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add the next bytes of the stream, and return the frames that they complete.

        Raises:
            RemoteProtocolError: a frame announces more than the limit.
        """
        self._buffer += data
        frames = []
        while len(self._buffer) >= FRAME_LENGTH.size:
            length = frame_length(self._buffer, self._limit)
            end = FRAME_LENGTH.size + length
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[FRAME_LENGTH.size : end]))
            del self._buffer[:end]
        return frames


def frame_length(start: bytes | bytearray, limit: int) -> int:
    """Return the length that a frame's first bytes announce; raise RemoteProtocolError above `limit`."""
    length: int = FRAME_LENGTH.unpack_from(start)[0]
    if length > limit:
        raise RemoteProtocolError(f"a frame of {length} bytes was announced; the limit is {limit}")
    return length


T = TypeVar("T")

OPTIONAL_TAGS: Final = 1000
"""Messages whose tags are at least this are skipped by a release that does not know them."""


class SkippedMessageError(RemoteProtocolError):
    """The message is of a type that a later release has added, and that this one may pass over."""


class UnknownMessageError(RemoteProtocolError):
    """The message is of a type that this release does not know, and may not pass over."""

    def __init__(self, what: str, tag: int) -> None:
        super().__init__(f"{what} of an unknown type, {tag}")
        self.tag = tag


def read_from_peer(decoder: Decoder[T], data: bytes, what: str) -> T:
    """Decode `data`; RemoteProtocolError, which says that it is not `what`, for all that the decoder does not take.

    The error is a SkippedMessageError or an UnknownMessageError if only the type of the message is not known.
    """
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        tag = _tag_of(data)
        if tag is not None and (known := _tags(cast("Hashable", decoder.type))) and tag not in known:
            if tag >= OPTIONAL_TAGS:
                raise SkippedMessageError(f"{what} of an unknown type, {tag}, is skipped") from None
            raise UnknownMessageError(what, tag) from None
        raise RemoteProtocolError(f"not {what}: {error}") from error


@functools.cache
def _tags(kind: Hashable) -> frozenset[int]:
    """Return the tags of the messages that a decoder takes; none if it takes values without tags."""
    info = msgspec.inspect.type_info(kind)
    kinds = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    tags = (each.tag if isinstance(each, msgspec.inspect.StructType) else None for each in kinds)
    return frozenset(tag for tag in tags if isinstance(tag, int))


def _tag_of(data: bytes) -> int | None:
    """Return the tag of a message: the number that its msgpack array begins with. The rest is not parsed."""
    head = data[0] if data else 0
    at = 1 if 0x91 <= head <= 0x9F else {0xDC: 3, 0xDD: 5}.get(head, len(data))
    if at >= len(data):
        return None
    size = {0xCC: 1, 0xCD: 2, 0xCE: 4}.get(data[at], 0)
    if data[at] < 0x80:
        return data[at]
    number = data[at + 1 : at + 1 + size]
    return int.from_bytes(number, "big") if size and len(number) == size else None


def check_packed(data: bytes, at: int, known: int) -> None:
    """Raise NewerFormatError if a file is a msgpack array with a later format at index `at`, whatever else it holds."""
    try:
        found = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # the reader says what is wrong with it
    if isinstance(found, list) and len(found) > at and type(found[at]) is int:
        check_format(found[at], known)
