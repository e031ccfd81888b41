"""What a run measures and in which order: agreed on by all ranks, from the options that each of them was given. Pure.

All ranks compute the same schedule of pairs from the same facts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConfigError
from covey.base.numbers import NAME_LIMIT
from covey.base.text import listed, printable
from covey.lab.bench.sweep import MAX_RANKS, CaseGrid, parse_operations, parse_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Pair = tuple[int, int]
"""Two ranks, the lower one first."""
ALONE_UP_TO: Final = 8
"""Up to this many ranks, no two pairs are measured at the same time: all of them take about 17 s."""
PAIR_SECONDS: Final = 0.6
"""What one pair takes, unless that is too long: three kinds of streams, two of each."""
LEAST_PAIR_SECONDS: Final = 0.3
ALL_PAIRS_SECONDS: Final = 120.0
"""All pairs should take no longer than this; then each gets less, but at least LEAST_PAIR_SECONDS."""
DEFAULT_SIZES_TEXT: Final = "4,64K,1M,16M,64M"
QUICK_SIZES: Final = "4,64K,1M,8M"
PAIR_SECONDS_RANGE: Final = 0.1, 60.0
AGREED_OPTIONS: Final = ("--op", "--sizes", "--dtype", "--reps", "--quick", "--pair-seconds")
"""The options that all ranks follow, wherever they were given."""


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


@dataclass(frozen=True)
class RankOffer:
    """What one rank tells the others before it measures."""

    options: dict[str, str]
    """Those of AGREED_OPTIONS that this rank was given, as words."""
    host: str
    """Equal for ranks of one machine."""
    host_name: str
    facts: dict[str, Any]
    """About its machine."""
    writes: tuple[str, ...] = ()
    """The files that it was told to write: `json`, `plot`."""


@dataclass(frozen=True)
class NetworkTerms:
    """What all ranks measure together."""

    grid: CaseGrid
    pair_seconds: float
    hosts: tuple[str, ...]
    """The machine of each rank."""
    names: tuple[str, ...]
    """The name of each rank's machine."""

    @property
    def size(self) -> int:
        return len(self.hosts)

    def label(self, rank: int) -> str:
        """Return a rank with the name of its machine."""
        return f"{rank} {self.names[rank]}".rstrip()


def parse(options: Mapping[str, str]) -> tuple[CaseGrid, float | None]:
    """Return the cases that options ask for, and the seconds of a pair, if given; ConfigError if they are wrong."""
    is_quick = "--quick" in options
    grid = CaseGrid(
        operations=parse_operations(options.get("--op", "all_reduce")),
        sizes=parse_sizes(options.get("--sizes") or (QUICK_SIZES if is_quick else DEFAULT_SIZES_TEXT)),
        dtype=options.get("--dtype", "float32"),
        repetitions=_number("--reps", options, 3 if is_quick else 7, int),
        round_seconds=0.03 if is_quick else 0.1,
    )
    seconds = _number("--pair-seconds", options, None, float)
    low, high = PAIR_SECONDS_RANGE
    if seconds is not None and not (math.isfinite(seconds) and low <= seconds <= high):
        raise ConfigError(f"--pair-seconds takes {low:g} to {high:g} seconds, not {seconds:g}")
    return grid, seconds


def _number(option: str, options: Mapping[str, str], default: Any, kind: type[int] | type[float]) -> Any:
    if option not in options:
        return default
    try:
        return kind(options[option])
    except ValueError:
        raise ConfigError(f"{option} takes a number, not {printable(options[option], NAME_LIMIT)!r}") from None


def agree(offers: Sequence[RankOffer]) -> NetworkTerms:
    """Return what all ranks measure, from what each has offered; all of them come to the same result.

    Raises:
        ConfigError: there are too few or too many ranks, or two ranks were given an option with different values.
    """
    if len(offers) < 2:
        raise ConfigError("links need at least two ranks, and this run has one: start `covey bench` on other machines")
    if len(offers) > MAX_RANKS:
        raise ConfigError(f"a benchmark needs 2 to {MAX_RANKS} ranks, not {len(offers)}")
    names = tuple(printable(offer.host_name, NAME_LIMIT) for offer in offers)
    options: dict[str, str] = {}
    for option in AGREED_OPTIONS:
        given = {rank: offer.options[option] for rank, offer in enumerate(offers) if option in offer.options}
        if len(set(given.values())) > 1:
            words = [f"{printable(text, NAME_LIMIT)} on rank {rank} ({names[rank]})" for rank, text in given.items()]
            raise ConfigError(f"{option} differs between ranks: {listed(words)}; give options on one machine only")
        if given:
            options[option] = next(iter(given.values()))
    grid, seconds = parse(options)
    hosts = tuple(offer.host for offer in offers)
    return NetworkTerms(grid, pair_seconds(hosts) if seconds is None else seconds, hosts, names)


def writer(offers: Sequence[RankOffer], kind: str) -> int | None:
    """Return the lowest rank that was told to write a kind of file; None if none was."""
    return next((rank for rank, offer in enumerate(offers) if kind in offer.writes), None)
