"""An Ethernet switch in user space: joins network namespaces, and drops, delays, cuts and forges as a test asks.

It runs as a process of its own, so that a busy test does not slow the network down, and holds one TAP device in
each attached namespace. Linux only; needs the permission to make namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final

from covey.testing.frames import Capture, flow_key, forge_resets, is_dial, is_stoppable_multicast, parse_segment

if TYPE_CHECKING:
    from collections.abc import Iterator

CAPTURE_BYTES: Final = 64 << 20
_SWITCH_ANSWER_SECONDS: Final = 300.0  # a guard against hangs
_QUEUE_SECONDS: Final = 0.1  # what waits longer than this for a slow port is dropped, as a real switch would
_BATCH: Final = 64  # frames read from one port before the others get their turn
_DEVICE_QUEUE: Final = 1000  # frames that the kernel keeps for us
_FRAME_BYTES: Final = 9216  # more than the MTU of any network we make
_FLOWS: Final = 4096
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_CLONE_NEWNET: Final = 0x40000000


class Switch:
    """The test's handle on a running switch. A control applies only to frames that are sent after it returns."""

    def __init__(self, *, seed: int = 0) -> None:
        """Start the switch; `seed` decides which frames get lost."""
        ours, theirs = socket.socketpair()
        with theirs:
            code = f"from covey.testing.switch import serve; serve({theirs.fileno()}, {seed})"
            self._process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[theirs.fileno()])
        self._control: Connection[Any, Any] = Connection(ours.detach())

    def attach(self, port: str, namespace: str, device: str = "eth0") -> None:
        """Make `device` in a network namespace, plugged into `port`. The device is down at first."""
        self._ask("attach", port, namespace, device)

    def shape(
        self, *, delay: float = 0.0, jitter: float = 0.0, loss: float = 0.0, bytes_per_second: float = 0.0
    ) -> None:
        """Delay every frame by `delay` to `delay + jitter` seconds, drop some, and limit the rate of each port.

        Frames do not overtake each other. Arguments that are not given are reset to none.
        """
        self._ask("shape", delay, jitter, loss, bytes_per_second)

    def allow_multicast(self, allowed: bool) -> None:
        """Carry multicast or not; the neighbour discovery of IPv6 always passes."""
        self._ask("allow_multicast", allowed)

    def cut(self, source: str, destination: str | None = None) -> None:
        """Carry nothing from one port to another, or, without `destination`, nothing from or to a port."""
        self._ask("cut", source, destination)

    def forbid_dialling(self, source: str, destination: str) -> None:
        """Block new TCP connections from one port to another; all else passes, existing connections included."""
        self._ask("forbid_dialling", source, destination)

    def lose(self, source: str, destination: str, share: float) -> None:
        """Drop a share of the frames from one port to another, besides those that `shape` drops; 0 ends it."""
        self._ask("lose", source, destination, share)

    def swallow(self, longer_than: int) -> None:
        """Drop frames of more bytes than this, and tell neither end: a black hole for long packets. 0 ends it."""
        self._ask("swallow", longer_than)

    def mend(self) -> None:
        """Undo every `cut`, `forbid_dialling`, `lose` and `swallow`."""
        self._ask("mend")

    def reset_connections(self, tcp_port: int | None = None) -> int:
        """Send forged resets to both ends of all TCP connections seen, or of those with `tcp_port`; return how many.

        A connection that was reset is forgotten, and counts again only when it is seen again.
        """
        return int(self._ask("reset_connections", tcp_port))

    def start_capture(self, *, limit_bytes: int = CAPTURE_BYTES) -> None:
        """Keep every frame from now on, up to a limit, and forget what was kept before."""
        self._ask("start_capture", limit_bytes)

    def captured(self) -> Capture:
        """Stop keeping frames, and return those that were kept."""
        frames, complete = self._ask("captured")
        return Capture(frames, complete)

    def close(self) -> None:
        """End the switch; its devices vanish. Closing twice is fine."""
        self._control.close()  # the switch ends when the other end is closed
        try:
            self._process.wait(_SWITCH_ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_SWITCH_ANSWER_SECONDS)

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, question: str, *args: Any) -> Any:
        self._control.send((question, args))
        if not self._control.poll(_SWITCH_ANSWER_SECONDS):
            raise TimeoutError(f"the switch did not answer {question} within {_SWITCH_ANSWER_SECONDS:g} s")
        answer = self._control.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


