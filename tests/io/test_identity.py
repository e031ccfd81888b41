"""Identities: one for each process, private, and never the same life twice."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import forked
from tests.support.waiting import DEADLINE

from covey.base.errors import ConfigError
from covey.net.host.folders import home, private_folder, read_private, write_private
from covey.net.host.locks import only_one
from covey.net.keys.identity import NodeIdentity, ensure_identity, id_text, node_name, resolve_id, short_id

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).parents[2] / "src"
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")

FORK = """
import os, signal
from covey.net.keys.identity import NodeIdentity
identity = NodeIdentity.acquire()
ready = os.pipe()
child = os.fork()
if child == 0:
    os.write(ready[1], b"!")
    signal.pause()  # lives on while its parent gives the identity back
try:
    os.read(ready[0], 1)
    identity.release()
    with NodeIdentity.acquire() as again:
        assert again.id == identity.id
finally:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""
LIVE = """
import json, sys
from covey.net.keys.identity import NodeIdentity
identity = NodeIdentity.acquire()
print(json.dumps([identity.id.hex(), identity.incarnation, identity.life.hex(), identity.name]), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's identities are."""
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "identities"


@pytest.fixture
def nodes() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=DEADLINE)


def start_node() -> subprocess.Popen[str]:
    """A process that takes an identity, says which, and keeps it until its stdin ends."""
    return forked.Popen(
        [sys.executable, "-c", LIVE],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def facts(process: subprocess.Popen[str]) -> tuple[str, int, str, str]:
    assert process.stdout is not None
    node_id, incarnation, life, name = json.loads(process.stdout.readline())
    return node_id, incarnation, life, name


def test_the_first_identity_is_made_privately_and_kept(folder: Path) -> None:
    with NodeIdentity.acquire() as first:
        pass
    with NodeIdentity.acquire() as second:
        assert second.id == first.id == second.private.public_key().public_bytes_raw()
    assert (first.incarnation, second.incarnation) == (1, 2)
    assert [life[:8] for life in (first.life, second.life)] == [bytes(7) + b"\1", bytes(7) + b"\2"]
    assert first.life[8:] != second.life[8:]
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
        "0.key": 0o600,
        "0.count": 0o600,
        "0.lock": 0o600,
        ".lock": 0o600,
    }
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_several_in_one_process_have_their_own_and_the_first_free_one_is_taken() -> None:
    identities = [NodeIdentity.acquire() for _ in range(3)]
    try:
        assert len({identity.id for identity in identities}) == 3
        identities[1].release()
        identities[1].release()
        with NodeIdentity.acquire() as next_one:
            assert next_one.id == identities[1].id
    finally:
        for identity in identities:
            identity.release()


def test_eight_processes_at_once_have_eight_identities_and_leave_them_to_the_next(
    nodes: list[subprocess.Popen[str]],
) -> None:
    nodes += [start_node() for _ in range(8)]
    first = [facts(node) for node in nodes]
    assert len({node_id for node_id, *_ in first}) == 8
    assert {incarnation for _, incarnation, *_ in first} == {1}
    nodes[3].kill()  # what it held is free at once, however it ended
    nodes[3].wait(DEADLINE)
    heir = start_node()
    nodes.append(heir)
    node_id, incarnation, life, _ = facts(heir)
    assert (node_id, incarnation) == (first[3][0], 2)
    assert life not in {life for _, _, life, _ in first}


def test_a_forked_child_does_not_keep_its_parents_identity() -> None:
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    ended = forked.run([sys.executable, "-c", FORK], env=env, timeout=DEADLINE, check=False)
    assert ended.returncode == 0


def test_an_ephemeral_identity_touches_no_disk(folder: Path) -> None:
    one, other = NodeIdentity.ephemeral(), NodeIdentity.ephemeral()
    assert one.id != other.id
    assert one.life != other.life
    assert len(one.life) == 16
    one.release()
    assert not folder.parent.exists()


def test_a_copied_folder_is_told_apart_only_by_the_random_half_of_the_life(folder: Path, tmp_path: Path) -> None:
    NodeIdentity.acquire().release()
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy").chmod(0o700)
    with NodeIdentity.acquire() as original, NodeIdentity.acquire(tmp_path / "copy") as copy:
        assert original.id == copy.id
        assert original.incarnation == copy.incarnation == 2
        assert original.life != copy.life


