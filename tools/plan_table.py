"""Print the table of `docs/benchmarks.md` that compares the plain ring with fitted plans, for 8 to 1,024 ranks.

    python -m tools.plan_table

Up to `MOST_SIMULATED` ranks every transfer is simulated (`covey.lab.network_simulation`). For more, the times are
those of `covey.plan.estimate`; the last column says by how much that differs from the simulation where there are both.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.lab.network_simulation import simulated
from covey.plan import cost, fit
from covey.plan.choose import DEFAULT_PLAN_SIZES
from covey.plan.network import Network, of_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MBIT: Final = 125_000.0
"""Bytes per second."""
NBYTES: Final = 64 << 20
MOST_SIMULATED: Final = 16
SIZES: Final = (8, 16, 64, 256, 1024)
HEADINGS: Final = ("network", "ranks", "bound", "plain ring", "fitted", "plan", "of the bound", "faster", "error")


class Case(NamedTuple):
    """A network to fit a plan to."""

    name: str
    network: Network


def cases(size: int) -> Iterator[Case]:
    """Yield the networks of a number of ranks."""
    yield Case("equal, 1 Gbit/s", _of_speeds([1000] * size))
    yield Case("one of 100 Mbit/s", _of_speeds([1000] * (size - 1) + [100]))
    yield Case("a quarter each of 1000, 1000, 300, 100 Mbit/s", _of_speeds([1000, 1000, 300, 100] * (size // 4)))
    yield Case("two sites, 100 Mbit/s between, ranks in turn", _of_sites(size, 2, 100))
    yield Case("four sites, 100 Mbit/s between each two, ranks in turn", _of_sites(size, 4, 100))
    hosts = [rank * 4 // size for rank in range(size)] if size <= 16 else [rank // 8 for rank in range(size)]
    yield Case("4 or 8 ranks a host, 1 Gbit/s", of_hosts(hosts, [1000 * MBIT] * size, [1000 * MBIT] * size))


def row(case: Case) -> list[str]:
    """Return the cells of one line of the table."""
    network = case.network
    found = fit.fit(network, NBYTES // 4, 4, DEFAULT_PLAN_SIZES)
    plain = next(each.fitted for each in found if each.why == fit.PLAIN_PLAN)
    bound = cost.bound(network, NBYTES)
    times, errors = [], []
    for fitted in (plain, found[0].fitted):
        estimated = fit.estimated(fitted, network, NBYTES, DEFAULT_PLAN_SIZES)
        if len(network.hosts) > MOST_SIMULATED:
            times.append(estimated)
            continue
        times.append(_simulated(fitted, network))
        errors.append(estimated / times[-1] - 1)
    chosen = found[0].fitted
    described = "as before" if chosen == plain else chosen.algorithm + (", by share" if chosen.shares else "")
    return [
        case.name,
        str(len(network.hosts)),
        *(_seconds(each) for each in (bound, *times)),
        described,
        f"{bound / times[1]:.2f}",
        f"{times[0] / times[1]:.1f}x",
        ", ".join(f"{error:+.0%}" for error in errors),
    ]


def main() -> None:
    """Print the table."""
    print("| " + " | ".join(HEADINGS) + " |")
    print("|" + "---|" * len(HEADINGS))
    for size in SIZES:
        for case in cases(size):
            print("| " + " | ".join(row(case)) + " |", flush=True)


def _simulated(fitted: fit.Fitted, network: Network) -> float:
    size = len(network.hosts)
    plans = [fit.plan_of(fitted, rank, size, NBYTES // 4, 4, DEFAULT_PLAN_SIZES) for rank in range(size)]
    return simulated(plans, network, 4)


def _of_speeds(mbits: Sequence[float]) -> Network:
    speeds = [mbit * MBIT for mbit in mbits]
    return of_hosts(range(len(mbits)), speeds, speeds)


def _of_sites(size: int, number: int, trunk: float) -> Network:
    """Return hosts of 1 Gbit/s at sites with links between each two of them; ranks take turns among the sites."""
    one = _of_speeds([1000] * size)
    sites = tuple(rank % number for rank in range(size))
    between = trunk * MBIT
    return one._replace(
        rates=tuple(
            tuple(rate if a == b else min(rate, between) for rate, b in zip(rates, sites, strict=True))
            for rates, a in zip(one.rates, sites, strict=True)
        ),
        sites=sites,
        trunks=tuple(tuple(math.inf if a == b else between for b in range(number)) for a in range(number)),
    )


def _seconds(time: float) -> str:
    return f"{time:.2f} s" if time < 100 else f"{time:,.0f} s"


if __name__ == "__main__":
    main()
