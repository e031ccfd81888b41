"""Opens the lanes that this end of a pair dials, and asks the other end to dial the rest. On the control loop.

The dialling end first sends an `Offer` on the link, with the kind of lane and a key. The connections that follow only
have to prove that key.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from covey.base.errors import ConnectError, CoveyError
from covey.base.lane_kinds import LANE_KINDS
from covey.base.pace import Growing
from covey.base.settings import STREAMS_LIMIT
from covey.net.host.descriptors import FREE_DESCRIPTOR_SECONDS, ScarceError
from covey.runtime.backoff import Backoff
from covey.runtime.lanes.kinds import UNAVAILABLE
from covey.runtime.lanes.opener import Prepared
from covey.runtime.lanes.table import PURPOSES, LaneKey, lane_key
from covey.runtime.links.handshake import NO_ANSWER, RefusedError, receive_exactly
from covey.runtime.links.link import HANDSHAKE_SECONDS
from covey.wire import door, messages

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from covey.base.lane_kinds import LaneKind
    from covey.base.numbers import Seat
    from covey.runtime.lanes.connections import LaneConnections, LaneMaker
    from covey.runtime.lanes.groups import GroupRegistry
    from covey.runtime.lanes.kinds import LaneRules
    from covey.runtime.lanes.opener import LaneOpener
    from covey.runtime.lanes.table import LaneTable
    from covey.runtime.links.handshake import Where
    from covey.runtime.peers.peer_table import PeerTable
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.tasks import Tasks

logger = logging.getLogger("covey")

LANE_BYTES: Final = 16
LANE_SECRET_BYTES: Final = 32
DIALS_AT_ONCE: Final = 256
STREAMS_AT_ONCE: Final = 8
"""Connections of one lane that are opened at the same time: each takes several round trips, and a door has room for few
that have not proved the key yet."""
MEASURE_SECONDS: Final = 1.0
"""How long opening a lane waits for the best address to be measured."""
CONNECT_PAUSES: Final = Growing(0.02, 0.5, 1.5)
"""Between attempts to connect: the backlog is full, descriptors are short, the network is down."""
OTHER_END_DIALS: Final = "the other end opens the lanes of this pair"
"""The refusal of an offer while the two ends do not agree yet which of them dials. The offer is made again."""

ONE_STREAM: Final = "lanes of this end have one connection"
"""The refusal of an offer of several connections by an end whose executor has no such lanes. One is offered instead."""
NOT_SWITCHED: Final = "the last replacement of this lane is not in use yet"
"""The refusal of a replacement by an end that has to reach the operation at which both use the one before it."""
SWITCH_SECONDS: Final = 10.0
"""How long a replacement that is refused for that reason is offered again."""


class LaneShape(NamedTuple):
    """The connections of a replacement; without either, as many as a new lane would have."""

    ways: Sequence[Where] = ()
    """One connection over each of these addresses."""
    streams: int = 0
    """So many connections, each over the best address."""


class LaneDialler:
    """Dials the lanes of one process."""

    def __init__(
        self,
        peers: PeerTable,
        tasks: Tasks,
        groups: GroupRegistry,
        table: LaneTable,
        rules: LaneRules,
        openers: dict[str, LaneOpener],
        connections: LaneConnections,
        maker: LaneMaker,
    ) -> None:
        """`openers` are by kind."""
        self._peers, self._tasks, self._groups, self._table = peers, tasks, groups, table
        self._rules, self._openers, self._connections, self._maker = rules, openers, connections, maker
        self._dialling: set[LaneKey] = set()
        self._offers: dict[LaneKey, tuple[bytes, asyncio.Future[int]]] = {}
        """Offers to peers: the id of the lane, and the answer: a UDP port, for QUIC."""
        self._shapes: dict[LaneKey, LaneShape] = {}
        """Replacements whose connections are not those that a new lane would have."""

    def open(self, key: LaneKey) -> None:
        """Dial a lane that is waited for, or ask the other end to dial it."""
        future = self._table.get(key)
        if future is not None and not future.done():  # else it is open, or not wanted any more
            self._open(key, again=False)

    def open_as(self, key: LaneKey, shape: LaneShape) -> None:
        """Dial a replacement with these connections. It is tried once."""
        if key not in self._dialling:
            self._shapes[key] = shape
            self.open(key)

    def replace(self, key: LaneKey) -> None:
        """Dial a lane for messages, or ask the other end to dial it, even if it is open."""
        self._open(key, again=True)

    def _open(self, key: LaneKey, *, again: bool) -> None:
        if self._peers[key.peer].is_dialled:
            self._start(key, again=again)
        else:
            self._peers.send(key.peer, messages.Dial(key.group, key.purpose, self._table.attempt_of_next(key)))

    def asked(self, seat: Seat, wanted: messages.Dial) -> None:
        """Dial a lane that a peer asks for, or refuse."""
        key = lane_key(wanted.group, seat, wanted.purpose, wanted.attempt)
        # The peer has seen every offer of this end and asks for another lane: its end of the last one is broken.
        again = key.purpose == "messages" and wanted.attempt >= self._table.attempt_of_next(key)
        if self._peers[seat].is_dialled and not self._start(key, again=again):
            here, there = map(self._peers.name_of, (self._peers.seat, seat))
            reason = f"{here} has closed the group, or {there} is not in it any more"
            self._peers.send(seat, messages.NoLane(wanted.group, wanted.purpose, reason, wanted.attempt))

    def _start(self, key: LaneKey, *, again: bool) -> bool:
        """Start to open a lane, unless it is being opened, or is open and not wanted `again`; False if refused."""
        if key.purpose not in PURPOSES or self._table.is_over(key) or self._tasks.is_closing:
            return False
        future = self._table.get(key)
        is_open = future is not None and future.done() and not again
        if key not in self._dialling and not is_open and len(self._dialling) < DIALS_AT_ONCE:  # the peer asks again
            self._dialling.add(key)
            self._tasks.spawn(self._dial(key))
        return True

    async def _dial(self, key: LaneKey) -> None:
        seat = key.peer
        peer, name = self._peers[seat], self._peers.name_of(seat)
        try:
            kind = self._rules.offered_kind(seat, key.purpose)
            if kind.instead and kind.has_rings and not self._has_rings(key):
                kind = LANE_KINDS[kind.instead]
            tries = Backoff(
                f"a lane to {name}", CONNECT_PAUSES
            )  # ends with the peer, the group, or the operation's deadline
            most = STREAMS_LIMIT
            shortage = Backoff(
                f"a free descriptor for a lane to {name}", CONNECT_PAUSES, within=FREE_DESCRIPTOR_SECONDS
            )
            unused = Backoff(f"{name} to use a replaced lane", CONNECT_PAUSES, within=SWITCH_SECONDS)
            while True:
                if not peer.is_dialled:  # the peer dialled a link that replaced this one
                    self.open(key)
                    return
                attempt = self._table.attempt_of_next(key)
                try:
                    with tries.telling():
                        self._table.opened(key, attempt, await self._connect(peer, key, kind, attempt, most))
                    return
                except (ConnectError, TimeoutError) as error:
                    if peer.is_gone or self._tasks.is_closing or self._table.is_over(key) or key in self._shapes:
                        raise
                    if isinstance(error, ScarceError):
                        shortage.failed(error)
                        if shortage.is_over:
                            raise
                    else:
                        shortage.worked()
                    tries.failed(str(error) or NO_ANSWER)
                    await tries.rest()
                except RefusedError as error:
                    if str(error) == ONE_STREAM and most > 1 and key not in self._shapes:
                        most = 1
                    elif str(error) == NOT_SWITCHED and not unused.is_over:
                        unused.failed(error)
                        await unused.rest()
                    elif str(error) == UNAVAILABLE and kind.instead and not self._rules.is_demanded(kind.name):
                        kind = LANE_KINDS[kind.instead]
                    else:
                        raise
        except ScarceError as error:
            self._table.postponed(key, error)
        except CoveyError as error:
            self._table.failed(key, error)
        except (RefusedError, OSError) as error:
            self._table.failed(key, ConnectError(f"{name}: {error}"))
        finally:
            self._dialling.discard(key)
            self._shapes.pop(key, None)

    def _prepare(self, peer: RemoteProcess, key: LaneKey, kind: LaneKind) -> tuple[LaneKind, Prepared]:
        """Make what a lane of this kind needs before it is offered; return the kind that can be offered, too."""
        if not kind.has_rings or not self._has_rings(key):
            return kind, Prepared()
        try:
            return kind, self._openers[kind.name].prepare(self._rules.ring_capacity(kind, self._table.ring_bytes()))
        except ScarceError:
            raise
        except OSError as error:
            if not kind.instead:
                raise
            name = self._peers.name_of(peer.seat)
            logger.warning("no %s lane to %s (%s); using %s", kind.name, name, error, kind.instead)
            return LANE_KINDS[kind.instead], Prepared()

    async def _connect(self, peer: RemoteProcess, key: LaneKey, kind: LaneKind, attempt: int, most: int) -> Any:
        """Open a lane with `most` connections at most, unless it is a replacement of another shape."""
        purpose = key.purpose
        kind, prepared = self._prepare(peer, key, kind)
        if kind.is_sealed:
            await _measured(peer)
        shape = self._shapes.get(key, LaneShape())
        streams = len(shape.ways) or shape.streams or min(most, self._rules.stream_count(peer.seat, kind, purpose))
        offer = messages.Offer(
            secrets.token_bytes(LANE_BYTES),
            secrets.token_bytes(LANE_SECRET_BYTES),
            key.group,
            purpose,
            kind.name,
            prepared.capacity,
            streams,
            attempt,
            bool(shape.ways),
        )
        socks: list[socket.socket] = []
        try:
            udp_port = await self._make_offer(peer, offer)
            socks = await self._open_streams(peer, offer, udp_port, shape.ways)
            return await self._maker.dialled(prepared, peer.seat, socks, offer, udp_port)
        except BaseException:
            for sock in socks:
                sock.close()
            raise
        finally:
            prepared.release()

    def _has_rings(self, key: LaneKey) -> bool:
        return key.purpose != "messages" or self._groups.has_rings(key.group)

    # Offers

    async def _make_offer(self, peer: RemoteProcess, offer: messages.Offer) -> int:
        """Offer a lane; return the peer's UDP port when it expects the lane. RefusedError if it refuses."""
        if peer.link is None:
            raise ConnectError("there is no link")
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        key = lane_key(offer.group, peer.seat, offer.purpose, offer.attempt)
        self._offers[key] = offer.lane, answer
        try:
            self._peers.send(peer.seat, offer)
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                udp_port = await answer
        finally:
            del self._offers[key]
        self._table.offer_accepted(key, offer.attempt)
        return udp_port

    def accepted(self, seat: Seat, lane: bytes, udp_port: int) -> None:
        """Note that a peer expects an offered lane, by QUIC at `udp_port`."""
        for key, (offered, answer) in self._offers.items():
            if key.peer == seat and offered == lane and not answer.done():
                answer.set_result(udp_port)

    def refused(self, key: LaneKey, reason: str) -> None:
        """Note that a peer refuses an offered lane, or refuses to dial one that it was asked for."""
        _, answer = self._offers.get(key, (b"", None))
        if answer is not None:
            if not answer.done():
                again = reason == OTHER_END_DIALS
                answer.set_exception(ConnectError(reason) if again else RefusedError(reason, retry=False))
        else:
            self._table.failed(key, ConnectError(f"{self._peers.name_of(key.peer)}: {reason}"))

    def link_lost(self, peer: Seat) -> None:
        """Fail the offers to a peer whose link ended: they may not have arrived."""
        for key, (_, answer) in self._offers.items():
            if key.peer == peer and not answer.done():
                answer.set_exception(ConnectError("the link ended"))

    # Connections

    async def _open_streams(
        self, peer: RemoteProcess, offer: messages.Offer, udp_port: int, each: Sequence[Where]
    ) -> list[socket.socket]:
        """Open the connections of an offered lane, a few at a time; if one fails, close the others.

        `each` has the address for each of them, unless all may use any address of the peer.
        """
        turns = asyncio.Semaphore(STREAMS_AT_ONCE)

        async def open_one(stream: int) -> socket.socket:
            async with turns:
                return await self._open_stream(peer, offer, stream, udp_port, each[stream : stream + 1])

        tasks = [asyncio.ensure_future(open_one(stream)) for stream in range(offer.streams)]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
                task.add_done_callback(_close_unwanted)
            raise

    async def _open_stream(
        self, peer: RemoteProcess, offer: messages.Offer, stream: int, udp_port: int, only: Sequence[Where]
    ) -> socket.socket:
        """Open one connection; both ends prove that they know the key of the offered lane."""
        prove = functools.partial(self._prove, peer, offer, stream)
        return await self._connections.dial(peer, offer.kind, prove, udp_port=udp_port, only=only)

    async def _prove(self, peer: RemoteProcess, offer: messages.Offer, stream: int, sock: socket.socket) -> None:
        """Prove on a connection that this end knows the key of the offered lane, as the other end has to."""
        name = self._peers.name_of(peer.seat)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                proof = door.lane_proof(offer.secret, b"dial", offer.lane, stream)
                await asyncio.get_running_loop().sock_sendall(sock, offer.lane + bytes((stream,)) + proof)
                answer = await receive_exactly(sock, door.PROOF_BYTES)
        except OSError as error:
            if isinstance(error, ConnectError):
                raise
            raise ConnectError(f"{name} hung up on the lane: {getattr(sock, 'problem', '') or error}") from error
        if not door.proofs_equal(answer, door.lane_proof(offer.secret, b"accept", offer.lane, stream)):
            raise ConnectError(f"the process that answers for {name} does not know the lane's key")


def _close_unwanted(task: asyncio.Future[socket.socket]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


async def _measured(peer: RemoteProcess) -> None:
    """Return once the best address of a peer is known, or after MEASURE_SECONDS."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(MEASURE_SECONDS):
            await peer.measured.wait()
