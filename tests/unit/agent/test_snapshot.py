"""What is sent of a working folder."""

from __future__ import annotations

import hashlib
import os
import pwd
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.seeds import examples

from covey.agent import folder as folder_module
from covey.agent import ignore, snapshot
from covey.agent.folder import LEADS_OUT, OWN_FILE, SECRET, LeftOut
from covey.agent.snapshot import take_snapshot
from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.agent.requests import FileEntry

KEY = b"-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n"


@pytest.fixture(autouse=True)
def homes(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder, and covey's own folder in it."""
    home = tmp_path_factory.mktemp("home")
    (home / ".config" / "covey").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("COVEY_HOME", str(home / ".config" / "covey"))
    return home


def make(folder: Path, *paths: str, content: bytes = b"x") -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def entries(folder: Path, *, apart: Path | None = None, includes: Sequence[str] = ()) -> list[FileEntry]:
    with take_snapshot(folder, apart, includes) as taken:
        return list(taken.entries)


def paths(folder: Path, *includes: str, apart: Path | None = None) -> list[str]:
    return [each.path for each in entries(folder, apart=apart, includes=includes)]


def left_out(folder: Path, *includes: str) -> list[LeftOut]:
    with take_snapshot(folder, None, includes) as taken:
        return list(taken.left_out)


def test_files_have_their_path_size_digest_and_whether_they_can_be_executed(tmp_path: Path) -> None:
    make(tmp_path, "lib/a.py", content=b"a = 1\n")
    make(tmp_path, "run.sh", content=b"#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "empty").touch()
    with take_snapshot(tmp_path) as taken:
        assert [(each.path, each.size, each.is_executable) for each in taken.entries] == [
            ("empty", 0, False),
            ("lib/a.py", 6, False),
            ("run.sh", 10, True),
        ]
        assert taken.entries[1].digest == hashlib.sha256(b"a = 1\n").digest()
        assert (taken.read(1, 4, 2), taken.read(2, 0, 10)) == (b"1\n", b"#!/bin/sh\n")
        assert taken.size == 16


def test_what_coveyignore_names_and_the_folder_of_logs_are_left_out(tmp_path: Path) -> None:
    make(tmp_path, "a.py", "data/x.bin", ".git/HEAD", "logs/rank-0.log", "__pycache__/a.pyc")
    (tmp_path / ".coveyignore").write_text("# large\ndata/\n")
    assert paths(tmp_path, apart=tmp_path / "logs") == [".coveyignore", "a.py"]


def test_a_link_inside_counts_as_its_file_and_one_that_leads_out_is_named_and_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    make(folder, "a", content=b"inside")
    (folder / "b").symlink_to("a")
    make(tmp_path, "secret", "elsewhere/x")
    (folder / "c").symlink_to("../secret")
    (folder / "d").symlink_to(tmp_path / "elsewhere")
    assert [(each.path, each.size) for each in entries(folder)] == [("a", 6), ("b", 6)]
    assert left_out(folder) == [LeftOut("c", LEADS_OUT), LeftOut("d", LEADS_OUT)]
    with pytest.raises(ConfigError, match=r"--include c: .* has no file of this name"):
        take_snapshot(folder, None, ["c"])


@pytest.mark.parametrize("kind", ["fifo", "socket", "link to a folder", "link to itself", "link to nothing"])
def test_what_is_no_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    (tmp_path / "lib").mkdir()
    match kind:
        case "fifo":
            os.mkfifo(tmp_path / "odd")
        case "socket":
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(str(tmp_path / "odd"))
        case "link to a folder":
            (tmp_path / "odd").symlink_to("lib")
        case "link to nothing":
            (tmp_path / "odd").symlink_to("nothing")
        case _:
            (tmp_path / "odd").symlink_to("odd")
    with pytest.raises(ConfigError, match="odd"):
        take_snapshot(tmp_path)


def test_a_folder_with_too_many_files_or_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "0", "1", "2", "3", content=b"x" * 100)
    monkeypatch.setattr(snapshot, "SNAPSHOT_FILES_LIMIT", 3)
    with pytest.raises(ConfigError, match="more than 3 files"):
        take_snapshot(tmp_path)
    monkeypatch.setattr(snapshot, "SNAPSHOT_FILES_LIMIT", 4)
    monkeypatch.setattr(snapshot, "FOLDER_BYTES", 399)
    with pytest.raises(ConfigError, match="3 has 0 MiB"):
        take_snapshot(tmp_path)


def test_the_home_folder_and_folders_that_contain_it_are_refused_with_what_to_do(homes: Path) -> None:
    make(homes, "train.py", ".ssh/id_ed25519")
    account = Path(pwd.getpwuid(os.geteuid()).pw_dir).resolve()
    for folder, words in (
        (homes, "is your home folder"),
        (homes.parent, "contains your home folder"),
        (Path("/"), "is the whole file system"),
        (account, "is your home folder|is the whole file system"),
    ):
        with pytest.raises(ConfigError, match=f"({words}).* change to that folder"):
            take_snapshot(folder)
    make(homes, "project/train.py")
    assert paths(homes / "project") == ["train.py"]


def test_coveys_own_folder_is_never_sent_by_whatever_path_and_nothing_brings_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, copied = tmp_path / "keys", tmp_path / "backup" / "old"
    for folder in (own, copied):
        make(folder, "identities/0.key", "clusters/home.json", "clusters/home.owner", "agent/runs/x/work/train.py")
    monkeypatch.setenv("COVEY_HOME", str(own))
    make(tmp_path, "train.py")
    (tmp_path / "linked").symlink_to("keys/identities/0.key")
    (tmp_path / ".coveyignore").write_text("!keys/\n!keys/**\n!backup/old/\n")
    assert paths(tmp_path) == [".coveyignore", "train.py"]
    assert left_out(tmp_path) == [
        LeftOut("backup/old/", OWN_FILE),
        LeftOut("keys/", OWN_FILE),
        LeftOut("linked", OWN_FILE),
    ]
    for pattern in ("keys", "keys/**", "keys/identities/0.key", "0.key", "linked", "backup/old/clusters/home.owner"):
        with pytest.raises(ConfigError, match="has no file of this name"):
            take_snapshot(tmp_path, None, [pattern])
    for inside in (own, own / "identities", copied / "agent" / "runs" / "x" / "work"):
        with pytest.raises(ConfigError, match="is in covey's own folder"):
            take_snapshot(inside)


def test_files_that_may_hold_secrets_are_left_out_and_named_whatever_coveyignore_says(tmp_path: Path) -> None:
    secrets = (
        *(".ssh/config", ".gnupg/x", ".aws/credentials", ".config/app/token", ".netrc", ".env", ".env.local"),
        *("id_rsa", "id_ed25519.old", "id_ecdsa_sk", ".bash_history", "sub/.ENV", "Firefox/abc.default/prefs.js"),
    )
    make(tmp_path, *secrets, "Firefox/abc.default/key4.db", "train.py", "environment.env", "history")
    make(tmp_path, "deploy.txt", content=b"\xef\xbb\xbf\n" + KEY)
    (tmp_path / "plain-name").symlink_to(".ssh/config")
    (tmp_path / ".coveyignore").write_text("!.ssh/\n!.env\n!**\n")
    assert paths(tmp_path) == [".coveyignore", "environment.env", "history", "train.py"]
    named = [each.path for each in left_out(tmp_path)]
    assert {each.why for each in left_out(tmp_path)} == {SECRET}
    assert named == [
        *(".aws/", ".bash_history", ".config/", ".env", ".env.local", ".gnupg/", ".netrc", ".ssh/"),
        *("Firefox/abc.default/", "deploy.txt", "id_ecdsa_sk", "id_ed25519.old", "id_rsa", "plain-name", "sub/.ENV"),
    ]


def test_include_names_what_is_sent_all_the_same_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path, ".env", "a/.env", ".ssh/.env", ".config/app/x.toml", ".config/app/id_rsa", ".config/other", "b.py")
    make(tmp_path, "certs/server.txt", content=KEY)
    (tmp_path / "link").symlink_to(".ssh/.env")
    for includes, sent in (
        ((), ["b.py"]),
        ((".env",), [".env", "a/.env", "b.py"]),
        (("/.env",), [".env", "b.py"]),
        (("./.env",), [".env", "b.py"]),
        (("a/.env",), ["a/.env", "b.py"]),
        ((".config",), [".config/app/x.toml", ".config/other", "b.py"]),
        ((".config/app",), [".config/app/x.toml", "b.py"]),
        ((".config/app/id_rsa",), [".config/app/id_rsa", "b.py"]),
        ((".config", "id_rsa"), [".config/app/id_rsa", ".config/app/x.toml", ".config/other", "b.py"]),
        (("certs/*.txt",), ["b.py", "certs/server.txt"]),
        (("certs/",), None),
        (("link",), ["b.py", "link"]),
        ((".ssh/.env",), [".ssh/.env", "b.py", "link"]),
        ((".env", "nothing"), None),
        (("b.py",), None),
        (("!.env",), None),
        (("",), None),
    ):
        if sent is None:
            with pytest.raises(ConfigError, match="--include"):
                take_snapshot(tmp_path, None, includes)
        else:
            assert paths(tmp_path, *includes) == sent, includes


