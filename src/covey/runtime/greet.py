"""Opening and accepting connections: the door first, then a greeting, on the control loop.

A `Gate` is what the nodes of a run share: the key of the door, and either a token (one host, or insecure) or TLS.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import AuthError, ConnectError, RemoteProtocolError
from covey.net.descriptors import track
from covey.runtime.link import Link
from covey.wire import door, greeting, messages
from covey.wire.frame import GREETING_LIMIT, LENGTH, frame, frame_length

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.net.tls import Credentials

GREETING_SECONDS: Final = 5.0
"""How long a greeting may take."""
HEAD_START: Final = 0.15
"""Seconds that a better address has before the next one is tried, too."""

Where = str | tuple[Any, ...]
"""The path of a unix socket, or a TCP address as `socket` takes it."""
_Dialling = asyncio.Future[tuple[Link, messages.Welcome, bytes]]


class RefusedError(Exception):
    """The other side understood and said no."""

    def __init__(self, reason: str, *, retry: bool) -> None:
        super().__init__(reason)
        self.retry = retry


class HungUpError(ConnectError):
    """The other side closed the connection instead of answering: it rejects our key, or it has just died."""


@dataclass(frozen=True)
class Gate:
    """What proves membership. `token` is used where `credentials` is None."""

    door_key: bytes = field(repr=False)
    token: bytes = field(default=b"", repr=False)
    credentials: Credentials | None = None

    @classmethod
    def of_token(cls, token: bytes) -> Gate:
        """Return the gate of a run whose ranks share a token."""
        return cls(hashlib.sha256(b"covey/1/token-door" + token).digest(), token)


async def connect(where: Where, gate: Gate, purpose: door.Purpose) -> tuple[socket.socket, bytes]:
    """Connect and pass the door; return the socket and what was said there.

    Raises:
        ConnectError: nobody answers there (yet), or what answers is not covey.
    """
    loop = asyncio.get_running_loop()
    sock: socket.socket | None = None
    try:
        sock = track(_new_socket(where))
        async with asyncio.timeout(GREETING_SECONDS):
            await loop.sock_connect(sock, where)
            no_delay(sock)
            challenge = await receive_exactly(sock, door.CHALLENGE_BYTES)
            answer = door.answer(gate.door_key, challenge, purpose, secrets.token_bytes(door.SALT_BYTES))
            await loop.sock_sendall(sock, answer)
            return sock, challenge + answer
    except BaseException as error:
        if sock is not None:
            sock.close()
        if isinstance(error, OSError):  # TimeoutError, and out of descriptors, too
            raise ConnectError(f"{spell(where)}: {explain(error)}") from error
        raise


async def dial(where: Where, gate: Gate, hello: messages.Hello) -> tuple[Link, messages.Welcome, bytes]:
    """Open a link; return it, who answered, and the id that TLS proved (empty without TLS).

    Raises:
        ConnectError: nobody answers there (yet); a HungUpError if they might not accept our key.
        AuthError: someone answers who is not of this run or cluster, or who rejects our certificate.
        RefusedError: a member answered and said no.
    """
    sock, said = await connect(where, gate, door.Purpose.LINK)
    link: Link | None = None
    is_ours = True
    try:
        async with asyncio.timeout(GREETING_SECONDS):
            if gate.credentials is not None:
                is_ours = False
                try:
                    link, peer = await Link.secure(sock, gate.credentials, dialled=True)
                except ConnectError as error:
                    raise HungUpError(f"{spell(where)} did not accept this cluster's secret") from error
                link.send(messages.encode(hello))
                answer = await link.receive()
            else:
                answer, peer = await _prove(sock, gate.token, said, hello, where), b""
                is_ours = False
                link = await Link.plain(sock)
        match messages.decode_greeting(answer):
            case messages.Welcome() as welcome:
                if welcome.card.id != peer:
                    raise AuthError(f"{spell(where)} poses as a node whose key it does not have")
                return link, welcome, peer
            case messages.Refusal(reason, retry):
                raise RefusedError(reason, retry=retry)
            case other:
                raise RemoteProtocolError(f"{spell(where)} answered a hello with {type(other).__name__}")
    except BaseException as error:
        if is_ours:
            sock.close()
        elif link is not None:
            link.abort()
        if isinstance(error, OSError) and not isinstance(error, ConnectError):
            raise ConnectError(f"{spell(where)}: {explain(error)}") from error
        raise


async def _prove(sock: socket.socket, token: bytes, said: bytes, hello: messages.Hello, where: Where) -> bytes:
    body = messages.encode(hello)
    await asyncio.get_running_loop().sock_sendall(sock, greeting.dial_proof(token, said, body) + frame(body))
    try:
        proof = await receive_exactly(sock, greeting.PROOF_BYTES)
    except ConnectionError as error:
        raise HungUpError(f"the rank at {spell(where)} did not accept this run's token") from error
    answer = await _receive_frame(sock)
    if not greeting.proofs_equal(proof, greeting.accept_proof(token, said, hello.nonce, answer)):
        raise AuthError(f"the rank at {spell(where)} does not know this run's token")
    return answer


async def dial_any(
    wheres: list[Where], gate: Gate, hello: messages.Hello
) -> tuple[Link, messages.Welcome, bytes, Where]:
    """Open a link to the first address that works; each has a short head start before the next.

    Raises:
        What `dial` raises: of what was tried, what tells most.
    """
    if not wheres:
        raise ConnectError("the peer has no address that can be dialled from here")
    remaining, tasks, errors = list(wheres), list[_Dialling](), list[BaseException]()
    won: _Dialling | None = None
    try:
        while won is None and (remaining or len(errors) < len(tasks)):
            if remaining:
                tasks.append(asyncio.ensure_future(dial(remaining.pop(0), gate, hello)))
            running = [task for task in tasks if not task.done()]
            if running:
                await asyncio.wait(
                    running, timeout=HEAD_START if remaining else None, return_when=asyncio.FIRST_COMPLETED
                )
            errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
            won = next((task for task in tasks if task.done() and task.exception() is None), None)
    finally:
        for task in tasks:
            if task is not won:
                task.cancel()
                task.add_done_callback(_drop)
    if won is None:
        raise min(errors, key=_telling)
    return *won.result(), wheres[tasks.index(won)]


def _drop(task: _Dialling) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result()[0].abort()


def _telling(error: BaseException) -> int:
    kinds = (RefusedError, AuthError, HungUpError, ConnectError)
    return next((place for place, kind in enumerate(kinds) if isinstance(error, kind)), len(kinds))


async def admit(
    sock: socket.socket,
    gate: Gate,
    said: bytes,
    judge: Callable[[messages.Hello, bytes], messages.Welcome | messages.Refusal],
) -> tuple[Link, messages.Hello, bytes] | None:
    """Greet someone who passed the door; return the link, its Hello and proven id if it was welcomed, else None.

    The socket is no longer the caller's. It is never closed while a transport has it: that would free its number for
    others, whom the transport would then disturb.

    `judge` decides about a proven Hello. Raises OSError, TimeoutError or a CoveyError for everyone else.
    """
    link: Link | None = None
    is_ours = True
    try:
        async with asyncio.timeout(GREETING_SECONDS):
            if gate.credentials is not None:
                is_ours = False
                link, peer = await Link.secure(sock, gate.credentials, dialled=False)
                hello = _as_hello(await link.receive())
                answer = _judge(judge, hello, peer)
                link.send(messages.encode(answer))
            else:
                hello, answer, peer = *await _check(sock, gate.token, said, judge), b""
                is_ours = not isinstance(answer, messages.Welcome)
                link = None if is_ours else await Link.plain(sock)
        if isinstance(answer, messages.Welcome):
            assert link is not None
            return link, hello, peer
        if link is not None:
            link.close()
        else:
            sock.close()
        return None
    except BaseException:
        if is_ours:
            sock.close()
        elif link is not None:
            link.abort()
        raise


def _judge(
    judge: Callable[[messages.Hello, bytes], messages.Welcome | messages.Refusal], hello: messages.Hello, peer: bytes
) -> messages.Welcome | messages.Refusal:
    if hello.card.id != peer:
        return messages.Refusal("your key does not fit the id you gave", retry=False)
    return judge(hello, peer)


async def _check(
    sock: socket.socket,
    token: bytes,
    said: bytes,
    judge: Callable[[messages.Hello, bytes], messages.Welcome | messages.Refusal],
) -> tuple[messages.Hello, messages.Welcome | messages.Refusal]:
    proof = await receive_exactly(sock, greeting.PROOF_BYTES)
    body = await _receive_frame(sock)
    if not greeting.proofs_equal(proof, greeting.dial_proof(token, said, body)):
        raise AuthError("someone connected who does not know this run's token")
    hello = _as_hello(body)
    answer = _judge(judge, hello, b"")
    encoded = messages.encode(answer)
    accepted = greeting.accept_proof(token, said, hello.nonce, encoded) + frame(encoded)
    await asyncio.get_running_loop().sock_sendall(sock, accepted)
    return hello, answer


def _as_hello(body: bytes) -> messages.Hello:
    hello = messages.decode_greeting(body)
    if not isinstance(hello, messages.Hello):
        raise RemoteProtocolError(f"a connection opened with {type(hello).__name__}")
    return hello


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


def explain(error: OSError) -> str:
    """Return what the system says about an error, in its own words."""
    return os.strerror(error.errno) if error.errno else str(error) or "no answer in time"


def spell(where: Where) -> str:
    """Return an address as people write it."""
    if isinstance(where, str):
        return where
    return f"[{where[0]}]:{where[1]}" if ":" in where[0] else f"{where[0]}:{where[1]}"


def _new_socket(where: Where) -> socket.socket:
    family = socket.AF_UNIX if isinstance(where, str) else socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock


def no_delay(sock: socket.socket) -> None:
    """Send small things at once; to be said before anything else is."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
