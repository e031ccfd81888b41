"""The kept output of runs, for views: lines of all ranks by time, and for a follower only what is new.

Texts are what programs print, and may hold anything: each line is printable, without the escapes of a terminal.
"""

from __future__ import annotations

import heapq
import re
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from covey.base.errors import ConfigError
from covey.base.numbers import NO_RANK
from covey.base.text import printable
from covey.net.host.saved_output import OutputRecord, read_log, tail_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from covey.net.host.saved_runs import PastRun

LOG_READ_BYTES: Final = 256 << 10
"""What is read of one log at a time."""
FOLLOWED_TAIL_BYTES: Final = 1 << 20
"""What is read at first for a follower, of all logs of a run together; at least a sixteenth of it from each."""
LINE_BYTES: Final = 16 << 10
"""The most of one line."""
SHOWN_LINE_LIMIT: Final = 2000
"""Characters of a line that are shown."""
RING_LINES: Final = 5000
"""Lines of a run that are held for followers."""
PAGE_LINES: Final = 1000
"""Lines in one answer."""
FOLLOWED_RUNS: Final = 4
"""Runs whose lines are held at a time; then that which was asked for longest ago is dropped."""
_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")


@dataclass(frozen=True)
class OutputLine:
    """A line that a rank has printed, with printable text."""

    at: float
    machine: str
    rank: int | None
    """None: its rank was not known, or `covey run` itself said it."""
    is_error: bool
    text: str


@dataclass(frozen=True)
class OutputPage:
    """Lines of a run's output, the oldest first."""

    lines: tuple[OutputLine, ...]
    next: str
    """What to ask for next."""
    left_out: int = 0
    """How many lines between the last question and this answer are not in it."""
    silent: tuple[str, ...] = ()
    """Machines of the run that keep the output of their processes to themselves."""


def clean(data: bytes) -> str:
    """Return a line as printable text: what carriage returns have overwritten and escapes of terminals are left out."""
    text = data.decode(errors="replace").rstrip("\r")
    return printable(_ESCAPES.sub("", text.rpartition("\r")[2]).expandtabs(), SHOWN_LINE_LIMIT)


