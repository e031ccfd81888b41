"""What chaos does to a job is drawn from a seed, and leaves enough of the job alone."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.seeds import examples

from covey.base.errors import ConfigError
from covey.lab.chaos.faults import (
    EXTRA,
    FAULT_KINDS,
    RESTART_SECONDS,
    SPANS,
    ChaosTerms,
    PlannedFault,
    known,
    pick,
    plan,
    touched_by,
)
from covey.lab.chaos.orders import MOMENTS
from covey.proto.evidence import STOPPED_SILENCE

if TYPE_CHECKING:
    from covey.lab.chaos.faults import Where

terms = st.builds(
    ChaosTerms,
    size=st.integers(3, 6),
    seed=st.integers(0, 1 << 32),
    kinds=st.lists(st.sampled_from(list(known("command"))), unique=True).map(tuple),
    every=st.floats(0.2, 3.0),
    count=st.integers(0, 40),
    restarts=st.integers(0, 2),
    min_alive=st.integers(1, 2),
)


@given(terms)
@example(ChaosTerms(size=3, seed=12055555, kinds=("slow", "cut"), every=1.0765141125925195, count=6))
@settings(max_examples=examples(50), deadline=None)
def test_no_fault_of_a_plan_comes_while_too_few_members_are_there(chosen: ChaosTerms) -> None:
    back_at, restarts, last = [0.0] * chosen.size, [chosen.restarts] * chosen.size, 0.0
    for number, fault in enumerate(plan(chosen)):
        assert (fault.number, fault.kind in chosen.chosen) == (number, True)
        assert fault.at > last
        last = fault.at
        members = [at for at in range(len(back_at)) if back_at[at] <= fault.at]
        touched = touched_by(fault.kind, len(members))
        assert len(members) - touched >= chosen.min_alive
        assert len(members) >= FAULT_KINDS[fault.kind].least
        gone = []
        for at in pick(members, fault.target, touched):
            back_at[at] = fault.at + fault.seconds + (RESTART_SECONDS if fault.kind != "pause" else 0.0)
            if fault.kind == "slow":
                back_at[at] = fault.at + fault.seconds
            if fault.kind == "leave" or (fault.kind == "kill" and not restarts[at]):
                gone.append(at)
            elif fault.kind == "kill":
                restarts[at] -= 1
        for at in gone:
            del back_at[at], restarts[at]
        if fault.kind == "join":
            back_at.append(fault.at + RESTART_SECONDS)
            restarts.append(chosen.restarts)
            assert len(back_at) <= chosen.size + EXTRA


def test_the_same_seed_gives_the_same_faults_in_any_process_and_another_seed_others() -> None:
    chosen = ChaosTerms(size=4, seed=7, count=30)
    program = "from covey.lab.chaos.faults import *; print(plan(ChaosTerms(size=4, seed=7, count=30)))"
    for hash_seed in ("1", "2"):
        other = subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True
        )
        assert other.stdout.strip() == repr(plan(chosen)), other.stderr
    assert plan(chosen) != plan(ChaosTerms(size=4, seed=8, count=30))


def planned(where: Where, **changes: Any) -> list[PlannedFault]:
    """Return the faults of many seeds."""
    chosen: dict[str, Any] = {"size": 4, "count": 24, "where": where, "restarts": 20, "min_alive": 1} | changes
    return [fault for seed in range(30) for fault in plan(ChaosTerms(seed=seed, **chosen))]


@pytest.mark.parametrize("where", ["command", "machine", "hosts"])
def test_every_kind_has_its_turn_and_lasts_as_long_as_it_should(where: Where) -> None:
    faults = planned(where, min_alive=int(where == "command"))
    assert {fault.kind for fault in faults} == {*known(where)}
    for fault in faults:
        low, high = SPANS.get(fault.kind, (0.0, 0.0))
        assert low <= fault.seconds <= high
        assert 0 <= fault.target < 1
    assert SPANS["pause"][1] < STOPPED_SILENCE < SPANS["stop"][0]


def test_the_kinds_of_a_command_take_turns_and_those_of_a_checked_run_come_by_weight() -> None:
    first = plan(ChaosTerms(size=6, seed=1, count=6, kinds=("cut", "pause", "slow"), every=10))
    assert [sorted(fault.kind for fault in first[at : at + 3]) for at in (0, 3)] == [["cut", "pause", "slow"]] * 2
    counts = Counter(fault.kind for fault in planned("machine", kinds=("kill", "order"), every=10))
    assert counts["order"] == 2 * counts["kill"]


def test_after_a_process_has_left_not_all_others_are_killed_at_once() -> None:
    """`covey run` would regard the work as done, as a process has exited with 0 and no member is left."""
    for seed in range(30):
        terms = ChaosTerms(
            size=4, seed=seed, count=12, where="machine", kinds=("leave", "all"), restarts=20, min_alive=0
        )
        kinds = [fault.kind for fault in plan(terms)]
        assert "leave" in kinds
        assert "all" not in kinds[kinds.index("leave") :]


def test_orders_have_all_moments_and_stop_or_kill() -> None:
    faults = planned("machine", count=60, every=10)
    given = [fault.order for fault in faults if fault.order is not None]
    assert {order.moment for order in given} == set(MOMENTS)
    assert {order.signal for order in given} == {signal.SIGKILL, signal.SIGSTOP}
    assert all((order.seconds > 0) == (order.signal == signal.SIGSTOP) for order in given)
    assert all((fault.kind == "order") == (fault.order is not None) for fault in faults)


def test_faults_come_about_as_often_as_asked_for_and_none_after_the_duration() -> None:
    times = [fault.at for fault in plan(ChaosTerms(size=4, seed=3, kinds=("cut",), count=400, every=2.0))]
    assert times == sorted(times)
    assert 1.8 < (times[-1] - times[0]) / 399 < 2.2
    assert all(fault.at <= 5 for fault in plan(ChaosTerms(size=3, seed=1, every=0.5, count=100, duration=5)))


def test_a_plan_without_newcomers_ends_when_no_more_members_may_be_lost() -> None:
    kills = plan(ChaosTerms(size=4, seed=1, kinds=("kill",), count=100, min_alive=2))
    assert [fault.kind for fault in kills] == ["kill"] * 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kinds": ("kill", "flood")}, "--faults knows no 'flood' for a command; choose from kill, stop"),
        ({"kinds": ("unplug",), "where": "machine"}, "--faults knows no 'unplug' on one machine; choose from kill"),
        ({"kinds": ("all",), "where": "hosts"}, "--faults knows no 'all' across hosts; choose from kill"),
        ({"size": 1}, "at least 2 processes"),
        ({"min_alive": 3}, "--min-alive 3 must be at least 1 and less than the 3 processes"),
        ({"min_alive": 0}, "--min-alive 0 must be at least 1"),
        ({"every": 0.0}, "--every 0"),
    ],
)
def test_nonsense_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ChaosTerms(**{"size": 3, "seed": 0, **change})  # type: ignore[arg-type]
