"""What the demo keeps of its nodes' reports, and how it shows that."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from covey.lab.demo import summary, view
from covey.lab.demo.progress import LossPoint, Progress
from covey.lab.demo.reports import (
    PROMPT,
    ROUND,
    FinishedReport,
    JoinedReport,
    KilledReport,
    RecoveredReport,
    RoundReport,
    StartedReport,
    Told,
    WaitingReport,
    decode,
    encode,
)

BATCH = 10
CEILING, MARK = 4.0, 2.3
PHASES = {"detect": 0.0, "freeze": 2.0, "agree": 9.0, "reconnect": 30.0, "redo": 52.4}


def start(run: Progress) -> None:
    for node in range(run.size):
        run.record(node, StartedReport(7000 + node))
        run.record(node, WaitingReport())
    for node in range(run.size):
        run.record(node, joined(run, rank=node))


def joined(run: Progress, *, rank: int, generation: int = 0, step: int = 0) -> JoinedReport:
    lane = "shm" if run.size > 1 else ""
    return JoinedReport(generation, rank, step, lane, BATCH, 348_000, CEILING, (0, 1), 1_044_000, 0.031)


def do_round(run: Progress, number: int, *nodes: int) -> None:
    """A round in which node n computes for n + 1 ms and syncs for 2 ms a step, and the loss falls by 0.1."""
    samples = ROUND * BATCH * len(nodes)
    for node in nodes:
        compute, sync = ROUND * (node + 1) / 1000, ROUND * 2 / 1000
        run.record(
            node, RoundReport(number * ROUND, ROUND, samples, 3.0 + node / 10, CEILING - number / 10, compute, sync)
        )


def finish(run: Progress, digests: list[str] | None = None) -> None:
    digests = digests or ["same"] * run.size
    for node, digest in enumerate(digests):
        run.record(node, FinishedReport(digest, len(set(digests)) == 1, "it was very late." if node == 0 else ""))


def trained(size: int, rounds: int, *, digests: list[str] | None = None) -> Progress:
    """A run to which nothing happened."""
    run = Progress(size, rounds * ROUND)
    start(run)
    for number in range(1, rounds + 1):
        do_round(run, number, *range(size))
    finish(run, digests)
    return run


def alone_for(size: int, rounds: int, *, planned: int | None = None, last_loss: float | None = None) -> Progress:
    """A run of one node that takes the batches of `size`."""
    run = Progress(1, (planned or rounds) * ROUND)
    start(run)
    for number in range(1, rounds + 1):
        loss = last_loss if last_loss is not None and number == rounds else CEILING - number / 10
        run.record(0, RoundReport(number * ROUND, ROUND, ROUND * BATCH * size, 3.0, loss, 0.1, 0.0))
    finish(run)
    return run


def lose_node_1(run: Progress, *, step: int) -> None:
    run.record(1, KilledReport("SIGKILL"))
    for node, seconds in ((0, 0.058), (2, 0.061)):
        run.record(node, RecoveredReport(step, "step", 0, (1,), 2, seconds, PHASES))


def bring_node_1_back(run: Progress, *, step: int) -> None:
    for node, rank in ((0, 0), (1, 2), (2, 1)):
        run.record(node, joined(run, rank=rank, generation=1, step=step))


def disturbed() -> Progress:
    """A run of three nodes in ten rounds: node 1 is lost after four of them, and comes back after eight."""
    run = Progress(3, 10 * ROUND)
    start(run)
    for number in range(1, 11):
        if number == 5:
            lose_node_1(run, step=4 * ROUND + 1)
        elif number == 6:
            run.record(1, StartedReport(8001))
        elif number == 7:
            run.record(1, WaitingReport())
        elif number == 9:
            bring_node_1_back(run, step=8 * ROUND)
        do_round(run, number, *((0, 2) if 5 <= number <= 8 else (0, 1, 2)))
    finish(run)
    return run


def rendered(content: RenderableType, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(content)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "report",
    [
        WaitingReport(),
        JoinedReport(1, 3, 61, "shm", 8, 99, 4.1, (0, 2), 4711, 0.25),
        RecoveredReport(61, "step", 0, (1, 2), 2, 0.125, PHASES),
        RoundReport(40, 20, 640, 3.2, 3.1, 0.5, 0.25),
        FinishedReport("ab", True, 'she said "oh"\n'),
    ],
    ids=lambda report: type(report).__name__,
)
def test_a_report_survives_the_pipe(report: Told) -> None:
    line = encode(report)
    assert b"\n" not in line
    assert decode(line) == report


def test_progress_counts_the_samples_of_all_nodes_and_the_time_of_the_first_to_tell() -> None:
    run = trained(3, 4)
    assert [point.step for point in run.curve] == [0, ROUND, 2 * ROUND, 3 * ROUND, 4 * ROUND]
    assert run.last.samples == 4 * ROUND * BATCH * 3
    assert run.last.seconds == pytest.approx(4 * ROUND * 0.003)
    assert run.samples_per_second == pytest.approx(3 * BATCH / 0.003)
    assert run.step_seconds == pytest.approx((0.002, 0.002))
    assert [row.pid for row in run.rows] == [7000, 7001, 7002]
    assert run.rows[2].samples_per_second == pytest.approx(BATCH / 0.005)
    assert run.at_step(2 * ROUND) == run.curve[2]
    assert run.at_step(2 * ROUND + 1) is None


def test_parameters_count_as_identical_only_when_every_node_shows_the_same_digest() -> None:
    assert trained(3, 1).digest == "same"
    assert not trained(3, 1, digests=["same", "same", "other"]).digest
    unfinished = Progress(2, ROUND)
    unfinished.record(0, FinishedReport("same", True, ""))
    assert not unfinished.digest


def test_samples_of_a_node_that_is_away_are_not_counted_and_its_half_round_is_no_point() -> None:
    run = disturbed()
    assert run.last.samples == ROUND * BATCH * (6 * 3 + 4 * 2)
    run = Progress(2, 2 * ROUND)
    start(run)
    run.record(1, RoundReport(ROUND, 3, 6 * BATCH, 3.0, 3.5, 0.1, 0.1))
    assert run.last.step == 0
    assert run.rows[1].compute == pytest.approx(0.1 / 3)


def test_a_loss_and_a_return_are_remembered_with_all_that_was_told_of_them() -> None:
    run = disturbed()
    assert run.losses == 1
    (recovery,) = run.recoveries.values()
    assert recovery.nodes == (1,)
    assert sorted(recovery.reports) == [0, 2]
    assert recovery.milliseconds == pytest.approx(61)
    (back,) = run.returns
    assert (back.node, back.rank, back.step, back.donors, back.bytes) == (1, 2, 8 * ROUND, (0, 1), 1_044_000)
    assert [row.seat for row in run.rows] == [(1, 0), (1, 2), (1, 1)]
    assert run.rows[1].pid == 8001
    states = [state for _, state in run.rows[1].history]
    assert states == ["starting", "starting", "waiting", "training", "lost", "starting", "waiting", "training", "done"]
    assert (4 * ROUND + 1, "lost") in run.rows[1].history


def test_ranks_of_a_later_generation_are_taken_for_the_right_nodes() -> None:
    run = disturbed()
    run.record(0, RecoveredReport(10 * ROUND, "wait", 1, (1,), 2, 0.05, PHASES))  # rank 1 is node 2 by now
    assert run.recoveries[1, (1,)].nodes == (2,)


def test_the_story_tells_of_the_loss_the_recovery_and_the_return_in_order() -> None:
    assert disturbed().story == [
        "step    80 node 1 (pid 7001) is killed: SIGKILL",
        "step    81 2 continue without node 1: the step took 61 ms, normally 4",
        "           detect 0 → freeze 2 → agree 9 → reconnect 30 → redo 52 ms",
        "step   100 node 1 is started again (pid 8001)",
        "step   120 node 1 waits to join",
        "step   160 node 1 is back as rank 2, with 1.0 MB of state from 2 nodes in 31 ms",
    ]
    assert trained(3, 2).story == []


def test_a_rank_that_is_killed_on_the_way_back_was_lost_once() -> None:
    run = Progress(3, 10 * ROUND)
    start(run)
    do_round(run, 1, 0, 1, 2)
    lose_node_1(run, step=ROUND + 1)
    for report in (StartedReport(8001), WaitingReport(), KilledReport("SIGTERM"), StartedReport(8002), WaitingReport()):
        run.record(1, report)
    assert run.losses == 1
    assert run.is_away(1)
    bring_node_1_back(run, step=2 * ROUND)
    assert not run.is_away(1)
    finish(run)
    assert all(check.holds for check in summary.checks(run, None, victim=1))


def test_several_are_named_as_people_do() -> None:
    assert [summary.named("node", nodes) for nodes in ([], [4], [1, 2], [0, 1, 3])] == [
        "some node",
        "node 4",
        "nodes 1 and 2",
        "nodes 0, 1 and 3",
    ]


def test_the_strip_of_a_node_shows_when_it_was_lost_on_its_way_and_back() -> None:
    lines = view.strips(disturbed(), 10 * ROUND, width=41).plain.splitlines()
    assert lines[0] == " node 0 " + "━" * 41
    assert lines[1] == " node 1 " + "━" * 16 + "✕" + "   " + "····" + "┄" * 8 + "◆" + "━" * 8
    narrow = view.strips(disturbed(), 100 * 10 * ROUND, width=20).plain.splitlines()
    assert narrow[1].rstrip() == " node 1 ✕◆"


def test_the_chart_falls_with_the_loss_and_marks_one_node_with_dots() -> None:
    axis = view.Axis(steps=9, floor=1.0, ceiling=4.0, mark=2.4)
    team = [LossPoint(0, 0, 0.0, 4.0), LossPoint(3, 300, 0.1, 2.0), LossPoint(9, 900, 0.3, 1.0)]
    lines = view.chart(team, team[:2], axis, width=40, height=6).plain.splitlines()
    assert len(lines) == 6
    columns = ["".join(line[8:].ljust(40)[at] for line in lines) for at in range(40)]
    filled = [sum(character in view.EIGHTHS[1:] for character in column) for column in columns]
    without_dots = filled[20:]
    assert filled[1] > filled[20] >= filled[-1] == 1
    assert without_dots == sorted(without_dots, reverse=True)
    assert [column.count("•") for column in columns] == [1] * 14 + [0] * 26
    assert lines[0].startswith(" 4.00")
    assert [line for line in lines if line.startswith(" 2.40") and "┄" in line]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_view_fits_a_small_terminal_and_shows_every_node_and_what_happened(width: int) -> None:
    team, alone = disturbed(), alone_for(3, 3, planned=10)
    for other in (None, alone):
        page = rendered(view.screen(team, other, mark=MARK, ceiling=CEILING, width=width, height=24), width)
        lines = page.splitlines()
        assert len(lines) <= 23
        assert max(map(len, lines)) <= width
        for node, pid in enumerate((7000, 8001, 7002)):
            row = next(line for line in lines if f" {pid} " in line and "step" not in line)
            assert f"{3.0 + node / 10:.2f}" in row
            assert "done" in row
        assert [line for line in lines if line.startswith("step   160 node 1 is back as rank 2")]
        assert page.count("✕") == page.count("◆") == 2, "one in the strip and one in the legend"
        assert ("348 kB of gra" in page) is (other is None)
    assert "one node alone" in page
    assert f"step {3 * ROUND:>5} of {10 * ROUND}" in page


def test_the_view_of_a_run_that_has_not_begun_can_be_drawn() -> None:
    page = rendered(view.screen(Progress(2, 100), None, mark=MARK, ceiling=CEILING, width=80, height=24))
    assert page.count("starting") == 3


def test_a_node_that_is_lost_keeps_its_row_and_shows_no_numbers() -> None:
    team = Progress(3, 10 * ROUND)
    start(team)
    do_round(team, 1, 0, 1, 2)
    lose_node_1(team, step=ROUND + 1)
    page = rendered(view.screen(team, None, mark=MARK, ceiling=CEILING, width=80, height=24))
    assert next(line for line in page.splitlines() if line.split()[:2] == ["1", "7001"]).split()[2:] == ["lost"]


def test_the_plain_line_has_step_loss_and_times() -> None:
    line = view.line(trained(2, 5))
    assert f"step {5 * ROUND:>5}/{5 * ROUND}" in line
    assert "held-out loss 3.500" in line
    assert "compute 1.5, sync 2.0" in line


def test_the_summary_compares_with_one_node_that_took_the_same_batches() -> None:
    team, alone = trained(4, 3), alone_for(4, 3)
    page = rendered(summary.summary(team, alone, victim=None, mark=MARK, cores=2, seconds=12.0), width=200)
    table = {line[:16].strip(): line.split() for line in page.splitlines()[:3]}
    assert table["4 nodes"][-1] == table["one node alone"][-1] == "3.700"
    assert "4x is out of reach" in page
    assert "parameters bit-identical on all nodes: yes" in page
    assert "held-out loss within 0.001 of one node (0.0000 apart): yes" in page
    assert PROMPT + "it was very ..." in page
    assert "lost" not in page


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_summary_fits_and_keeps_the_losses(width: int) -> None:
    page = rendered(summary.summary(disturbed(), alone_for(3, 10), victim=1, mark=MARK, cores=8, seconds=12.0), width)
    for line in page.splitlines():
        assert len(line) <= width
        assert line == line.rstrip()
    assert "held-out loss" in page
    for name in ("3 nodes, one lost", "one node alone"):
        assert any(line.startswith(name) and line.endswith("3.000") for line in page.splitlines())


def test_the_summary_of_a_run_with_a_loss_tells_its_timeline_and_what_was_checked() -> None:
    page = rendered(
        summary.summary(disturbed(), alone_for(3, 10), victim=1, mark=MARK, cores=8, seconds=12.0), width=100
    )
    assert "3 nodes, one lost" in page
    assert "lost node 1 at step 81: the step took 61 ms" in page
    assert "detect 0 → freeze 2 → agree 9 → reconnect 30 → redo 52 ms" in page
    assert "node 1 came back at step 160, with 1.0 MB of state from 2 nodes in 31 ms" in page
    assert "held-out loss within 0.073 of an undisturbed run (0.0000 apart): yes" in page
    assert page.count(": yes") == 4
    assert "stopped after" not in page
    assert "out of reach" not in page


def test_the_summary_says_when_one_node_had_no_time_for_all_steps_and_compares_where_it_came_to() -> None:
    page = rendered(
        summary.summary(trained(4, 5), alone_for(4, 3), victim=None, mark=MARK, cores=8, seconds=12.0), width=100
    )
    assert "one node alone, cut short" in page
    assert "held-out loss at step 60 within 0.001 of one node (0.0000 apart): yes" in page
    slow = trained(4, 5)
    slow.steps *= 2
    page = rendered(summary.summary(slow, None, victim=None, mark=MARK, cores=8, seconds=12.0), width=200)
    assert f"stopped after {5 * ROUND:,} of {10 * ROUND:,} steps: the 12 s of training were over (--seconds" in page


@pytest.mark.parametrize(("gap", "holds"), [(0.07, True), (0.08, False)])
def test_after_a_loss_the_held_out_loss_may_differ_by_what_the_lost_samples_are_worth(gap: float, holds: bool) -> None:
    team = disturbed()  # 4 of 30 shares of the samples were lost: 0.02 + 0.4 * 4 / 30 = 0.073
    alone = alone_for(3, 10, last_loss=team.last.loss - gap)
    assert summary.checks(team, alone, victim=1)[-1].holds is holds


def test_without_a_loss_only_rounding_may_make_a_difference() -> None:
    team = trained(3, 10)
    assert [
        summary.checks(team, alone_for(3, 10, last_loss=team.last.loss + gap), victim=None)[-1].holds
        for gap in (0.0005, 0.002)
    ] == [True, False]


def test_a_victim_that_was_never_lost_or_never_came_back_is_not_as_it_should_be() -> None:
    assert [check.holds for check in summary.checks(trained(3, 2), None, victim=1)] == [True, False]
    team = Progress(3, 10 * ROUND)
    start(team)
    do_round(team, 1, 0, 1, 2)
    lose_node_1(team, step=ROUND + 1)
    assert [check.holds for check in summary.checks(team, None, victim=1)] == [False, False, True]


def test_a_loss_that_no_process_reported_is_not_as_it_should_be() -> None:
    team = disturbed()
    team.recoveries.clear()
    assert [check.holds for check in summary.checks(team, None, victim=1)] == [True, True, False]


def test_the_data_of_a_run_alone_has_nothing_to_compare_with() -> None:
    data = summary.as_data(trained(1, 2), None, victim=None, mark=MARK, cores=2)
    assert data["undisturbed"] is None
    assert data["identical"] is True
    assert data["losses"] == data["returns"] == []
    assert data["team"]["held_out_loss"] == pytest.approx(3.8)


def test_disagreement_is_said_aloud() -> None:
    page = rendered(
        summary.summary(trained(2, 1, digests=["a", "b"]), None, victim=None, mark=MARK, cores=2, seconds=12.0)
    )
    assert "identical on all nodes: NO" in page
