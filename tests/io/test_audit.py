"""The audit log on disk: several processes write it, crashes tear it, and what was changed in it is found."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support import forked
from tests.support.waiting import DEADLINE

from covey.base.errors import ConfigError
from covey.net.audit import audit_log, audit_reader
from covey.net.audit.audit_log import Note, append

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCE = Path(__file__).parents[2] / "src"
WRITER = """
import sys
from covey.net.audit.audit_log import Note, append
for number in range(int(sys.argv[2])):
    append([Note("lab", "met", name=f"{sys.argv[1]}-{number}-{part}") for part in range(1 + number % 3)])
    print(number, flush=True)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "audit"


def writer(name: str, count: int) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", WRITER, name, str(count)]
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return forked.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)


def write(*names: str) -> None:
    for name in names:
        append([Note("lab", "met", name=name)])


def problems() -> tuple[str, ...]:
    return audit_reader.verify().problems


def names() -> list[str]:
    return [entry.name for entry in audit_reader.entries() if entry.event == "met"]


def test_entries_are_private_numbered_and_chained(folder: Path) -> None:
    before = time.time()
    append([Note("lab", "refused", "run", 3, b"\x01" * 32, b"\x02" * 16, "node", "10.0.0.1", "denied", 7)])
    write("b")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    first, second = audit_reader.entries()
    assert (first.number, first.cluster, first.event, first.run, first.generation) == (1, "lab", "refused", "run", 3)
    assert (first.node, first.life) == ("01" * 32, "02" * 16)
    assert (first.name, first.address, first.reason, first.count) == ("node", "10.0.0.1", "denied", 7)
    assert first.pid == os.getpid()
    assert first.time.endswith("Z")
    assert before - 1 <= first.at.timestamp() <= time.time() + 1
    line = (folder / "log.jsonl").read_bytes().split(b"\n")[0]
    assert (second.number, second.previous) == (2, audit_log.hash_of(line))
    verdict = audit_reader.verify()
    assert (verdict.count, verdict.problems, verdict.remarks) == (2, (), ())


def test_processes_that_write_at_once_lose_nothing_and_break_no_chain() -> None:
    writers = [writer(name, 40) for name in "abcd"]
    for each in writers:
        each.communicate(timeout=DEADLINE)
        assert each.returncode == 0
    wanted = {f"{name}-{number}-{part}" for name in "abcd" for number in range(40) for part in range(1 + number % 3)}
    found = list(audit_reader.entries())
    assert [entry.number for entry in found] == list(range(1, len(wanted) + 1))
    assert {entry.name for entry in found} == wanted
    for name in "abcd":
        own = [entry.name for entry in found if entry.name.startswith(name)]
        assert own == sorted(own, key=lambda text: [int(part) for part in text.split("-")[1:]])
    assert problems() == ()


def test_what_killed_writers_wrote_is_whole_and_others_go_on() -> None:
    said = {}
    for name in "abc":
        killed = writer(name, 10**6)
        assert killed.stdout is not None
        said[name] = [int(killed.stdout.readline()) for _ in range(20)][-1]
        killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=DEADLINE)
    write("after")
    for name, last in said.items():
        assert {f"{name}-{number}-0" for number in range(last + 1)} <= set(names())
    assert names()[-1] == "after"
    assert problems() == ()


@pytest.mark.parametrize("cut", [2, 30, 200])
def test_a_line_that_was_cut_off_is_kept_and_told_and_is_no_tampering(folder: Path, cut: int) -> None:
    """A power cut, or a disk that is full, can leave half a line behind: the head is written after the line."""
    write("a", "b")
    log, head = folder / "log.jsonl", (folder / "head").read_bytes()
    write("c")
    os.truncate(log, log.stat().st_size - cut)
    (folder / "head").write_bytes(head)
    verdict = audit_reader.verify()
    assert (verdict.count, verdict.problems) == (2, ())
    assert verdict.remarks == ("log.jsonl, line 3 was cut off when it was written",)
    write("d")
    events = [(entry.number, entry.event, entry.name) for entry in audit_reader.entries()]
    assert events == [(1, "met", "a"), (2, "met", "b"), (3, "torn", ""), (4, "met", "d")]
    verdict = audit_reader.verify()
    assert verdict.problems == ()
    assert len(verdict.remarks) == 1


