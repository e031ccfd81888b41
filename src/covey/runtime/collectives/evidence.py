"""Look for a mismatch before reporting a loss: the shell around `proto.call_inquiries`.

A rank that only sends may be killed before the other ranks notice that they called something else; they first see that
its process is gone. So a reported loss is only a suspicion. Before the group ends with it, each rank looks at the
headers that its lanes hold and tells the others what it found and what it called; it decides once all have. Groups that
survive losses do not need this: they run the operation again.

The thread that runs an operation looks at the lanes that it uses. While no operation runs, any thread may look, the
control loop too, once it has stopped the attempt: an operation that begins then touches no lane before it has seen the
stop, and the compiled lanes show nothing while their runner moves bytes. What is looked at is the first transfer of
each lane that was not read, and the header for which a shortcut has handed over its call.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import RemoteProtocolError
from covey.base.numbers import NO_RANK, Rank
from covey.proto.call_inquiries import TESTIMONY_PATIENCE, Hearing
from covey.runtime.collectives.part import EnginePart
from covey.runtime.collectives.stalls import COMPARE_ROUND_SECONDS, ROUNDS, describe_header
from covey.wire.header import HEADER_BYTES, unpack

if TYPE_CHECKING:
    from covey.runtime.collectives.call_log import Call
    from covey.runtime.collectives.engine import Engine
    from covey.runtime.fault import Fault
    from covey.wire import messages
    from covey.wire.header import TransferHeader

COMPARE_SECONDS: Final = (ROUNDS + 1) * COMPARE_ROUND_SECONDS
"""The longest time that a comparison of calls takes."""


class Suspicion(EnginePart):
    """A loss that was reported to a group, until it is known whether a mismatch is behind it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._hearing = Hearing([rank for rank in engine.ranks if rank != engine.rank])
        self._found: dict[tuple[Rank, int], TransferHeader] = {}
        """By rank and operation: the headers that lanes have shown."""
        self._has_looked = False

    @property
    def is_open(self) -> bool:
        """Whether a loss was noted that has not been decided on."""
        return self._fault is not None and not self.engine.failure.has_happened

    def note(self, fault: Fault) -> None:
        """Record a loss; the first one counts. On any thread."""
        with self._lock:
            self._fault = self._fault or fault

    def heard(self, rank: Rank, message: messages.Revoke) -> None:
        """Note the testimony of a rank that reports a loss, and compare. On the control loop."""
        engine, log = self.engine, self.engine.stalls.call_log
        calls = {}
        for run in message.calls:
            for sequence in range(run.first, run.first + run.count):
                calls[sequence] = run.fingerprint
                log.heard(rank, sequence, sequence, run.fingerprint, run.call)
        for found in message.found:
            if found.rank in engine.ranks and found.rank != engine.rank and not log.knows(found.rank, found.sequence):
                log.heard(found.rank, found.sequence, found.sequence, found.fingerprint, found.call)
        with self._lock:
            self._hearing.heard(rank, calls, [(found.sequence, found.fingerprint) for found in message.found])
        if not engine.failure.has_happened or engine.failure.may_be_mismatch:
            self._compare()

    def settle(self) -> None:
        """Look, and end the group with the loss, unless calls differ: a comparison ends it then.

        An operation that has begun meanwhile does it instead. On the control loop, or on the thread whose operation
        has just ended.
        """
        engine, fault = self.engine, self._fault
        if fault is None:
            return
        engine.attempt.stop()
        if engine.operation.is_running:
            engine.failure.interrupt(fault)
        elif not self.search(owns_lanes=True):
            engine.failure.declare(fault)

    def weigh(self) -> None:
        """End the group with the mismatch behind the loss, or with the loss. On the thread that runs the operation."""
        assert self._fault is not None
        if not self.search(owns_lanes=True):
            self.engine.failure.declare(self._fault)  # which tells the others what this rank knows
        self._await_verdict()

    def reconsider(self, call: Call | None = None) -> None:
        """Look for a mismatch behind the loss that ended the group, before the program is told of the loss.

        `call` is what this rank is about to run; without it, the caller is the thread that runs the operation.
        """
        self.search(call, owns_lanes=call is None or not self.engine.operation.is_running)
        self._await_verdict()

    def search(self, call: Call | None = None, *, owns_lanes: bool) -> bool:
        """Look for calls that differ, and start a comparison; tell whether one is under way.

        `call` is what this rank is about to run. If this thread `owns_lanes` it looks at them; nothing can be received
        from them afterwards.
        """
        engine, log = self.engine, self.engine.stalls.call_log
        if engine.atomic is not None:
            return False
        if owns_lanes:
            self.look()
        calls = {sequence: mine.fingerprint for sequence, mine in log.recent()}
        if call is not None:
            calls[log.entered + 1] = call.fingerprint
        with self._lock:
            found = sorted(self._found.items())
            proven = [(sequence, header.fingerprint) for (_, sequence), header in found]
            self._hearing.looked(calls, proven, time.monotonic())
        witnesses = self._witnesses(engine)
        for (rank, _), header in found:
            engine.stalls.recognise(rank, header, call, is_here=rank in witnesses)
        return self._compare(call)

    def look(self) -> None:
        """Note the first header of each lane that was not read. On a thread to which the lanes belong; see above."""
        engine = self.engine
        lanes: dict[Any, Any] = engine.node.lanes.arrived(engine.id, "collectives") if engine.node is not None else {}
        with self._lock:
            arrived = {engine.roster.rank_of.get(seat, NO_RANK): _peek(lane) for seat, lane in lanes.items()}
            arrived |= engine.attempt.read_headers()
            for rank, data in arrived.items():
                if rank >= 0 and (header := _header(data, engine)) is not None:
                    self._found[rank, header.sequence] = header
            self._has_looked = True

    def testimony(self) -> tuple[tuple[messages.CallRun, ...], tuple[messages.FoundCall, ...]]:
        """Return the last calls of this rank, and what it has found of others: first of those that are gone."""
        from covey.wire import messages  # slow to load; a program that joins a run has it already

        engine = self.engine
        if not self._has_looked:
            return (), ()
        here = set(engine.live)
        with self._lock:
            found = sorted(self._found.items(), key=lambda item: (item[0][0] in here, item[0]))
        told = [
            messages.FoundCall(rank, sequence, header.fingerprint, describe_header(header))
            for (rank, sequence), header in found
        ]
        return engine.stalls.recent_runs(), tuple(told[: messages.FOUND_LIMIT])

    def _compare(self, call: Call | None = None) -> bool:
        """Start a comparison if calls are known to differ; tell whether one is under way."""
        stalls, log = self.engine.stalls, self.engine.stalls.call_log
        differs_at = self._hearing.differs_at
        if differs_at and not stalls.is_comparing:
            if call is not None and differs_at == log.entered + 1:
                log.enter(differs_at, call)
            stalls.compare(differs_at)
        return stalls.compare_known(call)

    def _await_verdict(self) -> None:
        """Wait until all ranks have testified or are gone, and then for the end of a comparison if calls differ."""
        engine = self.engine
        failure, stalls, await_news = engine.failure, engine.stalls, engine.lane_trouble.await_news
        await_news(TESTIMONY_PATIENCE, lambda: failure.is_mismatch or stalls.is_comparing or self._is_over(engine))
        if stalls.is_comparing:
            await_news(COMPARE_SECONDS, lambda: failure.is_mismatch)
            stalls.conclude()  # in case the control loop is held up

    def _is_over(self, engine: Engine) -> bool:
        with self._lock:
            for rank in self._hearing.waiting - self._witnesses(engine):
                self._hearing.gone(rank)
            self._hearing.tick(time.monotonic())
            return self._hearing.is_over

    def _witnesses(self, engine: Engine) -> set[Rank]:
        """Return the other ranks that can still be asked."""
        peers = engine.node.peers if engine.node is not None else {}
        others = (rank for rank in engine.live if rank != engine.rank and not engine.stalls.has_parted(rank))
        return {rank for rank in others if not peers[engine.members[rank]].has_left}


def _peek(lane: Any) -> bytes:
    """Return the first bytes that a lane has not read; none if another thread has just closed it."""
    try:
        return bytes(lane.peek())
    except (OSError, ValueError):
        return b""


def _header(data: bytes, engine: Engine) -> TransferHeader | None:
    """Return the header of a transfer of this group; None for other bytes, such as the middle of a payload."""
    if len(data) != HEADER_BYTES:
        return None
    try:
        header = unpack(data)
    except RemoteProtocolError:
        return None
    is_whole = header.pack() == data  # what is zero in every header is zero here
    return header if is_whole and header.group == engine.id and header.attempt == 0 else None
