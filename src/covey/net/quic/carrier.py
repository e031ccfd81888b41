"""One end of a QUIC connection that carries one stream of bytes in each direction, and its certificates. Without I/O.

qh3 hands all bytes over as they arrive, and lets the other end send more at once. So the other end is told on a stream
of its own how many bytes it may send in all: what is not read yet is at most the window. The stream of bytes ends with
QUIC's end of stream; when an end has received that, it ends its stream of limits: then the other end knows that all its
bytes have arrived.

A process that accepts proves with its certificate that it has the door's key. qh3 cannot ask a dialler for one: the
dialler proves the key with its connection id, and on the stream, where the door and the key of the offered lane come
first, as on TCP.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
from typing import TYPE_CHECKING, Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from qh3.quic import events
from qh3.quic.configuration import QuicConfiguration
from qh3.quic.connection import QuicConnection, QuicConnectionError
from qh3.tls import SignatureAlgorithm

from covey.base.errors import RemoteProtocolError
from covey.net.keys.tls import signed_certificate
from covey.wire import quic

if TYPE_CHECKING:
    from collections.abc import Sequence

QUIC_PROTOCOL: Final = "covey-lane/1"
CERTIFICATE_NAME: Final = "covey.invalid"
"""The name in all certificates. It means nothing."""
QUIC_WINDOW_BYTES: Final = 4 << 20
"""What may be on the way in each direction: with a round trip of 40 ms, enough for 100 MB/s."""
PACKET_BYTES: Final = 1232
"""The longest datagrams: with their headers they fit into the 1280 bytes that every network with IPv6 must carry, so
that none is swallowed on the way."""
CONNECTION_IDLE_SECONDS: Final = 120.0
"""A connection on which nothing arrives for so long has ended. A process that computes without releasing the GIL is
silent; views decide sooner whether it is lost."""
CORE_UNSENT_BYTES: Final = 1 << 20
"""What the core holds at most that it has not sent once: more would only be copied earlier."""
STRANGER_BYTES: Final = 4096
"""The window before the other end has proved the key on the stream: the proofs are shorter."""
QUIC_KEEPALIVE_SECONDS: Final = 5.0
"""How often an end says something: routers forget silent connections, and an end that has moved is found by it."""
REFUSED: Final = 1
"""The error code with which a connection is cut."""
Address = tuple[str, int] | tuple[str, int, int, int]


class QuicCredentials:
    """What one key of the door gives for QUIC: the configurations of diallers and acceptors."""

    def __init__(self, door_key: bytes) -> None:
        self.door_key = door_key
        seed = hmac.digest(door_key, b"covey/1/quic-authority", "sha256")
        authority = Ed25519PrivateKey.from_private_bytes(seed)
        own = Ed25519PrivateKey.generate()
        root = signed_certificate(
            authority, authority.public_key(), "covey authority", is_authority=True, host_name=CERTIFICATE_NAME
        )
        leaf = signed_certificate(
            authority, own.public_key(), "covey node", is_authority=False, host_name=CERTIFICATE_NAME
        )
        pem = serialization.Encoding.PEM
        secret = own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        self.dialling = _configuration(is_client=True)
        self.dialling.server_name = CERTIFICATE_NAME
        self.dialling.load_verify_locations(cadata=root.public_bytes(pem))
        self.dialling.signature_algorithms = [SignatureAlgorithm.ED25519]
        self.accepting = _configuration(is_client=False)
        self.accepting.load_cert_chain(leaf.public_bytes(pem), secret)


def _configuration(*, is_client: bool) -> QuicConfiguration:
    return QuicConfiguration(
        is_client=is_client,
        alpn_protocols=[QUIC_PROTOCOL],
        connection_id_length=quic.CID_BYTES,
        idle_timeout=CONNECTION_IDLE_SECONDS,
        max_data=QUIC_WINDOW_BYTES + (QUIC_WINDOW_BYTES >> 2),
        max_stream_data=QUIC_WINDOW_BYTES,
        max_datagram_size=PACKET_BYTES,
        probe_datagram_size=False,
    )


class Carrier:
    """One end of one connection. Every call takes the time, in seconds of one clock."""

    def __init__(self, connection: QuicConnection, *, is_dialler: bool, is_proved: bool, now: float) -> None:
        self._connection, self._is_dialler = connection, is_dialler
        ends = (quic.DIALLER_BYTES, quic.DIALLER_LIMITS), (quic.ACCEPTOR_BYTES, quic.ACCEPTOR_LIMITS)
        (self._out, self._out_limits), (self._in, self._in_limits) = ends if is_dialler else ends[::-1]
        self._limits = quic.LimitReader()
        self._window = QUIC_WINDOW_BYTES if is_proved else STRANGER_BYTES
        self._written = self._arrived = self._taken = self._granted = 0
        self._unread: collections.deque[bytes] = collections.deque()
        self._ping_at = now + QUIC_KEEPALIVE_SECONDS
        self._pings = 0
        self.is_open = False
        """Whether the handshake is over."""
        self.ids: set[bytes] = {connection.host_cid}
        """The connection ids at which this end is addressed."""
        self.error = ""
        """Why the connection has ended; empty while it has not, or if both ends were done."""
        self.is_over = False
        self.has_heard_end = False
        """Whether the other end has sent its last byte, and all have arrived."""
        self.has_said_end = False
        self.is_delivered = False
        """Whether the other end has received all bytes, to the last."""

    # Datagrams

    def receive(self, datagrams: Sequence[bytes], address: Address, now: float) -> None:
        """Take datagrams that came from one address."""
        if not self.is_over:
            try:
                self._connection.receive_many_datagrams(list(datagrams), address, now)
            except (QuicConnectionError, ValueError, AssertionError) as error:
                self.close(f"qh3 gave up: {error}")
            self._take_events()

    def datagrams(self, now: float) -> list[tuple[bytes, Address]]:
        """Return what is to be sent, and where to."""
        try:
            return list(self._connection.datagrams_to_send(now))
        except QuicConnectionError as error:
            self._over(f"qh3 gave up: {error}")
            return []

    def due(self) -> float:
        """Return when `tick` has to be called."""
        timer = self._connection.get_timer()
        return self._ping_at if timer is None else min(timer, self._ping_at)

    def tick(self, now: float) -> None:
        """Do what is due."""
        timer = self._connection.get_timer()
        try:
            if timer is not None and timer <= now:
                self._connection.handle_timer(now)
            if self._ping_at <= now:
                self._ping_at = now + QUIC_KEEPALIVE_SECONDS
                if self.is_open and not self.is_over:
                    self._pings += 1
                    self._connection.send_ping(self._pings)
        except QuicConnectionError as error:
            self._over(f"qh3 gave up: {error}")
        self._take_events()

    def awaits_answer(self, now: float) -> bool:
        """Tell whether something was sent that the other end has not acknowledged."""
        return not self.is_over and self._connection.should_wait_for_ack(now)

    # Bytes

    def room(self) -> int:
        """Return how many bytes may be written now."""
        if not self.is_open or self.is_over or self.has_said_end:
            return 0
        allowed = self._limits.limit - self._written
        if allowed <= 0:
            return 0
        return max(0, min(allowed, CORE_UNSENT_BYTES - self._connection.get_send_buffer_size(self._out)))

    def write(self, data: bytes | memoryview) -> None:
        """Send bytes, at most as many as there is `room` for."""
        self._written += len(data)
        self._say(self._out, data)

    def end(self) -> None:
        """Say that no more bytes follow."""
        if self.is_open and not self.is_over and not self.has_said_end:
            self.has_said_end = True
            self._say(self._out, b"", is_last=True)

    def read(self) -> bytes | None:
        """Return the next bytes that have arrived; None if there are none."""
        return self._unread.popleft() if self._unread else None

    def consumed(self, count: int) -> None:
        """Let the other end send so many bytes more, now that they are used."""
        self._taken += count
        self._grant()

    def proved(self) -> None:
        """Use the whole window: the other end has proved the key."""
        self._window = QUIC_WINDOW_BYTES
        self._grant()

    def close(self, error: str = "") -> None:
        """End the connection, and tell the other end: in order, or because of an error."""
        if not self.is_over:
            with contextlib.suppress(QuicConnectionError):
                self._connection.close(REFUSED if error else 0, None, error)
            self._over(error)

    def fail(self, error: str) -> None:
        """Note that the connection cannot be used any more, and call nothing of it."""
        self._over(error)

    # What arrives

    def _take_events(self) -> None:
        while (event := self._connection.next_event()) is not None:
            match event:
                case events.StreamDataReceived():
                    self._arrive(event)
                case events.HandshakeCompleted():
                    self.is_open = True
                    self._grant()
                case events.ConnectionIdIssued(cid):
                    self.ids.add(cid)
                case events.ConnectionIdRetired(cid):
                    self.ids.discard(cid)
                case events.ConnectionTerminated(code, _, reason):
                    self._over("" if not code and self.is_open else reason or "the other end cut the connection")
                case events.StreamReset() | events.StopSendingReceived() | events.DatagramFrameReceived():
                    self.close("the other end sent what no covey sends")

    def _arrive(self, event: events.StreamDataReceived) -> None:
        if self.is_over:
            return
        if event.stream_id == self._in:
            self._arrived += len(event.data)
            if self._arrived > self._granted:
                self.close("the other end sent more than it may")
                return
            if event.data:
                self._unread.append(event.data)
            if event.end_stream and not self.has_heard_end:
                self.has_heard_end = True
                self._say(self._out_limits, b"", is_last=True)
        elif event.stream_id == self._in_limits:
            try:
                self._limits.feed(event.data)
            except RemoteProtocolError as error:
                self.close(str(error))
                return
            if event.end_stream:
                self.is_delivered = self.has_said_end
        else:
            self.close("the other end opened a stream that no covey opens")

    def _grant(self) -> None:
        limit = self._taken + self._window
        if self.is_open and not self.is_over and not self.has_heard_end and limit - self._granted >= self._window >> 2:
            self._granted = limit
            self._say(self._out_limits, quic.limit_bytes(limit))

    def _say(self, stream: int, data: bytes | memoryview, *, is_last: bool = False) -> None:
        try:
            self._connection.send_stream_data(stream, data, is_last)
        except QuicConnectionError:  # qh3 tells a moment later that the other end has closed the connection
            self._over("the other end has closed the connection")

    def _over(self, error: str) -> None:
        if not self.is_over:
            self.is_over, self.error = True, error


def dial(configuration: QuicConfiguration, cid: bytes, address: Address, now: float) -> Carrier:
    """Begin a connection; `cid` proves the door's key to the process at `address`."""
    connection = QuicConnection(configuration=configuration)
    connection.host_cid = cid
    connection.connect(address, now)
    return Carrier(connection, is_dialler=True, is_proved=True, now=now)


def accept(configuration: QuicConfiguration, original: bytes, chosen: bytes, now: float) -> Carrier:
    """Prepare for a connection whose first datagrams went to `original`, and whose next one went to `chosen`."""
    connection = QuicConnection(
        configuration=configuration, original_destination_connection_id=original, retry_source_connection_id=chosen
    )
    carrier = Carrier(connection, is_dialler=False, is_proved=False, now=now)
    carrier.ids.add(chosen)
    return carrier
