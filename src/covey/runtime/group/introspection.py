"""What a group says about itself: its ranks, their processes, what it has done, and what happened to its run.

It also takes what the program reports of its steps. Nothing here runs an operation, and any thread may ask.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from covey.base.config import check_timeout
from covey.base.errors import ConfigError
from covey.runtime.group.issuer import whole_number

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from covey.compress.codec import Codec
    from covey.runtime.calls.service import CallService
    from covey.runtime.collectives.roster import LaneKinds
    from covey.runtime.collectives.stalls import Late
    from covey.runtime.events import Event
    from covey.runtime.group.explanation import GroupMetrics, PlanReport
    from covey.runtime.group.issuer import Issuer
    from covey.runtime.group.members import DescribedEngine
    from covey.runtime.group.node import Node
    from covey.runtime.report_log import ReportLog
    from covey.runtime.state.store import Stores


P = ParamSpec("P")
T = TypeVar("T")


class Introspection:
    """What can be asked of a group, as `Group` offers it."""

    def __init__(
        self,
        engine: DescribedEngine,
        issuer: Issuer,
        parent_ranks: tuple[int, ...] | None,
        serve: Callable[[], tuple[CallService, Stores | None]],
    ) -> None:
        """`parent_ranks` are the ranks in the group that it was split from.

        `serve` makes, or finds, what serves calls between nodes; it returns the stores of the run as well.
        """
        self._engine, self._issuer, self._parent_ranks, self._serve = engine, issuer, parent_ranks, serve
        self.known_node: Node | None = None
        """What `node` returned, once it was called."""

    def node(self) -> Node:
        """Return this process as the other nodes know it; see `Group.node`."""
        if self.known_node is None:
            from covey.runtime.group.node import Node  # most programs make no calls

            self._issuer.engine.failure.require_open()
            self.known_node = Node(self._engine, *self._serve())
        return self.known_node

    def lanes(self) -> LaneKinds:
        """Return the kind of lane to each other rank: shm, unix, tcp, secure, quic or memory.

        The attribute `executor` of the result is "compiled" or "Python": what moves the data. `paths` has, by rank, the
        networks of a lane that goes over several of them (`covey.LanePath`); `streams` has the number of connections of
        each lane.
        """
        return self._engine.lane_kinds()

    def to_parent(self, rank: int) -> int:
        """Return the rank in the group that this one was split from, of a rank of this group."""
        index = self._issuer.check_rank(rank, "rank")
        return index if self._parent_ranks is None else self._parent_ranks[index]

    def to_local(self, rank: int) -> int | None:
        """Return the rank in this group, of a rank of the group that this one was split from; None if it is not here.

        The reverse of `to_parent`.
        """
        if self._parent_ranks is None:
            return self._issuer.check_rank(rank, "rank")
        wanted = whole_number("rank", rank)
        return self._parent_ranks.index(wanted) if wanted in self._parent_ranks else None

    def to_run(self, rank: int) -> int:
        """Return the rank in the first group of the generation, of a rank of this group."""
        index, generation = self._issuer.check_rank(rank, "rank"), self._engine.generation
        found = None if generation is None else generation.rank_of(self._engine.roster.seats[index])
        return index if found is None else found

    def metrics(self) -> GroupMetrics:
        """Return what this group has done on this rank so far: operations, traffic, messages, compression.

        `covey.metrics` has the same numbers for Prometheus, for all groups of the process together.
        """
        from covey.runtime.group.explanation import group_metrics  # most programs do not ask

        return group_metrics(self._engine.counters, self._engine.roster, self._issuer.savings.total)

    def explain(
        self,
        nbytes: int,
        compress: str | Codec | None = None,
        *,
        operation: Literal["all_reduce", "broadcast", "reduce"] = "all_reduce",
        root: int = 0,
    ) -> PlanReport:
        """Return the plan with which an all_reduce of so many bytes is made now, why, and what the others would take.

        Between three or more ranks on several machines, large sums use the plan that fits the links, which the ranks
        measure together at the third large sum; `print` shows all of it. Nothing is sent. With `compress`, a codec like
        "int8", it is the plan of a compressed sum of so many bytes of float32. Once the links are measured, what every
        `algorithm=` would take is among the alternatives, also for a broadcast or reduce with `operation`.

        Raises:
            ConfigError: `compress` is not a codec whose transfers have a fixed size, or there is no such operation or
                root.
        """
        from covey.runtime.group.explanation import explain, explain_coded, explain_rooted  # most programs do not ask

        if operation != "all_reduce":
            if operation not in ("broadcast", "reduce") or compress is not None:
                raise ConfigError(
                    f"operation={operation!r} must be all_reduce, or broadcast or reduce without compress"
                )
            return explain_rooted(self._engine, nbytes, operation, self._issuer.check_rank(root, "root"))
        return explain(self._engine, nbytes) if compress is None else explain_coded(self._engine, nbytes, compress)

    @overload
    def call(
        self, rank: int, function: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **named: P.kwargs
    ) -> T: ...

    @overload
    def call(self, rank: int, function: Callable[P, T], /, *args: P.args, **named: P.kwargs) -> T: ...

    @overload
    def call(  # type: ignore[overload-cannot-match]
        self,
        rank: int,
        function: Callable[..., Coroutine[Any, Any, T]],
        /,
        *args: Any,
        timeout: float | None,
        **named: Any,
    ) -> T: ...

    @overload
    def call(self, rank: int, function: Callable[..., T], /, *args: Any, timeout: float | None, **named: Any) -> T: ...  # type: ignore[overload-cannot-match]

    @overload
    def call(self, rank: int, function: str, /, *args: Any, timeout: float | None = ..., **named: Any) -> Any: ...

    def call(  # type: ignore[misc]
        self, rank: int, function: str | Callable[..., Any], /, *args: Any, timeout: float | None = None, **named: Any
    ) -> Any:
        """Call a function that another rank has registered, and return its result; see `Node.call`."""
        return self.node().call(rank, function, *args, timeout=timeout, **named)

    def who_is_late(self, *, timeout: float = 2.0) -> list[Late]:
        """Return the ranks that are operations behind the others, or do not answer within `timeout` seconds.

        Only the caller asks; the other ranks answer in the background, and no operation is disturbed. On any thread:
        while one thread waits in an operation, another can find out for which rank. An empty list means that all
        ranks are in the same operation.
        """
        return self._engine.stalls.who_is_late(check_timeout(timeout))

    def on_change(self, listener: Callable[[Event], None]) -> None:
        """Call `listener(event)` on a separate thread whenever members are lost or join."""
        if self._engine.roster.node is not None:
            from covey.runtime.events import FOUNDED, VIEWS  # loaded with the node

            self._engine.roster.node.events.listen(listener, (*VIEWS, *FOUNDED))

    def events(self) -> list[Event]:
        """Return the events of the run so far: losses and recoveries with their timelines, and generations."""
        return [] if self._engine.roster.node is None else self._engine.roster.node.events.all()


class Reports:
    """Reports of a program, as `Group` offers them."""

    def __init__(self, log: Callable[[], ReportLog]) -> None:
        """`log` returns what keeps the reports of this process."""
        self._find_log = log

    @functools.cached_property
    def log(self) -> ReportLog:
        """What keeps the reports of this process, found when the first comes."""
        return self._find_log()

    def report(self, /, *, step: int | None = None, **values: Any) -> None:
        """Tell `covey ui`, `covey top`, `/metrics` and files how far the program is: `report(step=n, loss=loss)`.

        It is no collective: any rank may call it or not, on any thread, and it raises nothing for a lost rank. It takes
        less than a microsecond. A value is a number; a tensor or an array of one element is read with `float()`, which
        waits for a GPU; a function without arguments is called once a second on another thread, and its result is the
        value. Values that are not finite are kept, and the event `report` tells of them.

        `step` ends the step before: views show how much of it was spent in operations. Values without a step belong to
        the last one. A step that is reported again replaces the values of that step, and a lower one those of all that
        follow it. `samples` is how many samples a rank has processed in the step; views make a rate of it.

        A process keeps 4,096 rows: of a longer series fewer of its beginning.

        Raises:
            ValueError: a name is empty, longer than 40 characters or not printable ASCII, or there are more than 32.
            TypeError: a value is no number and no function, or `step` is no whole number.
        """
        self.log.add(step, values)
