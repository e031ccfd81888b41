"""Run a plan over lanes with the compiled executor. It moves the bytes; what to do about trouble is decided here.

`execute` does what `executor.execute` does, and asks the attempt the same questions.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from covey.base.arithmetic import BFLOAT16
from covey.base.native import native
from covey.net.lanes.lane import SPIN_NS, YIELD_NS, LaneClosedError
from covey.plan.moves import first_writes
from covey.runtime.collectives.executor import COMMIT_PHASE, ExecutionHost
from covey.runtime.collectives.trouble import ANNOUNCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.base.arithmetic import Reduction
    from covey.base.numbers import Rank
    from covey.plan.moves import Plan
    from covey.runtime.collectives.call_log import Call, CallLog
    from covey.runtime.collectives.executor import Coder
    from covey.runtime.collectives.operation import CurrentOperation
    from covey.runtime.recorder import NativeRecorder

    Array = np.ndarray[Any, np.dtype[Any]]

STALL_NS: Final = int(ANNOUNCE_SECONDS * 1e9)
"""The first time that a stall is looked at: when it is announced."""
SHORT_BYTES: Final = 1 << 18
"""Arrays up to this may take the shortcut: to copy them takes well below the time for which Python lends the GIL."""
CACHED: Final = 512
"""Prepared plans and reductions of an attempt."""

DONE, STALLED, WRONG_HEADER, LANE_ENDED, STOPPED, NEEDS_LANE, _, ENCODE, DECODE = range(9)
_HALF_OPS: Final = {"sum": 0, "mean": 1, "prod": 2, "min": 3, "max": 4}


class NativeHost(ExecutionHost, Protocol):
    """What the compiled executor needs of an attempt besides."""

    number: int
    size: int
    deadline: float
    """When the current operation must have ended."""
    has_idle_core: bool
    may_spin: bool
    """Whether this rank has a core of its own."""
    undo: Any
    """A `NativeUndoBuffer`; None in a group that ends with its first loss."""

    def prefix(self, call: Call, phase: int) -> bytes:
        """Return the first bytes of the headers of an operation."""


class NativeExecutor:
    """The compiled executor of one attempt: its runner, and what it has prepared."""

    def __init__(self, recorder: NativeRecorder, ranks: tuple[Rank, ...]) -> None:
        """`recorder` is that of the group, and `ranks` are its ranks in the attempt, by slot."""
        self.runner = native().module.Runner(len(ranks), recorder.native, ranks)
        """The extension's part. Calls may take the shortcut while it `is_open`; any thread may set that."""
        self._plans: dict[int, tuple[Plan, Any]] = {}
        self._reductions: dict[int, tuple[Reduction, Any]] = {}
        """By identity, with what is identified: plans are long, and equal ones are mostly the same object."""
        self.stop = self.runner.stop
        """Let a running operation return. On any thread."""
        self.forget_lanes = self.runner.forget_lanes
        self.finish = self.runner.finish
        """Release what an operation uses that is given up."""

    def execute(
        self,
        plan: Plan,
        buffers: Sequence[Array],
        reduction: Reduction | None,
        contributors: int,
        prefix: bytes,
        sequence: int,
        attempt: NativeHost,
        undo: NativeUndoBuffer | None = None,
        coder: Coder | None = None,
    ) -> None:
        """See `executor.execute`."""
        dtype = buffers[-1].dtype
        prepared = self.prepared_plan(plan, coder)
        rule = None if reduction is None else self.prepared_reduction(reduction, dtype, contributors)
        if dtype is BFLOAT16 or len(buffers) > 1:  # of which numpy exports no buffers
            buffers = [buffer.view(np.uint16) if buffer.dtype is BFLOAT16 else buffer for buffer in buffers]
        runner = self.runner
        if undo is not None:
            undo.make_room(buffers)
        try:
            reason = runner.start(
                prepared,
                buffers,
                rule,
                contributors,
                prefix,
                sequence,
                None if undo is None else undo.native,
                attempt.knows_change,
                SPIN_NS if attempt.may_spin else 0,
                YIELD_NS,
                _first_stall_ns(attempt),
            )
            self._finish(reason, attempt, coder)
        except BaseException:
            runner.finish()
            raise

    def resume(self, attempt: NativeHost) -> None:
        """Go on with an operation that a shortcut has begun."""
        try:
            self._finish(self.runner.resume(_first_stall_ns(attempt)), attempt)
        except BaseException:
            self.runner.finish()
            raise

    def _finish(self, reason: int, attempt: NativeHost, coder: Coder | None = None) -> None:
        """Let the runner go on, after it returned with `reason`, until the operation is done."""
        runner = self.runner
        while reason != DONE:
            if reason >= ENCODE:
                assert coder is not None
                if reason == ENCODE:
                    coder.encode(runner.sent)
                else:
                    coder.decode(runner.applied)
                reason = runner.resume(STALL_NS)
            else:
                reason = runner.resume(int(self._handle(reason, attempt) * 1e9))
        if runner.change_pending:
            attempt.knows_change = True

    def make_shortcut(
        self,
        operation: CurrentOperation,
        call_log: CallLog,
        number: int,
        atomic: tuple[Any, ...] | None,
        *,
        may_spin: bool,
    ) -> Shortcut:
        """Return a shortcut for operations of a group in the attempt of that number; for `atomic` see `shortcut.c`."""
        # native/attributes.h names what the extension sets of these objects
        made = native().module.Shortcut(
            self.runner,
            operation,
            call_log,
            call_log.slots,
            np.ndarray,
            SPIN_NS if may_spin else 0,
            YIELD_NS,
            STALL_NS,
            *(() if atomic is None else (atomic,)),
        )
        return Shortcut(self, made, number)

    def wrong_header(self) -> tuple[int, bytes] | None:
        """Return the wrong header for which a shortcut has handed its call over, and its sender's slot; else None."""
        if self.runner.pending != WRONG_HEADER:
            return None
        peer, _, header, _ = self.runner.details()
        return peer, header

    def _handle(self, reason: int, attempt: NativeHost) -> float:
        """Do what the reason asks for, or raise; return after how many idle seconds the runner is to return."""
        runner = self.runner
        if reason == STALLED:
            to, sender, idle = runner.waiting()
            waiting_for = tuple(slot for slot in dict.fromkeys((to, sender)) if slot >= 0)
            now = time.monotonic()
            return max(0.0, attempt.stalled(now - idle, waiting_for) - time.monotonic())
        if reason == STOPPED:
            attempt.check()
            return ANNOUNCE_SECONDS
        peer, expected, header, trouble = runner.details()
        if reason == NEEDS_LANE:
            self.set_lane(peer, attempt.lane(peer), attempt)
        elif reason == LANE_ENDED:
            attempt.lane_closed(peer, LaneClosedError(trouble))
        elif reason == WRONG_HEADER:
            attempt.wrong_header(peer, expected, header)
        return ANNOUNCE_SECONDS

    def set_lane(self, slot: int, lane: Any, attempt: NativeHost) -> None:
        """Use a lane to a slot, instead of the one before if there is one. No operation may be running."""
        self.runner.set_lane(slot, lane.native, attempt.wake_fd, attempt.has_idle_core)

    def prepared_plan(self, plan: Plan, coder: Coder | None = None) -> Any:
        """Return a plan as the extension runs it; a plan has the same moves coded every time."""
        known = self._plans.get(id(plan))
        if known is not None:
            return known[1]
        if len(self._plans) >= CACHED:
            self._plans.clear()
        flags = () if coder is None else (tuple(coder.encodes), tuple(coder.decodes))
        prepared = native().module.Plan(plan.sends, plan.recvs, first_writes(plan), *flags)
        self._plans[id(plan)] = plan, prepared
        return prepared

    def prepared_reduction(self, reduction: Reduction, dtype: np.dtype[Any], contributors: int) -> Any:
        """Return a reduction as the extension runs it."""
        known = self._reductions.get(id(reduction))
        if known is not None:
            return known[1]
        if len(self._reductions) >= CACHED:
            self._reductions.clear()
        prepared = native_reduction(reduction, dtype, contributors)
        self._reductions[id(reduction)] = reduction, prepared
        return prepared


