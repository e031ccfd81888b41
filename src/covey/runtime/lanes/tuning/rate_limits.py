"""How fast this machine sends and receives over TCP: the setting `limit`, and what bulk leaves free.

On the control loop.

The kernel spaces out what each connection sends (`tcp.pace`), so no thread that moves data has to count or to wait. A
`SendingLimit` only divides the limit among the connections, a few times a second, by what each of them has sent
(`divide`): the limit holds on average over a second. A peer whose machine has a limit allows this node so much
(`ReceivingLimit`); the connections with it share that.

Connections of small calls and of urgent groups are not slowed down by the others: tensors, messages and the parts of
large calls share what they leave, and parts have most of it while there are any. Control messages on links are few, and
are not counted.

While something urgent is in use to a machine, the bulk to it is sent a little more slowly than the way carries, without
any setting (`yielding`): else the urgent would wait in the queue that the bulk fills.

A connection that was idle may use as much as if it were the only one to begin now, so that a short operation is not
slowed down. What all connections together have moved too much is then taken off what follows.

What this machine receives is limited by telling its peers how fast each may send (`ReceivingLimit`). Not reading would
slow a sender down only after the kernel's buffers are full, and every thread that moves data would have to wait. So
this node divides its limit among the peers that send to it, as `SendingLimit` does among connections, and tells each of
them its share (`Allowance`); their kernels space out what they send. What arrives before a peer has heard of its share
is made up for afterwards. A peer whose system cannot space out what it sends ignores its share.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from covey.base.errors import ConfigError
from covey.net.host import tcp
from covey.runtime import loop as control
from covey.runtime.lanes.tuning.yielding import Look, Urgency, YieldingRate
from covey.runtime.tasks import Recurring
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from covey.base.numbers import Seat
    from covey.runtime.peers.peer_table import PeerTable
    from covey.runtime.tasks import Tasks

LEAST_TENSOR_SHARE: Final = 0.1
"""What tensors have of the limit at least, however much is to be made up for: they would stand still without it."""
PARTS_SHARE: Final = 0.8
"""What parts of large calls have of the limit while tensors are sent, too."""
SENDING_DIVIDE_SECONDS: Final = 0.025
"""How often the limit is divided anew: a connection that begins to send waits about that long for its share."""
VAIN_LOOKS: Final = 4
"""After so many looks at which nothing has arrived, a connection leaves its share to the others."""
IN_USE_SECONDS: Final = 5.0
"""How long bulk leaves room after something urgent was last sent or received."""
NOTE_EVERY: Final = 0.05
"""How often a thread that sends something urgent says so."""
SENDING_REPAY_SECONDS: Final = 0.25
"""In how much time the connections make up for what they sent too much: the kernel sends at least two packets at once,
which is much for a slow connection."""
EndT = TypeVar("EndT")
PAYLOAD_SHARE: Final = 0.95
"""Share of a packet that 1448 bytes of payload are: the rest is Ethernet's and TCP's."""
RECEIVING_DIVIDE_SECONDS: Final = 0.1
"""How often the limit is divided anew. A new share has to reach the peer, so more often would not help."""
RECEIVING_REPAY_SECONDS: Final = 0.5
"""In how much time peers make up for what they sent too much."""
WORTH_TELLING: Final = 0.1
"""The change of a share, as a part of it, that a peer is told of."""


@dataclass(frozen=True)
class Demand:
    """What one connection does."""

    urgency: Urgency
    is_sending: bool


def divide(available: float, limit: float, demands: Sequence[Demand]) -> list[int]:
    """Return the bytes a second for each connection; `available` of the `limit` is left for tensors and parts.

    Those that are sending have `available` together. An idle one has what it would have if it alone began to send.
    """
    sending = {urgency: sum(each.urgency is urgency and each.is_sending for each in demands) for urgency in Urgency}
    shares = []
    for each in demands:
        if not each.urgency.gives_way:
            shares.append(int(limit))
            continue
        other = Urgency.TENSORS if each.urgency is Urgency.PARTS else Urgency.PARTS
        part = PARTS_SHARE if each.urgency is Urgency.PARTS else 1 - PARTS_SHARE
        pool = available * part if sending[other] else available
        shares.append(max(1, int(pool / (sending[each.urgency] + (not each.is_sending)))))
    return shares


class RateBudget:
    """How much of a limit is available now, so that it holds on average over a second."""

    def __init__(self, repay_seconds: float) -> None:
        """What was moved too much is made up for in this time; what was not moved in such a time may be moved later."""
        self._repay_seconds = repay_seconds
        self._excess = 0.0
        """Bytes that were moved too much and not made up for; below 0, bytes that may be moved in addition."""

    def available(self, limit: float, moved: int, seconds: float) -> float:
        """Return the bytes a second that are available after `moved` bytes in the last `seconds`."""
        self._excess = max(-limit * self._repay_seconds, self._excess + moved - limit * seconds)
        return min(limit, max(LEAST_TENSOR_SHARE * limit, limit - self._excess / self._repay_seconds))


@dataclass
class _Paced:
    """A connection that may be slowed down."""

    sock: weakref.ref[socket.socket]
    group: int
    peer: Seat
    address: str
    """The other machine, or the relay on the way there; empty if it is this machine."""
    acknowledged: int = 0
    received: int = 0
    vain_looks: int = 0
    """How many looks in a row have seen that nothing arrives, although there is something to send."""
    rate: int = tcp.UNPACED

    @property
    def is_open(self) -> bool:
        sock = self.sock()
        return sock is not None and sock.fileno() >= 0

    def note(self, known: tcp.SendingProgress) -> tuple[int, bool]:
        """Return what has arrived since the last look, and whether it sends: not if the other end has no room."""
        count, self.acknowledged = known.acknowledged - self.acknowledged, known.acknowledged
        self.vain_looks = 0 if count or not known.is_sending else self.vain_looks + 1
        return count, count > 0 or (known.is_sending and self.vain_looks < VAIN_LOOKS)


@dataclass
class _InUse:
    """An address to which something urgent is in use."""

    until: float
    rate: YieldingRate = field(default_factory=YieldingRate)
    """That of the bulk there."""
    seen: list[tuple[tcp.SendingQueue, int]] = field(default_factory=list)
    """What its connections fill now, and what has arrived on each since the last look."""

    def look(self, seconds: float) -> int | None:
        """Return the rate of the bulk, from what was seen in the last `seconds`; None if it need not be slower."""
        seen, self.seen = self.seen, []
        busy = [queue for queue, count in seen if queue.has_unsent and count]
        arrived, speed = sum(count for _, count in seen), sum(queue.speed for queue in busy)
        delay = min((queue.delay for queue in busy), default=0.0)
        return self.rate.look(Look(seconds, arrived, delay, bool(busy), speed))


class SendingLimit:
    """Divides the limit of one machine's share of a run, and what peers allow, among this process's connections.

    And slows bulk down while something urgent is in use to the same machine.
    """

    def __init__(self, limit: float, peers: PeerTable, tasks: Tasks, urgency: Callable[[int], Urgency]) -> None:
        """`limit` is the setting; `urgency` tells how the connections of a group give way to others.

        Raises:
            ConfigError: there is a limit, and this system cannot keep it.
        """
        self._limit, self._peers, self._urgency, self._paced = limit, peers, urgency, list[_Paced]()
        self._allowed: dict[Seat, int] = {}
        """Bytes a second that peers take."""
        self._budget = RateBudget(SENDING_REPAY_SECONDS)
        self._can_yield = tcp.can_pace()
        self._in_use: dict[str, _InUse] = {}
        """By address."""
        self._has_first = False
        """Whether connections of urgent groups are open, which are looked at all the time: not all they do is noted."""
        self.note_at: dict[Seat, float] = {}
        """By peer on another machine: from when on something urgent to it is to be noted again."""
        self._dividing = Recurring(tasks.spawn, SENDING_DIVIDE_SECONDS, self._divide, is_needed=self._is_needed)
        if limit and not tcp.can_pace():
            raise ConfigError("limit= needs Linux, which spaces out what is sent; this system has no means for it")

    def _is_needed(self) -> bool:
        return bool(self._paced and (self._limit or self._allowed or self._in_use or self._has_first))

    def watch(self, socks: Sequence[socket.socket], group: int, peer: Seat) -> None:
        """Let limits hold for the connections of a group's lane, until they are closed. Only TCP has a limit."""
        self._paced = [each for each in self._paced if each.is_open]
        for sock in socks:
            if sock.family != socket.AF_UNIX:
                self._paced.append(_Paced(weakref.ref(sock), group, peer, _other_machine(sock)))
                if self._can_yield and self._paced[-1].address:
                    self.note_at.setdefault(peer, 0.0)
        self._begin()

    def allowed(self, peer: Seat, rate: int) -> None:
        """Send a peer at most so many bytes a second, because it says so; a system that cannot do that goes on."""
        if peer in self._allowed or tcp.can_pace():
            self._allowed[peer] = rate
            if not self._dividing.is_going_on:  # else it is soon divided anew: a peer may say so often
                self._begin()

    def note_urgent(self, peer: Seat) -> None:
        """Let bulk leave room for what is sent to a peer now, or soon. On any thread; nearly always at once."""
        now = time.monotonic()
        if now >= self.note_at.get(peer, math.inf):
            self.note_at[peer] = now + NOTE_EVERY
            control.soon(self._use, peer)

    def _use(self, peer: Seat) -> None:
        addresses = {each.address for each in self._paced if each.peer == peer and each.address}
        is_new = not addresses <= self._in_use.keys()
        for address in addresses:
            self._note_use(address)
        if is_new:
            self._begin()

    def _note_use(self, address: str) -> None:
        until = time.monotonic() + IN_USE_SECONDS
        self._in_use.setdefault(address, _InUse(until)).until = until

    def _begin(self) -> None:
        if self._is_needed():
            self._divide(0.0)
            self._dividing.begin()

    def _divide(self, seconds: float) -> None:
        """Divide the limits anew, `seconds` after the last time."""
        open_now, demands, sent, has_first = [], list[Demand](), 0, False
        for paced in self._paced:
            sock = paced.sock()
            known = None if sock is None else tcp.progress(sock)
            if sock is None or known is None:
                continue
            open_now.append(paced)
            urgency = self._urgency(paced.group)  # the group may have come after its lane
            count, is_sending = paced.note(known)
            demands.append(Demand(urgency, is_sending))
            sent += count
            if not urgency.gives_way:
                has_first = has_first or urgency is Urgency.FIRST
                before, paced.received = paced.received, tcp.received_bytes(sock) or 0
                if seconds and paced.address and (count or paced.received > before):
                    self._note_use(paced.address)
            elif paced.address in self._in_use and (queue := tcp.sending_queue(sock)) is not None:
                self._in_use[paced.address].seen.append((queue, count))
        self._has_first = has_first
        self._paced = open_now
        rates = [tcp.UNPACED] * len(demands)
        if limit := own_limit(self._limit, self._peers):
            rates = divide(self._budget.available(limit, sent, seconds), limit, demands)
        rates = capped(rates, demands, [paced.peer for paced in open_now], self._allowed)
        rates = capped(rates, demands, [paced.address for paced in open_now], self._left_to_bulk(seconds))
        for paced, rate in zip(open_now, rates, strict=True):
            sock = paced.sock()
            if sock is not None and rate != paced.rate:
                with contextlib.suppress(OSError):  # it was closed meanwhile
                    tcp.pace(sock, rate)
                    paced.rate = rate

    def _left_to_bulk(self, seconds: float) -> dict[str, int]:
        """Return the rate of bulk for each address to which something urgent is in use."""
        now = time.monotonic()
        for address in [address for address, use in self._in_use.items() if now >= use.until]:
            del self._in_use[address]
        rates = {address: use.look(seconds) for address, use in self._in_use.items() if use.seen}
        return {address: rate for address, rate in rates.items() if rate is not None}


def _other_machine(sock: socket.socket) -> str:
    """Return the address at the other end; empty if it is this machine's, or the socket is closed."""
    try:
        own, other = (str(name[0]) for name in (sock.getsockname(), sock.getpeername()))
    except OSError:
        return ""
    return "" if own == other else other


def capped(
    rates: Sequence[int], demands: Sequence[Demand], ends: Sequence[EndT], allowed: Mapping[EndT, int]
) -> list[int]:
    """Return the rates of connections, lowered where they are more than what is `allowed` to their other ends."""
    shares = list(rates)
    for end, most in allowed.items():
        slow = [i for i, each in enumerate(ends) if each == end and demands[i].urgency.gives_way]
        for i, share in zip(slow, divide(most, most, [demands[i] for i in slow]), strict=True):
            shares[i] = min(shares[i], share)
    return shares


def own_limit(limit: float, peers: PeerTable) -> float:
    """Return the bytes a second of payload that this process may move in each direction; 0 if there is no limit."""
    here = sum(not peer.is_gone for peer in peers.here)
    return limit / 8 * PAYLOAD_SHARE / (1 + here)


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
