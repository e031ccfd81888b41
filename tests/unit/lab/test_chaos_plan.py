"""What chaos does to a job is drawn from a seed, and leaves enough of the job alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.seeds import examples

from covey.base.errors import ConfigError
from covey.lab.chaos.faults import KINDS, LONG_STOP, RETURN_SECONDS, SHORT_STOP, Chaos, PlannedFault, plan

chaos = st.builds(
    Chaos,
    size=st.integers(3, 6),
    seed=st.integers(0, 1 << 32),
    kinds=st.lists(st.sampled_from(list(KINDS)), min_size=1, unique=True).map(tuple),
    every=st.floats(0.2, 3.0),
    count=st.integers(0, 40),
    restarts=st.integers(0, 2),
    min_alive=st.integers(1, 2),
)


@given(chaos)
@example(Chaos(size=3, seed=12055555, kinds=("slow", "cut"), every=1.0765141125925195, count=6))
@settings(max_examples=examples(50), deadline=None)
def test_no_plan_touches_a_process_that_is_gone_or_leaves_too_few(chosen: Chaos) -> None:
    gone: set[int] = set()
    slots, away = chosen.size, dict[int, float]()
    restarts = dict.fromkeys(range(chosen.most), chosen.restarts)
    last = 0.0
    for number, fault in enumerate(plan(chosen)):
        assert (fault.number, fault.kind in chosen.kinds) == (number, True)
        assert fault.at > last
        last = fault.at
        calm = {rank for rank in range(slots) if rank not in gone and away.get(rank, 0.0) <= fault.at}
        if fault.kind == "join":
            assert fault.rank in gone or fault.rank == slots < chosen.most
            slots = max(slots, fault.rank + 1)
            gone.discard(fault.rank)
            away[fault.rank] = fault.at + RETURN_SECONDS
        elif fault.kind == "cut":
            assert {fault.rank, fault.other} <= calm
            assert fault.rank < fault.other
        else:
            assert fault.rank in calm
            assert len(calm) - 1 >= chosen.min_alive
            away[fault.rank] = fault.at + fault.seconds + (RETURN_SECONDS if fault.is_loss else 0.0)
            if fault.kind == "leave" or (fault.kind == "kill" and not restarts[fault.rank]):
                gone.add(fault.rank)
            elif fault.kind == "kill":
                restarts[fault.rank] -= 1


def test_the_same_seed_gives_the_same_faults_in_any_process_and_another_seed_others() -> None:
    chosen = Chaos(size=4, seed=7, count=30)
    program = "from covey.lab.chaos.faults import *; print(plan(Chaos(size=4, seed=7, count=30)))"
    for hash_seed in ("1", "2"):
        other = subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True
        )
        assert other.stdout.strip() == repr(plan(chosen)), other.stderr
    assert plan(chosen) != plan(Chaos(size=4, seed=8, count=30))


def test_every_kind_has_its_turn_and_stops_are_clearly_short_or_long() -> None:
    faults = [fault for seed in range(20) for fault in plan(Chaos(size=4, seed=seed, count=24))]
    assert {fault.kind for fault in faults} == {*KINDS}
    stops = [fault for fault in faults if fault.kind == "stop"]
    assert {SHORT_STOP[0] <= stop.seconds <= SHORT_STOP[1] for stop in stops} == {True, False}
    assert all(stop.is_loss == (LONG_STOP[0] <= stop.seconds <= LONG_STOP[1]) for stop in stops)


def test_no_fault_is_later_than_the_duration_and_a_plan_without_joins_ends() -> None:
    assert all(fault.at <= 5 for fault in plan(Chaos(size=3, seed=1, every=0.5, count=100, duration=5)))
    kills = plan(Chaos(size=4, seed=1, kinds=("kill",), count=100, min_alive=2))
    assert [fault.kind for fault in kills] == ["kill"] * 2


def test_faults_read_as_orders() -> None:
    assert str(PlannedFault(0, 1.0, "stop", 2, seconds=1.25)) == "stop rank 2 for 1.25 s"
    assert str(PlannedFault(0, 1.0, "cut", 0, 2)) == "cut ranks 0 and 2"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kinds": ("kill", "flood")}, "--faults knows no 'flood'; choose from kill, stop"),
        ({"kinds": ()}, "--faults names none"),
        ({"size": 1}, "at least 2 processes"),
        ({"min_alive": 3}, "--min-alive 3 must be at least 1 and less than the 3 processes"),
        ({"every": 0.0}, "--every 0"),
    ],
)
def test_nonsense_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Chaos(**{"size": 3, "seed": 0, **change})  # type: ignore[arg-type]
