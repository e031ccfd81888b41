"""The door: 64 bytes that keep strangers away from everything that costs something.

    acceptor -> dialler   16 random bytes, the challenge
    dialler  -> acceptor  purpose, 15 random bytes, HMAC(key, label, challenge, purpose, those bytes)

Who does not hold the key is turned away before any parsing, any certificate and any memory. The challenge makes every
answer good for one connection only, so that nothing need be remembered and no clock has to be right.
"""

from __future__ import annotations

import enum
import hmac
from typing import Final

from covey.base.errors import AuthError

CHALLENGE_BYTES: Final = 16
SALT_BYTES: Final = 15
ANSWER_BYTES: Final = 1 + SALT_BYTES + 32
_LABEL: Final = b"covey/1/door"


class Purpose(enum.IntEnum):
    """What a connection is for."""

    LINK = 1
    """Control messages, after a greeting."""
    LANE = 2
    """One stream of a lane that was offered on a link."""
    PROBE = 3
    """Measuring the way between two nodes."""


def answer(key: bytes, challenge: bytes, purpose: Purpose, salt: bytes) -> bytes:
    """Return the dialler's half; `salt` is 15 random bytes."""
    assert len(salt) == SALT_BYTES
    said = bytes((purpose,)) + salt
    return said + hmac.digest(key, _LABEL + challenge + said, "sha256")


def check(key: bytes, challenge: bytes, given: bytes) -> Purpose:
    """Return what the sender of an answer wants; AuthError unless it holds the key and answers this very challenge."""
    said, proof = given[: 1 + SALT_BYTES], given[1 + SALT_BYTES :]
    if not hmac.compare_digest(proof, hmac.digest(key, _LABEL + challenge + said, "sha256")):
        raise AuthError("someone came to the door without the key")
    try:
        return Purpose(said[0])
    except ValueError:
        raise AuthError(f"someone came to the door with an unknown purpose, {said[0]}") from None
