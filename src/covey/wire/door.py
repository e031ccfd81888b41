"""The door: 64 bytes that keep strangers away from everything that costs something.

    acceptor -> dialler   16 random bytes, the challenge
    dialler  -> acceptor  purpose, 15 bytes that the connection is bound to, HMAC(key, label, challenge, these 16 bytes)

A dialler that does not hold the key is turned away before any parsing, any certificate and any memory. The challenge
makes every answer good for one connection only, so that nothing need be remembered and no clock has to be right.

A stranger can pose as an acceptor, pass on the challenge of a real one, and get an answer to it. So the answer for a
link is bound to the TLS ClientHello that follows, by its hash, and the acceptor takes no other. The stranger can pass
that on, too, but only the dialler knows the keys that belong to it: the certificate that the acceptor shows next can be
read by the dialler alone. A probe may be bound to a token, which is shown later; else the 15 bytes are random.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from typing import Final

from covey.base.errors import AuthError

CHALLENGE_BYTES: Final = 16
BOUND_BYTES: Final = 15
ANSWER_BYTES: Final = 1 + BOUND_BYTES + 32
_LABEL: Final = b"covey/1/door"


class Purpose(enum.IntEnum):
    """What a connection is for."""

    LINK = 1
    """Control messages, after a greeting."""
    LANE = 2
    """One stream of a lane that was offered on a link."""
    PROBE = 3
    """Measuring the way between two nodes."""


def bind(data: bytes) -> bytes:
    """Return the 15 bytes that bind a connection to `data`; nobody finds other data with the same."""
    return hashlib.sha256(data).digest()[:BOUND_BYTES]


def bound(said: bytes) -> bytes:
    """Return what a connection is bound to, by the challenge and the answer that passed the door."""
    return said[CHALLENGE_BYTES + 1 :][:BOUND_BYTES]


def answer(key: bytes, challenge: bytes, purpose: Purpose, bound: bytes) -> bytes:
    """Return the dialler's half; `bound` comes from `bind`, or is random."""
    assert len(bound) == BOUND_BYTES
    said = bytes((purpose,)) + bound
    return said + hmac.digest(key, _LABEL + challenge + said, "sha256")


def check(key: bytes, challenge: bytes, given: bytes) -> Purpose:
    """Return what the sender of an answer wants; AuthError unless it holds the key and answers this very challenge."""
    said, proof = given[: 1 + BOUND_BYTES], given[1 + BOUND_BYTES :]
    if not hmac.compare_digest(proof, hmac.digest(key, _LABEL + challenge + said, "sha256")):
        raise AuthError("refused a connection that does not hold this cluster's key")
    try:
        return Purpose(said[0])
    except ValueError:
        raise AuthError(f"refused a connection with an unknown purpose, {said[0]}") from None
