"""The replicas of a sharded model among the ranks of a run, and the exchanges in which these agree on a step.

`proto.replica_agreement` decides, from what all ranks told in one operation of the run's group. The ranks with the same
shard are a line: a group in which they sum their gradients, and from which a rank gets its shard. A rank without a
replica takes part in the exchanges only, until a replica has room for it.

Invariant: a rank whose state is not that of the newest step that all shards have gets that state before it trains.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import numpy as np

from covey.base.errors import PeerLostError
from covey.proto.replica_agreement import NO_STATE, CommonSum, HeldShard, ReplicaLayout, form, judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.runtime.group.group import Group
    from covey.torch.training.replica import ModelReplica


class Replicas:
    """The replicas of a run, as one of its ranks sees them."""

    def __init__(self, replica: ModelReplica) -> None:
        self._own = replica
        self.formation = ReplicaLayout((), NO_STATE, ())
        self.is_broken = False
        """Whether some replica has lost a rank since they were formed. Equal on all ranks after each step."""
        self.must_load = self.is_due = False
        """Whether a shard is on no rank any more; whether a checkpoint is to be saved after this step."""
        self.may_step = True
        """Whether all ranks of this rank's replica were in the last exchange, and none was torn."""
        self.speeds: tuple[float, ...] = ()
        """Speed of the slowest rank of each replica, in the last exchange; 0 for one that has lost a rank."""
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
        by_line = (lines.reshape(shards, count) > 0).tolist()
        common = judge(self.formation, by_line, set(np.flatnonzero(torn).tolist()), there)
        self.is_broken |= len(common.whole) < count
        self.may_step = self.number in common.whole
        self.speeds = tuple(float(speeds[list(ranks)].min()) for ranks in self.formation.replicas)
        return common

    def close(self) -> None:
        """Close the groups of the replicas that were formed."""
        self._own.bond.unbind()
        for group in (self.line, self.holders):
            if group is not None:
                group.close()
        self.line = self.holders = None