def _first_stall_ns(attempt: NativeHost) -> int:
    """Return when a stall is looked at for the first time: when it is announced, or at the deadline before."""
    limit = attempt.deadline - time.monotonic()
    return STALL_NS if limit > ANNOUNCE_SECONDS else max(0, int(limit * 1e9))


def native_reduction(reduction: Reduction, dtype: np.dtype[Any], contributors: int) -> Any:
    """Return how the compiled executor combines arrays of `dtype`."""
    if dtype.itemsize == 2 and dtype.kind not in "iu":
        return native().module.Reduction(dtype == BFLOAT16, _HALF_OPS[reduction.op], _keeps_left(reduction, dtype))
    divide = np.divide if reduction.divides else None
    divisor = np.array([contributors], np.float64 if dtype.kind == "b" else dtype).view(np.uint8)[: dtype.itemsize]
    return native().module.Reduction(dtype.itemsize, dtype.num, reduction.combine, divide, divisor.tobytes())


def _keeps_left(reduction: Reduction, dtype: np.dtype[Any]) -> bool:
    """Tell which of two nans the reference keeps, or of two zeros if it selects: numpy's compiler has decided that."""
    magnitude = 0 if reduction.op in ("min", "max") else 0x7FFF  # a nan in float16 and in bfloat16
    left, right = (np.full(2, sign | magnitude, np.uint16).view(dtype) for sign in (0, 0x8000))
    return bool(reduction.combine(left, right).view(np.uint16)[0] < 0x8000)


