"""Run a plan over lanes, on the calling thread.

One loop serves every plan and every kind of lane: move the current send, move the current receive, and sleep when
neither moves. The sleep polls the lanes it needs and the group's wake descriptor. It ends at the earliest of three
times: the operation's deadline, the announcement of a stall, the warning that names the late ranks.
"""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from covey.net.lanes.lane import Incoming, LaneClosedError, Outgoing
from covey.plan.moves import FINAL, LEFT, REDUCE, first_writes
from covey.wire.header import HEADER_BYTES, HEADER_SUFFIX, flagged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.base.arithmetic import Reduction
    from covey.base.numbers import Rank
    from covey.net.lanes.lane import Lane
    from covey.plan.moves import Plan, Recv
    from covey.runtime.recorder import PythonRecorder

Array = np.ndarray[Any, np.dtype[Any]]

BYTE: Final = np.dtype(np.uint8)
LINE_BYTES: Final = 64
"""Saved ranges start at multiples of this: aligned copies are faster."""
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
    polls: dict[tuple[int, ...], select.poll]
    """Poll objects of earlier sleeps, by descriptors and events. They last as long as the attempt's lanes."""
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
    spin: bool,
    undo: UndoBuffer | None = None,
    coder: Coder | None = None,
) -> None:
    """Run `plan` on `buffers` (one-dimensional, contiguous); all headers start with `prefix`.

    Ranges are saved in `undo`, if there is one, before they are overwritten. `coder` encodes and decodes them.
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
    recorder, ranks = attempt.recorder, attempt.ranks
    recorder.began_phase()

    while True:
        moved = False
        if attempt.is_stopped:
            attempt.check()

        if out is None and sent < send_count:
            peer, index, start, stop, after = sends[sent]
            if after <= applied:
                if peer != out_peer:
                    out_peer, out_lane = peer, attempt.lane(peer)
                if coder is not None and coder.encodes[sent]:
                    coder.encode(sent)
                move = out_moves[peer] = out_moves.get(peer, -1) + 1
                payload = buffers[index][start:stop].view(BYTE)
                start_of_header = flagged(prefix) if attempt.knows_change else prefix
                out = Outgoing(start_of_header + HEADER_SUFFIX.pack(sequence, move, payload.size), payload)
        if out is not None:
            try:
                if out_lane.transmit(out):
                    moved = True
                    if out.sent == out.nbytes:
                        recorder.sent(ranks[out_peer], out.nbytes)
                        out = None
                        sent += 1
            except LaneClosedError as error:
                attempt.lane_closed(out_peer, error)

        if incoming is None and applied < recv_count:
            peer, index, start, stop, action, after = recvs[applied]
            if peer != in_peer:
                in_peer, in_lane = peer, out_lane if peer == out_peer else attempt.lane(peer)
            move = in_moves[peer] = in_moves.get(peer, -1) + 1
            target = buffers[index][start:stop]
            nbytes = target.nbytes
            header = prefix + HEADER_SUFFIX.pack(sequence, move, nbytes)
            saver = undo if saves is not None and saves[applied] else None
            if action & REDUCE and after <= sent:
                incoming = _Reducing(header, attempt, peer, target, reduction, action, contributors, after > 0, saver)
            else:
                if saver is not None:
                    saver.save(target)
                aside = target.copy() if after > sent else None
                dest = target if aside is None else aside
                view = memoryview(dest.view(BYTE))
                incoming = Incoming(header, nbytes, attempt.wrong_header, peer, view, target.dtype)
        if incoming is not None:
            if incoming.got < incoming.nbytes:
                try:
                    if in_lane.receive(incoming):
                        moved = True
                except LaneClosedError as error:
                    attempt.lane_closed(in_peer, error)
            if incoming.got == incoming.nbytes and recvs[applied].after <= sent:
                if aside is not None:
                    _apply(recvs[applied], aside, buffers, reduction, contributors, attempt)
                    aside = None
                if coder is not None and coder.decodes[applied]:
                    coder.decode(applied)
                recorder.received(ranks[in_peer], incoming.nbytes)
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
                attempt.lane_closed(out_peer if waiting is None else in_peer, error)
            if ready:
                continue
        now = time.monotonic()
        if not idle_since:
            idle_since, again_at = now, 0.0
        if now >= again_at:
            waiting_for: tuple[int, ...] = (out_peer,) if out is not None else ()
            again_at = attempt.stalled(idle_since, waiting_for if waiting is None else (*waiting_for, in_peer))
        _sleep(out_lane if out is not None else None, in_lane if waiting is not None else None, attempt, again_at - now)


class _Reducing(Incoming):
    """Combines what arrives, piece by piece, into `target`."""

    __slots__ = ("_average", "_collected", "_combine", "_contributors", "_is_left", "_target", "_undo")

    def __init__(
        self,
        header: bytes,
        attempt: ExecutionHost,
        peer: int,
        target: Array,
        reduction: Reduction | None,
        action: int,
        contributors: int,
        whole: bool,
        undo: UndoBuffer | None = None,
    ) -> None:
        """`whole` collects all pieces and combines them in one call; `undo` saves the target before that.

        Two ranks that swap buffers and combine them separately must get the same bits, in whatever pieces the bytes
        arrive. How numpy rounds a complex product, and which of two nans it keeps, depends on the position of an
        element in the call.
        """
        assert reduction is not None
        self.expected, self.nbytes, self.got = header, target.nbytes, -HEADER_BYTES  # a call to super() would cost more
        self.wrong_header, self.peer = attempt.wrong_header, peer
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
        else:  # with one element as input and output numpy reduces, which rounds and selects nans differently
            mine[...] = self._combine(left, right)


def _apply(
    recv: Recv,
    aside: Array,
    buffers: Sequence[Array],
    reduction: Reduction | None,
    contributors: int,
    attempt: ExecutionHost,
) -> None:
    """Apply a payload that was received aside."""
    target = buffers[recv.buffer][recv.start : recv.stop]
    if recv.action & REDUCE:
        _Reducing(b"", attempt, recv.peer, target, reduction, recv.action, contributors, True).absorb(0, aside)
    else:
        target[...] = aside


def _sleep(out_lane: Lane | None, in_lane: Lane | None, attempt: ExecutionHost, seconds: float) -> None:
    """Sleep until a lane may move, the bell rings, or `seconds` have passed; raise if the attempt must end."""
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
        poll = attempt.polls.get(key)
        if poll is None:
            poll = attempt.polls[key] = select.poll()
            poll.register(attempt.wake_fd, select.POLLIN)
            for descriptor, events in zip(key[::2], key[1::2], strict=True):
                poll.register(descriptor, events)
        for descriptor, _ in poll.poll(seconds * 1000 if seconds > 0 else 0):
            if descriptor == attempt.wake_fd:
                attempt.check()
    finally:
        for lane in parked:
            lane.unpark()


class UndoBuffer:
    """What one operation overwrites, so that another attempt starts from the same input.

    It is in memory that the next operation uses again.
    """

    def __init__(self) -> None:
        self._pool: Array = np.empty(0, np.uint8)
        self._used = 0
        self._saved: list[tuple[Array, Array]] = []

    def make_room(self, buffers: Sequence[Array]) -> None:
        """Allocate memory for all of `buffers` before a transfer starts."""
        if not self._saved:
            nbytes = buffers[0].nbytes if len(buffers) == 1 else sum(buffer.nbytes for buffer in buffers)
            if self._pool.size < nbytes:
                self._pool = np.empty(nbytes, np.uint8)

    def save(self, target: Array) -> None:
        """Save a contiguous range before it is overwritten."""
        nbytes = target.nbytes
        start = self._used
        stop = start + nbytes
        if stop <= self._pool.size:
            copy = self._pool[start:stop].view(target.dtype)
            copy[...] = target
            self._used = -(-stop // LINE_BYTES) * LINE_BYTES
        else:
            copy = target.copy()
        self._saved.append((target, copy))

    def restore(self) -> None:
        """Write all saved ranges back, and forget them."""
        for target, copy in reversed(self._saved):
            target[...] = copy
        self.forget()

    def forget(self) -> None:
        """Forget the saved ranges: the operation has returned."""
        self._saved.clear()
        self._used = 0
