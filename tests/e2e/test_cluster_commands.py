"""`covey init`, `enroll`, `clusters` and `deny` as people and scripts use them."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import stat
import sys
import time
from typing import TYPE_CHECKING

import pytest
from tests.support import forked, pipes
from tests.support.waiting import DEADLINE

from covey.net.keys import clusters
from covey.wire.secret import ClusterSecret, decode_join_code, encode_join_code, is_weak

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.machines import Machine as LabMachine

CODE = re.compile(r"^ +(covey1-[0-9a-z-]+)$", re.MULTILINE)
PASSPHRASE = "correct horse battery staple"


class Machine:
    """A user on a machine: a configuration folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {key: value for key, value in os.environ.items() if not key.startswith("COVEY_")}
        self.env = kept | {"COVEY_HOME": str(folder), "COLUMNS": "200", "NO_COLOR": "1"}

    def run(self, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return forked.run(
            [sys.executable, "-m", "covey", *words],
            env=self.env, input=stdin, capture_output=True, text=True, timeout=DEADLINE, check=False,
        )  # fmt: skip

    def ok(self, *words: str, stdin: str = "") -> str:
        ended = self.run(*words, stdin=stdin)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def error(self, *words: str, stdin: str = "", code: int = 2) -> str:
        ended = self.run(*words, stdin=stdin)
        assert ended.returncode == code, ended.stdout + ended.stderr
        assert "Traceback" not in ended.stderr
        return ended.stderr

    def code(self, cluster: str) -> str:
        """The join code, with a seed, of a cluster in this user's files."""
        file = json.loads((self.folder / "clusters" / f"{cluster}.json").read_text())
        return encode_join_code(ClusterSecret(cluster, bytes.fromhex(file["key"])), ["10.9.8.7:47700"])

    def names(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("clusters/*.json"))

    def listed(self) -> list[dict[str, object]]:
        return list(json.loads(self.ok("clusters", "--json")))


class Terminal:
    """A `covey` command at a terminal of its own, and all that the screen showed."""

    def __init__(self, machine: Machine | LabMachine, *words: str) -> None:
        self.screen = ""
        self._front, back = pty.openpty()
        try:
            self.process = forked.Popen(
                [sys.executable, "-m", "covey", *words],
                env=machine.env, stdin=back, stdout=back, stderr=back, preexec_fn=pipes.sit_down,
            )  # fmt: skip
        finally:
            os.close(back)

    def answer(self, prompt: str, text: str) -> None:
        """Wait for the prompt, and for the echo to be off where it asks for a secret; then type."""
        self._read_until(lambda: self.screen.endswith(prompt))
        os.write(self._front, text.encode() + b"\n")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until the screen has shown something; return where."""
        self._read_until(lambda: re.search(pattern, self.screen))
        found = re.search(pattern, self.screen)
        assert found is not None, self.screen
        return found

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.write(self._front, b"\x03")

    def finish(self) -> int:
        self._read_until(lambda: False)
        return self.process.wait(DEADLINE)

    def _read_until(self, satisfied: object) -> None:
        deadline = time.monotonic() + DEADLINE
        while not satisfied():  # type: ignore[operator]
            assert select.select([self._front], [], [], deadline - time.monotonic())[0], f"only this: {self.screen!r}"
            try:
                data = os.read(self._front, 4096)
            except OSError:  # Linux says EIO when the last one at the other end is gone
                data = b""
            if not data:
                return
            self.screen += data.decode().replace("\r\n", "\n")

    def close(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)
        os.close(self._front)


@pytest.fixture
def one(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "one")


@pytest.fixture
def two(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "two")


@pytest.fixture
def sat_down() -> Iterator[list[Terminal]]:
    terminals: list[Terminal] = []
    try:
        yield terminals
    finally:
        for terminal in terminals:
            terminal.close()


def test_init_on_one_machine_and_enroll_on_another_makes_a_cluster(one: Machine, two: Machine) -> None:
    out = one.ok("init")
    code = CODE.search(out)
    assert code is not None
    assert "is the cluster's key" in out
    assert "Treat it like a password" in out
    assert "covey run train.py" in two.ok("enroll", "-", stdin=code[1] + "\n")
    [here], [there] = one.listed(), two.listed()
    assert (here["name"], there["name"], there["default"]) == ("home", "home", True)
    assert there["seeds"] == list(decode_join_code(code[1])[1])
    for machine in (one, two):
        paths = [path for path in machine.folder.rglob("*") if path.is_file()]
        assert {"home.json", "0.key"} <= {path.name for path in paths}
        assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    assert one.code("home") == two.code("home")
    shown = json.loads(two.ok("init", "--show", "--json"))
    assert decode_join_code(shown["join_code"]) == decode_join_code(code[1])  # the addresses are those of one machine
    assert "home" in two.ok("clusters").splitlines()[1]


def test_init_does_not_overwrite_a_cluster_unless_forced(one: Machine) -> None:
    one.ok("init", "lab")
    before = one.code("lab")
    assert "covey init --show lab" in one.error("init", "lab")
    assert one.code("lab") == before
    assert "the old one is gone" in one.ok("init", "lab", "--force")
    assert one.code("lab") != before
    assert "cannot be a cluster's name" in one.error("init", "No Good")
    assert "--show only prints" in one.error("init", "lab", "--show", "--force")


def test_enrolling_again_is_fine_and_another_key_needs_force(one: Machine, two: Machine) -> None:
    one.ok("init")
    two.ok("enroll", "-", stdin=one.code("home"))
    two.ok("deny", "ab" * 32)
    assert "stays in" in two.ok("enroll", "-", stdin=one.code("home").upper())
    assert two.listed()[0]["denied"] == ["ab" * 32]
    one.ok("init", "--force")
    assert "--force replaces it" in two.error("enroll", "-", stdin=one.code("home"))
    two.ok("enroll", "-", "--force", stdin=one.code("home"))
    assert one.code("home") == two.code("home")


def test_a_bad_code_is_refused_for_what_it_is_and_nothing_is_saved(one: Machine, two: Machine) -> None:
    one.ok("init")
    code = one.code("home")
    mistyped = code[:20] + ("2" if code[20] != "2" else "3") + code[21:]
    assert "typing error" in two.error("enroll", "-", stdin=mistyped)
    assert "incomplete" in two.error("enroll", "-", stdin=code[:-8])
    assert "not a join code" in two.error("enroll", "-", stdin="hello")
    assert "`covey enroll -`" in two.error("enroll", stdin=code)
    assert two.names() == []


def test_a_code_as_an_argument_works_with_a_warning(one: Machine, two: Machine) -> None:
    one.ok("init")
    ended = two.run("enroll", one.code("home"))
    assert ended.returncode == 0
    assert "warning: the join code was typed as an argument" in ended.stderr
    assert "warning" not in ended.stdout


def test_enroll_asks_for_the_code_without_showing_it(one: Machine, two: Machine, sat_down: list[Terminal]) -> None:
    one.ok("init")
    code = one.code("home")
    sat_down.append(terminal := Terminal(two, "enroll", "127.0.0.1:9"))  # where no machine shows a code
    terminal.answer("paste the join code (not shown): ", code)
    assert terminal.finish() == 0
    assert code[10:30] not in terminal.screen
    assert "is now in the cluster 'home'" in terminal.screen
    assert two.code("home") == code


def test_leaving_the_question_changes_nothing(two: Machine, sat_down: list[Terminal]) -> None:
    sat_down.append(terminal := Terminal(two, "enroll", "127.0.0.1:9"))
    terminal.answer("paste the join code (not shown): ", "\x03")
    assert terminal.finish() != 0
    assert "Traceback" not in terminal.screen
    assert two.names() == []


def test_init_asks_for_a_passphrase_twice_and_offers_one(one: Machine, two: Machine, sat_down: list[Terminal]) -> None:
    sat_down.append(terminal := Terminal(one, "init", "--passphrase"))
    terminal.answer("Passphrase: ", PASSPHRASE)
    terminal.answer("Once more: ", PASSPHRASE)
    assert terminal.finish() == 0
    offered = re.search(r"for example: (.+)", terminal.screen)
    assert offered is not None
    assert not is_weak(offered[1])
    assert PASSPHRASE not in terminal.screen
    two.ok("init", "--passphrase", stdin=PASSPHRASE + "\n")
    assert one.code("home") == two.code("home")


def test_two_passphrases_that_differ_make_no_cluster(one: Machine, sat_down: list[Terminal]) -> None:
    sat_down.append(terminal := Terminal(one, "init", "--passphrase"))
    terminal.answer("Passphrase: ", PASSPHRASE)
    terminal.answer("Once more: ", PASSPHRASE + "s")
    assert terminal.finish() == 2
    assert "differ" in terminal.screen
    assert one.names() == []
    assert "too easy to guess" in one.error("init", "--passphrase", stdin="hunter2\n")


def test_clusters_lists_chooses_and_forgets(one: Machine, sat_down: list[Terminal]) -> None:
    assert "in no cluster" in one.ok("clusters")
    one.ok("init")
    assert "covey run --cluster lab train.py" in one.ok("init", "lab")
    assert [(row["name"], row["default"]) for row in one.listed()] == [("home", True), ("lab", False)]
    one.ok("clusters", "--default", "lab")
    assert [row["default"] for row in one.listed()] == [False, True]
    assert "add --yes" in one.error("clusters", "--forget", "lab")
    sat_down.append(terminal := Terminal(one, "clusters", "--forget", "lab"))
    terminal.answer("[y/N]: ", "n")
    assert terminal.finish() == 1
    sat_down.append(terminal := Terminal(one, "clusters", "--forget", "home"))
    terminal.answer("[y/N]: ", "y")
    assert terminal.finish() == 0
    assert one.names() == ["lab"]
    one.ok("clusters", "--forget", "lab", "--yes")
    assert one.names() == []
    assert "no cluster" in one.error("clusters", "--default", "lab")
    assert "at a time" in one.error("clusters", "--default", "lab", "--json")


def test_deny_knows_nodes_by_id_beginning_and_name(one: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "in no cluster" in one.error("deny", "ab" * 32)
    one.ok("init")
    one.ok("init", "lab")
    monkeypatch.setenv("COVEY_HOME", str(one.folder))
    clusters.remember("home", bytes(32), "otter-aaaa")
    clusters.remember("home", b"\xab" * 32, "heron-vov2")
    assert "otter-aaaa (aaaaaaaa)" in one.ok("deny", "otter-aaaa")
    out = one.ok("deny", "abababab")
    assert "stops mistakes, not an attacker with the cluster's secret" in out
    assert "covey secret rotate" in out
    one.ok("deny", "12" * 32, "--cluster", "lab")
    listed = json.loads(one.ok("deny", "--list", "--json"))
    assert [(row["id"], row["name"]) for row in listed] == [("00" * 32, "otter-aaaa"), ("ab" * 32, "heron-vov2")]
    assert all(row["everywhere"] for row in listed)  # `covey init` made the owner key here
    assert "12" * 32 in one.ok("deny", "--list", "--cluster", "lab")
    assert "no node known here" in one.error("deny", "swan-zzzz")
    one.ok("deny", "vov2xk5l", "--undo")
    one.ok("deny", "otter-aaaa", "--undo")
    assert "No node is denied" in one.ok("deny", "--list")
    assert "is not denied" in one.error("deny", "00" * 32, "--undo")
    assert "use `covey deny NODE`" in one.error("deny")


def test_an_open_configuration_folder_is_refused_by_every_command(one: Machine) -> None:
    one.ok("init")
    one.folder.chmod(0o755)
    for words in (("init", "lab"), ("clusters",), ("deny", "--list"), ("init", "--show")):
        assert f"chmod 700 {one.folder}" in one.error(*words)
