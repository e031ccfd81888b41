"""CPace: two ends that know the same short code agree on a key that no other end can guess offline.

The suite is CPACE-X25519-SHA512 of draft-irtf-cfrg-cpace, in its initiator-responder form. A code of six digits has 20
bits: with any other exchange, a stranger who has recorded one, or taken part in one, could try all codes at home. Here
each try takes an exchange with an end that knows the code, and tells only whether one code was right.

X25519 is OpenSSL's, which takes the same time for all values. The map from the code to a point (Elligator 2) is our
own, on Python's integers, whose time depends on values: both costly steps work on numbers that a random factor hides.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, Final, NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from covey.base.errors import AuthError

if TYPE_CHECKING:
    from collections.abc import Callable

SHARE_BYTES: Final = 32
CONFIRMATION_BYTES: Final = 64
_P: Final = 2**255 - 19
_A: Final = 486662
"""Of Curve25519: v^2 = u^3 + A u^2 + u."""
_HALF: Final = pow(2, -1, _P)
_DSI: Final = b"CPace255"
_BLOCK_BYTES: Final = 128
"""Of SHA-512."""


class Half(NamedTuple):
    """What one end has sent: its share, and the data that the exchange authenticates with it."""

    share: bytes
    data: bytes

    def packed(self) -> bytes:
        """Return both, each after its length."""
        return joined(self.share, self.data)


class CodeExchange:
    """One end of one exchange. Its share is sent; with that of the other end, it gives the key."""

    def __init__(self, code: bytes, channel: bytes, session: bytes, *, random: Callable[[int], bytes]) -> None:
        """Begin for a code; `channel` and `session` are what both ends know before: who they are, and fresh bytes."""
        self._scalar = X25519PrivateKey.from_private_bytes(random(SHARE_BYTES))
        self._session = session
        self.share = self._scalar.exchange(X25519PublicKey.from_public_bytes(generator(code, channel, session, random)))
        """What this end sends."""

    def key(self, share: bytes, first: Half, second: Half) -> bytes:
        """Return the key, from the share of the other end and what the initiator (`first`) and the responder have sent.

        Both ends have the same key if they know the same code and saw the same bytes; else the keys have nothing in
        common, and neither end knows yet: each has to see a `confirmation` of the other.

        Raises:
            AuthError: the share is none of those that depend on a code.
        """
        try:
            point = self._scalar.exchange(X25519PublicKey.from_public_bytes(share))
        except ValueError:  # of low order: the key would not depend on this end
            raise AuthError("the other end sent a point that is not valid") from None
        said = joined(_DSI + b"_ISK", self._session, point) + first.packed() + second.packed()
        return hashlib.sha512(said).digest()


def confirmation(key: bytes, session: bytes, half: Half) -> bytes:
    """Return what proves that the sender of `half` has the key."""
    return hmac.digest(hashlib.sha512(b"CPaceMac" + session + key).digest(), half.packed(), "sha512")


def joined(*parts: bytes) -> bytes:
    """Return parts, each after its length (LEB128)."""
    return b"".join(_length(len(part)) + part for part in parts)


def generator(code: bytes, channel: bytes, session: bytes, random: Callable[[int], bytes]) -> bytes:
    """Return the point that a code stands for in one session; `random` bytes hide it from a clock."""
    padding = bytes(max(0, _BLOCK_BYTES - 1 - len(joined(code)) - len(joined(_DSI))))
    text = joined(_DSI, code, padding, channel, session)
    return map_to_curve(hashlib.sha512(text).digest()[:SHARE_BYTES], random)


def map_to_curve(hashed: bytes, random: Callable[[int], bytes]) -> bytes:
    """Return the u-coordinate of the point to which Elligator 2 maps 32 bytes."""
    number = int.from_bytes(hashed, "little") & (1 << 255) - 1
    factor, other = (1 + int.from_bytes(random(SHARE_BYTES), "little") % (_P - 1) for _ in range(2))
    inverse = pow((1 + 2 * number * number) * factor % _P, -1, _P) * factor
    first = -_A * inverse % _P
    value = (pow(first, 3, _P) + _A * first * first + first) % _P
    sign = pow(value * other * other % _P, (_P - 1) // 2, _P)  # a square times a square is one, and else none
    return ((sign * first - (1 - sign) * _A * _HALF) % _P).to_bytes(SHARE_BYTES, "little")


def _length(count: int) -> bytes:
    packed = bytearray()
    while count > 127:
        packed.append(count & 127 | 128)
        count >>= 7
    return bytes([*packed, count])
