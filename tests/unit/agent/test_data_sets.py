"""Data sets before they travel: their lists, what may leave a folder, and what is on the disk of a machine."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.support.in_turn import in_turn

from covey.agent import data_sets, data_store
from covey.agent.data_folder import DataFolder, read_data
from covey.agent.data_sets import DATA_CHUNK_BYTES, DataFile, DataManifest, check_data_name
from covey.agent.data_store import DataStore, data
from covey.agent.folder import LEADS_OUT, SECRET
from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

MIB = DATA_CHUNK_BYTES
KEY = b"-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "person").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "person"))
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("COVEY_DATA_FOLDER", raising=False)
    return tmp_path / "home"


def a_file(path: str, data: bytes) -> DataFile:
    digests = (hashlib.sha256(data[at : at + MIB]).digest() for at in range(0, len(data), MIB))
    return DataFile(path, len(data), b"".join(digests))


def read(path: Path, *includes: str, name: str = "set") -> DataFolder:
    return read_data(path, includes, data_store.digests_file(name), lambda _count: None)


def test_a_list_is_known_by_its_digest_and_says_where_each_chunk_is() -> None:
    contents = {"a": b"", "b": bytes(range(256)) * 8192 + b"end", "c/d": b"x", "e": b""}
    manifest = DataManifest([a_file(path, content) for path, content in contents.items()])
    assert (manifest.chunks, manifest.size) == (4, len(contents["b"]) + 1)
    for chunk, (number, digest) in enumerate(manifest.digests()):
        spot = manifest.spot(chunk)
        content = contents[manifest.files[spot.file].path][spot.offset : spot.offset + spot.size]
        assert number == chunk
        assert hashlib.sha256(content).digest() == spot.digest == digest
        assert chunk in manifest.chunks_of(spot.file)
    again = DataManifest.decode(manifest.encoded, manifest.digest)
    assert (again.files, again.digest) == (manifest.files, manifest.digest)
    with pytest.raises(ConfigError, match="another digest than announced"):
        DataManifest.decode(manifest.encoded + b"x", manifest.digest)


def encoded(*files: object, number: int = 1, is_file: bool = False) -> bytes:
    return msgspec.msgpack.encode([number, is_file, files])


HOSTILE = {
    "cannot be sent: it has a part that is empty": encoded(["../out", 0, b"", False]),
    "cannot be sent: it is absolute": encoded(["/etc/passwd", 0, b"", False]),
    "mean one file": encoded(["a", 0, b"", False], ["A", 0, b"", False]),
    "mean one file on some": encoded(["a", 0, b"", False], ["a/b", 0, b"", False]),
    "without a digest for each chunk": encoded(["a", 1 << 50, b"", False]),
    "that is one file has several": encoded(["a", 0, b"", False], ["b", 0, b"", False], is_file=True),
    "cannot be read": encoded(["a", -1, b"", False]),
    "later release": encoded(number=2),
    "cannot be read:": b"\xc1 no list",
}


@in_turn(why=HOSTILE)
def test_a_list_that_could_harm_is_refused(why: str) -> None:
    data = HOSTILE[why]
    with pytest.raises(ConfigError, match=why):
        DataManifest.decode(data, hashlib.sha256(data).digest())


def test_a_list_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_sets, "DATA_FILES_LIMIT", 2)
    with pytest.raises(ConfigError, match="may have 2 files and 1 TiB; pack small files into archives"):
        DataManifest([a_file(name, b"") for name in "abc"])
    monkeypatch.setattr(data_sets, "DATA_MANIFEST_LIMIT", 10)
    with pytest.raises(ConfigError, match="too long for one data set"):
        DataManifest([a_file("a", b"")])


@in_turn(name=["", "a/b", "../x", ".hidden", "a b", "ä", "x" * 101, "a\n"])
def test_other_names_are_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(ConfigError, match="choose one with --name"):
        check_data_name(name)
    with pytest.raises(ConfigError, match="is no name of a data set"):
        data(name)


def test_what_may_hold_secrets_does_not_leave_and_is_named(tmp_path: Path, own_home: Path) -> None:
    folder = tmp_path / "set"
    (folder / ".ssh").mkdir(parents=True)
    for name, content in (
        ("picture", b"p"),
        (".env", b"TOKEN=1"),
        ("renamed.bin", KEY),
        (".ssh/id_rsa", b"k"),
        ("skipped.tmp", b"t"),
        (".coveyignore", b"*.tmp\n"),
    ):
        (folder / name).write_bytes(content)
    (folder / "out").symlink_to("/etc/passwd")
    (folder / "inside").symlink_to("picture")
    with read(folder) as held:
        assert [file.path for file in held.manifest.files] == [".coveyignore", "inside", "picture"]
        assert {(each.path, each.why) for each in held.left_out} == {
            (".env", SECRET),
            ("renamed.bin", SECRET),
            (".ssh/", SECRET),
            ("out", LEADS_OUT),
        }
        assert held.read(1, 0, MIB) == b"p", "a link is the file that it leads to"
    with read(folder, ".env") as held:
        assert ".env" in [file.path for file in held.manifest.files]
    (tmp_path / "key.bin").write_bytes(KEY)
    own_home.mkdir(exist_ok=True, mode=0o700)
    (own_home / "trusted.json").write_text("{}")
    refused: tuple[tuple[Path, str], ...] = (
        (tmp_path / "key.bin", "is a private key, and is not sent"),
        (folder / ".ssh", "may hold secrets"),
        (folder / ".env", "may hold secrets"),
        (own_home, "covey's own folder"),
        (own_home / "trusted.json", "covey's own folder"),
        (tmp_path / "person", "is your home folder, and is not sent to other machines; put the data into a folder"),
        (tmp_path, "contains your home folder"),
        (tmp_path / "nothing", "cannot be read: No such file"),
    )
    for path, why in refused:
        with pytest.raises(ConfigError, match=why):
            read(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is neither a folder nor a file"):
        read(tmp_path / "pipe")


def test_files_that_have_not_changed_are_not_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("old", "new"):
        (folder / name).write_bytes(name.encode())
        os.utime(folder / name, (1e9, 1e9))
    with read(folder) as held:
        before = held.manifest
    cache = data_store.digests_file("set")
    remembered = msgspec.msgpack.decode(cache.read_bytes())
    remembered["old"][1] = bytes(32)  # what would come out if it were not read
    cache.write_bytes(msgspec.msgpack.encode(remembered))
    (folder / "new").write_bytes(b"other")
    with read(folder) as held:
        by_path = {file.path: file.chunks for file in held.manifest.files}
        assert by_path["old"] == bytes(32)
        assert by_path["new"] == hashlib.sha256(b"other").digest()
        assert held.manifest.digest != before.digest
    cache.write_bytes(b"damaged")
    with read(folder) as held:
        assert held.manifest.files[1].chunks == hashlib.sha256(b"old").digest()


def test_links_that_lie_where_files_come_lead_nowhere(tmp_path: Path) -> None:
    manifest = DataManifest([a_file("a/file", b"content"), a_file("b", b"more")])
    store = DataStore()
    partial, _ = store.begin("set", manifest, 1 << 30)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "b").write_bytes(b"kept")
    (partial.folder / "files" / "b").symlink_to(outside / "b")
    (partial.folder / "files" / "a").symlink_to(outside)
    with pytest.raises(ConfigError, match="cannot be written"):
        partial.put(1, b"more")
    assert partial.put(0, b"content"), "a link that stands for a folder is removed"
    assert (outside / "b").read_bytes() == b"kept"
    assert not (outside / "file").exists()
    partial.close()


def test_wrong_content_is_not_taken_and_programs_find_nothing_until_all_is_there(tmp_path: Path) -> None:
    manifest = DataManifest([a_file("a", b"content"), a_file("b", b"more")])
    store = DataStore()
    partial, _ = store.begin("set", manifest, 1 << 30)
    assert not partial.put(0, b"CONTENT")
    assert not partial.put(0, b"content and more")
    assert partial.put(0, b"content")
    with pytest.raises(ConfigError, match="is not completely on this machine"):
        data("set")
    assert partial.put(1, b"more")
    with pytest.raises(ConfigError, match="is not completely on this machine"):
        data("set")
    store.publish("set", partial, "desk")
    partial.close()
    assert (data("set") / "a").read_bytes() == b"content"


def test_a_disk_without_room_is_said_before_anything_is_written() -> None:
    large = DataManifest([DataFile("a", 1 << 40, bytes(32 << 20))])
    with pytest.raises(
        ConfigError, match=r"no room .* it needs 1.0 TiB, and the disk of .* COVEY_DATA_FOLDER there names"
    ):
        DataStore().begin("set", large, 1 << 50)
    assert DataStore().reports() == []
