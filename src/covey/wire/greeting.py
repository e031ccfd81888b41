"""How two processes prove the run's token to each other before anything else is said.

    acceptor -> dialler   banner, 32 random bytes
    dialler  -> acceptor  HMAC(token, "dial", those bytes, hello), hello (with random bytes of its own)
    acceptor -> dialler   HMAC(token, "accept", both, answer), answer

Nothing is parsed before its HMAC is right, and the token itself never travels.
"""

from __future__ import annotations

import hmac
from typing import Final

BANNER: Final = b"covey/1\n"
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32


def dial_proof(token: bytes, challenge: bytes, hello: bytes) -> bytes:
    """Prove that the sender of `hello` holds the token and answers this very challenge."""
    return hmac.digest(token, b"covey/1/dial" + challenge + hello, "sha256")


def accept_proof(token: bytes, challenge: bytes, nonce: bytes, answer: bytes) -> bytes:
    """Prove that the sender of `answer` holds the token and answers this very hello."""
    return hmac.digest(token, b"covey/1/accept" + challenge + nonce + answer, "sha256")


def proofs_equal(one: bytes, other: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(one, other)
