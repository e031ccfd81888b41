"""The setting `limit` for what this machine receives: it tells its peers how fast each may send. On the control loop.

Not reading would slow a sender down only after the kernel's buffers are full, and every thread that moves data would
have to wait. So this node divides its limit among the peers that send to it, as `SendingLimit` does among connections,
and tells each of them its share (`Allowance`); their kernels space out what they send. What arrives before a peer has
heard of its share is made up for afterwards. A peer whose system cannot space out what it sends ignores its share.
"""

from __future__ import annotations

import socket
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from covey.net.host import tcp
from covey.runtime.lanes.tuning.rate_shares import Demand, RateBudget, divide
from covey.runtime.lanes.tuning.sending_limit import own_limit
from covey.runtime.lanes.tuning.urgency import Urgency
from covey.runtime.tasks import Recurring
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.base.numbers import Seat
    from covey.runtime.peers.peer_table import PeerTable
    from covey.runtime.tasks import Tasks

RECEIVING_DIVIDE_SECONDS: Final = 0.1
"""How often the limit is divided anew. A new share has to reach the peer, so more often would not help."""
RECEIVING_REPAY_SECONDS: Final = 0.5
"""In how much time peers make up for what they sent too much."""
WORTH_TELLING: Final = 0.1
"""The change of a share, as a part of it, that a peer is told of."""


@dataclass
class _Sender:
    """A peer that has connections with this node."""

    received: dict[weakref.ref[socket.socket], int] = field(default_factory=dict)
    """By connection: the bytes that have arrived."""
    told: int = 0
    """The bytes a second that it knows of."""

    def count(self) -> int:
        """Return how many bytes have arrived since the last time; forget connections that are closed."""
        arrived = 0
        for ref, before in list(self.received.items()):
            sock = ref()
            now = None if sock is None else tcp.received_bytes(sock)
            if now is None:
                del self.received[ref]
            else:
                arrived += now - before
                self.received[ref] = now
        return arrived


class ReceivingLimit:
    """Tells peers how fast they may send to this process, if its machine has a limit."""

    def __init__(self, limit: float, peers: PeerTable, tasks: Tasks) -> None:
        """`limit` is the setting."""
        self._limit, self._peers = limit, peers
        self._senders: dict[Seat, _Sender] = {}
        self._budget = RateBudget(RECEIVING_REPAY_SECONDS)
        self._dividing = Recurring(tasks.spawn, RECEIVING_DIVIDE_SECONDS, self._divide, is_needed=lambda: self._senders)

    def watch(self, socks: Sequence[socket.socket], peer: Seat) -> None:
        """Count what a peer sends over the connections of a lane, until they are closed."""
        fresh = [sock for sock in socks if sock.family != socket.AF_UNIX]
        if not self._limit or not fresh:
            return
        self._senders.setdefault(peer, _Sender()).received.update({weakref.ref(sock): 0 for sock in fresh})
        self._divide(0.0)
        self._dividing.begin()

    def _divide(self, seconds: float) -> None:
        """Divide the limit anew, `seconds` after the last time."""
        arrived = {peer: sender.count() for peer, sender in self._senders.items()}
        for peer in [peer for peer, sender in self._senders.items() if not sender.received]:
            del self._senders[peer]
        limit = own_limit(self._limit, self._peers)
        available = self._budget.available(limit, sum(arrived.values()), seconds)
        demands = [Demand(Urgency.TENSORS, arrived[peer] > 0) for peer in self._senders]
        for (peer, sender), rate in zip(self._senders.items(), divide(available, limit, demands), strict=True):
            if abs(rate - sender.told) > WORTH_TELLING * sender.told:
                sender.told = rate
                self._peers.send(peer, messages.Allowance(rate))
