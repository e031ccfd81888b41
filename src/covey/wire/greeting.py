"""How two processes that share a run's token prove it to each other, where no TLS does.

    dialler  -> acceptor  HMAC(token, "dial", door, hello), hello (with random bytes of its own)
    acceptor -> dialler   HMAC(token, "accept", door, hello's random bytes, answer), answer

`door` is what both said at the door just before, random bytes of each. Nothing is parsed before its HMAC is right, and
the token itself never travels.
"""

from __future__ import annotations

import hmac
from typing import Final

PROOF_BYTES: Final = 32


def dial_proof(token: bytes, door: bytes, hello: bytes) -> bytes:
    """Prove that the sender of `hello` holds the token and came through this very door."""
    return hmac.digest(token, b"covey/1/dial" + door + hello, "sha256")


def accept_proof(token: bytes, door: bytes, nonce: bytes, answer: bytes) -> bytes:
    """Prove that the sender of `answer` holds the token and answers this very hello."""
    return hmac.digest(token, b"covey/1/accept" + door + nonce + answer, "sha256")


def lane_proof(secret: bytes, side: bytes, lane: bytes, stream: int) -> bytes:
    """Prove that the sender was told the secret of a lane; `side` is `dial` or `accept`."""
    return hmac.digest(secret, b"covey/1/lane/" + side + lane + bytes((stream,)), "sha256")


def proofs_equal(one: bytes, other: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(one, other)
