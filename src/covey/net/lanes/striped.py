"""Striped lanes: tensors between hosts that two or more networks connect, over one sealed stream on each.

A transfer is cut into records as on a sealed lane, but into shorter ones (STRIPE_BYTES), and each begins with its
number. Whichever stream has room takes the next record, so that each network carries as much as it can, and no share
has to be agreed on.

Invariants, which hold for each direction by itself:

1. Record m is made only while m is less than WINDOW above the oldest record that is not acknowledged. A record is
   acknowledged when the kernel of the other machine has all of it: from then on the peer can read it, whatever happens
   to the path. What is not acknowledged is kept.
2. A record whose stream has broken, or times out again and again, is sent again on another stream. A stream that only
   seemed dead may deliver it as well.
3. The receiver delivers records in the order of their numbers, each once. It keeps a record that is less than WINDOW
   ahead, and drops one that it has. It stops to read a stream whose next record is further ahead.

By 1, all records in front of record n on its stream are less than WINDOW ahead of n: n was not acknowledged when it was
put there. So the receiver, which waits for n, can always read until n comes.

If all streams break, a lane that is resumable waits until one of them goes on over another connection
(`net.lanes.lasting`).

A slow stream never makes a transfer slower: it gets a record only if that arrives there before the fastest stream alone
could have carried the transfer.
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import struct
import termios
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.errors import ConfigError
from covey.net.host import tcp
from covey.net.lanes.lane import SMALL_BYTES, Incoming, LaneClosedError, LanePath, Outgoing
from covey.net.lanes.lasting import LastingSocket
from covey.net.lanes.sealed import Readiness
from covey.net.lanes.sealed_pipe import FIRST_BYTES, SealedPipe
from covey.net.lanes.stream import SocketLane
from covey.wire.header import HEADER_BYTES
from covey.wire.seal import RECORD_OVERHEAD_BYTES, ForgedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray[Any, np.dtype[Any]]

STRIPE_NUMBER: Final = struct.Struct("<Q")
STRIPE_BYTES: Final = 1 << 18
"""The most payload in a record: at 100 Mbit/s it takes 20 ms. The last record of a slow stream is waited for."""
WINDOW: Final = 64
"""Records that may be on their way: 16 MiB."""
UNSENT_BYTES: Final = 1 << 18
"""How much the kernel takes ahead of what it can send: what it has taken is not given to another stream."""
AHEAD_BYTES: Final = 1 << 22
"""A stream may lag behind the fastest one by the time that one takes for so much."""
SLOW_STREAM_SECONDS: Final = 10.0
"""After which a stream that was too slow is tried again."""
TEND_SECONDS: Final = 0.1
SLEEP_SECONDS: Final = 0.002
"""Between looks for acknowledgements, for which there is nothing to poll."""
PLAIN_AT: Final = 64 - STRIPE_NUMBER.size
"""Where a record is opened in its memory, so that the payload is aligned."""


def prepare(socks: Sequence[socket.socket]) -> None:
    """Let the kernel take little more of each stream than it can send."""
    for sock in socks:
        if sock.family != socket.AF_UNIX and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def lane_paths(socks: Sequence[socket.socket], told: Sequence[tuple[int, float, bool]]) -> tuple[LanePath, ...]:
    """Return the networks of a lane; for each stream is told what it has sent, its speed, and whether it is used."""
    made, total = [], sum(written for written, _, _ in told)
    for sock, (written, speed, is_used) in zip(socks, told, strict=True):
        local = remote = ""
        with contextlib.suppress(OSError):  # it has broken
            local, remote = (str(name[0]) for name in (sock.getsockname(), sock.getpeername()))
        made.append(LanePath(local, remote, written / total if total else 0.0, speed, is_used))
    return tuple(made)


def is_stuck(socks: Sequence[socket.socket], told: Sequence[tuple[int, float, bool]], *, has_moved: bool) -> bool:
    """Tell whether no stream of a lane gets anything through."""
    pairs = zip(socks, told, strict=True)
    return all(not is_used or tcp.is_stuck(sock, has_moved=has_moved) for sock, (_, _, is_used) in pairs) and any(
        tcp.is_stuck(sock, has_moved=has_moved) for sock in socks
    )


class _Stripe(SealedPipe):
    """One stream, with what is known of its path."""

    __slots__ = (
        *("_acked", "_acked_before", "_busy_before", "_cannot_send", "_measured_at", "_written"),
        *("has_ended", "held", "is_suspect", "sealed", "speed"),
    )

    def __init__(self, sock: socket.socket, secret: bytes, lane: bytes, stream: int, *, dialler: bool) -> None:
        super().__init__(sock, secret, lane, stream, dialler=dialler)
        self.sealed = self._written = self._acked = 0
        """Bytes of all records, of those that the kernel took, and of those that the other machine's kernel has."""
        self._cannot_send = self.has_ended = self.is_suspect = False
        self.held: tuple[int, Array] | None = None
        """A record that is too far ahead."""
        self.speed = 0.0
        self._acked_before = self._busy_before = 0
        self._measured_at = 0.0

    @property
    def written(self) -> int:
        return self.sock.sent if isinstance(self.sock, LastingSocket) else self._written

    @property
    def acked(self) -> int:
        return self.sock.acked if isinstance(self.sock, LastingSocket) else self._acked

    @property
    def cannot_send(self) -> bool:
        return self.sock.is_broken if isinstance(self.sock, LastingSocket) else self._cannot_send

    @property
    def can_read(self) -> bool:
        is_broken = isinstance(self.sock, LastingSocket) and self.sock.is_broken
        return not self.has_ended and self.held is None and not is_broken

    @property
    def has_spill(self) -> bool:
        return isinstance(self.sock, LastingSocket) and self.sock.has_spill and self.held is None

    def raise_if_over(self) -> None:
        """Raise LaneClosedError if no other connection comes for this stream."""
        if isinstance(self.sock, LastingSocket) and self.sock.over:
            raise LaneClosedError(self.sock.over)

    def breaks(self) -> None:
        """Note that nothing can be sent on this connection."""
        self._cannot_send = True

    @property
    def is_usable(self) -> bool:
        return not self.cannot_send and not self.is_suspect

    def flush(self) -> bool:
        if not self.unsent or self.cannot_send:
            return False
        before = self._start
        try:
            taken = self.sock.send(self._cipher_out[before : self.unsent])
        except BlockingIOError:
            return False
        except OSError:
            self.breaks()
            return False
        self._written += taken
        self._start += taken
        if self._start == self.unsent:
            self._start = self.unsent = 0
        return True

    def look_at_acknowledgements(self) -> None:
        """Learn what the peer's kernel has, or that the stream has broken: then it tells nothing to rely on."""
        if self.cannot_send:
            return
        if isinstance(self.sock, LastingSocket):
            self.sock.look()
            return
        try:
            (unacked,) = struct.unpack("i", fcntl.ioctl(self.sock.fileno(), termios.TIOCOUTQ, bytes(4)))
        except (OSError, ValueError):
            return
        poll = select.poll()
        poll.register(self.sock, 0)
        if poll.poll(0):  # an error, or both directions have ended
            self.breaks()
        else:
            self._acked = max(self._acked, self._written - unacked)

    def look_at_path(self, now: float) -> None:
        """Learn how fast the stream is, and whether its path seems dead."""
        known = tcp.path_facts(self.connection)
        if known is None:
            return
        self.is_suspect = known.is_suspect
        busy, acked = known.busy - self._busy_before, known.acknowledged - self._acked_before
        if busy >= tcp.LEAST_BUSY_US and acked >= tcp.LEAST_BUSY_BYTES:
            speed = acked * 1e6 / busy
            self.speed = (self.speed + speed) / 2 if self.speed else speed
        elif now >= self._measured_at + SLOW_STREAM_SECONDS:
            self.speed = 0.0
        else:
            return
        self._acked_before, self._busy_before, self._measured_at = known.acknowledged, known.busy, now


