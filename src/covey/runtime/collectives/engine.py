"""The engine of one group on this rank: it runs the group's collectives in the order in which they are issued.

A blocking operation runs on the calling thread; operations issued with `async_op=True` run on one worker thread. The
control loop reports what other ranks say (`ControlReports`). It records faults and wakes the running thread, and never
touches a lane in use, so that each lane is used by one thread at a time.
"""

from __future__ import annotations

import contextvars
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.config import check_timeout
from covey.base.errors import BusyError, ClosedError
from covey.base.numbers import NO_RANK, Seat
from covey.base.operations import OPERATIONS
from covey.net.host.descriptors import explained
from covey.plan.choose import PlanSizes
from covey.runtime.bell import Bell
from covey.runtime.collectives.attempt import Attempt, DisagreedError
from covey.runtime.collectives.backlog import Backlog
from covey.runtime.collectives.closing import Closing
from covey.runtime.collectives.evidence import Suspicion
from covey.runtime.collectives.failure import Failure
from covey.runtime.collectives.farewell import Farewell
from covey.runtime.collectives.lane_trouble import LaneTrouble
from covey.runtime.collectives.operation import NO_INFO, CurrentOperation
from covey.runtime.collectives.reports import ControlReports
from covey.runtime.collectives.roster import GroupRoster, LaneKinds
from covey.runtime.collectives.stalls import StallDiagnosis
from covey.runtime.counters import GroupCounters, process
from covey.runtime.messages.routing import MessageRouting

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.base.config import GroupConfig
    from covey.base.numbers import Rank
    from covey.runtime.collectives.atomic import AtomicOperations
    from covey.runtime.collectives.call_log import Call
    from covey.runtime.collectives.measuring import MeasuredLinks
    from covey.runtime.collectives.native_executor import Shortcut
    from covey.runtime.members.node import Node
    from covey.runtime.views.generation import Generation
    from covey.runtime.work import Work

CARRIERS: Final = frozenset(OPERATIONS.index(name) for name in ("all_reduce", "barrier"))
"""Operations in which every rank hears from every other, so that all know of a waiting change after the same one."""


