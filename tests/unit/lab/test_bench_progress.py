"""Progress of `covey bench` takes one line of the terminal, however narrow, and none in a pipe."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from covey.lab.bench.command import progress
from covey.lab.bench.sweep import Sweep

SWEEP = Sweep(operations=("reduce_scatter",), sizes=(64 << 20,), ranks=(16,), lanes=("shm",), opponents=(),
              dtype="float32", repetitions=3, round_seconds=0.1, busy=False, through_torch=False)  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 120])
def test_progress_is_one_line_that_is_drawn_again(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, height=24, force_terminal=True, _environ={"TERM": "xterm"})
    with progress(SWEEP, console) as say:
        say(str(next(iter(SWEEP.cases(16)))), 1)
    frames = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).split("\r")
    assert any("reduce_scatter 64 MiB, 16 ranks" in frame for frame in frames)
    assert all(len(line) <= width for frame in frames for line in frame.split("\n"))
    assert out.getvalue().count("\n") <= 1  # at the end, before the line is erased


@pytest.mark.parametrize(
    "terminal", [{"force_terminal": False}, {"force_terminal": True, "_environ": {"TERM": "dumb"}}]
)
def test_a_pipe_and_a_dumb_terminal_show_no_progress(terminal: dict[str, object]) -> None:
    out = io.StringIO()
    with progress(SWEEP, Console(file=out, **terminal)) as say:  # type: ignore[arg-type]
        say("reduce_scatter", 1)
    assert out.getvalue() == ""
