"""Opens and accepts authenticated connections: first the door's challenge, then Hello and Welcome. On the control loop.

Hello and Welcome say which versions of the protocol each end speaks. Both are sent inside TLS, or under a proof of the
token, so that no third party can make two ends speak an older version than they would. Each end computes what they
speak (`Link.agreed`); if there is nothing, both ends raise or report the same sentence.

`LinkCredentials` are what the nodes of a run share: the door's key, and a token (one host, or insecure) or TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from covey.base.errors import AuthError, ConnectError, RemoteProtocolError
from covey.net.host.descriptors import ScarceError, explain, is_exhausted, track
from covey.runtime import loop as control
from covey.runtime.links.link import HANDSHAKE_SECONDS, Link
from covey.runtime.links.sockets import LINK_PACKET_BYTES, QuicWay, RelayedWay, address_of, limit_packets
from covey.runtime.links.sockets import Where as Where
from covey.runtime.links.sockets import new_socket as new_socket
from covey.runtime.links.sockets import no_delay as no_delay
from covey.runtime.links.sockets import receive_exactly as receive_exactly
from covey.runtime.links.sockets import spell as spell
from covey.wire import door, messages
from covey.wire.decoding import FRAME_LENGTH, HANDSHAKE_LIMIT, frame, frame_length
from covey.wire.versions import OURS, objection

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from covey.net.keys.tls import Credentials
    from covey.runtime.links.limits import DialLimits
    from covey.wire.versions import Speaker

    Judge = Callable[[messages.Hello, bytes], messages.Welcome | messages.Refusal]

NO_ANSWER: Final = "no answer in time"
"""The problem of an address that sends nothing back, not even a refusal."""


class RefusedError(Exception):
    """The other side understood and refused."""

    def __init__(self, reason: str, *, retry: bool) -> None:
        super().__init__(reason)
        self.retry = retry


class HungUpError(ConnectError):
    """The other side closed the connection instead of answering: it rejects this key, or it has just died."""


class PapersCheck(Protocol):
    """Makes papers of own nodes, and checks those of others; may read files."""

    def papers(self, node_id: bytes) -> messages.Papers:
        """Return the papers of a node of this machine."""

    def objection(self, node_id: bytes, papers: messages.Papers | None) -> str:
        """Return why the papers of a node are not accepted; empty if they are."""


@dataclass
class LinkCredentials:
    """What proves membership. `token` is used if `tls` is None.

    When a cluster's secret changes, the credentials of the previous one are accepted, and tried, for a while.
    """

    door_key: bytes = field(repr=False)
    token: bytes = field(default=b"", repr=False)
    tls: Credentials | None = None
    organisation: PapersCheck | None = None
    """With TLS: whose certificates both ends have to present, if an organisation's are needed."""
    earlier: LinkCredentials | None = None
    """The credentials before the last change."""
    until: float = 0.0
    """When `earlier` expires, by the monotonic clock."""

    @classmethod
    def of_token(cls, token: bytes) -> LinkCredentials:
        """Return the credentials of a run whose ranks share a token."""
        return cls(hashlib.sha256(b"covey/1/token-door" + token).digest(), token)

    def become(self, other: LinkCredentials) -> None:
        """Take over other credentials in place: holders of this object use them from now on."""
        self.door_key, self.token, self.tls = other.door_key, other.token, other.tls
        self.organisation, self.earlier, self.until = other.organisation, other.earlier, other.until

    def good(self) -> tuple[LinkCredentials, ...]:
        """Return the credentials that are valid now, the preferred first."""
        if self.earlier is not None and time.monotonic() >= self.until:
            self.earlier = None
        return (self,) if self.earlier is None else (self, self.earlier)

    def door_keys(self) -> tuple[bytes, ...]:
        """Return the door keys that are valid now."""
        return tuple(credentials.door_key for credentials in self.good())

    def of(self, said: bytes) -> LinkCredentials:
        """Return the credentials whose key made an answer at the door; `said` is the challenge and that answer."""
        return next((credentials for credentials in self.good() if _opens(credentials.door_key, said)), self)