@dataclass
class _Port:
    name: str
    tap: int
    free_at: float = 0.0
    """When the last frame for this port is due; no later frame may be due earlier."""
    sent_at: float = 0.0
    """When a port of limited bandwidth will have sent its frames."""


@dataclass
class _Engine:
    """The process of the switch: reads and writes frames, and has the controls as methods."""

    random: random.Random
    epoll: select.epoll
    ports: dict[int, _Port] = field(default_factory=dict)
    """By descriptor of their TAP device."""
    homes: dict[bytes, _Port] = field(default_factory=dict)
    """Where a hardware address was last seen."""
    flows: dict[bytes, bytes] = field(default_factory=dict)
    """The last frame of each direction of each TCP connection."""
    late: list[tuple[float, int, _Port, bytes]] = field(default_factory=list)
    """Heap of frames that wait: due time, order of arrival, port, bytes."""
    arrivals: int = 0
    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    bytes_per_second: float = 0.0
    carries_multicast: bool = True
    cuts: set[tuple[str, str]] = field(default_factory=set)
    no_dialling: set[tuple[str, str]] = field(default_factory=set)
    losses: dict[tuple[str, str], float] = field(default_factory=dict)
    """By way: the share of frames that is dropped."""
    longest: int = 0
    """Frames of more bytes are dropped; 0: none are."""
    kept: list[bytes] | None = None
    kept_bytes: int = 0
    keeps_bytes: int = 0

    def run(self, control: Connection[Any, Any]) -> None:
        """Switch frames until the other end of `control` is closed."""
        self.epoll.register(control.fileno(), select.EPOLLIN)
        while True:
            wait = max(0.0, self.late[0][0] - time.monotonic()) if self.late else -1
            for descriptor, _ in self.epoll.poll(wait):
                if descriptor != control.fileno():
                    self._drain(self.ports[descriptor])
                elif not self._answer(control):
                    return
            if self.late:
                self._release(time.monotonic())

    def _answer(self, control: Connection[Any, Any]) -> bool:
        try:
            question, args = control.recv()
        except (EOFError, ConnectionError):
            return False
        for port in self.ports.values():
            self._drain(port, frames=_DEVICE_QUEUE)  # they were sent before the question was
        try:
            answer = getattr(self, question)(*args)
        except Exception as error:
            answer = error
        control.send(answer)
        return True

    def _drain(self, port: _Port, frames: int = _BATCH) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(frames):
                self._take(port, os.read(port.tap, _FRAME_BYTES))

    def _take(self, source: _Port, frame: bytes) -> None:
        """Forward one frame, as far as the controls allow."""
        self.homes[frame[6:12]] = source
        if self.kept is not None:
            self._keep(self.kept, frame)
        if flow := flow_key(frame):
            self.flows[flow] = frame
            if len(self.flows) > _FLOWS:
                del self.flows[next(iter(self.flows))]
        if frame[0] & 1 and not self.carries_multicast and is_stoppable_multicast(frame):
            return
        home = None if frame[0] & 1 else self.homes.get(frame[:6])
        for port in [home] if home else self.ports.values():
            if port is not source and self._passes(source, port, frame):
                self._deliver(port, frame)

    def _passes(self, source: _Port, port: _Port, frame: bytes) -> bool:
        way = source.name, port.name
        if self.cuts and way in self.cuts:
            return False
        if self.no_dialling and way in self.no_dialling and is_dial(frame):
            return False
        if self.longest and len(frame) > self.longest:
            return False
        loss = max(self.loss, self.losses.get(way, 0.0)) if self.losses else self.loss
        return not loss or self.random.random() >= loss

    def _deliver(self, port: _Port, frame: bytes) -> None:
        if not (self.late or self.delay or self.jitter or self.bytes_per_second):
            return _write(port, frame)
        now = time.monotonic()
        leaves_at = now
        if self.bytes_per_second:
            if port.sent_at > now + _QUEUE_SECONDS:
                return None
            port.sent_at = leaves_at = max(port.sent_at, now) + len(frame) / self.bytes_per_second
        due = max(leaves_at + self.delay + self.random.uniform(0, self.jitter), port.free_at)
        port.free_at = due
        self.arrivals += 1
        heapq.heappush(self.late, (due, self.arrivals, port, frame))
        return None

    def _release(self, now: float) -> None:
        while self.late and self.late[0][0] <= now:
            _, _, port, frame = heapq.heappop(self.late)
            _write(port, frame)

    def _keep(self, kept: list[bytes], frame: bytes) -> None:
        self.kept_bytes += len(frame)
        if self.kept_bytes <= self.keeps_bytes:
            kept.append(frame)

    # The controls, as Switch names them.

    def attach(self, name: str, namespace: str, device: str) -> None:
        if name in (port.name for port in self.ports.values()):
            raise ValueError(f"port {name} is taken")
        with inside(namespace):
            tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TAP | _IFF_NO_PI))
            except OSError:
                os.close(tap)
                raise
        self.ports[tap] = _Port(name, tap)
        self.epoll.register(tap, select.EPOLLIN)

    def shape(self, delay: float, jitter: float, loss: float, bytes_per_second: float) -> None:
        self.delay, self.jitter, self.loss, self.bytes_per_second = delay, jitter, loss, bytes_per_second

    def allow_multicast(self, allowed: bool) -> None:
        self.carries_multicast = allowed

    def lose(self, source: str, destination: str, share: float) -> None:
        self._check({source, destination})
        self.losses[source, destination] = share

    def swallow(self, longer_than: int) -> None:
        self.longest = longer_than

    def cut(self, source: str, destination: str | None) -> None:
        others = {port.name for port in self.ports.values()} if destination is None else {destination}
        self._check({source, *others})
        self.cuts |= {(source, other) for other in others}
        if destination is None:
            self.cuts |= {(other, source) for other in others}

    def forbid_dialling(self, source: str, destination: str) -> None:
        self._check({source, destination})
        self.no_dialling.add((source, destination))

    def _check(self, names: set[str]) -> None:
        if unknown := names - {port.name for port in self.ports.values()}:
            raise ValueError(f"no port is called {', '.join(sorted(unknown))}")

    def mend(self) -> None:
        self.cuts.clear()
        self.no_dialling.clear()
        self.losses.clear()
        self.longest = 0

    def reset_connections(self, tcp_port: int | None) -> int:
        victims = set()
        for key, frame in list(self.flows.items()):
            segment, resets = parse_segment(frame), forge_resets(frame)
            if segment is None or resets is None or segment.flags & 0x04:
                continue
            if tcp_port in (None, segment.source_port, segment.destination_port):
                del self.flows[key]
                victims.add(frozenset([segment.flow[:2], segment.flow[2:]]))
                for reset in resets:
                    if home := self.homes.get(reset[:6]):
                        _write(home, reset)
        return len(victims)

    def start_capture(self, limit_bytes: int) -> None:
        self.kept, self.kept_bytes, self.keeps_bytes = [], 0, limit_bytes

    def captured(self) -> tuple[list[bytes], bool]:
        kept, self.kept = self.kept or [], None
        return kept, self.kept_bytes <= self.keeps_bytes


def serve(descriptor: int, seed: int) -> None:
    """Run the switch: serve requests on the socket `descriptor` until it is closed."""
    with select.epoll() as epoll, Connection(descriptor) as control:
        _Engine(random.Random(seed), epoll).run(control)


def _write(port: _Port, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # a device that is down or full loses frames, as a cable to it would
        os.write(port.tap, frame)


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Move the calling thread into a network namespace during the block; sockets made there stay there."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns comes with Python 3.12

    def enter(path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    home = enter("/proc/self/ns/net")
    try:
        there = enter(f"/run/netns/{namespace}")
        try:
            _check_call(libc.setns(there, _CLONE_NEWNET))
        finally:
            os.close(there)
        try:
            yield
        finally:
            _check_call(libc.setns(home, _CLONE_NEWNET))
    finally:
        os.close(home)


def _check_call(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
