"""Which machine's link makes the sums of a run slow, and what a faster one would change: from the cost model. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from covey.base.text import spell_rate
from covey.cli.doctor.facts import LimitingLink
from covey.cli.doctor.finding import Finding
from covey.plan.choose import DEFAULT_PLAN_SIZES
from covey.plan.fit import fit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from covey.cli.doctor.facts import Facts
    from covey.cli.status.network import NetworkHost, RunNetwork
    from covey.plan.network import Network

NBYTES: Final = 64 << 20
"""The sum whose time is predicted: the gradients of a small model."""
FLOAT_BYTES: Final = 4
LEAST_SPEEDUP: Final = 1.2
"""How many times faster a sum must become for a link to be worth a finding."""
MEDIUM_PHRASES: Final = {"wireless": "is on Wi-Fi", "wired": "is on a cable", "virtual": "is on a virtual network"}


def limiting_links(found: Mapping[str, RunNetwork | None]) -> tuple[LimitingLink, ...]:
    """Return the link that limits each run, where there is one, from what their nodes have measured."""
    limits = (limit_of(run, network) for run, network in found.items() if network is not None)
    return tuple(limit for limit in limits if limit is not None)


def limit_of(run: str, found: RunNetwork) -> LimitingLink | None:
    """Return the machine whose own link limits a run; None if no machine alone does."""
    hosts = sorted(found.hosts, key=lambda host: (_speed(host), host.name))
    if len(hosts) < 2 or not math.isfinite(_speed(hosts[1])):
        return None
    slow, following = hosts[:2]
    before, then = _seconds(found.network), _seconds(_faster(found.network, slow, _speed(following)))
    if before < LEAST_SPEEDUP * then:
        return None
    return LimitingLink(
        run=run,
        host_name=slow.name,
        medium=slow.medium,
        direction="sends" if slow.up <= slow.down else "receives",
        bytes_per_second=_speed(slow),
        next_bytes_per_second=_speed(following),
        nbytes=NBYTES,
        seconds=before,
        seconds_then=then,
    )


def _speed(host: NetworkHost) -> float:
    return min(host.up, host.down)


def _faster(network: Network, host: NetworkHost, speed: float) -> Network:
    """Return a network in which a machine sends and receives at least at a speed, as far as the other ends allow."""
    here = set(host.ranks)
    slots = range(len(network.hosts))

    def rate(one: int, other: int) -> float:
        if (one in here) == (other in here):
            return network.rates[one][other]
        limits = (speed, network.down[other]) if one in here else (network.up[one], speed)
        return max(network.rates[one][other], min(limits))

    def raised(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(max(value, speed) if slot in here else value for slot, value in enumerate(values))

    alone = {site for site in network.sites if all(slot in here for slot in slots if network.sites[slot] == site)}
    trunks = tuple(
        tuple(max(each, speed) if {one, other} & alone else each for other, each in enumerate(row))
        for one, row in enumerate(network.trunks)
    )
    rates = tuple(tuple(rate(one, other) for other in slots) for one in slots)
    return network._replace(rates=rates, up=raised(network.up), down=raised(network.down), trunks=trunks)


def _seconds(network: Network) -> float:
    return fit(network, NBYTES // FLOAT_BYTES, FLOAT_BYTES, DEFAULT_PLAN_SIZES)[0].fitted.seconds


def slow_machines(facts: Facts) -> Iterator[Finding]:
    """Report which machine's link limits each run."""
    for limit in facts.limits:
        gain = limit.seconds / limit.seconds_then
        how = MEDIUM_PHRASES.get(limit.medium, "has the slowest link")
        text = (
            f"{limit.host_name} {how} and {limit.direction} {spell_rate(limit.bytes_per_second)}: it limits run "
            f"{limit.run!r}. The next slowest machine has {spell_rate(limit.next_bytes_per_second)}."
        )
        means = "A cable" if limit.medium == "wireless" else "A faster link"
        remedy = (
            f"{means} there would make a large all_reduce up to {gain:.1f}x faster (64 MiB: {limit.seconds_then:.2g} s "
            f"instead of {limit.seconds:.2g} s, as predicted). compress='auto' sends fewer bytes over it as it is."
        )
        yield Finding("note", "slow-link", text, remedy)
