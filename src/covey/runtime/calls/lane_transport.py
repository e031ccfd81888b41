"""Carries calls over the lanes of a run (`calls.lanes`)."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ClosedError, MismatchError, PeerLostError, RemoteProtocolError
from covey.base.numbers import Seat
from covey.proto.calling.tags import ANSWER_PARTS
from covey.runtime import loop as control
from covey.runtime.calls.lanes import CallLanes
from covey.runtime.pool import pool
from covey.wire.messages import MAX_MEMBERS
from covey.wire.versions import PASSED_HANDLES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.base.errors import CoveyError
    from covey.runtime.calls.lanes import CallingNode
    from covey.runtime.calls.transport import CallListener, PartsTaker
    from covey.runtime.fault import Fault
    from covey.runtime.signals import HeldSignals
    from covey.runtime.work import Work

WAY_SECONDS: Final = 0.01
"""For how long the parts of payloads give way after the start of a small call. Beside them, few take longer."""

ANSWERS_SECONDS: Final = 30.0
"""How long a node that leaves waits until its answers are delivered."""
STALLED_PARTS_SECONDS: Final = 8.0
"""How long it waits while nothing of them moves."""
PROGRESS_CHECK_EVERY: Final = 0.1
"""How often a sender of a large value checks whether bytes have moved."""
PART_SECONDS: Final = 3.0
"""How long a peer that has parted on one of the two kinds of lanes may take to part on the other."""


class LaneTransport:
    """Carries the calls of one node over lanes for messages: sealed, and resumed when a connection breaks."""

    def __init__(self, node: CallingNode, listener: CallListener) -> None:
        """Report to `listener` from now on. Another node that opens a lane is answered, whatever the program does."""
        self._node, self.listener = node, listener
        self._small = CallLanes(node, "calls", self, spins=True)
        self._large = CallLanes(node, "parts of calls", self, gives_way=self._has_small_calls)
        self._small_call_at = 0.0
        self._parted: dict[Seat, set[str]] = {}
        """By peer: the lanes that have delivered all that came from it, and carry nothing more."""
        self._timers: list[asyncio.TimerHandle] = []
        """For peers that have parted on one kind of lanes; used on the control loop only."""
        self._is_shut = False
        self._answers: set[Work[None]] = set()
        """The parts of answers that are not delivered."""

    @property
    def seat(self) -> Seat:
        """This node."""
        return self._node.peers.seat

    def lists_handles(self) -> bool:
        """Tell whether all nodes of the run know lists of handles."""
        return PASSED_HANDLES in self._node.speaks.features

    def is_member(self, seat: Seat) -> bool:
        """Tell whether a seat is that of a node of the run."""
        return seat == self.seat or seat in self._node.peers

    def may_be_member(self, seat: int) -> bool:
        """Tell whether a seat is that of a node of the run, or may be that of a newcomer that others know already."""
        return self.is_member(Seat(seat)) or 0 <= seat - self._node.peers.next_seat < MAX_MEMBERS

    def send(self, messages: list[tuple[Seat, bytes]]) -> None:
        """Send messages of at most 64 KiB to peers, now. Messages to one peer arrive in order."""
        limit, now = self._node.lanes.limit, time.monotonic()
        for peer, _ in messages:
            if now >= limit.note_at.get(peer, math.inf):
                limit.note_urgent(peer)
        messenger = self._small.used_messenger
        if messenger is None:
            with contextlib.suppress(ClosedError):
                self._small.messenger().flush(messages)
        else:
            messenger.flush(messages)

    def note_small_call(self) -> None:
        """Let parts of payloads give way for a moment."""
        self._small_call_at = time.monotonic()

    def _has_small_calls(self) -> bool:
        return time.monotonic() - self._small_call_at < WAY_SECONDS

    def send_parts(self, peer: Seat, tag: int, parts: Sequence[Any], priority: int, share: float = 1.0) -> None:
        """Send the parts of a payload; see `CallTransport.send_parts`."""
        with contextlib.suppress(ClosedError):
            messenger = self._large.messenger()
            for part in parts:
                work = messenger.push(memoryview(part), peer, tag, priority, share)
                if tag & ANSWER_PARTS:
                    self._answers.add(work)
                    work.add_done_callback(self._answers.discard)

    def deliver_answers(self) -> None:
        """Wait until all parts of answers are delivered: while they move, and for ANSWERS_SECONDS at most."""
        messenger = self._large.used_messenger
        now = time.monotonic()
        until, quiet_until, moved = now + ANSWERS_SECONDS, now + STALLED_PARTS_SECONDS, -1
        for work in list(self._answers):
            while messenger is not None and not work.wait_until_done(PROGRESS_CHECK_EVERY):
                now, before, moved = time.monotonic(), moved, messenger.delivered_bytes()
                if moved != before:
                    quiet_until = now + STALLED_PARTS_SECONDS
                if now >= min(until, quiet_until):
                    return

    def fetch_parts(self, peer: Seat, tag: int, sizes: Sequence[int], then: PartsTaker) -> None:
        """Receive the parts of a payload; see `CallTransport.fetch_parts`."""
        try:
            parts = [pool.take(size) for size in sizes]
            messenger = self._large.messenger()
        except MemoryError:
            self.refuse_parts(peer, tag, len(sizes))
            then(None)
            return
        except ClosedError as error:
            then(error)
            return
        left = [len(parts)]

        def ended(work: Work[Any]) -> None:
            if isinstance(error := work.exception(), MismatchError):
                self.listener.broke_protocol(peer, RemoteProtocolError(f"a part of another size: {error}"))
            left[0] = -1 if error is not None else left[0] - 1
            if left[0] in (0, -1):
                then(parts if error is None else error)

        for part in parts:
            messenger.pull(peer, tag, part.data).add_done_callback(ended)

    def refuse_parts(self, peer: Seat, tag: int, count: int) -> None:
        """Let the peer know that the parts of a payload are not wanted."""
        with contextlib.suppress(ClosedError):
            messenger = self._large.messenger()
            for _ in range(count):
                messenger.pull(peer, tag, memoryview(bytearray()))

    def drive(self, work: Work[Any], deadline: float | None) -> None:
        """Wait for a call, and receive messages meanwhile."""
        try:
            messenger = self._small.messenger()
        except ClosedError:
            work.wait_until_done(None if deadline is None else max(0.0, deadline - time.monotonic()))
        else:
            messenger.drive(work, deadline)

    def drive_once(self, work: Work[Any], held: HeldSignals) -> None:
        """Receive messages until a call has ended, unless another thread does so, or a signal comes."""
        if (messenger := self._small.used_messenger) is not None:
            messenger.driving.drive_once(messenger, work, None, held)

    def wake_poll(self) -> None:
        """End a wait of the calling thread in `drive_once`."""
        if (messenger := self._small.used_messenger) is not None:
            messenger.driving.wake_poll()

    def work_ended(self) -> None:
        """Wake the thread that waits for a call, if it receives messages meanwhile."""
        messenger = self._small.used_messenger
        if messenger is not None and messenger.driving.driver != threading.get_ident():
            messenger.driving.works_ended()

    def attend(self) -> None:
        """Expect messages that no thread waits for."""
        if (messenger := self._small.used_messenger) is not None:
            messenger.driving.attend()

    def run_soon(self, job: Callable[[], None], elsewhere: Callable[[], None]) -> bool:
        """Run a short job on this thread; see `SharedDriving.take_job`."""
        messenger = self._small.used_messenger
        return messenger is not None and messenger.driving.take_job(messenger, job, elsewhere)

    def lost_error(self, peer: Seat, rank: int, operation: str) -> CoveyError:
        """Return the error of a call to a lost peer."""
        other = self._node.peers.get(peer)
        host = "" if other is None else other.card.host_name
        how = "is gone" if other is None or not other.is_gone else other.how_it_went()
        text = f"rank {rank} ({host or 'this host'}), which was called, {how}"
        return PeerLostError(f"{operation}: {text}", rank=rank, host=host, operation=operation)

    def cut_off(self, peer: Seat, error: CoveyError) -> None:
        """Have nothing more to do with a peer that broke the protocol."""
        with contextlib.suppress(ClosedError):
            for lanes in (self._small, self._large):
                lanes.messenger().part_with(peer, error)

    def shut(self) -> None:
        """Deliver what was sent, within a few seconds, and free everything."""
        self._small.shut()
        self._large.shut()
        control.soon(self._stop_timers)

    # What the lanes report

    def received(self, messages: list[tuple[Seat, bytes]]) -> None:
        """Pass on messages."""
        self.listener.heard(messages)

    def parted(self, name: str, peer: Seat) -> None:
        """Pass on that a peer is gone, once all that has arrived from it is delivered, on both kinds of lanes."""
        known = self._parted.setdefault(peer, set())
        known.add(name)
        other = self._large if name == self._small.name else self._small
        if other.name in known or other.used_messenger is None:
            self.listener.lost(peer)
        elif len(known) == 1:  # the last part of an answer may be on its way to the call
            control.soon(self._await_other, peer)

    def _await_other(self, peer: Seat) -> None:
        if not self._is_shut:
            self._timers = [timer for timer in self._timers if timer.when() > asyncio.get_running_loop().time()]
            self._timers.append(asyncio.get_running_loop().call_later(PART_SECONDS, self.listener.lost, peer))

    def _stop_timers(self) -> None:
        """Cancel the timers, which refer to the node: it is to be freed at once."""
        self._is_shut = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def ended(self, fault: Fault) -> None:
        """Pass on that this node is in no generation any more."""
        self.listener.ended(fault)

    def close(self) -> None:
        """Pass on that this node leaves."""
        self.listener.close()

    def forked(self) -> None:
        """Pass on that this process is a fork of the one that joined."""
        self.listener.forked()
