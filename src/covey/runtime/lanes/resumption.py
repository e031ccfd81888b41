"""Keeps lanes between machines alive when their connections die: opens others, over any path. On the control loop.

Lanes of a run with `on_loss="raise"` are resumable (`net.lanes.lasting`), whatever their kind; with `"continue"`, a
lane that breaks is opened anew by the operation's next attempt. Both ends look at their streams. The end of a pair that
dials opens another connection for a stream that has broken, or gets nothing through; the other end asks it to
(`StreamNews`). A striped lane needs one only if all its streams are dead. The connection proves the key of the lane, as
its first ones did, and then

    dialler  -> acceptor  lane, stream | RESUME_BIT, HMAC(secret, "dial", lane, stream, number), number
    acceptor -> dialler   its position, HMAC(secret, "accept", lane, stream, number, its position)
    dialler  -> acceptor  its position, HMAC(secret, "go", lane, stream, number, its position)

A position is how many bytes of the stream an end has received. The number grows with each try, and an end takes no
number twice: a recorded try opens nothing. Each end freezes its stream before the other one says its position, so that
nothing is forgotten that is still needed.

Behind a relay and with QUIC, an end tells the other on their link how many bytes it has (`StreamNews`): relays, and the
sockets in front of QUIC, acknowledge for themselves.

A stream without a path ends its lane after the silence in which health gives a process up, and the time
that relays have: `process_silence` + `UNLINKED_SECONDS`. If the other end has closed the lane, it says so on the link.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import struct
import time
from dataclasses import dataclass, field
from socket import AF_UNIX, SO_LINGER, SOL_SOCKET
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConfigError, ConnectError
from covey.base.lane_kinds import LANE_KINDS
from covey.base.pace import Growing
from covey.net.lanes.stream import dead_streams
from covey.runtime.links.sockets import RelayedSocket, receive_exactly, relay_of
from covey.runtime.views.losses import UNLINKED_SECONDS
from covey.wire import door, messages

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from covey.base.config import GroupConfig
    from covey.base.numbers import Seat
    from covey.runtime.lanes.connections import LaneConnections
    from covey.runtime.peers.peer_table import PeerTable
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.tasks import Tasks

logger = logging.getLogger("covey")

TEND_SECONDS: Final = 0.1
"""How often the streams are looked at, and how often an end tells what it has received if the kernel does not."""
TRY_SECONDS: Final = 3.0
"""How long one try may take: a relay needs several round trips."""
RESUMPTION_PAUSES: Final = Growing(0.05, 0.5, 1.5)
"""Between tries."""
RESUMPTION_ASK_EVERY: Final = 0.5
"""How often the end that does not dial asks for a connection."""
HEARD_SECONDS: Final = 1.0
"""A link is heard if something came so recently: twice the time after which a quiet peer is pinged."""
STEADY_LINK_SECONDS: Final = 3.0
"""A link that was heard for so long without a gap had a path while nothing got through on a lane."""
PUSH_SECONDS: Final = 0.01
"""How often a stream that was resumed is given more of what is to be sent again."""
RESUME_BIT: Final = 0x80
"""Set in the number of a stream: the connection is for one that exists."""
NUMBER_BYTES: Final = 8


@dataclass
class _Stream:
    """One stream of a lane."""

    number: int = 0
    """Number of the last try, of either end."""
    dead_since: float | None = None
    task: asyncio.Task[None] | None = None
    asked_at: float = 0.0
    told: int = 0
    """What the other end was told that this one has."""


@dataclass
class _LastingLane:
    """One end of a resumable lane."""

    lane: Any
    peer: Seat
    group: int
    id: bytes
    secret: bytes
    path: tuple[str, str] | None
    """The addresses of both ends of the link when the last connection was made."""
    udp_port: int
    """Where the other end accepts QUIC; 0 if that is not known, or if the lane goes by TCP."""
    streams: list[_Stream] = field(default_factory=list)


class LaneResumption:
    """The resumable lanes of one process."""

    def __init__(
        self,
        config: GroupConfig,
        peers: PeerTable,
        tasks: Tasks,
        connections: LaneConnections,
        *,
        leave_path: Callable[[Seat], None],
        tell: Callable[[str, RemoteProcess, str], None],
    ) -> None:
        """`leave_path` avoids the path of the lanes with a peer; `tell` adds an event about a peer."""
        self._config, self._peers, self._tasks, self._connections = config, peers, tasks, connections
        self._avoid_path, self._tell_of = leave_path, tell
        self._lanes: dict[bytes, _LastingLane] = {}
        self._is_tending = False

    def is_wanted(self, peer: Seat, kind: str) -> bool:
        """Tell whether lanes for collectives of this kind with a peer are resumable. Equal at both ends."""
        is_far = self._peers[peer].contact is not None and not self._peers.is_here(peer)
        return is_far and LANE_KINDS[kind].is_resumable and self._config.on_loss == "raise"

    def watch(self, lane: Any, peer: Seat, offer: messages.Offer, udp_port: int) -> None:
        """Look after a lane until it is closed; the peer accepts QUIC at `udp_port`, if this end has dialled it."""
        streams = [_Stream() for _ in lane.sockets()]
        self._lanes[offer.lane] = _LastingLane(
            lane, peer, offer.group, offer.lane, offer.secret, self._path_to(peer), udp_port, streams
        )
        if not self._is_tending:
            self._is_tending = True
            self._tasks.spawn(self._tend())

    def is_resuming(self, lane: Any) -> bool:
        """Tell whether some stream of a lane waits for a connection."""
        return any(
            each.lane is lane and any(stream.dead_since is not None for stream in each.streams)
            for each in self._lanes.values()
        )

    async def _tend(self) -> None:
        try:
            while self._lanes and not self._tasks.is_closing:
                for each in list(self._lanes.values()):
                    if each.lane.is_closed:
                        del self._lanes[each.id]
                    else:
                        self._look(each, time.monotonic())
                await asyncio.sleep(TEND_SECONDS)
        finally:
            self._is_tending = False

    def _look(self, watched: _LastingLane, now: float) -> None:
        lane, dead = watched.lane, dead_streams(watched.lane, has_moved=self._has_moved(watched))
        for index, stream in enumerate(watched.streams):
            if index not in dead:
                stream.dead_since = None
                if (received := lane.received(index)) != stream.told and not is_direct(lane.sockets()[index]):
                    stream.told = received
                    self._tell(watched, index, "received", received)
                continue
            if stream.dead_since is None:
                stream.dead_since = now
                logger.info("%s: a connection of a lane has died", self._name(watched))
                if index not in lane.broken() and self._peers[watched.peer].is_dialled:
                    self._leave_path(watched.peer)
            if now >= stream.dead_since + self._config.process_silence + UNLINKED_SECONDS:
                lane.end("the connection broke, and there is no other path")
            elif self._peers[watched.peer].is_dialled:
                self._begin(watched, index)
            elif now >= stream.asked_at + RESUMPTION_ASK_EVERY:
                stream.asked_at = now
                self._tell(watched, index, "dial", self._own_port(watched))

    def _leave_path(self, seat: Seat) -> None:
        """Avoid the path of lanes on which nothing gets through though the link is heard: it swallows long packets.

        If the link is silent, too, or was a moment ago, its path may be dead, or was: the first address that answers is
        good.
        """
        link, now = self._peers[seat].link, time.monotonic()
        if link is not None and now < link.heard_at + HEARD_SECONDS and now > link.steady_since + STEADY_LINK_SECONDS:
            self._avoid_path(seat)

    def _own_port(self, watched: _LastingLane) -> int:
        """Return where this end accepts QUIC, if the lane goes by QUIC."""
        with contextlib.suppress(ConfigError, OSError):
            return self._connections.own_port(watched.lane.kind)
        return 0

    def _tell(self, watched: _LastingLane, stream: int, what: str, position: int) -> None:
        self._peers.send(watched.peer, messages.StreamNews(watched.id, stream, what, position))

    def heard(self, seat: Seat, news: messages.StreamNews) -> None:
        """Take what the other end of a lane says of a stream."""
        watched = self._lanes.get(news.lane)
        if watched is not None and (watched.peer != seat or news.stream >= len(watched.streams)):
            return
        if watched is None or watched.lane.is_closed:
            if news.what in ("dial", "check"):
                self._peers.send(seat, messages.StreamNews(news.lane, news.stream, "gone", 0))
        elif news.what == "received":
            watched.lane.acknowledge(news.stream, news.position)
        elif news.what == "gone":
            watched.lane.end("the other end has closed it")
        elif news.what == "dial":
            stream = watched.streams[news.stream]
            watched.udp_port = news.position or watched.udp_port
            if stream.dead_since is None:  # the path may be dead in one direction only
                stream.dead_since = time.monotonic()
                self._leave_path(seat)
            self._begin(watched, news.stream, is_asked=True)

    # The end that dials

    def _begin(self, watched: _LastingLane, stream: int, *, is_asked: bool = False) -> None:
        state = watched.streams[stream]
        if state.task is None or state.task.done():
            state.task = self._tasks.spawn(self._dial(watched, stream, is_asked=is_asked))

    async def _dial(self, watched: _LastingLane, stream: int, *, is_asked: bool) -> None:
        """Try to open another connection for a stream, until it has one."""
        state, tries = watched.streams[stream], 0
        while self._is_needed(watched, stream, is_asked=is_asked):
            try:
                peer, kind = self._peers[watched.peer], watched.lane.kind
                prove = functools.partial(self._resume, watched, stream, is_asked=is_asked)
                async with asyncio.timeout(TRY_SECONDS):
                    await self._connections.dial(peer, kind, prove, udp_port=watched.udp_port)
                return
            except ConfigError as error:
                logger.info("%s: %s", self._name(watched), error)
            except MemoryError:
                watched.lane.end("there is no memory for what a broken connection still has")
            except (ConnectError, OSError, TimeoutError) as error:
                logger.info("%s: no other connection for a lane: %s", self._name(watched), error or "no answer")
                self._tell(watched, stream, "check", 0)
            tries += 1
            # Both ends may dial, and then one of them has to be the first.
            await asyncio.sleep(RESUMPTION_PAUSES.after(tries) * random.uniform(0.5, 1.0))
            state.number += 2**tries  # the other end may have tried more often

    def _is_needed(self, watched: _LastingLane, stream: int, *, is_asked: bool) -> bool:
        lane, peer = watched.lane, self._peers[watched.peer]
        if lane.is_closed or peer.is_gone or self._tasks.is_closing or self._lanes.get(watched.id) is not watched:
            return False
        return is_asked or stream in dead_streams(lane, has_moved=self._has_moved(watched))

    async def _resume(self, watched: _LastingLane, stream: int, sock: socket.socket, *, is_asked: bool) -> None:
        """Go on with a stream on a connection, unless the stream needs none any more."""
        loop, state = asyncio.get_running_loop(), watched.streams[stream]
        if not self._is_needed(watched, stream, is_asked=is_asked):
            sock.close()
            return
        state.number += 1
        number = state.number
        watched.lane.freeze(stream)
        claim = watched.id + bytes((stream | RESUME_BIT,)) + self._proof(watched, b"dial", stream, number, 0)
        try:
            await loop.sock_sendall(sock, claim + number.to_bytes(NUMBER_BYTES, "big"))
            theirs = await self._position(watched, b"accept", stream, number, sock)
            mine = watched.lane.leave(stream)
            await self._say_position(watched, b"go", stream, number, sock, mine)
            self._attach(watched, stream, number, sock, theirs)
        except BaseException:
            _reset_at_close(sock)
            raise

    # The end that accepts

    def is_claimed(self, stream: int) -> bool:
        """Tell whether a connection that names this stream is for one that exists."""
        return bool(stream & RESUME_BIT)

    async def claim(self, sock: socket.socket, lane: bytes, stream: int, proof: bytes) -> None:
        """Take a connection for a stream that exists; it must prove the lane's key, and be newer than others.

        Raises OSError, TimeoutError or a CoveyError if the claim fails; the caller then closes the socket.
        """
        watched, stream = self._lanes.get(lane), stream & ~RESUME_BIT
        number = int.from_bytes(await receive_exactly(sock, NUMBER_BYTES), "big")
        if watched is None or watched.lane.is_closed or stream >= len(watched.streams):
            raise ConnectError("a connection claimed a stream that does not exist")
        if not door.proofs_equal(proof, self._proof(watched, b"dial", stream, number, 0)):
            raise ConnectError("a connection claimed a stream without its key")
        state = watched.streams[stream]
        if number <= state.number:
            raise ConnectError("a connection claimed a stream that another one has claimed")
        state.number, state.dead_since = number, state.dead_since or time.monotonic()
        watched.lane.freeze(stream)
        mine = watched.lane.leave(stream)
        try:
            await self._say_position(watched, b"accept", stream, number, sock, mine)
            theirs = await self._position(watched, b"go", stream, number, sock)
            self._attach(watched, stream, number, sock, theirs)
        except BaseException:
            _reset_at_close(sock)
            raise

    # Both

    def _attach(self, watched: _LastingLane, stream: int, number: int, sock: socket.socket, position: int) -> None:
        """Go on with a stream on a connection, unless a later one has come; ConnectError then."""
        lane, state = watched.lane, watched.streams[stream]
        if number != state.number or lane.is_closed:
            raise ConnectError("the stream was claimed by another connection in the meantime")
        before = spell_connection(lane.sockets()[stream])
        if not lane.attach(stream, sock, position, is_direct=is_direct(sock)):
            if not lane.is_closed:
                lane.end("the connection broke, and some bytes were acknowledged on the way that never arrived")
            raise ConnectError("the lane does not have what the other end expects")
        state.dead_since, state.told = None, 0
        watched.path = self._path_to(watched.peer)
        self._connections.watch([sock], watched.group, watched.peer)
        text = f"{lane.kind} lane continues over {spell_connection(sock)}" + (f" instead of {before}" if before else "")
        self._tell_of("moved", self._peers[watched.peer], text)
        self._tasks.spawn(self._push(watched))

    async def _push(self, watched: _LastingLane) -> None:
        """Send again what the other end lacks, though no operation may be running here."""
        while not watched.lane.is_closed and watched.lane.push():  # noqa: ASYNC110  (the executor sends some of it)
            await asyncio.sleep(PUSH_SECONDS)

    def _proof(self, watched: _LastingLane, side: bytes, stream: int, number: int, position: int) -> bytes:
        return door.resume_proof(watched.secret, side, watched.id, stream, number, position)

    async def _say_position(
        self, watched: _LastingLane, side: bytes, stream: int, number: int, sock: socket.socket, position: int
    ) -> None:
        said = position.to_bytes(NUMBER_BYTES, "big") + self._proof(watched, side, stream, number, position)
        await asyncio.get_running_loop().sock_sendall(sock, said)

    async def _position(self, watched: _LastingLane, side: bytes, stream: int, number: int, sock: socket.socket) -> int:
        said = await receive_exactly(sock, NUMBER_BYTES + door.PROOF_BYTES)
        position = int.from_bytes(said[:NUMBER_BYTES], "big")
        if not door.proofs_equal(said[NUMBER_BYTES:], self._proof(watched, side, stream, number, position)):
            raise ConnectError(f"the process that answers for {self._name(watched)} does not know the lane's key")
        return position

    def _has_moved(self, watched: _LastingLane) -> bool:
        """Tell whether the link with a peer goes over other addresses than when its last connection was made."""
        now = self._path_to(watched.peer)
        return now is not None and watched.path is not None and now != watched.path

    def _path_to(self, peer: Seat) -> tuple[str, str] | None:
        link = self._peers[peer].link
        return None if link is None else (link.local_ip, link.remote_ip)

    def _name(self, watched: _LastingLane) -> str:
        return self._peers.name_of(watched.peer)


def is_direct(sock: socket.socket) -> bool:
    """Tell whether what the kernel counts as acknowledged on a connection is what the other machine has."""
    return sock.family != AF_UNIX and not isinstance(sock, RelayedSocket)


def spell_connection(sock: socket.socket) -> str:
    """Return the addresses of both ends of a connection, or its relay; empty if they are not known any more."""
    if sock.family == AF_UNIX:
        return str(getattr(sock, "remote_ip", ""))
    with contextlib.suppress(OSError):
        relay = relay_of(sock)
        return f"relay {relay}" if relay else f"{sock.getsockname()[0]} - {sock.getpeername()[0]}"
    return ""


def _reset_at_close(sock: socket.socket) -> None:
    """Let the end of a connection that came to nothing be a reset: the other end may use it already.

    A connection that ends in order ends its lane there.
    """
    with contextlib.suppress(OSError):
        sock.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
