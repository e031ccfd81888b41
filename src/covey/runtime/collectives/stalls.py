"""Stall diagnosis: which operation each rank of a group is in, and whether all ranks called the same one.

A rank that waits asks the others what they called (`Announce`); each answers with its position (`Position`). If two
calls with one number differ, the group ends with a MismatchError that lists what each rank called.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.base.numbers import Rank
from covey.runtime import loop as control
from covey.runtime.collectives.call_log import CALL_TEXT_LIMIT, describe_header
from covey.runtime.fault import Fault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.runtime.collectives.call_log import Call, CallLog
    from covey.runtime.collectives.evidence import CallEvidence
    from covey.runtime.collectives.failure import Failure
    from covey.runtime.collectives.operation import CurrentAttempt, CurrentOperation
    from covey.runtime.collectives.roster import GroupFacts, GroupRoster
    from covey.wire import messages
    from covey.wire.header import TransferHeader

COMPARE_ROUND_SECONDS: Final = 0.15
"""How long a rank that found a difference waits for the other ranks' calls, in each round."""
ROUNDS: Final = 3
"""How often it asks again, for the ranks that had not entered the operation."""
COMPARE_SECONDS: Final = (ROUNDS + 1) * COMPARE_ROUND_SECONDS
"""The longest time that a comparison of calls takes."""
ANSWERS_CHECK_EVERY: Final = 0.002
"""How often a rank that has asked others for their calls checks for answers."""


class Late(NamedTuple):
    """A rank that keeps the other ranks of its group waiting."""

    rank: Rank
    host: str
    pid: int
    answers: bool
    """Whether its process answers. A stopped process does not, nor one in a long call that holds the GIL."""
    behind: int
    """How many operations it has yet to enter to reach the furthest rank."""
    call: str
    """The operation that it entered last, as it called it; empty if there is none or it is not known."""

    def __str__(self) -> str:
        name = f"rank {self.rank} ({self.host}, process {self.pid})"
        if not self.answers:
            return f"{name} does not answer"
        word = "operation" if self.behind == 1 else "operations"
        return f"{name} is {self.behind} {word} behind" + (f"; it last entered {self.call}" if self.call else "")


