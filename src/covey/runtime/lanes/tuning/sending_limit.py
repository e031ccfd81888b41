"""The setting `limit`: how much this machine sends over TCP, whichever lanes are in use. On the control loop.

The kernel spaces out what each connection sends (`tcp.pace`), so no thread that moves data has to count or to wait.
This module only divides the limit among the connections, a few times a second, by what each of them has sent
(`rate_shares`): the limit holds on average over a second. A peer whose machine has a limit allows this node so much
(`ReceivingLimit`); the connections with it share that.

Connections of small calls are not slowed down by the others: tensors, messages and the parts of large calls share what
they leave, and parts have most of it while there are any. Control messages on links are few, and are not counted.
"""

from __future__ import annotations

import contextlib
import socket
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError
from covey.net.host import tcp
from covey.runtime.lanes.tuning.rate_shares import Demand, RateBudget, divide
from covey.runtime.lanes.tuning.urgency import Urgency
from covey.runtime.tasks import Recurring

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.base.numbers import Seat
    from covey.runtime.peers.peer_table import PeerTable
    from covey.runtime.tasks import Tasks

SENDING_DIVIDE_SECONDS: Final = 0.05
"""How often the limit is divided anew: a connection that begins to send waits about that long for its share."""
SENDING_REPAY_SECONDS: Final = 0.25
"""In how much time the connections make up for what they sent too much: the kernel sends at least two packets at once,
which is much for a slow connection."""
PAYLOAD_SHARE: Final = 0.95
"""Of a packet with 1448 bytes of payload: the rest is Ethernet's and TCP's."""


@dataclass
class _Paced:
    """A connection that a limit may concern."""

    sock: weakref.ref[socket.socket]
    group: int
    peer: Seat
    acknowledged: int = 0
    rate: int = tcp.UNPACED

    @property
    def is_open(self) -> bool:
        sock = self.sock()
        return sock is not None and sock.fileno() >= 0


class SendingLimit:
    """Divides the limit of one machine's share of a run, and what peers allow, among this process's connections."""

    def __init__(self, limit: float, peers: PeerTable, tasks: Tasks, urgency: Callable[[int], Urgency]) -> None:
        """`limit` is the setting; `urgency` tells how the connections of a group give way to others.

        Raises:
            ConfigError: there is a limit, and this system cannot keep it.
        """
        self._limit, self._peers, self._urgency, self._paced = limit, peers, urgency, list[_Paced]()
        self._allowed: dict[Seat, int] = {}
        """Bytes a second that peers take."""
        self._budget = RateBudget(SENDING_REPAY_SECONDS)
        self._dividing = Recurring(tasks.spawn, SENDING_DIVIDE_SECONDS, self._divide, is_needed=lambda: self._paced)
        if limit and not tcp.can_pace():
            raise ConfigError("limit= needs Linux, which spaces out what is sent; this system has no means for it")

    def watch(self, socks: Sequence[socket.socket], group: int, peer: Seat) -> None:
        """Let limits hold for the connections of a group's lane, until they are closed. Only TCP has a limit."""
        self._paced = [each for each in self._paced if each.is_open]
        self._paced += [_Paced(weakref.ref(sock), group, peer) for sock in socks if sock.family != socket.AF_UNIX]
        self._begin()

    def allowed(self, peer: Seat, rate: int) -> None:
        """Send a peer at most so many bytes a second, because it says so; a system that cannot do that goes on."""
        if peer in self._allowed or tcp.can_pace():
            self._allowed[peer] = rate
            if not self._dividing.is_going_on:  # else it is soon divided anew: a peer may say so often
                self._begin()

    def _begin(self) -> None:
        if self._limit or self._allowed:
            self._divide(0.0)
            self._dividing.begin()

    def _divide(self, seconds: float) -> None:
        """Divide the limits anew, `seconds` after the last time."""
        open_now, demands, sent = [], list[Demand](), 0
        for paced in self._paced:
            sock = paced.sock()
            known = None if sock is None else tcp.progress(sock)
            if known is None:
                continue
            open_now.append(paced)
            urgency = self._urgency(paced.group)  # the group may have come after its lane
            demands.append(Demand(urgency, known.is_sending or known.acknowledged > paced.acknowledged))
            sent += known.acknowledged - paced.acknowledged
            paced.acknowledged = known.acknowledged
        self._paced = open_now
        rates = [tcp.UNPACED] * len(demands)
        if limit := own_limit(self._limit, self._peers):
            rates = divide(self._budget.available(limit, sent, seconds), limit, demands)
        peers = [paced.peer for paced in open_now]
        for paced, rate in zip(open_now, capped(rates, demands, peers, self._allowed), strict=True):
            sock = paced.sock()
            if sock is not None and rate != paced.rate:
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    tcp.pace(sock, rate)
                    paced.rate = rate


def capped(
    rates: Sequence[int], demands: Sequence[Demand], peers: Sequence[Seat], allowed: dict[Seat, int]
) -> list[int]:
    """Return the rates of connections, lowered where they are more than what the peers at their other ends allow."""
    shares = list(rates)
    for peer, most in allowed.items():
        slow = [i for i, each in enumerate(peers) if each == peer and demands[i].urgency is not Urgency.CALLS]
        for i, share in zip(slow, divide(most, most, [demands[i] for i in slow]), strict=True):
            shares[i] = min(shares[i], share)
    return shares


def own_limit(limit: float, peers: PeerTable) -> float:
    """Return the bytes a second of payload that this process may move in each direction; 0 if there is no limit."""
    here = sum(not peer.is_gone for peer in peers.here)
    return limit / 8 * PAYLOAD_SHARE / (1 + here)
