"""Events of a run: losses, views and recoveries, each with a timeline, for programs and for the log.

Programs read those that are kept, listen, or follow them in an asyncio loop. Processes that were not there, newcomers
and commands, are told the last ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import logging
import os
import queue
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError
from covey.net.host.descriptors import explain
from covey.runtime.counters import process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterable


logger = logging.getLogger("covey.events")

LISTEN_SECONDS: Final = 1.0
"""How long listeners may take for the last events when the process leaves the run."""
KEPT: Final = 1000
"""Events that are kept in memory; older ones are in the log."""
CODEC: Final = "codec"
"""The event that another codec was chosen."""
PLAN: Final = "plan"
"""The event that another plan was chosen for large sums."""
CHECKPOINT: Final = "checkpoint"
"""The event that a checkpoint of the run has begun or is over."""
REPORT: Final = "report"
"""The event that a number that the program reports is not finite any more, or is again; or how fast a training is."""
FOUNDED: Final = ("joined", "generation", "restored")
"""Events with which a generation begins."""
VIEWS: Final = ("lost", "left", "view")
"""Events that are views."""
EVENT_KINDS: Final = (
    *VIEWS,
    *FOUNDED,
    "suspected",
    "recovered",
    "discovered",
    "refused",
    "leader",
    "lane",
    "moved",
    "striped",
    "mtu",
    CODEC,
    PLAN,
    CHECKPOINT,
    REPORT,
)
"""All kinds of events."""
PHASES: Final = ("detect", "freeze", "agree", "reconnect", "redo", "restore")
"""The phases of a recovery, in this order; an idle group has no redo."""


@dataclass(frozen=True)
class Event:
    """An event of a run."""

    kind: str
    """`lost`: a view without lost members; `left`: a view without members that left; `view`: a view of the same
    members, after a lane broke or an operation was given up; `joined`: a generation with newcomers; `generation`: one
    without; `restored`: newcomers received the state; `suspected`: a member is not heard; `recovered`: it is heard
    again; `discovered`: a node waits for the next generation; `refused`: a node was refused; `leader`:
    another member leads; `lane`: a lane was opened, or keeps a number of streams that was tried; `moved`: a lane goes
    over another path now, or has another number of streams; `striped`: it goes over several networks now; `codec`:
    `compress="auto"` chose another codec; `plan`: another plan was chosen for large sums; `checkpoint`: a checkpoint
    has begun or is over; `report`: a number that the program reports is not finite any more, or is again; or how fast a
    training with torch is, and what would be faster."""
    time: float
    """Seconds since 1970."""
    generation: int
    view: int
    ranks: tuple[int, ...] = ()
    """The ranks that it is about, in the numbering of the generation's first group."""
    names: tuple[str, ...] = ()
    phases: dict[str, float] = field(default_factory=dict)
    """Milliseconds from the first sign of the loss to the end of each phase of a recovery."""
    text: str = ""
    """In words: why members are lost, the kind of a lane, the addresses, relays or streams of a moved one, the codec or
    plan and why it was chosen, `begun ID`, `ended ID` or `failed ID: ...` of a checkpoint."""
    is_earlier: bool = False
    """Whether it happened before this process was in the run. Another member has told it, with times of its clock."""

    def to_json(self) -> str:
        """Return the event as one line of JSON."""
        return _line(self)


