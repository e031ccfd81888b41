"""What a group says about itself: its ranks, their processes, what it has done, and what happened to its run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from covey.base.config import check_timeout
from covey.runtime.events import FOUNDED, VIEWS
from covey.runtime.group.issuer import Issuer

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.compress.codec import Codec
    from covey.runtime.collectives.roster import LaneKinds
    from covey.runtime.collectives.stalls import Late
    from covey.runtime.events import Event
    from covey.runtime.group.explaining import PlanReport
    from covey.runtime.group.node import Node
    from covey.runtime.group.observing import Member
    from covey.runtime.group.savings import Compression
    from covey.runtime.group.snapshot import GroupMetrics


class Description(Issuer):
    """What can be read of a group; a base of `Group`. It runs no operation, and any thread may read it."""

    _local_rank: int
    _parent_ranks: tuple[int, ...] | None
    """The ranks in the group that it was split from."""
    _node: Node | None

    def __repr__(self) -> str:
        return f"<Group {self.name!r}: rank {self.rank} of {self.size}>"

    @property
    def live(self) -> tuple[int, ...]:
        """The ranks that have not been lost."""
        return self._engine.live

    @property
    def generation(self) -> int:
        """The number of the run's generation that this group belongs to."""
        return 0 if self._engine.generation is None else self._engine.generation.number

    @property
    def name(self) -> str:
        """The name of this group in error messages."""
        return self._engine.name

    @property
    def on_loss(self) -> str:
        """What operations do when a rank is lost: "raise", or "continue" among the remaining ranks."""
        return self._engine.config.on_loss

    @property
    def contributors(self) -> tuple[int, ...]:
        """The ranks whose input is in the result of the last collective that returned."""
        return self._engine.contributors

    @property
    def sequence(self) -> int:
        """The number of collectives of this group that have returned on this rank."""
        return self._engine.last_returned

    @property
    def local_rank(self) -> int:
        """The number of this process among the run's processes on its host, for instance to choose a device."""
        return self._local_rank

    def lanes(self) -> LaneKinds:
        """Return the kind of lane to each other rank: shm, unix, tcp, secure, quic or memory.

        The attribute `executor` of the result is "compiled" or "Python": what moves the data. `paths` has, by rank, the
        networks of a lane that goes over several of them (`covey.LanePath`); `streams` has the number of connections of
        each lane.
        """
        return self._engine.lane_kinds()

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the group by rank, lost ones included; see `Node.members`."""
        return self.node.members

    def to_parent(self, rank: int) -> int:
        """Return the rank in the group that this one was split from, of a rank of this group."""
        index = self._check_rank(rank, "rank")
        return index if self._parent_ranks is None else self._parent_ranks[index]

    def to_run(self, rank: int) -> int:
        """Return the rank in the first group of the generation, of a rank of this group."""
        index, generation = self._check_rank(rank, "rank"), self._engine.generation
        found = None if generation is None else generation.rank_of(self._engine.members[index])
        return index if found is None else found

    @property
    def compression(self) -> Compression:
        """What compression has saved so far, and the codec of the last compressed operation."""
        return self._savings.total

    def metrics(self) -> GroupMetrics:
        """Return what this group has done on this rank so far: operations, traffic, messages, compression.

        `covey.metrics` has the same numbers for Prometheus, for all groups of the process together.
        """
        from covey.runtime.group.snapshot import group_metrics  # most programs do not ask

        return group_metrics(self._engine, self._savings.total)

    def explain(self, nbytes: int, compress: str | Codec | None = None) -> PlanReport:
        """Return the plan with which an all_reduce of so many bytes is made now, why, and what the others would take.

        Between three or more ranks on several machines, large sums use the plan that fits the links, which the ranks
        measure together at the third large sum; `print` shows all of it. Nothing is sent. With `compress`, a codec like
        "int8", it is the plan of a compressed sum of so many bytes of float32.

        Raises:
            ConfigError: `compress` is not a codec whose transfers have a fixed size.
        """
        from covey.runtime.group.explaining import explain, explain_coded  # most programs do not ask

        return explain(self._engine, nbytes) if compress is None else explain_coded(self._engine, nbytes, compress)

    @property
    def node(self) -> Node:
        """This process as the other nodes know it: functions that they may call, and calls to theirs."""
        if self._node is None:
            from covey.runtime.calls.serve import calls_alone, serve_calls  # most programs make no calls
            from covey.runtime.group.node import Node

            engine = self._engine
            engine.failure.require_open()
            service = calls_alone(engine.config, self.name) if engine.node is None else serve_calls(engine.node)
            self._node = Node(engine, service)
        return self._node

    def call(
        self, rank: int, function: str | Callable[..., Any], /, *args: Any, timeout: float | None = None, **named: Any
    ) -> Any:
        """Call a function that another rank has registered, and return its result; see `Node.call`."""
        return self.node.call(rank, function, *args, timeout=timeout, **named)

    def who_is_late(self, *, timeout: float = 2.0) -> list[Late]:
        """Return the ranks that are operations behind the others, or do not answer within `timeout` seconds.

        Only the caller asks; the other ranks answer in the background, and no operation is disturbed. On any thread:
        while one thread waits in an operation, another can find out for which rank. An empty list means that all
        ranks are in the same operation.
        """
        return self._engine.stalls.who_is_late(check_timeout(timeout))

    def on_change(self, listener: Callable[[Event], None]) -> None:
        """Call `listener(event)` on a separate thread whenever members are lost or join."""
        if self._engine.node is not None:
            self._engine.node.events.listen(listener, (*VIEWS, *FOUNDED))

    def events(self) -> list[Event]:
        """Return the events of the run so far: losses and recoveries with their timelines, and generations."""
        return [] if self._engine.node is None else self._engine.node.events.all()