@dataclass(slots=True)
class _Sent:
    """A record that is not acknowledged."""

    plain: bytes
    stripe: _Stripe | None
    """The stream that has it; None: it is to be sent again."""
    end: int = 0
    """Where it ends in the bytes of that stream."""


class StripedLane(SocketLane):
    """A lane over connected stream sockets on different networks. Takes ownership of the sockets.

    The executor's thread and the control loop (`tend`) take turns under the lock.
    """

    kind = "secure"
    is_striped = True

    def __init__(self, socks: Sequence[socket.socket], secret: bytes, lane: bytes, *, dialler: bool) -> None:
        """See SealedLane."""
        if not socks:
            raise ConfigError("a lane needs at least one stream")
        prepare(socks)
        self._readiness = Readiness()
        self._stripes = [_Stripe(sock, secret, lane, stream, dialler=dialler) for stream, sock in enumerate(socks)]
        self._lock = threading.Lock()
        self._sent: dict[int, _Sent] = {}
        """By number, in their order: what is not acknowledged."""
        self._next = self._expected = 0
        """The numbers of the next new record, and of the next one to deliver."""
        self._early: dict[int, Array] = {}
        """Records that wait for earlier ones."""
        self._out: Outgoing | None = None
        self._assigned = 0
        """How many payload bytes of `out` are in records."""
        self._tended_at = 0.0
        self.sent_again = 0
        """Records that were sent again."""
        self._trouble = ""

    def sockets(self) -> Sequence[socket.socket]:
        return [stripe.connection for stripe in self._stripes]

    # Sending

    def transmit(self, out: Outgoing) -> bool:
        with self._lock:
            moved = self._tend()
            for stripe in self._stripes:
                stripe.raise_if_over()
                moved = stripe.flush() or moved
            for _ in self._stripes:
                if out is self._out and self._assigned == out.nbytes:
                    break
                self._reclaim()
                record = None
                if self._next < next(iter(self._sent), self._next) + WINDOW:
                    length = HEADER_BYTES if out is not self._out else min(STRIPE_BYTES, out.nbytes - self._assigned)
                    record = self._choose(length, out.nbytes)
                if record is None:
                    break
                self._give(self._make_record(out), record)
                moved = record.flush() or moved
            self._take_back()
            moved = self._repeat() or moved
            if not self.is_resumable and all(stripe.cannot_send for stripe in self._stripes):
                raise LaneClosedError(self._trouble or "no stream is left")
            is_on_its_way = any(stripe.is_usable and stripe.unsent for stripe in self._stripes)
            if out is self._out and self._assigned == out.nbytes and not is_on_its_way and not self._first_to_repeat():
                out.sent, self._out = out.nbytes, None
                return True
            return moved

    def _make_record(self, out: Outgoing) -> int:
        """Keep the next record of a transfer; return its number."""
        number, self._next = self._next, self._next + 1
        if out is self._out:
            payload = out.data[self._assigned : self._assigned + STRIPE_BYTES].tobytes()
            self._assigned += len(payload)
        else:
            is_small = out.nbytes <= SMALL_BYTES
            payload = out.header + out.data.tobytes() if is_small else out.header
            self._out, self._assigned = out, out.nbytes if is_small else 0
        self._sent[number] = _Sent(STRIPE_NUMBER.pack(number) + payload, None)
        return number

    def _choose(self, length: int, nbytes: int) -> _Stripe | None:
        """Return the stream for a record of `length` of a transfer, or None if none has room."""
        usable = [stripe for stripe in self._stripes if stripe.is_usable]
        if not usable:
            return None
        best = max(usable, key=lambda stripe: stripe.speed)
        if not best.unsent:
            return best
        for stripe in usable:
            share = stripe.speed / best.speed if best.speed and stripe.speed else 1.0
            queued = stripe.written - stripe.acked + length
            if stripe is not best and not stripe.unsent and queued < share * min(nbytes, AHEAD_BYTES):
                return stripe
        return None

    def _give(self, number: int, stripe: _Stripe) -> None:
        record = self._sent[number]
        stripe.seal(record.plain)
        stripe.sealed += len(record.plain) + RECORD_OVERHEAD_BYTES
        record.stripe, record.end = stripe, stripe.sealed

    def _reclaim(self) -> None:
        """Forget what is acknowledged."""
        for stripe in self._stripes:
            stripe.look_at_acknowledgements()
        sent = self._sent.items()
        for number in [number for number, each in sent if each.stripe is not None and each.end <= each.stripe.acked]:
            del self._sent[number]

    def _take_back(self) -> None:
        """Let records be sent again whose stream cannot be used."""
        if any(stripe.is_usable for stripe in self._stripes):
            for record in self._sent.values():
                if record.stripe is not None and not record.stripe.is_usable:
                    record.stripe = None

    def _first_to_repeat(self) -> tuple[int, _Sent] | None:
        return next(((number, record) for number, record in self._sent.items() if record.stripe is None), None)

    def _repeat(self) -> bool:
        """Send again what was on streams that cannot be used; return whether the kernel took any."""
        moved = False
        while (found := self._first_to_repeat()) is not None:
            number, record = found
            stripe = self._choose(len(record.plain), AHEAD_BYTES)
            if stripe is None:
                break
            self._give(number, stripe)
            self.sent_again += 1
            moved = stripe.flush() or moved
            self._take_back()
        return moved

    def _tend(self) -> bool:
        now = time.monotonic()
        if now < self._tended_at + TEND_SECONDS:
            return False
        self._tended_at, moved = now, False
        for stripe in self._stripes:
            stripe.look_at_path(now)
        self._reclaim()
        self._take_back()
        for stripe in self._stripes:
            moved = stripe.flush() or moved
        return self._repeat() or moved

    def tend(self) -> None:
        """Send again what streams had that cannot be used, unless the executor is at it. On the control loop."""
        if self._lock.acquire(blocking=False):
            try:
                self._tend()
            finally:
                self._lock.release()

    # Receiving

    def receive(self, incoming: Incoming) -> bool:
        with self._lock:
            moved, has_read = self._tend(), False
            try:
                while incoming.got < incoming.nbytes or incoming.got < 0:
                    record = self._early.pop(self._expected, None)
                    if record is not None:
                        self._expected += 1
                        self._deliver(incoming, record)
                        moved = True
                    elif has_read:
                        break
                    else:
                        moved, has_read = self._read_all() or moved, True
            except ForgedError as error:
                raise LaneClosedError(str(error)) from error
            return moved

    def _deliver(self, incoming: Incoming, record: Array) -> None:
        payload = record[PLAIN_AT + STRIPE_NUMBER.size :]
        if incoming.got < 0:
            if not HEADER_BYTES <= payload.size <= FIRST_BYTES:
                what = f"no transfer starts with a record of {payload.size} bytes"
                raise ForgedError(f"the bytes were altered on the way: {what}")
            header = payload[:HEADER_BYTES].tobytes()
            if header != incoming.expected:
                incoming.wrong_header(incoming.peer, incoming.expected, header)
            payload, expected, at = payload[HEADER_BYTES:], incoming.nbytes, 0
            if incoming.nbytes > SMALL_BYTES:
                expected = 0
        else:
            expected, at = min(STRIPE_BYTES, incoming.nbytes - incoming.got), incoming.got
        if payload.size != expected:
            what = f"{payload.size} bytes of payload instead of {expected}"
            raise ForgedError(f"the bytes were altered on the way: {what}")
        if incoming.dest is not None:
            incoming.dest[at : at + expected] = memoryview(payload)
        elif expected:
            incoming.absorb(at, payload.view(incoming.dtype))
        incoming.got = at + expected

    def _read_all(self) -> bool:
        """Take what the streams have; return whether there was anything.

        Raises:
            LaneClosedError: all streams have ended, and the next record has not arrived.
            ForgedError: bytes were altered.
        """
        moved = False
        for stripe in self._stripes:
            moved = self._read(stripe) or moved
        can_read = any(not stripe.has_ended and stripe.held is None for stripe in self._stripes)
        if not moved and not can_read and self._expected not in self._early:
            is_missing = any(stripe.held is not None for stripe in self._stripes)
            raise LaneClosedError("a record is missing" if is_missing else self._trouble or "end of stream")
        return moved

    def _read(self, stripe: _Stripe) -> bool:
        """Take what one stream has. One that breaks only ends: what it had is sent again on another one."""
        moved = self._open_arrived(stripe)
        if stripe.held is not None or stripe.has_ended:
            return moved
        try:
            if not stripe.fill():
                stripe.has_ended, self._trouble = True, "end of stream"
                return moved
        except BlockingIOError:
            return moved
        except OSError as error:
            stripe.has_ended, self._trouble = True, str(error)
            if error.errno is not None:  # else it ended in the middle of a record
                stripe.breaks()
            return moved
        self._open_arrived(stripe)
        return True

    def _open_arrived(self, stripe: _Stripe) -> bool:
        """Open the records of a stream that have arrived whole, while they are not too far ahead."""
        moved = False
        if stripe.held is not None:
            if not self._place(*stripe.held):
                return False
            stripe.held, moved = None, True
        while stripe.held is None and (length := stripe.ready()):
            if not STRIPE_NUMBER.size < length <= STRIPE_NUMBER.size + STRIPE_BYTES:
                raise ForgedError(f"the bytes were altered on the way: no record has {length} bytes")
            record = np.empty(PLAIN_AT + length, np.uint8)
            stripe.open(memoryview(record)[PLAIN_AT:])
            number = int(STRIPE_NUMBER.unpack_from(record, PLAIN_AT)[0])
            if not self._place(number, record):
                stripe.held = number, record
            moved = True
        return moved

    def _place(self, number: int, record: Array) -> bool:
        """Let a record wait for its turn, or drop a second copy; return False if it is too far ahead."""
        if number >= self._expected + WINDOW:
            return False
        if number >= self._expected:
            self._early.setdefault(number, record)
        return True

    # Waiting, and the end

    def fileno(self) -> int:
        return self._readiness.fileno()

    def park(self, *, sending: bool, receiving: bool) -> int:
        with self._lock:
            if receiving and (self._expected in self._early or any(each.has_spill for each in self._stripes)):
                return 0
            readers = [each.connection for each in self._stripes if receiving and each.can_read]
            writers = [each.connection for each in self._stripes if sending and each.is_usable and each.unsent]
            waits = (sending and not writers) or not (readers or writers)
            if not waits or readers:
                self._readiness.ask(readers, writers)  # the control loop changes it, too
        if not waits:
            return select.POLLIN
        if readers:
            select.select([self._readiness], [], [], SLEEP_SECONDS)
        else:
            time.sleep(SLEEP_SECONDS)
        return 0

    def peek(self) -> bytes:
        with self._lock:
            with contextlib.suppress(ForgedError, LaneClosedError):
                while self._expected not in self._early and self._read_all():
                    pass
            record = self._early.get(self._expected)
            if record is None or not HEADER_BYTES <= record.size - PLAIN_AT - STRIPE_NUMBER.size <= FIRST_BYTES:
                return b""
            return record[PLAIN_AT + STRIPE_NUMBER.size :][:HEADER_BYTES].tobytes()

    def is_stuck(self, *, has_moved: bool = False) -> bool:
        self.tend()
        return is_stuck(self.sockets(), self._told(), has_moved=has_moved)

    @property
    def is_settled(self) -> bool:
        """Whether the other machine has all that was sent."""
        with self._lock:
            self._reclaim()
            return not self._sent

    def _told(self) -> list[tuple[int, float, bool]]:
        return [(stripe.written, stripe.speed, stripe.is_usable) for stripe in self._stripes]

    def paths(self) -> tuple[LanePath, ...]:
        """Return the networks that the lane goes over."""
        return lane_paths(self.sockets(), self._told())

    def shutdown(self, how: int) -> None:
        for stripe in self._stripes:
            with contextlib.suppress(OSError):  # it has broken
                stripe.sock.shutdown(how)

    def close(self) -> None:
        self._readiness.close()
        for stripe in self._stripes:
            stripe.close()
