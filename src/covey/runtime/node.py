"""One process in a run: who the others are, a control connection to each, and which groups there are.

Everything that touches a control connection happens on the control loop; other threads ask for it by `soon` or wait
for a future. The higher rank of a pair dials.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, Protocol

from covey.base.errors import AuthError, ConfigError, ConnectError, CoveyError, DeadlineError
from covey.net.descriptors import track
from covey.net.meeting import check_peer
from covey.runtime import loop as control
from covey.runtime.greet import HungUpError, RefusedError, accept, dial
from covey.runtime.lanes import Lanes
from covey.wire import messages
from covey.wire.frame import CONTROL_LIMIT, Framer, frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from covey.base.config import GroupConfig
    from covey.runtime.lanes import LaneKey

logger = logging.getLogger("covey")

GREETINGS_AT_ONCE: Final = 64
"""Connections that may be proving the token at the same time. Members take a millisecond, so when a stranger too many
comes, the one who has been at it for longest has to go."""
HANG_UPS: Final = 5
"""Times in a row that a rank is hung up on before it believes that its token is wrong, and that nobody died."""
BACKLOG_LIMIT: Final = 1 << 20
"""Control bytes queued for a peer that does not read; beyond this, questions to it are dropped."""


class Member(Protocol):
    """A group, as its node sees it. Called on the control loop; `peer` is a rank of the run."""

    def heard(self, peer: int, message: messages.Announce | messages.Position | messages.Revoke) -> None: ...

    def peer_gone(self, peer: int, *, left: bool) -> None: ...

    def lane_arrived(self, peer: int, purpose: str) -> None: ...

    def forked(self) -> None: ...

    def close(self) -> None: ...


class Peer:
    """What is known of another rank of the run."""

    def __init__(self, rank: int, contact: messages.Contact | None) -> None:
        self.rank = rank
        self.contact = contact
        self.life = b""
        self.host_name = ""
        self.pid = 0
        self.connection: _Control | None = None
        self.ready = False
        self.left = False
        self.gone = False


class Node:
    """This process's place in a run of `size` ranks."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        run: str,
        token: bytes,
        host: str,
        config: GroupConfig,
        listeners: Iterable[socket.socket],
        socket_path: str,
        address: tuple[str, int] | None,
        contacts: dict[int, messages.Contact],
        on_close: Callable[[], None],
    ) -> None:
        """Take ownership of `listeners`; `contacts` of ranks that are missing come from rank 0's roster."""
        self.rank, self.size, self.run, self.config = rank, size, run, config
        self.host = host
        self.host_name = socket.gethostname()
        self.life = secrets.token_bytes(16)
        self.token = token
        self._listeners = [track(listener) for listener in listeners]
        self._socket_path, self._address = socket_path, address
        self._on_close = on_close
        self.peers = {peer: Peer(peer, contacts.get(peer)) for peer in range(size) if peer != rank}
        self._groups: weakref.WeakValueDictionary[int, Member] = weakref.WeakValueDictionary()
        self.lanes = Lanes(self)
        self._lock = threading.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._greetings: dict[socket.socket, asyncio.Task[None]] = {}
        self.turned_away = 0
        self._refused_at = 0.0
        self._formed: asyncio.Future[None] | None = None
        self._complaint: CoveyError | None = None
        self._refusal = ""
        self.is_closing = False
        _nodes.add(self)

    # Forming

    def form(self, timeout: float) -> None:
        """Return once every rank is connected to every other and knows it.

        Raises:
            DeadlineError: some did not come in time; says which.
            ConfigError: another rank has other settings.
        """
        try:
            control.start(self._form(within=timeout)).result()
        except BaseException:
            self.close()
            raise

    async def _form(self, *, within: float) -> None:
        self._formed = asyncio.get_running_loop().create_future()
        for listener in self._listeners:
            self._listen(listener)
        for peer in self.peers.values():
            if peer.rank < self.rank and peer.contact is not None:
                self.spawn(self._dial_control(peer))
        self.spawn(self._tell_who_is_missing())
        try:
            async with asyncio.timeout(within):
                await self._formed
        except TimeoutError:
            missing = ", ".join(map(str, self._missing()))
            raise DeadlineError(
                f"rank {self.rank} of {self.size} waited {within:g} s in {self.run} for rank {missing}. "
                f"Is it running, and with the same job id or MASTER_ADDR and MASTER_PORT?{self._refusal}",
                late=tuple(self._missing()),
            ) from None

    def _missing(self) -> list[int]:
        return [peer.rank for peer in self.peers.values() if not peer.ready]

    async def _tell_who_is_missing(self) -> None:
        for pause in (5.0, *(30.0,) * 1000):
            await asyncio.sleep(pause)
            if self._formed is None or self._formed.done():
                return
            logger.warning("rank %d of %d waits in %s for rank %s", self.rank, self.size, self.run,
                           ", ".join(map(str, self._missing())))  # fmt: skip

    def _settle(self) -> None:
        """Take the next step of forming that is possible now."""
        assert self._formed is not None
        if self._formed.done():
            return
        if self._complaint is not None:
            self._formed.set_exception(self._complaint)
            return
        connected = all(peer.connection is not None or peer.ready for peer in self.peers.values())
        if self.rank == 0 and connected:
            contacts = [self._own_contact(), *(self.peers[rank].contact for rank in range(1, self.size))]
            self._send_all(messages.Roster(tuple(contact for contact in contacts if contact is not None)))
        if connected:
            self._send_all(messages.Ready())
        if connected and not self._missing():
            self._formed.set_result(None)

    def _own_contact(self) -> messages.Contact:
        return messages.Contact(self.host, self._address, self._socket_path)

    async def _dial_control(self, peer: Peer) -> None:
        pause, hang_ups = 0.005, 0
        while peer.connection is None and not peer.ready and not self.is_closing:
            try:
                sock, welcome = await dial(self.way_to(peer), self.token, self.hello("control"))
            except HungUpError as error:
                hang_ups += 1
                if hang_ups == HANG_UPS:
                    self._complain(AuthError(str(error)))
                    return
            except (ConnectError, TimeoutError):
                hang_ups = 0  # not there yet
            except RefusedError as error:
                self._refusal = f" Rank {peer.rank} says: {error}."
                if not error.retry:
                    self._complain(ConfigError(f"rank {peer.rank} refused this rank: {error}"))
                    return
            except CoveyError as error:
                self._complain(error)
                return
            else:
                await self._connected(peer, sock, welcome)
                return
            await asyncio.sleep(pause)
            pause = min(0.1, pause * 1.5)

    def _complain(self, error: CoveyError) -> None:
        self._complaint = self._complaint or error
        self._settle()

    async def _connected(self, peer: Peer, sock: socket.socket, who: messages.Hello | messages.Welcome) -> None:
        peer.life, peer.host_name, peer.pid = who.life, who.host_name, who.pid
        peer.contact = messages.Contact(who.host, who.address, who.socket)
        connection = _Control(self, peer, sock)
        peer.connection = connection
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=track(sock))
        self._settle()

    # Connections that others open

    def _take_connection(self, listener: socket.socket) -> None:
        """Someone connected: start greeting."""
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # out of descriptors, most likely: let some go before looking again
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(0.1, self._listen, listener)
            return
        sock.setblocking(False)
        self._greetings[sock] = self.spawn(self._greet(track(sock)))
        if len(self._greetings) > GREETINGS_AT_ONCE:
            oldest = next(iter(self._greetings))
            self._greetings.pop(oldest).cancel()
            self._turn_away(ConnectError(f"more than {GREETINGS_AT_ONCE} were waiting to prove the token"))

    def _listen(self, listener: socket.socket) -> None:
        if not self.is_closing:
            asyncio.get_running_loop().add_reader(listener, self._take_connection, listener)

    async def _greet(self, sock: socket.socket) -> None:
        try:
            if sock.family == socket.AF_UNIX:
                check_peer(sock)
            hello = await accept(sock, self.token, self._judge)
        except (OSError, TimeoutError, CoveyError) as error:
            sock.close()
            self._turn_away(error)
            return
        except BaseException:
            sock.close()
            raise
        finally:
            self._greetings.pop(sock, None)
        if hello is None:
            sock.close()
            return
        peer = self.peers[hello.rank]
        if hello.purpose == "control":
            try:
                await self._connected(peer, sock, hello)
            except BaseException:
                sock.close()
                raise
            return
        try:
            await self.lanes.accept(hello, sock)
        except (OSError, TimeoutError, CoveyError) as error:
            sock.close()
            self._turn_away(error)
        except BaseException:
            sock.close()
            raise

    def _turn_away(self, error: BaseException) -> None:
        self.turned_away += 1
        if time.monotonic() > self._refused_at + 10:  # a flood of strangers must not become a flood of lines
            self._refused_at = time.monotonic()
            logger.info("%s turned a connection away: %s", self.run, error or type(error).__name__)

    def _judge(self, hello: messages.Hello) -> messages.Welcome | messages.Refusal:
        welcome = messages.Welcome(
            self.rank, self.life, self.host, self.host_name, os.getpid(), self._address, self._socket_path
        )
        if hello.version != messages.VERSION:
            return self._refuse(f"it speaks version {hello.version}, this rank {messages.VERSION}")
        if hello.purpose == "control":
            for what, here, there in (
                ("run", self.run, hello.run),
                ("size", self.size, hello.size),
                ("lanes", self.config.lanes, hello.lanes),
            ):
                if here != there:
                    reason = f"{what} is {there!r} on rank {hello.rank} and {here!r} on rank {self.rank}"
                    self._complain(ConfigError(f"{reason}; start all ranks with the same settings"))
                    return messages.Refusal(reason, retry=False)
        peer = self.peers.get(hello.rank)
        if peer is None or hello.rank < self.rank:
            return self._refuse(f"rank {hello.rank} has no business dialling rank {self.rank}")
        if hello.purpose == "control":
            if peer.connection is not None or peer.ready:
                return messages.Refusal(f"rank {hello.rank} is already here (process {peer.pid})", retry=True)
            return welcome
        reason = self.lanes.objection(hello)
        return self._refuse(reason) if reason else welcome

    def _refuse(self, reason: str) -> messages.Refusal:
        return messages.Refusal(reason, retry=False)

    # Groups

    def register(self, group_id: int, group: Member) -> None:
        """Let `group` hear what is said about it from now on."""
        with self._lock:
            self._groups[group_id] = group

    def groups(self) -> list[Member]:
        """Return the groups that are open."""
        return list(self._groups.values())

    def forget(self, group_id: int, sequence: int) -> None:
        """Close what is left of a group, of which `sequence` was the last operation; refuse new lanes for it."""
        with self._lock:
            self._groups.pop(group_id, None)
        self.lanes.forget(group_id, sequence)

    def lane_arrived(self, key: LaneKey) -> None:
        """Tell the group, if it exists already, that a lane is open."""
        group = self._groups.get(key[0])
        if group is not None:
            group.lane_arrived(key[1], key[2])

    def tell(self, peers: Iterable[int], message: messages.Control) -> None:
        """Send a control message to some ranks of the run. Returns at once; the dead are skipped."""
        control.soon(self._send_each, tuple(peers), message)

    def _send_each(self, peers: tuple[int, ...], message: messages.Control) -> None:
        for peer in peers:
            self._send(peer, message)

    def _send_all(self, message: messages.Control) -> None:
        self._send_each(tuple(self.peers), message)

    def _send(self, peer: int, message: messages.Control) -> None:
        connection = self.peers[peer].connection
        if connection is not None:
            connection.send(message)

    # What arrives on control connections

    def _heard(self, peer: Peer, message: messages.Control) -> None:
        match message:
            case messages.Ready():
                peer.ready = True
                self._settle()
            case messages.Roster(contacts):
                if peer.rank != 0 or len(contacts) != self.size:
                    return
                for other in self.peers.values():
                    if other.contact is None:
                        other.contact = contacts[other.rank]
                        if other.rank < self.rank:
                            self.spawn(self._dial_control(other))
            case messages.Goodbye():
                peer.left = True
            case messages.Dial(group, purpose):
                if self.rank > peer.rank and not self.lanes.dial((group, peer.rank, purpose)):
                    self._send(peer.rank, messages.NoLane(group, purpose))
            case messages.NoLane(group, purpose):
                error = ConnectError(f"rank {peer.rank} has closed the group")
                self.lanes.abandon(lambda key: key == (group, peer.rank, purpose), error)
            case messages.Announce() | messages.Position() | messages.Revoke():
                member = self._groups.get(message.group)
                if member is not None:
                    member.heard(peer.rank, message)
                elif isinstance(message, messages.Announce) and self.lanes.ended(message.group, message.sequence):
                    text = f"rank {self.rank} of the run has closed the group"
                    self._send(peer.rank, messages.Revoke(message.group, "PeerLostError", text, ()))

    def _lost(self, peer: Peer) -> None:
        peer.connection = None
        if self.is_closing:
            return
        if not peer.ready:  # it never saw the run formed, so it may come again
            if peer.rank < self.rank:
                self.spawn(self._dial_control(peer))
            return
        peer.gone = True
        self.lanes.abandon(lambda key: key[1] == peer.rank, ConnectError(f"rank {peer.rank} is gone"))
        for group in list(self._groups.values()):
            group.peer_gone(peer.rank, left=peer.left)

    # Small things

    def way_to(self, peer: Peer, kind: str = "") -> str | tuple[str, int]:
        """Return where to dial `peer`: a unix socket on one host, unless the lane is to be TCP."""
        contact = peer.contact
        assert contact is not None
        if contact.socket and contact.host == self.host and kind != "tcp":
            return contact.socket
        if contact.address is None:
            raise ConfigError(f"rank {peer.rank} has no address that can be dialled from here")
        return contact.address

    def hello(self, purpose: str, **lane: Any) -> messages.Hello:
        """Return how this rank introduces itself."""
        return messages.Hello(
            version=messages.VERSION,
            nonce=secrets.token_bytes(32),
            run=self.run,
            rank=self.rank,
            size=self.size,
            life=self.life,
            purpose=purpose,
            host=self.host,
            host_name=self.host_name,
            pid=os.getpid(),
            lanes=self.config.lanes,
            address=self._address,
            socket=self._socket_path,
            **lane,
        )

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run a coroutine for as long as the node lives. On the control loop only."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a control task of %s failed", self.run, exc_info=error)

    def close(self) -> None:
        """Say goodbye and free everything. Closing twice is fine."""
        if self.is_closing:
            return
        self.is_closing = True
        with contextlib.suppress(TimeoutError):
            control.start(self._close()).result(2.0)
        self.lanes.close()
        _nodes.discard(self)
        self._on_close()

    async def _close(self) -> None:
        connections = [peer.connection for peer in self.peers.values() if peer.connection is not None]
        for connection in connections:
            connection.leave()
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sock in list(self._greetings):  # a greeting that was cancelled before it began could not close its own
            sock.close()
        async with asyncio.timeout(1.0):
            await asyncio.gather(*(connection.ended.wait() for connection in connections))

    def forked(self) -> None:
        """This process is a fork of the one that joined: nothing here may be used again."""
        self.is_closing = True
        for group in list(self._groups.values()):
            group.forked()


class _Control(asyncio.Protocol):
    """One control connection."""

    def __init__(self, node: Node, peer: Peer, sock: socket.socket) -> None:
        self._node, self._peer, self._sock = node, peer, sock
        self._framer = Framer(CONTROL_LIMIT)
        self._transport: asyncio.Transport | None = None
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._framer.feed(data):
                self._node._heard(self._peer, messages.decode_control(body))
        except CoveyError as error:
            logger.warning("rank %d sent nonsense and is cut off: %s", self._peer.rank, error)
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, error: BaseException | None) -> None:
        if error is not None:  # a write failed, perhaps before the peer's last words were read: why it left
            with contextlib.suppress(OSError):
                while data := self._sock.recv(1 << 16):
                    self.data_received(data)
        self.ended.set()
        if self._peer.connection is self:
            self._node._lost(self._peer)

    def send(self, message: messages.Control) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size() > BACKLOG_LIMIT:
            return
        transport.write(frame(messages.encode(message)))

    def leave(self) -> None:
        """Say goodbye, and close once it is sent."""
        self.send(messages.Goodbye())
        if self._transport is not None:
            self._transport.close()


_nodes: weakref.WeakSet[Node] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for node in list(_nodes):
        node.forked()
    _nodes.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
