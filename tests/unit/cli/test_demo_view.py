"""What the demo keeps of its ranks' reports, and how it shows that."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from covey.cli.demo import summary, view
from covey.cli.demo.progress import Point, Progress
from covey.cli.demo.reports import PROMPT, ROUND, Finished, Joined, Report, Round, decode, encode

BATCH = 10
CEILING, MARK = 4.0, 2.3


def trained(size: int, rounds: int, *, digests: list[str] | None = None, planned: int | None = None) -> Progress:
    """A run in which rank r computes for r + 1 ms and syncs for 2 ms a step, and the loss falls by 0.1 a round."""
    run = Progress(size, (planned or rounds) * ROUND)
    digests = digests or ["same"] * size
    for rank in range(size):
        run.record(
            rank,
            Joined(
                pid=7000 + rank, lane="shm" if size > 1 else "", batch=BATCH, gradient_bytes=348_000, held_out=CEILING
            ),
        )
    for number in range(1, rounds + 1):
        for rank in range(size):
            compute, sync = ROUND * (rank + 1) / 1000, ROUND * 2 / 1000
            run.record(rank, Round(number * ROUND, 3.0 + rank / 10, CEILING - number / 10, compute, sync))
    for rank in range(size):
        agreed = len(set(digests)) == 1
        run.record(rank, Finished(digests[rank], agreed, "it was very late." if rank == 0 else ""))
    return run


def rendered(content: RenderableType, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(content)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "report",
    [Joined(12, "shm", 8, 99, 4.1), Round(40, 3.2, 3.1, 0.5, 0.25), Finished("ab", True, 'she said "oh"\n')],
    ids=lambda report: type(report).__name__,
)
def test_a_report_survives_the_pipe(report: Report) -> None:
    line = encode(report)
    assert b"\n" not in line
    assert decode(line) == report


def test_progress_counts_the_samples_of_all_ranks_and_the_time_of_rank_0() -> None:
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


def test_parameters_count_as_identical_only_when_every_rank_shows_the_same_digest() -> None:
    assert trained(3, 1).identical
    assert not trained(3, 1, digests=["same", "same", "other"]).identical
    unfinished = Progress(2, ROUND)
    unfinished.record(0, Finished("same", True, ""))
    assert not unfinished.identical


def test_the_chart_falls_with_the_loss_and_marks_one_rank_with_dots() -> None:
    axis = view.Axis(samples=900, floor=1.0, ceiling=4.0, mark=2.4)
    team = [Point(0, 0, 0.0, 4.0), Point(1, 300, 0.1, 2.0), Point(2, 900, 0.3, 1.0)]
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


def test_the_view_fits_a_small_terminal_and_shows_every_rank() -> None:
    team, alone = trained(4, 8), trained(1, 3, planned=32)
    for other in (None, alone):
        page = rendered(view.screen(team, other, mark=MARK, ceiling=CEILING, width=80, height=24))
        lines = page.splitlines()
        assert len(lines) <= 23
        assert max(map(len, lines)) <= 80
        for rank in range(4):
            row = next(line for line in lines if f" 700{rank} " in line)
            assert f"{3.0 + rank / 10:.2f}" in row
            assert "done" in row
        assert ("348 kB of gradients over shm" in page) is (other is None)
    assert "one rank alone" in page
    assert f"step {3 * ROUND:>5} of {32 * ROUND}" in page


def test_the_view_of_a_run_that_has_not_begun_can_be_drawn() -> None:
    page = rendered(view.screen(Progress(2, 100), None, mark=MARK, ceiling=CEILING, width=80, height=24))
    assert page.count("starting") == 3


def test_a_rank_in_an_unknown_state_keeps_its_row() -> None:
    team = trained(2, 1)
    team.rows[1].state = "lost"
    page = rendered(view.screen(team, None, mark=MARK, ceiling=CEILING, width=80, height=24))
    assert "lost" in next(line for line in page.splitlines() if " 7001 " in line)


def test_the_plain_line_has_step_loss_and_times() -> None:
    line = view.line(trained(2, 5))
    assert f"step {5 * ROUND:>5}/{5 * ROUND}" in line
    assert "held-out loss 3.500" in line
    assert "compute 1.5, sync 2.0" in line


def test_the_summary_compares_at_the_same_steps_and_at_the_same_samples() -> None:
    team, alone = trained(4, 3), trained(1, 12)
    page = rendered(summary.summary(team, alone, mark=MARK, cores=2), width=200)
    table = {line[:24].strip(): line.split() for line in page.splitlines()[:4]}
    assert table["4 ranks"][-1] == "3.700"
    assert table["one rank, same steps"][-1] == "3.700"
    assert table["one rank, same samples"][-1] == "2.800"
    assert table["one rank, same samples"][4:6] == [f"{12 * ROUND}", f"{12 * ROUND * BATCH:,}"]
    assert "4x is out of reach" in page
    assert "parameters bit-identical on all ranks: yes" in page
    assert PROMPT + "it was very ..." in page


def test_the_summary_says_when_one_rank_had_no_time_for_all_samples() -> None:
    page = rendered(summary.summary(trained(4, 3), trained(1, 5, planned=12), mark=MARK, cores=8), width=100)
    assert "same samples" not in page
    assert "one rank, when its time was over" in page
    assert "out of reach" not in page


def test_the_data_of_a_run_alone_has_nothing_to_compare_with() -> None:
    data = summary.as_data(trained(1, 2), None, mark=MARK, cores=2)
    assert data["one_rank_same_steps"] is None
    assert data["identical"] is True
    assert data["team"]["held_out_loss"] == pytest.approx(3.8)


def test_disagreement_is_said_aloud() -> None:
    page = rendered(summary.summary(trained(2, 1, digests=["a", "b"]), None, mark=MARK, cores=2))
    assert "identical on all ranks: NO" in page
