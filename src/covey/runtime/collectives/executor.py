"""Run a plan over lanes, on the calling thread. The compiled executor does the same, and is compared with this one.

One loop serves every plan and every kind of lane: move the current send, move the current receive, and sleep when
neither moves. The sleep polls the lanes it needs and the group's wake descriptor. It ends at the earliest of three
times: the operation's deadline, the announcement of a stall, the warning that names the late ranks.

A payload is received whole before it is used. It arrives in its place if it is only stored there and no send of this
rank still needs what is in that place; otherwise it waits aside.
"""

from __future__ import annotations

import collections
import select
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from covey.net.lanes.lane import Incoming, LaneClosedError, Outgoing
from covey.plan.moves import FINAL, LEFT_OPERAND, REDUCE, first_writes
from covey.wire.header import HEADER_SUFFIX, flagged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.base.arithmetic import Reduction
    from covey.base.numbers import Rank
    from covey.net.lanes.lane import Lane
    from covey.plan.moves import Plan
    from covey.runtime.recorder import PythonRecorder

Array = np.ndarray[Any, np.dtype[Any]]

BYTE: Final = np.dtype(np.uint8)
COMMIT_PHASE: Final = 0xFFFF
"""The phase of the barrier in which the ranks that have completed learn that all have."""


class Coder(Protocol):
    """Encodes what a plan sends and decodes what it receives; moves are named by their number in the plan."""

    @property
    def encodes(self) -> Sequence[bool]:
        """By send: whether `encode` must be called before it starts."""

    @property
    def decodes(self) -> Sequence[bool]:
        """By receive: whether `decode` must be called when it has arrived."""

    def encode(self, send: int) -> None:
        """Write the bytes of a send."""

    def decode(self, recv: int) -> None:
        """Use the bytes of a receive."""


class ExecutionHost(Protocol):
    """What `execute` needs from the attempt it runs for. A `peer` is a slot of the attempt."""

    wake_fd: int
    is_stopped: bool
    """Whether `check` raises."""
    ranks: tuple[Rank, ...]
    """The ranks of the group, by slot."""
    recorder: PythonRecorder
    """Counts plans that begin, and transfers that are complete."""
    knows_change: bool
    """Whether headers carry CHANGE_PENDING from now on."""

    def check(self) -> None:
        """Raise if the attempt must end."""

    def lane(self, peer: int) -> Lane:
        """Return the open lane to `peer`."""

    def stalled(self, since: float, waiting_for: tuple[int, ...]) -> float:
        """Handle a stall since `since`: raise if the deadline has passed, else return when to call this again."""

    def lane_closed(self, peer: int, error: LaneClosedError) -> None:
        """Raise the error for the lane to `peer`, which has ended."""

    def wrong_header(self, peer: int, expected: bytes, header: bytes) -> None:
        """Raise the error for a header that differs from the plan's, or note the flags that make the difference."""