def test_a_writer_that_was_killed_before_it_wrote_the_head_does_no_harm(folder: Path) -> None:
    write("a")
    head = (folder / "head").read_bytes()
    write("b")
    (folder / "head").write_bytes(head)
    assert problems() == ()
    write("c")
    assert names() == ["a", "b", "c"]
    assert problems() == ()


def _changed(lines: list[bytes]) -> list[bytes]:
    return [*lines[:2], lines[2].replace(b'"name":"c"', b'"name":"x"'), *lines[3:]]


TAMPERING: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a changed line": _changed,
    "the last line changed": lambda lines: [*lines[:-1], lines[-1].replace(b'"name":"e"', b'"name":"x"')],
    "a removed line": lambda lines: lines[:2] + lines[3:],
    "the first line removed": lambda lines: lines[1:],
    "the last line removed": lambda lines: lines[:-1],
    "everything removed": lambda lines: [],
    "two lines exchanged": lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
    "a line repeated": lambda lines: [*lines[:3], lines[2], *lines[3:]],
    "an invented line": lambda lines: [*lines[:3], b'{"number":4,"time":"","cluster":"lab","event":"met"}', *lines[3:]],
    "garbage in between": lambda lines: [*lines[:3], b"\xff\x00", *lines[3:]],
    "a line without its end": lambda lines: [*lines[:2], lines[2][:40], *lines[3:]],
}


@pytest.mark.parametrize("how", TAMPERING)
@pytest.mark.parametrize("goes_on", [False, True], ids=["at once", "after more entries"])
def test_tampering_is_found(folder: Path, how: str, goes_on: bool) -> None:
    write("a", "b", "c", "d", "e")
    assert problems() == ()
    log = folder / "log.jsonl"
    lines = TAMPERING[how](log.read_bytes().splitlines())
    log.write_bytes(b"".join(line + b"\n" for line in lines))
    if goes_on:
        write("f", "g")
    assert problems()
    assert len(problems()) <= audit_reader.AUDIT_PROBLEMS_LIMIT + 1


@pytest.mark.parametrize("what", ["head", "log.1.jsonl", "log.2.jsonl", "log.jsonl"])
@pytest.mark.parametrize("goes_on", [False, True], ids=["at once", "after more entries"])
def test_a_file_that_was_removed_is_missed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str, goes_on: bool
) -> None:
    monkeypatch.setattr(audit_log, "AUDIT_FILE_BYTES", 2000)
    for number in range(18):
        write(f"n{number}")
    assert (folder / "log.2.jsonl").exists()
    assert not (folder / "log.4.jsonl").exists()
    assert problems() == ()
    (folder / what).unlink()
    if goes_on:
        write("f", "g")
    assert problems()


def test_the_log_is_turned_over_and_bounded_and_its_chain_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "AUDIT_FILE_BYTES", 3000)
    for number in range(100):
        write(f"n{number}")
        assert problems() == (), number
    files = sorted(path.name for path in folder.glob("log*"))
    assert files == ["log.1.jsonl", "log.2.jsonl", "log.3.jsonl", "log.4.jsonl", "log.jsonl"]
    assert max(path.stat().st_size for path in folder.glob("log*")) <= 3000
    kept = names()
    assert kept == [f"n{number}" for number in range(100 - len(kept), 100)]
    assert 20 < len(kept) < 60


def test_a_crash_in_the_middle_of_turning_over_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "AUDIT_FILE_BYTES", 3000)
    write(*(f"n{number}" for number in range(7)))
    os.replace(folder / "log.jsonl", folder / "log.1.jsonl")  # and killed here
    assert problems() == ()
    write("next")
    assert names() == [*(f"n{number}" for number in range(7)), "next"]
    assert problems() == ()