def _opens(key: bytes, said: bytes) -> bool:
    try:
        door.check(key, said[: door.CHALLENGE_BYTES], said[door.CHALLENGE_BYTES :])
    except AuthError:
        return False
    return True


async def connect(
    where: Where,
    credentials: LinkCredentials,
    purpose: door.Purpose,
    *,
    first: Callable[[], bytes] = bytes,
    token: bytes = b"",
    spares: bool = False,
    within: float = HANDSHAKE_SECONDS,
    packet_limit: int = 0,
) -> tuple[socket.socket, bytes]:
    """Connect and pass the door; return the socket, and the challenge with the answer.

    What `first` returns is sent right after the answer, and the answer is bound to it; without `first`, to `token`.
    With `spares`, no socket is opened if the process has few descriptors left: they are for what it has begun. The
    other side has to answer `within` so many seconds. Neither side sends packets above `packet_limit` bytes, if given.

    Raises:
        ConnectError: nothing answers there (yet), or what answers is not covey; a ScarceError if this process can open
            no socket.
    """
    loop = asyncio.get_running_loop()
    sock: socket.socket | None = None
    try:
        if isinstance(where, QuicWay):
            sock = where.pump.dial(where, credentials.door_key)
        else:
            sock = track(new_socket(where, spares=spares))
        limit_packets(sock, packet_limit)
        async with asyncio.timeout(within):
            if not isinstance(where, QuicWay):  # a QUIC connection is made while its socket is waited for
                await loop.sock_connect(sock, address_of(where))
            no_delay(sock)
            if isinstance(where, RelayedWay):
                from covey.runtime.links.relayed import be_joined  # slow to load, and used by few pairs

                await be_joined(sock, where)
            challenge = await receive_exactly(sock, door.CHALLENGE_BYTES)
            following = first()
            bound = door.bind(following or token or secrets.token_bytes(door.BOUND_BYTES))
            answer = door.answer(credentials.door_key, challenge, purpose, bound)
            await loop.sock_sendall(sock, answer + following)
            return sock, challenge + answer
    except BaseException as error:
        if sock is not None:
            sock.close()
        if isinstance(error, OSError) and not isinstance(error, ConnectError):  # TimeoutError, too
            kind = ScarceError if is_exhausted(error) else ConnectError
            raise kind(f"{spell(where)}: {getattr(sock, 'problem', '') or explain(error) or NO_ANSWER}") from error
        raise


async def dial(
    where: Where,
    credentials: LinkCredentials,
    hello: messages.Hello,
    *,
    limits: DialLimits | None = None,
    within: float = HANDSHAKE_SECONDS,
) -> tuple[Link, messages.Welcome, bytes]:
    """Open a link; return it, the Welcome, and the id that TLS proved (empty without TLS).

    A node that hangs up may not know a new secret: the previous one is tried too while it is valid. With `limits`, the
    dial waits for its turn and spares descriptors. `within` is as for `connect`.

    Raises:
        ConnectError: nothing answers there (yet); a HungUpError if the other side may not accept this key, a
            ScarceError if this process can open no socket.
        AuthError: what answers is not of this run or cluster, or rejects this node's certificate.
        RefusedError: a member answered and refused.
    """
    hello, spares = messages.with_versions(hello), limits is not None
    *others, last = credentials.good()
    async with limits.turn(where) if limits is not None else contextlib.nullcontext():
        for each in others:
            with contextlib.suppress(HungUpError):
                return await _dial(where, each, hello, spares=spares, within=within)
        return await _dial(where, last, hello, spares=spares, within=within)


