"""Frames: a length and that many bytes. The length is checked before memory is allocated."""

from __future__ import annotations

import struct
from typing import Final

from covey.base.errors import RemoteProtocolError

LENGTH: Final = struct.Struct("<I")
HANDSHAKE_LIMIT: Final = 4096
"""Bytes accepted in a frame from an end that has not proved that it knows the token."""
CONTROL_LIMIT: Final = 4 << 20
"""Bytes accepted in a control frame from a member: one that describes all members of the largest view fits."""


def frame(body: bytes) -> bytes:
    """Return `body` with its length in front."""
    return LENGTH.pack(len(body)) + body


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
        while len(self._buffer) >= LENGTH.size:
            length = frame_length(self._buffer, self._limit)
            end = LENGTH.size + length
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[LENGTH.size : end]))
            del self._buffer[:end]
        return frames


def frame_length(start: bytes | bytearray, limit: int) -> int:
    """Return the length that a frame's first bytes announce; raise RemoteProtocolError above `limit`."""
    length: int = LENGTH.unpack_from(start)[0]
    if length > limit:
        raise RemoteProtocolError(f"a frame of {length} bytes was announced; the limit is {limit}")
    return length
