"""Connections through a relay: the side that calls, and the side that is called. On the control loop.

A `RelayedWay` is an address like any other for the code that dials. Its socket leads to the relay, which knows the
cluster's public key and a token, and no secret; the handshake that follows is with the other node.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConnectError, RemoteProtocolError
from covey.base.text import printable
from covey.base.version import __version__
from covey.net.host.descriptors import track
from covey.runtime.links.sockets import RelayedSocket, no_delay, receive_exactly, spell
from covey.wire.decoding import FRAME_LENGTH, SkippedMessageError, frame, frame_length
from covey.wire.relay import (
    RELAY_LIMIT,
    RELAY_SPEAKS,
    CallJoined,
    RelayChallenge,
    RelayMismatch,
    RelayRefusal,
    TakeCall,
    decode_relay,
    encode_relay,
    relay_objection,
)
from covey.wire.versions import RELEASE_LIMIT

if TYPE_CHECKING:
    from covey.runtime.links.sockets import RelayedWay
    from covey.wire.relay import RelayMessage

KEEPALIVE_SECONDS: Final = 30
"""How often the kernel tries a connection that carries nothing; after three tries without an answer it is closed.
Routers forget connections that are idle for some minutes."""


async def be_joined(sock: socket.socket, way: RelayedWay) -> None:
    """Ask the relay at the other end of `sock` for the node of a way; return when it has joined the two.

    Raises:
        ConnectError: the relay refuses, or is none.
        OSError: the connection broke.
    """
    try:
        first = await challenged(sock)
        await _ask(sock, way.key.call(first.challenge, way.token, heard=first.speaks))
    except ConnectError as error:
        raise ConnectError(f"{spell(way)}: {error}") from error


async def take_call(address: tuple[str, int], call: bytes) -> RelayedSocket:
    """Open the connection of this side for a call; return it when the relay has joined the two.

    Raises:
        ConnectError: the relay refuses.
        OSError: the connection broke.
    """
    sock = await connect_relay(address)
    try:
        await challenged(sock)
        await _ask(sock, TakeCall(call))
    except BaseException:
        sock.close()
        raise
    return sock


async def connect_relay(address: tuple[str, int]) -> RelayedSocket:
    """Connect to a relay; OSError if that does not work."""
    sock = RelayedSocket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        track(sock)
        await asyncio.get_running_loop().sock_connect(sock, address)
        no_delay(sock)
    except BaseException:
        sock.close()
        raise
    return sock


async def challenged(sock: socket.socket) -> RelayChallenge:
    """Keep a connection to a relay alive from now on; return the message with which the relay begins.

    Raises:
        ConnectError: it is no relay, one of another version, or one that refuses.
        OSError: the connection broke.
    """
    keep_alive(sock)
    first = await answer_of(sock)
    if not isinstance(first, RelayChallenge):
        raise ConnectError("no relay answers there")
    if reason := relay_objection(first.speaks, first.release or "of unknown release", RELAY_SPEAKS, __version__):
        await send_message(sock, RelayMismatch(RELAY_SPEAKS, __version__[:RELEASE_LIMIT]))  # so that it can say so
        raise ConnectError(reason)
    return first


async def answer_of(sock: socket.socket) -> RelayMessage:
    """Return the next message of a relay.

    Raises:
        ConnectError: it refuses, or sends what a relay does not.
        OSError: the connection broke.
    """
    try:
        message = await receive_message(sock)
    except RemoteProtocolError as error:
        raise ConnectError("no relay answers there") from error
    if isinstance(message, RelayRefusal):
        raise ConnectError(f"the relay says: {printable(message.reason)}")
    return message


async def receive_message(sock: socket.socket) -> RelayMessage:
    """Receive one message, and no byte more.

    Raises:
        OSError: the connection ended.
        RemoteProtocolError: it is no message of a relay.
    """
    while True:
        length = frame_length(await receive_exactly(sock, FRAME_LENGTH.size), RELAY_LIMIT)
        with contextlib.suppress(SkippedMessageError):
            return decode_relay(await receive_exactly(sock, length))


async def send_message(sock: socket.socket, message: RelayMessage) -> None:
    """Send one message."""
    await asyncio.get_running_loop().sock_sendall(sock, frame(encode_relay(message)))


async def _ask(sock: socket.socket, question: RelayMessage) -> None:
    await send_message(sock, question)
    if not isinstance(await answer_of(sock), CallJoined):
        raise ConnectError("the relay did not do what it was asked for")


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice a dead path while nothing is sent, and keep routers from forgetting an idle connection."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS // 3)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
