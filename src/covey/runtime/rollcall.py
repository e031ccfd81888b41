"""How the ranks of a group find out where each of them is, and whether all of them called the same."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from covey.runtime import loop as control
from covey.runtime.fault import Fault
from covey.runtime.ledger import Ledger
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.runtime.engine import Engine

ANSWER_SECONDS: Final = 0.15
"""How long a rank that found a contradiction collects what the others called."""
ROUNDS: Final = 3
"""How often it asks those who have called nothing yet."""
TEXT_LIMIT: Final = 2000
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


class RollCall:
    """What this rank of a group asks the others about their calls, answers them, and concludes."""

    def __init__(self, engine: Engine) -> None:
        self.ledger = Ledger()
        self._owner = weakref.ref(engine)  # groups that are dropped go at once
        self._is_comparing = False

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

    def late(self, waiting_for: tuple[int, ...]) -> tuple[int, ...]:
        """Return who keeps the current operation waiting: those who never came to it, or else those it waits for."""
        engine = self._engine
        return self.ledger.late(engine.sequence, engine.circle.ranks, engine.rank) or tuple(sorted(set(waiting_for)))

    def who_is_late(self, seconds: float) -> list[Late]:
        """Ask all who are left where they are; return those behind the others, and those who do not answer in time.

        On any thread but the control loop's; nothing that is going on is touched.
        """
        engine, until = self._engine, time.monotonic() + seconds
        others = [rank for rank in engine.live if rank != engine.rank]
        answered = self._ask(others, [self.ledger.entered], until)
        reached = {rank: self.ledger.last_of(rank)[0] for rank in answered} | {engine.rank: self.ledger.entered}
        furthest = max(reached.values())
        behind = [rank for rank in answered if reached[rank] < furthest]
        calls = sorted({reached[rank] for rank in behind} - {0})
        self._ask(behind, calls, max(until, time.monotonic() + ANSWER_SECONDS))
        late = []
        for rank in sorted({*others, engine.rank}):
            entered, call = self.ledger.last_of(rank)
            if rank == engine.rank:
                entered, call = self.ledger.entered, self._mine(self.ledger.entered)[1]
            if rank not in reached or reached[rank] < furthest:
                late.append(Late(rank, *engine.whereabouts(rank), rank in reached, furthest - entered, call))
        return late

    def _ask(self, ranks: Sequence[int], sequences: Sequence[int], until: float) -> list[int]:
        """Ask about some operations, and return who of `ranks` has answered by then."""
        before = {rank: self.ledger.words[rank] for rank in ranks}
        for sequence in sequences:
            self.call(sequence)

        def has_answered(rank: int) -> bool:
            return self.ledger.words[rank] >= before[rank] + len(sequences)

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
            answer = messages.Position(engine.id, self.ledger.entered, sequence, *self._mine(sequence))
            engine.node.tell((engine.members[rank],), answer)
        differs = self.ledger.heard(rank, entered, sequence, message.fingerprint, message.call)
        if differs and not self._is_comparing:
            self._is_comparing = True
            self.call(sequence)
            control.control_loop().call_later(ANSWER_SECONDS, self._compare, engine, sequence)

    def _mine(self, sequence: int) -> tuple[int, str]:
        call = self.ledger.at(sequence)
        return (0, "") if call is None else (call.fingerprint, call.text[:TEXT_LIMIT])

    def _compare(self, engine: Engine, sequence: int, rounds: int = ROUNDS) -> None:
        """Everyone had time to say what it called at `sequence`; at least one differs from us."""
        ranks = engine.circle.ranks
        if rounds > 1 and not self.ledger.heard_all(sequence, ranks, engine.rank):
            self.call(sequence)  # who had not come to it then may have come to it by now
            control.control_loop().call_later(ANSWER_SECONDS, self._compare, engine, sequence, rounds - 1)
            return
        story = self.ledger.story(sequence, ranks, engine.rank)
        text = f"ranks of group {engine.name!r} called different things as operation {sequence}: {story}"
        engine.fail(Fault("MismatchError", text))