SECRET_NAMES = (
    *(".ssh", ".gnupg", ".aws", ".config", ".netrc", ".env", ".env.production", "id_rsa", "id_ed25519.pub", "id_ecdsa"),
    *(".python_history", ".Env", ".mozilla", "key4.db", "cookies.sqlite", "Login Data"),
)
PLAIN_NAMES = ("a", "b.py", "data", "env", "ssh", "config", "keys")
HEADS = (b"", b"data", b"----", b"BEGIN PRIVATE KEY")
KEY_HEADS = (
    b"-----BEGIN PRIVATE KEY-----",
    b"-----BEGIN RSA PRIVATE KEY-----",
    b"\r\n  -----BEGIN ENCRYPTED PRIVATE KEY-----",
    KEY,
    b"-----BEGIN PGP PRIVATE KEY BLOCK-----",
    b"PuTTY-User-Key-File-3: ssh-ed25519",
)
parts = st.lists(st.sampled_from(PLAIN_NAMES), max_size=2)
some_parts = st.lists(st.sampled_from(PLAIN_NAMES), min_size=1, max_size=2)
plain_files = st.builds(lambda path, head: ("/".join(path), head, False), some_parts, st.sampled_from(HEADS))
named_secrets = st.builds(
    lambda above, name, below, head: ("/".join([*above, name, *below]), head, True),
    *(parts, st.sampled_from(SECRET_NAMES), parts, st.sampled_from(HEADS)),
)
keys = st.builds(lambda path, head: ("/".join(path), head, True), some_parts, st.sampled_from(KEY_HEADS))
own_keys = st.builds(lambda above: ("/".join([*above, "own", "identities", "0.key"]), b"", True), parts)


