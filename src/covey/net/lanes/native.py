"""Lanes for the compiled executor: Python opens and closes them, `covey._native` moves the bytes.

Each has a `native` part, which the executor uses without the interpreter's lock. The wire format is that of the lanes
in Python, so the other end may be either.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConfigError
from covey.base.native import native
from covey.base.settings import KERNEL_COPY
from covey.net.host import tcp
from covey.net.host.descriptors import track
from covey.net.lanes.lane import LanePath
from covey.net.lanes.lasting import LeftConnections
from covey.net.lanes.ring import RingLane
from covey.net.lanes.stream import SocketLane, close_without_reset, prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


MEMORY_TOKEN_BYTES: Final = 32
"""That the other end reads out of the memory of this process, before it asks for copies by the kernel."""
UNSENT_BYTES: Final = 1 << 18
"""How much the kernel takes of a stream ahead of what it can send, on a lane over several networks.

What it has taken is not given to another stream."""
PROBE_BYTES: Final = 1 << 18
SLOW: Final = 1.5


def leave_to_extension(*socks: socket.socket) -> None:
    """End connections that a thread of the extension uses; it closes them when that thread has left.

    If they were closed here, the numbers of their descriptors could be those of other files before it has.
    """
    for sock in socks:
        with contextlib.suppress(OSError):  # it has ended already
            sock.shutdown(socket.SHUT_RDWR)
        sock.detach()


class NativeRingLane(RingLane):
    """One end of a pair of rings; the kernel may copy large transfers instead, if both ends are compiled."""

    def __init__(
        self, memory: Any, capacity: int, doorbell: socket.socket, *, first: bool, kind: str, kernel_copy: str = "auto"
    ) -> None:
        """`kernel_copy` is the setting of this name."""
        super().__init__(memory, capacity, doorbell, first=first, kind=kind)
        token, how = os.urandom(MEMORY_TOKEN_BYTES), KERNEL_COPY.index(kernel_copy)
        self.native = native().module.Ring(memory, capacity, doorbell.fileno(), first, token, how)

    def peek(self) -> bytes:
        return bytes(self.native.peek())

    def close(self) -> None:
        if self.native.close():
            super().close()
        else:
            leave_to_extension(self._doorbell)


@cache
def has_slow_libcrypto() -> bool:
    """Tell whether the libcrypto of Python's ssl module is much slower than the one in `cryptography`.

    Older ones do not use the instructions of newer processors, which makes a factor of three.
    """
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    cipher, data = AESGCM(bytes(16)), bytearray(PROBE_BYTES)
    sealed = bytearray(PROBE_BYTES + 16)
    best = float("inf")
    for _ in range(2):
        begin = time.perf_counter()
        cipher.encrypt_into(bytes(12), data, None, sealed)
        best = min(best, time.perf_counter() - begin)
    return bool(native().module.cipher_seconds(PROBE_BYTES) > SLOW * best)


class LongCipher:
    """Seals or opens the long records of one direction of one stream, for the compiled lane; see `wire.seal`."""

    def __init__(self, scope: bytes) -> None:
        self._scope = scope
        self._cipher: Any = None

    def set_key(self, key: memoryview) -> bool:
        """Use another key from now on: memory of the lane, which wipes it."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)
        return True

    def seal(self, count: int, length: bytes, data: memoryview, into: memoryview) -> bool:
        """Write ciphertext and tag of record `count` to `into`."""
        nonce = count.to_bytes(12, "big")
        self._cipher.encrypt_into(nonce, data, self._scope + nonce + length, into)
        return True

    def open(self, count: int, length: bytes, data: memoryview, into: memoryview) -> bool:
        """Decrypt record `count` to `into`; False if it is not as it was sealed."""
        from cryptography.exceptions import InvalidTag

        nonce = count.to_bytes(12, "big")
        try:
            self._cipher.decrypt_into(nonce, data, self._scope + nonce + length, into)
        except InvalidTag:
            return False
        return True


def _with_keys(
    socks: Sequence[socket.socket], secret: bytes, lane: bytes, *, dialler: bool
) -> tuple[tuple[Any, ...], ...]:
    """Prepare connected sockets; return for each what the extension needs to seal and open its records."""
    from covey.wire.seal import ACCEPTOR, DIALLER, lane_keys, scope

    if not socks:
        raise ConfigError("a lane needs at least one stream")
    mine, theirs = (DIALLER, ACCEPTOR) if dialler else (ACCEPTOR, DIALLER)
    streams = []
    for stream, sock in enumerate(socks):
        prepare(sock)
        keys = lane_keys(secret, lane, stream)
        scopes = scope(lane, stream, mine), scope(lane, stream, theirs)
        ciphers = [LongCipher(each) if has_slow_libcrypto() else None for each in scopes]
        streams.append((sock.fileno(), keys[mine], scopes[0], ciphers[0], keys[theirs], scopes[1], ciphers[1]))
    return tuple(streams)