class StallDiagnosis:
    """Asks the other ranks about their calls, answers their questions, and compares."""

    def __init__(
        self,
        facts: GroupFacts,
        roster: GroupRoster,
        operation: CurrentOperation,
        attempt: CurrentAttempt,
        call_log: CallLog,
        evidence: CallEvidence,
        failure: Failure,
    ) -> None:
        self._facts, self._roster, self._operation, self._attempt = facts, roster, operation, attempt
        self.call_log, self._evidence, self._failure = call_log, evidence, failure
        self._is_concluded = False
        self._seen: dict[tuple[Rank, int], TransferHeader] = {}
        """By rank and operation: headers that lanes have shown, of calls that their ranks have not told of."""
        self.reported = threading.Event()
        """Set whenever another rank has told something about its calls."""

    def announce(self, sequence: int, *, wakes: bool = True) -> None:
        """Tell the other ranks what this rank called as operation `sequence`, and ask what they called.

        Unless it `wakes` idle links, most ranks behind them are left out. If two ranks called different operations,
        some pair of neighbours did too; that pair notices, and asks every rank.
        """
        from covey.wire import messages  # slow to load; a program that joins a run has it already

        self._roster.tell_others(messages.Announce(self._facts.id, sequence, *self._mine(sequence)), wakes=wakes)

    @property
    def is_comparing(self) -> bool:
        """Whether ranks are known to have called different operations: a MismatchError is about to end the group."""
        return self.call_log.compared > 0

    def has_parted(self, rank: Rank) -> bool:
        """Tell whether a rank has closed the group and sent its last calls."""
        return rank in self._evidence.parted

    def has_parted_in_order(self, rank: Rank) -> bool:
        """Tell whether the program of a rank has closed the group without an error."""
        return rank in self._evidence.in_order

    def recall(self, rank: Rank, calls: messages.Calls) -> None:
        """Note the last calls of a rank that has closed the group, and compare. On the control loop.

        Other threads find the rank parted only when all its calls are noted.
        """
        for run in calls.runs:
            for sequence in range(run.first, run.first + run.count):
                self.call_log.heard(rank, sequence, sequence, run.fingerprint, run.call)
        if calls.in_order:
            self._evidence.in_order.add(rank)
        self._evidence.parted.add(rank)
        self.compare_known()
        self.reported.set()

    def recognise(self, rank: Rank, header: TransferHeader, upcoming: Call | None, *, is_here: bool) -> None:
        """Note the header of an operation that a rank has sent; if the rank `is_here`, ask it what it called."""
        sequence = header.sequence
        if self.call_log.knows(rank, sequence):
            return
        self._seen[rank, sequence] = header  # a rank that is thought to be here may never answer
        mine = upcoming if sequence == self.call_log.entered + 1 else self.call_log.at(sequence)
        if mine is None or mine.fingerprint == header.fingerprint:
            return
        if is_here:
            if not self.is_comparing:
                self._begin(sequence)
            return
        self.call_log.heard(rank, sequence, sequence, header.fingerprint, describe_header(header))

    def compare_known(self, upcoming: Call | None = None) -> bool:
        """Start a comparison if a known call of another rank differs; tell whether one is under way. On any thread."""
        if not self.is_comparing and (sequence := self.call_log.contradiction(upcoming)):
            if upcoming is not None and sequence == self.call_log.entered + 1:
                self.call_log.enter(sequence, upcoming)
            self._begin(sequence)
        return self.is_comparing

    def ask(self, ranks: Sequence[Rank], sequence: int) -> None:
        """Ask some ranks what they called as operation `sequence`, and tell them what this rank called."""
        from covey.wire import messages  # slow to load; a program that joins a run has it already

        self._roster.tell(ranks, messages.Announce(self._facts.id, sequence, *self._mine(sequence)))

    def compare(self, sequence: int) -> None:
        """Start a comparison of an operation that another rank has called differently, unless one is under way."""
        if not self.is_comparing:
            self._begin(sequence)

    def conclude(self) -> None:
        """End the group with what is known of the calls that differ. On any thread."""
        self._conclude(is_last=True)

    def _begin(self, sequence: int) -> None:
        self.call_log.compared = sequence
        self.announce(sequence)
        control.soon(self._compare, sequence, ROUNDS + 1)

    def late(self, waiting_for: tuple[Rank, ...]) -> tuple[Rank, ...]:
        """Return the ranks that have not entered the current operation; if there are none, `waiting_for`."""
        late = self.call_log.late(self._operation.sequence, self._attempt.ranks, self._roster.rank)
        return tuple(map(Rank, late)) or tuple(sorted(set(waiting_for)))

    def excuse(self, late: tuple[Rank, ...]) -> str:
        """Say why the current operation waits for the ranks that `late` returned."""
        return self.call_log.excuse(self._operation.sequence, late)

    def who_is_late(self, seconds: float) -> list[Late]:
        """Ask the live ranks where they are; return those behind the others, and those that do not answer in time.

        On any thread but the control loop's. Running operations are not disturbed.
        """
        until, me = time.monotonic() + seconds, self._roster.rank
        others = [rank for rank in self._attempt.live if rank != me]
        answered = self._ask(others, [self.call_log.entered], until)
        reached = {rank: self.call_log.last_of(rank)[0] for rank in answered} | {me: self.call_log.entered}
        furthest = max(reached.values())
        behind = [rank for rank in answered if reached[rank] < furthest]
        calls = sorted({reached[rank] for rank in behind} - {0})
        self._ask(behind, calls, max(until, time.monotonic() + COMPARE_ROUND_SECONDS))
        late = []
        for rank in sorted({*others, me}):
            entered, call = self.call_log.last_of(rank)
            if rank == me:
                entered, call = self.call_log.entered, self._mine(self.call_log.entered)[1]
            if rank not in reached or reached[rank] < furthest:
                host, pid = self._roster.host_name(rank), self._roster.pid(rank)
                late.append(Late(rank, host, pid, rank in reached, furthest - entered, call))
        return late

    def _ask(self, ranks: Sequence[Rank], sequences: Sequence[int], until: float) -> list[Rank]:
        """Ask about some operations, and return those of `ranks` that have answered by `until`."""
        before = {rank: self.call_log.words[rank] for rank in ranks}
        for sequence in sequences:
            self.announce(sequence)

        def has_answered(rank: Rank) -> bool:
            return self.call_log.words[rank] >= before[rank] + len(sequences)

        while not all(map(has_answered, ranks)) and time.monotonic() < until:
            time.sleep(ANSWERS_CHECK_EVERY)
        return [rank for rank in ranks if has_answered(rank)]

    def heard(self, rank: Rank, message: messages.Announce | messages.Position) -> None:
        """Note what another rank called, answer if it asks, and compare. On the control loop."""
        from covey.wire import messages  # slow to load; a program that joins a run has it already

        sequence = message.sequence
        entered = sequence if message.call else 0  # a rank may ask about an operation that it has not called
        if isinstance(message, messages.Position):
            entered = message.entered
        else:
            answer = messages.Position(self._facts.id, self.call_log.entered, sequence, *self._mine(sequence))
            self._roster.tell((rank,), answer)
        differs = self.call_log.heard(rank, entered, sequence, message.fingerprint, message.call)
        if differs and not self.is_comparing:
            self._begin(sequence)
        elif self.is_comparing:
            self._conclude(is_last=False)
        self.reported.set()

    def _mine(self, sequence: int) -> tuple[int, str]:
        call = self.call_log.at(sequence)
        return (0, "") if call is None else (call.fingerprint, call.text[:CALL_TEXT_LIMIT])

    def _compare(self, sequence: int, rounds: int) -> None:
        """Wait until all ranks have said what they called at `sequence`, for at most `rounds` rounds."""
        self._conclude(is_last=rounds == 1)
        if not self._is_concluded:
            if rounds <= ROUNDS:
                self.announce(sequence)  # a rank that had not entered the operation before may have by now
            control.control_loop().call_later(COMPARE_ROUND_SECONDS, self._compare, sequence, rounds - 1)

    def _conclude(self, *, is_last: bool) -> None:
        """End the group with what each rank called, once all are known or this `is_last`."""
        log, me, parted = self.call_log, self._roster.rank, self._evidence.parted
        sequence, ranks = log.compared, self._attempt.ranks
        if not self._is_concluded and (is_last or log.heard_all(sequence, ranks, parted | {me})):
            for (rank, of), header in list(self._seen.items()):
                if of == sequence and not log.knows(rank, of):
                    log.heard(rank, of, of, header.fingerprint, describe_header(header))
            story = log.story(sequence, ranks, me, parted)
            text = f"ranks of group {self._facts.name!r} called different things as operation {sequence}: {story}"
            self._failure.declare(Fault("MismatchError", text), differs_at=sequence)
            self._is_concluded = True  # only now: a thread that concludes at the same time relies on the fault
