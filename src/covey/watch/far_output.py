"""Output of the other machines of a run: what its ranks tell, where their user shares it, and what agents tell.

A view that shows output calls `news` now and then. As long as it does, and not otherwise, a source asks the other
machines for more. All that comes is bounded: the newest lines are held until they are taken.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError, RemoteProtocolError
from covey.net.host.saved_output import OutputRecord
from covey.net.host.saved_runs import past_runs
from covey.runtime.metrics.inspection import OUTPUT
from covey.watch.output import RING_LINES, LineAssembly, OutputReader, RecordLines, RunFollower, labelled
from covey.wire import messages
from covey.wire.reports import OutputKnown, decode_output, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from covey.agent.requests import OutputBatch
    from covey.watch.collector import Collector
    from covey.watch.output import LineSource, OutputLine

WANTED_SECONDS: Final = 10.0
"""How long after the last call of `news` more is asked for."""
REFUSALS: Final = 2
"""A machine that has told nothing so many times keeps its output to itself: once may be that it is asked too often."""
AGAIN_EVERY: Final = 10.0
"""How often it is asked all the same."""
OUTPUT_MACHINES_LIMIT: Final = 256


class MachineOutput:
    """What the ranks on one machine tell of the output there."""

    def __init__(self, *, wants_all: bool = False) -> None:
        self._wants_all = wants_all
        self._logs: dict[str, tuple[int, RecordLines]] = {}
        """By name: up to where it is known."""
        self._refusals = 0
        self._asked_at = -AGAIN_EVERY
        self.has_more = True
        """Whether there is more to be asked for at once."""

    @property
    def has_told_all(self) -> bool:
        """Whether it has told all that was there when it was asked last, or tells nothing."""
        return self.is_silent or not self.has_more

    @property
    def is_silent(self) -> bool:
        """Whether the machine keeps its output to itself."""
        return self._refusals >= REFUSALS

    @property
    def gone(self) -> int:
        """How many lines the logs no longer had when they were told."""
        return sum(lines.gone for _, lines in self._logs.values())

    def question(self, now: float) -> messages.Inspect | None:
        """Return what to ask a rank there; None if it is too early."""
        if self.is_silent and now - self._asked_at < AGAIN_EVERY:
            return None
        self._asked_at = now
        known = OutputKnown(tuple((name, offset) for name, (offset, _) in self._logs.items()), self._wants_all)
        return messages.Inspect(OUTPUT, 0, encode(known))

    def take(self, answer: object, machine: str) -> list[OutputLine]:
        """Return the lines of an answer; `machine` is what the machine is called."""
        if not isinstance(answer, messages.Inspected) or answer.what != OUTPUT:
            return []
        if not answer.pages:
            self._refusals += 1
            return []
        try:
            told = decode_output(answer.body)
        except RemoteProtocolError:
            return []
        self._refusals, self.has_more = 0, told.has_more
        found: list[OutputLine] = []
        for log in told.logs:
            _, lines = self._logs.get(log.name, (0, RecordLines(machine)))
            found += lines.take(OutputRecord(each.stream, each.rank, each.at, each.lines_before, each.data)
                                for each in log.records)  # fmt: skip
            self._logs[log.name] = log.next, lines
        return found


class ProgramOutput:
    """The output of one program that an agent has started."""

    def __init__(self, machine: str, offset: int) -> None:
        self._machine, self.next = machine, offset
        self.has_more = True
        """Whether the agent has more of it than was read."""
        self._streams = {1: LineAssembly(), 2: LineAssembly()}

    def take(self, batch: OutputBatch) -> list[OutputLine]:
        """Return the lines of a batch."""
        self.next = batch.next
        times = batch.times or (0.0,) * len(batch.records)
        return [
            labelled(self._machine, stream, line, at)
            for (stream, data), at in zip(batch.records, times, strict=False)
            if stream in self._streams
            for line in self._streams[stream].take(data)
        ]


class FarOutput:
    """The output of the other machines of one run. Any thread may call any method; none waits."""

    def __init__(
        self,
        run: str,
        run_key: str,
        own_machine: str,
        names: Callable[[], Mapping[str, str]],
        *,
        wants_all: bool = False,
    ) -> None:
        """`own_machine` is the id of a machine whose output is read here; `names` returns what machines are called.

        With `wants_all`, begin where the output does, else shortly before its end.
        """
        self.run, self.run_key, self.own_machine = run, run_key, own_machine
        self._names, self._wants_all = names, wants_all
        self._lock = threading.Lock()
        self._machines: dict[str, MachineOutput] = {}
        self._programs: dict[tuple[bytes, int], ProgramOutput] = {}
        self._lines: deque[OutputLine] = deque(maxlen=RING_LINES)
        self._dropped = 0
        self._taken_at = time.monotonic()
        self.programs_asked = False
        """Whether the agents have been asked for their programs."""

    @property
    def has_told_all(self) -> bool:
        """Whether all machines and agents that answer have told what was there when they were asked last."""
        with self._lock:
            machines = all(each.has_told_all for each in self._machines.values())
            return self.programs_asked and machines and not any(each.has_more for each in self._programs.values())

    @property
    def is_wanted(self) -> bool:
        """Whether a view has asked for news lately."""
        return time.monotonic() - self._taken_at < WANTED_SECONDS

    def news(self) -> list[OutputLine]:
        with self._lock:
            self._taken_at = time.monotonic()
            lines = sorted(self._lines, key=lambda line: line.at)
            self._lines.clear()
            return lines

    @property
    def gone(self) -> int:
        with self._lock:
            return self._dropped + sum(each.gone for each in self._machines.values())

    @property
    def silent(self) -> tuple[str, ...]:
        names = self._names()
        with self._lock:
            told = {machine.hex() for machine, _ in self._programs}
            return tuple(
                names.get(id, id[:8]) for id, each in self._machines.items() if each.is_silent and id not in told
            )

    # For sources

    def question(self, machine: str) -> messages.Inspect | None:
        """Return what to ask a rank on a machine; None if nothing is to be asked now."""
        with self._lock:
            if machine == self.own_machine or (
                machine not in self._machines and len(self._machines) >= OUTPUT_MACHINES_LIMIT
            ):
                return None
            return self._machines.setdefault(machine, self._new()).question(time.monotonic())

    def _new(self) -> MachineOutput:
        return MachineOutput(wants_all=self._wants_all)

    def told(self, machine: str, answer: object) -> None:
        """Take the answer of a rank on a machine."""
        name = self._names().get(machine, machine[:8])
        with self._lock:
            if machine in self._machines:
                self._add(self._machines[machine].take(answer, name))

    def program(self, machine: bytes, name: str, number: int, tail: int) -> ProgramOutput | None:
        """Return the output of an agent's program, up to where it is known; None if it is read here."""
        if machine.hex() == self.own_machine:
            return None
        shown = self._names().get(machine.hex(), name)
        with self._lock:
            return self._programs.setdefault((machine, number), ProgramOutput(shown, 0 if self._wants_all else tail))

    def printed(self, program: ProgramOutput, batch: OutputBatch) -> None:
        """Take what an agent's program has printed."""
        with self._lock:
            self._add(program.take(batch))

    def _add(self, lines: Sequence[OutputLine]) -> None:
        self._dropped += max(0, len(self._lines) + len(lines) - RING_LINES)
        self._lines.extend(lines)


