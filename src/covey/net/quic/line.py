"""Lines: the carrier of one connection with the socket behind which its bytes appear, and how new ones begin.

What is read from the socket goes to the carrier, what the carrier receives goes to the socket. Both are bounded: the
socket is read only as far as the carrier has room, and the other end sends only as far as the socket was written. A
line is on the pump's thread.

A datagram that belongs to no known line begins one, or is of an end whose address has changed. `FirstDatagrams` judges
those that begin a connection, and keeps nothing of those that it refuses. QUIC itself follows only a dialler that
moves; `question` and `answered` find the end that accepted a connection when its machine has another address.
`Gatekeeper` is what the pump asks of the node whose connections it has.
"""

from __future__ import annotations

import collections
import contextlib
import secrets
import selectors
import socket
import time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from qh3.quic.packet import encode_quic_retry

from covey.base.errors import RemoteProtocolError
from covey.wire import quic

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterable, Sequence

    from covey.net.quic.carrier import Address, Carrier, QuicCredentials

SOCKET_READ_BYTES: Final = 1 << 18
"""Bytes read from a socket with one call."""
MOVED_SECONDS: Final = 10.0
DEAD_PATH_SECONDS: Final = 30.0
"""After how much silence a path is taken to be dead: if the other machine is found on another network only, and
otherwise. The other process may only be busy, and cannot answer meanwhile, as the kernel would for TCP. A connection
that follows a changed address needs some probes, with growing pauses, which a busy machine sends late."""
LAST_BYTES_SECONDS: Final = 5.0
LONGEST_SECONDS: Final = 60.0
"""How long the last bytes of a lane that was closed are sent, although the other end still sends: while nothing comes
from it, and in all."""


class QuicSocket(socket.socket):
    """The end of a line that lanes use: a stream socket like any other."""

    remote_ip = ""
    """The address of the other machine, when the connection began."""
    problem = ""
    """Why the connection ended, if an error did it."""
    waits_since = 0.0
    """Since when nothing came from the other end although it has to acknowledge something; 0 if it has not."""

    def is_silent(self, *, has_moved: bool) -> bool:
        """Tell whether the path is dead; if the other machine `has_moved` to another network, sooner."""
        seconds = MOVED_SECONDS if has_moved else DEAD_PATH_SECONDS
        return self.waits_since > 0 and time.monotonic() > self.waits_since + seconds


def socket_pair() -> tuple[QuicSocket, socket.socket]:
    """Return the end for the lane and the end for the pump; OSError if no descriptors are left."""
    one, other = socket.socketpair()
    lane = QuicSocket(one.family, one.type, one.proto, fileno=one.detach())
    lane.setblocking(False)
    other.setblocking(False)
    return lane, other


class Line:
    """One connection."""

    def __init__(
        self,
        carrier: Carrier,
        credentials: QuicCredentials,
        address: Address,
        *,
        is_dialler: bool,
        sock: socket.socket | None,
    ) -> None:
        """A dialler has its `sock` from the beginning; an acceptor gets it after the handshake."""
        self.carrier, self.credentials, self.is_dialler = carrier, credentials, is_dialler
        self.sock = sock
        self.canonical = address
        """What the core of a dialler takes for the address of the other end."""
        self.remote = address
        """Where a dialler's datagrams go: another address once the other machine has another."""
        self.probing: tuple[bytes, Address, float] | None = None
        """A dialler's question at another address: its nonce, the address, and when it was asked."""
        self.lane: weakref.ref[QuicSocket] | None = None
        """The other end of `sock`, which is told of silence and errors."""
        self.is_proved = is_dialler
        self.on_proved: Callable[[], None] = lambda: None
        """Called when the other end has proved the key."""
        self.prove_until = 0.0
        """When the other end must have proved the key."""
        self.events = 0
        """What the selector watches `sock` for."""
        self.ids: set[bytes] = set()
        """Under which ids the pump finds this line."""
        self.due = 0.0
        self.heard_at = 0.0
        """When a datagram of the other end came last."""
        self._unsent: collections.deque[memoryview] = collections.deque()
        self._heard_eof = self._said_eof = False
        self.deaf_since = 0.0
        """When the lane was closed with bytes for it on the way; 0 before that."""

    def move(self, now: float) -> None:
        """Move bytes both ways, as far as possible now."""
        carrier = self.carrier
        if self.sock is not None and not carrier.error:
            self._to_socket(self.sock, now)
        if self.sock is not None and not carrier.is_over:
            self._from_socket(self.sock)
        if carrier.is_delivered and self._said_eof:
            carrier.close()
        elif self.deaf_since and (carrier.is_delivered or self._is_in_vain(now)):
            carrier.close("the lane was closed")

    def _is_in_vain(self, now: float) -> bool:
        """Tell whether the last bytes of a lane that was closed will not arrive any more, or not soon."""
        return now > max(self.deaf_since, self.heard_at) + LAST_BYTES_SECONDS or now > self.deaf_since + LONGEST_SECONDS

    @property
    def is_abandoned(self) -> bool:
        """Whether the lane has closed its end, or forgotten it."""
        lane = self.lane() if self.lane is not None else None
        return lane is None or lane.fileno() < 0

    @property
    def is_finished(self) -> bool:
        """Whether the connection is over, and the socket has got all that arrived in order."""
        return self.carrier.is_over and (bool(self.carrier.error) or not self._unsent or bool(self.deaf_since))

    def _to_socket(self, sock: socket.socket, now: float) -> None:
        carrier, taken = self.carrier, 0
        while not self.deaf_since:
            if not self._unsent:
                data = carrier.read()
                if data is None:
                    break
                self._unsent.append(memoryview(data))
            try:
                sent = sock.send(self._unsent[0])
            except BlockingIOError:
                break
            except OSError:  # the lane was closed, with bytes for it on the way
                self.deaf_since = now
                break
            taken += sent
            if sent == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][sent:]
        if taken:
            carrier.consumed(taken)
        if carrier.has_heard_end and not self._unsent and not self._said_eof:
            self._said_eof = True
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)

    def _from_socket(self, sock: socket.socket) -> None:
        while not self._heard_eof and (room := self.carrier.room()) > 0:
            try:
                data = sock.recv(min(room, SOCKET_READ_BYTES))
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._heard_eof = True
                self.carrier.end()
                return
            self.carrier.write(data)

    def wanted(self) -> int:
        """Return what the socket is to be watched for."""
        if self.sock is None or self.carrier.error:
            return 0
        is_reading = not self._heard_eof and self.carrier.room() > 0
        is_writing = bool(self._unsent) and not self.deaf_since
        return (selectors.EVENT_READ if is_reading else 0) | (selectors.EVENT_WRITE if is_writing else 0)

    def note_silence(self, now: float) -> None:
        """Tell the lane since when the other end owes an answer."""
        lane = self.lane() if self.lane is not None else None
        if lane is not None:
            awaits = self.carrier.awaits_answer(now)
            lane.waits_since = max(self.heard_at, lane.waits_since or now) if awaits else 0.0

    def hang_up(self) -> None:
        """Close the socket: the lane sees the end of its stream, and `problem` says why, if an error was the reason."""
        lane = self.lane() if self.lane is not None else None
        if lane is not None and self.carrier.error:
            lane.problem = self.carrier.error
        if self.sock is not None:
            self.sock.close()
            self.sock = None


