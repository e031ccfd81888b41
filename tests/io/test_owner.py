"""The owner key of a cluster: where it lies, and what needs it."""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from covey.base.errors import ConfigError
from covey.cli.clusters import app as clusters_command
from covey.cli.enroll import app as enroll_command
from covey.cli.init import app as init_command
from covey.net.keys import clusters, owner
from covey.runtime.environment import ClusterOptions
from covey.wire.secret import ClusterSecret, decode_join_code, encode_join_code

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "first"))
    monkeypatch.setenv("COVEY_INTERFACES", "lo")
    return tmp_path / "first" / "clusters"


def code_of(name: str = "home") -> str:
    cluster = clusters.load(name)
    return encode_join_code(cluster.secret, (), cluster.owner)


def test_init_makes_an_owner_key_that_enroll_pins_and_does_not_have(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CliRunner().invoke(init_command, []).exit_code == 0
    made = clusters.load("home")
    private = owner.held(made)
    assert private is not None
    assert private.public_key().public_bytes_raw() == made.owner
    assert stat.S_IMODE((first / "home.owner").stat().st_mode) == 0o600
    assert decode_join_code(code_of()).owner == made.owner
    assert private.private_bytes_raw().hex() not in (first / "home.json").read_text()
    code = code_of()
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "second"))
    assert CliRunner().invoke(enroll_command, ["-"], input=code).exit_code == 0
    assert clusters.load("home").owner == made.owner
    assert owner.held(clusters.load("home")) is None
    assert clusters.load("home").tag == made.tag
    with pytest.raises(ConfigError, match="where `covey init home` was run"):
        owner.require(clusters.load("home"), "this")


def test_a_passphrase_makes_no_owner(first: Path) -> None:
    words = "correct horse battery staple anvil\n"
    assert CliRunner().invoke(init_command, ["lab", "--passphrase"], input=words).exit_code == 0
    assert clusters.load("lab").owner == b""
    assert not (first / "lab.owner").exists()
    with pytest.raises(ConfigError, match="have no owner"):
        owner.require(clusters.load("lab"), "this")


def test_the_names_of_files_outlast_a_change_of_the_secret() -> None:
    CliRunner().invoke(init_command, [])
    before = clusters.load("home")
    other = ClusterSecret("home", os.urandom(32))
    after = clusters.update("home", lambda now: clusters.with_secret(now, other, 5, 60))
    assert after.tag == before.tag
    assert clusters.load("home") == after
    assert clusters.Cluster(other).tag != clusters.Cluster(before.secret).tag


def test_a_code_of_another_owner_needs_force_and_one_of_the_same_owner_does_not(first: Path) -> None:
    CliRunner().invoke(init_command, [])
    before = clusters.load("home")
    other = ClusterSecret("home", os.urandom(32))
    renewed = encode_join_code(other, (), before.owner)
    assert "has the new secret" in CliRunner().invoke(enroll_command, ["-"], input=renewed).output
    for code in (encode_join_code(other, (), b"x" * 32), encode_join_code(before.secret)):
        refused = CliRunner().invoke(enroll_command, ["-"], input=code)
        assert isinstance(refused.exception, ConfigError)
    assert (clusters.load("home").secret, clusters.load("home").owner) == (other, before.owner)
    plain = encode_join_code(other)
    assert "stays in" in CliRunner().invoke(enroll_command, ["-"], input=plain).output
    assert clusters.load("home").owner == before.owner


def test_an_owner_key_that_others_may_read_is_refused(first: Path) -> None:
    CliRunner().invoke(init_command, [])
    (first / "home.owner").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        owner.held(clusters.load("home"))
    (first / "home.owner").chmod(0o600)
    (first / "home.owner").write_text("00 11\n")
    with pytest.raises(ConfigError, match="is damaged"):
        owner.held(clusters.load("home"))


def test_an_owner_key_goes_with_its_cluster(first: Path) -> None:
    CliRunner().invoke(init_command, [])
    assert CliRunner().invoke(clusters_command, ["--forget", "home", "--yes"]).exit_code == 0
    assert list(first.glob("home*")) == []


def test_a_join_code_with_a_relay_is_all_that_another_machine_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = CliRunner().invoke(init_command, ["--relay", "relay.example.org,192.0.2.7:9", "--json"])
    assert made.exit_code == 0, made.output
    code, relays = json.loads(made.stdout)["join_code"], ("relay.example.org:47690", "192.0.2.7:9")
    assert clusters.load("home").relays == ("relay.example.org", "192.0.2.7:9")
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "second"))
    assert CliRunner().invoke(enroll_command, ["-"], input=code).exit_code == 0
    assert clusters.load("home").relays == relays
    assert ClusterOptions().find({"COVEY_RELAYS": "10.0.0.1"}).relays == ("10.0.0.1", *relays)
    shown = CliRunner().invoke(init_command, ["--show", "--json"])
    assert decode_join_code(json.loads(shown.stdout)["join_code"]).relays == relays
    assert CliRunner().invoke(init_command, ["other", "--relay", "a,b,c"]).exit_code != 0
    assert not (tmp_path / "second" / "clusters" / "other.json").exists()
