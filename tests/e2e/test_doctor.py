"""`covey doctor` as people run it, on one host: it finds running nodes, files open to others, and odd settings."""

from __future__ import annotations

import json
import os
import pty
import re
import secrets
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import pipes
from tests.support.compiled import needs_native
from tests.support.jobs import Ended, Job, finish, new_job
from tests.support.waiting import DEADLINE

import covey

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOST_SECONDS = 10.0
DOCTOR = "import sys; sys.argv[1:] = {words!r}; from covey.cli.main import main; main()"
PATIENT = """
from covey.cli.doctor import command, network
command.DEADLINE_SECONDS = network.LAST_MEASUREMENT_SECONDS = 1000.0
network.LATE_SECONDS = network.REACH_ANSWER_SECONDS = 1000.0
"""
"""In front of it: it does not hurry, however busy the machine is."""
WAITING = """
import covey, sys
print("ready", flush=True)
with covey.join("my-run", timeout=500) as group:
    print("joined", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def job() -> Iterator[Job]:
    with new_job() as made:
        home(made).mkdir(mode=0o700)
        yield made


def home(job: Job) -> Path:
    return job.folder / "home"


def doctor(job: Job, *words: str, before: str = PATIENT, **env: str) -> Ended:
    settings = {"COVEY_HOME": str(home(job)), "COVEY_INTERFACES": "lo"} | env
    return finish(job.start(before + DOCTOR.format(words=["doctor", *words]), **settings))


def said_by(ended: Ended) -> dict[str, Any]:
    assert ended.code in (0, 1), ended.err
    return json.loads(ended.out)


def codes(said: dict[str, Any]) -> list[str]:
    """Return the findings, but for nodes of others that happen to be on this host at the same time."""
    return [finding["code"] for finding in said["findings"] if finding["code"] != "wrong-secret-nearby"]


def test_it_finds_the_nodes_that_run_on_this_host_and_nothing_wrong(job: Job) -> None:
    secret = secrets.token_hex(32)
    env = {"COVEY_HOME": str(home(job)), "COVEY_INTERFACES": "lo", "COVEY_SECRET": secret, "COVEY_RUN_PROGRAM": "x"}
    nodes = [job.start(WAITING, **env) for _ in range(2)]
    for node in nodes:
        assert [pipes.stdout(node).readline() for _ in range(2)] == ["ready\n", "joined\n"]
    ended = doctor(job, "--json", COVEY_SECRET=secret)
    said = said_by(ended)
    assert (ended.code, codes(said), ended.err) == (0, [], "")
    assert {met["pid"] for met in said["nodes"]} == {node.pid for node in nodes}
    for met in said["nodes"]:
        assert (met["run"], met["state"]) == ("my-run", "running")
        assert met["is_here"]
        assert "same host" in met["found_by"]
        assert met["round_trip"] >= 0
        assert met["bytes_per_second"] > 1e6
    settings = {setting["name"]: setting for setting in said["machine"]["settings"]}
    assert (settings["interfaces"]["value"], settings["interfaces"]["source"]) == ("lo", "environment")
    assert (settings["secret"]["value"], settings["secret"]["source"]) == ("(hidden)", "environment")
    assert settings["lanes"]["source"] == "default"
    assert secret not in ended.out
    for node in nodes:
        assert finish(node).code == 0


def test_a_run_that_waits_alone_comes_first_with_what_it_waits_for(job: Job) -> None:
    secret = secrets.token_hex(32)
    env = {"COVEY_HOME": str(home(job)), "COVEY_INTERFACES": "lo", "COVEY_SECRET": secret, "COVEY_RUN_PROGRAM": "x"}
    node = job.start(WAITING, **env)
    assert pipes.stdout(node).readline() == "ready\n"
    deadline = time.monotonic() + DEADLINE
    while "waiting-nodes" not in (ended := doctor(job, "--json", COVEY_SECRET=secret)).out:  # it may not listen yet
        assert time.monotonic() < deadline, ended
    said = said_by(ended)
    assert (ended.code, codes(said)) == (0, ["waiting-nodes"])
    assert said["findings"][0]["text"].startswith("Run 'my-run' has waited ")
    assert " on this machine: 1 of " in said["findings"][0]["text"]
    (met,) = said["nodes"]
    assert (met["wait"]["cause"], met["wait"]["program"], met["wait"]["min_size"]) == ("nodes", "x", 2)
    assert (met["wait"]["problems"], met["wait"]["seeds"]) == ({}, {})  # the doctors that have left are no problem
    text = doctor(job, "-v", COVEY_SECRET=secret).out
    assert text.index("Run 'my-run' has waited") < text.index("This machine")
    other = said_by(doctor(job, "--json", COVEY_SECRET=secrets.token_hex(32)))
    assert (other["nodes"], other["other_processes"], codes(other)) == ([], [node.pid], ["nobody", "other-cluster"])
    node.kill()


def test_outside_of_a_cluster_this_machine_is_examined_and_the_way_into_one_is_told(job: Job) -> None:
    ended = doctor(job)
    assert ended.code == 1
    assert "covey init" in ended.out
    assert "This machine" not in ended.out
    ended = doctor(job, "--verbose")
    assert ended.code == 1
    for words in ("This machine", "Settings", "Interfaces", "Findings", "covey init", "covey enroll", "1 problem"):
        assert words in ended.out
    assert "\x1b" not in ended.out + ended.err
    assert all(line == line.rstrip() for line in ended.out.splitlines())


@needs_native
def test_it_tells_which_executor_moves_the_data_and_why_as_version_does(job: Job) -> None:
    for setting, executor in (("0", "Python, because COVEY_NATIVE=0 is set"), ("1", "compiled")):
        said = said_by(doctor(job, "--json", COVEY_NATIVE=setting))
        assert said["machine"]["versions"]["executor"] == executor
        version = finish(job.start(DOCTOR.format(words=["--version"]), COVEY_NATIVE=setting))
        assert version.out == f"covey {covey.__version__}\nexecutor: {executor}\n"


def test_a_key_open_to_others_is_found_with_the_command_that_mends_it(job: Job) -> None:
    (home(job) / "clusters").mkdir(mode=0o700)
    key = home(job) / "clusters" / "home.json"
    key.write_text("{}")
    key.chmod(0o644)
    ended = doctor(job, "--json")
    said = said_by(ended)
    assert ended.code == 1
    assert codes(said) == ["permissions"]
    assert said["findings"][0]["remedy"].startswith(f"chmod 600 {key}")


def test_a_misspelt_variable_is_found_and_does_not_keep_it_from_looking(job: Job) -> None:
    ended = doctor(job, "--json", COVEY_SECRET=secrets.token_hex(32), COVEY_SEED="10.0.0.1")
    said = said_by(ended)
    assert (ended.code, codes(said)) == (1, ["unknown-variable", "nobody"])
    assert "COVEY_SEEDS" in said["findings"][0]["remedy"]
    assert said["looked"]


def test_a_pattern_that_matches_nothing_is_a_finding_and_nonsense_an_error(job: Job) -> None:
    ended = doctor(job, "--json", "--interfaces", "nosuch*", COVEY_SECRET=secrets.token_hex(32))
    assert (ended.code, codes(said_by(ended))) == (1, ["interfaces-excluded"])
    ended = doctor(job, "--interfaces", "eth0,,eth1")
    assert ended.code == 2
    assert "empty part" in ended.err


def test_seeds_are_reported_one_by_one_with_what_is_wrong(job: Job) -> None:
    seeds = ["127.0.0.1:1", "no-such-host.invalid:47700"]
    said = said_by(doctor(job, "--json", "--seeds", ",".join(seeds), COVEY_SECRET=secrets.token_hex(32)))
    assert [seed["text"] for seed in said["seeds"]] == seeds
    assert not any(seed["answered"] for seed in said["seeds"])
    assert codes(said)[-1] == "nobody"
    silent = [finding["text"] for finding in said["findings"] if finding["code"] == "seed-silent"]
    assert any("127.0.0.1:1:" in text for text in silent)
    assert any("no-such-host.invalid:47700: " in text for text in silent)


@pytest.mark.thorough
@pytest.mark.alone
def test_it_is_done_within_ten_seconds(job: Job) -> None:
    began = time.monotonic()
    seeds = "127.0.0.1:1,no-such-host.invalid:47700"
    assert doctor(job, "--json", "--seeds", seeds, before="", COVEY_SECRET=secrets.token_hex(32)).code in (0, 1)
    assert time.monotonic() - began < MOST_SECONDS + 1  # with the time that Python takes to start


def test_an_examination_that_does_not_end_is_ended(job: Job) -> None:
    stuck = """
