"""Messages between the front process and its ranks: JSON lines over a unix socket."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

from covey.base.errors import RemoteProtocolError

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator


class PrepareOrder(msgspec.Struct, frozen=True, tag=True):
    """Make buffers for an operation, run it once on values that can be checked, and check them."""

    operation: str
    elements: int
    dtype: str


class TimeOrder(msgspec.Struct, frozen=True, tag=True):
    """Wait for the other ranks, then time this many iterations."""

    iterations: int


class EngineUp(msgspec.Struct, frozen=True, tag=True):
    """A rank's engine is up."""

    rank: int
    pid: int
    versions: dict[str, str]


class ValuesRight(msgspec.Struct, frozen=True, tag=True):
    """The operation gave the right values; `lanes` names the kinds of lane, if the engine reports them."""

    lanes: str


class Measured(msgspec.Struct, frozen=True, tag=True):
    """One round, measured by one rank."""

    nanoseconds: list[int]
    cpu_seconds: float
    """User and system time of all its threads, less the busy thread's."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank raised; it leaves after this message."""

    error: str


Order = PrepareOrder | TimeOrder
Answer = EngineUp | ValuesRight | Measured | Failed

MESSAGE_LINE_BYTES: Final = 1 << 20
"""Longer than any message: a round has at most a thousand numbers."""


class RankChannel:
    """One end of the connection. Splits what it reads into messages."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._pending = bytearray()

    def send(self, message: Order | Answer) -> None:
        self.sock.sendall(msgspec.json.encode(message) + b"\n")

    def orders(self) -> Iterator[Order]:
        """Yield the orders of the front, until it closes the connection."""
        self.sock.settimeout(None)  # the front's death closes the socket, so this wait always ends
        while line := self._line():
            yield msgspec.json.decode(line, type=Order)

    def answer(self, deadline: float) -> Answer | None:
        """Return the rank's next message, or None if it closed the connection; TimeoutError at `deadline`."""
        line = self._line(deadline)
        return msgspec.json.decode(line, type=Answer) if line else None

    def close(self) -> None:
        self.sock.close()

    def _line(self, deadline: float | None = None) -> bytes:
        while (end := self._pending.find(b"\n")) < 0:
            if len(self._pending) > MESSAGE_LINE_BYTES:
                raise RemoteProtocolError("a benchmark rank sent a line without end")
            if deadline is not None:
                self.sock.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                piece = self.sock.recv(1 << 16)
            except ConnectionError:
                piece = b""
            if not piece:
                return b""
            self._pending += piece
        line = bytes(self._pending[:end])
        del self._pending[: end + 1]
        return line
