"""Sealed records: the encryption of lanes between hosts.

    length of the plaintext (4 bytes), ciphertext, tag (16 bytes)

The cipher is AES-128-GCM. A key belongs to one lane, one of its streams and one direction; the nonce counts the
records. The tag also covers lane, stream, direction, counter and length, so a record that was altered, repeated, left
out, reordered or moved to another stream does not open.

The highest bit of the length marks a record that begins the next key. The sealer decides when: after REKEY_RECORDS, or
when its owner calls `renew`. The next key is derived from the last one by a one-way function, so the ends need not
exchange anything.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from covey.base.errors import RemoteProtocolError

if TYPE_CHECKING:
    Bytes = bytes | bytearray | memoryview

SEAL_KEY_BYTES: Final = 16
RECORD_LENGTH: Final = struct.Struct("<I")
SEAL_TAG_BYTES: Final = 16
RECORD_OVERHEAD_BYTES: Final = RECORD_LENGTH.size + SEAL_TAG_BYTES
"""The bytes that a record adds to its plaintext."""
SEALED_RECORD_LIMIT: Final = 1 << 21
"""The most plaintext in one record: large, because fewer calls and wake-ups outweigh the cache, and a multiple of every
element's size. A reader needs no more memory than this, whatever a length field says."""
FEW_STREAMS: Final = 2
SPREAD_RECORD_LIMIT: Final = 1 << 16
"""The most plaintext in one record of a lane with more than FEW_STREAMS. Records are read in their order, so while one
arrives slowly, the other streams send no more than the kernel of the reader keeps: it must keep a record of each."""
REKEY_RECORDS: Final = 1 << 24
"""Records under one key: 2^45 bytes at most, far below the limit of GCM."""
REKEY_SECONDS: Final = 900.0
"""How long the owner of a sealer uses one key. A key that leaks from memory does not open older records."""
STRIPE_NUMBER: Final = struct.Struct("<Q")
"""In front of the plaintext of a record on a lane over several networks: its place in its direction of the lane."""
STRIPE_BYTES: Final = 1 << 18
"""The most payload in such a record: at 100 Mbit/s it takes 20 ms, and the last one of a slow stream is waited for."""
STRIPE_WINDOW: Final = 64
"""Such records that may be on their way: 16 MiB."""
NEXT_KEY: Final = 1 << 31
"""A bit in the length of a record: it is the first under the next key."""

DIALLER, ACCEPTOR = 0, 1
"""Directions: the end that sealed the record."""

_KEYS_LABEL: Final = b"covey/1/lane"
_NEXT_LABEL: Final = b"covey/1/lane/next"
_SCOPE: Final = struct.Struct(">IB")
_NEXT_KEY_BYTE: Final = NEXT_KEY >> 24


class ForgedError(RemoteProtocolError):
    """Bytes of a sealed stream are not what the other end sent, or not in the order in which it sent them."""


def lane_keys(secret: bytes, lane: bytes, stream: int) -> tuple[bytes, bytes]:
    """Return the keys for what the dialler and what the acceptor of a lane send on one of its streams.

    `secret` must be random and new for each opening of a lane: the counters start again at 0.
    """
    info = _KEYS_LABEL + stream.to_bytes(4, "big") + lane
    both = HKDF(SHA256(), 2 * SEAL_KEY_BYTES, salt=None, info=info).derive(secret)
    return both[:SEAL_KEY_BYTES], both[SEAL_KEY_BYTES:]


def scope(lane: bytes, stream: int, direction: int) -> bytes:
    """Return what the tags of one direction of one stream cover beside the record itself."""
    return lane + _SCOPE.pack(stream, direction)


def record_limit(streams: int) -> int:
    """Return the most plaintext in one record of a lane with so many streams: the length of all but the last."""
    return SEALED_RECORD_LIMIT if streams <= FEW_STREAMS else SPREAD_RECORD_LIMIT


def record_length(buffer: bytes | bytearray | memoryview, at: int = 0, limit: int = SEALED_RECORD_LIMIT) -> int:
    """Return the length of the plaintext of the record at `at`; raise ForgedError for an impossible length."""
    length: int = RECORD_LENGTH.unpack_from(buffer, at)[0] & ~NEXT_KEY
    if not 0 < length <= limit:
        raise ForgedError(f"the bytes were altered on the way: no record has {length} bytes")
    return length


class _Keyed:
    """One direction of one stream: its key, the count of its records, and when the key has to change."""

    __slots__ = ("_cipher", "_count", "_key", "_rekey_at", "_rekey_every", "_scope", "_stream")

    def __init__(
        self, key: bytes, lane: bytes, stream: int, direction: int, *, rekey_every: int = REKEY_RECORDS
    ) -> None:
        self._key = key
        self._cipher = AESGCM(key)
        self._count = 0
        self._rekey_at = self._rekey_every = rekey_every
        self._scope = scope(lane, stream, direction)
        self._stream = stream

    def _rekey(self) -> None:
        """Replace the key by one from which the last one cannot be computed."""
        self._key = HKDFExpand(SHA256(), SEAL_KEY_BYTES, _NEXT_LABEL).derive(self._key)
        self._cipher = AESGCM(self._key)
        self._rekey_at = self._count + self._rekey_every


class Sealer(_Keyed):
    """Makes the records of one direction of one stream."""

    __slots__ = ()

    def renew(self) -> None:
        """Change the key with the next record."""
        self._rekey_at = self._count

    def seal(self, data: Bytes, into: memoryview) -> int:
        """Write the next record into `into` and return its length; `data` has 1 to SEALED_RECORD_LIMIT bytes."""
        length = len(data)
        if not 0 < length <= SEALED_RECORD_LIMIT:
            raise ValueError(f"a record has 1 to {SEALED_RECORD_LIMIT} bytes, not {length}")
        if self._count == self._rekey_at:
            self._rekey()
            head = (length | NEXT_KEY).to_bytes(4, "little")
        else:
            head = length.to_bytes(4, "little")
        nonce = self._count.to_bytes(12, "big")
        # Counted first: if the next call fails, this nonce is not used again.
        self._count += 1
        into[:4] = head
        return 4 + self._cipher.encrypt_into(
            nonce, data, self._scope + nonce + head, into[4 : length + RECORD_OVERHEAD_BYTES]
        )


class Opener(_Keyed):
    """Opens the records of one direction of one stream, in the order in which they were sealed."""

    __slots__ = ()

    def open(self, record: memoryview, into: Bytes) -> None:
        """Decrypt a whole record to `into`, which has the length of its plaintext.

        Raises:
            ForgedError: this is not the record that was sealed next. The contents of `into` are then undefined, and the
                stream cannot be used any more.
        """
        if record[3] & _NEXT_KEY_BYTE:
            self._rekey()
        elif self._count == self._rekey_at:
            which = f"record {self._count} of stream {self._stream}"
            raise ForgedError(f"{which} is one too many under one key")
        nonce = self._count.to_bytes(12, "big")
        try:
            self._cipher.decrypt_into(nonce, record[4:], self._scope + nonce + record[:4].tobytes(), into)
        except InvalidTag:
            which = f"record {self._count} of stream {self._stream}"
            raise ForgedError(f"the bytes were altered on the way: {which} is not as it was sent") from None
        self._count += 1
