"""What the owner of a cluster says about its nodes, on disk and in words."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covey.base.errors import AuthError, ConfigError
from covey.net.keys import charter, clusters, owner
from covey.net.keys.clusters import Cluster
from covey.net.keys.identity import NodeIdentity, own_ids, own_machine, short_id
from covey.wire.messages import Card, Charter, Contact
from covey.wire.secret import ClusterSecret
from covey.wire.signed import machine_of

if TYPE_CHECKING:
    from pathlib import Path

A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))


@pytest.fixture(autouse=True)
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("COVEY_HOME", str(tmp_path / "home"))
    made = Cluster(ClusterSecret("lab", b"k" * 32), owner=owner.make("lab"))
    clusters.save(made)
    return made


@pytest.fixture
def private(cluster: Cluster) -> Ed25519PrivateKey:
    held = owner.held(cluster)
    assert held is not None
    return held


def card(identity: NodeIdentity) -> Card:
    return Card(identity.id, identity.life, "otter", "otter", 1, Contact("", (), ""), machine=identity.machine,
                endorsement=identity.endorsement)  # fmt: skip


def test_all_nodes_of_a_machine_name_its_first_key(tmp_path: Path) -> None:
    with NodeIdentity.acquire() as first, NodeIdentity.acquire() as second:
        passing = NodeIdentity.passing()
        assert machine_of(card(first)) == machine_of(card(second)) == machine_of(card(passing)) == first.id
        assert len({first.id, second.id, passing.id}) == 3
        assert own_ids() == {first.id, second.id}
        assert own_machine() == first.id
        with NodeIdentity.acquire(tmp_path / "elsewhere") as other:
            assert machine_of(card(other)) == other.id


def test_a_card_that_names_another_machine_without_its_signature_is_refused() -> None:
    with NodeIdentity.acquire() as first, NodeIdentity.acquire() as second:
        good, stranger = card(second), NodeIdentity.ephemeral()
        for forged in (
            msgspec.structs.replace(card(stranger), machine=first.id),
            msgspec.structs.replace(card(stranger), machine=first.id, endorsement=good.endorsement),
            msgspec.structs.replace(good, endorsement=bytes(64)),
            msgspec.structs.replace(good, machine=stranger.id),
            msgspec.structs.replace(good, machine=b"short"),
        ):
            with pytest.raises(AuthError):
                machine_of(forged)


def test_a_charter_is_kept_in_the_cluster_file_and_each_one_is_later(
    cluster: Cluster, private: Ed25519PrivateKey
) -> None:
    first = charter.amend(cluster, private, lambda now: (now[0] | {A}, now[1]))
    second = charter.amend(first, private, lambda now: (now[0] | {B}, frozenset({C})))
    assert first.charter is not None
    assert second.charter is not None
    assert second.charter.serial > first.charter.serial
    assert charter.lists(clusters.load("lab")) == (frozenset({A, B}), frozenset({C}))
    assert charter.is_news(first, second.charter)
    assert not charter.is_news(second, first.charter)
    assert not charter.is_news(second, second.charter)
    charter.keep(second, first.charter)  # a process that was stopped for long
    assert clusters.load("lab") == second


def test_a_charter_counts_only_with_the_signature_of_the_pinned_owner(
    cluster: Cluster, private: Ed25519PrivateKey
) -> None:
    made = charter.amend(cluster, private, lambda _now: (frozenset({A}), None)).charter
    assert made is not None
    assert charter.is_news(cluster, made)
    assert not charter.is_news(replace(cluster, owner=b""), made)
    other = Ed25519PrivateKey.generate()
    for wrong in (
        msgspec.structs.replace(made, signature=b""),
        msgspec.structs.replace(made, serial=made.serial + 1),
        msgspec.structs.replace(made, denied=(B,)),
        msgspec.structs.replace(made, allowed=()),
        msgspec.structs.replace(made, machine="mine"),
        msgspec.structs.replace(made, signature=other.sign(b"x")),
    ):
        with pytest.raises(AuthError):
            charter.is_news(cluster, wrong)
    with pytest.raises(AuthError):
        charter.is_news(replace(cluster, secret=ClusterSecret("other", b"k" * 32)), made)


def test_a_charter_that_was_changed_on_disk_is_noticed(cluster: Cluster, private: Ed25519PrivateKey) -> None:
    charter.amend(cluster, private, lambda _now: (frozenset({A}), None))
    path = clusters.cluster_path("lab")
    file = json.loads(path.read_text())
    file["charter"] = file["charter"].replace(A.hex(), B.hex())
    path.write_text(json.dumps(file))
    with pytest.raises(ConfigError, match="is damaged"):
        clusters.load("lab")


def test_lists_are_bounded(cluster: Cluster, private: Ed25519PrivateKey) -> None:
    many = frozenset(number.to_bytes(32, "big") for number in range(2001))
    with pytest.raises(ConfigError, match="at most 2000"):
        charter.amend(cluster, private, lambda _now: (many, None))
    assert clusters.load("lab") == cluster


def test_every_refusal_says_why_and_what_to_do(cluster: Cluster, private: Ed25519PrivateKey) -> None:
    node = card(NodeIdentity.ephemeral())
    short = short_id(node.id)
    assert charter.objection(cluster, node, "here") == ""
    local = charter.objection(replace(cluster, denied=frozenset({node.id})), node, "here")
    assert local == f"node otter ({short}) is denied on here; `covey deny {short} --undo` there lets it in"
    denied = charter.amend(cluster, private, lambda _now: (frozenset({node.id}), None))
    assert isinstance(denied.charter, Charter)
    words = charter.objection(denied, node, "here")
    assert words.endswith(f"by the owner of the cluster; on {denied.charter.machine} run `covey deny {short} --undo`")
    listed = charter.amend(cluster, private, lambda _now: (frozenset(), frozenset({A})))
    words = charter.objection(listed, node, "here")
    assert words.endswith(f"is waiting for approval: on {denied.charter.machine} run `covey allow {short}`")
    assert charter.is_waiting(listed, node)
    assert not charter.is_waiting(denied, node)
    both = charter.amend(cluster, private, lambda _now: (frozenset({node.id}), frozenset({A})))
    assert not charter.is_waiting(both, node)


def test_what_is_said_of_a_machine_holds_for_all_its_nodes(cluster: Cluster, private: Ed25519PrivateKey) -> None:
    with NodeIdentity.acquire() as first, NodeIdentity.acquire() as second:
        others = [card(second), card(NodeIdentity.passing())]
        denied = charter.amend(cluster, private, lambda _now: (frozenset({first.id}), None))
        assert all(charter.objection(denied, each, "here") for each in (card(first), *others))
        assert charter.machine_objection(denied, first.id, "here")
        assert charter.machine_objection(replace(cluster, denied=frozenset({first.id})), first.id, "here")
        listed = charter.amend(cluster, private, lambda _now: (frozenset(), frozenset({first.id})))
        assert not charter.machine_objection(listed, first.id, "here")
        assert "waiting for approval" in charter.machine_objection(listed, second.id, "here")
        assert not any(charter.objection(listed, each, "here") for each in (card(first), *others))
        one = charter.amend(cluster, private, lambda _now: (frozenset({second.id}), None))
        assert [bool(charter.objection(one, each, "here")) for each in (card(first), *others)] == [False, True, False]


def test_machines_that_wait_are_noted_and_forgotten_when_they_got_an_answer(cluster: Cluster) -> None:
    for number in range(70):
        clusters.remember_waiting("lab", bytes([number]) * 32, f"n{number}")
    waiting = clusters.waiting("lab")
    assert list(waiting.values()) == [f"n{number}" for number in range(6, 70)]
    clusters.forget_waiting("lab", [bytes([69]) * 32, b"x" * 32])
    assert list(clusters.waiting("lab").values()) == [f"n{number}" for number in range(6, 69)]
    assert clusters.load("lab") == cluster


def test_the_machine_of_a_node_that_was_met_is_known(cluster: Cluster) -> None:
    clusters.remember("lab", A, "otter-a", A)
    clusters.remember("lab", B, "otter-b", A)
    assert clusters.known("lab") == {A: "otter-a", B: "otter-b"}
    assert clusters.machines("lab") == {B: A}
