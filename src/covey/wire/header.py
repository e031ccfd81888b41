"""The 64 bytes in front of every transfer of a collective.

Both ends know what should come, so a header is checked by comparing bytes; it is taken apart only to explain
a difference. 64 bytes keep the payload behind it aligned for every dtype and on its own cache line.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from covey.base.errors import RemoteProtocolError

MAGIC: Final = b"CVY\x01"
PREFIX: Final = struct.Struct("<4sBBHIBxxxQQ")
"""The fields that every transfer of a plan shares, each time it is run."""
CHANGE_PENDING: Final = 1
"""In the flags: the sender, or one it heard from in this operation, knows of a change that waits."""
FLAGS_AT: Final = 12
SUFFIX: Final = struct.Struct("<QQQ8x")
"""Sequence, move and payload bytes."""
HEADER_BYTES: Final = PREFIX.size + SUFFIX.size
assert HEADER_BYTES == 64


class Header(NamedTuple):
    """One transfer of one operation of one group."""

    operation: int
    dtype: int
    phase: int
    """Which plan of the operation: some exchange shapes first and contents second."""
    attempt: int
    flags: int
    """The one field that may differ from what the receiver expects."""
    group: int
    fingerprint: int
    """Digest of everything all ranks must agree on: operation, dtype, shape, root, reduction."""
    sequence: int
    move: int
    """Counts the transfers of this plan from this sender to this receiver."""
    nbytes: int

    def pack(self) -> bytes:
        return PREFIX.pack(MAGIC, *self[:7]) + SUFFIX.pack(*self[7:])


def flagged(prefix: bytes) -> bytes:
    """Return the start of a header that says CHANGE_PENDING, too."""
    return prefix[:FLAGS_AT] + bytes((prefix[FLAGS_AT] | CHANGE_PENDING,)) + prefix[FLAGS_AT + 1 :]


def unpack(data: bytes | bytearray | memoryview) -> Header:
    """Take a header apart; RemoteProtocolError if it is none."""
    if len(data) != HEADER_BYTES:
        raise RemoteProtocolError(f"a transfer header has {HEADER_BYTES} bytes, not {len(data)}")
    magic, *fields = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise RemoteProtocolError(f"not a transfer header: it starts with {magic!r}")
    return Header(*fields, *SUFFIX.unpack_from(data, PREFIX.size))
