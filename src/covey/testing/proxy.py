"""A TCP proxy on loopback that sits between two nodes and delays, holds, alters, cuts, records and replays.

with Proxy(("127.0.0.1", port)) as proxy:
    proxy.flip_bit(Way.TO_TARGET, byte=1000)
    client = socket.create_connection(proxy.address)
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import enum
import queue
import selectors
import socket
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_CHUNK: Final = 1 << 16
RECORDING_BYTES: Final = 64 << 20
_BACKLOG_BYTES: Final = 4 << 20  # held in each direction before the sender feels it
_PROXY_ANSWER_SECONDS: Final = 30.0


class Direction(enum.Enum):
    """The two directions of a proxied connection."""

    TO_TARGET = "to target"
    TO_CLIENT = "to client"


class Proxy:
    """Forwards every connection to `address` on to `target`, as the controls say.

    Connections are numbered from 0 in the order of their arrival, and so are the bytes of each direction. Controls
    apply to all connections, open and later ones, and to bytes that the proxy has not yet read.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.delay = 0.0
        """Seconds that each byte spends here."""
        self.bytes_per_second = 0.0
        """The limit for each direction of a connection; 0 is no limit."""
        self._flips: dict[Direction, dict[int, int]] = {way: {} for way in Direction}
        self._ends: dict[Direction, int] = {}
        self._swallowed: set[tuple[_Connection, Direction]] = set()
        self._held = False
        self._flips_done = 0
        self._connections: list[_Connection] = []
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def flip_bit(self, way: Direction, byte: int, bit: int = 0) -> None:
        """Flip a bit of byte number `byte` of one direction of every connection."""
        self._call(lambda: self._flips[way].__setitem__(byte, 1 << bit))

    @property
    def flips_done(self) -> int:
        """How many bits were flipped and forwarded."""
        return self._flips_done

    def truncate(self, way: Direction, byte: int) -> None:
        """End every connection, both ways, once `byte` bytes of one direction were forwarded."""
        self._call(lambda: self._ends.__setitem__(way, byte))

    def swallow(self, way: Direction) -> None:
        """Take what comes in one direction of the connections that are open now, and pass it on no more."""
        self._call(lambda: self._swallowed.update((each, way) for each in self._connections if each.is_open))

    def hold(self) -> None:
        """Accept and forward nothing; the kernel still takes connections and bytes, as for a stopped process."""
        self._call(lambda: setattr(self, "_held", True))

    def resume(self) -> None:
        """Continue after `hold`; nothing is lost."""
        self._call(lambda: setattr(self, "_held", False))

    def end_all(self, *, reset: bool = False) -> int:
        """End all open connections on both sides, orderly or by a reset, and return how many there were."""

        def end() -> int:
            ended = [connection for connection in self._connections if connection.is_open]
            for connection in ended:
                connection.end(reset=reset)
            return len(ended)

        return self._call(end)

    def connections(self) -> int:
        """Return how many connections came so far."""
        return self._call(lambda: len(self._connections))

    def recorded(self, connection: int, way: Direction) -> bytes:
        """Return the bytes that arrived in one direction of a connection, unaltered, up to RECORDING_BYTES."""
        return self._call(lambda: bytes(self._connections[connection].pipes[way].record))

    def inject(self, connection: int, way: Direction, data: bytes) -> None:
        """Send forged or recorded bytes into an open connection, after those already read."""
        self._call(lambda: self._connections[connection].pipes[way].put(data, time.monotonic()))

    def replay(self, connection: int) -> socket.socket:
        """Send all that a client sent to the target once more, over a new connection; return that connection.

        The new connection does not pass through the proxy.
        """
        data = self.recorded(connection, Direction.TO_TARGET)
        sock = socket.create_connection(self.target, timeout=_PROXY_ANSWER_SECONDS)
        with contextlib.suppress(ConnectionError):  # the target may close before it has read everything
            sock.sendall(data)
        return sock

    def close(self) -> None:
        """End everything. Closing twice is fine."""
        if self._thread.is_alive():
            self._calls.put(None)
            self._wake.send(b"\0")
            self._thread.join(_PROXY_ANSWER_SECONDS)
        for sock in (self._wake, self._woken, self._listener):
            sock.close()
        self._selector.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, function: Callable[[], T]) -> T:
        """Run `function` on the proxy's thread, between two bytes, and return what it returns."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def call() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._calls.put(call)
        self._wake.send(b"\0")
        return future.result(_PROXY_ANSWER_SECONDS)

    def _run(self) -> None:
        try:
            while self._obey():
                now = time.monotonic()
                self._selector.select(self._watch(now))
                if not self._held:
                    self._accept()
                    for connection in self._connections:
                        self._move(connection, time.monotonic())
        finally:
            for connection in self._connections:
                connection.end()

    def _obey(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(_CHUNK)
        while not self._calls.empty():
            call = self._calls.get()
            if call is None:
                return False
            call()
        return True

    def _watch(self, now: float) -> float | None:
        """Register the sockets that can move bytes; return the seconds until the next timed event."""
        wanted: dict[socket.socket, int] = {self._woken: selectors.EVENT_READ}
        timeout = None
        if not self._held:
            wanted[self._listener] = selectors.EVENT_READ
            for pipe in (pipe for connection in self._connections for pipe in connection.pipes.values()):
                if pipe.wants_bytes:
                    wanted[pipe.source] = wanted.get(pipe.source, 0) | selectors.EVENT_READ
                if pipe.queue and pipe.queue[0][0] <= now:
                    wanted[pipe.sink] = wanted.get(pipe.sink, 0) | selectors.EVENT_WRITE
                elif pipe.queue:
                    timeout = min(timeout or _PROXY_ANSWER_SECONDS, pipe.queue[0][0] - now)
        for key in list(self._selector.get_map().values()):
            if key.fileobj not in wanted:
                self._selector.unregister(key.fileobj)
        for sock, events in wanted.items():
            if sock not in self._selector.get_map():
                self._selector.register(sock, events)
            elif self._selector.get_key(sock).events != events:
                self._selector.modify(sock, events)
        return timeout

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            client, _ = self._listener.accept()
            try:
                target = socket.create_connection(self.target, timeout=_PROXY_ANSWER_SECONDS)
            except OSError:
                client.close()
                return
            self._connections.append(_Connection(client, target))

    def _move(self, connection: _Connection, now: float) -> None:
        for way, pipe in connection.pipes.items():
            if not connection.is_open:
                return
            try:
                pipe.write_due(now)
                if (data := pipe.read()) is None:
                    continue
                at = pipe.taken - len(data)
                if data and (connection, way) in self._swallowed:
                    continue
                data, ends = self._alter(way, at, data)
                pipe.put(data, now, delay=self.delay, bytes_per_second=self.bytes_per_second)
                if ends:
                    pipe.write_all()
                    connection.end()
                else:
                    pipe.write_due(now)
            except OSError:  # one side is gone, and so is the connection
                connection.end(reset=True)
        if all(pipe.is_finished for pipe in connection.pipes.values()):
            connection.end()

    def _alter(self, way: Direction, at: int, data: bytes) -> tuple[bytes, bool]:
        """Return what to forward instead of `data`, which starts at byte number `at`, and whether the stream ends."""
        end = self._ends.get(way)
        ends = end is not None and at + len(data) >= end
        altered = bytearray(data if end is None else data[: max(0, end - at)])
        for byte, mask in self._flips[way].items():
            if at <= byte < at + len(altered):
                altered[byte - at] ^= mask
                self._flips_done += 1
        return bytes(altered), ends


class _ProxyPipe:
    """One direction of a connection: what arrived, and what is still to be sent."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.record = bytearray()
        self.taken = 0
        """Bytes read so far."""
        self.queue: deque[tuple[float, bytes]] = deque()
        self._queued_bytes = 0
        self._free_at = 0.0
        self._ended = False
        self.is_finished = False

    @property
    def wants_bytes(self) -> bool:
        return not self._ended and self._queued_bytes < _BACKLOG_BYTES and self.source.fileno() >= 0

    def read(self) -> bytes | None:
        """Return and record what arrived: b"" at the end, None if there is nothing now."""
        if not self.wants_bytes:
            return None
        try:
            data = self.source.recv(_CHUNK)
        except BlockingIOError:
            return None
        self._ended = not data
        self.taken += len(data)
        self.record += data[: RECORDING_BYTES - len(self.record)]
        return data

    def put(self, data: bytes, now: float, *, delay: float = 0.0, bytes_per_second: float = 0.0) -> None:
        """Queue bytes, or b"" for the end, to be sent when they are due."""
        if bytes_per_second:
            self._free_at = max(self._free_at, now) + len(data) / bytes_per_second
        due = max(now, self._free_at) + delay
        if self.queue:
            due = max(due, self.queue[-1][0])
        self.queue.append((due, data))
        self._queued_bytes += len(data)

    def write_due(self, now: float) -> None:
        """Send what is due, as far as the other side takes it."""
        while self.queue and self.queue[0][0] <= now:
            due, data = self.queue.popleft()
            if not data:
                if self._ended:
                    self.sink.shutdown(socket.SHUT_WR)
                    self.is_finished = True
                continue
            try:
                sent = self.sink.send(data)
            except BlockingIOError:
                sent = 0
            self._queued_bytes -= sent
            if sent < len(data):
                self.queue.appendleft((due, data[sent:]))
                return

    def write_all(self) -> None:
        """Send everything now, whether it is due or not."""
        self.sink.settimeout(_PROXY_ANSWER_SECONDS)
        for _, data in self.queue:
            self.sink.sendall(data)
        self.queue.clear()
        self.sink.setblocking(False)


class _Connection:
    def __init__(self, client: socket.socket, target: socket.socket) -> None:
        self._sockets = client, target
        for sock in self._sockets:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.pipes = {Direction.TO_TARGET: _ProxyPipe(client, target), Direction.TO_CLIENT: _ProxyPipe(target, client)}

    @property
    def is_open(self) -> bool:
        return self._sockets[0].fileno() >= 0

    def end(self, *, reset: bool = False) -> None:
        for sock in self._sockets:
            if reset and sock.fileno() >= 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                while not reset and sock.recv(_CHUNK):  # the kernel resets a connection that is closed unread
                    pass
            sock.close()
        for pipe in self.pipes.values():
            pipe.queue.clear()
