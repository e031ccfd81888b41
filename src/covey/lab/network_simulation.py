"""Run the plans of all ranks on a network that is only numbers, event by event, and return how long they take.

    network = of_hosts(range(4), up=[125e6, 125e6, 37e6, 12e6], down=[125e6] * 4)
    simulated([ring.all_reduce(rank, 4, 1 << 24, 1 << 20) for rank in range(4)], network, itemsize=4)

The ranks follow their plans as the executor does: sends one after another, receives one after another, and `after`
between them. All transfers that are under way at the same time share the links: no pair is faster than its speed,
and links of hosts and between sites are divided fairly (max-min). Bytes arrive half a round trip later. A transfer
whose receiver is not there yet stops when the buffers of its lane are full.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from covey.plan.cost import LANE_BUFFER_BYTES, TRANSFER_SECONDS, capacity, shared_links
from covey.plan.network import Flow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from covey.plan.cost import Shared
    from covey.plan.moves import Plan
    from covey.plan.network import Network

NO_BYTES: Final = 0.01
"""Fewer bytes than this are none: times are not exact."""


class UnfinishedError(Exception):
    """No event is left, but not all ranks have finished."""


def simulated(
    plans: Sequence[Plan], network: Network, itemsize: int, *, buffer_bytes: int = LANE_BUFFER_BYTES
) -> float:
    """Return the seconds until the last rank has finished its plan.

    Raises:
        UnfinishedError: the plans block each other.
    """
    return _Simulation(plans, network, itemsize, buffer_bytes).run()


def measured(network: Network) -> list[list[Flow]]:
    """Return what ranks measure if, in round k, every slot i sends to slot i + k at the same time."""
    size = len(network.hosts)
    rounds = []
    for k in range(1, size):
        pairs = [(i, (i + k) % size) for i in range(size)]
        links = [shared_links(network, i, j) for i, j in pairs]
        room = {link: capacity(network, link) for each in links for link in each}
        rates = fair([network.rates[i][j] for i, j in pairs], links, room)
        rounds.append([Flow(i, j, rate) for (i, j), rate in zip(pairs, rates, strict=True)])
    return rounds


def fair(caps: Sequence[float], links: Sequence[Sequence[Shared]], room: Mapping[Shared, float]) -> list[float]:
    """Return the rates of flows: all are raised together until each is at its cap or uses a full link (max-min)."""
    left = dict(room)
    users: dict[Shared, list[int]] = {}
    for flow, each in enumerate(links):
        for link in each:
            users.setdefault(link, []).append(flow)
    waiting = {link: len(flows) for link, flows in users.items()}
    rates: list[float | None] = [None] * len(caps)
    by_cap = sorted(range(len(caps)), key=lambda flow: -caps[flow])
    while by_cap:
        level, full = min(
            ((left[link] / number, link) for link, number in waiting.items() if number), default=(0.0, None)
        )
        if full is None or caps[by_cap[-1]] <= level:
            settled, level = [by_cap[-1]], caps[by_cap[-1]]
        else:
            settled = users[full]
        for flow in settled:
            if rates[flow] is None:
                rates[flow] = level
                for link in links[flow]:
                    left[link] -= level
                    waiting[link] -= 1
        while by_cap and rates[by_cap[-1]] is not None:  # those of other caps are passed when their turn comes
            by_cap.pop()
    return [0.0 if rate is None else rate for rate in rates]


class _Transfer:
    """One transfer on its way."""

    __slots__ = ("is_awaited", "is_done", "lane", "left", "nbytes", "rate", "since", "version")

    def __init__(self, lane: _LaneModel, nbytes: int, is_awaited: bool) -> None:
        self.lane = lane
        self.nbytes = nbytes
        self.left = float(nbytes)
        self.is_awaited = is_awaited
        """The receiver is at this transfer."""
        self.is_done = False
        self.rate = self.since = 0.0
        self.version = 0
        """Changes with the rate, so that events of older rates are known."""

    def stuck(self) -> float:
        """Return how many bytes are left when the buffers are full, if the receiver is elsewhere."""
        if self.is_awaited:
            return 0.0
        before = 0
        for other in self.lane.queue:
            if other is self:
                break
            before += other.nbytes
        return min(self.nbytes, max(0.0, self.nbytes + before - self.lane.window))


class _LaneModel:
    """The transfers from one rank to another that have not been applied, in order; the first that is not done flows."""

    __slots__ = ("cap", "latency", "links", "queue", "source", "target", "window")

    def __init__(self, network: Network, source: int, target: int, buffer_bytes: int) -> None:
        self.source, self.target = source, target
        self.queue: list[_Transfer] = []
        self.cap = network.rates[source][target]
        self.latency = network.round_trips[source][target] / 2
        self.links = shared_links(network, source, target)
        self.window = buffer_bytes + self.cap * 2 * self.latency
        """Bytes that may be on the way, or wait, while the receiver is elsewhere."""


class _Simulation:
    """All ranks, lanes and events."""

    def __init__(self, plans: Sequence[Plan], network: Network, itemsize: int, buffer_bytes: int) -> None:
        self._plans, self._network, self._itemsize, self._buffer = plans, network, itemsize, buffer_bytes
        self._lanes: dict[tuple[int, int], _LaneModel] = {}
        self._capacities: dict[Shared, float] = {}
        self._wanted: dict[Shared, float] = {}
        """How much the flows of a link would take if it were wider."""
        self._flows: dict[_Transfer, None] = {}
        self._sent, self._applied = [0] * len(plans), [0] * len(plans)
        self._sending: list[_Transfer | None] = [None] * len(plans)
        self._now = self._finished_at = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def run(self) -> float:
        for slot in range(len(self._plans)):
            self._proceed(slot)
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        for plan, sent, applied in zip(self._plans, self._sent, self._applied, strict=True):
            if sent < len(plan.sends) or applied < len(plan.recvs):
                raise UnfinishedError(f"{sent} of {len(plan.sends)} sends, {applied} of {len(plan.recvs)} receives")
        return self._finished_at

    def _at(self, time: float, event: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, event))

    def _lane(self, source: int, target: int) -> _LaneModel:
        lane = self._lanes.get((source, target))
        if lane is None:
            lane = self._lanes[source, target] = _LaneModel(self._network, source, target, self._buffer)
            for link in lane.links:
                self._capacities.setdefault(link, capacity(self._network, link))
                self._wanted.setdefault(link, 0.0)
        return lane

    def _proceed(self, slot: int) -> None:
        """Start the next send of a rank, if it may start, and apply what has arrived."""
        sends, recvs = self._plans[slot]
        at = self._sent[slot]
        if self._sending[slot] is None and at < len(sends) and sends[at].after <= self._applied[slot]:
            send = sends[at]
            lane = self._lane(slot, send.peer)
            there = self._plans[send.peer].recvs[self._applied[send.peer] :][:1]
            is_awaited = not lane.queue and bool(there) and there[0].peer == slot
            transfer = _Transfer(lane, (send.stop - send.start) * self._itemsize, is_awaited)
            self._sending[slot] = transfer
            lane.queue.append(transfer)
            if len(lane.queue) < 2 or lane.queue[-2].is_done:
                self._at(self._now + TRANSFER_SECONDS, lambda: self._flow(transfer))
        at = self._applied[slot]
        if at < len(recvs):
            lane = self._lane(recvs[at].peer, slot)
            if lane.queue and not lane.queue[0].is_awaited:
                lane.queue[0].is_awaited = True
                flowing = next((each for each in lane.queue if not each.is_done), None)
                if flowing in self._flows:
                    self._changed(flowing)

    def _flow(self, transfer: _Transfer) -> None:
        """Let a transfer begin to use its links."""
        transfer.since = self._now
        self._flows[transfer] = None
        self._changed(transfer)

    def _changed(self, transfer: _Transfer) -> None:
        """Give a transfer that starts, stops or goes on its rate, and with it all that share its links."""
        lane = transfer.lane
        may_flow = transfer in self._flows and (transfer.is_awaited or transfer.left > transfer.stuck() + NO_BYTES)
        wants = lane.cap if may_flow else 0.0
        has = lane.cap if transfer.rate else 0.0
        tight = any(self._wanted[link] > self._capacities[link] for link in lane.links)
        for link in lane.links:
            self._wanted[link] += wants - has
        tight = tight or any(self._wanted[link] > self._capacities[link] for link in lane.links)
        self._set_rate(transfer, wants)
        if tight:
            self._share()

    def _share(self) -> None:
        """Divide the links anew among all flows that share one."""
        flows = [
            flow
            for flow in self._flows
            if flow.rate and (flow.rate < flow.lane.cap or any(self._is_tight(link) for link in flow.lane.links))
        ]
        chosen = set(flows)
        room = {link: self._capacities[link] for flow in flows for link in flow.lane.links}
        for flow in self._flows:
            if flow.rate and flow not in chosen:
                for link in flow.lane.links:
                    if link in room:
                        room[link] -= flow.rate
        rates = fair([flow.lane.cap for flow in flows], [flow.lane.links for flow in flows], room)
        for flow, rate in zip(flows, rates, strict=True):
            if abs(rate - flow.rate) > 1e-9 * rate:
                self._set_rate(flow, rate)

    def _is_tight(self, link: Shared) -> bool:
        return self._wanted[link] > self._capacities[link]

    def _set_rate(self, transfer: _Transfer, rate: float) -> None:
        transfer.left -= transfer.rate * (self._now - transfer.since)
        transfer.since, transfer.rate = self._now, rate
        transfer.version += 1
        if transfer in self._flows:
            self._look_ahead(transfer)

    def _look_ahead(self, transfer: _Transfer) -> None:
        """Note when something happens to a transfer next: its sender is free, its buffers are full, or it is done."""
        version, left = transfer.version, transfer.left
        marks = [0.0]
        if self._sending[transfer.lane.source] is transfer:
            marks.append(self._buffer)
        if not transfer.is_awaited:
            marks.append(transfer.stuck())
        mark = max(min(each, left) for each in marks)
        if left - mark <= NO_BYTES:
            self._at(self._now, lambda: self._reached(transfer, version))
        elif transfer.rate:
            self._at(self._now + (left - mark) / transfer.rate, lambda: self._reached(transfer, version))

    def _reached(self, transfer: _Transfer, version: int) -> None:
        if transfer.version != version or transfer.is_done:
            return
        transfer.left -= transfer.rate * (self._now - transfer.since)
        transfer.since = self._now
        source = transfer.lane.source
        is_released = self._sending[source] is transfer and transfer.left <= self._buffer + NO_BYTES
        if is_released:
            self._sending[source] = None
            self._sent[source] += 1
            self._finished_at = self._now
        if transfer.left <= NO_BYTES:
            self._ended(transfer)
        elif not transfer.is_awaited and transfer.left <= transfer.stuck() + NO_BYTES:
            if transfer.rate:
                self._changed(transfer)
        else:
            self._look_ahead(transfer)
        if is_released:
            self._proceed(source)
            self._apply(source)

    def _ended(self, transfer: _Transfer) -> None:
        """Take a transfer off its links; its last bytes arrive after half a round trip."""
        lane = transfer.lane
        transfer.is_done = True
        del self._flows[transfer]
        self._changed(transfer)
        following = lane.queue.index(transfer) + 1
        if following < len(lane.queue):
            after = lane.queue[following]
            self._at(self._now, lambda: self._flow(after))
        self._at(self._now + lane.latency, lambda: self._arrived(transfer))

    def _arrived(self, transfer: _Transfer) -> None:
        transfer.version = -1  # all of it is there
        self._apply(transfer.lane.target)

    def _apply(self, slot: int) -> None:
        """Apply what has arrived, as long as it is what the rank waits for."""
        recvs = self._plans[slot].recvs
        while self._applied[slot] < len(recvs):
            recv = recvs[self._applied[slot]]
            lane = self._lane(recv.peer, slot)
            if not lane.queue or lane.queue[0].version != -1 or recv.after > self._sent[slot]:
                break
            lane.queue.pop(0)
            self._applied[slot] += 1
            self._finished_at = self._now
            self._proceed(slot)
