"""How the ranks of a group find out where each of them is, and whether all of them called the same."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from covey.base.dtypes import DTYPES
from covey.runtime import loop as control
from covey.runtime.collectives.call_log import OPERATIONS, TEXT_LIMIT, CallLog
from covey.runtime.fault import Fault
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.runtime.collectives.call_log import Call
    from covey.runtime.collectives.engine import Engine
    from covey.wire.header import Header

ANSWER_SECONDS: Final = 0.15
"""How long a rank that found a contradiction collects what the others called."""
ROUNDS: Final = 3
"""How often it asks those who have called nothing yet."""
PARTING_LIMIT: Final = 200
"""Characters of each call that a rank leaves with the others when it closes a group."""
POLL_SECONDS: Final = 0.002


@dataclass(frozen=True)
class Late:
    """A rank that keeps the others of its group waiting."""

    rank: int
    host: str
    pid: int
    answers: bool
    """Whether its process says anything at all; a stopped one does not, nor one in a long call that holds the GIL."""
    behind: int
    """How many operations it has to enter to be where the furthest rank is."""
    call: str
    """What it entered last, as it called it; empty if that is not known, or nothing."""

    def __str__(self) -> str:
        who = f"rank {self.rank} ({self.host}, process {self.pid})"
        if not self.answers:
            return f"{who} does not answer"
        word = "operation" if self.behind == 1 else "operations"
        return f"{who} is {self.behind} {word} behind" + (f"; it last entered {self.call}" if self.call else "")


class StallDiagnosis:
    """What this rank of a group asks the others about their calls, answers them, and concludes."""

    def __init__(self, engine: Engine) -> None:
        self.call_log = CallLog()
        self._owner = weakref.ref(engine)  # groups that are dropped go at once
        self._compared = 0
        """The operation that ranks are known to have called differently, or 0."""
        self._is_told = False
        self._parted: set[int] = set()

    @property
    def _engine(self) -> Engine:
        engine = self._owner()
        assert engine is not None
        return engine

    def call(self, sequence: int) -> None:
        """Tell all others what this rank called at `sequence`, and ask what they did."""
        engine = self._engine
        if engine.node is not None:
            message = messages.Announce(engine.id, sequence, *self._mine(sequence))
            engine.node.tell((member for member in engine.members if member != engine.node.rank), message)

    @property
    def is_comparing(self) -> bool:
        """Whether ranks are known to have called different things: a MismatchError is about to end the group."""
        return self._compared > 0

    def has_parted(self, rank: int) -> bool:
        """Tell whether a rank has closed the group, and told of its last calls."""
        return rank in self._parted

    def part(self) -> None:
        """Leave this rank's last calls with the others: one that only sent may be gone before they notice."""
        engine = self._engine
        runs: list[messages.CallRun] = []
        for sequence, call in self.call_log.recent():
            last = runs[-1] if runs else None
            if last is not None and (last.first + last.count, last.fingerprint) == (sequence, call.fingerprint):
                runs[-1] = messages.CallRun(last.first, last.count + 1, last.fingerprint, last.call)
            else:
                runs.append(messages.CallRun(sequence, 1, call.fingerprint, call.text[:PARTING_LIMIT]))
        if engine.node is not None and runs:
            others = [member for member in engine.members if member != engine.node.rank]
            engine.node.tell(others, messages.Calls(engine.id, tuple(runs)))

    def recall(self, rank: int, calls: messages.Calls) -> None:
        """A rank has closed the group, and tells what it called. On the control loop."""
        self._parted.add(rank)
        for run in calls.runs:
            for sequence in range(run.first, run.first + run.count):
                self.call_log.heard(rank, sequence, sequence, run.fingerprint, run.call)
        self.compare_known()

    def recognise(self, rank: int, header: Header, upcoming: Call | None, *, is_here: bool) -> None:
        """A rank has sent the first bytes of an operation; if it `is_here` it can be asked what it called."""
        sequence = header.sequence
        mine = upcoming if sequence == self.call_log.entered + 1 else self.call_log.at(sequence)
        if mine is None or mine.fingerprint == header.fingerprint or self.call_log.knows(rank, sequence):
            return
        if is_here:
            if not self.is_comparing:
                self._begin(sequence)
            return
        operation = OPERATIONS[header.operation] if header.operation < len(OPERATIONS) else "something else"
        words = [DTYPES[header.dtype].name] if header.dtype < len(DTYPES) else []
        self.call_log.heard(rank, sequence, sequence, header.fingerprint, f"{operation}({', '.join([*words, '...'])})")

    def compare_known(self, upcoming: Call | None = None) -> bool:
        """Have calls compared, if another rank is known to have called otherwise; tell whether it is. On any thread."""
        if not self.is_comparing and (sequence := self.call_log.contradiction(upcoming)):
            if upcoming is not None and sequence == self.call_log.entered + 1:
                self.call_log.enter(sequence, upcoming)
            self._begin(sequence)
        return self.is_comparing

    def conclude(self) -> None:
        """End the group with what is known of the calls that differ. On any thread."""
        self._tell(self._engine, is_last=True)

    def _begin(self, sequence: int) -> None:
        self._compared = sequence
        self.call(sequence)
        control.soon(self._compare, self._engine, sequence, ROUNDS + 1)

    def late(self, waiting_for: tuple[int, ...]) -> tuple[int, ...]:
        """Return who keeps the current operation waiting: those who never came to it, or else those it waits for."""
        engine = self._engine
        return self.call_log.late(engine.sequence, engine.attempt.ranks, engine.rank) or tuple(sorted(set(waiting_for)))

    def excuse(self, late: tuple[int, ...]) -> str:
        """Say why the current operation waits for the ranks that `late` returned."""
        return self.call_log.excuse(self._engine.sequence, late)

    def who_is_late(self, seconds: float) -> list[Late]:
        """Ask all who are left where they are; return those behind the others, and those who do not answer in time.

        On any thread but the control loop's; nothing that is going on is touched.
        """
        engine, until = self._engine, time.monotonic() + seconds
        others = [rank for rank in engine.live if rank != engine.rank]
        answered = self._ask(others, [self.call_log.entered], until)
        reached = {rank: self.call_log.last_of(rank)[0] for rank in answered} | {engine.rank: self.call_log.entered}
        furthest = max(reached.values())
        behind = [rank for rank in answered if reached[rank] < furthest]
        calls = sorted({reached[rank] for rank in behind} - {0})
        self._ask(behind, calls, max(until, time.monotonic() + ANSWER_SECONDS))
        late = []
        for rank in sorted({*others, engine.rank}):
            entered, call = self.call_log.last_of(rank)
            if rank == engine.rank:
                entered, call = self.call_log.entered, self._mine(self.call_log.entered)[1]
            if rank not in reached or reached[rank] < furthest:
                late.append(Late(rank, *engine.whereabouts(rank), rank in reached, furthest - entered, call))
        return late

    def _ask(self, ranks: Sequence[int], sequences: Sequence[int], until: float) -> list[int]:
        """Ask about some operations, and return who of `ranks` has answered by then."""
        before = {rank: self.call_log.words[rank] for rank in ranks}
        for sequence in sequences:
            self.call(sequence)

        def has_answered(rank: int) -> bool:
            return self.call_log.words[rank] >= before[rank] + len(sequences)

        while not all(map(has_answered, ranks)) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        return [rank for rank in ranks if has_answered(rank)]

    def heard(self, rank: int, message: messages.Announce | messages.Position) -> None:
        """Another rank says what it called; answer if it asks, and compare. On the control loop."""
        engine, sequence = self._engine, message.sequence
        entered = sequence
        if isinstance(message, messages.Position):
            entered = message.entered
        elif engine.node is not None:
            answer = messages.Position(engine.id, self.call_log.entered, sequence, *self._mine(sequence))
            engine.node.tell((engine.members[rank],), answer)
        differs = self.call_log.heard(rank, entered, sequence, message.fingerprint, message.call)
        if differs and not self.is_comparing:
            self._begin(sequence)
        elif self.is_comparing:
            self._tell(engine, is_last=False)

    def _mine(self, sequence: int) -> tuple[int, str]:
        call = self.call_log.at(sequence)
        return (0, "") if call is None else (call.fingerprint, call.text[:TEXT_LIMIT])

    def _compare(self, engine: Engine, sequence: int, rounds: int) -> None:
        """Wait until all ranks have said what they called at `sequence`, or had time to; at least one differs."""
        self._tell(engine, is_last=rounds == 1)
        if not self._is_told:
            if rounds <= ROUNDS:
                self.call(sequence)  # a rank that had not come to it then may have come to it by now
            control.control_loop().call_later(ANSWER_SECONDS, self._compare, engine, sequence, rounds - 1)

    def _tell(self, engine: Engine, *, is_last: bool) -> None:
        """End the group with what all ranks called, once that is known or nothing more will be."""
        sequence, ranks = self._compared, engine.attempt.ranks
        if not self._is_told and (is_last or self.call_log.heard_all(sequence, ranks, engine.rank)):
            story = self.call_log.story(sequence, ranks, engine.rank)
            text = f"ranks of group {engine.name!r} called different things as operation {sequence}: {story}"
            engine.fail(Fault("MismatchError", text), differs_at=sequence)
            self._is_told = True  # afterwards: another thread may conclude at the same time, and relies on the fault
