"""Links: authenticated connections that carry control messages in frames. On the control loop only."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from typing import TYPE_CHECKING, Final

from covey.base.errors import AuthError, ConnectError, CoveyError, RemoteProtocolError
from covey.net.host import tcp
from covey.net.host.descriptors import track
from covey.runtime.links.sockets import RelayedSocket
from covey.wire import messages
from covey.wire.decoding import CONTROL_LIMIT, Framer, SkippedMessageError, UnknownMessageError, frame
from covey.wire.versions import OURS, Agreement, Speaker, agree, unknown_message

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from covey.net.keys.tls import Channel, Credentials

GAP_SECONDS: Final = 1.5
"""Peers are pinged after half a second: a link on which nothing arrives for so long has lost its path, or its peer."""
ROOM_BYTES: Final = 1 << 16
"""A link has room for more while it holds less than this, so that a message does not wait long for those before it."""
BACKLOG_LIMIT: Final = 1 << 20
"""Bytes queued for a peer that does not read; beyond this, what is sent to it is dropped."""
UNREAD_LIMIT: Final = 256
"""Frames that may wait before `attach`; then reading pauses."""
UNNAMED: Final = Speaker("", "")
"""An end of a link before the greeting."""
HANDSHAKE_SECONDS: Final = 5.0
"""How long each step of a handshake may take: TLS, then Hello and Welcome."""


class Link(asyncio.Protocol):
    """One connection. Frames wait until `attach` names a receiver, or `receive` takes them one by one."""

    def __init__(self, sock: socket.socket, channel: Channel | None) -> None:
        self.address = self.local_ip = self.remote_ip = ""
        """The other end's address, and the IP addresses of both ends, for messages to users."""
        with contextlib.suppress(OSError, IndexError, TypeError):  # a unix socket has no such names
            self.local_ip, self.remote_ip = plain_ip(sock.getsockname()[0]), plain_ip(sock.getpeername()[0])
            self.address = f"{self.remote_ip}:{sock.getpeername()[1]}"
        self.relay = self.address if isinstance(sock, RelayedSocket) else ""
        """The address of the relay that the connection goes through; then `address` and `remote_ip` are the relay's."""
        self.here = self.there = UNNAMED
        """The two ends, as they introduced themselves."""
        self.agreed = Agreement(OURS.newest)
        """What the two ends speak; what concerns a run is said in what all its members speak (`Node.speaks`)."""
        self.ended = asyncio.Event()
        self.heard_at = time.monotonic()
        """When something arrived last."""
        self.steady_since = self.heard_at
        """Since when there was no gap of GAP_SECONDS."""
        self._sock, self._channel = sock, channel
        self._framer = Framer(CONTROL_LIMIT)
        self._frames: collections.deque[bytes] = collections.deque()
        self._arrived = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._error: BaseException | None = None
        self._on_frame: Callable[[bytes], None] | None = None
        self._on_end: Callable[[], None] | None = None
        self._on_room: Callable[[], None] | None = None
        self._wake: Callable[[], None] | None = None
        """Opens another link with the same node; set while this one rests."""
        self._waiting: list[bytes] = []
        """What was sent while this link rested, for the link that replaces it."""

    @classmethod
    async def plain(cls, sock: socket.socket) -> Link:
        """Take over a connected socket whose other end is already authenticated."""
        return await cls(sock, None)._open()

    @classmethod
    async def dialled(cls, sock: socket.socket, channel: Channel) -> tuple[Link, bytes]:
        """Finish the TLS handshake whose ClientHello `channel` made and was sent; return the link and the peer's id.

        The peer may still refuse: only its first frame tells. If this raises, the socket is closed.

        Raises:
            AuthError: the other side is not of this cluster.
            ConnectError: the connection broke.
        """
        return await cls._secured(sock, channel, b"")

    @classmethod
    async def accepted(cls, sock: socket.socket, credentials: Credentials, hello: bytes) -> tuple[Link, bytes]:
        """Answer the TLS handshake that begins with `hello`. If this raises, the socket is closed.

        Raises:
            AuthError: the other side is not of this cluster.
            ConnectError: the connection broke.
        """
        from covey.net.keys.tls import Channel  # slow to load, and of no use to ranks of one host

        return await cls._secured(sock, Channel(credentials, dialled=False), hello)

    @classmethod
    async def _secured(cls, sock: socket.socket, channel: Channel, data: bytes) -> tuple[Link, bytes]:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await _shake_hands(sock, channel, data)
            peer = channel.peer_id()
        except BaseException as error:
            with contextlib.suppress(OSError):
                sock.send(channel.farewell())
            sock.close()
            if isinstance(error, OSError):
                raise ConnectError(f"no TLS handshake: {error or 'no answer in time'}") from error
            raise
        return await cls(sock, channel)._open(), peer

    async def _open(self) -> Link:
        """Give the socket to a transport, which owns it from here on whatever happens."""
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: self, sock=track(self._sock))
        except BaseException:
            self.abort()
            raise
        if self._channel is not None:
            self.data_received(b"")  # what came with the end of the handshake
        return self

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=ROOM_BYTES)

    def data_received(self, data: bytes) -> None:
        if isinstance(self._error, CoveyError):
            return  # after a protocol error nothing more is read
        now = time.monotonic()
        if now > self.heard_at + GAP_SECONDS:
            self.steady_since = now
        self.heard_at = now
        try:
            if self._channel is not None:
                data = self._channel.decrypt(data)
            self._frames.extend(self._framer.feed(data))
            self._deliver()
        except UnknownMessageError as error:
            self._refuse(unknown_message(self.here, self.there, str(error)))
        except CoveyError as error:
            self._error = error
            self._frames.clear()
            self.abort()

    def connection_lost(self, error: BaseException | None) -> None:
        if error is not None and self._error is None:
            self._error = error
            # A write failed, perhaps before the peer's last messages were read, which say why it left.
            with contextlib.suppress(OSError):
                while data := self._sock.recv(1 << 16):
                    self.data_received(data)
        self._deliver()
        if self.is_resting:
            self._channel = None
            return
        self.ended.set()
        self._arrived.set()
        if self._on_end is not None:
            self._on_end()

    def resume_writing(self) -> None:
        """Tell the owner that there is room again: the transport calls this when it holds little."""
        if self._on_room is not None:
            self._on_room()

    def _deliver(self) -> None:
        if self._on_frame is not None:
            while self._frames:
                with contextlib.suppress(SkippedMessageError):  # a later release does without an answer to it
                    self._on_frame(self._frames.popleft())
        elif self._frames:
            self._arrived.set()
            if len(self._frames) > UNREAD_LIMIT and self._transport is not None:
                self._transport.pause_reading()

    def _refuse(self, reason: str) -> None:
        """End the link, because the other end sent what this one does not know; tell it so."""
        self._frames.clear()
        self.send(messages.encode(messages.Refusal(reason, retry=False)))
        self._error = RemoteProtocolError(reason)
        self.close()
        asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, self.abort)  # if the other end does not read

    # What the owner calls

    def introduce(self, here: Speaker, there: Speaker) -> None:
        """Note what the two ends have said of themselves; they can talk to each other."""
        agreed = agree(here.versions, there.versions)
        assert isinstance(agreed, Agreement)
        self.here, self.there, self.agreed = here, there, agreed

    @property
    def is_open(self) -> bool:
        """Whether something can still be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_resting(self) -> bool:
        """Whether both ends have agreed to do without the connection until there is something to send."""
        return self._wake is not None

    @property
    def error(self) -> BaseException | None:
        """What broke the link, if it was not closed in order."""
        return self._error

    async def receive(self) -> bytes:
        """Return the next frame; only before `attach`.

        Raises:
            AuthError: the other side rejected this node's certificate.
            ConnectError: the link ended.
        """
        while not self._frames:
            if self.ended.is_set():
                if isinstance(self._error, AuthError):
                    raise self._error
                raise ConnectError(f"the connection ended in the greeting: {self._error or 'closed'}")
            self._arrived.clear()
            await self._arrived.wait()
        return self._frames.popleft()

    async def receive_message(self) -> messages.Control:
        """Return the next message; only before `attach`. Raises what `receive` and `decode_control` raise."""
        while True:
            body = await self.receive()
            with contextlib.suppress(SkippedMessageError):
                return messages.decode_control(body)

    def attach(
        self,
        on_frame: Callable[[bytes], None],
        on_end: Callable[[], None],
        on_room: Callable[[], None] | None = None,
    ) -> None:
        """Pass every frame, waiting ones first, to `on_frame`; call `on_end` once, when the link ends.

        A CoveyError from `on_frame` means that the peer broke the protocol, and ends the link; a SkippedMessageError,
        that the frame is not for this release. `on_room` is called when `has_room` is true again.
        """
        self._on_frame, self._on_end, self._on_room = on_frame, on_end, on_room
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self.data_received(b"")
        if self.ended.is_set():
            on_end()

    def catch_up(self) -> None:
        """Read and deliver what has already arrived: a process may have sent it just before it exited."""
        if self._transport is None or self._transport.is_closing():
            return
        with contextlib.suppress(OSError):
            while data := self._sock.recv(1 << 16):
                self.data_received(data)

    @property
    def has_room(self) -> bool:
        """Whether the link takes more now, and will not drop it."""
        if self.is_resting:
            return sum(map(len, self._waiting)) <= BACKLOG_LIMIT
        return self._transport is not None and self._transport.get_write_buffer_size() <= ROOM_BYTES

    def send(self, body: bytes, *, wakes: bool = True) -> None:
        """Send a frame. Returns at once; the frame is dropped if the link has ended or the peer does not read.

        If the link rests, the frame wakes it, or is dropped if it is not worth that.
        """
        if self.is_resting:
            if wakes:
                self._keep(body)
            return
        transport = self._transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size() > BACKLOG_LIMIT:
            return
        data = frame(body)
        transport.write(data if self._channel is None else self._channel.encrypt(data))

    def acknowledged_seconds_ago(self) -> float | None:
        """Return how long ago the other machine's kernel acknowledged something; None if the system does not tell.

        A relay acknowledges for itself, which tells nothing about the machine behind it.
        """
        known = None if self.relay or self.is_resting else tcp.acknowledgements(self._sock)
        return None if known is None else known.seconds_ago

    # Resting

    def rest(self, wake: Callable[[], None], *, closes: bool) -> None:
        """Send nothing more on the connection, though the link does not count as ended.

        What is sent from now on waits for another link with the same node: `wake` is called for the first message.
        The end that `closes` closes the connection; the other end goes on reading until then.
        """
        if closes:
            self.close()
        self._wake = wake

    def _keep(self, body: bytes) -> None:
        assert self._wake is not None
        if sum(map(len, self._waiting)) <= BACKLOG_LIMIT:
            self._waiting.append(body)
        if len(self._waiting) == 1:
            self._wake()

    @property
    def has_waiting(self) -> bool:
        """Whether something was sent while this link rested, and is not on its way yet."""
        return bool(self._waiting)

    def replaced(self) -> list[bytes]:
        """Return what was sent while this link rested: another link has replaced it, which sends that."""
        self.catch_up()  # the other end may have sent something before it closed the connection
        waiting, self._waiting, self._on_end = self._waiting, [], None
        self.abort()
        return waiting

    def give_up(self) -> None:
        """End, though the connection has been closed before: this link rested, and cannot be replaced."""
        on_end, self._on_end = self._on_end, None
        self._wake, self._waiting = None, []
        self.abort()
        self.ended.set()
        if on_end is not None:
            on_end()

    def close(self) -> None:
        """Close once everything is sent."""
        if self.is_resting:
            self.ended.set()
        if self._transport is not None:
            if self._channel is not None and not self._transport.is_closing():
                self._transport.write(self._channel.farewell())
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()


async def _shake_hands(sock: socket.socket, channel: Channel, data: bytes) -> None:
    """Finish a TLS handshake; `data` is what the other side has sent of it so far."""
    loop = asyncio.get_running_loop()
    while True:
        if not data:
            data = await loop.sock_recv(sock, 1 << 16)
            if not data:
                raise ConnectionResetError("closed by the other side")
        if answer := channel.shake(data):
            await loop.sock_sendall(sock, answer)
        if channel.is_done:
            return
        data = b""


def plain_ip(ip: str) -> str:
    """Return an address without its scope, and an IPv4 address on an IPv6 socket in IPv4 form."""
    return ip.partition("%")[0].removeprefix("::ffff:")
