"""What a rank does when its operation stalls, or a lane of it ends or carries other bytes than the plan says.

The methods run on the thread that runs the operation. A stall is announced to the other ranks, then warned about, and
ends the group at the deadline. The other troubles end it with a fault, and raise its error; a lane that ends in a group
that survives losses only stops the attempt.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

from covey.base.errors import RemoteProtocolError
from covey.base.numbers import operation_name
from covey.runtime.collectives.stalls import COMPARE_ROUND_SECONDS, COMPARE_SECONDS
from covey.runtime.fault import Fault
from covey.wire.header import unpack

if TYPE_CHECKING:
    from covey.base.errors import ConnectError
    from covey.base.numbers import Rank
    from covey.net.lanes.lane import LaneClosedError
    from covey.runtime.bell import Bell
    from covey.runtime.collectives.failure import Failure
    from covey.runtime.collectives.operation import CurrentOperation
    from covey.runtime.collectives.roster import GroupFacts, GroupRoster
    from covey.runtime.collectives.stalls import StallDiagnosis
    from covey.runtime.collectives.suspicion import Suspicion

logger = logging.getLogger("covey")

ANNOUNCE_SECONDS: Final = 0.2
"""After a stall of this length a rank asks the others which operation they are in."""
WAKE_RANKS_SECONDS: Final = 1.0
"""How long ranks whose links are idle have to answer: a link needs a handshake to wake."""


class TroubledAttempt(Protocol):
    """The attempt that has trouble."""

    number: int
    is_stopped: bool

    def check(self) -> None:
        """Raise if it must end."""


class OperationTrouble:
    """Turns what goes wrong in the operations of a group into warnings and faults."""

    def __init__(
        self,
        facts: GroupFacts,
        roster: GroupRoster,
        operation: CurrentOperation,
        failure: Failure,
        stalls: StallDiagnosis,
        suspicion: Suspicion,
        bell: Bell,
    ) -> None:
        self._facts, self._roster, self._operation, self._bell = facts, roster, operation, bell
        self._failure, self._stalls, self._suspicion = failure, stalls, suspicion

    def check(self) -> None:
        """Raise the group's error if it has ended, or ends now with what is suspected."""
        self._suspicion.check()

    # Stalls

    def stalled(self, attempt: TroubledAttempt, since: float, waiting_for: tuple[Rank, ...]) -> float:
        """Announce the stall or warn about it when it is time to; return when to call this again.

        Nothing has moved since `since`. Raises DeadlineError if the deadline has passed.
        """
        now, operation, stalls = time.monotonic(), self._operation, self._stalls
        if now >= operation.deadline:
            self._time_out(attempt, waiting_for)
        if not operation.is_announced and now >= since + ANNOUNCE_SECONDS:
            operation.is_announced = True
            stalls.announce(operation.sequence, wakes=False)
            if operation.warn_at:  # this process itself was stopped: the others need time to answer
                operation.warn_at = max(operation.warn_at, now + COMPARE_ROUND_SECONDS)
        if not operation.warn_at:
            operation.warn_at, operation.are_all_asked = now + self._facts.config.warn_after, False
        elif now >= operation.warn_at and self._facts.is_sparse and not operation.are_all_asked:
            operation.are_all_asked = True
            stalls.announce(operation.sequence)
            operation.warn_at = now + WAKE_RANKS_SECONDS
        elif now >= operation.warn_at:
            operation.are_all_asked = False
            operation.warn_at = now + self._facts.config.warn_after
            waited = now - (operation.deadline - operation.timeout)
            late = stalls.late(waiting_for)
            logger.warning("rank %d has waited %.0f s in %s: %s %s", self._roster.rank, waited, operation.describe(),
                           self._roster.describe(late), stalls.excuse(late))  # fmt: skip
        moments = (operation.deadline, operation.warn_at, since + ANNOUNCE_SECONDS)
        return min(moments[:2] if operation.is_announced else moments)

    def check_deadline(self, trouble: str) -> None:
        """Fail the group if the deadline has passed; `trouble` says what keeps the operation from finishing."""
        operation = self._operation
        if time.monotonic() >= operation.deadline:
            if self._facts.is_sparse:
                self._ask_all()
            late = self._stalls.late(())
            names = f"{self._roster.describe(late)} {self._stalls.excuse(late)}; " if late else ""
            text = (
                f"{operation.describe()} did not finish within the timeout of {operation.timeout:g} s; "
                f"{names}the last problem was: {trouble}"
            )
            self._failure.declare(Fault("DeadlineError", text, late))

    def _time_out(self, attempt: TroubledAttempt, waiting_for: tuple[Rank, ...]) -> None:
        """Fail the group with a DeadlineError that names the late ranks."""
        operation = self._operation
        self._ask_all()  # a rank that could not answer before may answer now, and then is not late
        attempt.check()
        late = self._stalls.late(waiting_for)
        text = (
            f"{operation.describe()} did not finish within the timeout of {operation.timeout:g} s; "
            f"{self._roster.describe(late)} {self._stalls.excuse(late)}"
        )
        self._failure.declare(Fault("DeadlineError", text, late))
        attempt.check()

    def _ask_all(self) -> None:
        """Ask all ranks where they are, and give them time to answer."""
        self._stalls.announce(self._operation.sequence)
        seconds = WAKE_RANKS_SECONDS if self._facts.is_sparse else COMPARE_ROUND_SECONDS
        self._bell.await_news(seconds, lambda: self._failure.has_happened)

    # Lanes

    def lane_closed(self, attempt: TroubledAttempt, rank: Rank, error: LaneClosedError | ConnectError) -> None:
        """Raise the error for the lane to a rank, which has ended."""
        failure = self._failure
        if (survivors := failure.survivors()) is not None:
            survivors.disturbed(attempt.number, f"the lane to {self._roster.describe((rank,))}: {error}")
        self._suspicion.note(Fault("PeerLostError", failure.why_closed(rank, str(error)), (rank,)))
        self._suspicion.check()

    def wrong_header(self, attempt: TroubledAttempt, rank: Rank, expected: bytes, header: bytes) -> None:
        """Raise the error for a rank that sent another transfer than the plan says."""
        failure, stalls, survives = self._failure, self._stalls, self._facts.survives
        try:
            theirs, ours = unpack(header), unpack(expected)
        except RemoteProtocolError as error:
            failure.declare(Fault("RemoteProtocolError", f"rank {rank} sent {error}", (rank,)))
            attempt.check()
            raise
        stalls.announce(min(theirs.sequence, ours.sequence))
        self._bell.await_news(COMPARE_SECONDS, lambda: failure.has_happened or attempt.is_stopped)
        stalls.recognise(rank, theirs, None, is_here=False)  # it may have exited, or be slow to answer
        if stalls.compare_known():
            self._bell.await_news(
                COMPARE_SECONDS,
                lambda: (failure.has_happened and not failure.may_be_mismatch) or (survives and attempt.is_stopped),
            )
        if survives or stalls.is_comparing:
            attempt.check()
        # Another header than the plan's is a mismatch also if its sender is lost by now.
        text = (
            f"in group {self._facts.name!r}, rank {self._roster.rank} is in {self._operation.call.text} as its "
            f"operation {ours.sequence}, but rank {rank} sent {theirs.nbytes} bytes of "
            f"{operation_name(theirs.operation)} as its operation {theirs.sequence}"
        )
        is_same = theirs.sequence == ours.sequence
        failure.declare(Fault("MismatchError", text, (rank,)), differs_at=ours.sequence if is_same else 0)
        attempt.check()

    def reject(self, attempt: TroubledAttempt, kind: str, rank: Rank, what: str) -> NoReturn:
        """End the group with an error of class `kind` because of `what` a rank sent, and raise it."""
        text = f"{self._roster.describe((rank,))} sent {what} (in {self._operation.describe()})"
        self._failure.declare(Fault(kind, text, (rank,)))
        attempt.check()
        raise RemoteProtocolError(text)  # if the group ended for another reason
