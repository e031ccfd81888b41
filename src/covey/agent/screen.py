"""What a terminal shows of programs on several machines: whole lines, each with its machine and rank; and log files.

`covey run` on each machine has put the prefix before each line, as in `[north 3] step 100`. `read_output` reads the
output that agents have kept, for `covey logs`.
"""

from __future__ import annotations

import os
import queue
import re
import select
import sys
import threading
from typing import TYPE_CHECKING, Final, Protocol

from covey.base.errors import CoveyError
from covey.runtime.keeper.output import Cursor, HeldLine, event_line, note_line
from covey.runtime.keeper.supervisor import INCOMPLETE_LOGS_CODE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from covey.agent.callers import AgentCaller
    from covey.agent.requests import OutputBatch
    from covey.runtime.keeper.output import RankLogs

WRITE_WAIT_SECONDS: Final = 0.2
_MACHINE_PREFIX: Final = re.compile(rb"\[([^\]\r\n]{1,160})\] (.*)\Z", re.DOTALL)
_RANKED: Final = re.compile(rb"\[([^\]\r\n]{1,160}?) (\d{1,6})\] (.*)\Z", re.DOTALL)
_NOTE: Final = b"covey: "
_NOTES: Final = re.compile(rb"(\A|\n)covey: ")
"""Where a line of `covey run` itself begins."""
_OWN: Final = re.compile(rb"^(?=[^\[\r\n])(?!covey: )", re.MULTILINE)
"""Where a line begins that no rank wrote: an error of `covey run`, of ssh, or of the shell there."""
BATCHES_LIMIT: Final = 8
"""Batches of one machine that wait to be shown."""


class Screen:
    """Writes what programs print. On the main thread."""

    def __init__(self, logs: RankLogs | None = None) -> None:
        """With `logs`, also write a file for each rank."""
        self._logs = logs
        self._lines: dict[tuple[str, int], HeldLine] = {}
        self._cursor: dict[int, Cursor] = {1: Cursor(), 2: Cursor()}
        self._is_closed = {1: False, 2: False}
        self._said = b""
        """What was shown for all machines, which each of them says, too."""
        self.while_waiting: Callable[[], None] = lambda: None
        """Called now and then while the terminal does not take output: a pager may stand still."""

    def show(self, machine: str, stream: int, data: bytes, at: float = 0.0) -> None:
        """Show output of a machine: 1 is standard output, 2 standard error."""
        lines = self._lines.setdefault((machine, stream), HeldLine())
        self._write(machine, stream, lines, lines.take(data))

    def ended(self, machine: str) -> None:
        """Show unfinished lines of a machine."""
        for stream in (1, 2):
            if (lines := self._lines.get((machine, stream))) is not None:
                rest = lines.rest()
                self._write(machine, stream, lines, rest + b"\n" if rest else b"")

    def note(self, text: str) -> None:
        """Show a line about the run."""
        self._put(2, self._cursor[2].make_room() + note_line(text, 2))

    def note_for_all(self, text: str) -> None:
        """Show a line about the run, and not the same line of its machines."""
        self._said = _NOTE + text.encode() + b"\n"
        self.note(text)

    def code_of(self, code: int) -> int:
        """Return the exit code of a run that ended with `code`: not 0 if log files lack some of its output."""
        if code == 0 and self._logs is not None and not self._logs.is_complete:
            self.note("the files in --log-dir lack some of the output")
            return INCOMPLETE_LOGS_CODE
        return code

    def end(self, code: int, reason: str) -> None:
        """Show that the run has ended; a person sees it."""

    def _write(self, machine: str, stream: int, lines: HeldLine, text: bytes) -> None:
        if not text:
            return
        is_new_line = self._cursor[stream].writer is not lines
        if is_new_line and self._said:
            text = b"".join(line for line in text.splitlines(keepends=True) if line != self._said)
            if not text:
                return
        text = _OWN.sub(b"[" + machine.encode() + b"] ", text) if is_new_line else text
        text = _NOTES.sub(rb"\1covey: " + machine.encode() + b": ", text)
        cursor = self._cursor[stream]
        room = cursor.make_room(lines)
        cursor.writer = None if text.endswith(b"\n") else lines
        self._put(stream, room + text)
        self._log(machine, text)

    def _log(self, machine: str, text: bytes) -> None:
        if self._logs is None:
            return
        for line in text.splitlines(keepends=True):
            found = _MACHINE_PREFIX.match(line)
            label = found[1].decode(errors="replace") if found is not None else machine
            if problem := self._logs.write(label, found[2] if found is not None else line):
                self.note(problem)

    def _put(self, stream: int, data: bytes) -> None:
        """Write; a stream that cannot be written any more is left alone, and the run goes on."""
        (sys.stdout if stream == 1 else sys.stderr).flush()
        rest = memoryview(data)
        while rest and not self._is_closed[stream]:
            try:
                if select.select([], [stream], [], WRITE_WAIT_SECONDS)[1]:
                    rest = rest[os.write(stream, rest[: select.PIPE_BUF]) :]  # so much is taken without a wait
                else:
                    self.while_waiting()
            except OSError:
                self._is_closed[stream] = True

    def close(self) -> None:
        """Show nothing more: the terminal does not take it, and is left."""
        self._is_closed = {1: True, 2: True}


