"""The pump: one thread of a process that moves bytes between its QUIC connections and the sockets behind them.

Lanes get one end of a socket pair, and use it like a TCP connection. The pump has the other ends, and one UDP socket.

A datagram is hostile until proved otherwise. One that begins a connection must prove the door's key by its connection
id, and then that its sender receives at its address; before both, nothing is kept of it. Then the connection has a
bounded time to prove the key again, on the stream, and a small window until it has. If the pump fails, it ends all
lanes, and says why.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import secrets
import selectors
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

from covey.net.host.descriptors import track
from covey.net.quic.carrier import QuicCredentials, accept, dial
from covey.net.quic.line import FirstDatagrams, Line, QuicSocket, answer_to, answered, question, socket_pair
from covey.net.quic.udp import Arrived, UdpSocket, plain_source
from covey.wire import quic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.net.quic.carrier import Address
    from covey.net.quic.line import Gatekeeper

logger = logging.getLogger("covey")

UNPROVED_AT_ONCE: Final = 32
"""Connections that have not proved the key on the stream; one too many ends the oldest."""
PROVE_SECONDS: Final = 6.0
"""How long a connection may take to prove the key on the stream, and a dialled one to get an answer."""
QUIC_LINES_LIMIT: Final = 4096
RECEIVES_AT_ONCE: Final = 64
"""Calls that receive, before anything is sent."""
DELIVER_SECONDS: Final = 60.0
"""How long closing waits until the other ends have received what was sent: a window over a slow line."""
PUMP_CLOSED: Final = "the QUIC connections of this process are closed"
HOPELESS_SECONDS: Final = 1.0
"""Closing does not wait for an end that says nothing for so long."""
CLOSED_LINE_CHECK_EVERY: Final = 0.5
"""How often a lane that was closed with bytes for it on the way is looked at."""


class QuicPump:
    """The QUIC connections of one process. The methods may be called on any thread."""

    def __init__(self, gatekeeper: Gatekeeper, *, is_local: bool = False) -> None:
        """Bind the UDP socket, on loopback only if `is_local`, and start; OSError if that is not possible."""
        logging.getLogger("quic").setLevel(logging.ERROR)  # qh3 warns of every connection that is closed
        self._gatekeeper = gatekeeper
        self._udp = UdpSocket(is_local=is_local)
        self.port = self._udp.port
        self._selector = selectors.DefaultSelector()
        bell, self._ringer = socket.socketpair()
        for end in (bell, self._ringer):
            end.setblocking(False)
            track(end)
        self._bell = bell
        self._selector.register(bell, selectors.EVENT_READ, None)
        self._selector.register(self._udp.sock, selectors.EVENT_READ, self._udp)
        self._orders: collections.deque[Callable[[float], None]] = collections.deque()
        self._lock = threading.Lock()
        self._lines: set[Line] = set()
        self._by_id: dict[bytes, Line] = {}
        self._credentials: dict[bytes, QuicCredentials] = {}
        self._first = FirstDatagrams()
        self._touched: dict[Line, None] = {}
        self._waiting: list[tuple[bytes, Address]] = []
        """Datagrams that the kernel had no room for; nothing else is sent before them."""
        self._error = ""
        self._closing_until = 0.0
        self.refused = 0
        """Datagrams and connections that were refused."""
        self.moved = 0
        """How often the other end of a connection was found at another address."""
        self._thread = threading.Thread(target=self._run, name="covey-quic", daemon=True)
        self._thread.start()

    @property
    def error(self) -> str:
        """Why the pump has ended; empty while it works."""
        return self._error

    def dial(self, way: Sequence[Any], door_key: bytes) -> QuicSocket:
        """Return a socket whose connection to a UDP address is being made; the caller owns it.

        Raises OSError if there is no descriptor for it, or if the pump has ended. If the connection fails, the socket
        ends, and its `problem` says why.
        """
        address = self._udp.address(way)
        lane, ours = socket_pair()
        track(lane)
        track(ours)
        lane.remote_ip = plain_source(address)
        if not self._order(lambda now: self._dial(address, door_key, lane, ours, now)):
            lane.close()
            ours.close()
            raise ConnectionError(self._error)
        return lane

    def close(self) -> None:
        """End all connections, in order if the other ends answer within DELIVER_SECONDS. Closing twice is fine."""
        with self._lock:
            is_first = not self._closing_until
            self._closing_until = self._closing_until or time.monotonic() + DELIVER_SECONDS
        if is_first:
            self._ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(DELIVER_SECONDS + PROVE_SECONDS)

    def _order(self, order: Callable[[float], None]) -> bool:
        """Have the thread do something; False if it has ended."""
        with self._lock:
            if self._closing_until or self._error:
                self._error = self._error or PUMP_CLOSED
                return False
            self._orders.append(order)
        self._ring()
        return True

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # it is full, and heard; or closed
            self._ringer.send(b"\0")

    # The thread

    def _run(self) -> None:
        error = PUMP_CLOSED
        try:
            while not self._is_over():
                self._turn()
        except BaseException as problem:
            error = f"the thread of the QUIC connections failed: {problem!r}"
            logger.exception("the thread of the QUIC connections failed; their lanes end")
        finally:
            self._end(error)

    def _is_over(self) -> bool:
        if not self._closing_until:
            return False
        return not self._lines or time.monotonic() > self._closing_until

    def _turn(self) -> None:
        now = time.monotonic()
        for key, _ in self._selector.select(max(0.0, self._next_due() - now)):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._bell.recv(4096)
            elif isinstance(key.data, Line):
                self._touched[key.data] = None
        now = time.monotonic()
        while self._orders:
            self._orders.popleft()(now)
        if self._closing_until:
            self._close_lines(now)
        for _ in range(RECEIVES_AT_ONCE):
            arrived = self._udp.receive()
            if arrived is None:
                break
            self._arrive(arrived, now)
        for line in self._lines:
            if line.due <= now:
                self._touched[line] = None
        if self._send_waiting():
            touched, self._touched = self._touched, {}
            for line in touched:
                self._guarded(line, self._serve, now)

    def _close_lines(self, now: float) -> None:
        """End the lines whose other ends have everything, and those that will never have it."""
        since = self._closing_until - DELIVER_SECONDS
        for line in self._lines:
            carrier = line.carrier
            is_hopeless = not carrier.is_open or now > max(since, line.heard_at) + HOPELESS_SECONDS
            if carrier.is_delivered or is_hopeless:
                carrier.close("" if carrier.is_delivered else PUMP_CLOSED)
                self._touched[line] = None

    def _next_due(self) -> float:
        due = min((line.due for line in self._lines), default=time.monotonic() + PROVE_SECONDS)
        return min(due, time.monotonic() + HOPELESS_SECONDS / 4) if self._closing_until else due

    def _serve(self, line: Line, now: float) -> None:
        """Do everything that a line can do now."""
        carrier = line.carrier
        if line not in self._lines:
            return
        if carrier.due() <= now:
            carrier.tick(now)
        if not line.is_proved and now > line.prove_until:
            carrier.close("no proof of the key")
        if line.is_dialler and not carrier.is_open and (now > line.prove_until or line.is_abandoned):
            carrier.close("no answer in time")
        if line.sock is None and carrier.is_open and not carrier.is_over:
            self._present(line)
        line.move(now)
        if line.is_dialler:
            leaving = [(data, line.remote) for data, _ in carrier.datagrams(now)]
        else:
            leaving = carrier.datagrams(now)
        if leaving:
            sent = self._udp.send(leaving)
            if sent < len(leaving):
                self._waiting += leaving[sent:]
                self._selector.modify(self._udp.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, self._udp)
        if line.is_finished:
            self._drop(line)
            return
        line.note_silence(now)
        for cid in carrier.ids - line.ids:
            self._by_id[cid] = line
        for cid in line.ids - carrier.ids:
            self._by_id.pop(cid, None)
        line.ids = set(carrier.ids)
        is_settled = line.is_proved and carrier.is_open
        line.due = carrier.due() if is_settled else min(carrier.due(), line.prove_until)
        if line.deaf_since:
            line.due = min(line.due, now + CLOSED_LINE_CHECK_EVERY)
        if line.sock is not None and (wanted := line.wanted()) != line.events:
            self._select_for(line, wanted)

    def _send_waiting(self) -> bool:
        """Send what the kernel had no room for; True if nothing is left."""
        if self._waiting:
            del self._waiting[: self._udp.send(self._waiting)]
            if self._waiting:
                return False
            self._selector.modify(self._udp.sock, selectors.EVENT_READ, self._udp)
        return True

    def _select_for(self, line: Line, wanted: int) -> None:
        assert line.sock is not None
        if not line.events:
            self._selector.register(line.sock, wanted, line)
        elif wanted:
            self._selector.modify(line.sock, wanted, line)
        else:
            self._selector.unregister(line.sock)
        line.events = wanted

    def _drop(self, line: Line) -> None:
        if line.events and line.sock is not None:
            self._select_for(line, 0)
        self._lines.discard(line)
        for cid in line.ids:
            self._by_id.pop(cid, None)
        if line.carrier.error:
            logger.info("a QUIC connection with %s ended: %s", plain_source(line.remote), line.carrier.error)
        line.hang_up()

    def _end(self, error: str) -> None:
        """End all lines; nothing is accepted any more."""
        with self._lock:
            self._error = error
        while self._orders:  # sockets that were dialled at the last moment
            with contextlib.suppress(Exception):
                self._orders.popleft()(time.monotonic())
        for line in list(self._lines):
            with contextlib.suppress(Exception):
                line.carrier.close(error)
                self._udp.send(line.carrier.datagrams(time.monotonic()))
            with contextlib.suppress(Exception):
                self._drop(line)
        self._selector.close()
        self._udp.close()
        self._bell.close()
        self._ringer.close()

    # Connections

    def _of(self, door_key: bytes) -> QuicCredentials:
        known = self._credentials.get(door_key)
        if known is None:
            while len(self._credentials) > 3:
                del self._credentials[next(iter(self._credentials))]
            known = self._credentials[door_key] = QuicCredentials(door_key)
        return known

    def _dial(self, address: Address, door_key: bytes, lane: QuicSocket, ours: socket.socket, now: float) -> None:
        if len(self._lines) >= QUIC_LINES_LIMIT or self._error:
            lane.problem = self._error or "this process has too many QUIC connections"
            ours.close()
            return
        credentials = self._of(door_key)
        cid = quic.proving_cid(door_key, secrets.token_bytes(quic.CID_NONCE_BYTES))
        carrier = dial(credentials.dialling, cid, address, now)
        line = Line(carrier, credentials, address, is_dialler=True, sock=ours)
        line.lane, line.prove_until = weakref.ref(lane), now + PROVE_SECONDS
        self._add(line)

    def _add(self, line: Line) -> None:
        self._lines.add(line)
        self._touched[line] = None
        line.ids = set(line.carrier.ids)
        for cid in line.ids:
            self._by_id[cid] = line

    def _arrive(self, arrived: Arrived, now: float) -> None:
        """Give each datagram to its connection."""
        datagrams, source = arrived.datagrams, arrived.source
        start = 0
        while start < len(datagrams):
            cid, stop = quic.destination_of(datagrams[start]), start + 1
            while stop < len(datagrams) and quic.destination_of(datagrams[stop]) == cid:
                stop += 1
            line = self._by_id.get(cid) if cid else None
            if line is not None:
                self._touched[line] = None
                line.heard_at = now
                if line.is_dialler and source != line.remote and (asking := question(line, source, now)):
                    self._udp.send([(asking, source)])
                address = line.canonical if line.is_dialler else source
                self._guarded(line, self._receive, datagrams[start:stop], address, now)
            elif quic.is_about_path(datagrams[start]):
                self._about_path(datagrams[start], source)
            else:
                for data in datagrams[start:stop]:
                    self._begin(data, arrived, now)
            start = stop

    def _receive(self, line: Line, datagrams: Sequence[bytes], address: Address, now: float) -> None:
        line.carrier.receive(datagrams, address, now)

    def _guarded(self, line: Line, work: Callable[..., None], *args: Any) -> None:
        """Do something for a line; an error in it, or a panic in qh3, ends this line and no other."""
        try:
            work(line, *args)
        except BaseException as error:  # a panic of qh3 is no Exception
            logger.error("a QUIC connection with %s failed", plain_source(line.remote), exc_info=error)
            line.carrier.fail(f"it failed: {error!r}")
            self._drop(line)

    def _begin(self, data: bytes, arrived: Arrived, now: float) -> None:
        """Judge a datagram of no known connection: it may begin one."""
        found = self._first.judge(data, arrived.source, self._gatekeeper.door_keys(), now)
        if isinstance(found, bytes):
            self.refused += not found
            if found and not self._closing_until:
                self._udp.send([(found, arrived.source)])
            return
        proved = self._gatekeeper.comes(plain_source(arrived.source), arrived.local_ip)
        if proved is None or len(self._lines) >= QUIC_LINES_LIMIT or self._closing_until:
            self.refused += 1
            return
        self._first.entered(found)
        credentials = self._of(found.door_key)
        carrier = accept(credentials.accepting, found.original, found.chosen, now)
        line = Line(carrier, credentials, arrived.source, is_dialler=False, sock=None)
        line.prove_until = now + PROVE_SECONDS
        line.on_proved = proved
        unproved = [each for each in self._lines if not each.is_proved]
        if len(unproved) >= UNPROVED_AT_ONCE:
            oldest = min(unproved, key=lambda each: each.prove_until)
            oldest.carrier.close("too many connections without a proof")
            self._udp.send(oldest.carrier.datagrams(now))
            self._drop(oldest)
        self._add(line)
        self._guarded(line, self._receive, [data], arrived.source, now)

    def _present(self, line: Line) -> None:
        """Hand the socket of a connection whose handshake is over to its owner."""
        try:
            lane, ours = socket_pair()
        except OSError as error:
            line.carrier.close(f"no descriptor: {error}")
            return
        track(lane)
        track(ours)
        lane.remote_ip = plain_source(line.remote)
        line.sock, line.lane = ours, weakref.ref(lane)
        self._gatekeeper.take(lane, lambda: self._proved(line))

    def _proved(self, line: Line) -> None:
        def note(_now: float) -> None:
            line.is_proved = True
            line.on_proved()
            line.carrier.proved()
            self._touched[line] = None

        self._order(note)

    def _about_path(self, data: bytes, source: Address) -> None:
        line = answered(self._lines, data, source)
        if line is not None:
            self.moved += 1
            self._touched[line] = None
        elif answer := answer_to(data, self._gatekeeper.door_keys()):
            self._udp.send([(answer, source)])
        else:
            self.refused += 1
