"""Those of a group who carry out an attempt together. Operations are written for a circle: its ranks have no gaps.

A circle has the lanes of its attempt. It is used by the one thread that runs the operation; others only ever stop it.
"""

from __future__ import annotations

import functools
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from covey.base.errors import ClosedError, ConnectError, DeadlineError
from covey.net import tcp
from covey.net.descriptors import explain, is_exhausted
from covey.net.lanes.lane import LaneClosedError
from covey.plan import barrier
from covey.runtime.collectives.executor import execute
from covey.wire.header import CHANGE_PENDING, FLAGS_AT, MAGIC, PREFIX

if TYPE_CHECKING:
    import select
    from collections.abc import Sequence

    import numpy as np

    from covey.base.arithmetic import Reduction
    from covey.base.errors import MismatchError
    from covey.net.lanes.lane import Lane
    from covey.plan.moves import Plan
    from covey.runtime.bell import Bell
    from covey.runtime.collectives.engine import Engine
    from covey.runtime.collectives.undo_buffer import UndoBuffer

T = TypeVar("T")

CACHED_PREFIXES: Final = 4096
LANE_SECONDS: Final = 0.2
"""How long a lane is waited for at a time: then the group looks whether something is wrong."""
SCARCE_SECONDS: Final = 0.02
"""How long to wait for somebody to close a file, at a time, when no more can be opened."""
COMMIT_PHASE: Final = 0xFFFF
"""Of the barrier in which those who are complete find out that all are."""


class HaltedError(Exception):
    """The attempt was stopped, because a view is being agreed on. Never leaves covey."""


class DisagreedError(Exception):
    """All ranks find, each by itself, that they passed different things. Never leaves covey."""

    def __init__(self, error: MismatchError) -> None:
        super().__init__(str(error))
        self.error = error


