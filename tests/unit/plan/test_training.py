"""Predictions of training together, against measured runs, and against a simulation of steps."""

from __future__ import annotations

import random

import pytest

from covey.plan import training
from covey.plan.training import CodecCost, Learner, SlowestLine, TrainingWay, ddp, diloco, verdict, ways, with_cable

MBIT = 1e6 / 8
INT8 = CodecCost("int8", 0.254)
MODEL = 3_200_000 * 4
EQUAL = [Learner(60 / 733, 128)] * 2
"""Two machines that take 733 steps a minute alone."""
MEASURED = [
    (100, "", 60 / 60),
    (100, "int8", 60 / 190),
    (1000, "", 50 / 290),
    (1000, "int8", 50 / 460),
]
"""Mbit/s, codec, and seconds of a step of DDP that were measured with this model on two machines."""


def test_steps_of_ddp_are_within_a_fifth_of_what_was_measured() -> None:
    for mbit, codec, seconds in MEASURED:
        way = ddp(EQUAL, MODEL, SlowestLine(mbit * MBIT, 1e-4), INT8 if codec else training.EXACT)
        assert way.step_seconds == pytest.approx(seconds, rel=0.2), (mbit, codec)
        assert way.samples_per_second == pytest.approx(256 / way.step_seconds)
    way = diloco(EQUAL, MODEL, SlowestLine(100 * MBIT, 1e-4), INT8, every=20)
    assert way.step_seconds == pytest.approx(60 / 730, rel=0.2)


def simulated(members: list[Learner], nbytes: float, line: SlowestLine, every: int, seed: int) -> float:
    """Samples a second of DiLoCo, followed step by step: every member computes, a line is busy with one fragment."""
    slowest = max(member.step_seconds for member in members)
    shuffled = random.Random(seed)
    clocks = [0.0] * len(members)
    samples, line_free, periods = 0.0, 0.0, 40
    arrived = [0.0] * training.FRAGMENTS
    for _ in range(periods):
        for fragment in range(training.FRAGMENTS):
            for rank, member in enumerate(members):
                steps = every * slowest / member.step_seconds / training.FRAGMENTS
                clocks[rank] += steps * member.step_seconds * shuffled.uniform(0.98, 1.02)
                clocks[rank] = max(clocks[rank], arrived[fragment - 1])  # the fragment before lands now
                samples += steps * member.samples
            begin = max(*clocks, line_free)
            share = nbytes / training.FRAGMENTS
            line_free = begin + training.exchange_seconds(len(members), share, line)
            arrived[fragment] = line_free
    return samples / max(clocks)


def test_the_pace_of_diloco_is_that_of_steps_followed_one_by_one() -> None:
    uneven = [Learner(0.1, 64), Learner(0.1, 64), Learner(0.2, 64)]
    for members in (EQUAL, uneven):
        for mbit in (5, 20, 100, 1000):
            for every in (8, 40, 200):
                line = SlowestLine(mbit * MBIT, 1e-3)
                predicted = diloco(members, MODEL, line, every=every).samples_per_second
                assert predicted == pytest.approx(simulated(members, MODEL, line, every, every), rel=0.2), (mbit, every)


def test_what_is_best_depends_on_the_line() -> None:
    best = {mbit: ways(EQUAL, MODEL, SlowestLine(mbit * MBIT, 1e-4))[0] for mbit in (0.05, 10, 100, 1000, 100_000)}
    assert best[100_000].text == "DDP", "exact where it costs nothing"
    assert best[100].kind == best[10].kind == "diloco"
    assert best[10].every > best[100].every, "the period is as short as the line allows"
    assert best[0.05].text == "one machine alone"
    assert ways(EQUAL[:1], MODEL, SlowestLine(10 * MBIT)) == [training.alone(EQUAL)]
    for mbit, way in best.items():
        assert way.useful * 1.06 >= max(each.useful for each in ways(EQUAL, MODEL, SlowestLine(mbit * MBIT, 1e-4)))


def test_a_slow_machine_holds_up_ddp_and_not_diloco() -> None:
    members = [Learner(0.1, 64), Learner(0.4, 64)]
    line = SlowestLine(1e12)
    assert ddp(members, MODEL, line).samples_per_second == pytest.approx(128 / 0.4, rel=0.01)
    assert diloco(members, MODEL, line, every=16).samples_per_second == pytest.approx(64 / 0.1 + 64 / 0.4, rel=0.01)


def test_a_run_that_is_slower_than_one_machine_is_told_so_with_what_would_be_better() -> None:
    line = SlowestLine(100 * MBIT, 1e-4)
    found = ways(EQUAL, MODEL, line)
    used = ddp(EQUAL, MODEL, line)
    text = verdict(used, found)
    assert text.startswith("training together is 6."), text
    assert "times slower than one machine alone; DiLoCo int" in text
    assert text.endswith("times faster")
    assert verdict(found[0], found) == ""
    assert verdict(ddp(EQUAL, MODEL, SlowestLine(1e11)), ways(EQUAL, MODEL, SlowestLine(1e11))) == ""
    slow = SlowestLine(0.02 * MBIT)
    assert "one machine alone would be" in verdict(ddp(EQUAL, MODEL, slow), ways(EQUAL, MODEL, slow))
    single = TrainingWay("alone", "", 1, 0.1, 100.0, 1.0)
    assert verdict(single, [single]) == ""
    assert with_cable(EQUAL, MODEL, SlowestLine(5 * MBIT), used) > 2
    assert with_cable(EQUAL, MODEL, SlowestLine(2e8), used) == 1.0
