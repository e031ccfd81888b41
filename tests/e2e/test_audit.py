"""`covey audit` after real processes, commands and strangers: what is in the log, and what scripts can rely on."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.e2e.test_cluster_commands import Terminal
from tests.support import pipes
from tests.support.machines import Lab, end, heard, wait_until_joined
from tests.support.waiting import DEADLINE

from covey.net.audit import audit_log
from covey.net.host.locks import only_one
from covey.net.keys.identity import NodeIdentity

if TYPE_CHECKING:
    import subprocess

    from tests.support.machines import Machine

KEY = secrets.token_bytes(32)


def log(machine: Machine, *words: str) -> list[dict[str, Any]]:
    """Return what `covey audit --json` shows."""
    ended = machine.covey("audit", "--json", *words)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def events(machine: Machine, *words: str) -> list[str]:
    return [entry["event"] for entry in log(machine, *words)]


def wait_for(machine: Machine, event: str) -> list[dict[str, Any]]:
    """Return the entries about an event as soon as there is one."""
    deadline = time.monotonic() + DEADLINE
    while not (found := log(machine, "--event", event)):
        assert time.monotonic() < deadline
    return found


def assert_whole(machine: Machine) -> None:
    ended = machine.covey("audit", "--verify")
    assert ended.returncode == 0, ended.stderr
    assert "The audit log is whole" in ended.stdout


def ports(process: subprocess.Popen[str]) -> list[int]:
    """Return the TCP ports at which a process listens."""
    inodes = set()
    for number in os.listdir(f"/proc/{process.pid}/fd"):
        with suppress(FileNotFoundError):  # the process closed it since it was listed
            link = os.readlink(f"/proc/{process.pid}/fd/{number}")
            inodes.add(link.removeprefix("socket:[").removesuffix("]"))
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as file:
            rows = [line.split() for line in file.readlines()[1:]]
        found += [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes]
    return found


def story(entries: list[dict[str, Any]]) -> str:
    return "\n".join(json.dumps(entry) for entry in entries)


def test_nodes_that_join_and_leave_and_one_that_is_killed_are_in_the_logs_of_both_machines(lab: Lab) -> None:
    one, two = (lab.machine(name, "lab", KEY) for name in ("one", "two"))
    nodes = [one.node("mine", size=3), one.node("mine", size=3), two.node("mine", size=3)]
    wait_until_joined(nodes)
    wait_for(two, "began")
    nodes[2].send_signal(signal.SIGKILL)
    nodes[2].wait(DEADLINE)
    for node in nodes[:2]:  # an operation that loses a member ends their run, and then they leave
        pipes.stdin(node).write("\n")
        pipes.stdin(node).flush()
        end(node)
    found = log(one)
    ids = {entry["node"] for entry in found if entry["event"] == "began"}
    assert len(ids) == 2
    met, joined = ({entry["node"] for entry in found if entry["event"] == event} for event in ("met", "joined"))
    (victim,) = joined - ids
    assert met == joined == ids | {victim}
    assert [entry["node"] for entry in found if entry["event"] == "joined"].count(victim) == 1  # by one of the two
    assert [entry["node"] for entry in found if entry["event"] == "lost"] == [victim], story(found)
    assert {entry["node"] for entry in found if entry["event"] == "ended"} == ids
    assert {entry["cluster"] for entry in found} == {"lab"}
    assert {entry["run"] for entry in found} == {"mine"}
    assert {entry["address"] for entry in found if entry["event"] == "met"} == {"127.0.0.1"}
    noted = log(two)
    assert {entry["event"] for entry in noted} == {"met", "began", "joined"}, story(noted)  # it was killed
    assert_whole(one)
    assert_whole(two)


def test_a_node_that_leaves_in_good_order_has_left_and_is_not_lost(lab: Lab) -> None:
    one, two = (lab.machine(name, "lab", KEY) for name in ("one", "two"))
    nodes = [one.node("mine", size=2), two.node("mine", size=2)]
    wait_until_joined(nodes)
    assert end(nodes[1])[0] == 0
    assert end(nodes[0])[0] == 0
    assert "lost" not in events(one) + events(two)
    assert events(one).count("left") <= 1  # the run may be over for both at the same moment
    assert events(one).count("ended") == events(two).count("ended") == 1


def test_a_stranger_is_noted_by_a_real_node(lab: Lab) -> None:
    one = lab.machine("one", "lab", KEY)
    node = one.node("mine", size=2, timeout=DEADLINE)
    assert heard(node) == "joining"
    deadline = time.monotonic() + DEADLINE
    while not (listening := ports(node)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with socket.create_connection(("127.0.0.1", listening[0]), DEADLINE, ("127.0.0.99", 0)) as sock:
        sock.sendall(bytes(48))
        while sock.recv(100):
            pass
    found = wait_for(one, "refused")
    assert (found[0]["address"], found[0]["cluster"], found[0]["run"]) == ("127.0.0.99", "lab", "mine")
    assert found[0]["reason"].startswith("secret: ")


def test_a_machine_with_another_secret_is_told_on_both_sides(lab: Lab) -> None:
    one = lab.machine("one", "lab", KEY)
    other = lab.machine("two", "lab", secrets.token_bytes(32))
    waiting = one.node("mine", size=2, timeout=DEADLINE)
    assert heard(waiting) == "joining"
    deadline = time.monotonic() + DEADLINE
    while not (listening := ports(waiting)):
        assert time.monotonic() < deadline
    lost = other.node("mine", size=2, timeout=DEADLINE, seeds=[f"127.0.0.1:{listening[0]}"])
    assert heard(lost) == "joining"
    assert end(lost)[0] != 0
    assert {entry["reason"].partition(":")[0] for entry in log(one, "--event", "refused")} == {"secret"}
    (rejected, *_) = log(other, "--event", "rejected")
    assert rejected["address"] == f"127.0.0.1:{listening[0]}"


def test_what_people_do_with_secrets_and_nodes_is_noted(lab: Lab) -> None:
    one, two = lab.machine("one"), lab.machine("two")
    code = json.loads(one.covey("init", "lab", "--json").stdout)["join_code"]
    assert two.covey("enroll", "-", stdin=code).returncode == 0
    outcast = NodeIdentity.ephemeral().id.hex()
    assert one.covey("deny", outcast).returncode == 0
    assert one.covey("deny", outcast, "--undo").returncode == 0
    rotated = one.covey("secret", "rotate", "--yes", "--json")
    assert rotated.returncode == 0, rotated.stderr
    again = json.loads(rotated.stdout)["join_code"]
    assert two.covey("enroll", "-", "--force", stdin=again).returncode == 0
    assert two.covey("clusters", "--forget", "lab", "--yes").returncode == 0
    assert events(one) == ["secret-created", "denied", "allowed", "secret-rotated"]
    assert events(two) == ["secret-enrolled", "secret-enrolled", "secret-removed"]
    assert {entry["node"] for entry in log(one, "--event", "denied", "--event", "allowed")} == {outcast}
    files = [path for machine in (one, two) for path in (machine.home / "audit").iterdir()]
    written = b"".join(path.read_bytes() for path in files)
    for secret in (code, again, KEY.hex()):
        assert secret.encode() not in written
    assert one.key("lab").hex().encode() not in written
    assert_whole(one)


def test_a_run_that_receives_a_new_secret_notes_that(lab: Lab) -> None:
    one, two = lab.owned("lab", KEY, "one", "two")
    nodes = [one.node("mine", size=2), two.node("mine", size=2)]
    wait_until_joined(nodes)
    assert one.covey("secret", "rotate", "--yes", "--json").returncode == 0
    for node in nodes:
        assert end(node)[0] == 0
    (received,) = log(two, "--event", "secret-received")
    assert received["reason"].startswith("kept")
    assert "visited" in events(two)


def test_joining_and_leaving_do_not_wait_for_the_log(lab: Lab) -> None:
    """As long as another process keeps the log locked, nothing is written, and the run goes its way."""
    one, two = (lab.machine(name, "lab", KEY) for name in ("one", "two"))
    folder = one.home / "audit"
    folder.mkdir(mode=0o700)
    with only_one(folder / ".lock"):
        nodes = [one.node("mine", size=2), two.node("mine", size=2)]
        wait_until_joined(nodes)
        for node in nodes:
            pipes.stdin(node).write("\n")
            pipes.stdin(node).flush()
        assert [heard(node) for node in nodes] == [11, 11]
        assert not (folder / "log.jsonl").exists()
        for node in nodes:
            assert end(node)[0] == 0
    assert "began" in events(two)


def test_a_log_that_cannot_be_written_is_told_once_and_the_run_goes_on(lab: Lab) -> None:
    one, two = (lab.machine(name, "lab", KEY) for name in ("one", "two"))
    (one.home / "audit").write_text("in the way")
    nodes = [one.node("mine", size=2), two.node("mine", size=2)]
    wait_until_joined(nodes)
    ended = [end(node) for node in nodes]
    assert [code for code, _, _ in ended] == [0, 0]
    assert [err.count("the audit log is not written") for _, _, err in ended] == [1, 0]
    denied = one.covey("deny", NodeIdentity.ephemeral().id.hex())
    assert denied.returncode == 0
    assert denied.stderr.count("the audit log is not written") == 1


def test_a_run_of_one_machine_and_a_visit_note_nothing(lab: Lab) -> None:
    one = lab.machine("one", "lab", KEY)
    (lab.folder / "job.py").write_text("import covey\nwith covey.join() as group:\n    group.barrier()\n")
    ended = one.covey("run", "-n", "2", "job.py")
    assert ended.returncode == 0, ended.stderr
    one.covey("status", "--wait", "0.5")
    assert not (one.home / "audit").exists()


# The command


def fill(machine: Machine, monkeypatch: pytest.MonkeyPatch, *notes: audit_log.Note) -> None:
    monkeypatch.setenv("COVEY_HOME", str(machine.home))
    audit_log.append(notes)


def test_entries_are_chosen_by_cluster_time_and_event(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    one, now = lab.machine("one"), time.time()
    fill(
        one,
        monkeypatch,
        audit_log.Note("home", "met", name="old", time=now - 3 * 3600),
        audit_log.Note("home", "refused", name="young", time=now - 60),
        audit_log.Note("work", "met", name="youngest", time=now),
    )

    def chosen(*words: str) -> list[str]:
        return [entry["name"] for entry in log(one, *words)]

    assert chosen() == ["old", "young", "youngest"]
    assert chosen("--cluster", "home") == ["old", "young"]
    assert chosen("--since", "2h") == ["young", "youngest"]
    assert chosen("--since", "30s") == ["youngest"]
    assert chosen("--since", (datetime.now(UTC) - timedelta(hours=2)).isoformat()) == ["young", "youngest"]
    assert chosen("--event", "met") == ["old", "youngest"]
    assert chosen("--event", "met", "--event", "refused", "--cluster", "home", "--since", "1d") == ["old", "young"]
    for words in (["--since", "soon"], ["--event", "nonsense"], ["--verify", "--follow"]):
        ended = one.covey("audit", *words)
        assert ended.returncode == 2, words
        assert "Traceback" not in ended.stderr


def test_without_a_log_there_is_nothing_to_show_and_nothing_wrong(lab: Lab) -> None:
    one = lab.machine("one")
    ended = one.covey("audit")
    assert (ended.returncode, ended.stdout) == (0, "")
    assert one.covey("audit", "--verify").returncode == 0


def test_tampering_makes_verify_fail_with_1(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    one = lab.machine("one")
    for name in "abc":
        fill(one, monkeypatch, audit_log.Note("home", "met", name=name))
    path = one.home / "audit" / "log.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"name":"b"', b'"name":"x"'))
    ended = one.covey("audit", "--verify")
    assert ended.returncode == 1
    assert "entry 2" in ended.stderr
    report = one.covey("audit", "--verify", "--json")
    assert report.returncode == 1
    assert json.loads(report.stdout)["whole"] is False


@pytest.mark.parametrize("on_terminal", [False, True], ids=["pipe", "terminal"])
def test_a_log_that_was_changed_by_hand_moves_no_cursor(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, on_terminal: bool
) -> None:
    one = lab.machine("one")
    fill(one, monkeypatch, audit_log.Note("home", "met", name="NAME", reason="[red]not markup[/red]"))
    path = one.home / "audit" / "log.jsonl"
    path.write_bytes(path.read_bytes().replace(b"NAME", b"\\u001b[2Jx\\u0007"))
    if on_terminal:
        terminal = Terminal(one, "audit")
        try:
            assert terminal.finish() == 0
            shown = terminal.screen
        finally:
            terminal.close()
        assert "EVENT" in shown
    else:
        shown = one.covey("audit").stdout
        assert len(shown.splitlines()) == 1
    assert "\\x1b[2Jx\\x07" in shown
    assert "[red]not markup" in shown
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown


def test_follow_shows_entries_as_they_come_and_ends_with_ctrl_c(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    one = lab.machine("one")
    fill(one, monkeypatch, audit_log.Note("home", "met", name="before"))
    following = one.start("-m", "covey", "audit", "--follow", "--json", "--event", "met")
    assert heard(following)["name"] == "before"
    fill(one, monkeypatch, audit_log.Note("home", "refused", name="no"), audit_log.Note("home", "met", name="new"))
    assert select.select([pipes.stdout(following)], [], [], DEADLINE)[0]
    assert heard(following)["name"] == "new"
    following.send_signal(signal.SIGINT)
    code, out, err = end(following)
    assert (code, out, err) == (0, "", "")


def test_every_event_in_the_source_is_listed() -> None:
    assert sys.flags.optimize == 0  # the assertion in Note holds it
    with pytest.raises(AssertionError, match="list the event"):
        audit_log.Note("home", "invented")
