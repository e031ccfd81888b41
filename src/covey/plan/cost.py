"""What a plan costs on a network: predicted from its moves.

`seconds` follows all moves in the order that the executor keeps: sends one after another, receives one after another,
and `after` between them. A transfer takes its bytes divided by the speed of the pair, and arrives half a round trip
later. On a link that several pairs share (of a host, or between sites) transfers queue. A lane holds a few bytes on
either side for a receiver that is not there yet; then its sender waits. So the filling of a pipeline, chains of small
transfers, and fast ranks that wait for slow ones are all counted.

`bound` is what no plan can beat. Let S be the bytes of the array. Take any division of the slots into k >= 2 blocks,
for example hosts or sites. For each element, every block must send a value, or its contribution stays inside, and must
receive one: S bytes each. In all, k - 1 values must be sent to combine k contributions, and k - 1 more to bring the
result to the blocks that lack it. So the time is at least

    max(S / min(up), S / min(down), 2 (k - 1) S / sum(up), 2 (k - 1) S / sum(down))

where up and down are what each block can send to and receive from the others. For compressed sums, S is what travels.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.plan.moves import Plan
    from covey.plan.network import Network

TRANSFER_SECONDS: Final = 2e-5
"""What a transfer costs beside its bytes: its header, two system calls, and the turn of the loop that notices it."""
LANE_BUFFER_BYTES: Final = 64 << 10
"""What each end of a lane holds, in addition to what is on its way. Sockets grow theirs beyond that when they can."""

Shared = tuple[str, int, int]
"""A link that several pairs may share: ("up", host, 0), ("down", host, 0) or ("trunk", site, site)."""


class CodecPace(NamedTuple):
    """How long a rank works on what travels, in seconds per element; no rank sends or receives meanwhile."""

    encode: float
    decode: float


NO_CODEC: Final = CodecPace(0.0, 0.0)


def bound(network: Network, nbytes: int) -> float:
    """Return the time in seconds that an all_reduce of `nbytes` needs on `network`, whatever its plan."""
    hosts, sites = _blocks(network.hosts), _blocks(network.sites)
    of_host = _least(nbytes, [network.up[block[0]] for block in hosts], [network.down[block[0]] for block in hosts])
    outward = [math.fsum(each for b, each in enumerate(row) if b != a) for a, row in enumerate(network.trunks)]
    inward = [math.fsum(row[b] for a, row in enumerate(network.trunks) if a != b) for b in range(len(sites))]
    of_site = _least(nbytes, outward, inward)
    slots = range(len(network.hosts))
    fastest = [
        max((max(network.rates[i][j], network.rates[j][i]) for j in slots if j != i), default=math.inf) for i in slots
    ]
    return max(of_host, of_site, *(nbytes / rate for rate in fastest))


def _blocks(numbers: Sequence[int]) -> list[list[int]]:
    """Return the slots with equal numbers, by their first slots."""
    blocks: dict[int, list[int]] = {}
    for slot, number in enumerate(numbers):
        blocks.setdefault(number, []).append(slot)
    return list(blocks.values())


def _least(nbytes: int, up: Sequence[float], down: Sequence[float]) -> float:
    if len(up) < 2:
        return 0.0
    all_values = 2 * (len(up) - 1) * nbytes
    return max(nbytes / min(up), nbytes / min(down), all_values / math.fsum(up), all_values / math.fsum(down))


def shared_links(network: Network, source: int, target: int) -> list[Shared]:
    """Return the shared links between two slots."""
    here, there = network.hosts[source], network.hosts[target]
    if here == there:
        return []
    links: list[Shared] = [("up", here, 0), ("down", there, 0)]
    if network.sites[source] != network.sites[target]:
        links.append(("trunk", network.sites[source], network.sites[target]))
    return links


def capacity(network: Network, link: Shared) -> float:
    """Return the bytes per second of a shared link."""
    kind, a, b = link
    if kind == "trunk":
        return network.trunks[a][b]
    return (network.up if kind == "up" else network.down)[network.hosts.index(a)]


def seconds(
    plans: Sequence[Plan],
    network: Network,
    itemsize: int,
    codec: CodecPace = NO_CODEC,
    encodes: Sequence[Sequence[bool]] = (),
) -> float:
    """Return the predicted time of an operation whose slots run `plans`.

    `itemsize` is that of elements as they travel. `encodes` has for each slot the sends that are encoded before.
    """
    return _Forecast(plans, network, itemsize, codec, encodes).run()


class _Way:
    """From one slot to another; times are in seconds per element."""

    __slots__ = ("free_at", "hold", "latency", "links", "pace", "reached", "starts", "total", "window")

    def __init__(self, network: Network, source: int, target: int, itemsize: int) -> None:
        self.pace = itemsize / network.rates[source][target]
        self.latency = network.round_trips[source][target] / 2
        self.links = [(link, itemsize / capacity(network, link)) for link in shared_links(network, source, target)]
        self.hold = LANE_BUFFER_BYTES / itemsize
        """Elements that the sender's end holds."""
        self.window = self.hold + 2 * self.latency / self.pace
        """Elements that may be sent to a receiver that is not there."""
        self.free_at = 0.0
        self.total = 0
        self.starts: list[int] = []
        self.reached: list[float] = []
        """When the receiver was there, by transfer; those start after `starts` elements."""


