"""Ctrl-Z, `fg` and `bg` at a real terminal: `covey run` stops with all its ranks, and none is lost by that."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tests.support.waiting import DEADLINE

SOURCE = Path(__file__).parents[2] / "src"
STOPPED = 2.0
"""Seconds that all are stopped: four times as long as one rank alone may be before the others give it up."""

SHELL = """
import os, signal, subprocess, sys, time
from pathlib import Path
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
job = subprocess.Popen([sys.executable, "-m", "covey", "run", "-n", "3", "job.py"], process_group=0)
os.tcsetpgrp(0, job.pid)
_, status = os.waitpid(job.pid, os.WUNTRACED)
print("stopped by", os.WIFSTOPPED(status) and signal.Signals(os.WSTOPSIG(status)).name, flush=True)
os.tcsetpgrp(0, os.getpgrp())
pids = [int(path.read_text()) for path in sorted(Path().glob("pid*"))]
def states():
    return [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids]
until = time.monotonic() + 500
while states() != ["T"] * 3 and time.monotonic() < until:
    time.sleep(0.01)  # a process that was told to stop does so when it next gets a core
print("states", states(), flush=True)
time.sleep(float(sys.argv[1]))
if sys.argv[2] == "fg":
    os.tcsetpgrp(0, job.pid)
Path("enough").touch()
os.killpg(job.pid, signal.SIGCONT)
print("code", job.wait(500), flush=True)
"""
JOB = """
import os, time
from pathlib import Path
import numpy as np
import covey

with covey.join(on_loss=os.environ["POLICY"]) as group:
    Path(f"pid.{group.rank}").write_text(str(os.getpid()))
    group.barrier()
    print("at work", flush=True)
    is_over = np.zeros(1)
    for step in range(100_000):
        is_over[0] = Path("enough").exists() and group.rank == 0
        group.all_reduce(is_over)
        if is_over[0]:
            break
        time.sleep(0.005)
    for _ in range(100):  # long enough for a loss to be noticed
        group.all_reduce(np.ones(1))
        time.sleep(0.01)
    live = len(group.live)
    group.barrier()  # before a rank leaves
    print("the end", group.rank, live, flush=True)
"""


@pytest.mark.parametrize(
    ("policy", "how"), [pytest.param("raise", "fg", marks=pytest.mark.thorough), ("continue", "bg")]
)
def test_ctrl_z_stops_all_ranks_and_they_go_on_together(tmp_path: Path, policy: str, how: str) -> None:
    (tmp_path / "shell.py").write_text(SHELL)
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB))
    pid, screen = pty.fork()
    if pid == 0:
        try:
            os.chdir(tmp_path)
            env = {**os.environ, "PYTHONPATH": str(SOURCE), "NO_COLOR": "1", "POLICY": policy}
            env |= {"COVEY_HOME": str(tmp_path / "home")}
            os.execve(sys.executable, [sys.executable, "shell.py", str(STOPPED), how], env)
        finally:
            os._exit(127)
    shown, deadline, typed = "", time.monotonic() + DEADLINE, False
    try:
        while not re.search(r"^code .*\n", shown, re.MULTILINE):
            assert select.select([screen], [], [], max(0.0, deadline - time.monotonic()))[0], shown
            try:
                shown += os.read(screen, 10_000).decode().replace("\r", "")
            except OSError:  # the terminal's other end is closed
                break
            if not typed and shown.count("at work") == 3:
                os.write(screen, b"\x1a")
                typed = True
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(screen)
    lines = shown.splitlines()
    assert "^Zstopped by SIGTSTP" in lines, shown
    assert "states ['T', 'T', 'T']" in lines, shown
    assert sorted(line for line in lines if "the end" in line) == [f"[{r}] the end {r} 3" for r in range(3)], shown
    assert "code 0" in lines, shown
    assert "lost" not in shown, shown
    assert "given up" not in shown, shown
