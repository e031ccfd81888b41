"""`covey push`, `covey data` and `covey.data`, as a person uses them on three machines that fail in the middle."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import pipes
from tests.support.machines import Lab, Machine, new_lab
from tests.support.waiting import DEADLINE, wait_until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

KEY = secrets.token_bytes(32)
MIB = 1 << 20
SIZE = 24 * MIB
SHOW = """
import hashlib, covey
path = covey.data("pictures")
print("found", sorted(each.name for each in path.iterdir()), hashlib.sha256((path / "large").read_bytes()).hexdigest())
"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with new_lab() as lab:
        folder = lab.folder / "pictures"
        folder.mkdir()
        (folder / "large").write_bytes(random.Random(5).randbytes(SIZE))
        (folder / "small").write_bytes(b"small")
        (folder / ".env").write_text("TOKEN=1")
        yield lab


def up(machine: Machine) -> tuple[subprocess.Popen[str], str]:
    agent = machine.start("-m", "covey", "up", "--allow", "all")
    line = pipes.stdout(agent).readline()
    assert " is up in the cluster 'home'" in line, pipes.stderr(agent).read()
    return agent, line.split()[0]


def there(machine: Machine) -> int:
    """Return how much of a data set that is not complete has come."""
    parts = (machine.home / "data").glob("*/partial-*/files/large")
    return sum(os.stat(path).st_blocks * 512 for path in parts)


def pushed(machine: Machine, *words: str) -> dict[str, Any]:
    ended = machine.covey("push", "pictures", *words, "--json")
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.mark.thorough
def test_a_data_set_survives_the_ends_of_terminal_and_agent_and_programs_find_it(lab: Lab) -> None:
    north, south, desk = (lab.machine(name, "home", KEY) for name in ("north", "south", "desk"))
    agent, name = up(north)
    refused = desk.covey("push", "pictures", "--to", name)
    assert refused.returncode == 2
    assert f"this machine has never sent files to {name} (" in refused.stderr
    assert "They get 2 files (24.0 MiB)" in refused.stderr
    assert "covey: left out: .env may hold secrets and is not sent" in refused.stderr
    desk.trust("home", north, south)

    terminal = desk.start("-m", "covey", "push", "pictures")
    wait_until(lambda: there(north) > 2 * MIB)
    terminal.kill()  # no word to the agent
    terminal.wait(DEADLINE)
    begun = there(north)
    assert 2 * MIB < begun < SIZE
    missing = north.start("-c", SHOW)
    assert "covey push PATH --name pictures" in pipes.stderr(missing).read()

    terminal = desk.start("-m", "covey", "push", "pictures", "--json")
    wait_until(lambda: there(north) > begun + 2 * MIB)
    agent.send_signal(signal.SIGKILL)
    agent.wait(DEADLINE)
    second = there(north)
    terminal.send_signal(signal.SIGINT)
    assert terminal.wait(DEADLINE) == 130, pipes.stderr(terminal).read()

    agent, name = up(north)
    outcome = pushed(desk)
    (row,) = outcome["machines"]
    assert (row["machine"], row["problem"]) == (name, None)
    assert row["bytes_from_here"] <= SIZE + 5 - second + 2 * MIB, "what has come is not sent again"

    other, second_name = up(south)
    rows = {each["machine"]: each for each in pushed(desk)["machines"]}
    assert rows[name]["was_there"]
    assert rows[second_name]["bytes_from_here"] == 0, "it comes from the machine that has it"
    assert rows[second_name]["bytes_from_others"] == SIZE + 5

    (lab.folder / "program").mkdir()
    (lab.folder / "program" / "show.py").write_text(SHOW)
    desk.folder = lab.folder / "program"
    ran = desk.covey("run", "--on", "all", "show.py")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("found ['large', 'small']") == 2, ran.stdout
    own = desk.start("show.py")
    assert "found ['.env', 'large', 'small']" in pipes.stdout(own).read(), "here it is the folder itself"

    listed = json.loads(desk.covey("data", "--json").stdout)
    assert [(row["machine"], row["state"]) for row in listed] == [
        ("here", "pushed from here"),
        *sorted((each, "complete") for each in (name, second_name)),
    ]
    table = north.covey("data").stdout
    assert "pictures" in table
    assert all(len(line) <= 60 for line in desk.covey("data", COLUMNS="60").stdout.splitlines())
    asked = desk.covey("data", "--remove", "pictures", "--on", name)
    assert asked.returncode == 2
    assert "there is no terminal to ask on; add --yes" in asked.stderr
    assert desk.covey("data", "--remove", "pictures", "--on", name, "--yes").returncode == 0
    assert not Path(north.home, "data").joinpath("pictures").exists()
    left = json.loads(desk.covey("data", "--json").stdout)
    assert {row["machine"] for row in left} == {"here", second_name}
    (desk.folder / "pictures").mkdir(exist_ok=True)
    again = desk.covey("data", "--remove", "pictures", "--yes", "--json")
    assert {row["machine"] for row in json.loads(again.stdout)["removed"]} == {"here", second_name}
    assert (lab.folder / "pictures" / "large").exists(), "the folder that was pushed stays"
    noted = south.covey("audit", "--json", "--event", "data-received").stdout
    assert "pictures: " in noted
    for each in (agent, other):
        each.terminate()
        assert each.wait(DEADLINE) == 0
