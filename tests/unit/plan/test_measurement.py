"""Measuring on lines that allow bursts: what is found is what they keep up, and no program waits long for it."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.in_turn import in_turn
from tests.support.seeds import examples, seeds
from tests.support.token_buckets import Bucket, Lines, divided

from covey.plan.measurement import (
    LEAST_PART_SECONDS,
    MEASURED_PIECES,
    MOST_ROUNDS,
    MOST_SECONDS,
    LinkMeasurement,
    steps,
    sustained,
    swap_rounds,
)

MBIT = 1e6 / 8
LONG = 20
"""Round trips that the transfers of an operation take at least, if its lines hold it up and not its latency."""


def test_all_pairs_are_measured_among_few_ranks_and_some_among_many() -> None:
    assert steps(3) == [1, 2]
    assert steps(16) == list(range(1, 16))
    for size in (17, 64, 128):
        found = steps(size)
        assert len(found) <= MOST_ROUNDS
        assert len(set(found)) == len(found)
        assert all(0 < step < size for step in found)
        assert {1, 2, 4, 8} <= set(found)


@settings(max_examples=examples(60), deadline=None)
@given(
    rate=st.floats(0.5, 1_000).map(lambda mbit: mbit * MBIT),
    seconds=st.floats(0.005, 0.5),
    part=st.floats(0, 0.45),
    late=st.floats(0, 0.05),
    lump=st.integers(1, 4),
)
def test_the_speed_of_a_transfer_is_the_one_after_the_burst(
    rate: float, seconds: float, part: float, late: float, lump: int
) -> None:
    """`part` of the transfer passes in a burst; the receiver begins `late`, and reads some pieces at once."""
    size = rate * seconds
    lines = Lines([line := Bucket(rate, part * size)])
    (times,) = lines.send([([line], size)], MEASURED_PIECES)
    read = [max(late, times[min(len(times) - 1, at - at % lump + lump - 1)]) for at in range(MEASURED_PIECES)]
    late_pieces = sum(1 for at in times if at < late)
    if late_pieces < MEASURED_PIECES // 2:
        assert sustained(read, 0.0, int(size / MEASURED_PIECES)) == pytest.approx(rate, rel=0.3)
    assert sustained(read, 0.0, int(size / MEASURED_PIECES)) <= max(size / max(read[-1], 1e-9), 1.25 * rate) * 1.5


def test_a_transfer_that_is_read_at_once_is_as_fast_as_the_whole_of_it() -> None:
    assert sustained([2.0] * MEASURED_PIECES, 1.0, 1000) == MEASURED_PIECES * 1000
    times = [1.5 + 1e-9 * at for at in range(MEASURED_PIECES - 1)]
    assert sustained([*times, 2.0], 1.0, 1000) == MEASURED_PIECES * 1000


class Found(NamedTuple):
    """What a simulated measurement came to."""

    stalls: list[float]
    """By operation."""
    plain: list[float]
    """What each operation took without that."""
    sustained: float
    """What an operation takes when no burst is left."""
    latency: float
    """Seconds of the measurement in which ranks waited for round trips."""
    ratios: dict[tuple[int, int], float]
    """What was measured of the links that hold up the operation, as parts of what they keep up."""


def simulate(seed: int, most_burst: float = 0.5, slowest: float = 1.0) -> Found:
    """Measure on random lines between operations of a random size; all from `seed`.

    `most_burst` is the largest burst, as a part of what a rank sends in an operation, and of what the slowest line
    carries in a second; `slowest` is a rate in Mbit/s.
    """
    rng = random.Random(seed)
    size = rng.randint(3, 6)
    sent = 2 * (size - 1) / size * (1 << 20) * rng.choice([1, 1, 4, 16])
    trip = 10 ** rng.uniform(-4, -1.3)

    def bucket(rate: float) -> Bucket:
        return Bucket(rate, rng.uniform(0, most_burst) * min(sent, usual))

    usual = slowest * MBIT * 10 ** rng.uniform(0, 2.5)
    ups = [bucket(usual * rng.choice([1, 1, 3, 10])) for _ in range(size)]
    downs = [bucket(usual * rng.choice([1, 1, 10])) for _ in range(size)]
    trunks = [bucket(usual), bucket(usual)] if rng.random() < 0.5 else None
    sites = [rng.randrange(2) for _ in range(size)]
    lines = Lines([*ups, *downs, *(trunks or [])])

    def path(source: int, target: int) -> list[Bucket]:
        shared = [trunks[sites[source]]] if trunks and sites[source] != sites[target] else []
        return [ups[source], *shared, downs[target]]

    def kept_up(step: int) -> list[float]:
        """Return the speeds of a round, by source, when no burst is left."""
        paths = [path(slot, (slot + step) % size) for slot in range(size)]
        room = {line: line.rate for each in paths for line in each}
        return divided(paths, room)

    ring = [(path(slot, (slot + 1) % size), sent) for slot in range(size)]
    waits = (size - 1) * trip
    agreement = math.ceil(math.log2(size)) * trip / 2
    slowest_rate = min(kept_up(1))
    measurement = LinkMeasurement(size, swap_rounds(size, MOST_ROUNDS))
    stalls, plain, latency = [], [], 0.0
    speeds = [[0.0] * size for _ in range(size)]
    for number in range(200):
        lines.wait(rng.choice([0.0, 0.0, 0.05, 1.0]))  # the program computes
        began = lines.now
        lines.wait(waits)
        lines.send(ring, coupled=True)
        plain.append(lines.now - began)
        if number == 0:
            continue
        ended = lines.now
        lines.wait(agreement)
        latency += agreement
        measurement.begin(sent, plain[-1])
        while measurement.next_swap() is not None:
            lines.wait(2 * trip + agreement)
            latency += 2 * trip + agreement
            measurement.note(lines.now - ended)
        while (step := measurement.next_step()) is not None:
            start = lines.now
            lines.wait(trip / 2)
            targets = [(slot + step) % size for slot in range(size)]
            pieces = [measurement.piece(slot, target) for slot, target in enumerate(targets)]
            flows = [(path(slot, target), MEASURED_PIECES * pieces[slot]) for slot, target in enumerate(targets)]
            for slot, times in enumerate(lines.send(flows, MEASURED_PIECES)):
                speeds[slot][targets[slot]] = sustained(times, start + trip, pieces[slot])
            lines.wait(agreement)
            latency += trip / 2 + agreement
            measurement.note(lines.now - ended)
        if measurement.is_pass_over:
            assert measurement.take(speeds)
        measurement.end()
        stalls.append(lines.now - ended)
        if measurement.is_done:
            break
    assert measurement.is_done
    assert measurement.spent <= sum(stalls) <= measurement.spent + len(stalls) * agreement + 1e-6
    found = measurement.speeds()
    ratios = {}
    for step in measurement.rounds:
        for source, kept in enumerate(kept_up(step)):
            if kept <= slowest_rate and sent / slowest_rate > LONG * trip:
                ratios[source, (source + step) % size] = found[source][(source + step) % size] / kept
    return Found(stalls, plain[1:], waits + sent / slowest_rate, latency, ratios)


@in_turn(seed=seeds(15))
def test_no_operation_waits_longer_for_a_measurement_than_it_takes_itself_nor_for_a_second(seed: int) -> None:
    found = simulate(seed)
    for stall in found.stalls:
        assert stall <= min(MOST_SECONDS, max(1.2 * found.sustained, 3 * LEAST_PART_SECONDS))
    assert len(found.stalls) > 1
    # Flows of a round may share a line that those of the operation did not share.
    assert sum(found.stalls) - found.latency <= 2 * min(MOST_SECONDS, found.sustained) + LEAST_PART_SECONDS


def test_what_is_measured_of_the_slowest_lines_is_what_they_keep_up() -> None:
    ratios = sorted(ratio for seed in seeds(15) for ratio in simulate(seed, 0.125).ratios.values())
    assert len(ratios) > 100
    assert ratios[0] > 0.8
    assert ratios[len(ratios) * 19 // 20] < 1.25


@pytest.mark.parametrize("figure", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_speed_ends_a_measurement_and_what_is_no_time_only_its_part(figure: float) -> None:
    measurement = LinkMeasurement(3, [])
    measurement.begin(1e6, 1.0)
    assert measurement.next_step() == 1
    measurement.note(figure)
    if figure <= 0:
        assert measurement.next_step() == 2
    else:
        assert measurement.next_step() is None, "the next operation goes on"
        measurement.end()
        measurement.begin(1e6, 1.0)
        assert measurement.next_step() == 2
    measurement.end()
    assert math.isfinite(measurement.spent)
    assert measurement.is_pass_over
    speeds = [[1e6] * 3 for _ in range(3)]
    speeds[1][2] = figure
    assert not measurement.take(speeds)
