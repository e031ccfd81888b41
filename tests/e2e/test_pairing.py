"""`covey init`, `pair` and `enroll` with a code of six digits, as people at two terminals and scripts use them.

The machines are given the address of the other: on this host, other tests may show codes at the same time.
"""

from __future__ import annotations

import json
import re
import signal
from typing import TYPE_CHECKING

import pytest
from tests.e2e.test_cluster_commands import Terminal
from tests.support import pipes
from tests.support.machines import Lab, Machine, end, heard, new_lab

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

HERE = "127.0.0.1"
SHOWN = re.compile(r"Code: (\d{3} \d{3}) \(good for \d:\d\d min, for ")
DRAWN = r"\x1b\[[\d;]*m(\d \d \d   \d \d \d)\x1b\[0m"
"""The code, as a terminal shows it."""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with new_lab() as made:
        yield made


@pytest.fixture
def sat_down() -> Iterator[list[Terminal]]:
    terminals: list[Terminal] = []
    yield terminals
    for terminal in terminals:
        terminal.close()


def show(machine: Machine, *words: str) -> tuple[subprocess.Popen[str], str]:
    """Start a command that shows codes, outside of a terminal; return it and the first code."""
    process = machine.start("-m", "covey", *words)
    shown = SHOWN.search(pipes.read_until(pipes.stdout(process), "Code: "))
    assert shown is not None
    return process, shown[1]


def enrolled(machine: Machine, code: str) -> str:
    ended = machine.covey("enroll", HERE, "-", stdin=f"{code}\n")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def wrong(code: str) -> str:
    return f"{(int(code.replace(' ', '')) + 1) % 10**6:06d}"


def test_a_code_that_one_machine_shows_puts_another_into_its_cluster_and_they_know_each_other_by_name(
    lab: Lab,
) -> None:
    north, south = lab.machine("north"), lab.machine("south")
    process, code = show(north, "init", "--machines", "1")
    said = enrolled(south, code)
    assert "This machine is now in the cluster 'home', with " in said
    assert "On each machine: covey run train.py" in said
    ended = end(process)
    assert ended[0] == 0, ended
    assert "is in the cluster 'home' now." in ended[1]
    assert north.key("home") == south.key("home")
    for one, other in ((north, south), (south, north)):
        trusted = json.loads(one.covey("trust", "--json").stdout)
        assert other.identity().hex() in {each["id"] for each in trusted}


def test_pair_shows_a_code_for_each_machine_until_it_is_ended_and_tells_programs_what_it_shows(lab: Lab) -> None:
    north = lab.machine("north", "lab")
    process = north.start("-m", "covey", "pair", "--json")
    first = heard(process)
    assert (first["cluster"], first["machines"], first["paired"], first["over"]) == ("lab", 1, [], "")
    bad = lab.machine("bad").covey("enroll", HERE, "-", stdin=wrong(first["code"]))
    assert bad.returncode == 2
    assert "is not the code that" in bad.stderr
    assert "2 tries left" in bad.stderr
    while not (now := heard(process))["failed"]:
        pass
    assert (now["code"], now["failed"], now["failed_from"]) == (first["code"], 1, HERE)
    codes = {first["code"]}
    for name in ("south", "west"):
        enrolled(lab.machine(name), now["code"])
        while now["code"] in codes or len(now["paired"]) < len(codes):
            now = heard(process)
        codes.add(now["code"])
    assert [each["stored"] for each in now["paired"]] == [True, True]
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0


def test_a_person_reads_the_code_on_one_terminal_and_types_it_on_another(lab: Lab, sat_down: list[Terminal]) -> None:
    """With a typing error first; and Ctrl-C on the first machine ends it in good order."""
    north, south = lab.machine("north"), lab.machine("south")
    sat_down.append(there := Terminal(north, "init"))
    code = there.wait_for(DRAWN)[1].replace(" ", "")
    sat_down.append(here := Terminal(south, "enroll", HERE))
    here.answer("Code: ", "12 34")
    here.answer("Code: ", wrong(code))
    here.answer("Code: ", f"{code[:3]}-{code[3:]}")
    assert here.finish() == 0
    assert "A code has six digits" in here.screen
    assert f"{wrong(code)[:3]} {wrong(code)[3:]} is not the code that" in here.screen
    there.wait_for("1 wrong try, the last one from 127.0.0.1")
    there.wait_for("is in the cluster 'home' now")
    there.wait_for(DRAWN)
    there.interrupt()
    assert there.finish() == 0
    assert "covey1-" not in there.screen
    assert "this is another one" not in there.screen, "the first code was used, and not given up"
    assert north.key("home") == south.key("home")


def test_who_has_typed_init_on_both_machines_is_asked_to_give_one_cluster_up(
    lab: Lab, sat_down: list[Terminal]
) -> None:
    north, south = lab.machine("north"), lab.machine("south")
    for name in ("home", "den"):
        assert south.covey("init", name).returncode == 0
    _, code = show(north, "init", "--machines", "2")
    ended = south.covey("enroll", HERE, "-", stdin=code)  # a script has to say what it gives up
    assert (ended.returncode, north.key("home") == south.key("home")) == (2, False)
    assert "--force replaces it" in ended.stderr
    sat_down.append(terminal := Terminal(south, "enroll", HERE))
    terminal.answer("[Y/n]: ", "n")
    assert terminal.finish() == 1
    assert north.key("home") != south.key("home")
    sat_down.append(terminal := Terminal(south, "enroll", HERE))
    terminal.answer("[Y/n]: ", "")
    terminal.answer("Code: ", code)
    assert terminal.finish() == 0
    assert "has a cluster of its own, 'den' and 'home', in which no other machine has ever been" in terminal.screen
    assert north.key("home") == south.key("home")
    assert [each["name"] for each in json.loads(south.covey("clusters", "--json").stdout)] == ["home"]


def test_a_machine_that_shows_no_code_is_said_to_and_a_join_code_still_works(lab: Lab) -> None:
    north, south = lab.machine("north"), lab.machine("south")
    made = json.loads(north.covey("init", "--json").stdout)
    ended = south.covey("enroll", HERE, "-", stdin="123456")
    assert ended.returncode == 2
    assert f"No machine that shows a code answers at {HERE}" in ended.stderr
    assert "Type `covey pair` there" in ended.stderr
    refused = south.covey("enroll", "--up", "-", stdin=made["join_code"])
    assert refused.returncode == 2
    assert "a join code comes from none: run `covey up --allow NODE`" in refused.stderr
    assert north.key("home") == south.key("home")
    assert "`covey enroll ADDRESS`" in south.covey("enroll", "one", "two").stderr
    assert "--show only prints" in north.covey("init", "--show", "--machines", "1").stderr


def test_this_machine_itself_is_not_let_in(lab: Lab) -> None:
    north = lab.machine("north")
    _, code = show(north, "init", "--machines", "1")
    ended = north.covey("enroll", HERE, "-", stdin=code)
    assert ended.returncode == 2
    assert "this is the machine that shows the code" in ended.stderr
