"""One attempt: the ranks that run operations together, and the lanes between them.

Plans need positions without gaps, so the ranks of an attempt are numbered anew: `slot` is a position in the attempt,
`rank` a position in the group. The thread that runs the operation uses the attempt; other threads only stop it.
"""

from __future__ import annotations

import enum
import functools
import time
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from covey.base.arithmetic import reduction
from covey.base.errors import ClosedError, ConnectError, DeadlineError
from covey.base.numbers import Slot
from covey.base.pace import Growing
from covey.net.host import tcp
from covey.net.host.descriptors import FREE_DESCRIPTOR_SECONDS, ScarceError, explain, is_exhausted
from covey.net.lanes.lane import LaneClosedError
from covey.net.lanes.stream import SocketLane, is_resumable
from covey.plan import choose, doubling
from covey.runtime import loop as control
from covey.runtime.collectives.executor import execute
from covey.runtime.collectives.lane_switch import LaneSwitch
from covey.runtime.collectives.part import EnginePart
from covey.wire.header import CHANGE_PENDING, FLAGS_AT, HEADER_PREFIX, MAGIC

if TYPE_CHECKING:
    import select
    from collections.abc import Callable, Sequence

    import numpy as np

    from covey.base.arithmetic import Reduction
    from covey.base.errors import MismatchError
    from covey.base.numbers import Rank
    from covey.net.lanes.lane import Lane, LanePath
    from covey.plan.moves import Plan
    from covey.runtime.bell import Bell
    from covey.runtime.collectives.call_log import Call
    from covey.runtime.collectives.engine import Engine
    from covey.runtime.collectives.executor import Coder
    from covey.runtime.collectives.native_executor import NativeExecutor, Shortcut
    from covey.runtime.collectives.planner import Planner
    from covey.runtime.collectives.undo_buffer import UndoBuffer

T = TypeVar("T")

CACHED_PREFIXES: Final = 4096
LANE_SECONDS: Final = 0.2
"""How long to wait for a lane before checking whether the group has failed."""
BELL_PAUSES: Final = Growing(0.02, 0.2)
"""Between tries to open a descriptor when the process has no more of them."""
COMMIT_PHASE: Final = 0xFFFF
"""The phase of the barrier in which the ranks that have completed learn that all have."""


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


