"""The engine of one group on this rank: it runs the group's collectives in the order in which they are issued.

A blocking operation runs on the calling thread; operations issued with `async_op=True` run on one worker thread. The
control loop reports what other ranks say (`ControlReports`). It records faults and wakes the running thread, and never
touches a lane in use, so that each lane is used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, NoReturn

from covey.base.config import check_timeout
from covey.base.errors import BusyError, ClosedError
from covey.base.numbers import BULK, NO_RANK, OPERATIONS, Rank, Seat
from covey.net.host.descriptors import explained
from covey.plan.choose import PlanSizes
from covey.runtime.bell import Bell
from covey.runtime.collectives import closure
from covey.runtime.collectives.attempt import Attempt, DisagreedError, LinkMemory, Shortcuts
from covey.runtime.collectives.call_log import CallLog
from covey.runtime.collectives.cancelling import Cancellation, cancellable
from covey.runtime.collectives.evidence import CallEvidence
from covey.runtime.collectives.failure import Failure
from covey.runtime.collectives.operation import NO_INFO, Backlog, CurrentAttempt, CurrentOperation
from covey.runtime.collectives.reports import ControlReports
from covey.runtime.collectives.roster import CollectiveLanes, GroupFacts, GroupNode, GroupRoster, LaneKinds
from covey.runtime.collectives.stalls import StallDiagnosis
from covey.runtime.collectives.suspicion import Suspicion
from covey.runtime.collectives.trouble import OperationTrouble
from covey.runtime.counters import GroupCounters, process
from covey.runtime.fault import Fault
from covey.runtime.messages.routing import MessageRouting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.base.config import GroupConfig
    from covey.runtime.collectives.atomic import AtomicOperations
    from covey.runtime.collectives.call_log import Call
    from covey.runtime.collectives.native_executor import Shortcut
    from covey.runtime.lanes.lanes import Lanes
    from covey.runtime.views.generation import Generation
    from covey.runtime.work import Work

CARRIERS: Final = frozenset(OPERATIONS.index(name) for name in ("all_reduce", "barrier"))
"""Operations in which every rank hears from every other, so that all know of a waiting change after the same one."""


class Engine:
    """Wires the parts of a group on this rank, and runs its operations. A run of one has no node and sends nothing.

    Each part gets what it uses, from the ones below it: facts, ranks, lanes, the current operation and attempt; what
    this rank can tell (`evidence`); how the group ends (`failure`); which rank is late (`stalls`); what a loss hides
    (`suspicion`); what to do about trouble; attempts; and in a group that survives losses, `atomic`. None refers to the
    engine, and those below refer to those above only weakly: a group that is dropped is freed without a collection.
    """

    def __init__(
        self,
        node: GroupNode | None,
        group_id: int,
        members: tuple[Seat, ...],
        name: str,
        config: GroupConfig,
        *,
        generation: Generation | None = None,
        priority: int = BULK,
    ) -> None:
        """`members` are seats of the run, in the order of the group's ranks."""
        survives = generation is not None and config.on_loss == "continue"
        self.roster = roster = GroupRoster(node, members)
        self.facts = facts = _facts(
            node, group_id, name, config, generation, roster, survives=survives, priority=priority
        )
        self.node, self.generation = node, generation
        """The node of this process; None in a run of one, and in a process that was forked from a member."""
        self.id, self.name, self.config = group_id, name, config
        self.members, self.size, self.rank, self.ranks = members, roster.size, roster.rank, roster.ranks
        self.sizes, self.may_spin, self.is_native, self.survives = (
            facts.sizes,
            facts.may_spin,
            facts.is_native,
            survives,
        )
        self.counters = counters = GroupCounters(name, self.rank, members, is_native=facts.is_native)
        self._recorder = counters.recorder
        process.register(counters)
        lanes, events = (None, None) if node is None else (node.lanes, node.events)
        self._lanes = CollectiveLanes(lanes, members, facts, counters, events)
        self.operation = operation = CurrentOperation(name)
        self._call_log = call_log = CallLog()
        self._current = current = CurrentAttempt(roster, survives=survives)
        self.shortcuts = Shortcuts()
        self.bell = bell = Bell()
        self.routing: MessageRouting = MessageRouting(self, bell, counters.messages)
        self._evidence = evidence = CallEvidence(group_id, call_log, roster, self._lanes, current)
        self.failure = failure = Failure(
            facts, roster, self._lanes, operation, current, call_log, evidence, self.routing, bell, counters
        )
        self.stalls = stalls = StallDiagnosis(facts, roster, operation, current, call_log, evidence, failure)
        self.suspicion = suspicion = Suspicion(
            roster, operation, current, evidence, failure, stalls, bell, survives=survives
        )
        self._farewell = closure.Farewell(roster, evidence, failure, stalls, bell)
        trouble = OperationTrouble(facts, roster, operation, failure, stalls, suspicion, bell)
        make_attempt = functools.partial(
            Attempt, facts, roster, self._lanes, operation, call_log, trouble, counters, LinkMemory()
        )
        self._is_pending, self._everyone = False, tuple(self.ranks)
        # Reentrant: a thread that Ctrl-C interrupts right after it acquired the lock must be able to close the group.
        self._issuing, self._is_issuing = threading.RLock(), False
        self._backlog = Backlog(name)
        self._cancellable = 0
        """In how many `cancellable` blocks the program is."""
        self._closure = closure.Closure(failure, self.routing, self._backlog)
        self._dropped = weakref.finalize(
            self,
            closure.dropped,
            lanes,
            generation,
            group_id,
            members,
            self._backlog.queue,
            counters,
        )
        self.atomic: AtomicOperations | None = None
        """None in a group that ends with its first loss."""
        self._has_news = has_news = node is not None and node.is_elastic
        """Whether the program goes from generation to generation: then operations tell of waiting changes."""
        if generation is not None and survives:
            from covey.runtime.collectives.atomic import AtomicOperations  # other groups do not need it

            self.atomic = AtomicOperations(
                facts, roster, self._lanes, failure, trouble, self.shortcuts, current, generation, make_attempt,
                has_news=has_news,
            )  # fmt: skip
            generation.enroll(self.atomic)
            if generation.fault is not None:
                failure.end_here(generation.fault)
        else:
            self._attempt = make_attempt(0, self._everyone, bell, None)
            current.follow(weakref.ref(self._attempt))
            if node is not None and not has_news:
                self.shortcuts.any = self.shortcuts.all_reduce = self._attempt.shortcut()
        self.reports = ControlReports(
            weakref.ref(self), generation, facts, roster, operation, failure, stalls, suspicion, self.routing, counters
        )
        if node is not None:
            node.groups.register(group_id, self.reports)
            for peer in roster.peers():  # peers that were lost before the group was registered
                if peer.is_gone:
                    self.reports.peer_gone(peer.seat, left=peer.has_left)

    def subgroup(
        self,
        key: str,
        members: tuple[Seat, ...],
        name: str,
        config: GroupConfig | None = None,
        *,
        priority: int | None = None,
    ) -> Engine:
        """Return the engine of a group of some members; each of them makes it with the same `key`. Sends nothing.

        Its priority is that of this group, unless another one is given.
        """
        import hashlib  # slow to load: it loads OpenSSL

        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        number, used = int.from_bytes(digest, "little"), self.config if config is None else config
        priority = self.facts.priority if priority is None else priority
        return Engine(self.node, number, members, name, used, generation=self.generation, priority=priority)

    @property
    def lanes(self) -> Lanes | None:
        """The lanes of this process; None in a run of one, and in a forked child."""
        return None if self.node is None else self.node.lanes

    @property
    def attempt(self) -> Attempt:
        """The attempt in which operations run now."""
        return self._attempt if self.atomic is None else self.atomic.attempt

    @property
    def shortcut(self) -> Shortcut | None:
        """Runs repeated small calls; None if there is none, and in a group that survives losses."""
        return self.shortcuts.any

    @property
    def all_reduce_shortcut(self) -> Shortcut | None:
        """Runs repeated small sums. In a group that survives losses, each attempt has its own."""
        return self.shortcuts.all_reduce

    @property
    def contributors(self) -> tuple[Rank, ...]:
        """The ranks whose input is in the result of the last operation that returned."""
        return self._everyone if self.atomic is None else self.atomic.contributors

    @property
    def since(self) -> float:
        """When this process came into its run, in seconds since 1970."""
        return process.since if self.node is None else self.node.since

    @property
    def live(self) -> tuple[Rank, ...]:
        """The ranks that have not been lost."""
        return self._current.live

    @property
    def change_pending(self) -> bool:
        """Whether all ranks know of a waiting change, as of the last operation that carried the news."""
        return self._is_pending if self.atomic is None else self.atomic.is_pending

    @property
    def knows_change(self) -> bool:
        """Whether this rank knows of a waiting change."""
        return self.roster.knows_change

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
        return self.failure.is_over

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self.failure.is_closed

    @property
    def is_freed(self) -> bool:
        """Whether `close` has finished."""
        return self._closure.is_done

    @property
    def has_pending(self) -> bool:
        """Whether operations have not ended."""
        return self._is_issuing or self._backlog.unfinished > 0

    def lane_kinds(self) -> LaneKinds:
        """Return the kind of lane to each other rank: of the open lane, or of the one that would be opened."""
        attempt = self.attempt
        others, lanes = [rank for rank in attempt.ranks if rank != self.rank], attempt.lanes
        kinds = LaneKinds({rank: lanes.kind_of(rank) for rank in others})
        kinds.executor = "compiled" if self.is_native else "Python"
        kinds.paths = {rank: lanes.paths_of(rank) for rank in others}
        kinds.streams = {rank: lanes.streams_of(rank) for rank in others}
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
            if (shortcut := self.shortcuts.all_reduce) is not None:
                shortcut.runner.is_open = False
            if self.failure.fault is not None or self.failure.is_closed:
                self.suspicion.refuse(call)
            limit = self.config.timeout if timeout is None else check_timeout(timeout)
            cancel = None
            if self._cancellable:
                cancellation = Cancellation(call, self.rank, self.name)
                call, cancel = cancellable(call), cancellation.ask
                body, then = cancellation.voted(body), cancellation.concluded(then)
            if not async_op and not self._backlog.unfinished:
                return self.perform(call, body, then, limit, root)
            if not async_op and self._backlog.is_on_this_thread:
                raise BusyError(f"{call.text} would wait for operations that wait for this callback; use async_op=True")
            work: Work[Any] = self._backlog.add(self, call, body, then, limit, root, cancel=cancel)
            return work if async_op else work.take()
        finally:
            self._is_issuing = False
            self._issuing.release()
            if self.shortcuts.all_reduce is not None:
                self.open_shortcut()

    @contextlib.contextmanager
    def cancellable(self) -> Iterator[None]:
        """Let operations that are issued meanwhile be cancelled before they begin; see `cancelling`."""
        self._cancellable += 1
        self.attempt.close_shortcut()  # what takes it sends at once
        try:
            yield
        finally:
            self._cancellable -= 1
            self.open_shortcut()

    def refuse(self, call: Call) -> NoReturn:
        """Raise the error that keeps an operation from running: the group is closed or has ended."""
        self.suspicion.refuse(call)

    def carry_news(self) -> None:
        """Let every operation go the long way, which tells all ranks of waiting changes; before the first operation."""
        self._has_news = True
        if self.atomic is not None:
            self.atomic.drop_shortcut()
        else:
            self._attempt.close_shortcut()
            self.shortcuts.any = self.shortcuts.all_reduce = None

    def open_shortcut(self) -> None:
        """Let repeated small calls take the shortcut, unless another operation runs or the group is over."""
        failure, shortcut = self.failure, self.shortcuts.any
        if (
            self._is_issuing
            or self._cancellable
            or self._backlog.unfinished
            or failure.fault is not None
            or failure.is_closed
        ):
            return
        if self.atomic is not None:
            self.atomic.open_shortcut(self.operation.sequence)
        elif shortcut is not None:
            self._attempt.switch.open_shortcut(shortcut.runner)

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
        if self.facts.priority < BULK and self.node is not None:
            for seat in self.members:
                self.node.lanes.limit.note_urgent(seat)
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
                attempt.begin(knows_change=self._has_news and carries and self.roster.knows_change)
                result = body(attempt)
                self._is_pending |= carries and attempt.knows_change
                operation.returned = sequence
            has_failed = False
        except DisagreedError as disagreement:
            self.failure.disagreed(disagreement.error)
            raise disagreement.error from None
        except BaseException:
            try:
                with explained(f"{operation.describe()} cannot continue"):
                    raise
            except BaseException as error:
                self.failure.operation_raised(error)
                raise
        finally:
            operation.is_running = False
            attempt = self._attempt if self.atomic is None else self.atomic.attempt
            self._recorder.end(attempt.number, has_failed)
            if self.suspicion.fault is not None and self.suspicion.is_open:  # noted too late for this operation
                self.suspicion.settle()
        return result if then is None else then(result)

    # The end

    def confirm(self) -> None:
        """Compare the last calls with those of the other ranks, before the group is closed; see `Farewell`."""
        self._farewell.confirm(is_needed=not (self.survives or self.is_closed or self.has_pending))

    def close(self) -> None:
        """Free lanes, thread and descriptors. A second call waits for the first, unless the first waits for it."""
        self._closure.close(self._free)

    def _free(self) -> None:
        self.routing.close(time.monotonic() + closure.MESSAGES_FLUSH_SECONDS)
        if self.has_pending:
            text = f"group {self.name!r} was closed on rank {self.rank} with operations pending"
            fault = Fault("ClosedError", text, (self.rank,))
            if self.survives:
                self.failure.end_here(fault)
            else:
                self.failure.declare(fault)
        self._backlog.end(closure.OPERATION_END_SECONDS)
        if self._issuing.acquire(
            timeout=closure.OPERATION_END_SECONDS
        ):  # an operation on another thread ends before its lanes do
            self._issuing.release()
        if self.atomic is not None:
            self.atomic.close()
        self.attempt.close()
        self._dropped.detach()
        self.counters.is_over = True
        process.sweep()
        if self.node is not None:
            if not self.survives:
                self._evidence.part()
            sequence = self.operation.sequence
            if self.failure.fault is not None or sequence:
                closure.flush_control()
            self.node.lanes.forget(self.id, sequence)
        self.bell.close()

    def forked(self) -> None:
        """End the group in a forked child: locks of other threads are replaced, pending works raise ClosedError."""
        self._issuing, self._is_issuing = threading.RLock(), False
        if self.shortcuts.any is not None:
            self.attempt.close_shortcut()  # or the child would write into the parent's lanes
        self.bell.forked()
        if self.atomic is not None:
            self.atomic.forked()
        self._dropped.detach()
        self._closure.forked()
        text = f"group {self.name!r} belongs to the process that joined; this one was forked from it and cannot use it"
        self.failure.forked(text)
        self.node = self.roster.node = None
        self._lanes.forked()
        for work in self._backlog.forked() + self.routing.forked():
            if not work.done():
                work.forked(ClosedError(text))


def _facts(
    node: GroupNode | None,
    group_id: int,
    name: str,
    config: GroupConfig,
    generation: Generation | None,
    roster: GroupRoster,
    *,
    survives: bool,
    priority: int,
) -> GroupFacts:
    return GroupFacts(
        group_id,
        name,
        config,
        PlanSizes(
            config.exchange_bytes,
            config.doubling_bytes,
            config.tree_bytes,
            config.segment_bytes,
            config.cached_segment_bytes,
        ),
        generation=0 if generation is None else generation.number,
        survives=survives,
        is_sparse=generation is not None and generation.is_sparse,
        is_native=node is not None and node.lanes.factory.is_native,
        may_spin=roster.has_cores(1),
        has_idle_core=roster.has_cores(2),
        priority=priority,
    )
