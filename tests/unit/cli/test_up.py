"""`covey up`: which machines its --allow means."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from covey.base.errors import ConfigError
from covey.cli.up import permission_for
from covey.net.keys import clusters, trust
from covey.net.keys.clusters import Cluster
from covey.net.keys.identity import ensure_identity, id_text, own_machine
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    from pathlib import Path

NORTH, NORTH_NODE, SOUTH, STRANGER = (secrets.token_bytes(32) for _ in range(4))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    made = Cluster(ClusterSecret("home", secrets.token_bytes(32)))
    clusters.save(made)
    ensure_identity()
    clusters.remember("home", NORTH, "north-aaaa")
    clusters.remember("home", NORTH_NODE, "north-bbbb", NORTH)
    clusters.remember("home", SOUTH, "south-cccc")
    return made


def test_names_are_those_of_trusted_machines_and_ids_are_those_of_any(cluster: Cluster) -> None:
    trust.remember(cluster, {NORTH: "north-aaaa", SOUTH: "south-cccc"})
    for word, machine in (
        ("north-aaaa", NORTH),
        ("north", NORTH),
        ("North.example.org", NORTH),
        (id_text(SOUTH), SOUTH),
        (SOUTH.hex()[:12], SOUTH),
        (id_text(NORTH_NODE), NORTH),
        (id_text(STRANGER), STRANGER),
    ):
        assert permission_for(cluster, [word]).machines == {machine}, word
    assert permission_for(cluster, ["north", "south"]).machines == {NORTH, SOUTH}
    clusters.remember("home", STRANGER, "north-aaaa")
    assert permission_for(cluster, ["north"]).machines == {NORTH}, "a claimed name neither takes nor blocks one"


def test_without_names_only_this_machine_is_allowed_and_all_means_all(cluster: Cluster) -> None:
    itself = permission_for(cluster, [])
    assert (itself.own, itself.machines, itself.is_for_all) == (own_machine(), frozenset(), False)
    assert permission_for(cluster, ["all"]).is_for_all


def test_a_name_that_was_only_claimed_or_means_several_machines_is_refused(cluster: Cluster) -> None:
    for word in ("west", "north", "south-cccc", id_text(SOUTH)[:8]):
        with pytest.raises(ConfigError, match=rf"--allow {word}: .*run `covey trust {word}` first"):
            permission_for(cluster, [word])
    trust.remember(cluster, {SOUTH: "south-cccc", STRANGER: "south-dddd"})
    with pytest.raises(ConfigError, match="--allow south means several machines") as raised:
        permission_for(cluster, ["south"])
    assert id_text(SOUTH) in str(raised.value)
    assert id_text(STRANGER) in str(raised.value)