def execute(
    plan: Plan,
    buffers: Sequence[Array],
    reduction: Reduction | None,
    contributors: int,
    prefix: bytes,
    sequence: int,
    attempt: ExecutionHost,
    undo: UndoBuffer | None = None,
    coder: Coder | None = None,
) -> None:
    """Run `plan` on `buffers` (one-dimensional, contiguous); all headers start with `prefix`.

    Ranges are saved in `undo`, if there is one, before they are overwritten. `coder` encodes and decodes them.
    """
    sends, recvs = plan
    saves = () if undo is None else first_writes(plan)
    sent = applied = 0
    out: Outgoing | None = None
    incoming: Incoming | None = None
    aside: Array | None = None
    """Where the payload arrives, unless that is its place."""
    moves_to: collections.Counter[int] = collections.Counter()
    moves_from: collections.Counter[int] = collections.Counter()
    """By slot: the transfers that have begun."""
    idle_since = again_at = 0.0
    recorder, ranks = attempt.recorder, attempt.ranks
    recorder.began_phase()

    while sent < len(sends) or applied < len(recvs):
        moved = False
        if attempt.is_stopped:
            attempt.check()

        if out is None and sent < len(sends) and sends[sent].after <= applied:
            send = sends[sent]
            if coder is not None and coder.encodes[sent]:
                coder.encode(sent)
            payload = memoryview(buffers[send.buffer][send.start : send.stop].view(BYTE))
            flags = flagged(prefix) if attempt.knows_change else prefix
            out = Outgoing(flags + HEADER_SUFFIX.pack(sequence, moves_to[send.peer], payload.nbytes), payload)
            moves_to[send.peer] += 1
        if out is not None:
            peer = sends[sent].peer
            try:
                moved = attempt.lane(peer).transmit(out)
            except LaneClosedError as error:
                attempt.lane_closed(peer, error)
            if out.sent == out.nbytes:
                recorder.sent(ranks[peer], out.nbytes)
                out, sent = None, sent + 1

        if incoming is None and applied < len(recvs):
            recv = recvs[applied]
            target = buffers[recv.buffer][recv.start : recv.stop]
            aside = np.empty_like(target) if recv.action & REDUCE or recv.after > sent else None
            if aside is None and undo is not None and saves[applied]:
                undo.save(target)
            header = prefix + HEADER_SUFFIX.pack(sequence, moves_from[recv.peer], target.nbytes)
            moves_from[recv.peer] += 1
            dest = memoryview((target if aside is None else aside).view(BYTE))
            incoming = Incoming(header, dest, attempt.wrong_header, recv.peer)
        if incoming is not None and incoming.got < incoming.nbytes:
            try:
                moved = attempt.lane(incoming.peer).receive(incoming) or moved
            except LaneClosedError as error:
                attempt.lane_closed(incoming.peer, error)
        if incoming is not None and incoming.got == incoming.nbytes and recvs[applied].after <= sent:
            if aside is not None:
                recv = recvs[applied]
                target = buffers[recv.buffer][recv.start : recv.stop]
                if undo is not None and saves[applied]:
                    undo.save(target)
                apply(recv.action, target, aside, reduction, contributors)
            if coder is not None and coder.decodes[applied]:
                coder.decode(applied)
            recorder.received(ranks[incoming.peer], incoming.nbytes)
            incoming, applied, moved = None, applied + 1, True

        if moved:
            idle_since = 0.0
            continue
        to = None if out is None else sends[sent].peer
        source = None if incoming is None or incoming.got == incoming.nbytes else incoming.peer
        now = time.monotonic()
        if not idle_since:
            idle_since, again_at = now, 0.0
        if now >= again_at:
            again_at = attempt.stalled(idle_since, tuple(peer for peer in (to, source) if peer is not None))
        out_lane, in_lane = (None if peer is None else attempt.lane(peer) for peer in (to, source))
        _sleep(out_lane, in_lane, attempt, again_at - now)


def apply(action: int, target: Array, payload: Array, reduction: Reduction | None, contributors: int) -> None:
    """Store a payload in `target`, or combine it with what is there, as `action` says."""
    if not action & REDUCE:
        target[...] = payload
        return
    assert reduction is not None
    left, right = (payload, target) if action & LEFT_OPERAND else (target, payload)
    if reduction.divides and action & FINAL:
        reduction.average(left, right, target, contributors)
    elif target.size > 1:
        reduction.combine(left, right, out=target)
    else:  # with one element as input and output numpy reduces, which rounds and selects nans differently
        target[...] = reduction.combine(left, right)


def _sleep(out_lane: Lane | None, in_lane: Lane | None, attempt: ExecutionHost, seconds: float) -> None:
    """Sleep until a lane may move, the bell rings, or `seconds` have passed; raise if the attempt must end."""
    parked: list[Lane] = []
    poll = select.poll()
    poll.register(attempt.wake_fd, select.POLLIN)
    try:
        for lane in dict.fromkeys((in_lane, out_lane)):
            if lane is not None:
                parked.append(lane)
                events = lane.park(sending=lane is out_lane, receiving=lane is in_lane)
                if not events:
                    return
                poll.register(lane.fileno(), events)
        for descriptor, _ in poll.poll(seconds * 1000 if seconds > 0 else 0):
            if descriptor == attempt.wake_fd:
                attempt.check()
    finally:
        for lane in parked:
            lane.unpark()


class UndoBuffer:
    """What one operation overwrites, so that another attempt starts from the same input."""

    def __init__(self) -> None:
        self._saved: list[tuple[Array, Array]] = []

    def save(self, target: Array) -> None:
        """Save a contiguous range before it is overwritten."""
        self._saved.append((target, target.copy()))

    def restore(self) -> None:
        """Write all saved ranges back, and forget them."""
        for target, copy in reversed(self._saved):
            target[...] = copy
        self.forget()

    def forget(self) -> None:
        """Forget the saved ranges: the operation has returned."""
        self._saved.clear()