class LineAssembly:
    """Puts the lines of one stream together, from what was written at one time and another."""

    def __init__(self) -> None:
        self._held = b""

    def take(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete now; a line that is too long is cut."""
        *lines, self._held = (self._held + data).split(b"\n")
        if len(self._held) > LINE_BYTES:
            lines.append(self._held)
            self._held = b""
        return [line[-LINE_BYTES:] for line in lines]

    def rest(self) -> list[bytes]:
        """Return the line that has no end."""
        held, self._held = self._held, b""
        return [held] if held else []


_RANK_PREFIX: Final = re.compile(rb"\[(?:([^\]\r\n]{1,160}?) )?(\d{1,6})\] (.*)\Z", re.DOTALL)
"""What `covey run` puts before each line: machine and rank."""


def labelled(machine: str, stream: int, data: bytes, at: float) -> OutputLine:
    """Return a line that `covey run` has printed on a machine, with the rank that it put before the line."""
    found = _RANK_PREFIX.match(data)
    rank, text = (None, data) if found is None else (int(found[2]), found[3])
    return OutputLine(at, machine, rank, stream == 2, clean(text))


class RecordLines:
    """Makes lines of the records of one log."""

    def __init__(self, machine: str) -> None:
        self._machine = machine
        self._streams = {1: LineAssembly(), 2: LineAssembly()}
        self._last: dict[int, OutputRecord] = {}
        self._lines = 0
        """How many lines of the log were read or are known to be gone."""
        self.gone = 0
        """How many lines the log no longer had when they were to be read."""

    def take(self, records: Iterable[OutputRecord]) -> list[OutputLine]:
        """Return the lines that are complete with these records."""
        lines: list[OutputLine] = []
        for record in records:
            self.gone += max(record.lines_before - self._lines, 0)
            self._lines = max(record.lines_before, self._lines) + record.data.count(b"\n")
            self._last[record.stream] = record
            lines += [_line(record, self._machine, text) for text in self._streams[record.stream].take(record.data)]
        return lines

    def rest(self) -> list[OutputLine]:
        """Return the lines that have no end, because the process has ended."""
        return [
            _line(self._last[stream], self._machine, text)
            for stream, held in self._streams.items()
            for text in held.rest()
        ]


class LogFollower(RecordLines):
    """Reads one log of this machine from an offset on."""

    def __init__(self, folder: Path, machine: str, offset: int = 0) -> None:
        super().__init__(machine)
        self._folder, self._offset = folder, offset
        self.is_at_end = False

    def news(self) -> list[OutputLine]:
        """Return the next lines; none if there are none yet."""
        try:
            batch = read_log(self._folder, self._offset, LOG_READ_BYTES)
        except (ConfigError, OSError):  # damaged, or removed
            self.is_at_end = True
            return []
        self.is_at_end = not batch.records
        self._offset = batch.next
        return self.take(batch.records)

    def whole(self) -> Iterator[OutputLine]:
        """Yield all lines that there are now."""
        while True:
            lines = self.news()
            yield from lines
            if self.is_at_end:
                return


def _line(record: OutputRecord, machine: str, text: bytes) -> OutputLine:
    rank = None if record.rank == NO_RANK else record.rank
    return OutputLine(record.at, machine, rank, record.stream == 2, clean(text))


class RunFollower:
    """Reads the output of one run that this machine has kept: of all its processes, by time."""

    silent: tuple[str, ...] = ()

    def __init__(self, run: PastRun, *, only_tail: bool = False) -> None:
        """With `only_tail`, begin shortly before the end."""
        self._run, self._only_tail = run, only_tail
        self._logs: dict[str, LogFollower] = {}

    @property
    def gone(self) -> int:
        """How many lines were no longer there, or left out because they are far from the end."""
        return sum(log.gone for log in self._logs.values())

    def whole(self) -> Iterator[OutputLine]:
        """Yield all lines that there are now, by time; then `news` continues."""
        self._find()
        yield from heapq.merge(*(log.whole() for log in self._logs.values()), key=lambda line: line.at)

    def news(self) -> list[OutputLine]:
        """Return the lines since the last call, by time; none if there are none yet."""
        self._find()
        lines = [line for log in self._logs.values() for line in log.news()]
        return sorted(lines, key=lambda line: line.at)

    def rest(self) -> list[OutputLine]:
        """Return the lines that have no end; to be called when the run is over and `news` returns none."""
        return sorted((line for log in self._logs.values() for line in log.rest()), key=lambda line: line.at)

    def _find(self) -> None:
        found = self._run.logs()
        for name, folder in found:
            if name not in self._logs:
                share = max(FOLLOWED_TAIL_BYTES // max(len(found), 1), FOLLOWED_TAIL_BYTES // 16)
                offset = tail_of(folder, share) if self._only_tail else 0
                self._logs[name] = LogFollower(folder, self._run.record.machine, offset)


class LineSource(Protocol):
    """Something that has new lines now and then."""

    def news(self) -> list[OutputLine]:
        """Return the lines since the last call, by time; none if there are none yet. It does not wait."""

    @property
    def gone(self) -> int:
        """How many lines were left out."""

    @property
    def silent(self) -> tuple[str, ...]:
        """The machines that keep their output to themselves."""


class OutputReader:
    """The newest lines of runs, for any number of followers. Any thread may call any method; none waits."""

    def __init__(self, find: Callable[[str], Sequence[LineSource]]) -> None:
        """`find` returns where lines of a run come from, by the id that views use; nothing if it is not known."""
        self._find = find
        self._lock = threading.Lock()
        self._rings: OrderedDict[str, _Ring] = OrderedDict()

    def lines(self, run_id: str, since: str = "") -> OutputPage:
        """Return the newest lines of a run; those after `since`, which an earlier answer gave as `next`."""
        with self._lock:
            ring = self._rings.pop(run_id, None)
            if ring is None:
                sources = self._find(run_id)
                if not sources:
                    return OutputPage((), since)
                ring = _Ring(sources)
            self._rings[run_id] = ring
            while len(self._rings) > FOLLOWED_RUNS:
                self._rings.popitem(last=False)
            return ring.page(int(since) if since.isdecimal() and len(since) < 16 else None)


class _Ring:
    """The last lines of a run, numbered."""

    def __init__(self, sources: Sequence[LineSource]) -> None:
        self._sources = sources
        self._lines: deque[OutputLine] = deque(maxlen=RING_LINES)
        self._end = 0
        """How many lines there were in all."""

    def page(self, since: int | None) -> OutputPage:
        news = sorted((line for source in self._sources for line in source.news()), key=lambda line: line.at)
        self._lines.extend(news)
        self._end += len(news)
        first = self._end - len(self._lines)
        begin = first if since is None or since > self._end else since
        gone = sum(source.gone for source in self._sources)
        left_out = gone + first if since is None else max(first - begin, 0)
        shown = list(self._lines)[max(begin - first, 0) :]
        left_out += max(len(shown) - PAGE_LINES, 0)
        silent = tuple(sorted({name for source in self._sources for name in source.silent}))
        return OutputPage(tuple(shown[-PAGE_LINES:]), str(self._end), left_out, silent)
