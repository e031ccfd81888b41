"""Finds the end that accepted a connection when its machine has another address: QUIC itself follows diallers only."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from covey.wire import quic

if TYPE_CHECKING:
    from collections.abc import Iterable

    from covey.net.quic.carrier import Address
    from covey.net.quic.line import Line

PROBE_AGAIN_SECONDS: Final = 0.5
"""The shortest time between two questions of a line."""


def question(line: Line, source: Address, now: float) -> bytes:
    """Return what to ask at an address from which a datagram of a line came; b"" if one was asked lately."""
    if line.probing is not None and now < line.probing[2] + PROBE_AGAIN_SECONDS:
        return b""
    nonce = secrets.token_bytes(quic.PATH_NONCE_BYTES)
    line.probing = nonce, source, now
    return quic.path_probe(line.credentials.door_key, nonce)


def answered(lines: Iterable[Line], data: bytes, source: Address) -> Line | None:
    """Return the line whose question a datagram answers, which goes on at this address; None if it answers none."""
    for line in lines:
        nonce, address, _ = line.probing or (b"", None, 0.0)
        if address == source and data == quic.path_answer(line.credentials.door_key, nonce):
            line.remote, line.probing = source, None
            return line
    return None


def answer_to(data: bytes, door_keys: Iterable[bytes]) -> bytes:
    """Return the answer to a question of another process; b"" if it does not have one of the keys."""
    return next((found for key in door_keys if (found := quic.answer_path_probe(key, data))), b"")
