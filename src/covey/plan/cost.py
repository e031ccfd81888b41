"""What a plan costs on a network: predicted from its moves.

`seconds` follows all moves in the order that the executor keeps: a rank has one send and one receive under way, and a
transfer waits for both ends and for what `after` names. It takes its bytes divided by the speed of the pair, then half
a round trip. So the filling of a pipeline, chains of small transfers, and fast ranks that wait for slow ones are all
counted. Links that several pairs share (of a host, between sites) make their pairs slower until none carries more than
it can.

`bound` is what no plan can beat. Let S be the bytes of the array. Take any division of the slots into k >= 2 blocks,
for example hosts or sites. For each element, every block must send a value, or its contribution stays inside, and must
receive one: S bytes each. In all, k - 1 values must be sent to combine k contributions, and k - 1 more to bring the
result to the blocks that lack it. So the time is at least

    max(S / min(up), S / min(down), 2 (k - 1) S / sum(up), 2 (k - 1) S / sum(down))

where up and down are what each block can send to and receive from the others. Compression is not considered.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from covey.plan.moves import Plan
    from covey.plan.network import Network

TRANSFER_SECONDS: Final = 2e-5
"""What a transfer costs beside its bytes: its header, two system calls, and the turn of the loop that notices it."""
ROUNDS: Final = 5
"""How often the shares of shared links are adjusted."""
ENOUGH: Final = 1.01
"""A shared link that is overloaded by less is not adjusted."""

Shared = tuple[str, int, int]
"""A link that several pairs may share: ("up", host, 0), ("down", host, 0) or ("trunk", site, site)."""


def bound(network: Network, nbytes: int) -> float:
    """Return the time in seconds that an all_reduce of `nbytes` needs on `network`, whatever its plan."""
    hosts, sites = _blocks(network.hosts), _blocks(network.sites)
    of_host = _least(nbytes, [network.up[block[0]] for block in hosts], [network.down[block[0]] for block in hosts])
    outward = [sum(each for b, each in enumerate(row) if b != a) for a, row in enumerate(network.trunks)]
    inward = [sum(row[b] for a, row in enumerate(network.trunks) if a != b) for b in range(len(sites))]
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
    return max(nbytes / min(up), nbytes / min(down), all_values / sum(up), all_values / sum(down))


def seconds(plans: Sequence[Plan], network: Network, itemsize: int) -> float:
    """Return the predicted time of an operation whose slots run `plans`."""
    loads: dict[Shared, float] = {}
    for slot, plan in enumerate(plans):
        for send in plan.sends:
            for link in shared_links(network, slot, send.peer):
                loads[link] = loads.get(link, 0.0) + (send.stop - send.start) * itemsize
    busy = {link: load / capacity(network, link) for link, load in loads.items()}
    slowness = dict.fromkeys(busy, 1.0)
    longest = max(busy.values(), default=0.0)
    time = 0.0
    for _ in range(ROUNDS):
        time = _followed(plans, network, itemsize, slowness)
        if longest <= time * ENOUGH:
            break
        for link, needed in busy.items():
            slowness[link] *= max(1.0, needed / time)
    return max(time, longest)


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


def _followed(plans: Sequence[Plan], network: Network, itemsize: int, slowness: dict[Shared, float]) -> float:
    """Return when the last move ends if each link is slower by its factor, and pairs do not share otherwise."""
    size = len(plans)
    ways: dict[tuple[int, int], tuple[float, float]] = {}  # seconds per element, and of latency

    def way(source: int, target: int) -> tuple[float, float]:
        links = shared_links(network, source, target)
        factor = max((slowness.get(link, 1.0) for link in links), default=1.0)
        found = itemsize * factor / network.rates[source][target], network.round_trips[source][target] / 2
        ways[source, target] = found
        return found

    sent: list[list[float]] = [[0.0] for _ in plans]  # when so many sends were done
    applied: list[list[float]] = [[0.0] for _ in plans]  # when so many receives were applied
    arrived: list[float | None] = [None] * size  # when the current receive had arrived, if it waits for sends
    ready = list(range(size - 1, -1, -1))
    while ready:
        slot = ready.pop()
        sends, recvs = plans[slot]
        done, got = sent[slot], applied[slot]
        while True:
            at = len(done) - 1
            if at < len(sends):
                target, _, start, stop, after = sends[at]
                theirs = applied[target]
                position = len(theirs) - 1
                their_recvs = plans[target].recvs
                if (
                    after < len(got)
                    and arrived[target] is None
                    and position < len(their_recvs)
                    and their_recvs[position].peer == slot
                ):
                    per_element, latency = ways.get((slot, target)) or way(slot, target)
                    begin = max(done[-1], got[after], theirs[-1] - latency)
                    end = begin + (stop - start) * per_element + TRANSFER_SECONDS
                    done.append(end)
                    arrived[target] = end + latency
                    ready.append(target)
                    continue
            came = arrived[slot]
            at = len(got) - 1
            if came is None or recvs[at].after >= len(done):
                break
            got.append(max(came, done[recvs[at].after]))
            arrived[slot] = None
            if at + 1 < len(recvs):
                ready.append(recvs[at + 1].peer)
    return max(_last(sent), _last(applied))


def _last(times: Iterable[list[float]]) -> float:
    return max((each[-1] for each in times), default=0.0)
