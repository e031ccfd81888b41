"""Runs a plan over lanes, on the thread that calls.

One loop for every plan and every lane: move the current send, move the current receive, and sleep only when
neither moves. The sleep watches the lanes it needs and the group's wake descriptor, and ends at the next of three
moments: the operation's deadline, the announcement of a stall, the warning that names who is late.
"""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from covey.net.lanes.lane import Incoming, LaneClosedError, Outgoing
from covey.plan.moves import FINAL, LEFT, REDUCE, first_writes
from covey.wire.header import HEADER_BYTES, SUFFIX, flagged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.base.arithmetic import Reduction
    from covey.net.lanes.lane import Lane
    from covey.plan.moves import Plan, Recv
    from covey.runtime.collectives.undo_buffer import UndoBuffer

    Array = np.ndarray[Any, np.dtype[Any]]

BYTE: Final = np.dtype(np.uint8)


class Watch(Protocol):
    """What an execution asks of the group it runs for."""

    wake_fd: int
    polls: dict[tuple[int, ...], select.poll]
    """What was slept on before, by descriptors and events: they last as long as the group's lanes."""
    is_stopped: bool
    """`check` has something to raise."""
    knows_change: bool
    """Transfers from now on are to carry CHANGE_PENDING."""

    def check(self) -> None:
        """Raise if the attempt must end."""

    def lane(self, peer: int) -> Lane:
        """Return the open lane to `peer`."""

    def stalled(self, since: float, waiting_for: tuple[int, ...]) -> float:
        """Nothing moved since `since`; say so where it helps, raise if time is up, return when to call again."""

    def lane_closed(self, peer: int, error: LaneClosedError) -> None:
        """The lane to `peer` ended; raise what ended it."""

    def wrong_header(self, peer: int, expected: bytes, header: bytes) -> None:
        """`peer` sent another transfer than the plan says: raise what went wrong, or note the flags it carries."""


def execute(
    plan: Plan,
    buffers: Sequence[Array],
    reduction: Reduction | None,
    contributors: int,
    prefix: bytes,
    sequence: int,
    watch: Watch,
    spin: bool,
    undo: UndoBuffer | None = None,
) -> None:
    """Carry out `plan` on `buffers` (one-dimensional, contiguous); `prefix` starts all headers.

    What is overwritten is saved in `kept`, if there is one.
    """
    sends, recvs = plan
    saves = first_writes(plan) if undo is not None else None
    send_count, recv_count = len(sends), len(recvs)
    sent = applied = 0
    out: Outgoing | None = None
    incoming: Incoming | None = None
    aside: Array | None = None  # a received payload that must wait for sends before it is applied
    out_moves: dict[int, int] = {}
    in_moves: dict[int, int] = {}
    out_peer = in_peer = -1
    out_lane: Any = None
    in_lane: Any = None
    idle_since = again_at = 0.0

    while True:
        moved = False
        if watch.is_stopped:
            watch.check()

        if out is None and sent < send_count:
            peer, index, start, stop, after = sends[sent]
            if after <= applied:
                if peer != out_peer:
                    out_peer, out_lane = peer, watch.lane(peer)
                move = out_moves[peer] = out_moves.get(peer, -1) + 1
                payload = buffers[index][start:stop].view(BYTE)
                start_of_header = flagged(prefix) if watch.knows_change else prefix
                out = Outgoing(start_of_header + SUFFIX.pack(sequence, move, payload.size), payload)
        if out is not None:
            try:
                if out_lane.transmit(out):
                    moved = True
                    if out.sent == out.nbytes:
                        out = None
                        sent += 1
            except LaneClosedError as error:
                watch.lane_closed(out_peer, error)

        if incoming is None and applied < recv_count:
            peer, index, start, stop, action, after = recvs[applied]
            if peer != in_peer:
                in_peer, in_lane = peer, out_lane if peer == out_peer else watch.lane(peer)
            move = in_moves[peer] = in_moves.get(peer, -1) + 1
            target = buffers[index][start:stop]
            nbytes = target.nbytes
            header = prefix + SUFFIX.pack(sequence, move, nbytes)
            saver = undo if saves is not None and saves[applied] else None
            if action & REDUCE and after <= sent:
                incoming = _Reducing(header, watch, peer, target, reduction, action, contributors, after > 0, saver)
            else:
                if saver is not None:
                    saver.save(target)
                aside = target.copy() if after > sent else None
                dest = target if aside is None else aside
                view = memoryview(dest.view(BYTE))
                incoming = Incoming(header, nbytes, watch.wrong_header, peer, view, target.dtype)
        if incoming is not None:
            if incoming.got < incoming.nbytes:
                try:
                    if in_lane.receive(incoming):
                        moved = True
                except LaneClosedError as error:
                    watch.lane_closed(in_peer, error)
            if incoming.got == incoming.nbytes and recvs[applied].after <= sent:
                if aside is not None:
                    _apply(recvs[applied], aside, buffers, reduction, contributors, watch)
                    aside = None
                incoming = None
                applied += 1
                moved = True

        if sent == send_count and applied == recv_count:
            return
        if moved:
            idle_since = 0.0
            continue

        waiting = incoming if incoming is not None and incoming.got < incoming.nbytes else None
        if spin:
            try:
                if waiting is None:
                    ready = out_lane.spin(out, None)
                else:
                    ready = in_lane.spin(out if out_lane is in_lane else None, waiting)
            except LaneClosedError as error:
                watch.lane_closed(out_peer if waiting is None else in_peer, error)
            if ready:
                continue
        now = time.monotonic()
        if not idle_since:
            idle_since, again_at = now, 0.0
        if now >= again_at:
            waiting_for: tuple[int, ...] = (out_peer,) if out is not None else ()
            again_at = watch.stalled(idle_since, waiting_for if waiting is None else (*waiting_for, in_peer))
        _sleep(out_lane if out is not None else None, in_lane if waiting is not None else None, watch, again_at - now)


