"""Choose the plan of an operation, from facts that all ranks share.

The choice depends on the number of ranks, the byte count and the kind of lanes that the hosts of the ranks imply. It
must not depend on measurements of one rank, or on a lane that one pair had to fall back to: then ranks would run
different plans.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.base.errors import ConfigError
from covey.base.settings import SETTINGS
from covey.plan import direct, doubling, ring, trees
from covey.plan.moves import placed

if TYPE_CHECKING:
    from covey.plan.moves import Plan


class PlanSizes(NamedTuple):
    """The sizes at which plans change, and of transfers: equal on all ranks, or they would run different plans."""

    exchange_bytes: int = SETTINGS["exchange_bytes"].default
    """Up to this, two ranks swap whole buffers; above it, halves are cheaper."""
    doubling_bytes: int = SETTINGS["doubling_bytes"].default
    """Up to this, more than two ranks use the plan with the fewest rounds; above it, that with the fewest bytes."""
    tree_bytes: int = SETTINGS["tree_bytes"].default
    """Up to this, broadcast and reduce use a binomial tree; above it, a pipelined chain."""
    segment_bytes: int = SETTINGS["segment_bytes"].default
    """The size of pipelined transfers: large enough for few calls, small enough to fill the pipeline soon."""
    cached_segment_bytes: int = SETTINGS["cached_segment_bytes"].default
    """The same through shared memory: what a rank has reduced is still in its cache when it is sent on."""

    def segment(self, itemsize: int, *, is_cached: bool = False) -> int:
        """Return the number of elements in a pipelined transfer."""
        return max(1, (self.cached_segment_bytes if is_cached else self.segment_bytes) // itemsize)


DEFAULT_PLAN_SIZES: Final = PlanSizes()

ALL_REDUCE_PLANS: Final = ("exchange", "doubling", "direct", "ring", "tree", "star")
ROOTED_PLANS: Final = ("tree", "ring", "star", "direct")
DIRECT_RANKS: Final = 64
"""Up to this many ranks exchange directly through shared memory, which needs a lane for each pair. With more ranks the
lanes cost more time, memory and descriptors than the plan saves: a ring needs two lanes for each rank."""
PLANNED_BYTES: Final = 1 << 20
"""From this size on, the plan of a sum may be fitted to the links; smaller ones depend on round trips more than on
speed."""


@lru_cache(maxsize=256)
def all_reduce(
    rank: int, size: int, count: int, itemsize: int, lanes: str, algorithm: str | None, sizes: PlanSizes
) -> Plan:
    """Return this rank's plan; `lanes` is "ring" if all pairs share memory, else "stream"."""
    if algorithm is None:
        algorithm = all_reduce_algorithm(size, count * itemsize, lanes, sizes)
    segment = sizes.segment(itemsize, is_cached=lanes == "ring" and size > 2)
    match algorithm:
        case "exchange" if size <= 2:
            return direct.exchange(rank, size, count)
        case "doubling":
            return doubling.all_reduce(rank, size, count)
        case "direct":
            return direct.owner_reduce(rank, size, count, segment)
        case "ring":
            return ring.all_reduce(rank, size, count, segment)
        case "tree" | "star":
            return trees.all_reduce(rank, size, trees.whole(size, count, is_star=algorithm == "star"), segment)
    raise unknown("all_reduce", algorithm, ALL_REDUCE_PLANS)


def all_reduce_algorithm(size: int, nbytes: int, lanes: str, sizes: PlanSizes) -> str:
    """Return the algorithm for links of which nothing is known."""
    if size == 2:
        return "exchange" if nbytes <= sizes.exchange_bytes else "direct"
    if nbytes <= sizes.doubling_bytes:
        return "doubling"
    return _through_memory(size, lanes)


def _through_memory(size: int, lanes: str) -> str:
    return "direct" if lanes == "ring" and size <= DIRECT_RANKS else "ring"


