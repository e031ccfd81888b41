"""`covey top` at a real terminal: shows what happens to a run, and gives the terminal back as it was."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.support import pipes
from tests.support.jobs import SOURCE, Job, finish, new_job
from tests.support.screens import InTerminal, at_a_terminal
from tests.support.sets import first

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKS = """
import os, time
from pathlib import Path
import numpy as np
import covey

with covey.join(on_loss="continue") as group:
    Path(__file__).with_name(f"pid.{group.rank}").write_text(str(os.getpid()))
    is_over, step = np.zeros(1), 0
    while not is_over[0]:
        is_over[0] = Path(__file__).with_name("go").exists()
        group.all_reduce(is_over)
        group.report(step=step, loss=4.0 / (1 + step))
        print(f"rank {group.rank} is at {step}")
        step += 1
        time.sleep(0.05)
"""
IDLE = "import time\nfor second in range(500): time.sleep(1)"


def environment(job: Job) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("COVEY_")}
    own = {"PYTHONPATH": str(SOURCE), "TMPDIR": str(job.temp), "XDG_RUNTIME_DIR": str(job.temp)}
    return clean | own | {"COVEY_HOME": str(job.home)}


@contextlib.contextmanager
def top(job: Job, *words: str, columns: int = 80, rows: int = 24) -> Iterator[InTerminal]:
    """Start `covey top`, and wait for its first picture."""
    command = [sys.executable, "-m", "covey", "top", *words]
    with at_a_terminal(command, environment(job), columns, rows) as terminal:
        terminal.wait_for(lambda text: "q" in text.splitlines()[-1])
        yield terminal


def is_given_back(terminal: InTerminal) -> bool:
    return not terminal.screen.is_alternate and not terminal.screen.is_cursor_hidden


def test_it_names_the_rank_that_was_killed_and_the_one_that_was_stopped_and_stops_the_run() -> None:
    with new_job() as job:
        run = job.start(WORKS, [sys.executable, "-m", "covey", "run", "-n", "4"])
        with top(job, "job0") as terminal:
            before = terminal.wait_for(lambda text: text.count("A active") == 4)
            assert "loss" in before.splitlines()[0]
            assert "4 ranks on 1 machine" in before.splitlines()[0]
            terminal.type("4")
            terminal.wait_for(lambda text: all(f"rank {rank} is at" in text for rank in range(4)))
            terminal.type("1")
            os.kill(int((job.folder / "pid.3").read_text()), signal.SIGKILL)
            terminal.wait_for(lambda text: "Rank 3" in " ".join(text.splitlines()[1:3]))
            after = terminal.wait_for(lambda text: re.search(r"^ +3 \S+ +L lost", text, re.MULTILINE))
            assert [int(row) for row in re.findall(r"^ +(\d) \S+ +[A-Z?] ", after, re.MULTILINE)] == [0, 1, 2, 3]
            stopped = int((job.folder / "pid.1").read_text())
            os.kill(stopped, signal.SIGSTOP)
            terminal.wait_for(lambda text: "Rank 1" in " ".join(text.splitlines()[1:3]))
            os.kill(stopped, signal.SIGCONT)
            terminal.type("s")
            terminal.wait_for(lambda text: "type the name of the run, job0, to stop it" in text)
            terminal.type("job0\r")
            assert finish(run).code in (0, 143)
            terminal.wait_for(lambda text: "asked to end" in text.splitlines()[-1])
            terminal.type("q")
            assert terminal.ended() == 0
            assert is_given_back(terminal)


@pytest.mark.parametrize("how", first(2, ["q", "SIGTERM", "\x03", "SIGHUP"]))
def test_the_terminal_is_as_it_was_before(how: str) -> None:
    with new_job() as job, at_a_terminal([sys.executable, "-c", IDLE], environment(job)) as untouched:
        modes = untouched.modes()
        with top(job) as terminal:
            assert terminal.modes() != modes
            assert terminal.screen.is_alternate
            if how.startswith("SIG"):
                os.kill(terminal.process.pid, getattr(signal, how))
            else:
                terminal.type(how)
            assert terminal.ended() == 0
            assert terminal.modes() == modes
            assert is_given_back(terminal)


FAULTY = """
import sys
from covey.cli.top.loop import TopLoop
from covey.cli.top.screen import TopScreen
from covey.cli.top.state import ViewState
from covey.watch.overview import Overview

class Broken:
    looks = 0
    def newest(self):
        self.looks += 1
        if self.looks > 2:
            raise RuntimeError("a fault")
        return Overview(1, 0.0)

screen = TopScreen(1, 0, has_colours=True, has_letters=True)
TopLoop(Broken(), None, None, screen, ViewState()).run()
"""


def test_a_fault_gives_the_terminal_back_and_a_terminal_that_goes_away_ends_the_program() -> None:
    with new_job() as job, at_a_terminal([sys.executable, "-c", FAULTY], environment(job)) as terminal:
        modes = terminal.modes()
        terminal.screen.is_alternate = False
        assert terminal.ended() == 1
        assert terminal.modes() == modes
        assert is_given_back(terminal)
    with new_job() as job, top(job) as terminal:
        os.close(terminal.master)
        terminal.process.wait()


SHELL = """
import os, signal, subprocess, sys, termios
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
modes = termios.tcgetattr(0)
job = subprocess.Popen([sys.executable, "-m", "covey", "top"], process_group=0)
os.tcsetpgrp(0, job.pid)
_, status = os.waitpid(job.pid, os.WUNTRACED)
is_as_before = os.WIFSTOPPED(status) and termios.tcgetattr(0) == modes
os.tcsetpgrp(0, job.pid)
os.killpg(job.pid, signal.SIGCONT)
sys.exit(job.wait() if is_as_before else 9)
"""


def test_ctrl_z_gives_the_terminal_back_and_fg_shows_the_picture_again() -> None:
    with new_job() as job, at_a_terminal([sys.executable, "-c", SHELL], environment(job)) as terminal:
        terminal.wait_for(lambda text: "q" in text.splitlines()[-1])
        pictures = terminal.screen.entered
        terminal.type("\x1a")
        terminal.wait_for(lambda text: terminal.screen.entered > pictures and "q" in text.splitlines()[-1])
        terminal.type("q")
        assert terminal.ended() == 0
        assert is_given_back(terminal)


@pytest.mark.parametrize(("columns", "rows"), [(60, 20), pytest.param(40, 10, marks=pytest.mark.thorough), (20, 4)])
def test_it_opens_at_any_size_and_q_leaves(columns: int, rows: int) -> None:
    with new_job() as job, top(job, columns=columns, rows=rows) as terminal:
        assert terminal.screen.lines[0].startswith("this machine")
        terminal.type("?")
        terminal.type("q")
        assert terminal.ended() == 0


def test_without_a_terminal_it_prints_a_line_a_second_and_ends_with_its_reader() -> None:
    with new_job() as job:
        process = subprocess.Popen(
            [sys.executable, "-m", "covey", "top"], env=environment(job), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        lines = [pipes.stdout(process).readline() for _ in range(2)]
        assert all(re.match(r"\d\d:\d\d:\d\d  this machine", line) for line in lines), lines
        pipes.stdout(process).close()
        assert process.wait() == 1
        assert "Traceback" not in pipes.stderr(process).read()
        pipes.stderr(process).close()
