"""What a machine knows of clusters: private files, one default, and secrets that come from elsewhere."""

from __future__ import annotations

import json
import os
import secrets
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support import forked
from tests.support.waiting import DEADLINE

from covey.base.errors import ConfigError
from covey.net.keys import clusters, secret_sources
from covey.net.keys.clusters import Cluster
from covey.wire.secret import ClusterSecret, encode_join_code

SOURCE = Path(__file__).parents[2] / "src"
KEY = bytes(range(32))
HOME = Cluster(ClusterSecret("home", KEY), ("10.0.0.1:47700",), frozenset({b"d" * 32, b"e" * 32}))
LAB = Cluster(ClusterSecret("lab", KEY[::-1]))
CODE = encode_join_code(HOME.secret, HOME.seeds)
PASSPHRASE = "correct horse battery staple"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the clusters' files are; nothing is remembered from another test."""
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "clusters"


def test_a_saved_cluster_comes_back_from_a_private_file(folder: Path) -> None:
    path = clusters.save(HOME)
    assert path == folder / "home.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert clusters.load("home") == HOME
    assert clusters.list_clusters() == [HOME]
    assert json.loads(path.read_text())["created"].endswith("+00:00")


def test_a_second_cluster_does_not_take_the_place_of_the_default() -> None:
    assert clusters.default_name() is None
    clusters.save(LAB)
    assert clusters.default_name() == "lab"
    clusters.save(HOME)
    assert clusters.default_name() == "lab"
    clusters.set_default("home")
    assert clusters.default_name() == "home"
    assert secret_sources.find(None, {}) == HOME
    assert secret_sources.find("lab", {}) == LAB


def test_without_a_mark_several_clusters_have_no_default() -> None:
    clusters.save(LAB)
    clusters.save(HOME)
    clusters.save(replace(LAB, secret=ClusterSecret("third", KEY)))
    clusters.remove("lab")
    assert clusters.default_name() is None
    with pytest.raises(ConfigError, match=r"several clusters: home, third; .*covey clusters --default"):
        secret_sources.find(None, {})
    clusters.remove("third")
    assert clusters.default_name() == "home"


def test_a_cluster_that_is_not_here_is_named_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"^this machine is in no cluster: run `covey init` here, or `covey enroll`"):
        secret_sources.find(None, {})
    clusters.save(HOME)
    for use in (clusters.load, clusters.remove, clusters.set_default, clusters.known):
        with pytest.raises(ConfigError, match=r"not in a cluster 'lab', only in home"):
            use("lab")
    with pytest.raises(ConfigError, match="cannot be a cluster's name"):
        clusters.load("../../secret")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-10],
        lambda text: text.replace('"home"', '"lab"'),
        lambda text: text.replace(KEY.hex(), KEY.hex()[2:]),
        lambda text: text.replace(KEY.hex(), "zz" * 32),
        lambda text: text.replace((b"d" * 32).hex(), "00"),
        lambda text: text.replace('"seeds"', '"seedz"'),
    ],
)
def test_a_damaged_file_is_named_and_can_be_forgotten(folder: Path, damage: object) -> None:
    path = clusters.save(HOME)
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"home.json is damaged; run `covey clusters --forget home`") as caught:
        clusters.load("home")
    assert KEY.hex()[4:20] not in str(caught.value)
    clusters.remove("home")
    assert clusters.list_clusters() == []


def test_a_file_that_others_may_read_is_refused(folder: Path) -> None:
    clusters.save(HOME).chmod(0o644)
    with pytest.raises(ConfigError, match=r"chmod 600 .*home.json"):
        secret_sources.find("home", {})
    (folder / "home.json").chmod(0o600)
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match=r"chmod 700 .*clusters"):
        secret_sources.find("home", {})


def test_files_that_are_no_clusters_are_left_alone(folder: Path) -> None:
    clusters.save(HOME)
    (folder / "Copy of home.json").write_text("?")
    (folder / ".home.json.abc").write_text("?")
    assert clusters.list_clusters() == [HOME]
    assert clusters.default_name() == "home"