class Events:
    """The events of one process in a run. With COVEY_EVENTS, they are also appended to a file.

    Its lines are those of the log, with `pid` added. Processes of one host may share it: each line is one write.
    """

    def __init__(self) -> None:
        """Check COVEY_EVENTS; ConfigError if the file cannot be written."""
        self._path = os.environ.get("COVEY_EVENTS", "")
        if self._path:
            try:
                _append(self._path, "")
            except OSError as error:
                raise ConfigError(f"COVEY_EVENTS={self._path!r} cannot be written: {explain(error)}") from error
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=KEPT)
        self._count = 0
        """Events so far, also those that are not kept any more."""
        self._plan = ""
        """The text of the last event about a plan."""
        self._listeners: list[tuple[Callable[[Event], None], Collection[str]]] = []
        """Each with the kinds that it is told of."""
        self._followers: list[tuple[Callable[[Event | None], None], Collection[str]]] = []
        self._is_closed = False
        self._queue: queue.Queue[Event | None] | None = None
        self._thread: threading.Thread | None = None
        self._began = 0.0
        """When the first sign of a loss came, by the monotonic clock; 0 if there is none."""
        self._sign = 0.0
        """The same for a loss that came before operations had continued after the last one."""
        self._phases: dict[str, float] = {}
        self._open: Event | None = None
        """A view after which operations have not continued yet."""

    def forked(self) -> None:
        """Replace the lock after a fork: another thread of the parent may have held it."""
        self._lock = threading.Lock()

    def all(self) -> list[Event]:
        """Return the events in memory, oldest first."""
        with self._lock:
            return list(self._events)

    def after(self, number: int) -> tuple[list[Event], int]:
        """Return the kept events after the first `number` ones of this process, and the number of the first of them."""
        with self._lock:
            first = max(number, self._count - len(self._events))
            return list(self._events)[len(self._events) - (self._count - first) :] if first < self._count else [], first

    @property
    def count(self) -> int:
        """How many events this process knows of, also those that are not kept any more."""
        return self._count

    @property
    def plan(self) -> str:
        """The plan that was chosen last for large sums, and why; empty if none was."""
        return self._plan

    def put_before(self, earlier: Iterable[Event]) -> None:
        """Keep what happened before this process was in the run. Listeners and the log are not told: it is no news."""
        with self._lock:
            room = KEPT - len(self._events)
            kept = [replace(event, is_earlier=True) for event in earlier][-room:]
            self._events.extendleft(reversed(kept))
            self._count += len(kept)

    def listen(self, listener: Callable[[Event], None], kinds: Collection[str] = EVENT_KINDS) -> None:
        """Call `listener(event)` for every event of these kinds from now on, on a thread for listeners.

        Its exceptions are logged.
        """
        with self._lock:
            self._listeners.append((listener, kinds))
            if self._queue is None:
                self._queue = queue.Queue(KEPT)
                self._thread = threading.Thread(
                    target=self._serve, args=(self._queue,), name="covey-events", daemon=True
                )
                self._thread.start()

    def follow(self, follower: Callable[[Event | None], None], kinds: Collection[str]) -> list[Event]:
        """Return the events of these kinds in memory, and call `follower` for each that comes, with None at the end.

        It is called on any thread, and must return at once.
        """
        with self._lock:
            if self._is_closed:
                follower(None)
            else:
                self._followers.append((follower, kinds))
            return [event for event in self._events if event.kind in kinds]

    def ignore(self, follower: Callable[[Event | None], None]) -> None:
        """Call `follower` no more."""
        with self._lock:
            self._followers = [each for each in self._followers if each[0] is not follower]

    def _serve(self, events: queue.Queue[Event | None]) -> None:
        while (event := events.get()) is not None:
            for listener, kinds in list(self._listeners):
                try:
                    if event.kind in kinds:
                        listener(event)
                except BaseException:  # SystemExit, too: a listener must not keep others from being called
                    logger.exception("a listener to %s failed", event.kind)

    def close(self) -> None:
        """End the thread of the listeners after the last event, or after LISTEN_SECONDS."""
        with self._lock:
            self._is_closed = True
            for follower, _ in self._followers:
                follower(None)
            self._followers.clear()
            thread, self._thread = self._thread, None
            if self._queue is not None:
                with contextlib.suppress(queue.Full):
                    self._queue.put_nowait(None)
                self._queue = None
        if thread is not None and thread is not threading.current_thread():
            thread.join(LISTEN_SECONDS)  # the program may end now, and the thread with it

    def phase(self, name: str) -> None:
        """Note that a phase of a recovery ends now; the first is `detect`."""
        with self._lock:
            now = time.monotonic()
            if self._open is not None and name in ("reconnect", "redo"):
                if name == "redo":  # lanes may have been opened before the view came, or none was needed
                    self._open.phases.setdefault("reconnect", max(self._open.phases.values(), default=0.0))
                self._open.phases.setdefault(name, round(1e3 * (now - self._began), 3))
                if name == "redo":
                    process.recovery_seconds += now - self._began
                    self._close()
                    self._began = self._sign = 0.0
                return
            if name in ("reconnect", "redo"):
                return
            if self._open is not None:
                if name == "detect":  # a late sign of the same loss, unless a freeze follows
                    self._sign = self._sign or now
                    return
                self._close()
                self._began, self._phases = self._sign or now, {"detect": 0.0}
            elif not self._began:
                self._began, self._phases = now, {"detect": 0.0}
            self._sign = 0.0
            self._phases.setdefault(name, round(1e3 * (now - self._began), 3))

    def add(self, event: Event) -> None:
        """Keep an event and tell the listeners; a view gets the phases of its recovery so far."""
        with self._lock:
            if event.kind in VIEWS:
                self._close()
                event.phases.update(self._phases)
                self._open, self._phases = event, {}
            elif self._open is None and event.kind in FOUNDED:
                self._began = 0.0  # the sign was no loss: such as the link of a member that left
            self._events.append(event)
            self._count += 1
            if event.kind == PLAN:
                self._plan = event.text
            process.events[event.kind] += 1
            for follower, kinds in self._followers:
                if event.kind in kinds:
                    follower(event)
            if self._queue is not None:
                with contextlib.suppress(queue.Full):  # a listener that does not return misses events
                    self._queue.put_nowait(event)
        if event.kind not in VIEWS:
            self._write(event)

    def _close(self) -> None:
        """Write the open view, when its operations continue or another view follows. Called under the lock."""
        if self._open is not None:
            self._write(self._open)
            self._open = None

    def _write(self, event: Event) -> None:
        logger.info("%s", event.to_json())
        if self._path:
            try:
                _append(self._path, _line(event, pid=os.getpid()) + "\n")
            except OSError as error:  # a full disk does not end a run
                logger.warning("could not write to COVEY_EVENTS=%s: %s", self._path, explain(error))

    @property
    def is_recovering(self) -> bool:
        """Whether there is a view after which operations have not continued yet."""
        return self._open is not None


