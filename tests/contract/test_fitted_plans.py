"""Plans that fit the links: ranks measure, choose alike, and change together; nothing they say can make them differ."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.compiled import EXECUTORS, use_executors

from covey.base.errors import ConfigError
from covey.plan import measurement
from covey.plan.choose import PLANNED_BYTES, ROOTED_PLANS
from covey.runtime.collectives import link_probes, planner, saved_links, size_class
from covey.runtime.collectives.planner import TIMED_PLAIN_CALLS
from covey.runtime.joining.node import node_of
from covey.testing.threads import run_threads

if TYPE_CHECKING:
    from covey import Group, PlanReport

    Array = np.ndarray[Any, np.dtype[Any]]

COUNT = PLANNED_BYTES // 4
SLOW, FAST = 4_000_000, 40_000_000
"""Bytes per second of lanes: so slow that no moment in which the machine stands still decides the choice."""


MEASURED = TIMED_PLAIN_CALLS + len(measurement.SHARES) - 1
"""Large sums after which the links are known, if no machine stands still: one for each pass."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass is done in one operation, however long the machine stands still."""
    monkeypatch.setattr(measurement, "LEAST_PART_SECONDS", 600.0)


def count_measurements(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the slots that began to measure, each time."""
    begun, probes = [], link_probes.LinkProbes

    def begin(attempt: Any) -> Any:
        begun.append(attempt.slot)
        return probes(attempt)

    monkeypatch.setattr(planner, "LinkProbes", begin)
    return begun


def values(rank: int, number: int) -> Array:
    return np.random.default_rng([rank, number]).integers(-1000, 1000, COUNT).astype(np.float32)


def check_sum(group: Group, number: int, **options: Any) -> bytes:
    """Add arrays of all ranks, compare the result, and return its bits."""
    x = values(group.rank, number)
    group.all_reduce(x, **options)
    np.testing.assert_array_equal(x, sum(values(rank, number) for rank in range(group.size)))
    return x.tobytes()


def chosen(report: PlanReport) -> tuple[Any, ...]:
    """Return what all ranks must have in common; mediums are those that a rank knows itself."""
    return (
        report.algorithm,
        report.order,
        report.shares,
        report.groups,
        report.why,
        report.predicted_seconds,
        report.measured_seconds,
        report.bound_seconds,
        report.alternatives,
        report.topology.sites,
        [(link.source, link.target, link.bytes_per_second, link.round_trip) for link in report.topology.links],
    )


def paced(group: Group) -> Group:
    """Return a group in which the last rank sends slowly, and the others fast."""
    node = node_of(group)
    assert node is not None
    node.lanes.factory.bytes_per_second = SLOW if group.rank == group.size - 1 else FAST
    part = group.split(0)
    # Linux does not pace the first ten segments of a connection, and one of loopback has 64 KiB.
    part.all_reduce(np.ones(part.size * COUNT, np.float32), algorithm="direct")
    return part


def measure_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks of a paced group measure, and note what would be measured on a machine that never stands still."""
    real = link_probes.LinkProbes._rotate

    def exact(self: Any, attempt: Any, step: int) -> None:
        real(self, attempt, step)
        source = (attempt.slot - step) % attempt.size
        assert self._speeds[source, attempt.slot] > 0
        self._speeds[source, attempt.slot] = SLOW if source == attempt.size - 1 else FAST

    monkeypatch.setattr(link_probes.LinkProbes, "_rotate", exact)


def told(group: Group) -> list[str]:
    return [event.text for event in group.events() if event.kind == "plan"]


@pytest.mark.parametrize("executors", EXECUTORS)
def test_on_uneven_links_all_ranks_change_to_the_same_faster_plan(
    executors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_executors(monkeypatch, executors)
    measure_exactly(monkeypatch)

    def body(group: Group) -> tuple[Any, ...]:
        with paced(group) as part:
            bits = [check_sum(part, number) for number in range(TIMED_PLAIN_CALLS)]
            before = part.explain(4 * COUNT)
            assert (before.algorithm, before.predicted_seconds) == ("ring", None)
            assert before.topology.measured_at is None, "only a part of the measurement is done"
            bits += [check_sum(part, number) for number in range(TIMED_PLAIN_CALLS, TIMED_PLAIN_CALLS + 5)]
            after = part.explain(4 * COUNT)
            assert after.topology.measured_at is not None
            assert after.predicted_seconds is not None
            assert after.bound_seconds is not None
            assert after.alternatives
            assert "predicted" in str(after)
            assert {"star", "tree", "doubling"} <= {other.algorithm for other in after.alternatives}
            for operation in ("broadcast", "reduce"):
                rooted = part.explain(4 * COUNT, operation=operation, root=1)
                assert rooted.predicted_seconds is not None
                assert {rooted.algorithm, *(other.algorithm for other in rooted.alternatives)} == set(ROOTED_PLANS)
            rates = {(link.source, link.target): link.bytes_per_second for link in after.topology.links}
            for target in range(part.size - 1):
                assert rates[part.size - 1, target] == pytest.approx(SLOW, rel=0.2)
            check_sum(part, 9, algorithm="direct")
            assert told(group)[:1] != []
            return bits, chosen(after), told(group)

    first, *others = run_threads(4, body, lanes="tcp", plan="always")
    for other in others:
        assert other == first


def test_small_arrays_and_groups_and_plain_ones_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "LinkProbes", lambda *_: pytest.fail("measured"))

    def few(group: Group) -> None:
        for number in range(5):
            check_sum(group, number)
            group.all_reduce(np.ones(1000, np.float32))
        report = group.explain(4 * COUNT)
        assert report.why.startswith("plain: ")
        assert report.predicted_seconds is None

    run_threads(2, few, plan="always")
    run_threads(3, few, plan="plain", lanes="tcp")
    run_threads(3, few, lanes="tcp")  # all on one machine


@pytest.mark.parametrize("figure", [float("nan"), 0.0, -1.0, float("inf")])
def test_a_rank_that_says_what_is_no_speed_leaves_all_ranks_with_the_plain_plan(
    figure: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar, speed = [0], link_probes.Arrivals.speed
    said = lambda self, *of: figure if threading.get_ident() in liar else speed(self, *of)  # noqa: E731
    monkeypatch.setattr(link_probes.Arrivals, "speed", said)

    def body(group: Group) -> tuple[Any, ...]:
        if group.rank == 1:
            liar[0] = threading.get_ident()
        bits = [check_sum(group, number) for number in range(MEASURED + 1)]
        assert group.node.topology().measured_at is None
        return bits, chosen(group.explain(4 * COUNT))[:5], told(group)

    first, *others = run_threads(3, body, plan="always")
    assert others == [first, first]
    assert first[1][-1].startswith("plain: ")


def test_a_plan_that_turns_out_to_be_slower_is_given_up_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed = planner._agreed
    # What the ranks agree on is the same on all of them; only that sums of the plain plan took no time is not true.
    took = lambda attempt, kind: agreed(attempt, kind) * (1e-6 if kind.choice.fitted is None else 1)  # noqa: E731
    monkeypatch.setattr(planner, "_agreed", took)

    def body(group: Group) -> tuple[Any, ...]:
        with paced(group) as part:
            bits = [check_sum(part, number) for number in range(MEASURED + planner.CHECKING + 1)]
            return bits, told(group), part.explain(4 * COUNT).why

    first, *others = run_threads(3, body, lanes="tcp", plan="always")
    assert others == [first, first]
    (chose, gave_up), why = first[1:]
    assert "predicted" in chose
    assert gave_up.endswith(why)
    assert why.startswith("plain: ")


def test_a_plan_that_was_slower_than_a_burst_comes_back_when_the_burst_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_exactly(monkeypatch)
    agreed, plain = planner._agreed, [0] * 3

    def took(attempt: Any, kind: Any) -> float:
        """Return what the ranks agree on, as if the plain plan had been fast at first, and slow when timed again."""
        seconds = agreed(attempt, kind)
        if kind.choice.fitted is not None or seconds == size_class.UNMEASURED:
            return seconds
        plain[attempt.slot] += 1
        return 1e-6 if plain[attempt.slot] == 1 else 1e6

    monkeypatch.setattr(planner, "_agreed", took)

    def body(group: Group) -> tuple[Any, ...]:
        with paced(group) as part:
            bits = [
                check_sum(part, number)
                for number in range(MEASURED + 2 * planner.CHECKING + planner.TIMED_PLAIN_CALLS + 2)
            ]
            return bits, told(group), part.explain(4 * COUNT).why

    first, *others = run_threads(3, body, lanes="tcp", plan="always")
    assert others == [first, first]
    chose, gave_up, again = first[1]
    assert "predicted to be faster" in gave_up
    assert again == chose
    assert again.endswith(first[2])


@pytest.mark.parametrize("cost", [1e9, 1e-9])
def test_links_are_measured_again_only_if_that_takes_a_small_part_of_the_time(
    cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = count_measurements(monkeypatch)
    monkeypatch.setattr(planner, "COST", cost)
    monkeypatch.setattr(planner, "REVIEW_CALLS", 1)

    def body(group: Group) -> list[bytes]:
        return [check_sum(group, number) for number in range(MEASURED + 4)]

    first, *others = run_threads(3, body, plan="always")
    assert others == [first, first]
    assert sorted(measured) == sorted([0, 1, 2] * (3 if cost > 1 else 1))


def test_an_operation_with_little_time_left_does_not_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "LinkProbes", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(planner, "PATIENCE", 1e-9)  # of the minutes that each operation has

    def body(group: Group) -> list[bytes]:
        return [check_sum(group, number) for number in range(MEASURED)]

    first, *others = run_threads(3, body, plan="always")
    assert others == [first, first]


def test_sums_that_take_much_longer_make_all_ranks_measure_again(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, slow = count_measurements(monkeypatch), threading.Event()
    monkeypatch.setattr(size_class, "DRIFT_CALLS", 2)
    note = size_class.Drift.note
    # What ranks noted is exchanged as ever; only the clock is another.
    monkeypatch.setattr(size_class.Drift, "note", lambda self, _: note(self, 9.0 if slow.is_set() else 1.0))

    def body(group: Group) -> tuple[Any, ...]:
        bits = [check_sum(group, number) for number in range(MEASURED)]
        measured_at = group.node.topology().measured_at
        bits += [check_sum(group, number) for number in range(16)]  # of which up to eight are timed to choose a plan
        before = {(link.source, link.target): link.measured_at for link in group.node.topology().links}
        group.barrier()
        slow.set()
        group.barrier()
        bits += [check_sum(group, number) for number in range(6)]
        after = {(link.source, link.target): link.measured_at for link in group.node.topology().links}
        assert measured_at is not None
        assert max(at or 0 for at in before.values()) > measured_at, "links of the plan were seen to hold later"
        assert max(at or 0 for at in before.values()) < min(at or 0 for at in after.values())
        return tuple(bits)

    first, *others = run_threads(4, body, plan="always")
    assert others == [first] * 3
    assert sorted(measured) == sorted([0, 1, 2, 3] * 2)


@pytest.mark.parametrize("figure", [float("nan"), float("inf"), -1.0, 0.0, 1e300])
def test_a_rank_whose_saved_figures_are_none_makes_all_ranks_measure(
    figure: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(attempt: Any, rounds: list[int]) -> Any:
        row = np.tile([FAST, 1e-3, 60.0], (len(rounds), 1))
        if attempt.slot == 1:
            row[0, 2 if figure == 1e300 else 0] = figure
        return row

    monkeypatch.setattr(saved_links, "_own_figures", kept)

    def body(group: Group) -> tuple[Any, ...]:
        bits = [check_sum(group, 0)]
        assert group.node.topology().measured_at is None
        bits += [check_sum(group, number) for number in range(1, MEASURED)]
        assert not group.node.topology().is_earlier
        return bits, chosen(group.explain(4 * COUNT))

    first, *others = run_threads(3, body, plan="always")
    assert others == [first, first]


def test_saved_figures_that_are_far_from_true_are_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    row = lambda _, rounds: np.tile([2e3, 1e-3, 60.0], (len(rounds), 1))  # noqa: E731
    monkeypatch.setattr(saved_links, "_own_figures", row)

    def body(group: Group) -> tuple[Any, ...]:
        bits = [check_sum(group, 0)]
        top = group.node.topology()
        assert top.is_earlier
        assert all(link.bytes_per_second == 2e3 for link in top.links)
        bits += [check_sum(group, number) for number in range(1, planner.CHECKING + 3)]
        top = group.node.topology()
        assert not top.is_earlier
        assert all((link.bytes_per_second or 0) > 1e5 for link in top.links)
        return bits, chosen(group.explain(4 * COUNT))

    first, *others = run_threads(3, body, plan="always")
    assert others == [first, first]


def test_nothing_is_measured_if_a_link_of_any_rank_is_metered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "LinkProbes", lambda *_: pytest.fail("measured"))

    monkeypatch.setattr(planner, "is_metered", lambda attempt: attempt.slot == 1)

    def body(group: Group) -> tuple[Any, ...]:
        bits = [check_sum(group, number) for number in range(MEASURED)]
        return bits, group.explain(4 * COUNT).why

    first, *others = run_threads(3, body, plan="always", lanes="tcp")
    assert others == [first, first]
    assert "metered" in first[1]


def test_between_distant_hosts_medium_arrays_have_fitted_plans_too(monkeypatch: pytest.MonkeyPatch) -> None:
    row = lambda _, rounds: np.tile([2e7, 0.2, 60.0], (len(rounds), 1))  # noqa: E731
    monkeypatch.setattr(saved_links, "_own_figures", row)
    monkeypatch.setattr(planner, "CHANGE", 1e9)  # what the figures predict is far from what threads take

    def body(group: Group) -> tuple[Any, ...]:
        told, bits = [], []
        for count in (1 << 17, COUNT, 1 << 17, 1 << 10):
            x = values(group.rank, 1)[:count].copy()
            group.all_reduce(x)
            np.testing.assert_array_equal(x, sum(values(rank, 1)[:count] for rank in range(group.size)))
            bits.append(x.tobytes())
            told.append(chosen(group.explain(4 * count))[:6])
        assert told[0][4].startswith("plain: "), "before a large sum the links are not known"
        assert [each[0] for each in told[1:]] == ["direct", "direct", "doubling"]
        return told, bits

    first, *others = run_threads(5, body, plan="always")
    assert others == [first] * 4


@pytest.mark.parametrize("codec", ["int8", "fp16"])
def test_compressed_sums_use_the_fitted_order_and_shares_and_all_ranks_get_the_same_bits(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(attempt: Any, rounds: list[int]) -> Any:
        speeds = [SLOW / 10 if 2 in (attempt.slot, (attempt.slot - step) % 4) else FAST for step in rounds]
        return np.array([[speed, 1e-3, 60.0] for speed in speeds])

    monkeypatch.setattr(saved_links, "_own_figures", row)
    monkeypatch.setattr(planner, "CHANGE", 1e9)  # what the figures predict is far from what threads take
    count = (1 << 20) + 12345

    def body(group: Group) -> tuple[Any, ...]:
        rng = np.random.default_rng(group.rank)
        inputs = [rng.standard_normal(count, np.float32) for _ in range(2)]
        bits = []
        for x in inputs:
            exact = x.astype(np.float64)
            group.all_reduce(exact, algorithm="ring")
            group.all_reduce(x, compress=codec)
            assert np.abs(x - exact).max() < (0.3 if codec == "int8" else 0.02), "four ranks encode each range once"
            bits.append(x.tobytes())
        report = group.explain(4 * count, compress=codec)
        assert report.algorithm == "ring"
        assert max(zip(report.shares, report.order, strict=True))[1] == 2, "the slow rank finishes most"
        assert report.predicted_seconds is not None
        assert report.codec.startswith(codec)
        assert f"with {codec}" in str(report)
        assert (codec == "int8") == (report.wire_bytes < 1.1 * count)
        assert report.alternatives
        with pytest.raises(ConfigError, match="fixed rate"):
            group.explain(4 * count, compress="topk(0.1)")
        return bits, chosen(report)

    first, *others = run_threads(4, body, plan="always", lanes="tcp")
    assert others == [first] * 3
