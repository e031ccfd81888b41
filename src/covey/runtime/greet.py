"""The handshake of `wire.greeting` over a raw socket, on the control loop."""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import TYPE_CHECKING

from covey.base.errors import AuthError, ConnectError, RemoteProtocolError
from covey.net.descriptors import track
from covey.wire import greeting, messages
from covey.wire.frame import GREETING_LIMIT, LENGTH, frame, frame_length

if TYPE_CHECKING:
    from collections.abc import Callable

GREETING_SECONDS = 5.0
"""How long someone may take to prove the token."""


class RefusedError(Exception):
    """The other side understood and said no."""

    def __init__(self, reason: str, *, retry: bool) -> None:
        super().__init__(reason)
        self.retry = retry


class HungUpError(ConnectError):
    """The other side closed the connection instead of answering: it rejects our token, or it has just died."""


async def dial(
    address: str | tuple[str, int], token: bytes, hello: messages.Hello
) -> tuple[socket.socket, messages.Welcome]:
    """Connect to a unix socket path or a TCP address, prove the token, and return the connection.

    Raises:
        ConnectError: nobody answers there (yet); a HungUpError if they might not accept our token.
        AuthError: someone answers who does not know the token.
        RefusedError: a member of the run answered and said no.
    """
    loop = asyncio.get_running_loop()
    where = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
    sock = track(_new_socket(address))
    try:
        async with asyncio.timeout(GREETING_SECONDS):
            await loop.sock_connect(sock, address)
            _no_delay(sock)
            start = await receive_exactly(sock, len(greeting.BANNER) + greeting.NONCE_BYTES)
            if not start.startswith(greeting.BANNER):
                raise AuthError(f"what listens at {where} is not covey; it said {start[:16]!r}")
            challenge = start[len(greeting.BANNER) :]
            body = messages.encode(hello)
            await loop.sock_sendall(sock, greeting.dial_proof(token, challenge, body) + frame(body))
            try:
                proof = await receive_exactly(sock, greeting.PROOF_BYTES)
            except ConnectionError as error:
                raise HungUpError(f"the rank at {where} did not accept this run's token") from error
            answer = await _receive_frame(sock)
            if not greeting.proofs_equal(proof, greeting.accept_proof(token, challenge, hello.nonce, answer)):
                raise AuthError(f"the rank at {where} does not know this run's token")
            match messages.decode_greeting(answer):
                case messages.Welcome() as welcome:
                    return sock, welcome
                case messages.Refusal(reason, retry):
                    raise RefusedError(reason, retry=retry)
                case other:
                    raise RemoteProtocolError(f"{where} answered a hello with {type(other).__name__}")
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError) and not isinstance(error, ConnectError):
            raise ConnectError(f"{where}: {error.strerror or error or 'no answer in time'}") from error
        raise


async def accept(
    sock: socket.socket, token: bytes, judge: Callable[[messages.Hello], messages.Welcome | messages.Refusal]
) -> messages.Hello | None:
    """Let someone who connected prove the token; return the Hello that was welcomed, or None.

    `judge` decides about a proven Hello. Raises OSError, TimeoutError or a CoveyError for everyone else.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(GREETING_SECONDS):
        _no_delay(sock)
        challenge = secrets.token_bytes(greeting.NONCE_BYTES)
        await loop.sock_sendall(sock, greeting.BANNER + challenge)
        proof = await receive_exactly(sock, greeting.PROOF_BYTES)
        body = await _receive_frame(sock)
        if not greeting.proofs_equal(proof, greeting.dial_proof(token, challenge, body)):
            raise AuthError("someone connected who does not know this run's token")
        hello = messages.decode_greeting(body)
        if not isinstance(hello, messages.Hello):
            raise RemoteProtocolError(f"a connection opened with {type(hello).__name__}")
        answer = judge(hello)
        encoded = messages.encode(answer)
        await loop.sock_sendall(sock, greeting.accept_proof(token, challenge, hello.nonce, encoded) + frame(encoded))
        return hello if isinstance(answer, messages.Welcome) else None


async def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """Receive `count` bytes and not one more: what follows may carry descriptors."""
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < count:
        piece = await loop.sock_recv(sock, count - len(data))
        if not piece:
            raise ConnectionResetError("the connection ended in mid-greeting")
        data += piece
    return bytes(data)


async def _receive_frame(sock: socket.socket) -> bytes:
    length = frame_length(await receive_exactly(sock, LENGTH.size), GREETING_LIMIT)
    return await receive_exactly(sock, length)


def _new_socket(address: str | tuple[str, int]) -> socket.socket:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock


def _no_delay(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