def outputs_of(collector: Collector) -> OutputReader:
    """Return the output of the runs that a collector sees, of all machines that tell it."""

    def find(run_id: str) -> list[LineSource]:
        here: list[LineSource] = list(own_output(collector, run_id, only_tail=True))
        far = far_output(collector, run_id, has_own=bool(here))
        return here if far is None else [*here, far]

    return OutputReader(find)


def far_output(collector: Collector, run_id: str, *, has_own: bool, wants_all: bool = False) -> FarOutput | None:
    """Begin to ask other machines for the output of a run; None if this machine is in no cluster.

    With `has_own`, the output of this machine is read here, and not asked for.
    """
    overview = collector.newest()
    run = next((run for run in overview.runs if run.id == run_id), None)
    if run is None or not overview.cluster:
        return None
    own = next((machine.id for machine in overview.machines if machine.is_here), "") if has_own else ""

    def names() -> dict[str, str]:
        return {machine.id: machine.name for machine in collector.newest().machines}

    far = FarOutput(run.name, collector.books.key_of(run_id), own, names, wants_all=wants_all)
    collector.follow(far)
    return far


def own_output(collector: Collector, run_id: str, *, only_tail: bool) -> Iterator[RunFollower]:
    """Yield what this machine has kept of a run: of a local one by its process, else of all its shares that go on."""
    cluster = collector.newest().cluster
    name, _, process = collector.books.key_of(run_id).rpartition(":")
    try:
        found = past_runs()
    except ConfigError:
        return
    here = [run for run in found if not run.record.cluster and str(run.record.pid) == process]
    shares = [run for run in found if cluster and (run.record.cluster, run.record.name) == (cluster, name)]
    going = [run for run in here or shares if run.is_running]
    for run in going or (here or shares)[-1:]:
        yield RunFollower(run, only_tail=only_tail)
