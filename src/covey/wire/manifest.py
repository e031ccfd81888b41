"""The contents of a state: names, dtypes, shapes, and a tag of every chunk, so that equal chunks are not sent.

A tag is AES-GCM's over the chunk and nothing else, under a key that the ranks draw together *after* the contents are
fixed. For a random key, two different chunks have the same tag with a probability below 2^-109, whatever they contain.
It is ten times faster than a cryptographic hash, and so keeps up with the lanes. Tags of different keys are not
comparable.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from covey.base.arithmetic import BYTE_CODE, DTYPES
from covey.base.errors import RemoteProtocolError
from covey.wire.message_header import MAX_BYTES, MAX_MESSAGE_NDIM, array_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

STATE_CHUNK_BYTES: Final = 8 * 1024 * 1024
"""Large enough for few calls, small enough that several donors can send parts of one array."""
STATE_KEY_BYTES: Final = 16
STATE_TAG_BYTES: Final = 16
MANIFEST_ENTRIES_LIMIT: Final = 1 << 16
"""The most names in a state."""
ENTRY_NAME_LIMIT: Final = 1000
NAME_SHOWN: Final = 60
FAILURE_LIMIT: Final = 1000
MANIFEST_BYTES: Final = 32 << 20
"""The longest encoded manifest; the tags of a terabyte take 2 MiB."""
_NONCE: Final = bytes(12)


@dataclass(frozen=True, kw_only=True)
class ManifestEntry:
    """One name of a state: an array, or a value in its encoded form (then an array of bytes)."""

    name: str
    is_array: bool
    dtype_code: int
    shape: tuple[int, ...]
    tags: bytes
    """STATE_TAG_BYTES for each chunk, in order."""
    is_writable: bool = True
    """Whether it can be filled in place; the only field that may differ between equal states."""

    def check(self) -> None:
        """Raise RemoteProtocolError unless this describes an array or a value."""
        name = repr(self.name[:NAME_SHOWN])
        if len(self.name) > ENTRY_NAME_LIMIT or not self.name.isprintable():
            raise RemoteProtocolError(f"{name} is not a name: names have up to {ENTRY_NAME_LIMIT} printable characters")
        if (
            not 0 <= self.dtype_code < len(DTYPES)
            or len(self.shape) > MAX_MESSAGE_NDIM
            or min(self.shape, default=0) < 0
        ):
            raise RemoteProtocolError(f"{name} is not an array: dtype {self.dtype_code}, {len(self.shape)} dimensions")
        if not self.is_array and (self.dtype_code != BYTE_CODE or len(self.shape) != 1):
            raise RemoteProtocolError(f"{name} is not an encoded value: dtype {self.dtype_code}, shape {self.shape}")
        count = -(-self.nbytes // STATE_CHUNK_BYTES)
        if len(self.tags) != count * STATE_TAG_BYTES:
            raise RemoteProtocolError(f"{name} has {len(self.tags)} bytes of tags for {count} chunks")

    @property
    def nbytes(self) -> int:
        return array_bytes(self.dtype_code, self.shape)

    @property
    def kind(self) -> str:
        """Dtype and shape for display, such as float32[3, 4]."""
        return f"{DTYPES[self.dtype_code].name}{list(self.shape)}" if self.is_array else "a value"

    def is_like(self, other: ManifestEntry) -> bool:
        """Tell whether the contents of one can be written to the memory of the other."""
        return self.is_array == other.is_array and (not self.is_array or self.kind == other.kind)

    def is_same(self, other: ManifestEntry) -> bool:
        """Tell whether the contents are equal, too."""
        return self.is_like(other) and self.shape == other.shape and self.tags == other.tags


class Chunk(NamedTuple):
    """A part of one entry's memory."""

    name: str
    start: int
    stop: int
    tag: bytes


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The state of one rank, sorted by name."""

    is_fresh: bool
    """Whether the rank is a newcomer, whose state does not count."""
    entries: tuple[ManifestEntry, ...] = ()
    failure: str = ""
    """Why this rank cannot take part; then there are no entries."""

    @cached_property
    def by_name(self) -> dict[str, ManifestEntry]:
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def digest(self) -> bytes:
        """A digest that is equal for equal states only."""
        hashed = hashlib.blake2b(digest_size=16)
        for entry in self.entries:
            fields = (entry.name, entry.is_array, entry.dtype_code, entry.shape, entry.tags)
            hashed.update(repr(fields).encode())
        return hashed.digest()

    def check(self) -> None:
        """Raise RemoteProtocolError unless this describes a state. Call it before any other method."""
        if self.failure and (self.entries or not self.failure.isprintable() or len(self.failure) > FAILURE_LIMIT):
            raise RemoteProtocolError("a manifest with a failure and entries, or with an invalid text of a failure")
        if len(self.entries) > MANIFEST_ENTRIES_LIMIT:
            raise RemoteProtocolError(
                f"a manifest of {len(self.entries)} entries; up to {MANIFEST_ENTRIES_LIMIT} are allowed"
            )
        last = None
        for entry in self.entries:
            entry.check()
            if last is not None and entry.name <= last:
                raise RemoteProtocolError(f"a manifest with {entry.name!r} after {last!r}: it is not sorted by name")
            last = entry.name
        if self.nbytes > MAX_BYTES:
            raise RemoteProtocolError(f"a manifest of {self.nbytes} bytes")

    @property
    def nbytes(self) -> int:
        """The size of the whole state."""
        return sum(entry.nbytes for entry in self.entries)

    def chunks(self) -> list[Chunk]:
        """Return all chunks, in an order that is the same for equal states."""
        return [
            Chunk(entry.name, start, min(start + STATE_CHUNK_BYTES, entry.nbytes), _tag(entry, start))
            for entry in self.entries
            for start in range(0, entry.nbytes, STATE_CHUNK_BYTES)
        ]

    def lacks(self, chunk: Chunk, of: Manifest) -> bool:
        """Tell whether this state lacks `chunk` of another state, or has other contents there."""
        mine, wanted = self.by_name.get(chunk.name), of.by_name[chunk.name]
        if mine is None or not mine.is_like(wanted) or mine.shape != wanted.shape:
            return True
        if not mine.is_array:  # a value is replaced as a whole
            return mine.tags != wanted.tags
        return _tag(mine, chunk.start) != chunk.tag


class Tagger:
    """Tags chunks with the key of one restore."""

    def __init__(self, nonces: Iterable[bytes]) -> None:
        """`nonces` are random numbers of all ranks: no rank can know the key before all have sent theirs."""
        key = hashlib.blake2b(b"".join(nonces), digest_size=STATE_KEY_BYTES + 8).digest()
        self._cipher = AESGCM(key[:STATE_KEY_BYTES])
        self.number = int.from_bytes(key[STATE_KEY_BYTES:], "little")
        """A number that is equal on all ranks, and new for every restore."""

    def tag(self, chunk: Bytes) -> bytes:
        """Return the tag of a chunk."""
        return self._cipher.encrypt(_NONCE, b"", chunk.data)

    def tags(self, contents: Bytes) -> bytes:
        """Return the tags of all chunks of an entry."""
        starts = range(0, contents.size, STATE_CHUNK_BYTES)
        return b"".join(self.tag(contents[start : start + STATE_CHUNK_BYTES]) for start in starts)


def _tag(entry: ManifestEntry, start: int) -> bytes:
    at = start // STATE_CHUNK_BYTES * STATE_TAG_BYTES
    return entry.tags[at : at + STATE_TAG_BYTES]