class Shortcut:
    """Runs repeated small calls of some operations with one call of the extension each."""

    def __init__(self, executor: NativeExecutor, made: Any, number: int) -> None:
        """`made` is the extension's part, and `number` that of the attempt."""
        self._executor, self._made, self._number = executor, made, number
        self.most_bytes = SHORT_BYTES
        """Larger arrays never take the shortcut."""
        self.runner = executor.runner
        self.run = self._made.run
        """`run(x, what)`, `run(None, what)` or `run(x, what, out)` returns False if the call must go the long way, True
        if it has returned, or the begun call."""
        self.begin = self._made.begin
        """As `run`, but without waiting: another thread goes on with a begun call."""
        self._names: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self.broadcasts: dict[int, tuple[Any, ...]] = {}
        """By root: the name of a broadcast that was added."""

    def name(self, what: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the one object that stands for `what`: calls are told apart by identity."""
        known = self._names.get(what)
        if known is None and len(self._names) < CACHED:
            known = self._names[what] = what
        return what if known is None else known

    def add(
        self,
        x: Array,
        what: Any,
        shape: tuple[int, ...],
        call: Call,
        plan: Plan,
        rule: Reduction | None,
        attempt: NativeHost,
        out: Array | None = None,
        copied: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """Let calls with arrays like `x` take the shortcut, if they are small enough to be over in a moment.

        Such a call runs `plan` on `x`, or on `x` and an array like `out`. Before that it copies elements of `x` to
        `out`, as `copied` says: where they begin in `x`, where in `out`, and how many there are.
        """
        if attempt.number != self._number:
            return  # another attempt has begun meanwhile
        if x.nbytes <= self.most_bytes and (out is None or out.nbytes <= self.most_bytes):
            if attempt.undo is not None:
                attempt.undo.native.make_room(x.nbytes)
            self._made.add(
                x.dtype,
                shape,
                what,
                call,
                self._executor.prepared_plan(plan),
                None if rule is None else self._executor.prepared_reduction(rule, x.dtype, attempt.size),
                attempt.size,
                attempt.prefix(call, 0),
                attempt.prefix(call, COMMIT_PHASE),
                *(() if out is None else (out.shape, *(number * x.itemsize for number in copied))),
            )

    def add_barrier(self, what: Any, call: Call, plan: Plan, attempt: NativeHost) -> None:
        """Let calls without an array take the shortcut."""
        if attempt.number != self._number:
            return  # another attempt has begun meanwhile
        prepared = self._executor.prepared_plan(plan)
        prefixes = attempt.prefix(call, 0), attempt.prefix(call, COMMIT_PHASE)
        self._made.add(None, (), what, call, prepared, None, attempt.size, *prefixes)


class NativeUndoBuffer:
    """The undo buffer of the compiled executor; see `executor.UndoBuffer`."""

    def __init__(self) -> None:
        self.native = native().module.Undo()
        self._targets: list[Any] = []
        """What may be restored, which must not be freed before."""

    def make_room(self, buffers: Sequence[Array]) -> None:
        """Allocate memory for all of `buffers` before a transfer starts; the next operation uses it again."""
        self._targets.append(buffers)
        self.native.make_room(sum(buffer.nbytes for buffer in buffers))

    def save(self, target: Array) -> None:
        self._targets.append(target)
        self.native.save(target.view(np.uint8))

    def keep(self, target: Array) -> None:
        """Do not free an array that a shortcut has saved."""
        self._targets.append(target)

    def restore(self) -> None:
        if self._targets:
            self.native.restore()
            self._targets.clear()

    def forget(self) -> None:
        self.native.forget()
        self._targets.clear()
