"""Which pairs of ranks are measured when. Pure: all ranks compute the same schedule from the same facts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

Pair = tuple[int, int]
"""Two ranks, the lower one first."""

ALONE_UP_TO: Final = 8
"""Up to this many ranks, no two pairs are measured at the same time: all of them take about 17 s."""
PAIR_SECONDS: Final = 0.6
"""What one pair takes, unless that is too long: three kinds of streams, two of each."""
LEAST_PAIR_SECONDS: Final = 0.3
ALL_PAIRS_SECONDS: Final = 120.0
"""All pairs should take no longer than this; then each gets less, but at least LEAST_PAIR_SECONDS."""


def rounds(size: int) -> list[list[Pair]]:
    """Return all pairs of `size` ranks in rounds: in each, every rank is in one pair, or, if `size` is odd, one waits.

    Rank 0 keeps its place and the others move around a table by one place for each round.
    """
    seats = [*range(size), *[-1] * (size % 2)]
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append(sorted((min(pair), max(pair)) for pair in facing if -1 not in pair))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def batches(pairs: Sequence[Pair], hosts: Sequence[str]) -> list[list[Pair]]:
    """Return the pairs of a round in groups that are measured at the same time.

    `hosts` names the machine of each rank. Up to ALONE_UP_TO ranks each pair is alone; beyond, the pairs of a group
    have no machine in common, so that they share no network interface and no processor.
    """
    if len(hosts) <= ALONE_UP_TO:
        return [[pair] for pair in pairs]
    found: list[tuple[set[str], list[Pair]]] = []
    for pair in pairs:
        used = {hosts[rank] for rank in pair}
        for busy, batch in found:
            if not busy & used:
                busy |= used
                batch.append(pair)
                break
        else:
            found.append((used, [pair]))
    return [batch for _, batch in found]


def pair_seconds(hosts: Sequence[str]) -> float:
    """Return what one pair may take, so that all pairs take about ALL_PAIRS_SECONDS at most."""
    count = sum(len(batches(pairs, hosts)) for pairs in rounds(len(hosts)))
    return max(LEAST_PAIR_SECONDS, min(PAIR_SECONDS, ALL_PAIRS_SECONDS / max(1, count)))
