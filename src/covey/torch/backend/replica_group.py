"""Process groups between the ranks of one replica, which outlive those ranks.

A sharded model keeps its process groups for as long as it lives, and its replica may lose ranks and get others. So
these process groups stay, and the covey groups behind them are replaced. Until then nothing raises because of a lost
rank: from its loss on the replica is torn, operations do nothing, and outputs are zeros. What was computed since does
not count, which the caller sees by `Bond.is_torn`.

Invariant: all process groups of a replica are torn at the same time, and whole again at the same time.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Never

import torch
import torch.distributed as dist

from covey.base.errors import ClosedError, ConfigError, GroupChangedError, PeerLostError, QuorumLostError
from covey.runtime.group.internals import engine_of, home_of
from covey.torch.backend.backend import ProcessGroupCovey
from covey.torch.backend.description import DescribedProcessGroup
from covey.torch.backend.exchange import TensorGroup
from covey.torch.backend.visible import keep_from_dynamo
from covey.torch.backend.work import TorchIssuer, TorchWork
from covey.torch.backend.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.runtime.group.group import Group
    from covey.runtime.work import Work
    from covey.torch.backend.work import Notices

REPLICA_BACKEND: Final = "covey_replica"

ENDS_OF_GROUPS: Final = (PeerLostError, GroupChangedError, QuorumLostError, ClosedError)
"""Errors that end a group because of its members; others are raised to the program."""


class Bond:
    """What the process groups of one replica share: the ranks that are in it now, and whether one was lost."""

    def __init__(self, index: int, shards: int) -> None:
        self.index, self.shards = index, shards
        self.is_torn = False
        """Whether a rank was lost since the replica was formed."""
        self._groups: list[ProcessGroupReplica] = []
        self._world: World | None = None

    def add(self, group: ProcessGroupReplica) -> None:
        """Take a process group in; all ranks of the replica make the same ones, in the same order."""
        self._groups.append(group)
        if self._world is not None:
            group.bind(self._world)

    def bind(self, group: Group, ranks: Sequence[int], key: str) -> None:
        """Let the process groups use these ranks of `group`, in the order of their shards; each of them calls it.

        `key` is equal on all of them, and new for each call.
        """
        self.unbind()
        parent = engine_of(group)
        members = tuple(parent.members[rank] for rank in ranks)
        name = f"{group.name}/replica"
        engine = parent.subgroup(f"{parent.id}/replica/{key}", members, name)
        top = TensorGroup(engine, home_of(group), local_rank=group.local_rank)
        self.is_torn = False
        try:
            self._world = world = _ReplicaWorld(top, key, owns_run=True, ranks=range(len(ranks)))
            for each in self._groups:
                each.bind(world)
        except ENDS_OF_GROUPS:
            self.is_torn = True

    def unbind(self) -> None:
        """Close the covey groups."""
        if self._world is not None:
            self._world.close()
            self._world = None


class _ReplicaWorld(World):
    """The ranks of a replica, as the world of its process groups."""

    @property
    def is_new(self) -> bool:
        """Return False: the steps of the program are operations of the run's group, not of the replica's."""
        return False


class _Unbound:
    """Stands for the covey group of a replica without ranks."""

    on_loss = "raise"

    def __getattr__(self, name: str) -> Never:
        raise ConfigError("the ranks of a replica can only reach each other inside of the loop over Elastic")

    def close(self) -> None:
        """Do nothing."""


class ProcessGroupReplica(ProcessGroupCovey):
    """A process group of some ranks of a replica."""

    def __init__(self, bond: Bond, options: Any) -> None:
        size: int = options.group_size
        DescribedProcessGroup.__init__(self, options.group_rank, size, str(options.group_id), options.store)
        self.called = REPLICA_BACKEND
        self._bond, self._ranks = bond, list(options.global_ranks_in_group) or list(range(size))
        self._is_first, self._may_cut, self.check_every = False, False, 0
        self._seconds = options.timeout.total_seconds()
        unbound: Any = _Unbound()
        self._group, self._issuer = unbound, ReplicaIssuer(bond, unbound, size, self._seconds)
        bond.add(self)

    def bind(self, world: World) -> None:
        """Use a group of this world from now on."""
        self._world, self._group = world, world.group(self._name, self._ranks)
        self._issuer = ReplicaIssuer(self._bond, self._group, self._size, self._seconds)
        world.on_close(self._close)

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = self._issuer.seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Close the covey group."""
        if not isinstance(self._group, _Unbound):
            self._close()

    def abort(self) -> None:
        """End pending operations on all ranks, and close the covey group."""
        if not isinstance(self._group, _Unbound):
            self._group.revoke()
            self._close()

    def _close(self) -> None:
        super()._close()
        unbound: Any = _Unbound()
        self._group = unbound