class Attempt:
    """The ranks of one attempt."""

    def __init__(
        self, engine: Engine, number: int, ranks: tuple[int, ...], bell: Bell, undo: UndoBuffer | None
    ) -> None:
        """`ranks` of the group, in its order; `bell` wakes the one who sleeps; `kept` saves what is overwritten."""
        self._engine = weakref.ref(engine)  # which owns us: groups that are dropped go at once
        self.number, self.ranks = number, ranks
        self.rank, self.size = ranks.index(engine.rank), len(ranks)
        """The place of this member in the circle, and of how many."""
        self.prepared: dict[Any, Any] = {}
        """What repeated calls share."""
        self.undo = undo
        self.polls: dict[tuple[int, ...], select.poll] = {}
        self.wake_fd = -1
        self.is_stopped = self.knows_change = False
        self._bell = bell
        self._lanes: list[Lane | None] = [None] * self.size
        self._barrier = barrier.dissemination(self.rank, self.size)
        self._nothing = (engine.nothing,)
        self._prefixes: dict[tuple[int, int], bytes] = {}
        self._phase = 0

    @property
    def engine(self) -> Engine:
        """The group's."""
        engine = self._engine()
        assert engine is not None
        return engine

    def begin(self, *, knows_change: bool) -> None:
        """Begin the current operation of the group, or begin it again."""
        self._phase, self.knows_change = 0, knows_change

    def execute(
        self,
        plan: Plan,
        buffers: Sequence[np.ndarray[Any, Any]],
        reduction: Reduction | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        """Carry out one plan of the current operation; with `keeps`, the buffers are an argument of the user's."""
        phase = self._phase
        self._phase = phase + 1
        undo = self.undo if keeps else None
        if undo is not None:
            undo.make_room(buffers)
        engine = self.engine
        prefix = self._prefixes.get((engine.call.fingerprint, phase)) or self._prefix(engine, phase)
        engine.quiet.run(
            execute, plan, buffers, reduction, self.size, prefix, engine.sequence, self, engine.may_spin, undo
        )

    def commit(self) -> None:
        """Return once all of the circle have come here."""
        engine = self.engine
        prefix = self._prefixes.get((engine.call.fingerprint, COMMIT_PHASE)) or self._prefix(engine, COMMIT_PHASE)
        execute(self._barrier, self._nothing, None, self.size, prefix, engine.sequence, self, engine.may_spin)

    def _prefix(self, engine: Engine, phase: int) -> bytes:
        """Return how headers of the current operation start, and remember it."""
        call = engine.call
        if len(self._prefixes) > CACHED_PREFIXES:
            self._prefixes.clear()
        fields = (call.operation, call.dtype, phase, self.number, 0, engine.id, call.fingerprint)
        prefix = self._prefixes[call.fingerprint, phase] = PREFIX.pack(MAGIC, *fields)
        return prefix

    # Who is who

    def position(self, rank: int) -> int:
        """Return the place in the circle of a rank of the group that is in it."""
        return rank if self.size == self.engine.size else self.ranks.index(rank)

    def chosen(self, items: Sequence[T]) -> list[T]:
        """Return those items of a list by rank that belong to the circle."""
        return list(items) if self.size == self.engine.size else [items[rank] for rank in self.ranks]

    def by_rank(self, items: Sequence[T]) -> list[T | None]:
        """Return a list by rank of what the circle has, with None for the lost."""
        if self.size == self.engine.size:
            return list(items)
        places = dict(zip(self.ranks, items, strict=True))
        return [places.get(rank) for rank in self.engine.ranks]

    @functools.cached_property
    def lane_family(self) -> str:
        """ "ring" if by the host map all pairs of the circle share memory, else "stream": the same on all ranks."""
        kinds = {self.engine.lane_kind(rank) for rank in self.ranks if rank != self.engine.rank}
        return "ring" if kinds <= {"shm", "memory"} else "stream"

    def open_kinds(self) -> dict[int, str]:
        """Return by rank the kinds of the lanes that are open."""
        return {self.ranks[place]: lane.kind for place, lane in enumerate(self._lanes) if lane is not None}

    # What an execution asks

    def check(self) -> None:
        self.engine.check()
        if self.is_stopped:
            raise HaltedError

    def lane(self, peer: int) -> Lane:
        lane = self._lanes[peer]
        return lane if lane is not None else self._open_lane(peer)

    def _open_lane(self, peer: int) -> Lane:
        engine, rank = self.engine, self.ranks[peer]
        assert engine.node is not None
        self._open_bell()
        since = time.monotonic()
        while True:
            self.check()
            try:
                lane: Lane = engine.node.lanes.open(
                    engine.id, engine.members[rank], "collectives", LANE_SECONDS, self.number
                )
            except DeadlineError:
                self.stalled(since, (peer,))
            except ConnectError as error:
                self.lane_closed(peer, error)
            except ClosedError:
                self.check()
                raise
            else:
                self._lanes[peer] = lane
                engine.lane_opened()
                return lane

    def _open_bell(self) -> None:
        """Open what wakes this operation, which needs a descriptor: wait for one, as long as the operation may take."""
        while True:
            try:
                self._bell.open()
            except OSError as error:
                if not is_exhausted(error):
                    raise
                self.check()
                self.engine.check_deadline(explain(error))
                time.sleep(SCARCE_SECONDS)
            else:
                self.wake_fd = self._bell.fd
                return

    def stalled(self, since: float, waiting_for: tuple[int, ...]) -> float:
        now = time.monotonic()
        for place, lane in enumerate(self._lanes):
            if lane is not None and lane.is_stuck():
                self.lane_closed(place, LaneClosedError("nothing that is sent there gets through"))
        again_at = self.engine.stalled(self, since, tuple(self.ranks[place] for place in waiting_for))
        return again_at if self.lane_family == "ring" else min(again_at, now + tcp.PATH_CHECK_SECONDS)

    def lane_closed(self, peer: int, error: LaneClosedError | ConnectError) -> None:
        self.engine.lane_closed(self, self.ranks[peer], error)

    def wrong_header(self, peer: int, expected: bytes, header: bytes) -> None:
        if header[FLAGS_AT] == CHANGE_PENDING:
            plain = header[:FLAGS_AT] + b"\0" + header[FLAGS_AT + 1 :]
            if plain == expected:
                self.knows_change = True
                return
        self.engine.wrong_header(self, self.ranks[peer], expected, header)

    def reject(self, peer: int, what: str) -> NoReturn:
        """End the group because a rank sent `what`, which no covey sends; raise what tells of it."""
        self.engine.reject(self, "RemoteProtocolError", self.ranks[peer], what)

    def disagree_with(self, peer: int, what: str) -> NoReturn:
        """End the group because a rank sent `what`, which this one cannot go along with; raise what tells of it."""
        self.engine.reject(self, "MismatchError", self.ranks[peer], what)

    def disagree(self, error: MismatchError) -> NoReturn:
        """End the operation, and the group, with an error that every rank finds by itself."""
        raise DisagreedError(error)

    def close(self) -> None:
        """Forget the lanes, which are closed by their owner."""
        self._lanes = [None] * self.size
        self.polls.clear()
