"""Machines that want to be in a cluster, for tests of pairing: each with a key and a socket of its own."""

from __future__ import annotations

import secrets
import socket
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.support.waiting import DEADLINE

from covey.proto.pairing import PairingApplicant, PairingMachine
from covey.wire.decoding import FRAME_LENGTH, frame
from covey.wire.signed import public_half

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.pairing.inviter import Pairing, PairingView
    from covey.wire.pairing import Grant


class Applying:
    """A connection to a machine that shows a code, and this end's part of what is said there."""

    def __init__(self, port: int, name: str = "south-test", private: Ed25519PrivateKey | None = None) -> None:
        self.private = private or Ed25519PrivateKey.generate()
        self.own = PairingMachine(public_half(self.private), name, "0.1")
        self.core = PairingApplicant(self.own, self.private.sign, random=secrets.token_bytes)
        self.sock = socket.create_connection(("127.0.0.1", port), DEADLINE)
        self.heard = b""
        """All that came, frames included."""
        self.said: list[bytes] = []
        """The messages that were sent."""

    def receive(self) -> bytes:
        """Return the next message; EOFError if the connection has ended."""
        length = FRAME_LENGTH.unpack(self._exactly(FRAME_LENGTH.size))[0]
        return self._exactly(length)

    def send(self, body: bytes) -> None:
        self.said.append(body)
        self.sock.sendall(frame(body))

    def is_ended(self) -> bool:
        """Tell whether the other end has closed the connection and said no more."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionError:
            return True

    def request(self, code: str) -> None:
        """Hear who is there, and ask to get in."""
        self.core.heard_hello(self.receive())
        self.send(self.core.request(code))

    def prove(self, code: str) -> None:
        """Go on as far as the proof that this end knows the code."""
        self.request(code)
        self.send(self.core.answered(self.receive()))

    def get_in(self, code: str) -> Grant:
        """Do all of it, as `covey enroll` does."""
        self.prove(code)
        grant = self.core.granted(self.receive())
        self.send(self.core.stored())
        assert self.is_ended()
        return grant

    def close(self) -> None:
        self.sock.close()

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.sock.recv(count - len(data))
            if not piece:
                raise EOFError
            data += piece
        self.heard += data
        return data


def wait_for(shown: Pairing, condition: Callable[[PairingView], object]) -> PairingView:
    """Return what is shown once the condition holds for it."""
    view: PairingView | None = shown.view()
    while view is not None and not condition(view):
        view = shown.next_after(view.serial, DEADLINE)
    assert view is not None, f"not in time: {shown.view()}"
    return view
