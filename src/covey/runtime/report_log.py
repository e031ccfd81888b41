"""What the program of this process reports: its steps, and numbers such as the loss. On any thread.

`ReportLog.add` is called once a step or more often, and takes less than a microsecond: it keeps the values, and the
time in operations so far. Everything else (functions that return a value, files) is done once a second on a thread of
its own, which exists only while there is something to do.
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import operator
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

from covey.base.numbers import REPORT_NAME_LETTERS, REPORT_NAMES, REPORT_ROWS
from covey.base.text import listed, printable, spell_error
from covey.net.host.descriptors import explain
from covey.runtime.counters import process
from covey.runtime.recorder import clock_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from covey.runtime.events import Events
    from covey.wire.progress import ReportRow

logger = logging.getLogger("covey")

EVALUATE_EVERY: Final = 1.0
"""How often functions are evaluated, and files written."""
REPORTS_IDLE_SECONDS: Final = 10.0
"""The thread ends after so long without a report."""
REPORTS_CLOSE_SECONDS: Final = 2.0
FRESH_LIMIT: Final = 65536
"""Reports that wait for the thread, and rows that wait to be written: more than a program makes in a second."""
REPORT_STEP_LIMIT: Final = 1 << 62


class ReportSink(Protocol):
    """Something that reports are written to. On one thread at a time."""

    def write(self, rows: Sequence[ReportRow]) -> None:
        """Write rows that are complete; OSError if that cannot be done."""

    def close(self) -> None: ...


class _OpenRow:
    """What was reported of one step, or at one time without a step."""

    __slots__ = ("at_ns", "before_ns", "before_spent_ns", "spent_ns", "step", "values")

    def __init__(self, step: int | None, at_ns: int, spent_ns: int, border: tuple[int, int]) -> None:
        """`border` is when the step before was reported, and the time in operations until then; 0 if none was."""
        self.step, self.at_ns, self.spent_ns = step, at_ns, spent_ns
        self.before_ns, self.before_spent_ns = border
        self.values: dict[str, float] = {}


class ReportLog:
    """The reports of one process in a run."""

    def __init__(self, events: Events | None = None, sinks: Sequence[ReportSink] = ()) -> None:
        """`events` hears of values that are not finite; `sinks` get all rows."""
        self._events, self._sinks = events, sinks
        self._names: set[str] = set()
        self._is_programs = False
        """Whether the program itself reports, and not a library for it."""
        self._fresh: deque[tuple[int | None, int, int, dict[str, Any]]] = deque(maxlen=FRESH_LIMIT)
        """Reports that are in no row yet: step, time, time in operations, values. Any thread appends."""
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._lock = threading.Lock()
        """Guards what follows."""
        self._is_closing = False
        self._rows: list[_OpenRow] = []
        self._unwritten: deque[_OpenRow] = deque(maxlen=FRESH_LIMIT)
        """Complete rows that are in no file yet."""
        self._latest: dict[str, float] = {}
        """The last value of each name."""
        self._functions: dict[str, tuple[Callable[[], Any], _OpenRow]] = {}
        """The last function for each name, if it was not evaluated yet, and the row of its value."""
        self._border = 0, 0
        self._count = 0
        self._wrong: set[str] = set()
        """Names whose last value was not finite."""

    def add(self, step: int | None, values: dict[str, Any]) -> None:
        """Keep values; a step begins with its first report, and its further values are added or replaced.

        Raises:
            ValueError: a name cannot be used, or there are too many.
            TypeError: a value is no number and no function, or the step is no whole number.
        """
        self._is_programs = True
        self._add(step, values)

    def add_for_program(self, step: int | None, values: Mapping[str, Any]) -> None:
        """Keep what a library reports for a program that does not report itself. What cannot be kept is left out."""
        if self._is_programs:
            return  # which has its own steps
        kept: dict[str, Any] = {}
        for name, value in values.items():
            is_new = name not in self._names
            has_room = not is_new or len(self._names | kept.keys()) < REPORT_NAMES
            if (
                has_room
                and _is_name(name)
                and not isinstance(value, str)
                and (hasattr(value, "__float__") or callable(value))
            ):
                kept[name] = value
        self._add(step, kept)

    def _add(self, step: int | None, values: dict[str, Any]) -> None:
        if not self._names.issuperset(values):
            self._admit(values)
        for value in values.values():
            if type(value) is not float:
                values = {name: _number(name, value) for name, value in values.items()}
                break
        if type(step) is not int and step is not None:
            step = _whole(step)
        self._fresh.append((step, clock_ns(), process.spent_ns(), values))
        if self._thread is None:
            self._start()

    def _admit(self, values: dict[str, Any]) -> None:
        """Take new names; ValueError if one cannot be used."""
        for name in values:
            if not _is_name(name):
                raise ValueError(
                    f"{printable(name, 60)!r} cannot be reported: a name has 1 to {REPORT_NAME_LETTERS} printable "
                    "ASCII characters"
                )
        with self._lock:
            if len(self._names | values.keys()) > REPORT_NAMES:
                raise ValueError(
                    f"{listed(sorted(values.keys() - self._names))} cannot be reported: a program may report "
                    f"{REPORT_NAMES} names, and has {len(self._names)}"
                )
            self._names |= values.keys()

    # Rows, under the lock

    def _digest(self) -> list[str]:
        """Make rows of fresh reports; return what there is to tell of values that are not finite."""
        news: list[str] = []
        for _ in range(len(self._fresh)):
            step, at, spent, values = self._fresh.popleft()
            row = self._row_of(step, at, spent)
            self._count += 1
            for name, value in values.items():
                if type(value) is float:
                    self._functions.pop(name, None)
                    news += self._take(row, name, value)
                else:
                    self._functions[name] = value, row
        return news

    def _row_of(self, step: int | None, at: int, spent: int) -> _OpenRow:
        """Return the row that a report belongs to: that of its step, of the last step, or a new one."""
        rows = self._rows
        last = rows[-1] if rows else None
        if last is not None and last.step is not None and (step is None or step == last.step):
            return last
        row = _OpenRow(step, at, spent, self._border if step is not None else (0, 0))
        if step is not None:
            self._border = at, spent
            while rows and (before := rows[-1].step) is not None and before >= step:  # the program has gone back
                rows.pop()
        if last is not None and self._sinks:
            self._unwritten.append(last)
        rows.append(row)
        if len(rows) > REPORT_ROWS:  # the older half keeps every second row
            rows[: REPORT_ROWS // 2] = rows[: REPORT_ROWS // 2 : 2]
        return row

    def _take(self, row: _OpenRow, name: str, value: float) -> list[str]:
        row.values[name] = self._latest[name] = value
        is_wrong = not math.isfinite(value)
        if is_wrong == (name in self._wrong):
            return []
        (self._wrong.add if is_wrong else self._wrong.discard)(name)
        when = "" if row.step is None else f" at step {row.step}"
        return [f"{name} is {value:g}{when}" if is_wrong else f"{name} is finite again{when}"]

    def _tell(self, news: list[str]) -> None:
        if self._events is None or not news:
            return
        from covey.runtime.events import REPORT, Event  # loaded with the node

        for text in news:
            self._events.add(Event(REPORT, time.time(), 0, 0, text=text))

    # Readers, on any thread

    @property
    def count(self) -> int:
        """How often the program has reported."""
        return self._count + len(self._fresh)

    def latest(self) -> ReportRow | None:
        """Return the last step with the times of its parts, and the last value of each name; None before a report."""
        with self._lock:
            news = self._digest()
            told = _told(self._rows[-1], dict(self._latest), _wall()) if self._rows else None
        self._tell(news)
        return told

    def rows(self) -> list[ReportRow]:
        """Return all rows that are kept, oldest first: of a long run fewer of its beginning, and all of the last."""
        with self._lock:
            news, wall = self._digest(), _wall()
            told = [_told(row, dict(row.values), wall) for row in self._rows]
        self._tell(news)
        return told

    # The thread

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._is_closing:
                self._thread = threading.Thread(target=self._run, name="covey-reports", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        idle = 0.0
        while not self._wake.wait(EVALUATE_EVERY):
            idle = 0.0 if self._fresh else idle + EVALUATE_EVERY
            self._tend()
            with self._lock:
                if idle >= REPORTS_IDLE_SECONDS and not self._fresh:
                    self._thread = None
                    return

    def _tend(self, *, is_last: bool = False) -> None:
        """Make rows, evaluate functions, and write complete rows."""
        with self._lock:
            news = self._digest()
            functions, self._functions = self._functions, {}
        for name, (function, row) in functions.items():
            try:
                value = float(function())
            except Exception as error:  # of the program
                logger.warning("what is reported as %r could not be read: %s", name, spell_error(error))
                continue
            with self._lock:
                news += self._take(row, name, value)
        with self._lock:
            rows = [self._unwritten.popleft() for _ in range(len(self._unwritten))]
            rows += self._rows[-1:] if is_last else []
            wall = _wall()
            told = [_told(row, dict(row.values), wall) for row in rows]
        self._tell(news)
        for sink in self._sinks if told else ():
            try:
                sink.write(told)
            except OSError as error:  # a full disk does not end a run
                logger.warning("reports could not be written: %s", explain(error))

    def close(self) -> None:
        """Evaluate and write what is left. Closing twice is fine."""
        with self._lock:
            is_first, self._is_closing = not self._is_closing, True
            thread = self._thread
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(REPORTS_CLOSE_SECONDS)  # a function of the program may not return
        if is_first and (thread is None or not thread.is_alive()):
            self._tend(is_last=True)
            for sink in self._sinks:
                sink.close()

    def forked(self) -> None:
        """Keep and write nothing in a forked child, in which no lock of the parent may hold it up."""
        self._lock, self._sinks, self._is_closing = threading.Lock(), (), True
        self._thread = None


def _is_name(name: str) -> bool:
    return 1 <= len(name) <= REPORT_NAME_LETTERS and name.isascii() and name.isprintable()


def _number(name: str, value: Any) -> Any:
    """Return a number as a float, and a function as it is; TypeError for anything else."""
    if callable(value) and not hasattr(value, "__float__"):
        return value
    try:
        return float(value)  # a tensor or an array of one element, too
    except (TypeError, ValueError, RuntimeError) as error:
        text = f"{name} cannot be reported: {type(value).__name__} is neither a number nor a function"
        raise TypeError(text) from error


def _whole(step: Any) -> int:
    """Return a step that is no int itself, such as one of numpy; TypeError for anything else."""
    try:
        return int(operator.index(step))
    except TypeError:
        raise TypeError(f"step must be a whole number, not {type(step).__name__}") from None


def _wall() -> int:
    return time.time_ns() - clock_ns()


def _told(row: _OpenRow, values: dict[str, float], wall: int) -> ReportRow:
    compute = sync = -1.0
    if row.before_ns:
        lasted = max(0, row.at_ns - row.before_ns)
        in_operations = min(lasted, max(0, row.spent_ns - row.before_spent_ns))
        compute, sync = (lasted - in_operations) / 1e9, in_operations / 1e9
    step = None if row.step is None else max(-REPORT_STEP_LIMIT, min(row.step, REPORT_STEP_LIMIT - 1))
    from covey.wire import progress  # loads all messages, which takes long

    return progress.ReportRow((row.at_ns + wall) / 1e9, step, values, compute, sync)


def log_of(node: Any) -> ReportLog:
    """Return the reports of a node of this process; for a process that is alone (None), its own."""
    return node.reports if node is not None else _alone()


def current_log() -> ReportLog | None:
    """Return the reports of this process, if it is in a run, or has reported alone."""
    node: Any = next(iter(list(process.nodes)), None)
    if node is not None:
        return log_of(node)
    return _alone() if _alone.cache_info().currsize else None


@functools.cache
def _alone() -> ReportLog:
    from covey.runtime.report_files import open_sinks  # most programs report nothing

    log = ReportLog(None, open_sinks(os.environ, "alone", lambda: 0))
    atexit.register(log.close)
    return log
