"""The end of a group on this rank: its last calls are compared with those of the others, and it is closed once.

The comparison is the shell around `proto.call_inquiries`. Groups that survive losses do not need it: each of their
operations ends with a barrier of all ranks.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

from covey.base.numbers import OPERATIONS, Rank
from covey.runtime import loop as control
from covey.runtime.collectives.failure import CAUSE_SECONDS
from covey.runtime.collectives.stalls import COMPARE_SECONDS

if TYPE_CHECKING:
    import queue
    from collections.abc import Callable

    from covey.base.numbers import Seat
    from covey.proto.call_inquiries import Parting
    from covey.runtime.bell import Bell
    from covey.runtime.collectives.evidence import CallEvidence
    from covey.runtime.collectives.failure import Failure
    from covey.runtime.collectives.operation import Backlog
    from covey.runtime.collectives.roster import GroupRoster
    from covey.runtime.collectives.stalls import StallDiagnosis
    from covey.runtime.counters import GroupCounters
    from covey.runtime.lanes.lanes import Lanes
    from covey.runtime.views.generation import Generation

PROVING: Final = frozenset(
    OPERATIONS.index(name)
    for name in ("all_reduce", "all_gather", "barrier", "all_gather_object", "split", "sync_gradients")
)
"""Operations in which every rank hears from every other, at least by way of others: all called the same."""
DEPARTURE_CHECK_EVERY: Final = 0.02
"""How often a rank that waits looks whether others are gone."""
MESSAGES_FLUSH_SECONDS: Final = 5.0
"""How long closing a group may take to deliver messages that were sent before."""
OPERATION_END_SECONDS: Final = 5.0
"""How long closing a group waits for a running operation to end."""
OTHER_CLOSE_SECONDS: Final = 30.0
"""How long a second call of `close` waits for the thread that closes the group: longer than that can take."""


class Farewell:
    """Compares the calls of this rank with those of the others, once, when the program closes the group."""

    def __init__(
        self, roster: GroupRoster, evidence: CallEvidence, failure: Failure, stalls: StallDiagnosis, bell: Bell
    ) -> None:
        self._roster, self._evidence, self._failure = roster, evidence, failure
        self._stalls, self._bell = stalls, bell
        self._lock = threading.Lock()
        self._has_begun = False

    def confirm(self, *, is_needed: bool) -> None:
        """Wait until the others have confirmed calls that are in doubt; if calls differ, the group ends with that.

        Returns within some seconds, whatever the others do. On the thread that closes the group, before the group is
        closed; a second call does nothing. It is not needed while operations are pending.
        """
        with self._lock:
            is_first, self._has_begun = not self._has_begun, True
        if is_first and is_needed and self._roster.node is not None:
            self._evidence.part(in_order=not self._failure.has_happened)
            if self._may_differ():
                self._compare()

    def _may_differ(self) -> bool:
        return not self._failure.has_happened or self._failure.may_be_mismatch

    def _compare(self) -> None:
        from covey.proto.call_inquiries import Parting  # slow to load, and needed once

        stalls, log = self._stalls, self._stalls.call_log
        recent = log.recent()
        others = [rank for rank in self._roster.ranks if rank != self._roster.rank]
        before = {rank: log.words[rank] for rank in others}
        is_in_doubt = any(call.operation not in PROVING for _, call in recent)
        calls = {sequence: call.fingerprint for sequence, call in recent}
        core = Parting(calls, log.entered, others, time.monotonic(), is_in_doubt=is_in_doubt)
        while True:
            stalls.reported.clear()
            for rank in others:
                self._tell(core, rank, before[rank])
            for ask in core.effects():
                stalls.ask([Rank(rank) for rank in ask.ranks], log.entered)
            if core.is_over or stalls.is_comparing or not self._may_differ():
                break
            stalls.reported.wait(max(0.0, min(DEPARTURE_CHECK_EVERY, core.next_deadline() - time.monotonic())))
            core.tick(time.monotonic())
        if core.differs_at:
            stalls.compare(core.differs_at)
        if stalls.is_comparing:
            self._bell.await_news(COMPARE_SECONDS, lambda: self._failure.is_mismatch)
            stalls.conclude()  # in case the control loop is held up

    def _tell(self, core: Parting, rank: Rank, before: int) -> None:
        """Tell the core what is known of a rank, which had sent `before` reports when it was asked."""
        log, peer = self._stalls.call_log, self._roster.peer(rank)
        has_parted, has_answered = self._stalls.has_parted(rank), log.words[rank] > before
        entered, calls = log.reported(rank)  # read last: the control loop notes calls before it says what they mean
        if has_parted:
            core.parted(rank, entered, calls, in_order=self._stalls.has_parted_in_order(rank))
        elif peer is None or peer.failure or peer.is_gone:
            core.gone(rank)
        elif has_answered:
            core.answered(rank, entered, calls)


class ClosedMessages(Protocol):
    """The messages of a group (`messages.routing`)."""

    lock: threading.Lock
    """Held while a messenger is made."""

    @property
    def is_driven_here(self) -> bool: ...


class Closure:
    """Lets one thread close a group, and others wait for it."""

    def __init__(self, failure: Failure, messages: ClosedMessages, backlog: Backlog) -> None:
        self._failure, self._messages, self._backlog = failure, messages, backlog
        self._freed = threading.Event()
        self._closer = 0
        """The thread that closes the group."""

    @property
    def is_done(self) -> bool:
        """Whether everything is freed."""
        return self._freed.is_set()

    def close(self, free: Callable[[], None]) -> None:
        """Call `free`, the first time. A second call waits for the first, unless the first waits for it."""
        with self._messages.lock:  # no messenger is made after this
            is_first, self._failure.is_closed = not self._failure.is_closed, True
            if is_first:
                self._closer = threading.get_ident()
        if is_first:
            try:
                free()
            finally:
                self._freed.set()
        elif not (
            self._closer == threading.get_ident() or self._backlog.is_on_this_thread or self._messages.is_driven_here
        ):  # the closing thread waits for callbacks on these threads
            self._freed.wait(OTHER_CLOSE_SECONDS)

    def forked(self) -> None:
        """End all waits in a forked child: the closing thread exists only in the parent."""
        self._freed = threading.Event()
        if self._failure.is_closed:
            self._freed.set()


def flush_control() -> None:
    """Wait until the control loop has sent what it was given: other ranks must read why lanes end before they do."""
    is_sent = threading.Event()
    control.soon(is_sent.set)
    is_sent.wait(CAUSE_SECONDS)


def dropped(
    lanes: Lanes | None,
    generation: Generation | None,
    group_id: int,
    members: tuple[Seat, ...],
    work_queue: queue.SimpleQueue[Any],
    counters: GroupCounters,
) -> None:
    """Free what a group held that was not closed. The garbage collector calls this on any thread: it takes no lock."""
    work_queue.put(None)
    counters.is_over = True
    if lanes is not None:
        control.soon(lanes.forget, group_id, 0)
    if generation is not None:
        control.soon(generation.drop, group_id, generation.ranks_of(members))
