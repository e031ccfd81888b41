"""A machine leaves its run before it sleeps, and while it is in use, and comes back by itself.

The system bus is one of the test, with real bytes (`tests/support/login.py`); the rest is what a person has.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from tests.e2e.test_cluster_elastic import homes_of
from tests.support import pipes
from tests.support.jobs import SOURCE
from tests.support.login import FakeLogin
from tests.support.members import Member, together
from tests.support.waiting import DEADLINE, wait_until

from covey.runtime.keeper.presence import STOOD_STILL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.machines import Lab


@pytest.fixture
def login(lab: Lab) -> Iterator[FakeLogin]:
    made = FakeLogin(lab.temp / "bus")
    try:
        yield made
    finally:
        made.close()


SLEEPS = """
import functools, sys, time
from covey.net.host.system_bus import BusError
from covey.runtime.keeper.keeper import LocalRun
from covey.runtime.keeper.presence import MachinePresence, OwnMachine
from covey.runtime.keeper.supervisor import keep

def no_login():
    raise BusError("there is none")

began = time.monotonic()
always = lambda: time.monotonic() + (200.0 if time.monotonic() > began + 0.5 else 0.0)
machine = OwnMachine(login=no_login, always=always)
sys.exit(keep(functools.partial(LocalRun, 1), sys.argv[1:], presence=MachinePresence("north", machine=machine)))
"""
"""A keeper whose clock that runs on in a sleep is three minutes ahead after half a second."""


@contextlib.contextmanager
def stopped(member: Member) -> Iterator[None]:
    """Stop a keeper and its processes, as if their machine stood still."""
    groups = [member.process.pid, member.pid]
    for group in groups:
        os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        for group in groups:
            os.killpg(group, signal.SIGCONT)


def noted(member: Member, text: str, count: int = 1) -> str:
    """Wait until the keeper has noted something so often; return the last line."""

    def found() -> list[str]:
        return [line for line in member.warnings if line.startswith("covey:") and text in line]

    wait_until(lambda: len(found()) >= count, member.story)
    return found()[-1]


def test_a_machine_leaves_before_it_sleeps_and_is_back_when_it_is_awake(lab: Lab, login: FakeLogin) -> None:
    laptop, desktop = homes_of(lab, 2)
    laptop.machine.env["DBUS_SYSTEM_BUS_ADDRESS"] = login.address
    sleeper = laptop.keep("--min", "1", min_size=1)
    stayer = desktop.keep("--min", "1", min_size=1)
    number = together([sleeper, stayer])["number"]
    for times in (1, 2):
        login.await_hold()
        login.sleep()
        login.await_permission()  # nothing delays the sleep any more
        assert "has left the run; it returns when it is awake" in noted(sleeper, "has left", times)
        alone = together([stayer], after=number)
        assert alone["hosts"] == [desktop.index]
        assert not stayer.all_said("contributors"), "it has left in order: no operation lost it"
        (told,) = json.loads(laptop.machine.covey("history", "--json").stdout)
        assert (told["state"], told["absences"][-1]["why"]) == ("running", "is about to sleep")
        assert "away: " in laptop.machine.covey("history").stdout
        login.wake()
        noted(sleeper, "is awake again after", times)
        number = together([sleeper, stayer], after=alone["number"])["number"]
    (told,) = json.loads(laptop.machine.covey("history", "--json").stdout)
    assert [each["returned"] is not None for each in told["absences"]] == [True, True]
    sleeper.ask_to_end()
    for member in (sleeper, stayer):
        member.end()


def test_a_machine_in_use_takes_no_part_and_ends_with_its_run(lab: Lab, login: FakeLogin) -> None:
    login.is_idle = False
    laptop, desktop = homes_of(lab, 2)
    laptop.machine.env["DBUS_SYSTEM_BUS_ADDRESS"] = login.address
    polite = laptop.keep("--min", "1", "--while-idle", min_size=1)
    stayer = desktop.keep("--min", "1", min_size=1)
    noted(polite, "is in use: its processes start when it is idle")
    number = together([stayer])["number"]
    assert polite.all_said("joining") == []
    login.hang_up()  # as when the bus is restarted: it is asked again
    login.is_idle = True
    noted(polite, "is idle again after")
    together([polite, stayer], after=number)
    login.is_idle = False
    noted(polite, "is in use: its processes leave the run")
    noted(polite, "has left the run")
    stayer.ask_to_end()
    stayer.end()
    assert polite.process.wait(DEADLINE) == 0
    (told,) = json.loads(laptop.machine.covey("history", "--json").stdout)
    assert (told["code"], told["absences"][-1]["why"], told["absences"][-1]["returned"]) == (0, "is in use", None)


@pytest.mark.thorough
def test_a_machine_that_stood_still_comes_back_by_itself_and_its_keeper_says_it(lab: Lab) -> None:
    laptop, desktop = homes_of(lab, 2)
    sleeper = laptop.keep("--min", "1", min_size=1, patience=1000)
    stayer = desktop.keep("--min", "1", "--tie-breaker", "here", min_size=1)  # else it waits for the other one
    number = together([sleeper, stayer])["number"]
    with stopped(sleeper):
        assert stayer.said("contributors")["hosts"] == [desktop.index]
        time.sleep(STOOD_STILL)  # what makes it a note
    noted(sleeper, "stood still for")
    together([sleeper, stayer], after=number)
    assert len(sleeper.all_said("joining")) == 1, "its process has joined again, and was not started again"
    sleeper.ask_to_end()
    for member in (sleeper, stayer):
        member.end()


def test_a_sleep_that_nothing_announced_is_noted_when_it_is_over(tmp_path: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", SLEEPS, sys.executable, "-c", "import time; time.sleep(1000)"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(SOURCE)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert pipes.stderr(program).readline() == "covey: north slept for 3 min\n"
        program.send_signal(signal.SIGTERM)
        program.wait(DEADLINE)
    finally:
        program.kill()
        program.communicate()


def test_ctrl_c_ends_a_machine_that_is_away(lab: Lab, login: FakeLogin) -> None:
    login.is_idle = False
    (laptop,) = homes_of(lab, 1)
    laptop.machine.env["DBUS_SYSTEM_BUS_ADDRESS"] = login.address
    polite = laptop.keep("--while-idle")
    noted(polite, "is in use")
    polite.process.send_signal(signal.SIGINT)
    assert polite.process.wait(DEADLINE) == 130


def test_where_the_system_does_not_say_whether_it_is_used_that_is_said_at_once(lab: Lab) -> None:
    (home,) = homes_of(lab, 1)
    (lab.folder / "train.py").write_text("raise SystemExit(1)")
    login = FakeLogin(lab.temp / "bus", has_login=False)
    try:
        for address in ("unix:path=/nowhere", login.address):
            ended = home.machine.covey("run", "--while-idle", "train.py", DBUS_SYSTEM_BUS_ADDRESS=address)
            assert ended.returncode == 2
            assert "--while-idle: this system does not say whether it is used" in ended.stderr
    finally:
        login.close()