class Engine:
    """The order and state of a group's operations on this rank. A run of one has no node and sends nothing.

    Its parts have one concern each and are used by one another: `roster`, `operation`, `stalls`, `suspicion`,
    `failure`, `lane_trouble`, `routing`, and `atomic` in a group that survives losses.
    """

    def __init__(
        self,
        node: Node | None,
        group_id: int,
        members: tuple[Seat, ...],
        name: str,
        config: GroupConfig,
        *,
        generation: Generation | None = None,
    ) -> None:
        """`members` are seats of the run, in the order of the group's ranks."""
        self.id = group_id
        self.name = name
        self.config = config
        self.generation = generation
        self.roster = roster = GroupRoster(node, members)
        self.members, self.size, self.rank, self.ranks = members, roster.size, roster.rank, roster.ranks
        self.contributors = tuple(self.ranks)
        """The ranks whose input is in the result of the last operation that returned."""
        self.sizes = PlanSizes(
            config.exchange_bytes,
            config.doubling_bytes,
            config.tree_bytes,
            config.segment_bytes,
            config.cached_segment_bytes,
        )
        self.measured: MeasuredLinks | None = None
        """What the ranks measured last of the links between them; see `planner`."""
        self.nothing = np.empty(0, np.uint8)
        self.quiet = contextvars.Context()
        """A context in which numpy does not warn about infinities and nans; cheaper to enter than np.errstate."""
        self.quiet.run(np.seterr, all="ignore")
        self.may_spin = roster.has_cores(1)
        self.has_idle_core = roster.has_cores(2)
        self.is_native = node is not None and node.lanes.factory.is_native
        """Whether the compiled executor runs the plans."""
        self.counters = GroupCounters(name, self.rank, members, is_native=self.is_native)
        self._recorder = self.counters.recorder
        process.register(self.counters)
        self.operation = CurrentOperation(self)
        self.failure = Failure(self)
        self.lane_trouble = LaneTrouble(self)
        self.stalls = StallDiagnosis(self)
        self._call_log = self.stalls.call_log
        self.suspicion = Suspicion(self)
        self._farewell = Farewell(self)
        self._is_pending = False
        # Reentrant: a thread that Ctrl-C interrupts right after it acquired the lock must be able to close the group.
        self._issuing, self._is_issuing = threading.RLock(), False
        self.is_closed = False
        """Whether `close` was called."""
        self._backlog = Backlog(name)
        self._descriptors: list[int] = []
        self.bell = Bell(self._descriptors)
        self.routing = MessageRouting(self, self.bell, self.counters.messages)
        self.shortcut: Shortcut | None = None
        """Runs repeated small calls; None if there is none, and in a group that survives losses."""
        self.all_reduce_shortcut: Shortcut | None = None
        """Runs repeated small sums. In a group that survives losses, each attempt has its own."""
        self.atomic: AtomicOperations | None = None
        """None in a group that ends with its first loss."""
        self._closing = Closing(self, self._backlog, self._descriptors)
        if generation is not None and config.on_loss == "continue":
            from covey.runtime.collectives.atomic import AtomicOperations  # other groups do not need it

            self.atomic = AtomicOperations(self, generation, self._descriptors)
            self.all_reduce_shortcut = self.atomic.shortcut()
            generation.enroll(self.atomic)
            if generation.fault is not None:
                self.failure.end_here(generation.fault)
        else:
            self._attempt = Attempt(self, 0, tuple(self.ranks), self.bell, None)
            if node is not None and not node.is_elastic:  # an elastic one has news to tell with every operation
                self.shortcut = self.all_reduce_shortcut = self._attempt.shortcut()
        self.reports = ControlReports(self)
        if node is not None:
            node.groups.register(group_id, self.reports)
            for peer in roster.peers():  # peers that were lost before the group was registered
                if peer.is_gone:
                    self.reports.peer_gone(peer.seat, left=peer.has_left)

    def subgroup(self, key: str, members: tuple[Seat, ...], name: str, config: GroupConfig | None = None) -> Engine:
        """Return the engine of a group of some members; each of them makes it with the same `key`. Sends nothing."""
        import hashlib  # slow to load: it loads OpenSSL

        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        number, used = int.from_bytes(digest, "little"), self.config if config is None else config
        return Engine(self.node, number, members, name, used, generation=self.generation)

    @property
    def node(self) -> Node | None:
        """The node of this process; None in a run of one, and in a process that was forked from a member."""
        return self.roster.node

    @property
    def attempt(self) -> Attempt:
        """The attempt in which operations run now."""
        return self._attempt if self.atomic is None else self.atomic.attempt

    @property
    def survives(self) -> bool:
        """Whether operations continue among the remaining ranks after a loss."""
        return self.atomic is not None

    @property
    def is_sparse(self) -> bool:
        """Whether links with most ranks may rest."""
        return self.generation is not None and self.generation.is_sparse

    @property
    def live(self) -> tuple[Rank, ...]:
        """The ranks that have not been lost."""
        return self.roster.present() if self.atomic is None else self.atomic.attempt.ranks

    @property
    def change_pending(self) -> bool:
        """Whether all ranks know of a waiting change, as of the last operation that carried the news."""
        return self._is_pending if self.atomic is None else self.atomic.is_pending

    @property
    def knows_change(self) -> bool:
        """Whether this rank knows of a waiting change."""
        node = self.roster.node
        return node is not None and node.knows_change

    @property
    def last_returned(self) -> int:
        """The number of the last operation that returned here."""
        return self.operation.returned if self.atomic is None else self.atomic.returned

    @property
    def issued(self) -> int:
        """The number of operations that the program has issued, those included that have not begun."""
        return max(self.operation.sequence, self._backlog.issued)

    @property
    def is_over(self) -> bool:
        """Whether the group was closed or has failed."""
        return self.is_closed or self.failure.fault is not None

    @property
    def is_freed(self) -> bool:
        """Whether `close` has finished."""
        return self._closing.is_done

    @property
    def has_pending(self) -> bool:
        """Whether operations have not ended."""
        return self._is_issuing or self._backlog.unfinished > 0

    def lane_kinds(self) -> LaneKinds:
        """Return the kind of lane to each other rank: of the open lane, or of the one that would be opened."""
        opened = self.attempt.open_kinds()
        others = (rank for rank in self.attempt.ranks if rank != self.rank)
        kinds = LaneKinds({rank: opened.get(rank) or self.roster.lane_kind(rank) for rank in others})
        kinds.executor = "compiled" if self.is_native else "Python"
        kinds.paths = {rank: self.attempt.paths_of(rank) for rank in self.attempt.ranks if rank in kinds}
        kinds.streams = {rank: self.attempt.streams_of(rank) for rank in self.attempt.ranks if rank in kinds}
        return kinds

    # Operations

    def run(
        self,
        call: Call,
        body: Callable[[Attempt], Any],
        *,
        timeout: float | None,
        async_op: bool,
        then: Callable[[Any], Any] | None = None,
        root: Rank = NO_RANK,
    ) -> Any:
        """Perform `body` as the next operation; with `async_op`, queue it and return a Work.

        `body` runs again if a rank is lost during the operation; if rank `root` is lost, the operation raises
        PeerLostError instead. `then` turns its result into the caller's, once; if it raises, only this call fails.
        """
        if self._is_issuing or not self._issuing.acquire(blocking=False):
            raise BusyError(
                f"another thread is in a collective of group {self.name!r}; {call.text} must wait for it, or use a "
                "group of its own: group.split(0)"
            )
        try:
            self._is_issuing = True
            if self.all_reduce_shortcut is not None:
                self.attempt.close_shortcut()
            if self.failure.fault is not None or self.is_closed:
                self.failure.refuse(call)
            limit = self.config.timeout if timeout is None else check_timeout(timeout)
            if not async_op and not self._backlog.unfinished:
                return self.perform(call, body, then, limit, root)
            if not async_op and self._backlog.is_on_this_thread:
                raise BusyError(f"{call.text} would wait for operations that wait for this callback; use async_op=True")
            work: Work[Any] = self._backlog.add(self, call, body, then, limit, root)
            return work if async_op else work.take()
        finally:
            self._is_issuing = False
            self._issuing.release()
            if self.all_reduce_shortcut is not None:
                self.open_shortcut()

    def carry_news(self) -> None:
        """Let every operation go the long way, which tells all ranks of waiting changes; before the first operation."""
        if self.atomic is not None:
            self.atomic.drop_shortcut()
        else:
            self._attempt.close_shortcut()
            self.shortcut = self.all_reduce_shortcut = None

    def open_shortcut(self) -> None:
        """Let repeated small calls take the shortcut, unless another operation runs or the group is over."""
        if self._is_issuing or self._backlog.unfinished or self.is_over:
            return
        if self.atomic is not None:
            self.atomic.open_shortcut(self.operation.sequence)
        elif self.shortcut is not None:
            self._attempt.open_shortcut()

    def perform(
        self,
        call: Call,
        body: Callable[[Attempt], Any],
        then: Callable[[Any], Any] | None,
        limit: float,
        root: Rank,
    ) -> Any:
        """Run an operation now, on this thread; see `run`. One thread at a time may call this."""
        operation = self.operation
        operation.sequence = sequence = operation.sequence + 1
        self._call_log.enter(sequence, call)
        self._recorder.begin(sequence, call.operation)
        operation.call = call
        operation.timeout = limit
        operation.deadline = time.monotonic() + limit
        operation.is_announced = False
        operation.warn_at = 0.0
        operation.info = NO_INFO
        operation.is_running = has_failed = True
        try:
            if self.atomic is not None:
                result = self.atomic.perform(body, root)
            else:
                attempt, carries = self._attempt, call.operation in CARRIERS
                attempt.begin(knows_change=carries and self.knows_change)
                result = body(attempt)
                self._is_pending |= carries and attempt.knows_change
                operation.returned = sequence
            has_failed = False
        except DisagreedError as disagreement:
            self.failure.disagreed(disagreement.error)
            raise disagreement.error from None
        except BaseException:
            try:
                with explained(f"{operation.describe()} cannot go on"):
                    raise
            except BaseException as error:
                self.failure.operation_raised(error)
                raise
        finally:
            operation.is_running = False
            self._recorder.end(self.attempt.number, has_failed)
            if self.suspicion.is_open:  # noted too late for this operation
                self.suspicion.settle()
        return result if then is None else then(result)

    def returned(self, contributors: tuple[Rank, ...]) -> None:
        """Note the ranks whose input is in the result of an all-or-nothing operation, which returns now."""
        self.contributors = contributors
        node = self.roster.node
        assert node is not None
        if node.events.is_recovering:
            node.events.phase("redo")

    def lane_opened(self, rank: Rank, kind: str) -> None:
        """Count a lane of this group that was opened, and note it in the timeline of a recovery."""
        self.counters.lane_opened(rank, kind)
        if self.node is not None and self.node.events.is_recovering:
            self.node.events.phase("reconnect")

    # The end

    def confirm(self) -> None:
        """Compare the last calls with those of the other ranks, before the group is closed; see `Farewell`."""
        self._farewell.confirm()

    def close(self) -> None:
        """Free lanes, thread and descriptors. A second call waits for the first, unless the first waits for it."""
        self._closing.close()

    def await_idle(self, seconds: float) -> None:
        """Wait until no thread is in `run`, for so many seconds at most."""
        if self._issuing.acquire(timeout=seconds):
            self._issuing.release()

    def forked(self) -> None:
        """End the group in a forked child: locks of other threads are replaced, pending works raise ClosedError."""
        self._issuing, self._is_issuing = threading.RLock(), False
        if self.shortcut is not None:
            self.attempt.close_shortcut()  # or the child would write into the parent's lanes
        self.bell.forked()
        if self.atomic is not None:
            self.atomic.forked()
        self._closing.forked()
        text = f"group {self.name!r} belongs to the process that joined; this one was forked from it and cannot use it"
        self.failure.forked(text)
        self.roster.node = None
        for work in self._backlog.forked() + self.routing.forked():
            if not work.done():
                work.forked(ClosedError(text))