class _Forecast:
    """Follows all plans. Transfers are taken in the order in which their sends begin."""

    def __init__(
        self,
        plans: Sequence[Plan],
        network: Network,
        itemsize: int,
        codec: CodecPace,
        encodes: Sequence[Sequence[bool]],
    ) -> None:
        self._plans, self._network, self._itemsize = plans, network, itemsize
        self._codec, self._encodes = codec, encodes
        self._ways: dict[tuple[int, int], _Way] = {}
        self._free_at: dict[Shared, float] = {}
        self._sent: list[list[float]] = [[0.0] for _ in plans]  # when so many sends were done
        self._applied: list[list[float]] = [[0.0] for _ in plans]  # when so many receives were applied
        self._arrived: list[float | None] = [None] * len(plans)  # when the current receive came, if it waits for sends
        self._ready: list[tuple[float, int]] = []
        self._is_ready = [False] * len(plans)

    def run(self) -> float:
        for slot in range(len(self._plans)):
            self._consider(slot)
        while self._ready:
            _, slot = heapq.heappop(self._ready)
            self._is_ready[slot] = False
            self._transfer(slot)
        return max(times[-1] for times in [*self._sent, *self._applied])

    def _consider(self, slot: int) -> None:
        """Note that the next send of a slot can happen: what it waits for is applied, and its receiver comes to it."""
        sends, done = self._plans[slot].sends, self._sent[slot]
        at = len(done) - 1
        if self._is_ready[slot] or at == len(sends):
            return
        send, got = sends[at], self._applied[slot]
        theirs = self._plans[send.peer].recvs
        position = len(self._applied[send.peer]) - 1
        if (
            send.after < len(got)
            and self._arrived[send.peer] is None
            and position < len(theirs)
            and theirs[position].peer == slot
        ):
            self._is_ready[slot] = True
            heapq.heappush(self._ready, (max(done[-1], got[send.after]), slot))

    def _transfer(self, slot: int) -> None:
        done, got = self._sent[slot], self._applied[slot]
        target, _, first, last, after = self._plans[slot].sends[len(done) - 1]
        length = last - first
        way = self._ways.get((slot, target))
        if way is None:
            way = self._ways[slot, target] = _Way(self._network, slot, target, self._itemsize)
        ready = max(done[-1], got[after])
        if self._encodes and self._encodes[slot][len(done) - 1]:
            ready += length * self._codec.encode
        start = max(ready, way.free_at) + TRANSFER_SECONDS
        end = start + length * way.pace
        for link, pace in way.links:
            free_at = max(self._free_at.get(link, 0.0), start) + length * pace
            self._free_at[link] = free_at
            end = max(end, free_at)
        way.starts.append(way.total)
        way.reached.append(self._applied[target][-1])
        way.total += length
        # The last element leaves when the receiver has come so near that the window reaches it.
        near = bisect_right(way.starts, max(0.0, way.total - way.window)) - 1
        behind = max(0.0, way.total - way.starts[near] - way.window)
        end = max(end, way.reached[near] - way.latency + behind * way.pace)
        way.free_at = end
        done.append(max(start, end - min(length, way.hold) * way.pace))
        self._arrived[target] = max(end + way.latency, self._applied[target][-1]) + length * self._codec.decode
        self._apply(target)
        self._apply(slot)
        self._consider(slot)

    def _apply(self, slot: int) -> None:
        """Apply what has come to a slot, if it has sent enough; then others may come."""
        came, got = self._arrived[slot], self._applied[slot]
        recvs, done = self._plans[slot].recvs, self._sent[slot]
        at = len(got) - 1
        if came is None or recvs[at].after >= len(done):
            return
        got.append(max(came, got[-1], done[recvs[at].after]))
        self._arrived[slot] = None
        if at + 1 < len(recvs):
            self._consider(recvs[at + 1].peer)
        self._consider(slot)