def plant(folder: Path, files: Sequence[tuple[str, bytes, bool]], links: Sequence[tuple[str, int]]) -> dict[str, bool]:
    """Write files whose content is their path, and links; return which paths are secrets."""
    planted = dict[str, bool]()
    for path, head, is_secret in files:
        try:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with (folder / path).open("xb") as file:
                file.write(head + b"\n" + path.encode())
        except OSError:  # a file of that name is a folder, or the other way round
            continue
        planted[path] = is_secret
    targets = sorted(planted)
    for name, number in links if targets else ():
        target = targets[number % len(targets)]
        try:
            (folder / name).symlink_to(target)
        except OSError:
            continue
        planted[name] = planted[target]
    return planted


@given(
    st.lists(st.one_of(plain_files, named_secrets, keys, own_keys), max_size=12),
    st.lists(st.tuples(st.sampled_from(("link", "b.py", "z")), st.integers(0, 20)), max_size=2),
    st.lists(st.sampled_from(("!**", "!.ssh/", "!.env", "!own/", "data")), max_size=2),
    st.sampled_from((None, *SECRET_NAMES)),
)
@settings(max_examples=examples(150), deadline=None)
def test_no_secret_of_a_random_folder_is_ever_in_a_snapshot_unless_it_was_named(
    files: list[tuple[str, bytes, bool]],
    links: list[tuple[str, int]],
    ignored: list[str],
    included: str | None,
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        planted = plant(folder, files, links)
        (folder / ".coveyignore").write_text("\n".join(ignored))
        with take_snapshot(folder) as taken:
            sent = {each.path: taken.read(number, 0, each.size) for number, each in enumerate(taken.entries)}
            named = [each.path for each in taken.left_out]
        secrets = {path for path, is_secret in planted.items() if is_secret}
        assert not secrets & set(sent)
        for path, content in sent.items():  # not under another path either
            origin = os.path.relpath(os.path.realpath(folder / path), folder)
            assert not planted.get(origin)
            assert content == (folder / path).read_bytes()
        for path in secrets:
            is_named = any(path == each or (each.endswith("/") and path.startswith(each)) for each in named)
            assert is_named or "data" in ignored, (path, named)
        if included is None or not any(included in path.split("/") for path in secrets):
            return
        try:
            again = take_snapshot(folder, None, [included])
        except ConfigError:  # what it names is ignored, or in a folder that is left out for another reason
            return
        with again:
            more = {each.path for each in again.entries} - set(sent)
        for path in more:
            through = [path, os.path.relpath(os.path.realpath(folder / path), folder)]
            assert any(included in each.split("/") for each in through), path
            assert all("identities" not in each for each in through)


def test_every_name_of_a_secret_is_left_out_at_any_depth() -> None:
    rules = ignore.SensitiveRules()
    for name in ignore.SENSITIVE_NAMES:
        shown = name.replace("*", "x")
        for path in (shown, f"a/{shown}", f"{shown.upper()}/b", f"a/{shown}/b/c"):
            assert rules.at(path), path
    for path in ("a.py", "ssh/x", "env", "my.env", "config/x", "history.txt", "rsa_id", "netrc"):
        assert rules.at(path) == [], path


def test_the_guide_lists_every_name_of_a_secret() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "several-machines.md").read_text()
    assert [name for name in (*ignore.SENSITIVE_NAMES, *ignore.PROFILE_MARKS) if f"`{name}`" not in guide] == []


