"""`covey up` on two machines, and a third one that starts, lists, follows and stops programs there; and ssh."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

import pytest
from tests.support import pipes
from tests.support.machines import Lab, Machine, end, new_lab
from tests.support.waiting import DEADLINE, wait_until

from covey.net.keys import clusters
from covey.net.keys.identity import id_text

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

KEY = secrets.token_bytes(32)
TRAIN = """
import os, sys, time
import covey
from parts.numbers import START
if "early" in sys.argv and os.environ["COVEY_HOME"].endswith("north"):
    sys.exit(5)
with covey.join() as group:
    try:
        total = group.all_reduce(START * 10 ** group.rank)
        print("rank", group.rank, "of", group.size, "sum", total, sys.argv[1:], flush=True)
        print("home", os.path.basename(os.environ["COVEY_HOME"]), file=sys.stderr, flush=True)
        open(f"checkpoint-{group.rank}", "a").write("saved ")
        if "wait" in sys.argv:
            time.sleep(600)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise
"""
SSH = """#!/bin/sh
# Stands for ssh: takes the options and the host away, and runs the command here, with the home of that host.
while [ "${1#-}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done
host=$1; shift
tr '\\0' ' ' < /proc/$$/cmdline >> "$LAB/command-lines"
[ "$host" = nowhere ] && { echo "ssh: Could not resolve hostname nowhere" >&2; exit 255; }
export COVEY_HOME="$LAB/$host"
exec sh -c "$*"
"""


class Town(NamedTuple):
    """Two machines with agents, and one from which a person starts programs."""

    lab: Lab
    north: Machine
    south: Machine
    desk: Machine
    names: dict[str, str]
    """The names of the agents, by machine."""


def ready(agent: subprocess.Popen[str]) -> str:
    """Return the name of an agent once it is up."""
    line = pipes.stdout(agent).readline()
    assert " is up in the cluster 'home'" in line, pipes.stderr(agent).read()
    return line.split()[0]


@pytest.fixture(scope="module")
def town() -> Iterator[Town]:
    with new_lab() as lab:
        north, south, desk = (lab.machine(name, "home", KEY) for name in ("north", "south", "desk"))
        desk.folder = lab.folder / "project"
        (desk.folder / "parts").mkdir(parents=True)
        (desk.folder / "parts" / "numbers.py").write_text("START = 1\n")
        (desk.folder / "train.py").write_text(TRAIN)
        (desk.folder / "large.bin").write_bytes(b"not sent")
        (desk.folder / ".coveyignore").write_text("*.bin\n")
        for machine in (north, south, desk):
            machine.trust("home", north, south)
        agents = {machine: machine.start("-m", "covey", "up", "--allow", "all") for machine in (north, south)}
        names = {machine.home.name: ready(agent) for machine, agent in agents.items()}
        yield Town(lab, north, south, desk, names)
        for agent in agents.values():
            agent.terminate()
        assert [agent.wait(DEADLINE) for agent in agents.values()] == [0, 0]


def work_of(machine: Machine, program: str = "train") -> Path:
    (folder,) = (machine.home / "agent" / "runs").glob(f"{program}-*")
    return folder / "work"


def lines_with(text: str, word: str) -> list[str]:
    return sorted(line for line in text.splitlines() if word in line)


def started(town: Town, *words: str) -> subprocess.Popen[str]:
    """Start a program on all machines, and return once two ranks have joined."""
    terminal = town.desk.start("-m", "covey", "run", "--on", "all", "train.py", *words)
    seen = [pipes.stdout(terminal).readline() for _ in range(2)]
    assert all("of 2 sum 11" in line for line in seen), (seen, pipes.stderr(terminal).read())
    return terminal


def test_one_command_starts_a_run_on_all_machines_with_the_files_of_the_folder(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = town.lab.folder / "first"  # which no other test changes
    (project / "parts").mkdir(parents=True)
    (project / "parts" / "numbers.py").write_text("START = 1\n")
    (project / "first.py").write_text(TRAIN)
    (project / "large.bin").write_bytes(b"not sent")
    (project / ".coveyignore").write_text("*.bin\n")
    monkeypatch.setattr(town.desk, "folder", project)
    ended = town.desk.covey("run", "--on", "all", "-n", "2", "--log-dir", "../logs", "first.py", "--lr", "0.1")
    assert ended.returncode == 0, ended.stderr
    host = re.escape(os.uname().nodename.partition(".")[0])
    said = sorted(re.findall(rf"^\[{host} (\d)\] rank \1 of 4 sum 1111 \['--lr', '0.1'\]$", ended.stdout, re.MULTILINE))
    assert said == ["0", "1", "2", "3"], ended.stdout
    homes = re.findall(rf"^\[{host} \d\] home (\w+)$", ended.stderr, re.MULTILINE)
    assert sorted(homes) == ["north", "north", "south", "south"], ended.stderr
    assert ended.stderr.count("3 of 3 files sent") == 2, ended.stderr
    for machine in (town.north, town.south):
        work = work_of(machine, "first")
        assert (work / "parts" / "numbers.py").read_text() == "START = 1\n"
        assert not (work / "large.bin").exists()
    logs = {path.name: path.read_text() for path in (town.lab.folder / "logs").iterdir()}
    assert [name for name in sorted(logs) if "-rank-" in name] == [
        f"{os.uname().nodename.partition('.')[0]}-rank-{rank}.log" for rank in range(4)
    ]
    assert all("of 4 sum 1111" in text for name, text in logs.items() if "-rank-" in name)

    (project / "parts" / "numbers.py").write_text("START = 2\n")
    again = town.desk.covey("run", "--on", ",".join(town.names.values()), "first.py")
    assert again.returncode == 0, again.stderr
    assert len(lines_with(again.stdout, "of 2 sum 22")) == 2
    assert again.stderr.count("1 of 3 files sent") == 2, "only what has changed is sent"
    assert (work_of(town.north, "first") / "checkpoint-0").exists() or (
        work_of(town.south, "first") / "checkpoint-0"
    ).exists()


def test_a_machine_that_fails_before_it_joins_stops_the_others_and_gives_the_exit_code(town: Town) -> None:
    ended = town.desk.covey("run", "--on", "all", "train.py", "early")
    assert ended.returncode == 5, ended.stderr
    assert f"covey: stopping {town.names['south']}" in ended.stderr


def test_ctrl_c_reaches_all_ranks(town: Town) -> None:
    terminal = started(town, "wait")
    terminal.send_signal(signal.SIGINT)
    code, out, err = end(terminal)
    assert code == 130, err
    assert len(lines_with(out, "interrupted")) == 2
    assert err.count("Stopping…") == 1, err
    last = json.loads(town.desk.covey("history", "--json").stdout)[0]
    assert (last["ranks"], last["code"], last["reason"]) == (2, 130, "stopped by SIGINT")
    assert last["machines"] == sorted(town.names.values())


def test_a_detached_run_is_listed_followed_and_stopped_from_any_machine(town: Town) -> None:
    begun = town.desk.covey("run", "my-run", "--on", "all", "--detach", "--json", "train.py", "wait")
    assert begun.returncode == 0, begun.stderr
    *_, said = map(json.loads, begun.stdout.splitlines())
    assert (said["event"], said["run"], sorted(said["machines"])) == ("started", "my-run", sorted(town.names.values()))
    busy = town.desk.covey("run", "my-run", "--on", "all", "train.py")
    assert busy.returncode == 2
    assert busy.stderr.count("run 'my-run' runs here already; `covey stop my-run`") == 2

    listed = json.loads(town.north.covey("ps", "--json").stdout)
    assert sorted((row["run"], row["machine"], row["code"]) for row in listed) == sorted(
        ("my-run", name, None) for name in town.names.values()
    )
    assert all(Path(row["folder"], "train.py").exists() for row in listed)
    follower = town.south.start("-m", "covey", "logs", "my-run", "-f")
    seen = [pipes.stdout(follower).readline() for _ in range(2)]
    assert all("of 2 sum 11" in line for line in seen), (seen, pipes.stderr(follower).read())
    stopped = town.south.covey("stop", "my-run", "--json")
    assert stopped.returncode == 0, stopped.stderr
    ended = json.loads(stopped.stdout)
    assert (ended["run"], sorted(ended["ended_on"])) == ("my-run", sorted(town.names.values()))
    code, _, err = end(follower)
    assert code == 0, err
    table = town.desk.covey("ps", "--all").stdout
    assert len(re.findall(r"^my-run +\S+ +ended with 143", table, re.MULTILINE)) == 2, table
    shown = town.desk.covey("logs", "my-run").stdout
    assert len(lines_with(shown, "of 2 sum 11")) == 2, shown
    assert town.desk.covey("stop", "my-run").returncode == 2
    noted = town.north.covey("audit", "--json", "--event", "program-signalled").stdout
    assert "my-run: SIGTERM" in noted


def test_only_an_allowed_machine_may_start_programs_and_every_start_is_in_the_audit_log(town: Town) -> None:
    west = town.lab.machine("west", "home", KEY)
    agent = west.start("-m", "covey", "up", "--json")
    up = json.loads(pipes.stdout(agent).readline())
    name = up["machine"]
    assert (up["event"], up["cluster"], up["allowed"], up["conditions"]) == ("up", "home", [], [])
    known = len(json.loads(town.desk.covey("history", "--json").stdout))
    refused = town.desk.covey("run", "--on", name, "train.py")
    assert refused.returncode == 1, "before a person is asked whether files may go there"
    asked = re.search(
        rf"\w+-{id_text(town.desk.identity())[:4]} may not use {name}: there, add --allow (\w{{52}}) to `covey up`",
        refused.stderr,
    )
    assert asked is not None, refused.stderr
    assert len(json.loads(town.desk.covey("history", "--json").stdout)) == known, "it has not begun"
    west.folder = town.desk.folder
    own = west.covey("run", "--on", name, "train.py")
    assert own.returncode == 0, own.stderr
    agent.terminate()
    assert agent.wait(DEADLINE) == 0
    assert json.loads(pipes.stdout(agent).read())["event"] == "ended"

    again = west.start("-m", "covey", "up", "--allow", asked[1])
    assert ready(again) == name
    unknown = town.desk.covey("run", "--on", name, "train.py")
    assert unknown.returncode == 2, unknown.stderr
    assert f"this machine has never sent files to {name} (" in unknown.stderr
    assert "there is no terminal to ask on; add --yes" in " ".join(unknown.stderr.split())
    assert town.desk.covey("run", "--on", name, "--yes", "train.py", "by desk").returncode == 0
    again.terminate()
    assert again.wait(DEADLINE) == 0
    entries = [json.loads(line) for line in west.covey("audit", "--json").stdout.splitlines()]
    programs = [(entry["event"], entry["reason"]) for entry in entries if entry["event"].startswith("program-")]
    assert [event for event, _ in programs] == [
        "program-refused",
        *("program-started", "program-ended", "program-started", "program-ended"),
    ]
    assert programs[3][1] == "train: 1 processes: train.py by desk"
    assert programs[4][1].startswith("train: exit code 0 after")


def test_a_home_folder_is_refused_and_files_that_may_hold_secrets_are_named_and_stay_here(town: Town) -> None:
    desk = town.lab.machine("desk", "home", KEY)
    desk.folder = town.lab.folder / "person"
    (desk.folder / "work" / ".ssh").mkdir(parents=True)
    (desk.folder / "work" / "files.py").write_text("import os; print('files', sorted(os.listdir('.')), flush=True)\n")
    (desk.folder / "work" / ".env").write_text("TOKEN=1\n")
    (desk.folder / "work" / ".ssh" / "id_ed25519").write_text("key\n")
    refused = desk.covey("run", "--on", "all", "work/files.py", HOME=str(desk.folder))
    assert refused.returncode == 2
    assert "is your home folder, and is not sent to other machines; put the program into a folder" in refused.stderr
    desk.folder /= "work"
    sent = desk.covey("run", "--on", town.names["north"], "--include", ".env", "files.py", HOME=str(desk.folder.parent))
    assert sent.returncode == 0, sent.stderr
    assert "files ['.env', 'files.py']" in sent.stdout
    assert "covey: left out: .ssh/ may hold secrets and is not sent; --include sends it" in sent.stderr


def test_a_data_set_goes_to_machines_once_the_person_has_agreed_and_is_listed_and_removed(town: Town) -> None:
    guest = town.lab.machine("guest-with-data", "home", KEY)
    guest.folder = town.lab.folder / "for-data"
    (guest.folder / "numbers").mkdir(parents=True)
    (guest.folder / "numbers" / "a").write_text("1 2 3")
    (guest.folder / "numbers" / ".env").write_text("TOKEN=1")
    (guest.folder / "show.py").write_text("import covey; print((covey.data('numbers') / 'a').read_text())\n")
    name = town.names["north"]
    refused = guest.covey("push", "numbers", "--to", name)
    assert refused.returncode == 2
    assert f"this machine has never sent files to {name} (" in refused.stderr
    assert "covey: left out: .env may hold secrets and is not sent" in refused.stderr
    assert not (town.north.home / "data").exists()
    sent = guest.covey("push", "numbers", "--to", name, "--yes", "--json")
    assert sent.returncode == 0, sent.stderr
    answer = json.loads(sent.stdout)
    assert (answer["name"], answer["bytes"]) == ("numbers", 5)
    (row,) = answer["machines"]
    assert (row["machine"], row["bytes_from_here"], row["problem"]) == (name, 5, None)
    assert "1 2 3" in guest.covey("run", "--on", name, "show.py").stdout
    assert "1 2 3" in guest.covey("run", "show.py").stdout
    listed = json.loads(guest.covey("data", "--json").stdout)
    assert [(row["machine"], row["state"]) for row in listed] == [("here", "pushed from here"), (name, "complete")]
    asked = guest.covey("data", "--remove", "numbers")
    assert asked.returncode == 2
    assert "there is no terminal to ask on; add --yes" in asked.stderr
    removed = guest.covey("data", "--remove", "numbers", "--yes")
    assert removed.returncode == 0, removed.stderr
    assert "here: numbers is forgotten; the files that were pushed stay" in removed.stdout
    assert (guest.folder / "numbers" / "a").exists()
    assert "There is no data set" in guest.covey("data", "--on", "here").stdout

    def noted() -> list[dict[str, str]]:
        lines = [json.loads(line) for line in town.north.covey("audit", "--json").stdout.splitlines()]
        return [each for each in lines if each["event"].startswith("data-")]

    wait_until(lambda: any(each["event"] == "data-removed" for each in noted()))  # a thread writes the log
    assert [each["event"] for each in noted()] == ["data-began", "data-received", "data-removed"]
    assert all(each["reason"].startswith("numbers: ") for each in noted())


def test_trust_is_listed_withdrawn_and_given_by_a_whole_id(town: Town) -> None:
    guest = town.lab.machine("guest", "home", KEY)
    north, name = id_text(town.north.identity()), town.names["north"]
    assert "run `covey trust nowhere` first" in guest.covey("up", "--allow", "nowhere").stderr
    assert "is no machine known here" in guest.covey("trust", "nowhere").stderr
    given = guest.covey("trust", north)
    assert given.returncode == 0, given.stderr
    (row,) = [each for each in json.loads(guest.covey("trust", "--json").stdout) if not each["has_had_files"]]
    assert row["id"] == town.north.identity().hex()
    assert not row["by_owner"]
    assert north in guest.covey("trust").stdout
    unit = guest.covey("up", "--unit", "--allow", row["name"])
    assert f"--allow={north}\n" in unit.stdout, "a unit has ids: names are looked up once"
    assert guest.covey("trust", name[-4:], "--undo").returncode == 0
    assert guest.covey("trust", north, "--undo").returncode == 2
    with patch.dict(os.environ, COVEY_HOME=str(guest.home)):
        clusters.remember("home", town.north.identity(), name)
    asked = guest.covey("trust", name)
    assert asked.returncode == 2
    assert f"has the id {north}" in asked.stderr
    assert "there is no terminal to ask on; add --yes" in asked.stderr
    assert guest.covey("trust", name, "--yes").returncode == 0
    events = [json.loads(line)["event"] for line in guest.covey("audit", "--json").stdout.splitlines()]
    assert events.count("trusted") == 2
    assert events.count("distrusted") == 1


def test_a_unit_for_systemd_has_the_command_with_its_options(town: Town) -> None:
    ended = town.north.covey("up", "--unit", "--allow", "all")
    assert ended.returncode == 0, ended.stderr
    assert f"\nExecStart={sys.executable} -m covey up --cluster=home --allow=all\n" in ended.stdout
    assert f'\nEnvironment="COVEY_HOME={town.north.home}"\n' in ended.stdout
    assert "network-online" not in ended.stdout  # a target of the system; user units have none


def with_ssh(town: Town) -> Machine:
    """Return the machine of the person, with an ssh that reaches the others."""
    script = town.lab.folder / "ssh"
    script.write_text(SSH)
    script.chmod(0o755)
    desk = town.lab.machine("desk", "home", KEY)
    desk.folder = town.desk.folder
    desk.env |= {"COVEY_SSH": str(script), "LAB": str(town.lab.folder)}
    return desk


def test_ssh_starts_a_run_where_no_agent_is_and_the_secret_is_on_no_command_line(town: Town) -> None:
    desk = with_ssh(town)
    ended = desk.covey("run", "--hosts", "north,south:2", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert len(lines_with(ended.stdout, "of 3 sum 111")) == 3
    assert sorted(re.findall(r"home (\w+)", ended.stderr)) == ["north", "south", "south"]
    seen = (town.lab.folder / "command-lines").read_text()
    assert "BatchMode=yes" in seen
    assert KEY.hex() not in seen
    assert "train" not in seen


@pytest.mark.thorough
def test_ssh_copies_the_folder_by_the_rules_of_agents_once_the_person_has_agreed(town: Town) -> None:
    desk = with_ssh(town)
    desk.folder = town.lab.folder / "copied"
    (desk.folder / "parts").mkdir(parents=True)
    (desk.folder / "parts" / "numbers.py").write_text("START = 1\n")
    (desk.folder / "sent.py").write_text(TRAIN)
    (desk.folder / "data.bin").write_bytes(bytes(range(256)) * 1000)
    (desk.folder / ".env").write_text("TOKEN=1\n")
    words = ("run", "--hosts", "north,south", "--copy")
    refused = desk.covey(*words, "sent.py")
    assert refused.returncode == 2
    assert "this machine has never sent files to north, south by ssh, and there is no terminal" in refused.stderr
    assert not list((town.north.home / "ssh").rglob("sent.py"))
    ended = desk.covey(*words, "--yes", "sent.py")
    assert ended.returncode == 0, ended.stderr
    assert len(lines_with(ended.stdout, "of 2 sum 11")) == 2
    assert "They get 3 files" in ended.stderr
    assert "covey: left out: .env may hold secrets and is not sent" in ended.stderr
    for machine in (town.north, town.south):
        assert f"{machine.home.name}: 3 of 3 files sent" in ended.stderr
        (work,) = (machine.home / "ssh" / "runs").glob("sent-*/work")
        assert (work / "data.bin").read_bytes() == (desk.folder / "data.bin").read_bytes()
        assert not (work / ".env").exists()

    (desk.folder / "parts" / "numbers.py").write_text("START = 2\n")
    again = desk.covey(*words, "sent.py")
    assert again.returncode == 0, again.stderr
    assert len(lines_with(again.stdout, "of 2 sum 22")) == 2
    assert again.stderr.count("1 of 3 files sent") == 2, "only what has changed is sent, and the answer is remembered"
    failed = desk.covey("run", "--hosts", "north,nowhere", "--copy", "--yes", "sent.py")
    assert failed.returncode == 2
    assert "nowhere: ssh could not connect" in failed.stderr
    assert "of 2 sum" not in failed.stdout, "it is started on all or on none"


@pytest.mark.thorough
def test_a_host_that_ssh_does_not_reach_and_ctrl_c_end_the_ranks_on_the_others(town: Town) -> None:
    desk = with_ssh(town)
    failed = desk.covey("run", "--hosts", "north,nowhere", "train.py")
    assert failed.returncode == 255
    assert "covey: nowhere: ssh could not connect" in failed.stderr
    assert "covey: stopping north" in failed.stderr

    waiting = desk.start("-m", "covey", "run", "--hosts", "north,south", "train.py", "wait")
    assert all("of 2 sum 11" in pipes.stdout(waiting).readline() for _ in range(2))
    waiting.send_signal(signal.SIGINT)
    code, out, err = end(waiting)
    assert code == 130, err
    assert len(lines_with(out, "interrupted")) == 2


def test_a_killed_ssh_ends_the_remote_ranks(town: Town) -> None:
    """The input of `covey.agent.remote` ends with the connection."""
    desk = town.lab.machine("desk", "home", KEY)
    desk.folder = town.desk.folder
    remote = town.south.start("-m", "covey.agent.remote")
    words = ["run", "--run", "alone", "--cluster", "home", "--size", "1", "train.py", "wait"]
    request = {"folder": str(desk.folder), "words": words, "secret": KEY.hex()}
    pipes.stdin(remote).write(json.dumps(request) + "\n")
    pipes.stdin(remote).flush()
    assert "rank 0 of 1" in pipes.stdout(remote).readline()
    code, _, err = end(remote)
    assert code == 143, err


@pytest.mark.thorough
@pytest.mark.parametrize("where", [("--on", "all"), ("--hosts", "north,south")], ids=["agents", "ssh"])
def test_one_command_measures_the_links_between_all_machines(town: Town, where: tuple[str, str]) -> None:
    words = ("--sizes", "4", "--reps", "1", "--quick", "--pair-seconds", "0.1")
    ended = with_ssh(town).covey("run", *where, "covey", "bench", *words)
    assert ended.returncode == 0, ended.stderr
    assert len(lines_with(ended.stdout, " rank 1 of 2 takes part; rank 0 ")) == 1
    assert len(lines_with(ended.stdout, " slowest link: ")) == 1
    assert len(lines_with(ended.stdout, " all_reduce 4 B, 2 ranks: ")) == 1


FUNCTIONS = """
from __future__ import annotations
import sys
import covey
import numpy as np

CELL
assert [each.rank for each in fits] == [0, 1, 2, 3]
assert all(type(each) is Fit and np.allclose(each.weights, range(8)) for each in fits)

def part(group: covey.Group, fit: Fit) -> int:
    print("part", fit.rank, flush=True)
    if group.rank == 1:
        raise ValueError("one is not enough")
    group.barrier()
    return 3

try:
    covey.run_on("all", part, fits[2])
except covey.RemoteCallError as error:
    print("refused:", error, error.type, "in part" in error.traceback)
"""
OTHERS = """
import os, sys
import covey

machines = sys.argv[1].split(",")
def untyped(group, text):
    return {"rank": group.rank, "text": text}
assert covey.run_on(machines[0], untyped, "hi") == [{"rank": 0, "text": "hi"}]
def wrong(group) -> int:
    return "no number"
try:
    covey.run_on(machines[:1], wrong)
except covey.CallRefusedError as error:
    print("typed:", error)
try:
    covey.run_on(machines[:1], lambda group: group.recv(timeout=600), timeout=2)
except covey.DeadlineError as error:
    print("late:", error)
print(covey.run_on(machines, lambda group: os._exit(3) if group.rank else group.agree(True), on_loss="continue"))
"""
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "notebooks.md"


def test_a_function_goes_to_no_machine_that_is_not_trusted_and_runs_on_none_that_does_not_allow_it(town: Town) -> None:
    guest = town.lab.machine("guest-2", "home", KEY)
    name = town.names["north"]
    runs = set((town.north.home / "agent" / "runs").glob("*"))
    call = "import covey, sys\ncovey.run_on(sys.argv[1], lambda group: 1)"
    code, _, err = end(guest.start("-c", call, name))
    assert code == 1
    assert f"ConfigError: this machine does not trust {name} ({id_text(town.north.identity())}) yet" in err
    assert f"run `covey trust {name}` here" in err
    east = town.lab.machine("east", "home", KEY)
    agent = east.start("-m", "covey", "up")
    there = ready(agent)
    guest.trust("home", east)
    code, _, err = end(guest.start("-c", call, there))
    assert code == 1
    assert f"AuthError: {there}: " in err
    assert "may not use" in err
    agent.terminate()
    assert agent.wait(DEADLINE) == 0
    assert not any((east.home / "agent" / "runs").glob("*"))
    assert set((town.north.home / "agent" / "runs").glob("*")) == runs


def test_a_function_runs_on_machines_that_allow_it_and_its_results_come_back_as_values(town: Town) -> None:
    """It is that of the guide to notebooks. No folder is left there: the run has a new name each time."""
    _, cell = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    before = {machine: set((machine.home / "agent" / "runs").glob("*")) for machine in (town.north, town.south)}
    program = FUNCTIONS.replace("CELL", cell.replace("north,south", ",".join(town.names.values())))
    code, out, err = end(town.desk.start("-c", program))
    assert code == 0, err
    assert len(lines_with(out, "] part 2")) == 2
    refused = re.search(
        r"refused: part in rank 1 of 2 on (\S+) raised ValueError: one is not enough ValueError True", out
    )
    assert refused is not None, out
    assert refused[1] in town.names.values()
    for machine, folders in before.items():
        assert set((machine.home / "agent" / "runs").glob("*")) == folders


@pytest.mark.thorough
def test_functions_that_are_late_lost_or_break_their_promise_are_told_apart(town: Town) -> None:
    code, out, err = end(town.desk.start("-c", OTHERS, ",".join(town.names.values())))
    assert code == 0, err
    north = town.names["north"]
    assert f"typed: the result of rank 0 on {north} cannot be used: Expected `int`, got `str`" in out
    assert "late: lambda was ended after the timeout of 2 s" in out.replace("<lambda>", "lambda")
    assert "[True, None]" in out
