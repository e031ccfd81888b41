"""`covey up`: which machines its --allow means."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from covey.base.errors import ConfigError
from covey.cli.up import permission_for
from covey.net.keys import clusters
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


def test_names_become_the_keys_of_machines_that_were_met(cluster: Cluster) -> None:
    for word, machine in (
        ("north-aaaa", NORTH),
        ("north-bbbb", NORTH),
        ("north", NORTH),
        (id_text(SOUTH), SOUTH),
        (SOUTH.hex()[:12], SOUTH),
        (id_text(STRANGER), STRANGER),
    ):
        assert permission_for(cluster, [word]).machines == {machine}, word
    assert permission_for(cluster, ["north", "south"]).machines == {NORTH, SOUTH}


def test_without_names_only_this_machine_is_allowed_and_all_means_all(cluster: Cluster) -> None:
    itself = permission_for(cluster, [])
    assert (itself.own, itself.machines, itself.is_for_all) == (own_machine(), frozenset(), False)
    assert permission_for(cluster, ["all"]).is_for_all


def test_a_name_that_is_not_known_or_means_several_machines_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match=r"--allow west: .*`covey up` on a machine prints its id"):
        permission_for(cluster, ["west"])
    clusters.remember("home", STRANGER, "south-dddd")
    with pytest.raises(ConfigError, match="--allow south"):
        permission_for(cluster, ["south"])