class Attempt(EnginePart):
    """The ranks of one attempt and their lanes."""

    def __init__(
        self, engine: Engine, number: int, ranks: tuple[Rank, ...], bell: Bell, undo: UndoBuffer | None
    ) -> None:
        """`ranks` are in the order of the group; `bell` wakes the running thread; `undo` saves what is overwritten."""
        super().__init__(engine)
        self.number, self.ranks = number, ranks
        self._slots = {rank: Slot(slot) for slot, rank in enumerate(ranks)}
        self.slots = tuple(self._slots.values())
        self.slot: Slot = self._slots[engine.rank]
        """The slot of this process in the attempt."""
        self.size: int = len(ranks)
        self.prepared: dict[Any, Any] = {}
        """Plans and reductions that repeated calls share."""
        self.undo: Any = undo
        """An `UndoBuffer`, or that of the compiled executor; None in a group that ends with its first loss."""
        self.recorder: Any = engine.counters.recorder
        self.polls: dict[tuple[int, ...], select.poll] = {}
        self.wake_fd = -1
        self.has_idle_core, self.sizes = engine.has_idle_core, engine.sizes
        self.deadline = 0.0
        """When the current operation must have ended."""
        self.knows_change = self.is_stopped = False
        """Whether headers carry CHANGE_PENDING, and whether `check` raises."""
        self._native: NativeExecutor | None = None
        if engine.is_native:
            from covey.runtime.collectives.native_executor import NativeExecutor

            self._native = NativeExecutor(engine.counters.recorder, ranks)
        run: Callable[..., None] = engine.quiet.run
        self._execute: Any = functools.partial(run, execute) if self._native is None else self._native.execute
        self.known_planner: Planner | None = None
        """None before the first large sum, and where plans are not fitted."""
        self.planning_seconds = 0.0
        """What the running thread has spent on plans and links beside sums, in all: not what a sum takes."""
        self._bell = bell
        self._lanes: list[Lane | None] = [None] * self.size
        self._paths: list[tuple[str, str] | None] = [None] * self.size
        """The addresses of both ends of the link with each peer when its lane was opened."""
        self.switch = LaneSwitch()
        """The lanes that are to be replaced by others."""
        self._barrier = doubling.dissemination(self.slot, self.size)
        self._nothing = (engine.nothing,)
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
        if undo is not None:
            undo.make_room(buffers)
        engine = self.engine
        operation = engine.operation
        prefix = self._prefixes.get((operation.call.fingerprint, phase)) or self.prefix(operation.call, phase)
        self.deadline = operation.deadline
        self._execute(
            plan, buffers, reduction, self.size, prefix, operation.sequence, self, engine.may_spin, undo, coder
        )

    def all_reduce(self, x: np.ndarray[Any, Any], op: str, algorithm: str | None = None) -> Plan:
        """Combine `x` of all ranks in place, as a step of the current operation; return the plan that did it."""
        plan = choose.all_reduce(self.slot, self.size, x.size, x.itemsize, self.lane_family, algorithm, self.sizes)
        self.execute(plan, (x,), reduction(op, x.dtype))
        return plan

    def synchronize(self) -> None:
        """Return once all ranks of the attempt have begun this step of the current operation."""
        self.execute(self._barrier, self._nothing)

    def commit(self) -> None:
        """Return once all ranks of the attempt have called this."""
        engine = self.engine
        operation = engine.operation
        prefix = self._prefixes.get((operation.call.fingerprint, COMMIT_PHASE)) or self.prefix(
            operation.call, COMMIT_PHASE
        )
        self.deadline = operation.deadline
        if self._begun is HandedOver.BARRIER:
            assert self._native is not None
            self._native.resume(self)
            return
        self._execute(self._barrier, self._nothing, None, self.size, prefix, operation.sequence, self, engine.may_spin)

    def prefix(self, call: Call, phase: int) -> bytes:
        """Return the first bytes of the headers of an operation, and cache them."""
        if len(self._prefixes) > CACHED_PREFIXES:
            self._prefixes.clear()
        fields = (call.operation, call.dtype, phase, self.number, 0, self.engine.id, call.fingerprint)
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
        return self._native.make_shortcut(self.engine, self.number, atomic)

    def open_shortcut(self) -> None:
        """Let calls take the shortcut, if there is one and no lane is to be replaced."""
        if self._native is not None:
            self.switch.open_shortcut(self)

    def open_native_shortcut(self) -> None:
        """Let calls take the shortcut, as `switch` allows it."""
        if self._native is not None:
            self._native.open_shortcut()

    def close_shortcut(self) -> None:
        """Let all calls go the long way. On any thread."""
        if self._native is not None:
            self._native.close_shortcut()

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
        self.deadline = self.engine.operation.deadline
        self._native.resume(self)

    # Ranks and slots

    def slot_of(self, rank: Rank) -> Slot:
        """Return the slot of a rank that is in the attempt."""
        return self._slots[rank]

    def chosen(self, items: Sequence[T]) -> list[T]:
        """Return the items of the ranks in this attempt, from a list by rank."""
        return list(items) if self.size == self.engine.size else [items[rank] for rank in self.ranks]

    def by_rank(self, items: Sequence[T]) -> list[T | None]:
        """Return a list by rank from a list by slot, with None for lost ranks."""
        if self.size == self.engine.size:
            return list(items)
        items_by_rank = dict(zip(self.ranks, items, strict=True))
        return [items_by_rank.get(rank) for rank in self.engine.ranks]

    @functools.cached_property
    def lane_family(self) -> str:
        """ "ring" if all ranks of the attempt are on one host and share memory, else "stream". Equal on all ranks."""
        # All of them are asked: a kind that some pair cannot have is an error here, before a lane is dialled.
        share = [self.engine.roster.shares_memory(rank) for rank in self.ranks if rank != self.engine.rank]
        return "ring" if all(share) else "stream"

    @functools.cached_property
    def fits_plans(self) -> bool:
        """Whether the plans of large sums are fitted to the links. Equal on all ranks."""
        config, roster = self.engine.config, self.engine.roster
        if config.plan == "plain" or self.size < 3:
            return False
        several = len({roster.host(rank) for rank in self.ranks}) > 1
        return config.plan == "always" or (several and self.lane_family == "stream")

    def planner(self) -> Planner | None:
        """Return what fits the plans of large sums to the links; None where all links are alike.

        For the thread that runs an operation; others read `known_planner`.
        """
        if self.known_planner is None and self.fits_plans:
            from covey.runtime.collectives.planner import Planner  # most groups have no use for it

            hosts = [self.engine.roster.host(rank) for rank in self.ranks]
            if self.engine.config.plan == "always":  # for tests on one host: as if each rank were on a host of its own
                hosts = [str(slot) for slot in self.slots]
            self.known_planner = Planner(tuple(hosts.index(host) for host in hosts))
        return self.known_planner

    def open_lane(self, rank: Rank) -> Lane | None:
        """Return the open lane to a rank, if there is one."""
        slot = self._slots.get(rank)
        return None if slot is None else self._lanes[slot]

    def paths_of(self, rank: Rank) -> tuple[LanePath, ...]:
        """Return the networks that the lane to a rank goes over, if it goes over several."""
        lane = self.open_lane(rank)
        return lane.paths() if lane is not None else ()

    def streams_of(self, rank: Rank) -> int:
        """Return how many connections the lane to a rank has; 0 if it is not open, or shares memory."""
        lane = self.open_lane(rank)
        return len(lane.sockets()) if isinstance(lane, SocketLane) else 0

    def open_kinds(self) -> dict[Rank, str]:
        """Return the kinds of the open lanes, by rank."""
        return {self.ranks[slot]: lane.kind for slot, lane in enumerate(self._lanes) if lane is not None}

    # What the executor calls (`executor.ExecutionHost`): `peer` is a slot, taken from a move of a plan

    def stop(self) -> None:
        """Let `check` raise from now on. On any thread; the caller rings the bell."""
        self.is_stopped = True
        if self._native is not None:
            self._native.stop()

    def check(self) -> None:
        self.engine.failure.check()
        if self.is_stopped:
            raise HaltedError

    def lane(self, peer: int) -> Lane:
        lane = self._lanes[peer]
        return lane if lane is not None else self._open_lane(peer)

    def _open_lane(self, peer: int) -> Lane:
        engine, rank = self.engine, self.ranks[peer]
        assert engine.node is not None
        self._open_bell()
        since = time.monotonic()
        while True:
            self.check()
            try:
                lane: Lane = engine.node.lanes.open(
                    engine.id, engine.members[rank], "collectives", LANE_SECONDS, self.number
                )
            except DeadlineError:
                self.stalled(since, (peer,))
            except ScarceError as error:  # of this process: the others hear that it gave up, and why
                raise ConnectError(f"{engine.operation.describe()} cannot go on: {error}") from error
            except ConnectError as error:
                self.lane_closed(peer, error)
            except ClosedError:
                self.check()
                raise
            else:
                self._lanes[peer], self._paths[peer] = lane, self._path_to(peer)
                engine.lane_opened(rank, lane.kind)
                return lane

    def replace_lane(self, slot: Slot, lane: Lane) -> None:
        """Use another lane to a slot from now on. The node ends the one that was used so far."""
        from covey.runtime.lanes.table import LaneKey  # slow to load, and few lanes are replaced

        engine, rank = self.engine, self.ranks[slot]
        assert engine.node is not None
        self._open_bell()
        self._lanes[slot], self._paths[slot] = lane, self._path_to(slot)
        self.polls.clear()  # which are by descriptor
        if self._native is not None:
            self._native.set_lane(slot, lane, self)
        engine.node.lanes.moves.switched(LaneKey(engine.id, engine.members[rank], "collectives", self.number))
        engine.lane_opened(rank, lane.kind)

    def _open_bell(self) -> None:
        """Open the bell; if the process has no descriptor left for it, wait a while for one.

        Raises:
            OSError: there is none after `SCARCE_SECONDS`.
            DeadlineError: the operation's deadline has passed before.
        """
        from covey.runtime.backoff import Backoff  # slow to load; a program that joins a run has it already

        shortage = Backoff(
            f"a free descriptor for group {self.engine.name!r}", BELL_PAUSES, within=FREE_DESCRIPTOR_SECONDS
        )
        while True:
            try:
                self._bell.open()
            except OSError as error:
                if not is_exhausted(error):
                    raise
                self.check()
                self.engine.operation.check_deadline(explain(error))
                shortage.failed(explain(error))
                if shortage.is_over:
                    raise
                time.sleep(shortage.pause)
            else:
                self.wake_fd = self._bell.fd
                return

    def stalled(self, since: float, waiting_for: tuple[int, ...]) -> float:
        now = time.monotonic()
        for slot, lane in enumerate(self._lanes):
            # The streams of a resumable lane find another path by themselves (`lanes.resumption`).
            if lane is None or is_resumable(lane):
                continue
            if lane.is_stuck(has_moved=self._has_moved(slot)):
                self._report_stuck(slot)
                self.lane_closed(slot, LaneClosedError(f"the other end {tcp.STUCK}"))
        again_at = self.engine.operation.stalled(self, since, tuple(self.ranks[slot] for slot in waiting_for))
        return again_at if self.lane_family == "ring" else min(again_at, now + tcp.PATH_CHECK_SECONDS)

    def _report_stuck(self, slot: int) -> None:
        """Let the node leave the path of a lane, before another lane is opened."""
        engine = self.engine
        if engine.node is not None:
            control.soon(engine.node.paths.stuck, engine.members[self.ranks[slot]])

    def _path_to(self, slot: int) -> tuple[str, str] | None:
        peer = self.engine.roster.peer(self.ranks[slot])
        link = None if peer is None else peer.link
        return None if link is None else (link.local_ip, link.remote_ip)

    def _has_moved(self, slot: int) -> bool:
        """Tell whether the link with a peer goes over other addresses than when the lane was opened."""
        before, now = self._paths[slot], self._path_to(slot)
        return before is not None and now is not None and before != now

    def lane_closed(self, peer: int, error: LaneClosedError | ConnectError) -> None:
        self.engine.lane_trouble.lane_closed(self, self.ranks[peer], error)

    def wrong_header(self, peer: int, expected: bytes, header: bytes) -> None:
        if header[FLAGS_AT] == CHANGE_PENDING:
            plain = header[:FLAGS_AT] + b"\0" + header[FLAGS_AT + 1 :]
            if plain == expected:
                self.knows_change = True
                return
        self.engine.lane_trouble.wrong_header(self, self.ranks[peer], expected, header)

    def reject(self, slot: Slot, what: str) -> NoReturn:
        """End the group because a rank sent `what`, which breaks the protocol; raise RemoteProtocolError."""
        self.engine.lane_trouble.reject(self, "RemoteProtocolError", self.ranks[slot], what)

    def disagree_with(self, slot: Slot, what: str) -> NoReturn:
        """End the group because a rank sent `what`, which this rank cannot accept; raise MismatchError."""
        self.engine.lane_trouble.reject(self, "MismatchError", self.ranks[slot], what)

    def disagree(self, error: MismatchError) -> NoReturn:
        """End the operation and the group with an error that every rank finds by itself."""
        raise DisagreedError(error)

    def close(self) -> None:
        """Forget the lanes. Their owner closes them."""
        self._lanes = [None] * self.size
        self.polls.clear()
        if self._native is not None:
            self._native.forget_lanes()
