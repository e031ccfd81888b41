"""What the sockets of message lanes have in common: the part of `socket.socket` that follows from two methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


class MessageSocket(ABC):
    """A connected stream that a message lane uses as it uses a `socket.socket`. No method blocks."""

    __slots__ = ()

    @abstractmethod
    def sendmsg(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Send the first bytes of `buffers` and return how many; BlockingIOError if none can be sent now."""

    @abstractmethod
    def recvmsg_into(self, buffers: Sequence[bytearray | memoryview]) -> tuple[int, list[Any], int, None]:
        """Write what is there to `buffers`; return first how many bytes, 0 at the end; BlockingIOError if none is."""

    def send(self, data: bytes | memoryview) -> int:
        """As `sendmsg([data])`."""
        return self.sendmsg([data])

    def recv(self, limit: int) -> bytes:
        """Receive up to `limit` bytes, as `recvmsg_into` does."""
        data = bytearray(limit)
        return bytes(data[: self.recv_into(data)])

    def recv_into(self, buffer: bytearray | memoryview) -> int:
        """Receive as `recvmsg_into` does; return the number of bytes."""
        return self.recvmsg_into([buffer])[0]

    def setblocking(self, flag: bool) -> None:
        """Accept False only."""
        if flag:
            raise ConfigError("a socket for messages never blocks")
