"""What a person sees of a script that ends while it joins: its own line, or the one line that says it all."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from tests.support.machines import Lab, end, new_lab

if TYPE_CHECKING:
    from collections.abc import Iterator

WAITS = """
import os, signal, threading, time
import covey
from covey.runtime.joining import bootstrap

def interrupt():
    while not bootstrap._joining.locked():
        time.sleep(0.01)
    os.kill(os.getppid() if os.environ["INTERRUPT"] == "parent" else os.getpid(), signal.SIGINT)

if "INTERRUPT" in os.environ:
    threading.Thread(target=interrupt, daemon=True).start()
with covey.join("mine"):
    pass
"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with new_lab() as made:
        (made.folder / "job.py").write_text(WAITS)
        yield made


def test_a_missed_join_shows_the_line_that_joined_and_ctrl_c_says_what_it_interrupted(lab) -> None:
    machine = lab.machine("one", "lab")
    code, _, err = end(machine.start("job.py", COVEY_JOIN_TIMEOUT="0.5"))
    lines = err.splitlines()
    assert code == 1
    assert [line for line in lines if line.startswith("  File")] == [
        f'  File "{lab.folder}/job.py", line 13, in <module>'
    ]
    assert lines[-1].startswith("covey.DeadlineError: ")

    code, _, err = end(machine.start("job.py", INTERRUPT="itself"))
    assert code == -signal.SIGINT
    assert err.count("  File") == 1, err
    assert err.splitlines()[-1] == "KeyboardInterrupt: interrupted while waiting for run 'mine'"

    code, _, err = end(machine.start("-m", "covey", "run", "mine", "job.py", INTERRUPT="parent", COVEY_WARM_START="0"))
    assert code == 128 + signal.SIGINT
    assert "Traceback" not in err
    assert [line for line in err.splitlines() if "interrupted while waiting for run 'mine'" in line] != []
