"""The door: a challenge and an answer, 64 bytes, before anything that costs time or memory.

    acceptor -> dialler   16 random bytes, the challenge
    dialler  -> acceptor  purpose, 15 bytes that the connection is bound to, HMAC(key, label, challenge, these 16 bytes)

A dialler without the key is refused before anything is parsed or allocated, and before it sees a certificate. The
challenge makes an answer valid for one connection only, so that the acceptor stores nothing and needs no clock.

An attacker can pose as an acceptor, forward the challenge of a real one, and get an answer to it. So the answer for a
link is bound to the TLS ClientHello that follows, by its hash, and the acceptor accepts no other. The attacker can
forward that, too, but only the dialler has the keys that belong to it, so that only the dialler can read the
certificate that the acceptor sends next. A probe may be bound to a token that is sent later; otherwise the 15 bytes are
random.

Where TLS is not used, two processes then show each other that they know a run's token. `door` is the challenge and the
answer just before, with random bytes of both ends:

    dialler  -> acceptor  HMAC(token, "dial", door, hello), hello (with random bytes of its own)
    acceptor -> dialler   HMAC(token, "accept", door, hello's random bytes, answer), answer

Nothing is parsed before its HMAC was checked, and the token itself is never sent. Connections of lanes prove the secret
of their lane in the same way.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from typing import Final

from covey.base.errors import AuthError

CHALLENGE_BYTES: Final = 16
BOUND_BYTES: Final = 15
DOOR_ANSWER_BYTES: Final = 1 + BOUND_BYTES + 32
_DOOR_LABEL: Final = b"covey/1/door"


class Purpose(enum.IntEnum):
    """What a connection is for."""

    LINK = 1
    """Control messages, after a handshake."""
    LANE = 2
    """One stream of a lane that was offered on a link."""
    PROBE = 3
    """A measurement of the path between two nodes."""


def bind(data: bytes) -> bytes:
    """Return the 15 bytes that bind a connection to `data`. Finding other data with the same bytes is infeasible."""
    return hashlib.sha256(data).digest()[:BOUND_BYTES]


def bound(said: bytes) -> bytes:
    """Return the 15 bytes that a connection is bound to; `said` is the challenge and the answer at the door."""
    return said[CHALLENGE_BYTES + 1 :][:BOUND_BYTES]


def answer(key: bytes, challenge: bytes, purpose: Purpose, bound: bytes) -> bytes:
    """Return the dialler's answer to a challenge; `bound` comes from `bind`, or is random."""
    assert len(bound) == BOUND_BYTES
    said = bytes((purpose,)) + bound
    return said + hmac.digest(key, _DOOR_LABEL + challenge + said, "sha256")


def check(key: bytes, challenge: bytes, given: bytes) -> Purpose:
    """Return the purpose in an answer; raise AuthError unless it proves the key for this challenge."""
    said, proof = given[: 1 + BOUND_BYTES], given[1 + BOUND_BYTES :]
    if not hmac.compare_digest(proof, hmac.digest(key, _DOOR_LABEL + challenge + said, "sha256")):
        raise AuthError("the other end does not have this cluster's key")
    try:
        return Purpose(said[0])
    except ValueError:
        raise AuthError(f"the other end has an unknown purpose, {said[0]}") from None


PROOF_BYTES: Final = 32


def dial_proof(token: bytes, door: bytes, hello: bytes) -> bytes:
    """Prove that the sender of `hello` knows the token and passed the door on this connection."""
    return hmac.digest(token, b"covey/1/dial" + door + hello, "sha256")


def accept_proof(token: bytes, door: bytes, nonce: bytes, answer: bytes) -> bytes:
    """Prove that the sender of `answer` knows the token and answers this hello."""
    return hmac.digest(token, b"covey/1/accept" + door + nonce + answer, "sha256")


def lane_proof(secret: bytes, side: bytes, lane: bytes, stream: int) -> bytes:
    """Prove that the sender knows the secret of a lane; `side` is `dial` or `accept`."""
    return hmac.digest(secret, b"covey/1/lane/" + side + lane + bytes((stream,)), "sha256")


def resume_proof(secret: bytes, side: bytes, lane: bytes, stream: int, number: int, position: int) -> bytes:
    """Prove that the sender knows the secret of a lane, and how many bytes of a stream it has, in this try.

    `side` is `dial`, `accept` or `go`.
    """
    numbers = bytes((stream,)) + number.to_bytes(8, "big") + position.to_bytes(8, "big")
    return hmac.digest(secret, b"covey/1/resume/" + side + lane + numbers, "sha256")


def proofs_equal(one: bytes, other: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(one, other)