class JsonScreen(Screen):
    """A screen that writes lines of JSON, as `covey run --json` does."""

    def note(self, text: str) -> None:
        """Show a line about the run."""
        self.tell("note", text=text)

    def end(self, code: int, reason: str) -> None:
        """Show that the run has ended."""
        self.tell("ended", code=code, reason=reason)

    def tell(self, event: str, **about: object) -> None:
        """Show an event of the run."""
        self._put(1, event_line(event, **about))

    def _write(self, machine: str, stream: int, lines: HeldLine, text: bytes) -> None:
        for line in text.splitlines():
            if line.startswith(_NOTE):
                if line + b"\n" != self._said:
                    self.tell("note", machine=machine, text=line.removeprefix(_NOTE).decode(errors="replace"))
                continue
            found = _RANKED.match(line)
            name, rank, said = (machine.encode(), None, line) if found is None else (found[1], int(found[2]), found[3])
            about = {
                "machine": name.decode(errors="replace"),
                "rank": rank,
                "stream": ("stdout", "stderr")[stream == 2],
            }
            self.tell("output", **about, text=said.decode(errors="replace"))
        self._log(machine, text)


class CellScreen(Screen):
    """A screen that writes to Python's own standard streams, which a notebook shows in the cell that runs."""

    def _put(self, stream: int, data: bytes) -> None:
        if not self._is_closed[stream]:
            target = sys.stdout if stream == 1 else sys.stderr
            target.write(data.decode(errors="replace"))
            target.flush()


class OutputView(Protocol):
    """What shows the output of programs."""

    def show(self, machine: str, stream: int, data: bytes, at: float = 0.0) -> None:
        """Show output of a machine, which was written at a time of its clock; 0 if that is not known."""

    def ended(self, machine: str) -> None:
        """Show unfinished lines of a machine."""

    def note(self, text: str) -> None:
        """Show a line about the run."""


def read_output(programs: Mapping[AgentCaller, int], screen: OutputView, *, to_end: bool) -> None:
    """Show what programs have written; `to_end`, also what they still write, until all have ended.

    Raises:
        CoveyError: an agent cannot be reached; the output of the others is shown first.
    """
    errors: list[CoveyError] = []
    if to_end:
        _read_together(programs, screen, errors)
    else:
        for agent, number in programs.items():
            try:
                for batch in agent.stream("follow", number, 0, False, False):
                    _show(agent.name, batch, screen)
            except CoveyError as error:
                errors.append(error)
            screen.ended(agent.name)
    if errors:
        raise errors[0]


def _read_together(programs: Mapping[AgentCaller, int], screen: OutputView, errors: list[CoveyError]) -> None:
    batches: queue.Queue[tuple[AgentCaller, OutputBatch | CoveyError | None]] = queue.Queue(
        BATCHES_LIMIT * len(programs)
    )

    def read(agent: AgentCaller, number: int) -> None:
        try:
            for batch in agent.stream("follow", number, 0, False, True):
                batches.put((agent, batch))
            batches.put((agent, None))
        except CoveyError as error:
            batches.put((agent, error))

    for agent, number in programs.items():
        threading.Thread(target=read, args=(agent, number), name="covey-logs", daemon=True).start()
    left = len(programs)
    while left:
        agent, batch = batches.get()
        if batch is None or isinstance(batch, CoveyError):
            screen.ended(agent.name)
            left -= 1
            errors += [] if batch is None else [batch]
        else:
            _show(agent.name, batch, screen)


def _show(machine: str, batch: OutputBatch, screen: OutputView) -> None:
    if batch.missing:
        screen.note(f"{machine}: {batch.missing} bytes of output are no longer there")
    times = batch.times or (0.0,) * len(batch.records)
    for (stream, data), at in zip(batch.records, times, strict=False):
        screen.show(machine, stream, data, at)
