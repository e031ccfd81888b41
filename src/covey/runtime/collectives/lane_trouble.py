"""What is wrong when a lane of a running operation ends, or carries other bytes than the plan says.

The methods run on the thread that runs the operation. Each ends the group with a fault and raises its error; a lane
that ends in a group that survives losses only stops the attempt.
"""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING, Final, NoReturn

from covey.base.errors import RemoteProtocolError
from covey.base.operations import operation_name
from covey.runtime.collectives.evidence import COMPARE_SECONDS
from covey.runtime.collectives.part import EnginePart
from covey.runtime.fault import Fault
from covey.wire.header import unpack

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.base.errors import ConnectError
    from covey.base.numbers import Rank
    from covey.net.lanes.lane import LaneClosedError
    from covey.runtime.collectives.attempt import Attempt

CAUSE_SECONDS: Final = 0.2
"""How long a rank whose lane broke waits for a message that says why."""
NEWS_CHECK_EVERY: Final = 0.01
"""How often a thread that waits for news checks whether it has come."""


class LaneTrouble(EnginePart):
    """Turns what goes wrong on the lanes of a group into faults."""

    def lane_closed(self, attempt: Attempt, rank: Rank, error: LaneClosedError | ConnectError) -> None:
        """Raise the error for the lane to a rank, which has ended."""
        engine = self.engine
        if engine.atomic is not None:
            engine.atomic.disturbed(attempt, f"the lane to {engine.roster.describe((rank,))}: {error}")
        engine.suspicion.note(Fault("PeerLostError", self.why_closed(rank, str(error)), (rank,)))
        engine.failure.check()

    def why_closed(self, rank: Rank, symptom: str) -> str:
        """Wait a moment for a message that says why a lane ended; return the reason, or what is known without one."""
        engine = self.engine
        peer = engine.roster.peer(rank)
        assert peer is not None
        self.await_news(
            CAUSE_SECONDS,
            lambda: (
                engine.failure.has_happened
                or bool(peer.failure)
                or peer.has_left
                or peer.is_excluded
                or engine.stalls.has_parted(rank)
            ),
        )
        why = f"closed the group, or the connection broke ({symptom})"
        if peer.failure or peer.is_excluded:
            why = peer.how_it_went()
        elif peer.has_left:
            why = "left the group"
        return f"{engine.roster.describe((rank,))} {why}"

    def await_news(self, seconds: float, has_come: Callable[[], bool]) -> None:
        """Return once `has_come()` is true, or after `seconds`."""
        bell = self.engine.bell
        poll = select.poll()
        if bell.fd >= 0:
            poll.register(bell.fd, select.POLLIN)
        until, looks = time.monotonic() + seconds, seconds / NEWS_CHECK_EVERY
        # `looks`: if this process is suspended meanwhile, its control loop must get time to read the news afterwards.
        while not has_come() and (time.monotonic() < until or looks > 0):
            if poll.poll(1e3 * NEWS_CHECK_EVERY):
                poll = (
                    select.poll()
                )  # it has rung, and rings until it is hushed: the control loop needs the interpreter
            looks -= 1

    def wrong_header(self, attempt: Attempt, rank: Rank, expected: bytes, header: bytes) -> None:
        """Raise the error for a rank that sent another transfer than the plan says."""
        engine = self.engine
        failure, stalls = engine.failure, engine.stalls
        try:
            theirs, ours = unpack(header), unpack(expected)
        except RemoteProtocolError as error:
            failure.declare(Fault("RemoteProtocolError", f"rank {rank} sent {error}", (rank,)))
            attempt.check()
            raise
        stalls.announce(min(theirs.sequence, ours.sequence))
        self.await_news(COMPARE_SECONDS, lambda: failure.has_happened or attempt.is_stopped)
        stalls.recognise(rank, theirs, None, is_here=False)  # it may have exited, or be slow to answer
        if stalls.compare_known():
            self.await_news(
                COMPARE_SECONDS,
                lambda: (
                    (failure.has_happened and not failure.may_be_mismatch) or (engine.survives and attempt.is_stopped)
                ),
            )
        if engine.survives or stalls.is_comparing:
            attempt.check()
        # Another header than the plan's is a mismatch also if its sender is lost by now.
        text = (
            f"in group {engine.name!r}, rank {engine.rank} is in {engine.operation.call.text} as its operation "
            f"{ours.sequence}, but rank {rank} sent {theirs.nbytes} bytes of {operation_name(theirs.operation)} as its "
            f"operation {theirs.sequence}"
        )
        is_same = theirs.sequence == ours.sequence
        failure.declare(Fault("MismatchError", text, (rank,)), differs_at=ours.sequence if is_same else 0)
        attempt.check()

    def reject(self, attempt: Attempt, kind: str, rank: Rank, what: str) -> NoReturn:
        """End the group with an error of class `kind` because of `what` a rank sent, and raise it."""
        engine = self.engine
        text = f"{engine.roster.describe((rank,))} sent {what} (in {engine.operation.describe()})"
        engine.failure.declare(Fault(kind, text, (rank,)))
        attempt.check()
        raise RemoteProtocolError(text)  # if the group ended for another reason
