"""Accepts the lanes that the other end of a pair dials. On the control loop.

A peer offers a lane on its link; this end checks the offer and expects the connections. A connection that claims a lane
must prove the key of the offer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError, ConnectError
from covey.base.lane_kinds import LANE_KINDS
from covey.base.pace import Growing
from covey.base.settings import STREAMS_LIMIT
from covey.net.host import descriptors
from covey.runtime.backoff import Backoff
from covey.runtime.lanes.dialler import LANE_BYTES, LANE_SECRET_BYTES, NOT_SWITCHED, ONE_STREAM, OTHER_END_DIALS
from covey.runtime.lanes.table import PURPOSES, REPLACEMENT, lane_key
from covey.runtime.links.handshake import receive_exactly
from covey.runtime.links.link import HANDSHAKE_SECONDS
from covey.wire import door, messages

if TYPE_CHECKING:
    import socket

    from covey.base.numbers import Seat
    from covey.runtime.lanes.connections import LaneConnections, LaneMaker
    from covey.runtime.lanes.groups import GroupRegistry
    from covey.runtime.lanes.kinds import LaneRules
    from covey.runtime.lanes.resumption import LaneResumption
    from covey.runtime.lanes.table import LaneTable
    from covey.runtime.peers.peer_table import PeerTable
    from covey.runtime.tasks import Tasks

LANES_LIMIT: Final = 100_000


@dataclass
class _Expected:
    """A lane that a peer has offered, with the connections that have arrived so far."""

    peer: Seat
    offer: messages.Offer
    timer: asyncio.TimerHandle
    """Ends the wait for the connections. It is cancelled with that: it refers to the node."""
    socks: dict[int, socket.socket] = field(default_factory=dict)


class LaneAcceptor:
    """Accepts the lanes that peers offer to one process."""

    def __init__(
        self,
        peers: PeerTable,
        tasks: Tasks,
        groups: GroupRegistry,
        table: LaneTable,
        rules: LaneRules,
        connections: LaneConnections,
        maker: LaneMaker,
        resumption: LaneResumption,
        *,
        may_stripe: bool,
    ) -> None:
        """Connections that claim a stream that exists go to `resumption`."""
        self._peers, self._tasks, self._groups, self._table = peers, tasks, groups, table
        self._rules, self._connections, self._maker, self._resumption = rules, connections, maker, resumption
        self._may_stripe = may_stripe
        self._expected: dict[bytes, _Expected] = {}
        self.shortage = Backoff("free descriptors for lanes that peers dial", Growing(0.0, 0.0))
        """Since when such lanes fail for want of a descriptor; the peers pace the tries. Read on any thread."""

    def offered(self, seat: Seat, offer: messages.Offer) -> None:
        """Expect the lane that a peer offers, or tell the peer why not."""
        if reason := self._objection(seat, offer):
            self._peers.send(seat, messages.NoLane(offer.group, offer.purpose, reason, offer.attempt))
            return
        try:
            udp_port = self._connections.own_port(offer.kind)
        except (ConfigError, OSError) as error:
            self._peers.send(seat, messages.NoLane(offer.group, offer.purpose, str(error), offer.attempt))
            return
        timer = asyncio.get_running_loop().call_later(2 * HANDSHAKE_SECONDS, self._stop_expecting, offer.lane)
        self._expected[offer.lane] = _Expected(seat, offer, timer)
        self._table.offer_accepted(lane_key(offer.group, seat, offer.purpose, offer.attempt), offer.attempt)
        self._peers.send(seat, messages.Expect(offer.lane, udp_port))

    def _objection(self, seat: Seat, offer: messages.Offer) -> str:
        """Return why an offer is refused, or an empty string."""
        if self._peers[seat].is_dialled:
            return OTHER_END_DIALS
        if offer.purpose not in PURPOSES:
            return f"there are no lanes for {offer.purpose!r}"
        if (len(offer.lane), len(offer.secret)) != (LANE_BYTES, LANE_SECRET_BYTES) or offer.lane in self._expected:
            return "the lane's id or key is not usable"
        kind = LANE_KINDS.get(offer.kind)
        if not 1 <= offer.streams <= STREAMS_LIMIT or (offer.streams > 1 and not (kind and kind.is_sealed)):
            return f"{offer.streams} streams of kind {offer.kind!r} do not make a lane"
        if offer.streams > self._rules.most_streams:
            return ONE_STREAM
        if offer.purpose == REPLACEMENT and offer.streams > 1 and offer.streams > descriptors.left():
            return f"this process cannot open {offer.streams} streams; raise the limit with ulimit -n"
        if offer.is_striped and not (kind and kind.can_spread and offer.purpose == REPLACEMENT):
            return f"a lane of kind {offer.kind!r} for {offer.purpose!r} is not over several networks"
        if offer.is_striped and not self._may_stripe:
            return "lanes over several networks are switched off here"
        if not self._rules.may_have_capacity(offer.kind, offer.purpose, offer.capacity):
            return f"a ring of {offer.capacity} bytes is not usable"
        name = self._peers.name_of(seat)
        if reason := self._rules.objection(seat, offer.kind, offer.purpose):
            return reason
        key = lane_key(offer.group, seat, offer.purpose, offer.attempt)
        if self._peers[seat].is_excluded:
            return f"the run continues without {name}"
        if not self._groups.has_member(offer.group, seat):
            return f"{name} of the run is not in this group"
        if self._table.is_over(key) or self._tasks.is_closing:
            return f"{self._peers.name_of(self._peers.seat)} has closed the group"
        if self._table.is_open(key, offer.attempt):
            return NOT_SWITCHED if offer.purpose == REPLACEMENT else "this lane is open already"
        if len(self._table) + len(self._expected) > LANES_LIMIT:
            return f"this process has {LANES_LIMIT} lanes already"
        return ""

    def stop_expecting(self, peer: Seat | None = None) -> None:
        """Close the connections of lanes that are not complete: of one peer, or of all."""
        for lane in [lane for lane, expected in self._expected.items() if peer in (None, expected.peer)]:
            self._stop_expecting(lane)

    def _stop_expecting(self, lane: bytes) -> None:
        if lane in self._expected:
            for sock in self._taken(lane).socks.values():
                sock.close()

    def _taken(self, lane: bytes) -> _Expected:
        """Return a lane that is not expected any more."""
        expected = self._expected.pop(lane)
        expected.timer.cancel()
        return expected

    async def claim(self, sock: socket.socket) -> None:
        """Take a connection that claims to belong to a lane; it must prove the lane's key.

        Owns the socket from now on. Raises OSError, TimeoutError or a CoveyError if the claim fails.
        """
        socks = [sock]
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                claim = await receive_exactly(sock, LANE_BYTES + 1 + door.PROOF_BYTES)
                lane, stream, proof = claim[:LANE_BYTES], claim[LANE_BYTES], claim[LANE_BYTES + 1 :]
                if self._resumption.is_claimed(stream):
                    await self._resumption.claim(sock, lane, stream, proof)
                    return
                expected = await self._prove_claim(sock, lane, stream, proof)
                offer = expected.offer
                if len(expected.socks) < offer.streams:
                    return
                self._taken(offer.lane)
                socks = [expected.socks[stream] for stream in range(offer.streams)]
                opened = await self._maker.accepted(expected.peer, socks, offer)
        except BaseException as error:
            for each in socks:
                each.close()
            if isinstance(error, OSError) and descriptors.is_exhausted(error):
                self.shortage.failed(descriptors.explain(error))
            raise
        self.shortage.worked()
        key = lane_key(offer.group, expected.peer, offer.purpose, offer.attempt)
        self._table.opened(key, offer.attempt, opened)

    async def _prove_claim(self, sock: socket.socket, lane: bytes, stream: int, proof: bytes) -> _Expected:
        expected = self._expected.get(lane)
        if expected is None or stream >= expected.offer.streams or stream in expected.socks:
            raise ConnectError("a connection claimed a lane that is not expected")
        secret = expected.offer.secret
        if not door.proofs_equal(proof, door.lane_proof(secret, b"dial", lane, stream)):
            raise ConnectError("a connection claimed a lane without its key")
        answer = door.lane_proof(secret, b"accept", lane, stream)
        await asyncio.get_running_loop().sock_sendall(sock, answer)
        if self._expected.get(lane) is not expected or expected.socks.setdefault(stream, sock) is not sock:
            raise ConnectError("the lane was claimed by another connection in the meantime")
        return expected