PROOFS_REMEMBERED: Final = 4096
"""Connection ids that began a connection: each may begin one."""
PROBE_AGAIN_SECONDS: Final = 0.5
"""The shortest time between two questions of a line."""


class Entering(NamedTuple):
    """A connection that may begin: its sender has proved the key and its address."""

    door_key: bytes
    original: bytes
    """The connection id to which its first datagram went."""
    chosen: bytes
    """The one to which this datagram went."""
    source: bytes
    """The sender's own."""


class FirstDatagrams:
    """Judges the datagrams that come to one UDP socket."""

    def __init__(self) -> None:
        self._token_key = secrets.token_bytes(32)
        self._used: dict[bytes, None] = {}

    def judge(self, data: bytes, source: Address, door_keys: Sequence[bytes], now: float) -> Entering | bytes:
        """Return a connection that may begin, or the datagram to answer with, which is shorter; b"" for no answer.

        A sender without one of the keys gets no answer. One with a key is asked to prove its address first.
        """
        try:
            first = quic.read_first(data)
            door_key = next((key for key in door_keys if quic.is_proof(key, first.source)), None)
            if door_key is None or first.source in self._used:
                return b""
            address = repr(source).encode()
            if not first.token:
                return self._ask_back(first, address, now)
            original = quic.read_token(self._token_key, address, first.token, first.destination, int(now))
        except RemoteProtocolError:
            return b""
        return Entering(door_key, original, first.destination, first.source)

    def entered(self, entering: Entering) -> None:
        """Note that a connection has begun: the proof is worth nothing from now on."""
        self._used[entering.source] = None
        if len(self._used) > PROOFS_REMEMBERED:
            del self._used[next(iter(self._used))]

    def _ask_back(self, first: quic.FirstPacket, address: bytes, now: float) -> bytes:
        chosen = secrets.token_bytes(quic.CID_BYTES)
        token = quic.address_token(self._token_key, address, first.destination, chosen, int(now))
        return encode_quic_retry(
            version=quic.VERSION_1,
            source_cid=chosen,
            destination_cid=first.source,
            original_destination_cid=first.destination,
            retry_token=token,
        )


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


class Gatekeeper(Protocol):
    """Decides which connections are accepted. Called on the pump's thread."""

    def door_keys(self) -> tuple[bytes, ...]:
        """Return the door keys that are valid now, the preferred first."""

    def comes(self, ip: str, local_ip: str) -> Callable[[], None] | None:
        """Count a connection from `ip` to `local_ip`; None if it is refused, else what to call when it is proved."""

    def take(self, sock: QuicSocket, proved: Callable[[], None]) -> None:
        """Own the socket of an accepted connection; call `proved` once it has proved the key on the stream."""
