"""Which ranks of a run form replicas of a sharded model, and which of their sums count.

The ranks with the same shard are a line: a group in which they sum their gradients, and from which a rank gets its
shard. A step counts if all lines have summed the gradients of the same replicas. All ranks agree on that in one
operation of the run's group, which is all or nothing: so either all remaining ranks step their optimizers, or none
does. A rank without a replica takes part in that operation only, until a replica has room for it.

Invariants: every rank computes the same replicas from the same exchange; a replica is in the result of a step with all
of its shards or with none; a rank whose state is not that of the newest step that all shards have gets that state
before it trains.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from covey.base.errors import ConfigError, PeerLostError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from covey.runtime.group.group import Group
    from covey.torch.training.replica import ModelReplica

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
    """Of each replica its ranks, in the order of their shards."""
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
    speeds: tuple[float, ...]
    """Of each replica that of its slowest rank; 0 for a replica that has lost a rank."""


class Replicas:
    """The replicas of a run, as one of its ranks sees them."""

    def __init__(self, replica: ModelReplica) -> None:
        self._own = replica
        self.formation = ReplicaLayout((), NO_STATE, ())
        self.is_broken = False
        """Whether some replica has lost a rank since they were formed. Equal on all ranks after each step."""
        self.must_load = self.is_due = False
        """Whether a shard is on no rank any more; whether a checkpoint is to be saved after this step."""
        self.was_early = False
        """Whether the last sum was early."""
        self.is_over = False
        """Whether the others have ended the training while this rank had no replica."""
        self._group: Group
        self.line: Group | None = None
        """The ranks with the same shard that train, in the order of their replicas; None for a rank without one."""
        self.holders: Group | None = None
        """All ranks with the same shard."""
        self._members: Sequence[int] = ()

    @property
    def number(self) -> int | None:
        """The replica of this rank; None if there is no room for it."""
        return self.formation.replica_of(self._group.rank)

    @property
    def count(self) -> int:
        return len(self.formation.replicas)

    @property
    def has_idle(self) -> bool:
        """Whether a rank has no replica. Equal on all ranks."""
        return self.formation.has_idle(self._members)

    def form(self, group: Group, version: int, *, can_load: bool = False) -> bool:
        """Form replicas of the ranks of a group that are left; return whether the state of some rank is not current.

        Every rank calls it. `version` is the number of steps that its own state has made. If a shard is on no rank any
        more and all ranks `can_load` a checkpoint, `must_load` says so, and `must_wait` if there is no replica either.

        Raises:
            ConfigError: no replica can be formed.
            PeerLostError: some shard is on no rank any more.
        """
        self.must_load = False
        while True:
            self.close()
            is_behind = self._try(group, version, can_load=can_load)
            if self.must_wait:
                return False
            # A rank that is lost meanwhile leaves a hole in a line, so all form them again.
            whole = group.all_reduce(np.array([self._is_whole()]), op="min")
            if whole[0] and group.contributors == self._members:
                return is_behind

    @property
    def must_wait(self) -> bool:
        """Whether the next generation has to bring the processes that a replica needs."""
        return self.must_load and not self.formation.replicas

    def _try(self, group: Group, version: int, *, can_load: bool) -> bool:
        self._group, own = group, self._own
        mine = HeldShard(own.index, own.shards, socket.gethostname(), own.home, version)
        told = group.all_gather_object(tuple(mine))
        self._members = group.contributors
        places = {rank: HeldShard(*told[rank]) for rank in self._members}
        self.formation = form(places)
        self.is_broken = self.is_over = False
        if self.formation.lost:
            if not can_load:
                raise self.state_is_lost()
            self.must_load, self.is_due = True, False
            if self.must_wait:
                return False
            self.formation = self.formation._replace(version=NO_STATE)
        self.holders = group.split(own.index)
        number = self.number
        self.line = group.split(None if number is None else own.index, 0 if number is None else number)
        if number is not None:
            ranks = self.formation.replicas[number]
            own.bond.bind(group, ranks, f"{group.generation}.{group.sequence}.{number}")
        return any(place.version != self.formation.version for place in places.values())

    def _is_whole(self) -> bool:
        return self.line is None or (self.line.size == self.count and not self._own.is_torn)

    def state_is_lost(self) -> PeerLostError:
        """Return the error to raise if some shards are on no rank any more."""
        lost, gone = self.formation.lost, set(range(self._group.size)) - set(self._members)
        what = f"shard{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} of {self._own.shards}"
        return PeerLostError(
            f"the training cannot continue: no remaining process has {what} of the model, which would be in a whole "
            "replica. Start again from the last checkpoint; with elastic.keep_checkpoints(every=...) the run continues "
            "from it by itself, once enough processes are there",
            rank=min(gone, default=-1),
            operation="step()",
        )

    def agree(
        self,
        counted: Sequence[int],
        speed: float,
        *,
        is_early: bool = False,
        is_over: bool = False,
        is_due: bool = False,
    ) -> CommonSum:
        """Tell all ranks which replicas are in the sum of this rank's line; return what all lines have in common.

        Every rank of the group calls it after a sum, those without a replica with nothing. A sum that is early is one
        that the program works with before its step; then all ranks call it a second time, before they step.
        """
        group, count, shards = self._group, self.count, self._own.shards
        row = np.zeros(2 * group.size + shards * count + 3)
        torn, speeds, lines, flags = np.split(row, np.cumsum([group.size, group.size, shards * count]))
        torn[group.rank], speeds[group.rank], flags[:] = self._own.is_torn, speed, (is_early, is_over, is_due)
        if counted:
            lines.reshape(shards, count)[self._own.index, list(counted)] = 1
        group.all_reduce(row, op="max")
        there = set(group.contributors)
        self.was_early, self.is_over, self.is_due = (bool(flag) for flag in flags)
        by_line = lines.reshape(shards, count)
        common = by_line.min(axis=0)
        for ranks in self.formation.replicas:
            if not there.issuperset(ranks) or torn[list(ranks)].any():
                self.is_broken = True
        return CommonSum(
            tuple(np.flatnonzero(common).tolist()),
            bool((by_line == common).all()),
            tuple(float(speeds[list(ranks)].min()) for ranks in self.formation.replicas),
        )

    def close(self) -> None:
        """Close the groups of the replicas that were formed."""
        self._own.bond.unbind()
        for group in (self.line, self.holders):
            if group is not None:
                group.close()
        self.line = self.holders = None