import threading
from covey.cli.doctor import command
from covey.runtime.peers.visit import Visit
command.DEADLINE_SECONDS = 0.5
Visit.look = lambda *_, **__: threading.Event().wait()
"""
    ended = doctor(job, before=stuck, COVEY_SECRET=secrets.token_hex(32))
    assert (ended.code, ended.err) == (1, "error: the examination did not end in time\n")


def test_malformed_seeds_are_an_error_at_once(job: Job) -> None:
    ended = doctor(job, "--seeds", "127.0.0.1:1,127.0.0.1:port", COVEY_SECRET=secrets.token_hex(32))
    assert ended.code == 2
    assert "error: seed '127.0.0.1:port': 'port' is not a port from 1 to 65535" in ended.err


def test_a_name_that_takes_forever_to_look_up_does_not_delay_it(job: Job) -> None:
    stuck = "import socket, threading; socket.getaddrinfo = lambda *_, **__: threading.Event().wait()\n"
    env = {"COVEY_HOME": str(home(job)), "COVEY_INTERFACES": "lo", "COVEY_SECRET": secrets.token_hex(32)}
    words = ["doctor", "--json", "--seeds", "slow.example:47700"]
    ended = finish(job.start(PATIENT + stuck + DOCTOR.format(words=words), **env))
    assert codes(said_by(ended)) == ["seed-silent", "nobody"]
    assert ended.err == ""


@pytest.mark.parametrize("columns", [60, pytest.param(120, marks=pytest.mark.thorough)])
def test_on_a_terminal_it_shows_progress_and_colours_and_fits(job: Job, columns: int) -> None:
    script = job.folder / "doctor.py"
    script.write_text(DOCTOR.format(words=["doctor", "-v"]))
    front, back = pty.openpty()
    env = {"COVEY_HOME": str(home(job)), "COVEY_INTERFACES": "lo", "COVEY_SECRET": secrets.token_hex(32)}
    clean = {key: value for key, value in os.environ.items() if not key.startswith("COVEY_") and key != "NO_COLOR"}
    env = (
        clean
        | env
        | {"COLUMNS": str(columns), "TERM": "xterm-256color", "TMPDIR": str(job.temp), "XDG_RUNTIME_DIR": str(job.temp)}
    )
    try:
        with subprocess.Popen([sys.executable, str(script)], env=env, stdin=back, stdout=back, stderr=back) as process:
            text = _read(front, process).decode()
            assert process.wait(DEADLINE) == 1
    finally:
        os.close(front)
        os.close(back)
    assert "looking for other nodes" in text
    assert "\x1b[1;31mproblem" in text
    report = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).split("This machine", 1)[1]
    assert max(len(line.rstrip()) for line in report.splitlines()) <= columns


@pytest.mark.thorough
def test_it_explains_a_wait_that_is_over_until_the_run_has_begun(job: Job) -> None:
    secret = secrets.token_hex(32)
    env = {"COVEY_HOME": str(home(job)), "COVEY_INTERFACES": "lo", "COVEY_SECRET": secret, "COVEY_RUN_PROGRAM": "x"}
    ended = finish(job.start("import covey; covey.join('my-run', timeout=1.5)", **env))
    assert "Timed out" not in ended.out
    assert "`covey doctor` looks for the reason" in ended.err
    said = said_by(doctor(job, "--json", COVEY_SECRET=secret))
    assert codes(said) == ["gave-up"]
    assert said["findings"][0]["text"].startswith("Run 'my-run' gave up on this machine ")
    assert said["last_wait"]["wait"]["program"] == "x"
    nodes = [job.start(WAITING, **env) for _ in range(2)]
    for node in nodes:
        assert [pipes.stdout(node).readline() for _ in range(2)] == ["ready\n", "joined\n"]
    for node in nodes:
        assert finish(node).code == 0
    said = said_by(doctor(job, "--json", COVEY_SECRET=secret))
    assert (codes(said), said["last_wait"]) == (["nobody"], None)


def _read(front: int, process: subprocess.Popen[bytes]) -> bytes:
    """Return what a process writes to a terminal until it ends."""
    deadline, text = time.monotonic() + DEADLINE, b""
    while True:
        has_ended = process.poll() is not None
        if select.select([front], [], [], 0 if has_ended else 0.05)[0]:
            text += os.read(front, 1 << 16)
        elif has_ended:
            return text
        assert time.monotonic() < deadline, text
