"""Evidence of a mismatch comes before evidence of a loss.

A rank that only sends may return, and exit, before the others notice that they called something else. What they see
first is that it is gone. So a loss that is heard of is only a suspicion: before the group ends with it, the rank looks
at the headers that its lanes still hold, at what the lost rank said of its last calls, and for a moment at what the
other ranks have to say. Groups that go on without a lost rank need none of this: there the operation is tried again.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Final

from covey.base.errors import RemoteProtocolError
from covey.runtime.collectives.stalls import ANSWER_SECONDS, ROUNDS
from covey.wire.header import HEADER_BYTES, unpack

if TYPE_CHECKING:
    from covey.runtime.collectives.call_log import Call
    from covey.runtime.collectives.engine import Engine
    from covey.runtime.fault import Fault
    from covey.wire.header import Header

HEARING_SECONDS: Final = 0.4
"""How long a loss waits for ranks that may know better, as long as one of them has said nothing."""
COMPARE_SECONDS: Final = (ROUNDS + 1) * ANSWER_SECONDS
"""A comparison of calls has ended after this."""


class Suspicion:
    """The loss that a group was told of, if any, until it is known whether it is the reason to tell."""

    def __init__(self, engine: Engine) -> None:
        self._owner = weakref.ref(engine)  # groups that are dropped go at once
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._spoken: set[int] = set()
        """Ranks that have ended the group, and so found nothing else."""

    @property
    def _engine(self) -> Engine:
        engine = self._owner()
        assert engine is not None
        return engine

    @property
    def is_open(self) -> bool:
        """Whether there is a loss that was not decided on."""
        return self._fault is not None and not self._engine.has_failed

    def note(self, fault: Fault) -> None:
        """Take note of a loss; the first one counts. On any thread."""
        with self._lock:
            self._fault = self._fault or fault

    def spoke(self, rank: int) -> None:
        """A rank has told why the group ended for it."""
        self._spoken.add(rank)

    def settle(self) -> None:
        """End the group with the loss, unless calls are being compared: that ends it, too."""
        if self._fault is not None:
            self._engine.fail(self._fault)

    def weigh(self) -> None:
        """End the group with what the loss is evidence of. On the thread that runs the operation."""
        engine, fault = self._engine, self._fault
        assert fault is not None
        if not self.search():
            engine.fail(fault)  # which tells the others that there is nothing here
            engine.await_news(HEARING_SECONDS, lambda: engine.is_mismatched or self._witnesses(engine) <= self._spoken)
        if engine.stalls.is_comparing:
            engine.await_news(COMPARE_SECONDS, lambda: engine.is_mismatched)
            engine.stalls.conclude()  # if the control loop stands still

    def search(self, call: Call | None = None) -> bool:
        """Look for calls that differ from ours, and have them compared; tell whether there are any.

        `call` is what this rank is about to do. Only for lanes that nothing is received from any more: looking may use
        them up.
        """
        engine = self._engine
        lanes = engine.node.lanes.arrived(engine.id, "collectives") if engine.node is not None else {}
        for seat, lane in sorted(lanes.items()):
            rank = engine.ranks_by_member.get(seat, -1)
            if rank >= 0 and (header := _header(lane.peek(), engine)) is not None:
                engine.stalls.recognise(rank, header, call, is_here=rank in self._witnesses(engine))
        return engine.stalls.compare_known(call)

    def _witnesses(self, engine: Engine) -> set[int]:
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
