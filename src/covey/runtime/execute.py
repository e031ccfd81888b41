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

from covey.net.lane import Incoming, LaneClosedError, Outgoing
from covey.plan.moves import FINAL, LEFT, REDUCE
from covey.wire.header import SUFFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.base.arithmetic import Reduction
    from covey.net.lane import Lane
    from covey.plan.moves import Plan, Recv

    Array = np.ndarray[Any, np.dtype[Any]]

BYTE: Final = np.dtype(np.uint8)
SPIN_SECONDS: Final = 30e-6
"""How long to try again before sleeping: about what falling asleep and being woken costs."""


class Watch(Protocol):
    """What an execution asks of the group it runs for."""

    wake_fd: int

    def check(self) -> None:
        """Raise if the group has failed."""

    def lane(self, peer: int) -> Lane:
        """Return the open lane to `peer`."""

    def stalled(self, since: float, waiting_for: tuple[int, ...]) -> float:
        """Nothing moved since `since`; say so where it helps, raise if time is up, return when to call again."""

    def lane_closed(self, peer: int, error: LaneClosedError) -> None:
        """The lane to `peer` ended; raise what ended it."""

    def wrong_header(self, peer: int, expected: bytes, header: bytes) -> None:
        """`peer` sent another transfer than the plan says; raise what went wrong."""


def execute(
    plan: Plan,
    buffers: Sequence[Array],
    reduction: Reduction | None,
    contributors: int,
    prefix: bytes,
    watch: Watch,
    *,
    spin: bool,
) -> None:
    """Carry out `plan` on `buffers` (one-dimensional, contiguous); `prefix` is what all headers start with."""
    sends, recvs = plan
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
    idle_since = 0.0

    while True:
        moved = False

        if out is None and sent < send_count:
            peer, index, start, stop, after = sends[sent]
            if after <= applied:
                if peer != out_peer:
                    out_peer, out_lane = peer, watch.lane(peer)
                move = out_moves.get(peer, 0)
                out_moves[peer] = move + 1
                payload = buffers[index][start:stop].view(BYTE)
                out = Outgoing(prefix + SUFFIX.pack(move, payload.size), payload)
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
                in_peer, in_lane = peer, watch.lane(peer)
            move = in_moves.get(peer, 0)
            in_moves[peer] = move + 1
            target = buffers[index][start:stop]
            nbytes = target.nbytes
            incoming = Incoming(prefix + SUFFIX.pack(move, nbytes), nbytes, watch.wrong_header, peer)
            if after > sent:
                aside = target.copy()
                incoming.dest = aside.view(BYTE)
            elif action & REDUCE:
                incoming.dtype = target.dtype
                absorb = _absorber(target, reduction, action, contributors)
                incoming.absorb = _at_once(absorb, target) if after else absorb
            else:
                incoming.dest = target.view(BYTE)
        if incoming is not None:
            if incoming.got < incoming.nbytes:
                try:
                    if in_lane.receive(incoming):
                        moved = True
                except LaneClosedError as error:
                    watch.lane_closed(in_peer, error)
            if incoming.got == incoming.nbytes and recvs[applied].after <= sent:
                if aside is not None:
                    _apply(recvs[applied], aside, buffers, reduction, contributors)
                    aside = None
                incoming = None
                applied += 1
                moved = True

        if moved:
            idle_since = 0.0
            if sent == send_count and applied == recv_count:
                return
            continue
        if sent == send_count and applied == recv_count:
            return

        now = time.monotonic()
        if not idle_since:
            idle_since = now
            watch.check()
        if spin and now - idle_since < SPIN_SECONDS:
            continue
        waiting_in = incoming is not None and incoming.got < incoming.nbytes
        waiting_for: tuple[int, ...] = (out_peer,) if out is not None else ()
        if waiting_in:
            waiting_for += (in_peer,)
        again_at = watch.stalled(idle_since, waiting_for)
        _sleep(out_lane if out is not None else None, in_lane if waiting_in else None, watch.wake_fd, again_at - now)
        watch.check()


def _absorber(
    target: Array, reduction: Reduction | None, action: int, contributors: int
) -> Callable[[int, Array], None]:
    """Return the function that combines a piece at a byte offset into `target`."""
    assert reduction is not None
    combine, size = reduction.combine, target.itemsize
    finish = reduction.finish if reduction.divides and action & FINAL else None

    def absorb(offset: int, piece: Array) -> None:
        start = offset // size
        mine = target[start : start + len(piece)]
        left, right = (piece, mine) if action & LEFT else (mine, piece)
        if len(mine) > 1:
            combine(left, right, out=mine)
        else:  # one element that is also the output is a running total to numpy, which rounds and keeps nans otherwise
            mine[...] = combine(left, right)
        if finish is not None:
            finish(mine, contributors)

    return absorb


def _at_once(absorb: Callable[[int, Array], None], target: Array) -> Callable[[int, Array], None]:
    """Return the function that collects pieces and combines them all in one call.

    Two ranks that swap and then combine for themselves must get the same bits, however the bytes arrive. How numpy
    rounds a complex product, and which of two nans it keeps, depends on where an element stands in the call.
    """
    whole: Array | None = None

    def collect(offset: int, piece: Array) -> None:
        nonlocal whole
        if len(piece) == len(target):
            absorb(0, piece)
            return
        if whole is None:
            whole = np.empty_like(target)
        start = offset // target.itemsize
        whole[start : start + len(piece)] = piece
        if start + len(piece) == len(target):
            absorb(0, whole)

    return collect


def _apply(recv: Recv, aside: Array, buffers: Sequence[Array], reduction: Reduction | None, contributors: int) -> None:
    """Apply a payload that was kept aside."""
    target = buffers[recv.buffer][recv.start : recv.stop]
    if recv.action & REDUCE:
        _absorber(target, reduction, recv.action, contributors)(0, aside)
    else:
        target[...] = aside


def _sleep(out_lane: Lane | None, in_lane: Lane | None, wake_fd: int, seconds: float) -> None:
    """Sleep until a lane may move, the group is woken, or `seconds` have passed."""
    poll = select.poll()
    poll.register(wake_fd, select.POLLIN)
    if out_lane is in_lane:
        lanes = [] if in_lane is None else [(in_lane, True, True)]
    else:
        lanes = [(lane, lane is out_lane, lane is in_lane) for lane in (out_lane, in_lane) if lane is not None]
    try:
        for lane, sending, receiving in lanes:
            events = lane.park(sending=sending, receiving=receiving)
            if not events:
                return
            poll.register(lane.fileno(), events)
        poll.poll(max(0.0, seconds) * 1000)
    finally:
        for lane, _, _ in lanes:
            lane.unpark()