@pytest.mark.parametrize("steps", range(1, audit_log.OLD_FILES))
def test_a_crash_while_the_oldest_file_goes_is_no_tampering(
    folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr(audit_log, "AUDIT_FILE_BYTES", 3000)
    while not (folder / "log.4.jsonl").exists():
        write("early")
    replace = os.replace
    done: list[Path] = []

    def replace_some(old: Path, new: Path) -> None:
        if len(done) == steps:
            raise OSError("killed here")
        replace(old, new)
        done.append(old)

    monkeypatch.setattr(os, "replace", replace_some)
    with pytest.raises(ConfigError):
        write(*["late"] * 20)
    monkeypatch.undo()
    monkeypatch.setenv("COVEY_HOME", str(folder.parent))
    assert len(done) == steps
    assert problems() == ()
    write("after")
    assert names()[-1] == "after"
    assert problems() == ()


def test_what_others_wrote_cannot_move_a_cursor_or_forge_a_line(folder: Path) -> None:
    nasty = "x\x1b[2J\r\n" + json.dumps({"number": 2}) + "\u202e" + "y" * 10_000
    append([Note(nasty, "refused", nasty, name=nasty, address=nasty, reason=nasty)])
    data = (folder / "log.jsonl").read_bytes()
    assert data.count(b"\n") == 1
    assert len(data) < audit_log.AUDIT_LINE_LIMIT
    (entry,) = audit_reader.entries()
    for text in (entry.cluster, entry.run, entry.name, entry.address, entry.reason):
        assert text.isprintable()
        assert text.startswith("x\\x1b[2J\\r\\n")
        assert len(text) <= audit_log.AUDIT_TEXT_LIMIT


def test_what_several_processes_note_is_written_once(folder: Path) -> None:
    def lost(node: bytes, life: bytes, generation: int = 0, event: str = "lost") -> Note:
        return Note("lab", event, "run", generation, node, life, once=True)

    append([lost(b"a", b"1"), lost(b"b", b"1")])
    append([lost(b"a", b"1"), lost(b"a", b"2"), lost(b"b", b"1", 1), lost(b"b", b"1", event="joined")])
    append([lost(b"a", b"1"), lost(b"b", b"1")])  # nothing is new
    found = [(entry.event, entry.node, entry.life, entry.generation) for entry in audit_reader.entries()]
    assert found == [
        ("lost", "61", "31", 0),
        ("lost", "62", "31", 0),
        ("lost", "61", "32", 0),
        ("lost", "62", "31", 1),
        ("joined", "62", "31", 0),
    ]
    assert problems() == ()


@pytest.mark.parametrize("name", ["log.jsonl", "head"])
def test_files_that_others_could_read_or_lead_elsewhere_are_not_used(folder: Path, name: str) -> None:
    write("a")
    (folder / name).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        write("b")
    (folder / name).rename(folder / "elsewhere")
    (folder / name).symlink_to("elsewhere")
    with pytest.raises(ConfigError, match="symbolic link"):
        write("b")


def test_a_full_disk_is_told_and_leaves_no_half_line(folder: Path) -> None:
    write("a")
    size = (folder / "log.jsonl").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
    try:
        with pytest.raises(ConfigError, match=r"cannot write .*log\.jsonl"):
            write("b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (folder / "log.jsonl").stat().st_size == size
    write("c")
    assert names() == ["a", "c"]
    assert problems() == ()


def test_a_follower_sees_every_entry_once_also_when_the_log_is_turned_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "AUDIT_FILE_BYTES", 3000)
    write("before")
    follower = audit_reader.Follower()
    try:
        seen = []
        for number in range(30):
            write(f"n{number}", f"m{number}")
            seen += [entry.name for entry in follower.read()]
    finally:
        follower.close()
    assert seen == [f"{letter}{number}" for number in range(30) for letter in "nm"]
    assert (folder / "log.4.jsonl").exists()


def test_a_follower_misses_nothing_that_comes_just_before_the_log_is_turned_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "AUDIT_FILE_BYTES", 3000)
    write("before")
    follower = audit_reader.Follower()
    looked = follower._was_turned_over

    def meanwhile() -> bool:
        if not (folder / "log.1.jsonl").exists():
            write(*(f"n{number}" for number in range(15)))
        return looked()

    monkeypatch.setattr(follower, "_was_turned_over", meanwhile)
    try:
        assert [entry.name for entry in follower.read()] == [f"n{number}" for number in range(15)]
    finally:
        follower.close()
    assert (folder / "log.1.jsonl").exists()


def test_a_follower_waits_for_a_log_that_is_not_there_yet() -> None:
    follower = audit_reader.Follower()
    try:
        assert follower.read() == []
        write("a")
        assert [entry.name for entry in follower.read()] == ["a"]
    finally:
        follower.close()
