"""The end of a group on this rank: it is closed, or dropped without being closed, and what it held is freed."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

from covey.runtime import loop as control
from covey.runtime.collectives.lane_trouble import CAUSE_SECONDS
from covey.runtime.collectives.part import EnginePart
from covey.runtime.counters import process
from covey.runtime.fault import Fault

if TYPE_CHECKING:
    import queue

    from covey.base.numbers import Seat
    from covey.runtime.collectives.backlog import Backlog
    from covey.runtime.collectives.engine import Engine
    from covey.runtime.counters import GroupCounters
    from covey.runtime.members.node import Node
    from covey.runtime.views.generation import Generation

FLUSH_SECONDS: Final = 5.0
"""How long closing a group may take to deliver messages that were sent before."""
END_SECONDS: Final = 5.0
"""How long closing a group waits for a running operation to end."""
OTHER_CLOSE_SECONDS: Final = 30.0
"""How long a second call of `close` waits for the thread that closes the group: longer than that can take."""


class Closing(EnginePart):
    """Closes one engine, once, whichever threads ask for it."""

    def __init__(self, engine: Engine, backlog: Backlog, descriptors: list[int]) -> None:
        """Free the descriptors at the end, also if the program drops the group without closing it."""
        super().__init__(engine)
        self._backlog, self._descriptors = backlog, descriptors
        self._freed = threading.Event()
        self._closer = 0
        """The thread that closes the group."""
        self._dropped = weakref.finalize(
            engine,
            _drop,
            engine.node,
            engine.generation,
            engine.id,
            engine.members,
            descriptors,
            backlog.queue,
            engine.counters,
        )

    @property
    def is_done(self) -> bool:
        """Whether everything is freed."""
        return self._freed.is_set()

    def close(self) -> None:
        """Free lanes, thread and descriptors. A second call waits for the first, unless the first waits for it."""
        engine = self.engine
        with engine.routing.lock:  # no messenger is made after this
            is_first, engine.is_closed = not engine.is_closed, True
            if is_first:
                self._closer = threading.get_ident()
        if is_first:
            try:
                self._close(engine)
            finally:
                self._freed.set()
        elif not (
            self._closer == threading.get_ident() or self._backlog.is_on_this_thread or engine.routing.is_driven_here
        ):  # the closing thread waits for callbacks on these threads
            self._freed.wait(OTHER_CLOSE_SECONDS)

    def _close(self, engine: Engine) -> None:
        engine.routing.close(time.monotonic() + FLUSH_SECONDS)
        if engine.has_pending:
            text = f"group {engine.name!r} was closed on rank {engine.rank} with operations pending"
            fault = Fault("ClosedError", text, (engine.rank,))
            if engine.atomic is not None:
                engine.failure.end_here(fault)
            else:
                engine.failure.declare(fault)
        self._backlog.end(END_SECONDS)
        engine.await_idle(END_SECONDS)  # an operation on another thread ends before its lanes do
        if engine.atomic is not None:
            engine.atomic.close()
        engine.attempt.close()
        self._dropped.detach()
        engine.counters.is_over = True
        process.sweep()
        if engine.node is not None:
            if engine.atomic is None:
                engine.stalls.part()
            sequence = engine.operation.sequence
            if engine.failure.fault is not None or sequence:
                _flush_control()
            engine.node.groups.forget(engine.id, sequence)
        engine.bell.close()
        _close_all(self._descriptors)

    def forked(self) -> None:
        """Free nothing in a forked child: all of it belongs to the parent."""
        self._dropped.detach()
        self._freed = threading.Event()
        if self.engine.is_closed:  # the closing thread exists only in the parent
            self._freed.set()


def _flush_control() -> None:
    """Wait until the control loop has sent what it was given: other ranks must read why lanes end before they do."""
    is_sent = threading.Event()
    control.soon(is_sent.set)
    is_sent.wait(CAUSE_SECONDS)


def _drop(
    node: Node | None,
    generation: Generation | None,
    group_id: int,
    members: tuple[Seat, ...],
    descriptors: list[int],
    work_queue: queue.SimpleQueue[Any],
    counters: GroupCounters,
) -> None:
    """Free what a group held that was not closed. The garbage collector calls this on any thread: it takes no lock."""
    work_queue.put(None)
    counters.is_over = True
    if node is not None:
        control.soon(node.groups.forget, group_id, 0)
    if generation is not None:
        control.soon(generation.drop, group_id, generation.ranks_of(members))
    _close_all(descriptors)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()
