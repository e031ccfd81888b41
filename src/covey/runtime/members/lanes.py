"""Opens the lanes of groups.

Any thread can ask for a lane; it is opened on the control loop. One end of each pair dials; if the other end needs the
lane, it asks that end with `Dial`. The dialling end first sends an `Offer` on the link, with the kind of lane and a
key. The connections that follow only have to prove that key.

Lanes for collectives are made anew in every view. A lane for messages is replaced when it breaks; `Offer.attempt` and
`Dial.attempt` then carry its epoch (`members.epochs`). No lane is opened to, or accepted from, a process that a view
has excluded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from covey.base.config import STREAMS_LIMIT
from covey.base.errors import ClosedError, ConfigError, ConnectError, CoveyError, DeadlineError
from covey.net.lanes import memory, shm
from covey.net.lanes.factory import LaneFactory
from covey.net.lanes.ring import RingLane, memory_bytes
from covey.runtime import loop as control
from covey.runtime.links.handshake import RefusedError, ScarceError, connect_any, receive_exactly
from covey.runtime.links.link import HANDSHAKE_SECONDS
from covey.runtime.log_limiter import LimitedLog
from covey.runtime.members.epochs import Epochs
from covey.wire import door, greeting, messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.net.lanes.lane import Lane
    from covey.runtime.links.handshake import LinkCredentials
    from covey.runtime.members.node import Node
    from covey.runtime.members.peers import Peer

logger = logging.getLogger("covey")

LARGE_RING_BYTES: Final = 2 << 20
SMALL_RING_BYTES: Final = 128 << 10
LARGE_RINGS_TOTAL_BYTES: Final = 64 << 20
"""Rings are large until a process has this many bytes of them, then small: a program may have dozens of groups."""
DIALS_AT_ONCE: Final = 256
SCARCE_SECONDS: Final = 10.0
"""Shortest time between two log lines about lanes that cannot be opened for want of a descriptor."""
LANES_LIMIT: Final = 100_000
CLOSED_GROUPS_KEPT: Final = 10_000
MEASURE_SECONDS: Final = 1.0
"""How long opening a lane waits for the best address to be measured."""
STREAMS_BY_ROUND_TRIP: Final = ((0.02, 1), (0.06, 4))
"""Connections of a lane, by round trip in seconds: on each the kernel sends a few megabytes without acknowledgement."""
STREAMS_FAR: Final = 8
PURPOSES: Final = ("collectives", "messages")
LANE_BYTES: Final = 16
NOT_YOURS: Final = "the other end opens the lanes of this pair"
SECRET_BYTES: Final = 32
REPLACE_SECONDS: Final = (0.3, 1.5)
"""Seconds after the replacement of a link at which its lanes for messages are replaced: first and second try."""
FIRST_PAUSE_SECONDS: Final = 0.02
MOST_PAUSE_SECONDS: Final = 0.5
"""Longest pause between attempts to connect: the backlog is full, descriptors are short, the network is down."""


class LaneKey(NamedTuple):
    """The purpose of a lane."""

    group: int
    peer: int
    """Its seat in the run."""
    purpose: str
    attempt: int = 0
    """The view number, for collectives of groups that survive losses: no byte of one attempt reaches the next.

    0 for messages, whose lanes are replaced one by one.
    """


def lane_key(group: int, peer: int, purpose: str, attempt: int) -> LaneKey:
    """Return the key of a lane, from the fields of a message about it."""
    return LaneKey(group, peer, purpose, 0 if purpose == "messages" else attempt)


@dataclass
class _Expected:
    """A lane that a peer has offered, with the connections that have arrived so far."""

    peer: int
    offer: messages.Offer
    socks: dict[int, socket.socket] = field(default_factory=dict)


class Lanes:
    """The lanes of one node, open or being opened."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.factory = LaneFactory(may_seal=node.credentials.tls is not None or node.config.lanes == "secure")
        self._lock = threading.Lock()
        self._lanes: dict[LaneKey, Future[Any]] = {}
        self._dialling: set[LaneKey] = set()
        self._offers: dict[LaneKey, tuple[bytes, asyncio.Future[None]]] = {}
        """Offers to peers: the id of the lane, and the answer."""
        self._expected: dict[bytes, _Expected] = {}
        self._closed_groups: dict[int, int] = {}
        """By closed group: its last operation."""
        self._first_attempts: dict[int, int] = {}
        """By group: the attempt before which lanes are refused."""
        self._log = LimitedLog(SCARCE_SECONDS)
        self._epochs = Epochs()
        self._given_up: set[LaneKey] = set()
        """Lanes for messages that are not replaced when they break."""

    # For groups, on any thread

    def kind(self, peer: int) -> str:
        """Return the kind of lane that this pair uses, from facts that both ends know."""
        forced = self._node.config.lanes
        contact = self._node.peers[peer].contact
        here = contact is not None and contact.host == self._node.host
        in_clear = here or self._node.credentials.tls is None  # without TLS between hosts, the user has allowed it
        if forced in ("memory", "secure") or (forced in ("shm", "unix") and here) or (forced == "tcp" and in_clear):
            return forced
        if forced in ("shm", "unix"):
            raise ConfigError(f"lanes={forced!r} works on one host only, but rank {peer} is on another")
        if forced == "tcp":
            raise ConfigError(f"lanes='tcp' is clear text, and rank {peer} is on another host; use auto or secure")
        if here:
            return "shm" if shm.usable() else "unix"
        return "tcp" if in_clear else "secure"

    def open(self, group: int, peer: int, purpose: str, timeout: float, attempt: int = 0) -> Any:
        """Return the lane (for collectives) or the socket (for messages) to `peer`, opened if need be.

        Raises:
            ConnectError: the peer is gone, or refused.
            ClosedError: the group, or the attempt, is over here.
            DeadlineError: the lane did not open in time; call again to go on waiting.
        """
        future = self._request(LaneKey(group, peer, purpose, attempt))
        try:
            return future.result(timeout)
        except TimeoutError:
            raise DeadlineError(f"no lane to rank {peer} within the timeout of {timeout:g} s", late=(peer,)) from None

    def _request(self, key: LaneKey) -> Future[Any]:
        peer = key.peer
        with self._lock:
            future = self._lanes.get(key)
            if future is not None and future.done():
                return future
            if future is None:
                future = Future()
                if self._node.peers[peer].is_excluded:
                    future.set_exception(ConnectError(f"rank {peer} is gone"))
                    return future
                if self._node.is_closing or self._is_over(key):  # nothing would ever end the wait
                    future.set_exception(ClosedError("the group was closed"))
                    return future
                self._lanes[key] = future
        control.soon(self._ask, key)
        if self._node.peers[peer].is_gone:
            self._failed(key, ConnectError(f"rank {peer} is gone"))
        return future

    def _ask(self, key: LaneKey) -> None:
        """Dial a lane, or ask the other end to dial it. On the control loop."""
        future = self._lanes.get(key)
        if future is None or future.done():
            return  # it is open, or not wanted any more
        if self._node.peers[key.peer].is_dialled:
            self.dial(key)
        else:
            attempt = self._epochs.next(key) if key.purpose == "messages" else key.attempt
            self._node.send(key.peer, messages.Dial(key.group, key.purpose, attempt))

    def renew(self, group: int, peer: int, ended: Any) -> Future[Any]:
        """Ask for a lane for messages to replace `ended`; the future has it, or the error that `open` would raise."""
        key = LaneKey(group, peer, "messages")
        with self._lock:
            future = self._lanes.get(key)
            if future is not None and future.done() and future.exception() is None and future.result() is ended:
                del self._lanes[key]
        return self._request(key)

    def give_up(self, group: int, peer: int) -> None:
        """Stop replacing the lane for messages with a peer: its stream cannot be resumed."""
        key = LaneKey(group, peer, "messages")
        with self._lock:
            self._given_up.add(key)
        self.abandon(lambda each: each == key, ClosedError("no more messages are exchanged with this rank"))

    def arrived(self, group: int, purpose: str) -> dict[int, Any]:
        """Return the open lanes of a group, by peer."""
        with self._lock:
            return {
                key.peer: future.result()
                for key, future in self._lanes.items()
                if (key.group, key.purpose) == (group, purpose) and future.done() and future.exception() is None
            }

    def ended(self, group: int, sequence: int) -> bool:
        """Tell whether a group was closed here before operation `sequence`."""
        return self._closed_groups.get(group, sequence) < sequence

    def forget(self, group: int, sequence: int) -> None:
        """Close the lanes of a group, and refuse later ones."""
        with self._lock:
            self._closed_groups[group] = sequence
            while len(self._closed_groups) > CLOSED_GROUPS_KEPT:
                del self._closed_groups[next(iter(self._closed_groups))]
            self._first_attempts.pop(group, None)
            self._epochs.forget(group)
            self._given_up = {key for key in self._given_up if key.group != group}
        self._drop(lambda key: key.group == group)

    def retire(self, group: int, attempt: int) -> None:
        """Close the lanes of a group's attempts before this one. No thread may be using them."""
        with self._lock:
            self._first_attempts[group] = attempt
        self._drop(lambda key: key.group == group and key.purpose == "collectives" and key.attempt < attempt)

    def part_with(self, peer: int) -> None:
        """Shut down the lanes to a peer that a view excluded, and fail the waits for them. On the control loop.

        What the peer sent before is still read; the users of the lanes close them. If the peer said goodbye, lanes for
        collectives stay open: the last bytes of its part may still be on the way to a group that ends with its first
        loss.
        """
        self.abandon(lambda key: key.peer == peer, ConnectError(f"seat {peer} is gone"))
        for lane in [lane for lane, expected in self._expected.items() if expected.peer == peer]:
            self._stop_expecting(lane)
        has_left = self._node.peers[peer].has_left
        with self._lock:
            futures = [
                future
                for key, future in self._lanes.items()
                if key.peer == peer and not (has_left and key.purpose == "collectives")
            ]
        for future in futures:
            if future.done() and future.exception() is None:
                with contextlib.suppress(OSError):  # it has ended already
                    future.result().shutdown(socket.SHUT_RDWR)

    def _drop(self, unwanted: Callable[[LaneKey], bool]) -> None:
        with self._lock:
            futures = [self._lanes.pop(key) for key in [key for key in self._lanes if unwanted(key)]]
        for future in futures:
            _close_future(future)

    def abandon(self, unwanted: Callable[[LaneKey], bool], error: BaseException) -> None:
        """Fail the waits for lanes that will not open."""
        with self._lock:
            keys = [key for key, future in self._lanes.items() if unwanted(key) and not future.done()]
        for key in keys:
            self._failed(key, error)

    def link_lost(self, peer: int) -> None:
        """Fail the offers to a peer whose link ended: they may not have arrived. On the control loop."""
        for key, (_, answer) in self._offers.items():
            if key.peer == peer and not answer.done():
                answer.set_exception(ConnectError("the link ended"))

    def link_up(self, peer: int) -> None:
        """Ask again, on the new link with a peer, for the lanes that are waited for. On the control loop.

        Where a link broke, lanes may have broken unnoticed. Lanes for messages are replaced, which loses nothing, a
        moment later: by then both ends know which of them dials.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            futures = [(key, future) for key, future in self._lanes.items() if key.peer == peer]
        for key, future in futures:
            if not future.done():
                self._ask(key)
            elif key.purpose == "messages":
                for seconds in REPLACE_SECONDS:
                    loop.call_later(seconds, self._replace, key, future)

    def _replace(self, key: LaneKey, before: Future[Any]) -> None:
        """Replace a lane for messages, unless it was replaced already."""
        peer = self._node.peers[key.peer]
        if self._lanes.get(key) is not before or peer.link is None or self._node.is_closing:
            return
        if peer.is_dialled:
            self.dial(key, again=True)
        else:
            self._node.send(key.peer, messages.Dial(key.group, key.purpose, self._epochs.next(key)))

    def stop_expecting(self) -> None:
        """Close the connections of lanes that are not complete. On the control loop."""
        for lane in list(self._expected):
            self._stop_expecting(lane)

    def close(self) -> None:
        """Close all lanes."""
        with self._lock:
            futures, self._lanes = list(self._lanes.values()), {}
        for future in futures:
            _close_future(future)

    # Dialling, on the control loop

    def asked(self, rank: int, wanted: messages.Dial) -> None:
        """Dial a lane that a peer asks for, or refuse."""
        key = lane_key(wanted.group, rank, wanted.purpose, wanted.attempt)
        # The peer has seen every offer of this end and asks for another lane: its end of the last one is broken.
        again = key.purpose == "messages" and wanted.attempt >= self._epochs.next(key)
        if self._node.peers[rank].is_dialled and not self.dial(key, again=again):
            reason = f"rank {self._node.rank} has closed the group, or rank {rank} is not in it any more"
            self._node.send(rank, messages.NoLane(wanted.group, wanted.purpose, reason, wanted.attempt))

    def dial(self, key: LaneKey, *, again: bool = False) -> bool:
        """Start to open a lane, unless it is being opened, or is open and not wanted `again`; False if refused."""
        if key.purpose not in PURPOSES or self._is_over(key) or self._node.is_closing:
            return False
        future = self._lanes.get(key)
        is_open = future is not None and future.done() and not again
        if key not in self._dialling and not is_open and len(self._dialling) < DIALS_AT_ONCE:  # the peer asks again
            self._dialling.add(key)
            self._node.spawn(self._dial(key))
        return True

    async def _dial(self, key: LaneKey) -> None:
        rank, purpose = key.peer, key.purpose
        peer = self._node.peers[rank]
        try:
            kind = self.kind(rank)
            if purpose == "messages" and kind == "shm":
                kind = "unix"
            pause = FIRST_PAUSE_SECONDS
            while True:
                if not peer.is_dialled:  # the peer dialled a link that replaced this one
                    self._ask(key)
                    return
                attempt = self._epochs.next(key) if purpose == "messages" else key.attempt
                try:
                    self._opened(key, attempt, await self._connect(peer, key, kind, attempt))
                    return
                except (ConnectError, TimeoutError) as error:
                    if peer.is_gone or self._node.is_closing or self._is_over(key):
                        raise
                    if isinstance(error, ScarceError):
                        self._log.log(logging.WARNING, "no lane to rank %d can be opened now: %s", rank, error)
                    await asyncio.sleep(pause)  # a full backlog, or out of descriptors
                    pause = min(MOST_PAUSE_SECONDS, 1.5 * pause)
        except CoveyError as error:
            self._failed(key, error)
        except (RefusedError, OSError) as error:
            self._failed(key, ConnectError(f"rank {rank}: {error}"))
        finally:
            self._dialling.discard(key)

    def _is_over(self, key: LaneKey) -> bool:
        if key.purpose == "collectives" and key.attempt < self._first_attempts.get(key.group, 0):
            return True
        if key.group in self._closed_groups or key in self._given_up or self._node.peers[key.peer].is_excluded:
            return True
        return not self._node.groups.has_member(key.group, key.peer)

    async def _connect(self, peer: Peer, key: LaneKey, kind: str, attempt: int) -> Any:
        purpose, capacity = key.purpose, 0
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
        if kind == "secure":
            await _measured(peer)
        streams = self._streams(peer) if purpose == "collectives" and kind == "secure" else 1
        offer = messages.Offer(
            secrets.token_bytes(LANE_BYTES),
            secrets.token_bytes(SECRET_BYTES),
            key.group,
            purpose,
            kind,
            capacity,
            streams,
            attempt,
        )
        socks: list[socket.socket] = []
        try:
            await self._make_offer(peer, offer)
            for stream in range(streams):
                socks.append(await self._open_stream(peer, offer, stream))
            if segment is not None:
                await _hand_over(socks[0], descriptor, name, segment)
                return self.factory.ring(segment, capacity, socks[0], first=True, kind=kind)
            return self._make_lane(socks, offer, dialler=True)
        except BaseException:
            for sock in socks:
                sock.close()
            raise
        finally:
            memory.take(name)  # if the peer has not taken it
            if descriptor >= 0:
                os.close(descriptor)

    def _streams(self, peer: Peer) -> int:
        """Return how many connections a lane gets: more where one would spend its time waiting for acknowledgements."""
        wanted = self._node.config.streams
        if wanted != "auto":
            return int(wanted)
        return next((count for limit, count in STREAMS_BY_ROUND_TRIP if peer.round_trip < limit), STREAMS_FAR)

    async def _make_offer(self, peer: Peer, offer: messages.Offer) -> None:
        """Offer a lane, and return when the peer expects it; RefusedError if it refuses."""
        if peer.link is None:
            raise ConnectError("there is no link")
        answer = asyncio.get_running_loop().create_future()
        key = lane_key(offer.group, peer.rank, offer.purpose, offer.attempt)
        self._offers[key] = offer.lane, answer
        try:
            self._node.send(peer.rank, offer)
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await answer
        finally:
            del self._offers[key]
        self._note(key, offer)

    def _note(self, key: LaneKey, offer: messages.Offer) -> None:
        """Note the epoch of an offer that was accepted."""
        if key.purpose == "messages":
            with self._lock:
                self._epochs.seen(key, offer.attempt)

    async def _open_stream(self, peer: Peer, offer: messages.Offer, stream: int) -> socket.socket:
        """Connect to the first address that works; both ends prove that they know the key of the offered lane.

        A peer that hangs up may not know the cluster's new secret: the previous one is tried while it is valid.
        """
        *others, last = self._node.credentials.good()
        for credentials in others:
            with contextlib.suppress(ConnectError):
                return await self._connect_stream(peer, offer, stream, credentials)
        return await self._connect_stream(peer, offer, stream, last)

    async def _connect_stream(
        self, peer: Peer, offer: messages.Offer, stream: int, credentials: LinkCredentials
    ) -> socket.socket:
        ways = self._node.ways_to(peer, offer.kind)
        if not ways:
            raise ConfigError(f"rank {peer.rank} has no address that can be dialled from here")
        sock = await connect_any(ways, credentials, door.Purpose.LANE)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                proof = greeting.lane_proof(offer.secret, b"dial", offer.lane, stream)
                await asyncio.get_running_loop().sock_sendall(sock, offer.lane + bytes((stream,)) + proof)
                answer = await receive_exactly(sock, greeting.PROOF_BYTES)
            if not greeting.proofs_equal(answer, greeting.lane_proof(offer.secret, b"accept", offer.lane, stream)):
                raise ConnectError(f"the process that answers for rank {peer.rank} does not know the lane's key")
            return sock
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError) and not isinstance(error, ConnectError):
                raise ConnectError(f"rank {peer.rank} hung up on the lane: {error}") from error
            raise

    def expected(self, rank: int, lane: bytes) -> None:
        """Note that a peer expects an offered lane."""
        for key, (offered, answer) in self._offers.items():
            if key.peer == rank and offered == lane and not answer.done():
                answer.set_result(None)

    def refused(self, key: LaneKey, reason: str) -> None:
        """Note that a peer refuses an offered lane, or refuses to dial one that it was asked for."""
        _, answer = self._offers.get(key, (b"", None))
        if answer is not None:
            if not answer.done():
                again = reason == NOT_YOURS  # the two ends do not agree yet which of them dials
                answer.set_exception(ConnectError(reason) if again else RefusedError(reason, retry=False))
        else:
            self._failed(key, ConnectError(f"rank {key.peer}: {reason}"))

    def _next_ring_bytes(self) -> int:
        with self._lock:
            opened = [future.result() for future in self._lanes.values() if future.done() and not future.exception()]
        in_use = sum(2 * lane.capacity for lane in opened if isinstance(lane, RingLane))
        return LARGE_RING_BYTES if in_use + 2 * LARGE_RING_BYTES <= LARGE_RINGS_TOTAL_BYTES else SMALL_RING_BYTES

    # Being dialled, on the control loop

    def offered(self, rank: int, offer: messages.Offer) -> None:
        """Expect the lane that a peer offers, or tell the peer why not."""
        if reason := self._objection(rank, offer):
            self._node.send(rank, messages.NoLane(offer.group, offer.purpose, reason, offer.attempt))
            return
        self._expected[offer.lane] = _Expected(rank, offer)
        self._note(lane_key(offer.group, rank, offer.purpose, offer.attempt), offer)
        asyncio.get_running_loop().call_later(2 * HANDSHAKE_SECONDS, self._stop_expecting, offer.lane)
        self._node.send(rank, messages.Expect(offer.lane))

    def _objection(self, rank: int, offer: messages.Offer) -> str:
        if self._node.peers[rank].is_dialled:
            return NOT_YOURS
        if offer.purpose not in PURPOSES:
            return f"there are no lanes for {offer.purpose!r}"
        if (len(offer.lane), len(offer.secret)) != (LANE_BYTES, SECRET_BYTES) or offer.lane in self._expected:
            return "the lane's id or key is not usable"
        if not 1 <= offer.streams <= STREAMS_LIMIT or (offer.streams > 1 and offer.kind != "secure"):
            return f"{offer.streams} streams of kind {offer.kind!r} do not make a lane"
        has_rings = offer.purpose == "collectives" and offer.kind in ("shm", "memory")
        if offer.capacity not in ((LARGE_RING_BYTES, SMALL_RING_BYTES) if has_rings else (0,)):
            return f"a ring of {offer.capacity} bytes is not usable"
        if offer.kind not in self._acceptable(rank, offer):
            return f"the lane to rank {rank} is {self.kind(rank)!r} here and {offer.kind!r} there"
        key = lane_key(offer.group, rank, offer.purpose, offer.attempt)
        if self._node.peers[rank].is_excluded:
            return f"the run goes on without rank {rank}"
        if not self._node.groups.has_member(offer.group, rank):
            return f"rank {rank} of the run is not in this group"
        if self._is_over(key) or self._node.is_closing:
            return f"rank {self._node.rank} has closed the group"
        future = self._lanes.get(key)
        is_open = future is not None and future.done()
        if key.purpose == "messages":
            is_open = self._epochs.is_past(key, offer.attempt)
        if is_open or len(self._lanes) + len(self._expected) > LANES_LIMIT:
            return "this lane is open already"
        return ""

    def _acceptable(self, rank: int, offer: messages.Offer) -> set[str]:
        """Return the kinds that a lane may have, so that no peer can choose one that third parties can read."""
        kind = self.kind(rank)
        if kind != "shm":
            return {kind}
        return {"unix"} if offer.purpose == "messages" else {"shm", "unix"}  # unix, if the peer had no shared memory

    def _stop_expecting(self, lane: bytes) -> None:
        expected = self._expected.pop(lane, None)
        if expected is not None:
            for sock in expected.socks.values():
                sock.close()

    async def claim(self, sock: socket.socket) -> None:
        """Take a connection that claims to belong to a lane; it must prove the lane's key.

        Owns the socket from now on. Raises OSError, TimeoutError or a CoveyError if the claim fails.
        """
        socks = [sock]
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                expected = await self._prove_claim(sock)
                offer = expected.offer
                if len(expected.socks) < offer.streams:
                    return
                del self._expected[offer.lane]
                socks = [expected.socks[stream] for stream in range(offer.streams)]
                opened = await self._take_over(expected.peer, offer, socks)
        except BaseException:
            for each in socks:
                each.close()
            raise
        self._opened(lane_key(offer.group, expected.peer, offer.purpose, offer.attempt), offer.attempt, opened)

    async def _prove_claim(self, sock: socket.socket) -> _Expected:
        claim = await receive_exactly(sock, LANE_BYTES + 1 + greeting.PROOF_BYTES)
        lane, stream, proof = claim[:LANE_BYTES], claim[LANE_BYTES], claim[LANE_BYTES + 1 :]
        expected = self._expected.get(lane)
        if expected is None or stream >= expected.offer.streams or stream in expected.socks:
            raise ConnectError("a connection claimed a lane that is not expected")
        secret = expected.offer.secret
        if not greeting.proofs_equal(proof, greeting.lane_proof(secret, b"dial", lane, stream)):
            raise ConnectError("a connection claimed a lane without its key")
        answer = greeting.lane_proof(secret, b"accept", lane, stream)
        await asyncio.get_running_loop().sock_sendall(sock, answer)
        if self._expected.get(lane) is not expected or expected.socks.setdefault(stream, sock) is not sock:
            raise ConnectError("the lane was claimed by another connection in the meantime")
        return expected

    async def _take_over(self, rank: int, offer: messages.Offer, socks: list[socket.socket]) -> Any:
        if not offer.capacity:
            return self._make_lane(socks, offer, dialler=False)
        sock, nbytes = socks[0], memory_bytes(offer.capacity)
        segment: Any
        if offer.kind == "shm":
            await _readable(sock)
            _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
            if len(descriptors) != 1:
                raise ConnectError(f"rank {rank} sent no shared memory")
            segment = shm.attach(descriptors[0], nbytes)
        else:
            segment = memory.take((await receive_exactly(sock, 32)).decode("ascii", "replace"))
            if segment is None or len(segment) != nbytes:
                raise ConnectError(f"rank {rank} is not a thread of this process")
        word = bytes(memoryview(segment).cast("B")[-32:])
        await asyncio.get_running_loop().sock_sendall(sock, word)
        return self.factory.ring(segment, offer.capacity, sock, first=False, kind=offer.kind)

    def _make_lane(self, socks: list[socket.socket], offer: messages.Offer, *, dialler: bool) -> Any:
        """Return the lane (for collectives) or the socket (for messages) that connected sockets make."""
        if offer.purpose == "collectives":
            if offer.kind == "secure":
                return self.factory.sealed(socks, offer.secret, offer.lane, dialler=dialler)
            return self.factory.stream(socks[0], offer.kind)
        if offer.kind != "secure":
            return socks[0]
        from covey.net.lanes.sealed import SealedSocket  # slow to import, and not needed by ranks of one host

        return SealedSocket(socks[0], offer.secret, offer.lane, dialler=dialler)

    # Outcomes

    def _opened(self, key: LaneKey, attempt: int, lane: Any) -> None:
        with self._lock:
            future = self._lanes.get(key)
            replaced = future if future is not None and future.done() else None
            is_old = replaced is not None
            if key.purpose == "messages":
                is_old = self._epochs.is_past(key, attempt)
            is_wanted = not is_old and not self._node.is_closing and not self._is_over(key)
            if is_wanted:
                if key.purpose == "messages":
                    self._epochs.opened(key, attempt)
                if future is None or replaced is not None:
                    future = self._lanes[key] = Future()
                future.set_result(lane)
        if not is_wanted:
            lane.close()
        elif not self._node.groups.lane_arrived(key, lane) and replaced is not None:
            _close_future(replaced)  # the group has not used it

    def _failed(self, key: LaneKey, error: BaseException) -> None:
        with self._lock:
            future = self._lanes.get(key)
            if future is not None and not future.done():
                future.set_exception(error)


async def _measured(peer: Peer) -> None:
    """Return once the best address of a peer is known, or after MEASURE_SECONDS."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(MEASURE_SECONDS):
            await peer.measured.wait()


async def _hand_over(sock: socket.socket, descriptor: int, name: str, segment: Any) -> None:
    """Give the peer a segment, and check that it reads a random word there."""
    word = secrets.token_bytes(32)
    memoryview(segment).cast("B")[-32:] = word
    if descriptor >= 0:
        socket.send_fds(sock, [b"\0"], [descriptor])
    else:
        await asyncio.get_running_loop().sock_sendall(sock, name.encode())
    async with asyncio.timeout(HANDSHAKE_SECONDS):
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
    """Close the lane that a future holds, or fail the wait for it."""
    if not future.done():
        future.set_exception(ClosedError("the group was closed"))
    elif future.exception() is None:
        future.result().close()