@lru_cache(maxsize=256)
def broadcast(
    rank: int, size: int, root: int, count: int, itemsize: int, algorithm: str | None, sizes: PlanSizes
) -> Plan:
    """Return this rank's plan."""
    match algorithm or rooted_algorithm(count * itemsize, sizes):
        case "tree":
            return trees.broadcast(rank, size, root, count)
        case "ring":
            return ring.broadcast(rank, size, root, count, sizes.segment(itemsize))
        case "star":
            return trees.star_broadcast(rank, size, root, count, sizes.segment(itemsize))
        case "direct":
            return direct.broadcast(rank, size, root, count, sizes.segment(itemsize))
    raise unknown("broadcast", algorithm, ROOTED_PLANS)


@lru_cache(maxsize=256)
def reduce(rank: int, size: int, root: int, count: int, itemsize: int, algorithm: str | None, sizes: PlanSizes) -> Plan:
    """Return this rank's plan."""
    match algorithm or rooted_algorithm(count * itemsize, sizes):
        case "tree":
            return trees.reduce(rank, size, root, count)
        case "ring":
            return ring.reduce(rank, size, root, count, sizes.segment(itemsize))
        case "star":
            return trees.star_reduce(rank, size, root, count, sizes.segment(itemsize))
        case "direct":
            return direct.reduce(rank, size, root, count, sizes.segment(itemsize))
    raise unknown("reduce", algorithm, ROOTED_PLANS)


@lru_cache(maxsize=256)
def all_gather(rank: int, lengths: tuple[int, ...], lanes: str, algorithm: str | None) -> Plan:
    """Return this rank's plan. Over streams, which may share a wire, blocks are passed on from rank to rank."""
    match algorithm or _through_memory(len(lengths), lanes):
        case "direct":
            return direct.all_gather(rank, lengths)
        case "ring":
            return ring.all_gather(rank, lengths)
    raise unknown("all_gather", algorithm, ("direct", "ring"))


@lru_cache(maxsize=256)
def all_gather_rows(rank: int, rows: tuple[int, ...], count: int, lanes: str, algorithm: str | None) -> Plan:
    """Return this rank's plan to fill buffer 1: the `count` elements of row rows[j] come from rank j.

    Buffer 0 is the input, which the caller has copied to this rank's row.
    """
    plan = all_gather(rank, (count,) * len(rows), lanes, algorithm)
    return placed(plan, [(1, row * count) for row in rows])


@lru_cache(maxsize=256)
def all_to_all_rows(rank: int, rows: tuple[int, ...], count: int) -> Plan:
    """Return this rank's plan to send row rows[j] of buffer 0 to rank j, and to receive that row of buffer 1 from it.

    A row has `count` elements. A rank's row for itself is not moved: the caller copies it.
    """
    lengths = (count,) * len(rows)
    places = [(buffer, row * count) for buffer in (0, 1) for row in rows]
    return placed(direct.all_to_all(rank, lengths, lengths), places)


@lru_cache(maxsize=256)
def gather(rank: int, root: int, lengths: tuple[int, ...]) -> Plan:
    """Return this rank's plan."""
    return direct.gather(rank, root, lengths)


@lru_cache(maxsize=256)
def scatter(rank: int, root: int, lengths: tuple[int, ...]) -> Plan:
    """Return this rank's plan."""
    return direct.scatter(rank, root, lengths)


@lru_cache(maxsize=256)
def reduce_scatter(
    rank: int, starts: tuple[int, ...], counts: tuple[int, ...], itemsize: int, sizes: PlanSizes
) -> Plan:
    """Return this rank's plan to reduce its part of buffer 0, which is only read, into buffer 1.

    The part of rank j has counts[j] elements from starts[j] on. Buffer 1 starts as a copy of this rank's part.
    """
    plan = direct.reduce_scatter(rank, counts, sizes.segment(itemsize))
    return placed(plan, [*((0, start) for start in starts), (1, 0)])


def rooted_algorithm(nbytes: int, sizes: PlanSizes) -> str:
    """Return the algorithm of broadcast and reduce."""
    return "tree" if nbytes <= sizes.tree_bytes else "ring"


def unknown(operation: str, algorithm: str | None, known: tuple[str, ...]) -> ConfigError:
    """Return the error for an algorithm that an operation does not have."""
    extra = " (exchange is for two ranks)" if algorithm == "exchange" else ""
    return ConfigError(f"algorithm={algorithm!r} does not exist for {operation}{extra}; use one of {', '.join(known)}")
