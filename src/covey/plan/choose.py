"""Which plan for which operation: one table, and nothing in it but facts that all ranks share.

A choice may depend on the number of ranks, the byte count and the kind of lanes the host map calls for; never on
what one rank measured or on a lane that one pair had to fall back to, or ranks would run different plans.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError
from covey.plan import direct, doubling, ring, tree

if TYPE_CHECKING:
    from covey.plan.moves import Plan

EXCHANGE_BYTES: Final = 256 << 10
"""Two ranks swap whole buffers up to this; above, halves are cheaper."""
DOUBLING_BYTES: Final = 256 << 10
"""More ranks use the fewest rounds up to this; above, the fewest bytes."""
TREE_BYTES: Final = 128 << 10
"""Broadcast and reduce along a binomial tree up to this, along a pipelined chain above."""
SEGMENT_BYTES: Final = 4 << 20
"""Pipelined transfers: large enough to need few calls, small enough that the pipeline fills soon."""

ALL_REDUCE: Final = ("exchange", "doubling", "direct", "ring")
ROOTED: Final = ("tree", "ring")


@lru_cache(maxsize=256)
def all_reduce(rank: int, size: int, count: int, itemsize: int, lanes: str, algorithm: str | None) -> Plan:
    """Return this rank's plan; `lanes` is "ring" where all pairs share memory, else "stream"."""
    nbytes = count * itemsize
    if algorithm is None:
        if size == 2:
            algorithm = "exchange" if nbytes <= EXCHANGE_BYTES else "direct"
        elif nbytes <= DOUBLING_BYTES:
            algorithm = "doubling"
        else:
            algorithm = "direct" if lanes == "ring" else "ring"
    segment = max(1, SEGMENT_BYTES // itemsize)
    match algorithm:
        case "exchange" if size <= 2:
            return direct.exchange(rank, size, count)
        case "doubling":
            return doubling.all_reduce(rank, size, count)
        case "direct":
            return direct.owner_reduce(rank, size, count, segment)
        case "ring":
            return ring.all_reduce(rank, size, count, segment)
    raise _unknown("all_reduce", algorithm, ALL_REDUCE)


@lru_cache(maxsize=256)
def broadcast(rank: int, size: int, root: int, count: int, itemsize: int, algorithm: str | None) -> Plan:
    """Return this rank's plan."""
    match _rooted(count * itemsize, algorithm):
        case "tree":
            return tree.broadcast(rank, size, root, count)
        case "ring":
            return ring.broadcast(rank, size, root, count, max(1, SEGMENT_BYTES // itemsize))
    raise _unknown("broadcast", algorithm, ROOTED)


@lru_cache(maxsize=256)
def reduce(rank: int, size: int, root: int, count: int, itemsize: int, algorithm: str | None) -> Plan:
    """Return this rank's plan."""
    match _rooted(count * itemsize, algorithm):
        case "tree":
            return tree.reduce(rank, size, root, count)
        case "ring":
            return ring.reduce(rank, size, root, count, max(1, SEGMENT_BYTES // itemsize))
    raise _unknown("reduce", algorithm, ROOTED)


@lru_cache(maxsize=256)
def all_gather(rank: int, lengths: tuple[int, ...], lanes: str, algorithm: str | None) -> Plan:
    """Return this rank's plan; neighbours pass blocks on where streams share a wire."""
    match algorithm or ("direct" if lanes == "ring" else "ring"):
        case "direct":
            return direct.all_gather(rank, lengths)
        case "ring":
            return ring.all_gather(rank, lengths)
    raise _unknown("all_gather", algorithm, ("direct", "ring"))


def _rooted(nbytes: int, algorithm: str | None) -> str:
    return algorithm or ("tree" if nbytes <= TREE_BYTES else "ring")


def _unknown(operation: str, algorithm: str | None, known: tuple[str, ...]) -> ConfigError:
    extra = " (exchange is for two ranks)" if algorithm == "exchange" else ""
    return ConfigError(f"algorithm={algorithm!r} is not one for {operation}{extra}; use one of {', '.join(known)}")