class Changing:
    """Changes a file each time that it is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, times: int) -> None:
        self.path, self.left = path, times
        read = folder_module.read_some
        monkeypatch.setattr(snapshot, "read_some", lambda file, name: self.change(read(file, name), name))

    def change(self, data: bytes, name: str) -> bytes:
        if self.left and data and name == self.path.name:
            self.left -= 1
            with self.path.open("ab") as file:
                file.write(b"more")
            os.utime(self.path, ns=(0, self.left))
        return data


def test_a_file_that_changes_while_it_is_read_is_read_again_and_named_if_it_never_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "log", "train.py")
    Changing(monkeypatch, tmp_path / "log", 2)
    with take_snapshot(tmp_path) as taken:
        assert [each.path for each in taken.entries] == ["log", "train.py"]
        whole = (tmp_path / "log").read_bytes()
        assert taken.read(0, 0, len(whole)) == whole
        assert taken.entries[0].digest == hashlib.sha256(whole).digest()
    Changing(monkeypatch, tmp_path / "log", 1000)
    with pytest.raises(ConfigError, match=r"log changes while it is read; stop what writes it, or leave it out"):
        take_snapshot(tmp_path)


def test_what_was_read_is_what_is_sent_whatever_happens_to_the_folder_later(tmp_path: Path) -> None:
    make(tmp_path, "a", "b", "c/d", content=b"before")
    with take_snapshot(tmp_path) as taken:
        (tmp_path / "a").write_bytes(b"after, and longer")
        (tmp_path / "b").unlink()
        (tmp_path / "c" / "d").unlink()
        (tmp_path / "c").rmdir()
        (tmp_path / "c").symlink_to("/etc")
        assert [taken.read(number, 0, 6) for number in range(3)] == [b"before"] * 3


def test_files_and_folders_that_vanish_while_the_folder_is_read_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "a", "b", "c/d", "e")
    opened = folder_module.open_below

    def open_and_remove(root: int, path: str) -> int:
        for gone in ("b", "c/d"):
            (tmp_path / gone).unlink(missing_ok=True)
        if (tmp_path / "c").exists():
            (tmp_path / "c").rmdir()
        return opened(root, path)

    monkeypatch.setattr(folder_module, "open_below", open_and_remove)
    assert paths(tmp_path) == ["a", "e"]


def test_a_disk_without_room_for_the_copy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "a")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ConfigError, match="No space left on device; make room there, or set TMPDIR"):
        take_snapshot(tmp_path)