async def _dial(
    where: Where, credentials: LinkCredentials, hello: messages.Hello, *, spares: bool, within: float
) -> tuple[Link, messages.Welcome, bytes]:
    first: Callable[[], bytes]
    if credentials.tls is not None:
        from covey.net.keys.tls import Channel  # slow to import, and not needed by ranks of one host

        channel = Channel(credentials.tls, dialled=True)
        first = channel.shake
    else:
        first = bytes
    purpose, limit = door.Purpose.LINK, LINK_PACKET_BYTES
    sock, said = await connect(
        where, credentials, purpose, first=first, spares=spares, within=within, packet_limit=limit
    )
    link: Link | None = None
    is_ours = True
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            if credentials.tls is not None:
                is_ours = False
                try:
                    link, peer = await Link.dialled(sock, channel)
                except ConnectError as error:
                    raise HungUpError(f"{spell(where)} did not accept this cluster's secret") from error
                if credentials.organisation is not None:
                    papers = await control.aside(credentials.organisation.papers, hello.card.id)
                    hello = messages.with_papers(hello, papers)
                link.send(messages.encode(hello))
                answer = await link.receive()
            else:
                answer, peer = await _prove(sock, credentials.token, said, hello, where), b""
                is_ours = False
                link = await Link.plain(sock)
        match messages.decode_handshake(answer):
            case messages.Welcome() as welcome:
                if welcome.card.id != peer:
                    raise AuthError(f"{spell(where)} poses as a node whose key it does not have")
                if problem := await _objection(credentials, peer, welcome.papers):
                    raise AuthError(f"{spell(where)}: {problem}")
                here = messages.speaker_of(hello.card, hello.versions)
                there = messages.speaker_of(welcome.card, welcome.versions, hello.version)
                if problem := objection(here, there):  # the other end should have said so
                    raise RefusedError(problem, retry=False)
                link.introduce(here, there)
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
            raise ConnectError(f"{spell(where)}: {explain(error) or NO_ANSWER}") from error
        raise


async def _prove(sock: socket.socket, token: bytes, said: bytes, hello: messages.Hello, where: Where) -> bytes:
    body = messages.encode(hello)
    await asyncio.get_running_loop().sock_sendall(sock, door.dial_proof(token, said, body) + frame(body))
    try:
        proof = await receive_exactly(sock, door.PROOF_BYTES)
    except ConnectionError as error:
        raise HungUpError(f"the rank at {spell(where)} did not accept this run's token") from error
    answer = await _receive_frame(sock)
    if not door.proofs_equal(proof, door.accept_proof(token, said, hello.nonce, answer)):
        raise AuthError(f"the rank at {spell(where)} does not know this run's token")
    return answer


@dataclass(frozen=True, slots=True)
class Greeter:
    """Decides about the processes that ask for a link, and hears which of them are refused before that."""

    card: messages.Card
    """The card of this process."""
    judge: Judge
    """Answers a Hello that is proved, and whose sender speaks a version that this process speaks."""
    on_stranger: Callable[[str], None] = lambda _reason: None
    """Gets the reason if the key or the certificate of a Hello is not accepted."""
    on_incompatible: Callable[[messages.Hello, str], None] = lambda _hello, _reason: None
    """Gets a proved Hello whose sender speaks no version that this process speaks, and the words of the refusal."""


async def admit(
    sock: socket.socket, credentials: LinkCredentials, said: bytes, greeter: Greeter
) -> tuple[Link, messages.Hello, bytes] | None:
    """Shake hands on a connection that passed the door; return the link, its Hello and proven id, or None if refused.

    Raises OSError, TimeoutError or a CoveyError if the Hello is not proven.

    Owns the socket from now on. It is never closed while a transport has it: that would free its descriptor for other
    sockets, which the transport would then disturb.
    """
    link: Link | None = None
    is_ours = True
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            if (tls := credentials.of(said).tls) is not None:
                first = await _receive_hello(sock, door.bound(said))
                is_ours = False
                link, peer = await Link.accepted(sock, tls, first)
                hello = _as_hello(await link.receive())
                answer = await _answer(credentials, greeter, hello, peer)
                link.send(messages.encode(answer))
            else:
                hello, answer, peer = *await _check(sock, credentials.token, said, greeter), b""
                is_ours = not isinstance(answer, messages.Welcome)
                link = None if is_ours else await Link.plain(sock)
        if isinstance(answer, messages.Welcome):
            assert link is not None
            link.introduce(messages.speaker_of(answer.card, answer.versions), _speaker(hello))
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


