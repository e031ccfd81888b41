"""The setting `limit`: how much this machine sends over TCP, whichever lanes are in use. On the control loop.

The kernel spaces out what each connection sends (`tcp.pace`), so no thread that moves data has to count or to wait.
This module only divides the limit among the connections, a few times a second, by what each of them has sent. A
connection that was idle may use as much as if it were the only one to begin now, so that a short operation is not
slowed down. What all connections together have sent too much is then taken off what follows: the limit holds on
average over a second.

Connections of small calls are not slowed down by the others: tensors, messages and the parts of large calls share what
they leave, and parts have most of it while there are any. Control messages on links are few, and are not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError
from covey.net import tcp
from covey.runtime.members.urgency import Urgency

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.runtime.members.node import Node

DIVIDE_SECONDS: Final = 0.05
"""How often the limit is divided anew: a connection that begins to send waits about that long for its share."""
REPAY_SECONDS: Final = 0.25
"""In how much time the connections make up for what they sent too much, and of how much time what was not sent may be
sent later: the kernel sends at least two packets at once, which is much for a slow connection."""
PAYLOAD_SHARE: Final = 0.95
"""Of a packet with 1448 bytes of payload: the rest is Ethernet's and TCP's."""
LEAST_SHARE: Final = 0.1
"""What tensors have of the limit at least, however much is to be made up for: they would stand still without it."""
PARTS_SHARE: Final = 0.8
"""What parts of large calls have of the limit while tensors are sent, too."""


@dataclass(frozen=True)
class Demand:
    """What one connection does."""

    urgency: Urgency
    is_sending: bool


def divide(available: float, limit: float, demands: Sequence[Demand]) -> list[int]:
    """Return the bytes a second for each connection; `available` of the `limit` is left for tensors and parts. Pure.

    Those that are sending have `available` together. An idle one has what it would have if it alone began to send.
    """
    sending = {urgency: sum(each.urgency is urgency and each.is_sending for each in demands) for urgency in Urgency}
    shares = []
    for each in demands:
        if each.urgency is Urgency.CALLS:
            shares.append(int(limit))
            continue
        other = Urgency.TENSORS if each.urgency is Urgency.PARTS else Urgency.PARTS
        part = PARTS_SHARE if each.urgency is Urgency.PARTS else 1 - PARTS_SHARE
        pool = available * part if sending[other] else available
        shares.append(max(1, int(pool / (sending[each.urgency] + (not each.is_sending)))))
    return shares


@dataclass
class _Paced:
    """A connection that the limit concerns."""

    sock: weakref.ref[socket.socket]
    group: int
    acknowledged: int = 0
    rate: int = 0


class SendingLimit:
    """Divides the limit of one machine's share of a run among the connections of this process."""

    def __init__(self, node: Node) -> None:
        """Raise ConfigError if there is a limit, and this system cannot keep it."""
        self._node, self._paced = node, list[_Paced]()
        self._total = node.config.limit / 8 * PAYLOAD_SHARE
        self._excess = 0.0
        """Bytes that were sent too much and not made up for; below 0, bytes that may be sent in addition."""
        self._is_dividing = False
        if self._total and not tcp.can_pace():
            raise ConfigError("limit= needs Linux, which spaces out what is sent; this system has no means for it")

    def watch(self, socks: Sequence[socket.socket], group: int) -> None:
        """Let the limit hold for the connections of a group's lane, until they are closed. Only TCP has a limit."""
        if not self._total:
            return
        self._paced += [_Paced(weakref.ref(sock), group) for sock in socks if sock.family != socket.AF_UNIX]
        self._divide(0.0)
        if self._paced and not self._is_dividing:
            self._is_dividing = True
            self._node.spawn(self._keep_dividing())

    async def _keep_dividing(self) -> None:
        at = time.monotonic()
        try:
            while self._paced:
                await asyncio.sleep(DIVIDE_SECONDS)
                before, at = at, time.monotonic()
                self._divide(at - before)
        finally:
            self._is_dividing = False

    def _divide(self, seconds: float) -> None:
        """Divide the limit anew, `seconds` after the last time."""
        limit = self._total / self._ranks_here()
        open_now, demands, sent = [], [], 0
        for paced in self._paced:
            sock = paced.sock()
            known = None if sock is None else tcp.progress(sock)
            if known is None:
                continue
            open_now.append(paced)
            urgency = self._node.groups.urgency(paced.group)  # the group may have come after its lane
            demands.append(Demand(urgency, known.is_sending or known.acknowledged > paced.acknowledged))
            sent += known.acknowledged - paced.acknowledged
            paced.acknowledged = known.acknowledged
        self._paced = open_now
        self._excess = max(-limit * REPAY_SECONDS, self._excess + sent - limit * seconds)
        available = min(limit, max(LEAST_SHARE * limit, limit - self._excess / REPAY_SECONDS))
        for paced, rate in zip(open_now, divide(available, limit, demands), strict=True):
            sock = paced.sock()
            if sock is not None and rate != paced.rate:
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    tcp.pace(sock, rate)
                    paced.rate = rate

    def _ranks_here(self) -> int:
        """Return how many processes of the run on this machine share the limit."""
        peers = self._node.peers.values()
        return 1 + sum(
            not peer.is_gone and peer.contact is not None and peer.contact.host == self._node.host for peer in peers
        )
