"""Lanes that survive their connections, for the executor in Python: their streams are `lasting.LastingSocket`.

The executor's thread and the control loop take turns under a lock. `net.lanes.native` has the same for the compiled
executor.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from covey.net.lanes.lane import Incoming, LaneClosedError, Outgoing
from covey.net.lanes.lasting import LastingSocket, LeftConnections
from covey.net.lanes.sealed import SealedLane
from covey.net.lanes.stream import StreamLane, prepare
from covey.net.lanes.striped import StripedLane

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

SLEEP_SECONDS: Final = 0.005
"""Between looks whether a stream goes on, which no descriptor tells."""


class _Lasting:
    """What the control loop does with the streams of a lane."""

    is_resumable = True
    _lock: Any
    _streams: list[LastingSocket]
    _is_closed = False
    _left: LeftConnections

    def _last(self, socks: Sequence[socket.socket], directs: Sequence[bool]) -> Any:
        """Make the streams of the lane, which stand in for its sockets."""
        self._left = LeftConnections()
        pairs = zip(socks, directs, strict=True)
        self._streams = [LastingSocket(sock, is_direct=is_direct) for sock, is_direct in pairs]
        return self._streams

    def sockets(self) -> Sequence[socket.socket]:
        """Return the connections."""
        return [stream.connection for stream in self._streams]

    @property
    def is_closed(self) -> bool:
        """Whether the lane was closed."""
        return self._is_closed

    def broken(self) -> list[int]:
        """Return the streams that wait for a connection."""
        return [number for number, stream in enumerate(self._streams) if stream.is_broken]

    def freeze(self, stream: int) -> None:
        """Use the connection of a stream no more, and count none of its acknowledgements."""
        with self._lock:
            self._streams[stream].freeze()

    def leave(self, stream: int) -> int:
        """Take what the connection of a frozen stream still has; return how many bytes the stream has brought.

        Raises:
            MemoryError: that is too much.
        """
        with self._lock:
            return self._streams[stream].received if self._is_closed else self._streams[stream].drain()

    def attach(self, stream: int, sock: socket.socket, position: int, *, is_direct: bool) -> bool:
        """Go on with a frozen stream from this position, on a connection that the lane owns from now on.

        Returns False, and takes nothing, if the lane was closed, or if what the other end expects is not kept.
        """
        prepare(sock)
        with self._lock:
            before = self._streams[stream].connection
            if self._is_closed or not self._streams[stream].attach(sock, position, is_direct=is_direct):
                return False
            self._attached(sock)
            self._left.add(before)
        return True

    def _attached(self, sock: socket.socket) -> None:
        """Wake a thread that polls several connections."""

    def push(self) -> bool:
        """Send again what is needed and can be sent; return whether there is more of it."""
        with self._lock, contextlib.suppress(LaneClosedError):
            for stream in self._streams:
                if not self._is_closed:
                    stream.flush()
            return not self._is_closed and any(each.has_unsent and not each.is_broken for each in self._streams)
        return False

    def acknowledge(self, stream: int, position: int) -> bool:
        """Note that the other end has all bytes of a stream before this position; return False if it cannot have."""
        with self._lock:
            return self._streams[stream].acknowledge(position)

    def received(self, stream: int) -> int:
        """Return how many bytes a stream has brought, on all connections."""
        return self._streams[stream].received

    def end(self, why: str) -> None:
        """Let the lane end, instead of waiting for another connection."""
        with self._lock:
            for stream in self._streams:
                stream.end(why)

    def shutdown(self, how: int) -> None:
        """End the connections."""
        for stream in self._streams:
            stream.shutdown(how)


class ResumableStreamLane(_Lasting, StreamLane):
    """A plain lane whose stream goes on over other connections."""

    def __init__(self, sock: socket.socket, kind: str, *, directs: Sequence[bool]) -> None:
        """See StreamLane; `directs` tells whether the connection is direct (`lasting.LastingSocket`)."""
        self._lock = threading.Lock()
        super().__init__(self._last([sock], directs)[0], kind)

    def transmit(self, out: Outgoing) -> bool:
        with self._lock:
            return super().transmit(out)

    def receive(self, incoming: Incoming) -> bool:
        with self._lock:
            return super().receive(incoming)

    def park(self, *, sending: bool, receiving: bool) -> int:
        with self._lock:
            stream = self._streams[0]
            if receiving and stream.has_spill:
                return 0
            waits = stream.is_broken or (sending and stream.is_full)
        if waits:
            time.sleep(SLEEP_SECONDS)
            return 0
        return super().park(sending=sending, receiving=receiving)

    def peek(self) -> bytes:
        with self._lock:
            return super().peek()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._left.close()
            super().close()


class ResumableSealedLane(_Lasting, SealedLane):
    """A sealed lane whose streams go on over other connections."""

    def __init__(
        self,
        socks: Sequence[socket.socket],
        secret: bytes,
        lane: bytes,
        *,
        dialler: bool,
        directs: Sequence[bool],
        kind: str = "secure",
    ) -> None:
        """See SealedLane; `directs` tells of each connection whether it is direct (`lasting.LastingSocket`)."""
        self._lock = threading.Lock()
        super().__init__(self._last(socks, directs), secret, lane, dialler=dialler, kind=kind)

    def transmit(self, out: Outgoing) -> bool:
        with self._lock:
            return super().transmit(out)

    def receive(self, incoming: Incoming) -> bool:
        with self._lock:
            return super().receive(incoming)

    def park(self, *, sending: bool, receiving: bool) -> int:
        with self._lock:
            stream = self._streams[self._in_turn]
            if receiving and stream.has_spill:
                return 0
            waits = receiving and stream.is_broken
            waits = waits or (sending and not any(pipe.wants_to_send for pipe in self._pipes))
            events = 0 if waits else super().park(sending=sending, receiving=receiving)
        if waits:
            time.sleep(SLEEP_SECONDS)
        return events

    def _attached(self, sock: socket.socket) -> None:
        if self._readiness is not None:  # it can send
            self._readiness.ask([], [sock])

    def peek(self) -> bytes:
        with self._lock, contextlib.suppress(LaneClosedError):
            return super().peek()
        return b""

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._left.close()
            super().close()


class ResumableStripedLane(_Lasting, StripedLane):
    """A striped lane whose streams go on over other connections, if all of them have broken."""

    def __init__(
        self, socks: Sequence[socket.socket], secret: bytes, lane: bytes, *, dialler: bool, directs: Sequence[bool]
    ) -> None:
        """See StripedLane; `directs` tells of each connection whether it is direct (`lasting.LastingSocket`)."""
        super().__init__(self._last(socks, directs), secret, lane, dialler=dialler)

    def _attached(self, sock: socket.socket) -> None:
        self._readiness.ask([], [sock])

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._left.close()
            super().close()