def test_saving_again_keeps_the_known_nodes_and_when_the_key_came(folder: Path) -> None:
    path = clusters.save(HOME)
    old = json.loads(path.read_text()) | {"created": "2020-01-01T00:00:00+00:00"}
    path.write_text(json.dumps(old))
    clusters.remember("home", b"k" * 32, "otter-nnnn")
    clusters.save(replace(HOME, seeds=()))
    assert clusters.known("home") == {b"k" * 32: "otter-nnnn"}
    assert json.loads(path.read_text())["created"] == old["created"]
    new = clusters.with_secret(HOME, ClusterSecret("home", KEY[:16] + KEY[:16]), 1, 60)
    clusters.save(new)
    assert clusters.known("home") == {b"k" * 32: "otter-nnnn"}
    assert json.loads(path.read_text())["created"] > old["created"]
    assert (new.name, new.seeds, new.denied) == ("home", HOME.seeds, HOME.denied)
    assert clusters.next_serial(new.serial) > new.serial
    assert clusters.next_serial(1 << 52) == (1 << 52) + 1


def test_the_latest_thousand_nodes_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "MAX_KNOWN", 3)
    clusters.save(HOME)
    for number in (1, 2, 3, 4):
        clusters.remember("home", bytes([number]) * 32, f"n{number}")
    clusters.remember("home", b"\2" * 32, "renamed")
    clusters.remember("home", b"\5" * 32, "n5")
    assert clusters.known("home") == {b"\4" * 32: "n4", b"\2" * 32: "renamed", b"\5" * 32: "n5"}


def test_what_cannot_be_noted_is_not_an_error(folder: Path) -> None:
    clusters.remember("home", b"k" * 32, "otter")
    assert clusters.list_clusters() == []
    path = clusters.save(HOME)
    (folder / ".lock").unlink()
    (folder / ".lock").mkdir()  # as on a read-only disk, no process can lock
    before = path.read_bytes()
    clusters.remember("home", b"k" * 32, "otter")
    assert path.read_bytes() == before


REMEMBER = """
import sys
from covey.net.keys import clusters
from dataclasses import replace
number = int(sys.argv[1])
for turn in range(5):
    clusters.remember("home", bytes([number, turn]) * 16, f"n{number}-{turn}")
    clusters.update("home", lambda now: replace(now, denied=now.denied | {bytes([number, turn]) * 16}))
"""


def test_processes_that_write_at_once_lose_nothing_of_each_other() -> None:
    clusters.save(replace(HOME, denied=frozenset()))
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    writers = [forked.Popen([sys.executable, "-c", REMEMBER, str(number)], env=env) for number in range(4)]
    try:
        assert [writer.wait(DEADLINE) for writer in writers] == [0] * 4
    finally:
        for writer in writers:
            writer.kill()
            writer.wait(DEADLINE)
    added = {bytes([number, turn]) * 16: f"n{number}-{turn}" for number in range(4) for turn in range(5)}
    assert clusters.known("home") == added
    assert clusters.load("home").denied == set(added)


@pytest.mark.parametrize("secret", [KEY, KEY.hex(), KEY.hex().upper(), f" {KEY.hex()}\n"])
def test_a_key_without_a_name_gets_the_one_asked_for(secret: bytes | str) -> None:
    assert secret_sources.find(None, {}, secret) == Cluster(ClusterSecret("default", KEY))
    assert secret_sources.find("lab", {}, secret) == Cluster(ClusterSecret("lab", KEY))


def test_a_join_code_brings_its_name_and_seeds() -> None:
    assert secret_sources.find(None, {}, CODE) == replace(HOME, denied=frozenset())
    assert secret_sources.find("home", {}, CODE.upper()) == replace(HOME, denied=frozenset())
    with pytest.raises(ConfigError, match="secret=: this join code is for the cluster 'home', not for 'lab'"):
        secret_sources.find("lab", {}, CODE)


def test_a_passphrase_is_salted_with_the_name() -> None:
    assert secret_sources.find("lab", {}, PASSPHRASE).secret.key != secret_sources.find(None, {}, PASSPHRASE).secret.key