class _Reducing(Incoming):
    """Combines what arrives, piece by piece, into `target`."""

    __slots__ = ("_average", "_collected", "_combine", "_contributors", "_is_left", "_target", "_undo")

    def __init__(
        self,
        header: bytes,
        watch: Watch,
        peer: int,
        target: Array,
        reduction: Reduction | None,
        action: int,
        contributors: int,
        whole: bool,
        undo: UndoBuffer | None = None,
    ) -> None:
        """`whole` collects all pieces and combines them in one call; `kept` saves what is there before.

        Two ranks that swap and then combine for themselves must get the same bits, however the bytes arrive. How numpy
        rounds a complex product, and which of two nans it keeps, depends on where an element stands in the call.
        """
        assert reduction is not None
        self.expected, self.nbytes, self.got = header, target.nbytes, -HEADER_BYTES  # a call to super() would cost more
        self.wrong_header, self.peer = watch.wrong_header, peer
        self.dest, self.dtype = None, target.dtype
        self._target = target
        self._combine = reduction.combine
        self._is_left = action & LEFT
        self._average = reduction.average if reduction.divides and action & FINAL else None
        self._contributors = contributors
        self._collected: Array | None = target if whole else None
        self._undo = undo

    def absorb(self, offset: int, piece: Array) -> None:
        """Combine a piece that starts `offset` bytes into the transfer."""
        target = self._target
        if piece.size == target.size:
            mine = target
        else:
            start = offset // target.itemsize
            stop = start + piece.size
            if self._collected is not None:
                if start == 0:
                    self._collected = np.empty_like(target)
                self._collected[start:stop] = piece
                if stop < target.size:
                    return
                mine, piece = target, self._collected
            else:
                mine = target[start:stop]
        if self._undo is not None:
            self._undo.save(mine)
        left, right = (piece, mine) if self._is_left else (mine, piece)
        if self._average is not None:
            self._average(left, right, mine, self._contributors)
        elif mine.size > 1:
            self._combine(left, right, out=mine)
        else:  # one element that is also the output is a running total to numpy, which rounds and keeps nans otherwise
            mine[...] = self._combine(left, right)


def _apply(
    recv: Recv,
    aside: Array,
    buffers: Sequence[Array],
    reduction: Reduction | None,
    contributors: int,
    watch: Watch,
) -> None:
    """Apply a payload that was kept aside."""
    target = buffers[recv.buffer][recv.start : recv.stop]
    if recv.action & REDUCE:
        _Reducing(b"", watch, recv.peer, target, reduction, recv.action, contributors, True).absorb(0, aside)
    else:
        target[...] = aside


def _sleep(out_lane: Lane | None, in_lane: Lane | None, watch: Watch, seconds: float) -> None:
    """Sleep until a lane may move, the group is woken, or `seconds` have passed; raise if the group has failed."""
    parked: list[Lane] = []
    key: tuple[int, ...] = ()
    try:
        for lane in (in_lane, out_lane) if in_lane is not out_lane else (in_lane,):
            if lane is not None:
                parked.append(lane)
                events = lane.park(sending=lane is out_lane, receiving=lane is in_lane)
                if not events:
                    return
                key += (lane.fileno(), events)
        poll = watch.polls.get(key)
        if poll is None:
            poll = watch.polls[key] = select.poll()
            poll.register(watch.wake_fd, select.POLLIN)
            for descriptor, events in zip(key[::2], key[1::2], strict=True):
                poll.register(descriptor, events)
        for descriptor, _ in poll.poll(seconds * 1000 if seconds > 0 else 0):
            if descriptor == watch.wake_fd:
                watch.check()
    finally:
        for lane in parked:
            lane.unpark()