class _NativeSocketLane(SocketLane):
    """Sockets that the extension uses. If it is told which are direct, their connections may be replaced.

    The methods for the control loop are those of `stream.PythonLane`.
    """

    def __init__(
        self,
        socks: Sequence[socket.socket],
        kind: str,
        directs: Sequence[bool] | None,
        make: Callable[..., Any],
        what: Any,
    ) -> None:
        self.kind = kind
        self._lock = threading.Lock()
        """Between the thread that closes the lane and the control loop, which replaces connections."""
        self._is_closed, self._left = False, LeftConnections()
        self.is_resumable = directs is not None
        self.native = make(what) if directs is None else make(what, tuple(directs))
        self._socks = [track(sock) for sock in socks]

    def sockets(self) -> Sequence[socket.socket]:
        return self._socks

    def peek(self) -> bytes:
        return bytes(self.native.peek())

    @property
    def is_closed(self) -> bool:
        """Whether the lane was closed."""
        return self._is_closed

    def broken(self) -> list[int]:
        """Return the streams that wait for a connection."""
        return list(self.native.broken())

    def freeze(self, stream: int) -> None:
        """Use the connection of a stream no more, and count none of its acknowledgements."""
        self.native.freeze(stream)

    def leave(self, stream: int) -> int:
        """Take what the connection of a frozen stream still has; return how many bytes the stream has brought."""
        with self._lock:
            if self._is_closed:
                return int(self.native.received(stream))
            return int(self.native.drain(stream))

    def attach(self, stream: int, sock: socket.socket, position: int, *, is_direct: bool) -> bool:
        """Go on with a frozen stream from this position, on a connection that the lane owns from now on."""
        prepare(sock)
        with self._lock:
            if self._is_closed or not self.native.attach(stream, sock.fileno(), position, is_direct):
                return False
            before, self._socks[stream] = self._socks[stream], track(sock)
            self._left.add(before)
        return True

    def push(self) -> bool:
        """Send again what is needed and can be sent; return whether there is more of it."""
        with self._lock:
            return not self._is_closed and bool(self.native.push())

    def acknowledge(self, stream: int, position: int) -> bool:
        """Note that the other end has all bytes of a stream before this position; return False if it cannot have."""
        return bool(self.native.acknowledge(stream, position))

    def received(self, stream: int) -> int:
        """Return how many bytes a stream has brought, on all connections."""
        return int(self.native.received(stream))

    def end(self, why: str) -> None:
        """Let the lane end, instead of waiting for another connection."""
        self.native.end(why)
        self.shutdown(socket.SHUT_RDWR)

    def shutdown(self, how: int) -> None:
        for sock in self._socks:
            with contextlib.suppress(OSError):  # it has broken
                sock.shutdown(how)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._left.close()
            if not self.native.close():
                leave_to_extension(*self._socks)
                return
            unread = bytearray(1 << 16)
            for sock in self._socks:
                close_without_reset(sock, unread)


class NativeStreamLane(_NativeSocketLane):
    """A connected stream socket; see `stream.StreamLane`."""

    def __init__(self, sock: socket.socket, kind: str, *, directs: Sequence[bool] | None = None) -> None:
        """The lane is resumable if `directs` tells whether the connection is direct."""
        prepare(sock)
        super().__init__([sock], kind, directs, native().module.Stream, sock.fileno())


class NativeSealedLane(_NativeSocketLane):
    """A lane over connected stream sockets, sealed by libcrypto; see `sealed.SealedLane`."""

    def __init__(
        self,
        socks: Sequence[socket.socket],
        secret: bytes,
        lane: bytes,
        *,
        dialler: bool,
        directs: Sequence[bool] | None = None,
        kind: str = "secure",
    ) -> None:
        """The lane is resumable if `directs` tells of each connection whether it is direct."""
        keys = _with_keys(socks, secret, lane, dialler=dialler)
        super().__init__(socks, kind, directs, native().module.Sealed, keys)


class NativeStripedLane(_NativeSocketLane):
    """A lane over connected stream sockets on different networks, one sealed stream on each; see `native/striped.c`."""

    is_striped = True

    def __init__(
        self,
        socks: Sequence[socket.socket],
        secret: bytes,
        lane: bytes,
        *,
        dialler: bool,
        directs: Sequence[bool] | None = None,
    ) -> None:
        """See NativeSealedLane."""
        for sock in socks:
            if sock.family != socket.AF_UNIX and hasattr(socket, "TCP_NOTSENT_LOWAT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        keys = _with_keys(socks, secret, lane, dialler=dialler)
        super().__init__(socks, "secure", directs, native().module.Striped, keys)

    def tend(self) -> bool:
        """Send again what streams had that cannot be used, and take what has come while no operation does.

        Returns whether there may be more to take. On the control loop.
        """
        return bool(self.native.tend())

    @property
    def sent_again(self) -> int:
        """Records that were sent again."""
        return int(self.native.sent_again)

    @property
    def is_settled(self) -> bool:
        """Whether the other machine had all that was sent, when the lane was last tended."""
        return bool(self.native.streams()[0])

    def paths(self) -> tuple[LanePath, ...]:
        """Return the networks that the lane goes over."""
        told = self.native.streams()[1]
        made, total = [], sum(written for written, _, _ in told)
        for sock, (written, speed, is_used) in zip(self._socks, told, strict=True):
            local = remote = ""
            with contextlib.suppress(OSError):  # it has broken
                local, remote = (str(name[0]) for name in (sock.getsockname(), sock.getpeername()))
            made.append(LanePath(local, remote, written / total if total else 0.0, speed, is_used))
        return tuple(made)

    def is_stuck(self, *, has_moved: bool = False) -> bool:
        """Tell whether no stream gets anything through."""
        self.tend()
        stuck = [tcp.is_stuck(sock, has_moved=has_moved) for sock in self._socks]
        used = [is_used for _, _, is_used in self.native.streams()[1]]
        return any(stuck) and all(is_dead or not is_used for is_dead, is_used in zip(stuck, used, strict=True))
