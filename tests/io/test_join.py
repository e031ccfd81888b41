"""Joins of new processes under odd circumstances."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest
from tests.support import forked
from tests.support.waiting import DEADLINE

if TYPE_CHECKING:
    import subprocess


pytestmark = pytest.mark.usefixtures("home")


def python(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, which must come in time."""
    return forked.run(
        [sys.executable, "-c", program], env={**os.environ, **env}, capture_output=True, text=True, timeout=DEADLINE
    )


def test_a_child_can_join_although_it_was_forked_while_another_thread_joined() -> None:
    done = python(
        """
import os, signal, threading, covey
from covey.runtime.joining import bootstrap
threading.Thread(target=lambda: covey.join("lonely", timeout=500), daemon=True).start()
while not bootstrap._joining.locked():
    pass
child = os.fork()
if not child:
    signal.alarm(500)
    os._exit(covey.join().size)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
""",
        COVEY_SECRET="ab" * 32,
        COVEY_INTERFACES="lo",
    )
    assert done.stdout.strip() == "1", done.stderr


def test_the_time_to_wait_for_the_others_may_come_from_the_environment_under_a_launcher() -> None:
    done = python(
        "import covey; covey.join()",
        RANK="0",
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_PORT="29783",
        COVEY_JOIN_TIMEOUT="1",
    )
    assert "timeout of 1 s" in done.stderr
