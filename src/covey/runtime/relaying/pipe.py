"""Copies bytes between two connections, in both directions, within the budget of the relay. On the loop of a relay.

A direction holds at most one piece that the receiving side has not taken; until it has, nothing more is read. So a slow
receiver slows its sender down, and a pipe needs a bounded amount of memory. The budget is in bytes a second of all
pipes together.
"""

from __future__ import annotations

import asyncio
import collections
import math
import socket
from typing import TYPE_CHECKING, Final

from covey.net.host import tcp

if TYPE_CHECKING:
    from collections.abc import Callable


BURST_SECONDS: Final = 0.1
"""Bytes of so much time may be copied at once."""
LEAST_BURST: Final = 1 << 16
LEAST_RELAY_PAUSE: Final = 0.005


class Throttle:
    """A budget of bytes. A pipe that finds it empty is called back when it is not, in the order of asking."""

    def __init__(self, rate: float = math.inf) -> None:
        """`rate` is in bytes a second."""
        self._rate = rate
        self._burst = max(LEAST_BURST, rate * BURST_SECONDS)
        self._left, self._at = self._burst, -math.inf
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._timer: asyncio.TimerHandle | None = None

    def allowed(self, most: int, *, in_turn: bool = False) -> int:
        """Return how many bytes may be copied now, at most `most`; 0 if the budget is empty.

        While others wait, it is 0 except for the one that is called back, `in_turn`.
        """
        if self._rate == math.inf:
            return most
        self._refill()
        return max(0, min(most, int(self._left))) if in_turn or not self._waiting else 0

    def spend(self, count: int) -> None:
        """Note that bytes were copied."""
        self._left -= count

    def wait(self, resume: Callable[[], None]) -> None:
        """Call `resume` once when it is its turn and there is budget."""
        self._waiting.append(resume)
        self._set_timer()

    def forget(self, resume: Callable[[], None]) -> None:
        """Do not call `resume` any more."""
        self._waiting = collections.deque(each for each in self._waiting if each != resume)

    def close(self) -> None:
        """Call nothing any more."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refill(self) -> None:
        now = asyncio.get_running_loop().time()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate) if self._at > 0 else self._left
        self._at = now

    def _set_timer(self) -> None:
        if self._waiting and self._timer is None:
            pause = max(LEAST_RELAY_PAUSE, (LEAST_BURST / 4 - self._left) / self._rate)
            self._timer = asyncio.get_running_loop().call_later(pause, self._turn)

    def _turn(self) -> None:
        """Let those that wait go on while there is budget; each copies something, and may wait again."""
        self._timer = None
        self._refill()
        for _ in range(len(self._waiting)):
            if self._left < 1 or not self._waiting:
                break
            self._waiting.popleft()()
        self._set_timer()


RELAYED_PIECE_BYTES: Final = 1 << 18
"""Bytes that are read at a time."""
DEAD_SECONDS: Final = 5.0
"""A connection that is stuck, and whose other end has acknowledged nothing for so long, is closed with the one that it
is joined with. The kernel alone would try for a quarter of an hour. A receiver that does not read is not stuck: its
kernel acknowledges."""

_scratch = memoryview(bytearray(RELAYED_PIECE_BYTES))
"""What is read goes on at once; only what is left is copied."""


class _Direction:
    """What goes from one connection to the other."""

    __slots__ = ("rest", "resume", "source", "target")

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source, self.target = source, target
        self.rest = memoryview(b"")
        """What was read, and not taken by the target yet."""
        self.resume: Callable[[], None] = lambda: None
        """Reads on after a wait for the throttle."""


class Pipe:
    """Two connections that are joined; owns both."""

    def __init__(
        self, one: socket.socket, other: socket.socket, throttle: Throttle, ended: Callable[[Pipe], None]
    ) -> None:
        """Begin to copy; `ended` is called once, when both connections are closed."""
        self._loop, self._throttle, self._ended = asyncio.get_running_loop(), throttle, ended
        self.socks = (one, other)
        self.copied = 0
        """Bytes in both directions."""
        self.active_at = self._loop.time()
        """When something was last copied."""
        self._is_closed = False
        self._directions = {sock: _Direction(sock, peer) for sock, peer in ((one, other), (other, one))}
        """By source; a direction that has ended is not in it."""
        for direction in list(self._directions.values()):
            direction.source.setblocking(False)
            direction.resume = self._resumed(direction)
            self._loop.add_reader(direction.source, self._read, direction)

    def close(self) -> None:
        """Close both connections. Closing twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        for direction in self._directions.values():
            self._throttle.forget(direction.resume)
        self._directions.clear()
        for sock in self.socks:
            self._loop.remove_reader(sock)
            self._loop.remove_writer(sock)
            sock.close()
        self._ended(self)

    def is_stuck(self) -> bool:
        """Tell whether the path to one of the two sides is dead."""
        known = (tcp.acknowledgements(sock) for sock in self.socks)
        return any(each is not None and each.is_stuck and each.seconds_ago >= DEAD_SECONDS for each in known)

    def _resumed(self, direction: _Direction) -> Callable[[], None]:
        def resume() -> None:
            self._loop.add_reader(direction.source, self._read, direction)
            self._read(direction, waited=True)

        return resume

    def _read(self, direction: _Direction, *, waited: bool = False) -> None:
        most = self._throttle.allowed(RELAYED_PIECE_BYTES, in_turn=waited)
        if not most:
            self._loop.remove_reader(direction.source)
            self._throttle.wait(direction.resume)
            return
        try:
            count = direction.source.recv_into(_scratch[:most])
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        if not count:
            self._end(direction)
            return
        self._throttle.spend(count)
        self.copied += count
        self.active_at = self._loop.time()
        try:
            sent = direction.target.send(_scratch[:count])
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close()
            return
        if sent < count:
            direction.rest = memoryview(bytes(_scratch[sent:count]))
            self._loop.remove_reader(direction.source)
            self._loop.add_writer(direction.target, self._write, direction)

    def _write(self, direction: _Direction) -> None:
        try:
            direction.rest = direction.rest[direction.target.send(direction.rest) :]
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        self.active_at = self._loop.time()
        if not direction.rest:
            self._loop.remove_writer(direction.target)
            self._loop.add_reader(direction.source, self._read, direction)

    def _end(self, direction: _Direction) -> None:
        """Pass on that a side sends nothing more; close the pipe when neither does."""
        self._loop.remove_reader(direction.source)
        del self._directions[direction.source]
        if not self._directions:
            self.close()
            return
        try:
            direction.target.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()
