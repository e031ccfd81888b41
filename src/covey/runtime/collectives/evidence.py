"""Look for a mismatch before reporting a loss.

A rank that only sends may return and exit before the other ranks notice that they called something else; they first
see that its process is gone. So a reported loss is only a suspicion. Before it ends the group, the rank looks at the
headers that its lanes still hold and at the last calls that the lost rank sent, and waits a moment for what the other
ranks have found. Groups that survive losses do not need this: they run the operation again.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from covey.base.errors import RemoteProtocolError
from covey.base.numbers import NO_RANK
from covey.runtime.collectives.part import EnginePart
from covey.runtime.collectives.stalls import ANSWER_SECONDS, ROUNDS
from covey.wire.header import HEADER_BYTES, unpack

if TYPE_CHECKING:
    from covey.base.numbers import Rank
    from covey.runtime.collectives.call_log import Call
    from covey.runtime.collectives.engine import Engine
    from covey.runtime.fault import Fault
    from covey.wire.header import Header

HEARING_SECONDS: Final = 0.4
"""How long a loss waits for ranks that may know of a mismatch, while one of them has not answered."""
COMPARE_SECONDS: Final = (ROUNDS + 1) * ANSWER_SECONDS
"""The longest time that a comparison of calls takes."""


class Suspicion(EnginePart):
    """A loss that was reported to a group, until it is known whether a mismatch is behind it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._reported: set[Rank] = set()
        """Ranks that have ended the group with a loss, and so found no mismatch."""

    @property
    def is_open(self) -> bool:
        """Whether a loss was noted that has not been decided on."""
        return self._fault is not None and not self.engine.failure.has_happened

    def note(self, fault: Fault) -> None:
        """Record a loss; the first one counts. On any thread."""
        with self._lock:
            self._fault = self._fault or fault

    def note_report(self, rank: Rank) -> None:
        """Record that a rank has ended the group with a loss."""
        self._reported.add(rank)

    def settle(self) -> None:
        """End the group with the loss, unless calls are being compared: the comparison ends it then."""
        if self._fault is not None:
            self.engine.failure.declare(self._fault)

    def weigh(self) -> None:
        """End the group with the mismatch behind the loss, or with the loss. On the thread that runs the operation."""
        engine, fault = self.engine, self._fault
        failure, await_news = engine.failure, engine.lane_trouble.await_news
        assert fault is not None
        if not self.search():
            failure.declare(fault)  # which tells the others that this rank found no mismatch
            await_news(HEARING_SECONDS, lambda: failure.is_mismatch or self._witnesses(engine) <= self._reported)
        if engine.stalls.is_comparing:
            await_news(COMPARE_SECONDS, lambda: failure.is_mismatch)
            engine.stalls.conclude()  # in case the control loop is held up

    def reconsider(self, call: Call | None = None) -> None:
        """Look for a mismatch behind the loss that ended the group, before the program is told of the loss.

        `call` is what this rank is about to run. On the thread that runs the operation.
        """
        engine = self.engine
        if self.search(call):
            engine.lane_trouble.await_news(COMPARE_SECONDS, lambda: engine.failure.is_mismatch)
            engine.stalls.conclude()  # in case the control loop is held up

    def search(self, call: Call | None = None) -> bool:
        """Look for calls of other ranks that differ, and start a comparison; tell whether one is under way.

        `call` is what this rank is about to run. Nothing can be received from the lanes afterwards.
        """
        engine = self.engine
        lanes = engine.node.lanes.arrived(engine.id, "collectives") if engine.node is not None else {}
        arrived = {engine.roster.rank_of.get(seat, NO_RANK): lane.peek() for seat, lane in lanes.items()}
        arrived |= engine.attempt.read_headers()
        for rank, data in sorted(arrived.items()):
            if rank >= 0 and (header := _header(data, engine)) is not None:
                engine.stalls.recognise(rank, header, call, is_here=rank in self._witnesses(engine))
        return engine.stalls.compare_known(call)

    def _witnesses(self, engine: Engine) -> set[Rank]:
        """Return the other ranks that can still be asked."""
        peers = engine.node.peers if engine.node is not None else {}
        others = (rank for rank in engine.live if rank != engine.rank and not engine.stalls.has_parted(rank))
        return {rank for rank in others if not peers[engine.members[rank]].has_left}


def _header(data: bytes, engine: Engine) -> Header | None:
    """Return the header of a transfer of this group; None for other bytes, such as the middle of a payload."""
    if len(data) != HEADER_BYTES:
        return None
    try:
        header = unpack(data)
    except RemoteProtocolError:
        return None
    is_whole = header.pack() == data  # what is zero in every header is zero here
    return header if is_whole and header.group == engine.id and header.attempt == 0 else None
