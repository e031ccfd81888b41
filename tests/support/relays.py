"""Relays in the process of a test: honest ones, and hostile ones that do what they like with what they pass on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

from covey.runtime.links.relayed import receive_message, send_message
from covey.runtime.relaying.server import RelayLimits, RelayServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.wire.relay import RelayKey, RelayMessage


def listen(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def open_relay(port: int = 0, limits: RelayLimits | None = None, kind: Any = RelayServer, **of_kind: Any) -> Any:
    """Open a relay on loopback, on the loop that runs; `port_of` tells where."""
    server = kind([listen(port)], limits or RelayLimits(), **of_kind)
    server.open()
    return server


def port_of(server: RelayServer) -> int:
    port: int = server._listeners[0].getsockname()[1]
    return port


class HostileRelay(RelayServer):
    """Keeps all that it passes on, and may change it, or connect a caller with another side than it asked for."""

    def __init__(self, *given: Any, meddle: Callable[[int, bytes], bytes] | None = None) -> None:
        """`meddle` gets the direction, 0 from the caller and 1 to it, and some bytes; it returns what goes on."""
        super().__init__(*given)
        self.seen: list[tuple[int, bytes]] = []
        self.held: list[socket.socket] = []
        self.ends: Callable[[socket.socket, socket.socket], tuple[socket.socket, socket.socket] | None] = (
            lambda caller, taker: (caller, taker)
        )
        """Returns the two ends to connect; None to keep both waiting."""
        self._meddle = meddle or (lambda _direction, data: data)

    def _join(self, caller: int, taker: int) -> None:
        given = self._socks.pop(caller), self._socks.pop(taker)
        for sock in given:
            self._closed(sock)
        self._joined += 1
        self.held += given
        if (ends := self.ends(*given)) is not None:
            for direction, (source, target) in enumerate((ends, ends[::-1])):
                self._tasks.spawn(self._copy(direction, source, target))

    async def _copy(self, direction: int, source: socket.socket, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(source, 1 << 16):
                self.seen.append((direction, data))
                await loop.sock_sendall(target, self._meddle(direction, data))
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    async def close(self) -> None:
        await super().close()
        for sock in self.held:
            sock.close()


async def client(port: int, source: str = "127.0.0.1") -> tuple[socket.socket, bytes]:
    """Connect to a relay; return the socket and the relay's challenge."""
    sock = socket.socket()
    try:
        sock.setblocking(False)
        sock.bind((source, 0))
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        first: Any = await receive_message(sock)
        return sock, first.challenge
    except BaseException:
        sock.close()
        raise


async def ask(port: int, question: Callable[[bytes], RelayMessage]) -> tuple[socket.socket, RelayMessage]:
    """Ask a relay something that depends on its challenge; return the socket and the first answer."""
    sock, challenge = await client(port)
    try:
        await send_message(sock, question(challenge))
        return sock, await receive_message(sock)
    except BaseException:
        sock.close()
        raise


async def register(port: int, key: RelayKey, token: bytes, *, is_listed: bool = True) -> socket.socket:
    """Register a token, and return the connection."""
    sock, _ = await ask(port, lambda challenge: key.register(challenge, token, is_listed=is_listed))
    return sock