class ReplicaIssuer(TorchIssuer):
    """Issues operations while the replica is whole."""

    def __init__(self, bond: Bond, group: TensorGroup, size: int, seconds: float) -> None:
        super().__init__(group, size, seconds)
        self._bond = bond

    def issue(
        self, opts: Any, filled: list[torch.Tensor], operation: Callable[..., Any], calls: Sequence[tuple[Any, ...]]
    ) -> TorchWork:
        """Call `operation` as `TorchIssuer` does, or fill the outputs with zeros if the replica is torn."""
        if not self._bond.is_torn:
            try:
                work = super().issue(opts, filled, operation, calls)
            except ENDS_OF_GROUPS:
                self._bond.is_torn = True
            else:
                if opts.asyncOp:
                    return work
                self._bond.is_torn |= len(work.contributors) < len(self._everyone)
                if not self._bond.is_torn:
                    return work
        _clear(filled)
        return TorchWork([], filled, self.notices, self._everyone)

    def _work(self, works: list[Work[Any]], filled: list[torch.Tensor], contributors: list[int]) -> TorchWork:
        return ReplicaWork(self._bond, works, filled, self.notices, contributors)


class ReplicaWork(TorchWork):
    """A started operation that ends without an error if a rank of the replica is lost."""

    def __init__(
        self,
        bond: Bond,
        works: list[Work[Any]],
        tensors: list[torch.Tensor],
        notices: Notices,
        contributors: list[int],
    ) -> None:
        super().__init__(works, tensors, notices, contributors)
        self._bond, self._size = bond, len(contributors)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the operations."""
        try:
            super().wait(timeout)
        except ENDS_OF_GROUPS:
            self._bond.is_torn = True
        self._bond.is_torn |= len(self.contributors) < self._size
        if self._bond.is_torn:
            _clear(self._tensors)
        return True

    def _error(self) -> BaseException | None:
        error = super()._error()
        if not isinstance(error, ENDS_OF_GROUPS):
            return error
        self._bond.is_torn = True
        return None


def _clear(tensors: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.zero_()


def start_replica(index: int, shards: int) -> Bond:
    """Make the default process group of torch that of a replica, in which this rank has `index`.

    Raises:
        ConfigError: there is a default process group already.
    """
    if dist.is_initialized():
        raise ConfigError(
            "a ModelReplica makes the default process group of torch, and there is one: leave out init_process_group"
        )
    global _bond
    _bond = bond = Bond(index, shards)
    if REPLICA_BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(REPLICA_BACKEND, _create, extended_api=True, devices=["cpu"])
    dist.init_process_group(REPLICA_BACKEND, store=dist.HashStore(), rank=index, world_size=shards)
    return bond


_bond: Bond
"""The bond of the last replica that this process has made."""


def _create(options: Any, _pg_options: Any) -> ProcessGroupReplica:
    return ProcessGroupReplica(_bond, options)


keep_from_dynamo(ProcessGroupReplica, ReplicaIssuer, ReplicaWork)
