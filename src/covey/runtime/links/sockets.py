"""Addresses and sockets of connections that are being opened. On the control loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from covey.base.pace import Growing
from covey.base.text import printable
from covey.net.host.descriptors import explain, is_scarce
from covey.runtime.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.net.quic.pump import QuicPump
    from covey.wire.relay import RelayKey

Where = str | tuple[Any, ...]
"""The path of a unix socket, a TCP address as `socket` takes it, a `RelayedWay`, or a `QuicWay`."""
ACCEPT_PAUSES: Final = Growing(0.1, 0.1)
"""Before connections are accepted again when the process has no more descriptors."""
PACKET_LIMITS: Final = (1280, 576)
"""The longest packets, in bytes, of connections over a path that swallows longer ones (its MTU is smaller than the
interface's, and the message that says so gets lost): what every network with IPv6 must carry, and what every machine
with IPv4 must accept."""
LINK_PACKET_BYTES: Final = PACKET_LIMITS[-1]
"""The longest packets of links. They carry little, and have to work where long packets do not."""
IP_AND_TCP_BYTES: Final = {socket.AF_INET: 40, socket.AF_INET6: 60}


class RelayedWay(NamedTuple):
    """A way to a node through a relay."""

    ip: str
    """Address of the relay."""
    port: int
    key: RelayKey
    token: bytes
    """Which node: the one that has registered this token."""


class QuicWay(NamedTuple):
    """A way to a node by QUIC."""

    ip: str
    port: int
    """UDP port."""
    flow: int
    scope: int
    """Scope of an IPv6 address that is valid on one interface only; else 0."""
    pump: QuicPump
    """The pump of this process."""


class RelayedSocket(socket.socket):
    """A connection to a relay, or through one: its addresses say nothing about the node at the other end."""


def relay_of(sock: socket.socket) -> str:
    """Return the address of the relay that a connection goes through; empty if it goes through none, or has ended."""
    with contextlib.suppress(OSError):
        return spell(sock.getpeername()[:2]) if isinstance(sock, RelayedSocket) else ""
    return ""


def address_of(where: Where) -> Where:
    """Return what a socket connects to."""
    return (where.ip, where.port) if isinstance(where, RelayedWay) else where


async def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """Receive exactly `count` bytes: what follows may carry descriptors."""
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < count:
        piece = await loop.sock_recv(sock, count - len(data))
        if not piece:
            raise ConnectionResetError("the connection ended during the handshake")
        data += piece
    return bytes(data)


def spell(where: Where) -> str:
    """Return an address as text."""
    if isinstance(where, str):
        return printable(where)
    text = f"[{where[0]}]:{where[1]}" if ":" in where[0] else f"{where[0]}:{where[1]}"
    prefix = "relay " if isinstance(where, RelayedWay) else "QUIC " if isinstance(where, QuicWay) else ""
    return prefix + text


def new_socket(where: Where, *, spares: bool) -> socket.socket:
    """Return a socket with which `where` can be connected to; with `spares`, OSError if few descriptors are left."""
    family = socket.AF_UNIX if isinstance(where, str) else socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    kind = RelayedSocket if isinstance(where, RelayedWay) else socket.socket
    sock = kind(family, socket.SOCK_STREAM)
    if spares and is_scarce(sock.fileno()):
        sock.close()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    sock.setblocking(False)
    return sock


def no_delay(sock: socket.socket) -> None:
    """Disable Nagle's algorithm on a TCP socket, before anything is sent."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def accept_shortage(name: str) -> Backoff:
    """Return what `accepted` needs to pace itself at the listeners of `name` while there is no free descriptor."""
    return Backoff(f"a free descriptor for connections to {name}", ACCEPT_PAUSES)


def accepted(
    listener: socket.socket, most: int, listen_again: Callable[[socket.socket], None], shortage: Backoff
) -> Iterator[socket.socket]:
    """Yield connections that wait at a listener that does not block, `most` of them at a time.

    Without descriptors, the loop stops to look at the listener; `listen_again` is called with it a moment later. The
    `shortage` knows since when no connection can be accepted.
    """
    for _ in range(most):
        try:
            sock, _address = listener.accept()
        except BlockingIOError:
            shortage.worked()
            return
        except ConnectionError:
            continue
        except OSError as error:  # out of descriptors, most likely: wait until some are closed
            shortage.failed(explain(error))
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(shortage.pause, listen_again, listener)
            return
        shortage.worked()
        yield sock


def limit_packets(sock: socket.socket, nbytes: int) -> None:
    """Let both ends of a TCP connection, which is not open yet, send no packets of more bytes than this."""
    if (headers := IP_AND_TCP_BYTES.get(sock.family, 0)) and nbytes:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, nbytes - headers)


def next_packet_limit(nbytes: int) -> int:
    """Return the limit that follows where packets up to `nbytes` (0: of any length) do not pass; 0 if there is none."""
    return next((limit for limit in PACKET_LIMITS if not nbytes or limit < nbytes), 0)