@pytest.mark.parametrize(("name", "mode"), [("0.key", 0o640), ("0.key", 0o604), ("0.count", 0o644), ("0.key", 0o700)])
def test_an_open_file_is_refused_and_left_as_it_is(folder: Path, name: str, mode: int) -> None:
    NodeIdentity.acquire().release()
    (folder / name).chmod(mode)
    with pytest.raises(ConfigError, match=rf"{name} .*others may read it.*chmod 600 .*{name}"):
        NodeIdentity.acquire()
    assert stat.S_IMODE((folder / name).stat().st_mode) == mode
    (folder / name).chmod(0o600)
    NodeIdentity.acquire().release()  # the failure left nothing locked


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("0.key", content) for content in (b"", b"\0" * 130, b"00 11", b"no key", b"zz" * 32 + b" " + b"00" * 32)),
        *(("0.count", content) for content in (b"", b"-1", b"1.5", b"9" * 30, "²".encode(), b"\xff")),
    ],
)
def test_a_damaged_file_is_named_with_what_to_do(folder: Path, name: str, content: bytes) -> None:
    NodeIdentity.acquire().release()
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name} is damaged; remove it"):
        NodeIdentity.acquire()


def test_one_wrong_digit_in_a_key_is_noticed(folder: Path) -> None:
    NodeIdentity.acquire().release()
    text = (folder / "0.key").read_text()
    for at in (0, 40, 63, 65, 100, 128):
        (folder / "0.key").write_text(text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :])
        with pytest.raises(ConfigError, match="damaged"):
            NodeIdentity.acquire()


def test_a_lost_counter_is_damage_because_numbers_would_start_again(folder: Path) -> None:
    NodeIdentity.acquire().release()
    (folder / "0.count").unlink()
    with pytest.raises(ConfigError, match=r"0.count is damaged; remove it and 0.key"):
        NodeIdentity.acquire()


def test_ensuring_an_identity_makes_one_and_then_uses_up_none(folder: Path) -> None:
    ensure_identity()
    ensure_identity()
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "0.count", "0.key", "0.lock"]
    with NodeIdentity.acquire() as identity:
        assert identity.incarnation == 2


def test_a_name_is_the_host_and_four_letters_of_the_id() -> None:
    identity = NodeIdentity.ephemeral()
    assert identity.name.endswith(f"-{identity.short_id[:4]}")
    assert identity.short_id == short_id(identity.id) == id_text(identity.id)[:8]
    assert node_name("otter.local", bytes(32)) == "otter-aaaa"
    assert node_name("", bytes(32)) == "node-aaaa"


@given(st.text(), st.binary(min_size=32, max_size=32))
def test_whatever_a_peer_calls_its_host_its_name_is_harmless(host: str, node_id: bytes) -> None:
    name = node_name(host, node_id)
    assert len(name) <= 45
    assert all(letter.isascii() and (letter.isalnum() or letter == "-") for letter in name)


NODES = {bytes([first, 255 - first]) + bytes(30): f"host-{first}" for first in (0x11, 0x12, 0xAB)}


def test_a_node_is_meant_by_its_id_its_beginning_or_its_name() -> None:
    for node_id, name in NODES.items():
        for text in (node_id.hex(), node_id.hex().upper(), id_text(node_id), id_text(node_id)[:4], name, f" {name} "):
            assert resolve_id(text, NODES) == node_id
    stranger = bytes(range(32))
    assert resolve_id(stranger.hex(), NODES) == resolve_id(id_text(stranger), {}) == stranger


@pytest.mark.parametrize("text", ["", "1", "abc", "zzzz", "host", "ab" * 31, "a" * 51 + "9", "a" * 51 + "b"])
def test_what_means_no_node_is_refused_with_those_that_are_known(text: str) -> None:
    with pytest.raises(ConfigError, match=r"no node known here.*host-17"):
        resolve_id(text, NODES)