@pytest.mark.parametrize(
    ("secret", "message"),
    [
        (b"short", "32 bytes"),
        (KEY.hex()[1:], "64 digits, not 63"),
        ("", "the secret is empty"),
        ("hunter2", "too easy to guess"),
        (CODE[:-3], "incomplete"),
    ],
)
def test_a_secret_that_cannot_be_used_is_refused_wherever_it_came_from(
    tmp_path: Path, secret: bytes | str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^secret=: .*{message}"):
        secret_sources.find(None, {}, secret)
    if isinstance(secret, str):
        with pytest.raises(ConfigError, match=f"^COVEY_SECRET: .*{message}") as caught:
            secret_sources.find(None, {"COVEY_SECRET": secret})
        assert not secret or secret not in str(caught.value)
        file = tmp_path / "secret"
        file.touch(0o600)
        file.write_text(secret)
        with pytest.raises(ConfigError, match=f"^COVEY_SECRET_FILE: .*{message}"):
            secret_sources.find(None, {"COVEY_SECRET_FILE": str(file)})


def test_the_argument_beats_the_secret_file_beats_the_variable_beats_the_files(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text("22" * 32 + "\n")
    clusters.save(HOME)
    env = {"COVEY_SECRET": "33" * 32, "COVEY_SECRET_FILE": str(file), "OTHER": "stays"}
    assert secret_sources.find("home", env, b"\x11" * 32).secret.key == b"\x11" * 32
    assert env == {"COVEY_SECRET_FILE": str(file), "OTHER": "stays"}
    assert secret_sources.find("home", env).secret.key == b"\x22" * 32
    del env["COVEY_SECRET_FILE"]
    assert secret_sources.find("home", env).secret.key == b"\x33" * 32


def test_the_variable_is_taken_away_and_remembered_for_a_second_join() -> None:
    env = {"COVEY_SECRET": CODE}
    assert secret_sources.find(None, env).secret == HOME.secret
    assert env == {}
    assert secret_sources.find(None, env).secret == HOME.secret
    env["COVEY_SECRET"] = "44" * 32
    assert secret_sources.find("lab", env).secret == ClusterSecret("lab", b"\x44" * 32)


def test_a_secret_file_must_be_private_text_and_there(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    env = {"COVEY_SECRET_FILE": str(file)}
    with pytest.raises(ConfigError, match=r"COVEY_SECRET_FILE: there is no file .*secret"):
        secret_sources.find(None, env)
    file.write_text(CODE)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        secret_sources.find(None, env)
    file.chmod(0o400)
    assert secret_sources.find(None, env).secret == HOME.secret
    file.chmod(0o600)
    file.write_bytes(b"\xff\xfe" * 16)
    with pytest.raises(ConfigError, match="is not text"):
        secret_sources.find(None, env)


def test_a_secret_file_may_be_mounted_by_a_container_engine(tmp_path: Path) -> None:
    data = tmp_path / "..data"
    data.mkdir()
    (tmp_path / "secret").symlink_to(data / "secret")
    (data / "secret").write_text(CODE)
    env = {"COVEY_SECRET_FILE": str(tmp_path / "secret")}
    os.chown(data / "secret", 0, 1000)
    (data / "secret").chmod(0o440)
    assert secret_sources.find(None, env).secret == HOME.secret
    for mode, owner in ((0o444, 0), (0o460, 0), (0o640, 0), (0o440, 65534)):
        os.chown(data / "secret", owner, 1000)
        (data / "secret").chmod(mode)
        with pytest.raises(ConfigError, match=r"chmod 600|belongs to user"):
            secret_sources.find(None, env)


def test_a_given_secret_needs_no_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVEY_HOME", "/dev/null/nowhere")
    assert secret_sources.find(None, {"COVEY_SECRET": CODE}).name == "home"
    with pytest.raises(ConfigError, match="cannot use the folder /dev/null/nowhere"):
        clusters.find_saved(None)


def test_a_new_key_of_a_cluster_does_not_let_in_denied_nodes_again() -> None:
    old, kept_out = Cluster(ClusterSecret("lab", secrets.token_bytes(32))), secrets.token_bytes(32)
    clusters.save(Cluster(old.secret, denied=frozenset({kept_out})))
    code = encode_join_code(ClusterSecret("lab", secrets.token_bytes(32)))
    done = forked.run(
        [sys.executable, "-m", "covey", "enroll", "--force", "-"],
        input=code,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    assert clusters.load("lab").denied == {kept_out}


def test_a_cluster_is_not_made_when_its_join_code_cannot_be() -> None:
    done = forked.run(
        [sys.executable, "-m", "covey", "init", "lab"],
        env={**os.environ, "COVEY_INTERFACES": "no-such-interface"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 2
    assert not clusters.cluster_path("lab").exists()
