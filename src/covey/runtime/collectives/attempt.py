"""One attempt: the ranks that run operations together, and the lanes between them.

Plans need positions without gaps, so the ranks of an attempt are numbered anew: `slot` is a position in the attempt,
`rank` a position in the group. The thread that runs the operation uses the attempt; other threads only stop it.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import time
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeVar

import numpy as np

from covey.base.arithmetic import reduction
from covey.base.numbers import Slot
from covey.net.host import tcp
from covey.plan import choose, doubling
from covey.runtime.collectives.attempt_lanes import AttemptLanes, LaneSwitch
from covey.runtime.collectives.executor import COMMIT_PHASE, execute
from covey.wire.header import CHANGE_PENDING, FLAGS_AT, HEADER_PREFIX, MAGIC

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from covey.base.arithmetic import Reduction
    from covey.base.errors import ConnectError, MismatchError
    from covey.base.numbers import Rank
    from covey.net.lanes.lane import Lane, LaneClosedError
    from covey.plan.choose import PlanSizes
    from covey.plan.fit import Fitted
    from covey.plan.moves import Plan
    from covey.plan.network import Network
    from covey.runtime.bell import Bell
    from covey.runtime.collectives.call_log import Call, CallLog
    from covey.runtime.collectives.executor import Coder, UndoBuffer
    from covey.runtime.collectives.link_probes import MeasuredLinks
    from covey.runtime.collectives.native_executor import NativeExecutor, Shortcut
    from covey.runtime.collectives.operation import CurrentOperation
    from covey.runtime.collectives.roster import CollectiveLanes, GroupFacts, GroupRoster
    from covey.runtime.collectives.size_class import SizeClass, Sums
    from covey.runtime.collectives.trouble import OperationTrouble
    from covey.runtime.counters import GroupCounters

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[Any]]

CACHED_PREFIXES: Final = 4096
NOTHING: Final = np.empty(0, np.uint8)


class HandedOver(enum.IntEnum):
    """What a shortcut has begun of the current operation."""

    NOTHING = 0
    OPERATION = 1
    BARRIER = 2


class HaltedError(Exception):
    """The attempt was stopped because a view is being decided. Never leaves covey."""


class DisagreedError(Exception):
    """Every rank found by itself that the ranks passed different arguments. Never leaves covey."""

    def __init__(self, error: MismatchError) -> None:
        super().__init__(str(error))
        self.error = error


class AttemptPlanner(Protocol):
    """What fits the plans of large sums of an attempt to its links (`planner.Planner`)."""

    hosts: tuple[int, ...]
    network: Network | None
    classes: dict[Hashable, SizeClass]
    is_earlier: bool

    def times(self) -> tuple[tuple[float, ...], ...]: ...

    def fits_medium(self, nbytes: int, sizes: PlanSizes) -> bool: ...

    def reduce_plain(
        self, attempt: Attempt, count: int, itemsize: int, plain: Plan, perform: Callable[[Plan], None]
    ) -> None: ...

    def reduce(self, attempt: Attempt, sums: Sums, perform: Callable[[Fitted | None], None]) -> None: ...


class Shortcuts:
    """What runs repeated small calls of a group with one call of the extension each, if anything does."""

    def __init__(self) -> None:
        self.any: Shortcut | None = None
        """For all operations; None in a group that survives losses."""
        self.all_reduce: Shortcut | None = None
        """For sums. In a group that survives losses, each attempt has its own."""


class LinkMemory:
    """What the ranks of a group have measured of the links between them, from attempt to attempt; see `planner`."""

    measured: MeasuredLinks | None = None


class Attempt:
    """The ranks of one attempt and their lanes."""

    def __init__(
        self,
        facts: GroupFacts,
        roster: GroupRoster,
        lanes: CollectiveLanes,
        operation: CurrentOperation,
        call_log: CallLog,
        trouble: OperationTrouble,
        counters: GroupCounters,
        links: LinkMemory,
        number: int,
        ranks: tuple[Rank, ...],
        bell: Bell,
        undo: UndoBuffer | None,
    ) -> None:
        """`ranks` are in the order of the group; `bell` wakes the running thread; `undo` saves what is overwritten."""
        self.facts, self.roster, self.operation, self.links = facts, roster, operation, links
        self._call_log, self._trouble, self._group_lanes = call_log, trouble, lanes
        self.number, self.ranks = number, ranks
        self._slots = {rank: Slot(slot) for slot, rank in enumerate(ranks)}
        self.slots = tuple(self._slots.values())
        self.slot: Slot = self._slots[roster.rank]
        """The slot of this process in the attempt."""
        self.size: int = len(ranks)
        self.prepared: dict[Any, Any] = {}
        """Plans and reductions that repeated calls share."""
        self.undo: Any = undo
        """An `UndoBuffer`, or that of the compiled executor; None in a group that ends with its first loss."""
        self.recorder: Any = counters.recorder
        self.wake_fd = -1
        self.has_idle_core, self.may_spin, self.sizes = facts.has_idle_core, facts.may_spin, facts.sizes
        self.deadline = 0.0
        """When the current operation must have ended."""
        self.knows_change = self.is_stopped = False
        """Whether headers carry CHANGE_PENDING, and whether `check` raises."""
        self._native: NativeExecutor | None = None
        if facts.is_native:
            from covey.runtime.collectives.native_executor import NativeExecutor

            self._native = NativeExecutor(counters.recorder, ranks)
            self._execute: Any = self._native.execute
        else:
            quiet = contextvars.Context()  # numpy warns of no infinity and no nan in it; cheaper than np.errstate
            quiet.run(np.seterr, all="ignore")
            run: Callable[..., None] = quiet.run
            self._execute = functools.partial(run, execute)
        self.planner: AttemptPlanner | None = None
        """None before the first large sum, and where plans are not fitted; see `planner.planner_of`."""
        self.planning_seconds = 0.0
        """What the running thread has spent on plans and links beside sums, in all: not what a sum takes."""
        self.lanes = AttemptLanes(number, ranks, facts, roster, lanes, trouble, bell)
        self.switch = LaneSwitch()
        """The lanes that are to be replaced by others."""
        self._barrier = doubling.dissemination(self.slot, self.size)
        self._prefixes: dict[tuple[int, int], bytes] = {}
        self._phase = 0
        self._begun = HandedOver.NOTHING

    def begin(self, *, knows_change: bool, begun: HandedOver = HandedOver.NOTHING) -> None:
        """Start the current operation of the group, for the first time or again; a shortcut may have `begun` it."""
        self._phase, self.knows_change, self._begun = 0, knows_change, begun
        if self.switch.pending:
            self.switch.begin(self)

    def execute(
        self,
        plan: Plan,
        buffers: Sequence[np.ndarray[Any, Any]],
        reduction: Reduction | None = None,
        *,
        keeps: bool = False,
        coder: Coder | None = None,
    ) -> None:
        """Run one plan of the current operation; `keeps` saves the buffers first, which are the caller's arrays."""
        phase = self._phase
        self._phase = phase + 1
        undo = self.undo if keeps else None
        operation = self.operation
        prefix = self._prefixes.get((operation.call.fingerprint, phase)) or self.prefix(operation.call, phase)
        self.deadline = operation.deadline
        self._execute(plan, buffers, reduction, self.size, prefix, operation.sequence, self, undo, coder)

    def keep(self, target: Array, whole: Array | None = None) -> None:
        """Save what the current operation is about to overwrite, so that another attempt starts with it.

        `whole` is all that it may overwrite, if that is more.
        """
        if self.undo is not None:
            if self._native is not None:
                self.undo.make_room((target if whole is None else whole,))
            self.undo.save(target)

    def all_reduce(self, x: np.ndarray[Any, Any], op: str, algorithm: str | None = None) -> Plan:
        """Combine `x` of all ranks in place, as a step of the current operation; return the plan that did it."""
        plan = choose.all_reduce(self.slot, self.size, x.size, x.itemsize, self.lane_family, algorithm, self.sizes)
        self.execute(plan, (x,), reduction(op, x.dtype))
        return plan

    def synchronize(self) -> None:
        """Return once all ranks of the attempt have begun this step of the current operation."""
        self.execute(self._barrier, (NOTHING,))

    def commit(self) -> None:
        """Return once all ranks of the attempt have called this."""
        operation = self.operation
        prefix = self._prefixes.get((operation.call.fingerprint, COMMIT_PHASE)) or self.prefix(
            operation.call, COMMIT_PHASE
        )
        self.deadline = operation.deadline
        if self._begun is HandedOver.BARRIER:
            assert self._native is not None
            self._native.resume(self)
            return
        self._execute(self._barrier, (NOTHING,), None, self.size, prefix, operation.sequence, self)

    def prefix(self, call: Call, phase: int) -> bytes:
        """Return the first bytes of the headers of an operation, and cache them."""
        if len(self._prefixes) > CACHED_PREFIXES:
            self._prefixes.clear()
        fields = (call.operation, call.dtype, phase, self.number, 0, self.facts.id, call.fingerprint)
        prefix = self._prefixes[call.fingerprint, phase] = HEADER_PREFIX.pack(MAGIC, *fields)
        return prefix

    # Repeated small calls

    def shortcut(self, atomic: tuple[Any, ...] | None = None) -> Shortcut | None:
        """Return the shortcut of the compiled executor, if that is used; `atomic` has the state of all or nothing."""
        if self._native is None:
            return None
        if atomic is not None:
            assert self.undo is not None
            atomic = (*atomic, self._native.prepared_plan(self._barrier), self.undo.native)
        return self._native.make_shortcut(self.operation, self._call_log, self.number, atomic, may_spin=self.may_spin)

    def open_shortcut(self) -> None:
        """Let calls take the shortcut, if there is one and no lane is to be replaced."""
        if self._native is not None:
            self.switch.open_shortcut(self._native.runner)

    def close_shortcut(self) -> None:
        """Let all calls go the long way. On any thread."""
        if self._native is not None:
            self._native.runner.is_open = False

    def resume_begun(self) -> bool:
        """Go on with the operation, if a shortcut has begun it in this attempt; return whether its result is here."""
        if self._begun is HandedOver.OPERATION:
            self._begun = HandedOver.NOTHING
            self.resume()
            return True
        return self._begun is HandedOver.BARRIER

    def read_headers(self) -> dict[Rank, bytes]:
        """Return the header that a shortcut has read from a lane, if it is not the expected one, by its sender."""
        found = None if self._native is None else self._native.wrong_header()
        return {} if found is None else {self.ranks[found[0]]: found[1]}

    def drop_begun(self) -> None:
        """Give up an operation that a shortcut has begun."""
        if self._native is not None:
            self._native.finish()

    def resume(self) -> None:
        """Go on with an operation that a shortcut has begun."""
        assert self._native is not None
        self._phase += 1
        self.deadline = self.operation.deadline
        self._native.resume(self)

    # Ranks and slots

    def slot_of(self, rank: Rank) -> Slot:
        """Return the slot of a rank that is in the attempt."""
        return self._slots[rank]

    def chosen(self, items: Sequence[T]) -> list[T]:
        """Return the items of the ranks in this attempt, from a list by rank."""
        return list(items) if self.size == self.roster.size else [items[rank] for rank in self.ranks]

    def by_rank(self, items: Sequence[T]) -> list[T | None]:
        """Return a list by rank from a list by slot, with None for lost ranks."""
        if self.size == self.roster.size:
            return list(items)
        items_by_rank = dict(zip(self.ranks, items, strict=True))
        return [items_by_rank.get(rank) for rank in self.roster.ranks]

    @functools.cached_property
    def lane_family(self) -> str:
        """ "ring" if all ranks of the attempt are on one host and share memory, else "stream". Equal on all ranks."""
        # All of them are asked: a kind that some pair cannot have is an error here, before a lane is dialled.
        share = [self._group_lanes.shares_memory(rank) for rank in self.ranks if rank != self.roster.rank]
        return "ring" if all(share) else "stream"

    @functools.cached_property
    def fits_plans(self) -> bool:
        """Whether the plans of large sums are fitted to the links. Equal on all ranks."""
        config, roster = self.facts.config, self.roster
        if config.plan == "plain" or self.size < 3:
            return False
        several = len({roster.host(rank) for rank in self.ranks}) > 1
        return config.plan == "always" or (several and self.lane_family == "stream")

    # What the executor calls (`executor.ExecutionHost`): `peer` is a slot, taken from a move of a plan

    def stop(self) -> None:
        """Let `check` raise from now on. On any thread; the caller rings the bell."""
        self.is_stopped = True
        if self._native is not None:
            self._native.stop()

    def check(self) -> None:
        self._trouble.check()
        if self.is_stopped:
            raise HaltedError

    def lane(self, peer: int) -> Lane:
        lane = self.lanes.by_slot[peer]
        return lane if lane is not None else self.lanes.open(peer, self)

    def replace_lane(self, slot: Slot, lane: Lane) -> None:
        """Use another lane to a slot from now on. The node ends the one that was used so far."""
        self.lanes.open_bell(self)
        self.lanes.use(slot, lane)
        if self._native is not None:
            self._native.set_lane(slot, lane, self)
        self._group_lanes.switched(self.ranks[slot], self.number)

    def stalled(self, since: float, waiting_for: tuple[int, ...]) -> float:
        now = time.monotonic()
        self.lanes.watch(self)
        again_at = self._trouble.stalled(self, since, tuple(self.ranks[slot] for slot in waiting_for))
        return again_at if self.lane_family == "ring" else min(again_at, now + tcp.PATH_CHECK_SECONDS)

    def lane_closed(self, peer: int, error: LaneClosedError | ConnectError) -> None:
        self._trouble.lane_closed(self, self.ranks[peer], error)

    def wrong_header(self, peer: int, expected: bytes, header: bytes) -> None:
        if header[FLAGS_AT] == CHANGE_PENDING:
            plain = header[:FLAGS_AT] + b"\0" + header[FLAGS_AT + 1 :]
            if plain == expected:
                self.knows_change = True
                return
        self._trouble.wrong_header(self, self.ranks[peer], expected, header)

    def reject(self, slot: Slot, what: str) -> NoReturn:
        """End the group because a rank sent `what`, which breaks the protocol; raise RemoteProtocolError."""
        self._trouble.reject(self, "RemoteProtocolError", self.ranks[slot], what)

    def disagree_with(self, slot: Slot, what: str) -> NoReturn:
        """End the group because a rank sent `what`, which this rank cannot accept; raise MismatchError."""
        self._trouble.reject(self, "MismatchError", self.ranks[slot], what)

    def disagree(self, error: MismatchError) -> NoReturn:
        """End the operation and the group with an error that every rank finds by itself."""
        raise DisagreedError(error)

    def close(self) -> None:
        """Forget the lanes. Their owner closes them."""
        self.lanes.close()
        if self._native is not None:
            self._native.forget_lanes()
