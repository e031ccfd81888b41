"""Both ends of a lane use the new one from the same operation on."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.in_turn import in_turn
from tests.support.waiting import DEADLINE

from covey.base.numbers import Slot
from covey.runtime.collectives.attempt_lanes import MOST_AHEAD, LaneSwitch

SLOT = Slot(1)


class Program:
    """One end of a lane: what an attempt is to a switch, and a program that counts operations."""

    def __init__(self, sequence: int = 0) -> None:
        self.operation = SimpleNamespace(sequence=sequence)
        self.switch = LaneSwitch()
        self.lane = "old"
        self.is_open = self.is_halted = False
        self.used: list[str] = []
        """The lane that each operation used."""

    def begin(self) -> None:
        """Begin the next operation, as `Engine.perform` and `Attempt.begin` do."""
        self.operation.sequence += 1
        if self.switch.pending:
            self.switch.begin(cast("Any", self))
        self.used.append(self.lane)
        self.switch.open_shortcut(self)

    def propose(self, least: int = 0) -> int:
        return self.switch.propose(cast("Any", self), SLOT, cast("Any", "new"), least)

    def accept(self, sequence: int) -> int:
        return self.switch.accept(cast("Any", self), SLOT, cast("Any", "new"), sequence)

    # What a switch asks of an attempt

    def close_shortcut(self) -> None:
        self.is_open = False

    def replace_lane(self, slot: Slot, lane: Any) -> None:
        assert slot == SLOT
        self.lane = lane

    def check(self) -> None:
        if self.is_halted:
            raise InterruptedError

    def stalled(self, since: float, waiting_for: tuple[int, ...]) -> float:
        assert waiting_for == (SLOT,)
        return since


@in_turn(seed=range(200))
def test_whatever_the_two_programs_do_meanwhile_each_operation_uses_one_lane(seed: int) -> None:
    """The two ends are at different operations, and the messages between them take their time."""
    random_ = random.Random(seed)
    ours, theirs = Program(random_.randrange(5)), Program(random_.randrange(40))
    first = min(ours.operation.sequence, theirs.operation.sequence)
    ours.used, theirs.used = (["old"] * (each.operation.sequence - first) for each in (ours, theirs))
    least = 0
    for turn in range(30):
        proposed = ours.propose(least)
        assert not ours.is_open
        for _ in range(random_.randrange(6)):
            theirs.begin()
        for _ in range(random_.randrange(4)):
            if ours.operation.sequence + 1 < proposed:  # else it would wait for the answer
                ours.begin()
        begun = theirs.accept(proposed)
        for _ in range(random_.randrange(6)):
            theirs.begin()
        if not begun:
            ours.switch.agree(SLOT, proposed)
            break
        ours.switch.cancel(SLOT)
        ours.begin()
        assert ours.is_open, "nothing is pending"
        least = max(proposed + 1, begun + 2**turn)
    last = max(ours.operation.sequence, theirs.operation.sequence, proposed) + 2
    for each in (ours, theirs):
        while each.operation.sequence < last:
            each.begin()
        assert each.is_open
    assert ours.used == theirs.used
    assert ours.used[-1] == "new"


def test_an_operation_that_has_begun_or_is_far_ahead_is_refused() -> None:
    program = Program(7)
    assert program.accept(7) == 8
    assert program.accept(8) == 8, "a shortcut may have begun it, which is not counted yet"
    assert program.accept(8 + MOST_AHEAD + 1) == 8
    program.begin()
    assert program.lane == "old"
    assert program.accept(10) == 0
    program.begin()
    assert program.lane == "old"
    program.begin()
    assert program.lane == "new"


def test_the_end_that_proposes_waits_at_the_operation_for_the_answer() -> None:
    program = Program()
    proposed = program.propose()
    while program.operation.sequence < proposed - 1:
        program.begin()
    waiting = threading.Thread(target=program.begin, daemon=True)
    waiting.start()
    time.sleep(0.05)
    assert len(program.used) == proposed - 1, "it must not use either lane"
    program.switch.agree(SLOT, proposed + 1)  # the answer to another proposal
    time.sleep(0.05)
    assert len(program.used) == proposed - 1
    program.switch.agree(SLOT, proposed)
    waiting.join(DEADLINE)
    assert program.used == ["old"] * (proposed - 1) + ["new"]


def test_waiting_ends_when_the_operation_does() -> None:
    program = Program()
    proposed = program.propose()
    while program.operation.sequence < proposed - 1:
        program.begin()
    program.is_halted = True
    with pytest.raises(InterruptedError):
        program.begin()
