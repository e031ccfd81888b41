"""What happened to a run: losses, views and recoveries, each with a timeline, for programs and for people."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("covey.events")

KEPT: Final = 1000
"""Events that are remembered; older ones are in the log."""
PHASES: Final = ("detect", "freeze", "agree", "reconnect", "redo", "restore")
"""Of a recovery, in this order; an idle group has no redo."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a run."""

    kind: str
    """`lost`: a view without some; `view`: a view of the same members, after a lane broke or somebody gave up; `joined`:
    a generation with newcomers; `generation`: one without; `restored`: state was brought to newcomers."""
    time: float
    """Seconds since 1970."""
    generation: int
    view: int
    ranks: tuple[int, ...] = ()
    """Whom it is about, in the numbering of the generation's first group."""
    names: tuple[str, ...] = ()
    phases: dict[str, float] = field(default_factory=dict)
    """Milliseconds from the first sign to the end of each phase of a recovery."""

    def to_json(self) -> str:
        """Return the event as one line of JSON."""
        return json.dumps(asdict(self))


class Events:
    """The events of one process in a run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=KEPT)
        self._listeners: list[Callable[[Event], None]] = []
        self._queue: queue.SimpleQueue[Event] | None = None
        self._began = 0.0
        """When the first sign of trouble came, by the monotonic clock; 0: there is none."""
        self._phases: dict[str, float] = {}
        self._open: Event | None = None
        """A view whose operations have not gone on yet."""

    def all(self) -> list[Event]:
        """Return what is remembered, oldest first."""
        with self._lock:
            return list(self._events)

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Call `listener(event)` for every event from now on, on a thread of its own; what it raises is logged."""
        with self._lock:
            self._listeners.append(listener)
            if self._queue is None:
                self._queue = queue.SimpleQueue()
                threading.Thread(target=self._serve, args=(self._queue,), name="covey-events", daemon=True).start()

    def _serve(self, events: queue.SimpleQueue[Event]) -> None:
        while True:
            event = events.get()
            for listener in list(self._listeners):
                try:
                    listener(event)
                except Exception:  # it is the program's, and must not keep others from hearing
                    logger.exception("a listener to %s failed", event.kind)

    def phase(self, name: str) -> None:
        """A phase of a recovery has ended now; the first is `detect`."""
        with self._lock:
            now = time.monotonic()
            if self._open is not None and name in ("reconnect", "redo"):
                self._open.phases.setdefault(name, round(1e3 * (now - self._began), 3))
                if name == "redo":
                    logger.info("%s", self._open.to_json())
                    self._open, self._began = None, 0.0
                return
            if name in ("reconnect", "redo"):
                return
            if not self._began or self._open is not None:
                self._began, self._phases, self._open = now, {"detect": 0.0}, None
            self._phases.setdefault(name, round(1e3 * (now - self._began), 3))

    def add(self, event: Event) -> None:
        """Remember an event and tell the listeners; a view takes the phases of its recovery with it."""
        with self._lock:
            if event.kind in ("lost", "view"):
                event.phases.update(self._phases)
                self._open, self._phases = event, {}
            self._events.append(event)
            if self._queue is not None:
                self._queue.put(event)
        if event.kind not in ("lost", "view"):
            logger.info("%s", event.to_json())

    @property
    def is_recovering(self) -> bool:
        """Whether a view has come whose operations have not gone on yet."""
        return self._open is not None
