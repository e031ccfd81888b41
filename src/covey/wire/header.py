"""The 64 bytes in front of every transfer of a collective.

Both ends know which transfer comes next, so a header is checked by comparing bytes; it is parsed only to explain a
difference. After 64 bytes the payload is aligned for every dtype and starts on a cache line of its own.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from covey.base.errors import RemoteProtocolError

MAGIC: Final = b"CVY\x01"
HEADER_PREFIX: Final = struct.Struct("<4sBBHIBxxxQQ")
"""The fields that are equal in all transfers of a plan, each time it runs."""
CHANGE_PENDING: Final = 1
"""A flag: the sender, or a rank it has received from in this operation, knows of a waiting change."""
FLAGS_AT: Final = 12
HEADER_SUFFIX: Final = struct.Struct("<QQQ8x")
"""Sequence, move and payload bytes."""
TRANSFER_HEADER_BYTES: Final = HEADER_PREFIX.size + HEADER_SUFFIX.size
assert TRANSFER_HEADER_BYTES == 64
SMALL_BYTES: Final = 2048
"""A payload up to this size travels in one sealed record with its header."""


class TransferHeader(NamedTuple):
    """One transfer of one operation of one group."""

    operation: int
    dtype: int
    phase: int
    """The number of the plan in the operation: some operations exchange shapes before contents."""
    attempt: int
    flags: int
    """The one field that may differ from what the receiver expects."""
    group: int
    fingerprint: int
    """A digest of what must be equal on all ranks: operation, dtype, shape, root, reduction."""
    sequence: int
    move: int
    """Counts the transfers of this plan from this sender to this receiver."""
    nbytes: int

    def pack(self) -> bytes:
        return HEADER_PREFIX.pack(MAGIC, *self[:7]) + HEADER_SUFFIX.pack(*self[7:])


def flagged(prefix: bytes) -> bytes:
    """Return the start of a header with CHANGE_PENDING set."""
    return prefix[:FLAGS_AT] + bytes((prefix[FLAGS_AT] | CHANGE_PENDING,)) + prefix[FLAGS_AT + 1 :]


def unpack(data: bytes | bytearray | memoryview) -> TransferHeader:
    """Parse a header; raise RemoteProtocolError if it is not one."""
    if len(data) != TRANSFER_HEADER_BYTES:
        raise RemoteProtocolError(f"a transfer header has {TRANSFER_HEADER_BYTES} bytes, not {len(data)}")
    magic, *fields = HEADER_PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise RemoteProtocolError(f"not a transfer header: it starts with {magic!r}")
    return TransferHeader(*fields, *HEADER_SUFFIX.unpack_from(data, HEADER_PREFIX.size))
