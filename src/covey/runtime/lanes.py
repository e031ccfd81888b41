"""Opening the lanes of groups: who dials, what is agreed, and who waits for it.

A lane is asked for by any thread and opened on the control loop. The higher rank of a pair dials, whoever needs the
lane; the lower one asks it to.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ClosedError, ConfigError, ConnectError, CoveyError, DeadlineError
from covey.net import memory, shm
from covey.net.descriptors import track
from covey.net.ring import RingLane, memory_bytes
from covey.net.stream import StreamLane
from covey.runtime import loop as control
from covey.runtime.greet import GREETING_SECONDS, RefusedError, dial, receive_exactly
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.net.lane import Lane
    from covey.runtime.node import Node, Peer

logger = logging.getLogger("covey")

LARGE_RING_BYTES: Final = 2 << 20
SMALL_RING_BYTES: Final = 128 << 10
LARGE_RINGS_TOTAL_BYTES: Final = 64 << 20
"""Rings are large until a process has this much of them; programs with dozens of groups get small ones after that."""
LANES_LIMIT: Final = 100_000
CLOSED_GROUPS_KEPT: Final = 10_000
PURPOSES: Final = ("collectives", "messages")

LaneKey = tuple[int, int, str]
"""Group, rank of the peer in the run, purpose."""


class Lanes:
    """The lanes of one node, open or on their way."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._lanes: dict[LaneKey, Future[Any]] = {}
        self._dialling: set[LaneKey] = set()
        self._closed_groups: dict[int, int] = {}
        """Groups that were closed, and the last operation of each."""

    # For groups, on any thread

    def kind(self, peer: int) -> str:
        """Return the lane that this pair will use, from facts that both ends know."""
        forced = self._node.config.lanes
        contact = self._node.peers[peer].contact
        here = contact is not None and contact.host == self._node.host
        if forced == "memory" or (forced in ("shm", "unix") and here):
            return forced
        if forced in ("shm", "unix"):
            raise ConfigError(f"lanes={forced!r} works on one host only, but rank {peer} is on another")
        if forced == "tcp" or not here:
            return "tcp"
        return "shm" if shm.usable() else "unix"

    def open(self, group: int, peer: int, purpose: str, timeout: float) -> Any:
        """Return the lane (for collectives) or the socket (for messages) to `peer`, opened if need be.

        Raises:
            ConnectError: the peer is gone or said no.
            DeadlineError: it did not open in time; ask again to go on waiting.
        """
        future = self._request((group, peer, purpose))
        try:
            return future.result(timeout)
        except TimeoutError:
            raise DeadlineError(f"no lane to rank {peer} after {timeout:g} s", late=(peer,)) from None

    def _request(self, key: LaneKey) -> Future[Any]:
        group, peer, purpose = key
        with self._lock:
            future = self._lanes.get(key)
            if future is not None and future.done():
                return future
            if future is None:
                future = self._lanes[key] = Future()
        if self._node.rank > peer:
            control.soon(self.dial, key)
        else:
            self._node.tell((peer,), messages.Dial(group, purpose))
        if self._node.peers[peer].gone:
            self._failed(key, ConnectError(f"rank {peer} is gone"))
        return future

    def arrived(self, group: int, purpose: str) -> list[int]:
        """Return the peers whose lane of a group is open."""
        with self._lock:
            return [
                peer for (of, peer, why), lane in self._lanes.items() if (of, why) == (group, purpose) and lane.done()
            ]

    def ended(self, group: int, sequence: int) -> bool:
        """Tell whether a group was closed here without taking part in operation `sequence`."""
        return self._closed_groups.get(group, sequence) < sequence

    def forget(self, group: int, sequence: int) -> None:
        """Close what is left of a group's lanes; later ones are refused."""
        with self._lock:
            self._closed_groups[group] = sequence
            while len(self._closed_groups) > CLOSED_GROUPS_KEPT:
                del self._closed_groups[next(iter(self._closed_groups))]
            futures = [self._lanes.pop(key) for key in [key for key in self._lanes if key[0] == group]]
        for future in futures:
            _close_future(future)

    def abandon(self, unwanted: Callable[[LaneKey], bool], error: BaseException) -> None:
        """Wake everyone who waits for a lane that will not come."""
        with self._lock:
            keys = [key for key, future in self._lanes.items() if unwanted(key) and not future.done()]
        for key in keys:
            self._failed(key, error)

    def close(self) -> None:
        """Close all lanes."""
        with self._lock:
            futures, self._lanes = list(self._lanes.values()), {}
        for future in futures:
            _close_future(future)

    # Dialling, on the control loop

    def dial(self, key: LaneKey) -> bool:
        """Start to open a lane, unless it is open or being opened; False if its group was closed here."""
        if key[2] not in PURPOSES or key[0] in self._closed_groups or self._node.is_closing:
            return False
        future = self._lanes.get(key)
        if key not in self._dialling and (future is None or not future.done()):
            self._dialling.add(key)
            self._node.spawn(self._dial(key))
        return True

    async def _dial(self, key: LaneKey) -> None:
        group, rank, purpose = key
        peer = self._node.peers[rank]
        try:
            kind = self.kind(rank)
            if purpose == "messages" and kind == "shm":
                kind = "unix"
            while True:
                try:
                    self._opened(key, await self._connect(peer, group, purpose, kind))
                    return
                except (ConnectError, TimeoutError):
                    if peer.gone or self._node.is_closing:
                        raise
                    await asyncio.sleep(0.02)  # a full backlog, or out of descriptors
        except CoveyError as error:
            self._failed(key, error)
        except (RefusedError, OSError) as error:
            self._failed(key, ConnectError(f"rank {rank}: {error}"))
        finally:
            self._dialling.discard(key)

    async def _connect(self, peer: Peer, group: int, purpose: str, kind: str) -> Any:
        capacity = 0
        segment: Any = None
        descriptor, name = -1, ""
        if purpose == "collectives" and kind in ("shm", "memory"):
            capacity = self._next_ring_bytes()
            try:
                if kind == "shm":
                    descriptor, segment = shm.create(memory_bytes(capacity))
                else:
                    name, segment = memory.offer(memory_bytes(capacity))
            except OSError as error:
                logger.warning("no shared memory for the lane to rank %d (%s); using a unix socket", peer.rank, error)
                kind, capacity = "unix", 0
        try:
            hello = self._node.hello(purpose, group=group, lane=kind, capacity=capacity)
            sock, _ = await dial(self._node.way_to(peer, kind), self._node.token, hello)
            track(sock)
            try:
                if segment is not None:
                    await _hand_over(sock, descriptor, name, segment)
                    return RingLane(segment, capacity, sock, first=True, kind=kind)
            except BaseException:
                sock.close()
                raise
        finally:
            memory.take(name)  # if the peer has not
            if descriptor >= 0:
                os.close(descriptor)
        return sock if purpose == "messages" else StreamLane(sock, kind)

    def _next_ring_bytes(self) -> int:
        with self._lock:
            opened = [future.result() for future in self._lanes.values() if future.done() and not future.exception()]
        in_use = sum(2 * lane.capacity for lane in opened if isinstance(lane, RingLane))
        return LARGE_RING_BYTES if in_use + 2 * LARGE_RING_BYTES <= LARGE_RINGS_TOTAL_BYTES else SMALL_RING_BYTES

    # Being dialled, on the control loop

    def objection(self, hello: messages.Hello) -> str:
        """Return why a proven Hello cannot have the lane it asks for, or nothing."""
        peer = self._node.peers[hello.rank]
        if hello.purpose not in PURPOSES or hello.life != peer.life or peer.gone:
            return f"rank {hello.rank} is not the one that joined"
        if hello.group in self._closed_groups:
            return f"rank {self._node.rank} has closed the group"
        future = self._lanes.get((hello.group, hello.rank, hello.purpose))
        if (future is not None and future.done()) or len(self._lanes) > LANES_LIMIT:
            return "this lane is open already"
        return ""

    async def accept(self, hello: messages.Hello, sock: socket.socket) -> None:
        """Finish opening a lane that a welcomed peer dialled."""
        async with asyncio.timeout(GREETING_SECONDS):
            lane = await self._take_over(hello, sock)
        self._opened((hello.group, hello.rank, hello.purpose), lane)

    async def _take_over(self, hello: messages.Hello, sock: socket.socket) -> Any:
        if not hello.capacity:
            return sock if hello.purpose == "messages" else StreamLane(sock, hello.lane)
        if hello.capacity not in (LARGE_RING_BYTES, SMALL_RING_BYTES):
            raise ConnectError(f"rank {hello.rank} offers a ring of {hello.capacity} bytes")
        nbytes = memory_bytes(hello.capacity)
        segment: Any
        if hello.lane == "shm":
            await _readable(sock)
            _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
            if len(descriptors) != 1:
                raise ConnectError(f"rank {hello.rank} sent no shared memory")
            segment = shm.attach(descriptors[0], nbytes)
        else:
            segment = memory.take((await receive_exactly(sock, 32)).decode("ascii", "replace"))
            if segment is None or len(segment) != nbytes:
                raise ConnectError(f"rank {hello.rank} is not a thread of this process")
        word = bytes(memoryview(segment).cast("B")[-32:])
        await asyncio.get_running_loop().sock_sendall(sock, word)
        return RingLane(segment, hello.capacity, sock, first=False, kind=hello.lane)

    # How it ended

    def _opened(self, key: LaneKey, lane: Any) -> None:
        with self._lock:
            future = self._lanes.setdefault(key, Future())
            if not future.done() and not self._node.is_closing and key[0] not in self._closed_groups:
                future.set_result(lane)
                lane = None
        if lane is not None:
            lane.close()
        else:
            self._node.lane_arrived(key)

    def _failed(self, key: LaneKey, error: BaseException) -> None:
        with self._lock:
            future = self._lanes.get(key)
            if future is not None and not future.done():
                future.set_exception(error)


async def _hand_over(sock: socket.socket, descriptor: int, name: str, segment: Any) -> None:
    """Give the peer our segment, and see a random word of ours come back out of it."""
    word = secrets.token_bytes(32)
    memoryview(segment).cast("B")[-32:] = word
    if descriptor >= 0:
        socket.send_fds(sock, [b"\0"], [descriptor])
    else:
        await asyncio.get_running_loop().sock_sendall(sock, name.encode())
    async with asyncio.timeout(GREETING_SECONDS):
        if await receive_exactly(sock, 32) != word:
            raise ConnectError("the peer does not see the memory it was given")


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


def _close_future(future: Future[Lane | socket.socket]) -> None:
    """Close the lane that a future holds, or end the wait of those who wait for it."""
    if not future.done():
        future.set_exception(ClosedError("the group was closed"))
    elif future.exception() is None:
        future.result().close()
