"""Which ranks form replicas of a sharded model, and which of them take a step.

The ranks with the same shard are a line, in which gradients are summed. After the sums all ranks tell each other, in
one exchange that is all or nothing, which replicas are in the sum of their line, and whether their own is torn.

Invariants:

- A replica is in a step with all of its shards or with none: the sums of all lines are of the same replicas.
- If the program works with the sums before the step, as for clipping, the ranks of a replica step only if all of them
  were there after that. So each replica steps as a whole or stays where it was, and there is a version that all shards
  have as long as each shard is on some rank; unless a replica that stepped, while another one had lost a rank, loses
  one itself before replicas are formed again, which is the next thing that happens.
- The replicas that are formed have the newest version that all shards have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

NO_STATE: Final = -1
"""The version of a newcomer's state."""


class HeldShard(NamedTuple):
    """What a rank tells the others before replicas are formed."""

    shard: int
    shards: int
    host: str
    home: int
    """Which replica of its host it was started for."""
    version: int
    """The number of steps that its state has made, or NO_STATE."""


class ReplicaLayout(NamedTuple):
    """The replicas of a group, and whose state counts."""

    replicas: tuple[tuple[int, ...], ...]
    """Ranks of each replica, in the order of their shards."""
    version: int
    """The newest state that all shards have; NO_STATE if all ranks are newcomers."""
    lost: tuple[int, ...]
    """The shards that no rank has any more."""

    def replica_of(self, rank: int) -> int | None:
        """Return the number of the replica of a rank; None if there was no room for it."""
        return next((number for number, ranks in enumerate(self.replicas) if rank in ranks), None)

    def has_idle(self, ranks: Iterable[int]) -> bool:
        """Tell whether some of these ranks have no replica."""
        return any(self.replica_of(rank) is None for rank in ranks)


def form(places: Mapping[int, HeldShard]) -> ReplicaLayout:
    """Return the replicas that these ranks form: as many as possible, of one home and then of one host if possible.

    Raises:
        ConfigError: ranks disagree on the number of shards, or nothing was lost and a shard has no rank.
    """
    shards = {place.shards for place in places.values()}
    if len(shards) > 1:
        told = "; ".join(f"rank {rank} has shards={place.shards}" for rank, place in sorted(places.items()))
        raise ConfigError(f"a replica must have the same number of shards on all ranks: {told}")
    (count,) = shards
    version, lost = _newest(places, count)
    left = sorted(places, key=lambda rank: (places[rank].version != version, rank))
    formed: list[tuple[int, ...]] = []
    for key in (_by_home, _by_host, _any):
        for ranks in _grouped(left, places, key):
            by_index = [[rank for rank in ranks if places[rank].shard == index] for index in range(count)]
            formed += zip(*by_index, strict=False)
        taken = {rank for ranks in formed for rank in ranks}
        left = [rank for rank in left if rank not in taken]
    if not formed and version == NO_STATE:
        missing = sorted(set(range(count)) - {place.shard for place in places.values()})
        raise ConfigError(
            f"no rank has shard {missing[0]} of {count}: start at least {count} processes on a machine, or give each "
            "its index= in ModelReplica"
        )
    return ReplicaLayout(tuple(sorted(formed)), version, lost)


def _newest(places: Mapping[int, HeldShard], count: int) -> tuple[int, tuple[int, ...]]:
    """Return the newest version that all shards have, and the shards without a rank that has any state."""
    by_index: list[set[int]] = [set() for _ in range(count)]
    for place in places.values():
        if place.version != NO_STATE:
            by_index[place.shard].add(place.version)
    if not any(by_index):
        return NO_STATE, ()
    common = set.intersection(*by_index)
    if common:
        return max(common), ()
    newest = max(version for versions in by_index for version in versions)
    return newest, tuple(index for index, versions in enumerate(by_index) if newest not in versions)


def _by_home(place: HeldShard) -> Hashable:
    return place.host, place.home


def _by_host(place: HeldShard) -> Hashable:
    return place.host


def _any(_: HeldShard) -> Hashable:
    return 0


def _grouped(ranks: Sequence[int], places: Mapping[int, HeldShard], key: Any) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(places[rank]), []).append(rank)
    return list(groups.values())


class CommonSum(NamedTuple):
    """What all ranks know after a step was summed."""

    counted: tuple[int, ...]
    """The replicas whose gradients are in the sums of all lines."""
    is_decided: bool
    """Whether no line has other gradients in its sums."""
    whole: tuple[int, ...]
    """The replicas of which all ranks are there and none says that it is torn."""


def judge(
    layout: ReplicaLayout, by_line: Sequence[Sequence[bool]], torn: Collection[int], there: Collection[int]
) -> CommonSum:
    """Return what the sums of all lines have in common.

    `by_line` tells for each shard which replicas are in the sum of its line, `torn` which ranks say that their replica
    is torn, and `there` which ranks took part in the exchange.
    """
    numbers = range(len(layout.replicas))
    common = tuple(number for number in numbers if all(line[number] for line in by_line))
    is_decided = all(bool(line[number]) == (number in common) for line in by_line for number in numbers)
    whole = tuple(
        number
        for number, ranks in enumerate(layout.replicas)
        if all(rank in there and rank not in torn for rank in ranks)
    )
    return CommonSum(common, is_decided, whole)