def _speaker(hello: messages.Hello) -> Speaker:
    return messages.speaker_of(hello.card, hello.versions, hello.version)


async def _objection(credentials: LinkCredentials, peer: bytes, papers: messages.Papers | None) -> str:
    """Return why the papers of the node at the other end are not accepted; empty if they are, or are not needed."""
    if credentials.organisation is None or credentials.tls is None:
        return ""
    return await control.aside(credentials.organisation.objection, peer, papers)


async def _answer(
    credentials: LinkCredentials, greeter: Greeter, hello: messages.Hello, peer: bytes
) -> messages.Welcome | messages.Refusal:
    """Return the answer to a Hello over TLS, with papers if the organisation needs them."""
    if problem := await _objection(credentials, peer, hello.papers):
        greeter.on_stranger(problem)
        return messages.Refusal(problem, retry=True)  # it may get a new certificate
    answer = _judge(greeter, hello, peer)
    if isinstance(answer, messages.Welcome) and credentials.organisation is not None:
        return messages.with_papers(answer, await control.aside(credentials.organisation.papers, answer.card.id))
    return answer


def _judge(greeter: Greeter, hello: messages.Hello, peer: bytes) -> messages.Welcome | messages.Refusal:
    if hello.card.id != peer:
        greeter.on_stranger("it gave an id whose key it does not have")
        return messages.Refusal("your key does not fit the id you gave", retry=False)
    if reason := objection(messages.speaker_of(greeter.card, OURS), _speaker(hello)):
        greeter.on_incompatible(hello, reason)
        return messages.Refusal(reason, retry=False)
    answer = greeter.judge(hello, peer)
    return answer if isinstance(answer, messages.Refusal) else messages.with_versions(answer)


async def _check(
    sock: socket.socket, token: bytes, said: bytes, greeter: Greeter
) -> tuple[messages.Hello, messages.Welcome | messages.Refusal]:
    proof = await receive_exactly(sock, door.PROOF_BYTES)
    body = await _receive_frame(sock)
    if not door.proofs_equal(proof, door.dial_proof(token, said, body)):
        raise AuthError("a connection did not prove this run's token")
    hello = _as_hello(body)
    answer = _judge(greeter, hello, b"")
    encoded = messages.encode(answer)
    accepted = door.accept_proof(token, said, hello.nonce, encoded) + frame(encoded)
    await asyncio.get_running_loop().sock_sendall(sock, accepted)
    return hello, answer


def _as_hello(body: bytes) -> messages.Hello:
    hello = messages.decode_handshake(body)
    if not isinstance(hello, messages.Hello):
        raise RemoteProtocolError(f"a connection opened with {type(hello).__name__}")
    return hello


async def _receive_hello(sock: socket.socket, bound: bytes) -> bytes:
    """Return the ClientHello that a connection is bound to. It is not parsed before the binding is checked.

    Raises:
        AuthError: it is another one.
    """
    from covey.net.keys.tls import RECORD_HEADER_BYTES, hello_bytes

    header = await receive_exactly(sock, RECORD_HEADER_BYTES)
    hello = header + await receive_exactly(sock, hello_bytes(header))
    if not hmac.compare_digest(door.bind(hello), bound):
        raise AuthError("the answer at the door was made for another connection")
    return hello


async def _receive_frame(sock: socket.socket) -> bytes:
    length = frame_length(await receive_exactly(sock, FRAME_LENGTH.size), HANDSHAKE_LIMIT)
    return await receive_exactly(sock, length)