def _line(event: Event, **before: int) -> str:
    import json  # slow to load

    return json.dumps({**before, **asdict(event)})


def _append(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def encode_last(events: Events) -> bytes:
    """Return the last events that this process knows, earlier ones included. On any thread."""
    from covey.wire.reports import REPORTED_EVENTS_LIMIT, PastEvent, encode_past  # most runs have no newcomers

    last = events.all()[-REPORTED_EVENTS_LIMIT:]
    return encode_past(
        [
            PastEvent(
                event.kind,
                event.time,
                event.generation,
                event.view,
                event.ranks,
                event.names,
                dict(event.phases),
                event.text,
            )
            for event in last
        ]
    )


def decode_last(body: bytes) -> list[Event]:
    """Return the events that another process has told, oldest first; RemoteProtocolError for anything else."""
    from covey.wire.reports import decode_past

    return [
        Event(past.kind, past.time, past.generation, past.view, past.ranks, past.names, past.phases, past.text)
        for past in decode_past(body).events
    ]


def check_kinds(kinds: Collection[str]) -> None:
    """Raise ConfigError for a kind of event that does not exist."""
    for kind in (kinds,) if isinstance(kinds, str) else kinds:
        if kind not in EVENT_KINDS or isinstance(kinds, str):
            near = difflib.get_close_matches(kind, EVENT_KINDS, 1)
            hint = f"; did you mean {near[0]!r}?" if near and near[0] != kind else ""
            raise ConfigError(f"kinds={kinds!r} must be a list of kinds of events, of {', '.join(EVENT_KINDS)}{hint}")


async def follow(events: Events, kinds: frozenset[str]) -> AsyncIterator[Event]:
    """Yield the events in memory and those that follow, until they are closed."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[Event | None] = asyncio.Queue()

    def put(event: Event | None) -> None:
        while arrived.qsize() >= KEPT:
            arrived.get_nowait()
        arrived.put_nowait(event)

    def tell(event: Event | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(put, event)

    seen = events.follow(tell, kinds)
    try:
        for known in seen:
            yield known
        while (event := await arrived.get()) is not None:
            yield event
    finally:
        events.ignore(tell)
