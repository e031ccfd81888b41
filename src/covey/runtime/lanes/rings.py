"""Opens lanes that are two rings in memory which both ends see: of processes of one host, or threads of one process.

The dialling end makes the memory, and hands it over on the connection; that connection stays as the lane's doorbell.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConfigError, ConnectError
from covey.base.native import native
from covey.net.host.descriptors import ScarceError, explain
from covey.net.lanes import shm
from covey.net.lanes.ring import memory_bytes
from covey.runtime.lanes.opener import LaneOpener, Prepared
from covey.runtime.links.handshake import receive_exactly
from covey.runtime.links.link import HANDSHAKE_SECONDS

if TYPE_CHECKING:
    from covey.base.config import GroupConfig
    from covey.runtime.lanes.opener import Directs
    from covey.wire import messages

SMALL_RING_BYTES: Final = 128 << 10
WORD_BYTES: Final = 32
"""What the accepting end reads out of the memory and says, so that the dialling end knows that both see the same."""
MEMORY_NAME_BYTES: Final = 32
"""The name under which one thread offers memory to another."""


class _OfferedMemory(Prepared):
    """Memory for a lane that is being offered."""

    def __init__(self, capacity: int, segment: Any, *, descriptor: int = -1, name: str = "") -> None:
        self.capacity, self.segment, self.descriptor, self.name = capacity, segment, descriptor, name

    def release(self) -> None:
        shm.take(self.name)  # if the other end has not taken it
        if self.descriptor >= 0:
            os.close(self.descriptor)


class _Rings(LaneOpener):
    """What both kinds have in common. Offers without rings, for messages, are lanes of the connection alone."""

    def capacities(self, config: GroupConfig) -> tuple[int, ...]:
        return config.ring_bytes, min(config.ring_bytes, SMALL_RING_BYTES)

    async def dialled(
        self, prepared: Prepared, socks: list[socket.socket], offer: messages.Offer, directs: Directs
    ) -> Any:
        """Hand the memory over. Raises ConnectError if the other end hangs up, or does not see the memory."""
        if not isinstance(prepared, _OfferedMemory):
            return socks[0]
        (sock,), segment = socks, prepared.segment
        word = secrets.token_bytes(WORD_BYTES)
        memoryview(segment).cast("B")[-WORD_BYTES:] = word
        try:
            await self._hand_over(sock, prepared)
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                answer = await receive_exactly(sock, WORD_BYTES)
        except ConnectionError as error:
            raise ConnectError(f"the peer hung up on the lane: {error}") from error
        if answer != word:
            raise ConnectError("the peer does not see the memory it was given")
        return self._lane(segment, sock, offer, first=True)

    async def accepted(self, socks: list[socket.socket], offer: messages.Offer, directs: Directs) -> Any:
        """Take the memory that the other end hands over. Raises ConnectError if it hands over none."""
        if not offer.capacity:
            return socks[0]
        (sock,) = socks
        segment = await self._take_over(sock, memory_bytes(offer.capacity))
        word = bytes(memoryview(segment).cast("B")[-WORD_BYTES:])
        await asyncio.get_running_loop().sock_sendall(sock, word)
        return self._lane(segment, sock, offer, first=False)

    def _lane(self, segment: Any, sock: socket.socket, offer: messages.Offer, *, first: bool) -> Any:
        factory = self._end.factory
        if offer.purpose == "messages":
            return factory.ring_socket(segment, offer.capacity, sock, first=first)
        return factory.ring(segment, offer.capacity, sock, first=first, kind=offer.kind)

    async def _hand_over(self, sock: socket.socket, memory: _OfferedMemory) -> None:
        raise NotImplementedError

    async def _take_over(self, sock: socket.socket, nbytes: int) -> Any:
        raise NotImplementedError


class SharedRings(_Rings):
    """Opens lanes through memory that two processes share."""

    @classmethod
    def check(cls, config: GroupConfig) -> None:
        if obstacle := shm.obstacle_here(is_native=native().module is not None):
            raise ConfigError(f"lanes='shm': {obstacle}; use unix or auto")

    def obstacle(self) -> str:
        return self._end.factory.ring_obstacle

    def carries(self, purpose: str) -> bool:
        return purpose != "messages" or shm.keeps_order()  # Python moves some of their bytes

    def prepare(self, capacity: int) -> Prepared:
        try:
            descriptor, segment = shm.create(memory_bytes(capacity))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # a lane over a socket would need one, too
                raise ScarceError(explain(error)) from error
            raise
        return _OfferedMemory(capacity, segment, descriptor=descriptor)

    async def _hand_over(self, sock: socket.socket, memory: _OfferedMemory) -> None:
        socket.send_fds(sock, [b"\0"], [memory.descriptor])

    async def _take_over(self, sock: socket.socket, nbytes: int) -> Any:
        await readable(sock)
        _, received, flags, _ = socket.recv_fds(sock, 1, 1)
        if len(received) != 1 and flags & socket.MSG_CTRUNC:  # it was sent, and has no room in this process
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if len(received) != 1:
            raise ConnectError("the peer sent no shared memory")
        return shm.attach(received[0], nbytes)


class ThreadRings(_Rings):
    """Opens lanes through memory of one process."""

    def prepare(self, capacity: int) -> Prepared:
        name, segment = shm.offer(memory_bytes(capacity))
        return _OfferedMemory(capacity, segment, name=name)

    async def _hand_over(self, sock: socket.socket, memory: _OfferedMemory) -> None:
        await asyncio.get_running_loop().sock_sendall(sock, memory.name.encode())

    async def _take_over(self, sock: socket.socket, nbytes: int) -> Any:
        segment = shm.take((await receive_exactly(sock, MEMORY_NAME_BYTES)).decode("ascii", "replace"))
        if segment is None or len(segment) != nbytes:
            raise ConnectError("the peer is not a thread of this process")
        return segment


async def readable(sock: socket.socket) -> None:
    """Return once a socket has something to read."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)
