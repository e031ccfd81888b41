"""The proofs with which two processes show each other that they know a run's token, where TLS is not used.

    dialler  -> acceptor  HMAC(token, "dial", door, hello), hello (with random bytes of its own)
    acceptor -> dialler   HMAC(token, "accept", door, hello's random bytes, answer), answer

`door` is the challenge and the answer at the door just before, with random bytes of both ends. Nothing is parsed before
its HMAC was checked, and the token itself is never sent.
"""

from __future__ import annotations

import hmac
from typing import Final

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