def test_a_beginning_of_several_ids_is_refused_with_their_names() -> None:
    twins = {bytes(31) + b"\1": "one-aaaa", bytes(31) + b"\2": "two-aaaa"}
    with pytest.raises(ConfigError, match=r"several nodes: one-aaaa .*two-aaaa"):
        resolve_id("aaaa", twins)


def test_the_home_folder_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert home() == tmp_path / "home"
    monkeypatch.delenv("COVEY_HOME")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert home() == tmp_path / "config" / "covey"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "person"))
    assert home() == tmp_path / "person" / ".config" / "covey"
    assert stat.S_IMODE(home().stat().st_mode) == 0o700


def test_a_folder_that_others_may_enter_is_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = tmp_path / "has space"
    folder.mkdir(mode=0o750)
    with pytest.raises(ConfigError, match=r"mode 0750.*chmod 700 '.*has space'"):
        private_folder(folder)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not a folder"):
        private_folder(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot make the folder"):
        private_folder(tmp_path / "file" / "below")


@needs_root
def test_folders_and_files_of_other_users_are_refused(tmp_path: Path) -> None:
    folder, file = private_folder(tmp_path / "theirs"), tmp_path / "key"
    write_private(file, b"x")
    for path in (folder, file):
        os.chown(path, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        private_folder(folder)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        read_private(file)


def test_links_pipes_folders_and_huge_files_are_not_read(tmp_path: Path) -> None:
    write_private(tmp_path / "key", b"x")
    (tmp_path / "link").symlink_to(tmp_path / "key")
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(mode=0o700)
    for name, reason in (("link", "symbolic link"), ("pipe", "not a file"), ("folder", "not a file")):
        with pytest.raises(ConfigError, match=reason):
            read_private(tmp_path / name)
    os.truncate(tmp_path / "key", 2 << 20)
    with pytest.raises(ConfigError, match="far more"):
        read_private(tmp_path / "key")
    with pytest.raises(FileNotFoundError):
        read_private(tmp_path / "missing")


CRASH = """
import os, stat, sys
from pathlib import Path
from covey.net.host.folders import write_private
if sys.argv[2] == "before":
    os.replace = lambda *paths: os._exit(9)
elif sys.argv[2] == "after":
    fsync = os.fsync
    os.fsync = lambda descriptor: os._exit(9) if stat.S_ISDIR(os.fstat(descriptor).st_mode) else fsync(descriptor)
write_private(Path(sys.argv[1]), b"new" * 1000)
"""


@pytest.mark.parametrize(("moment", "expected"), [("before", b"old"), ("after", b"new" * 1000)])
def test_a_crash_leaves_the_old_file_or_the_new_one(tmp_path: Path, moment: str, expected: bytes) -> None:
    path = tmp_path / "key"
    write_private(path, b"old")
    command = [sys.executable, "-c", CRASH, str(path), moment]
    ended = forked.run(command, env={**os.environ, "PYTHONPATH": str(SOURCE)}, timeout=DEADLINE, check=False)
    assert ended.returncode == 9
    assert read_private(path) == expected


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    write_private(tmp_path / "key", b"old")
    with pytest.raises(TypeError):
        write_private(tmp_path / "key", "text")  # type: ignore[arg-type]
    assert read_private(tmp_path / "key") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    with pytest.raises(ConfigError, match="cannot write"):
        write_private(tmp_path / "missing" / "key", b"new")


def test_one_at_a_time_means_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.net.host.locks.LOCK_SECONDS", 0.05)
    with only_one(tmp_path / "lock"), pytest.raises(ConfigError, match="lock locked"), only_one(tmp_path / "lock"):
        pytest.fail("two at a time")
    with only_one(tmp_path / "lock"):
        pass


def test_a_preferred_identity_is_taken_if_it_is_free(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "identities")
    first, second = NodeIdentity.acquire(folder), NodeIdentity.acquire(folder)
    with NodeIdentity.acquire(folder, preferred=second.id) as third:
        assert third.id not in (first.id, second.id), "it is in use"
    first.release()
    second.release()
    with NodeIdentity.acquire(folder, preferred=second.id) as again:
        assert (again.id, again.incarnation) == (second.id, second.incarnation + 1)
        with NodeIdentity.acquire(folder, preferred=b"x" * 32) as other:
            assert other.id == first.id, "there is none with that id"
