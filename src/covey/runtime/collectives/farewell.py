"""The last comparison of a group's calls, before a rank closes the group: the shell around `proto.call_inquiries`.

Groups that survive losses do not need it: each of their operations ends with a barrier of all ranks.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from covey.base.operations import OPERATIONS
from covey.runtime.collectives.evidence import COMPARE_SECONDS
from covey.runtime.collectives.part import EnginePart

if TYPE_CHECKING:
    from covey.base.numbers import Rank
    from covey.proto.call_inquiries import Parting
    from covey.runtime.collectives.engine import Engine

PROVING: Final = frozenset(
    OPERATIONS.index(name)
    for name in ("all_reduce", "all_gather", "barrier", "all_gather_object", "split", "sync_gradients")
)
"""Operations in which every rank hears from every other, at least by way of others: all called the same."""
DEPARTURE_CHECK_EVERY: Final = 0.02
"""How often a rank that waits looks whether others are gone."""


class Farewell(EnginePart):
    """Compares the calls of this rank with those of the others, once, when the program closes the group."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._lock = threading.Lock()
        self._has_begun = False

    def confirm(self) -> None:
        """Wait until the others have confirmed calls that are in doubt; if calls differ, the group ends with that.

        Returns within some seconds, whatever the others do. On the thread that closes the group, before the group is
        closed; a second call does nothing.
        """
        engine = self.engine
        with self._lock:
            is_first, self._has_begun = not self._has_begun, True
        if not is_first or engine.node is None or engine.atomic is not None or engine.is_closed or engine.has_pending:
            return
        engine.stalls.part(in_order=not engine.failure.has_happened)
        if self._may_differ(engine):
            self._compare(engine)

    def _may_differ(self, engine: Engine) -> bool:
        return not engine.failure.has_happened or engine.failure.may_be_mismatch

    def _compare(self, engine: Engine) -> None:
        from covey.proto.call_inquiries import Parting  # slow to load, and needed once

        stalls, log = engine.stalls, engine.stalls.call_log
        recent = log.recent()
        others = [rank for rank in engine.ranks if rank != engine.rank]
        before = {rank: log.words[rank] for rank in others}
        is_in_doubt = any(call.operation not in PROVING for _, call in recent)
        calls = {sequence: call.fingerprint for sequence, call in recent}
        core = Parting(calls, log.entered, others, time.monotonic(), is_in_doubt=is_in_doubt)
        while True:
            stalls.reported.clear()
            for rank in others:
                self._tell(core, rank, before[rank])
            for ask in core.effects():
                stalls.ask(ask.ranks, log.entered)
            if core.is_over or stalls.is_comparing or not self._may_differ(engine):
                break
            stalls.reported.wait(max(0.0, min(DEPARTURE_CHECK_EVERY, core.next_deadline() - time.monotonic())))
            core.tick(time.monotonic())
        if core.differs_at:
            stalls.compare(core.differs_at)
        if stalls.is_comparing:
            engine.lane_trouble.await_news(COMPARE_SECONDS, lambda: engine.failure.is_mismatch)
            stalls.conclude()  # in case the control loop is held up

    def _tell(self, core: Parting, rank: Rank, before: int) -> None:
        """Tell the core what is known of a rank, which had sent `before` reports when it was asked."""
        engine = self.engine
        log, peer = engine.stalls.call_log, engine.roster.peer(rank)
        has_parted, has_answered = engine.stalls.has_parted(rank), log.words[rank] > before
        entered, calls = log.reported(rank)  # read last: the control loop notes calls before it says what they mean
        if has_parted:
            core.parted(rank, entered, calls, in_order=engine.stalls.has_parted_in_order(rank))
        elif peer is None or peer.failure or peer.is_gone:
            core.gone(rank)
        elif has_answered:
            core.answered(rank, entered, calls)
