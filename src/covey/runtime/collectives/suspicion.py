"""Look for a mismatch before reporting a loss: the shell around `proto.call_inquiries`.

A rank that only sends may be killed before the other ranks notice that they called something else; they first see that
its process is gone. So a reported loss is only a suspicion. Before the group ends with it, each rank looks at the
headers that its lanes hold (`evidence`) and tells the others what it found and what it called; it decides once all
have. Groups that survive losses do not need this: they run the operation again.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NoReturn

from covey.proto.call_inquiries import TESTIMONY_PATIENCE, Hearing
from covey.runtime.collectives.stalls import COMPARE_SECONDS

if TYPE_CHECKING:
    from covey.base.numbers import Rank
    from covey.runtime.bell import Bell
    from covey.runtime.collectives.call_log import Call
    from covey.runtime.collectives.evidence import CallEvidence
    from covey.runtime.collectives.failure import Failure
    from covey.runtime.collectives.operation import CurrentAttempt, CurrentOperation
    from covey.runtime.collectives.roster import GroupRoster
    from covey.runtime.collectives.stalls import StallDiagnosis
    from covey.runtime.fault import Fault
    from covey.wire import messages


class Suspicion:
    """A loss that was reported to a group, until it is known whether a mismatch is behind it."""

    def __init__(
        self,
        roster: GroupRoster,
        operation: CurrentOperation,
        attempt: CurrentAttempt,
        evidence: CallEvidence,
        failure: Failure,
        stalls: StallDiagnosis,
        bell: Bell,
        *,
        survives: bool,
    ) -> None:
        self._roster, self._operation, self._attempt, self._bell = roster, operation, attempt, bell
        self._evidence, self._failure, self._stalls, self._survives = evidence, failure, stalls, survives
        self._log = stalls.call_log
        self._lock = threading.Lock()
        self.fault: Fault | None = None
        """The loss that was noted first."""
        self._hearing = Hearing([rank for rank in roster.ranks if rank != roster.rank])

    @property
    def is_open(self) -> bool:
        """Whether a loss was noted that has not been decided on."""
        return self.fault is not None and not self._failure.has_happened

    def check(self) -> None:
        """Raise the group's error if it has ended, or ends now with what is suspected. On the operation's thread."""
        if self.is_open:
            self._weigh()
        elif self._failure.may_be_mismatch:  # the loss was declared just before the operation was known to run
            self._reconsider()
        self._failure.raise_fault()

    def refuse(self, call: Call) -> NoReturn:
        """Raise the error that keeps an operation from running in a group that is closed or has ended."""
        if self._failure.may_be_mismatch:
            self._reconsider(call)
        self._failure.refuse(call)

    def note(self, fault: Fault) -> None:
        """Record a loss; the first one counts. On any thread."""
        with self._lock:
            self.fault = self.fault or fault

    def reported(self, fault: Fault) -> None:
        """Record a loss in a group that ends with its first one. The thread that runs an operation decides."""
        self.note(fault)
        if self._operation.is_running:
            self._failure.interrupt(fault)
        else:
            self.settle()

    def heard(self, rank: Rank, message: messages.Revoke) -> None:
        """Note the evidence of a rank that reports a loss, and compare. On the control loop."""
        log, me = self._log, self._roster.rank
        calls = {}
        for run in message.calls:
            for sequence in range(run.first, run.first + run.count):
                calls[sequence] = run.fingerprint
                log.heard(rank, sequence, sequence, run.fingerprint, run.call)
        for found in message.found:
            if found.rank in self._roster.ranks and found.rank != me and not log.knows(found.rank, found.sequence):
                log.heard(found.rank, found.sequence, found.sequence, found.fingerprint, found.call)
        with self._lock:
            self._hearing.heard(rank, calls, [(found.sequence, found.fingerprint) for found in message.found])
        if not self._failure.has_happened or self._failure.may_be_mismatch:
            self._compare()

    def settle(self) -> None:
        """Look, and end the group with the loss, unless calls differ: a comparison ends it then.

        An operation that has begun meanwhile does it instead. On the control loop, or on the thread whose operation
        has just ended.
        """
        fault = self.fault
        if fault is None:
            return
        self._attempt.stop()
        if self._operation.is_running:
            self._failure.interrupt(fault)
        elif not self._search(owns_lanes=True):
            self._failure.declare(fault)

    def _weigh(self) -> None:
        """End the group with the mismatch behind the loss, or with the loss. On the thread that runs the operation."""
        assert self.fault is not None
        if not self._search(owns_lanes=True):
            self._failure.declare(self.fault)  # which tells the others what this rank knows
        self._await_verdict()

    def _reconsider(self, call: Call | None = None) -> None:
        """Look for a mismatch behind the loss that ended the group, before the program is told of the loss.

        `call` is what this rank is about to run; without it, the caller is the thread that runs the operation.
        """
        self._search(call, owns_lanes=call is None or not self._operation.is_running)
        self._await_verdict()

    def _search(self, call: Call | None = None, *, owns_lanes: bool) -> bool:
        """Look for calls that differ, and start a comparison; tell whether one is under way.

        `call` is what this rank is about to run. If this thread `owns_lanes` it looks at them; nothing can be received
        from them afterwards.
        """
        if self._survives:
            return False
        if owns_lanes:
            self._evidence.look()
        calls = {sequence: mine.fingerprint for sequence, mine in self._log.recent()}
        if call is not None:
            calls[self._log.entered + 1] = call.fingerprint
        found = self._evidence.found()
        proven = [(header.sequence, header.fingerprint) for _, header in found]
        with self._lock:
            self._hearing.looked(calls, proven, time.monotonic())
        witnesses = self._witnesses()
        for rank, header in found:
            self._stalls.recognise(rank, header, call, is_here=rank in witnesses)
        return self._compare(call)

    def _compare(self, call: Call | None = None) -> bool:
        """Start a comparison if calls are known to differ; tell whether one is under way."""
        stalls, log = self._stalls, self._log
        differs_at = self._hearing.differs_at
        if differs_at and not stalls.is_comparing:
            if call is not None and differs_at == log.entered + 1:
                log.enter(differs_at, call)
            stalls.compare(differs_at)
        return stalls.compare_known(call)

    def _await_verdict(self) -> None:
        """Wait until all ranks have testified or are gone, and then for the end of a comparison if calls differ."""
        failure, stalls, bell = self._failure, self._stalls, self._bell
        bell.await_news(TESTIMONY_PATIENCE, lambda: failure.is_mismatch or stalls.is_comparing or self._is_over())
        if stalls.is_comparing:
            bell.await_news(COMPARE_SECONDS, lambda: failure.is_mismatch)
            stalls.conclude()  # in case the control loop is held up

    def _is_over(self) -> bool:
        with self._lock:
            for rank in self._hearing.waiting - self._witnesses():
                self._hearing.gone(rank)
            self._hearing.tick(time.monotonic())
            return self._hearing.is_over

    def _witnesses(self) -> set[Rank]:
        """Return the other ranks that can still be asked."""
        others = (rank for rank in self._attempt.live if not self._stalls.has_parted(rank))
        return {rank for rank in others if (peer := self._roster.peer(rank)) is not None and not peer.has_left}
