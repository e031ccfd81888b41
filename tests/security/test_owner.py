"""The secret of a cluster is changed by its owner, and by no other holder of the secret."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.support.attackers import BROKEN, Insider, Victim, new_cluster, until, victim

from covey.net.keys import clusters, owner
from covey.wire import messages
from covey.wire.secret import ClusterSecret
from covey.wire.signed import rotation_words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from covey.net.keys.clusters import Cluster


@dataclass
class Owned:
    """A node of a machine that has pinned an owner, and the owner's key."""

    prey: Victim
    private: Ed25519PrivateKey

    def __post_init__(self) -> None:
        self.original = self.cluster

    @property
    def cluster(self) -> Cluster:
        return self.prey.cluster

    def follow_file(self) -> None:
        """Wait until the node goes by what the file says, and come to it with that secret from now on."""
        saved = clusters.load("prey")
        until(lambda: self.prey.node.cluster.secret == saved.secret)
        self.prey = Victim(saved, self.prey.endpoint, self.prey.node, self.prey.address)

    def send(self, message: messages.NewSecret) -> str:
        """Send a new secret as a visitor with a fresh key that holds the secret; return the answer."""
        with Insider(self.prey, purpose="visitor") as insider:
            insider.say(message)
            return insider.hear(messages.SecretKept).problem

    def signed(
        self, new: ClusterSecret, serial: int, *, by: Ed25519PrivateKey | None = None, recipient: bytes = b""
    ) -> messages.NewSecret:
        after = replace(self.cluster, secret=new, serial=serial)
        receiver = recipient or self.prey.node.card.id
        return owner.sign_secret(by or self.private, self.cluster, after, 600, receiver)


@pytest.fixture
def owned(home: Path) -> Iterator[Owned]:
    public = owner.make("prey")
    cluster = new_cluster(owner=public)
    private = owner.held(cluster)
    assert private is not None
    clusters.save(cluster)
    with victim(cluster) as prey:
        yield Owned(prey, private)


def fresh() -> ClusterSecret:
    return ClusterSecret("prey", secrets.token_bytes(32))


def test_a_visitor_with_a_fresh_key_cannot_replace_the_secret(owned: Owned) -> None:
    for signature in (b"", bytes(64), secrets.token_bytes(64)):
        assert "has not signed" in owned.send(messages.NewSecret(fresh().key, 1 << 50, 600, signature))
    assert clusters.load("prey") == owned.cluster


def test_the_owner_can_replace_the_secret_through_any_member(owned: Owned) -> None:
    new = fresh()
    assert owned.send(owned.signed(new, 5)) == ""
    kept = clusters.load("prey")
    assert (kept.secret, kept.serial, kept.previous) == (new, 5, owned.cluster.secret)
    assert kept.tag == owned.cluster.tag
    assert owned.send(owned.signed(new, 5)) == ""  # again, as another process of the machine would


def test_a_secret_that_another_owner_signed_is_not_taken(owned: Owned) -> None:
    assert "has not signed" in owned.send(owned.signed(fresh(), 5, by=Ed25519PrivateKey.generate()))
    assert clusters.load("prey") == owned.cluster


def test_a_secret_that_was_signed_for_another_node_is_not_taken(owned: Owned) -> None:
    assert "has not signed" in owned.send(owned.signed(fresh(), 5, recipient=secrets.token_bytes(32)))
    assert clusters.load("prey") == owned.cluster


def test_an_older_change_of_the_secret_that_is_repeated_is_not_taken(owned: Owned) -> None:
    first, second = fresh(), fresh()
    old = owned.signed(first, 5)
    assert owned.send(old) == ""
    clusters.update("prey", lambda now: clusters.with_secret(now, second, 6, 600))
    owned.follow_file()
    assert owned.send(old) != ""
    assert clusters.load("prey").secret == second
    # Even if the first secret were in use again, an older number is refused.
    clusters.update("prey", lambda now: replace(now, secret=owned.original.secret))
    owned.follow_file()
    assert "not later than 6" in owned.send(old)
    assert clusters.load("prey").secret == owned.original.secret


def test_the_parts_of_a_signed_change_cannot_be_exchanged(owned: Owned) -> None:
    good = owned.signed(fresh(), 5)
    for changed in (
        messages.NewSecret(fresh().key, good.serial, good.grace, good.signature),
        messages.NewSecret(good.key, good.serial + 1, good.grace, good.signature),
        messages.NewSecret(good.key, good.serial, 7 * 24 * 3600, good.signature),
    ):
        assert "has not signed" in owned.send(changed)
    words = rotation_words("other", 5, 600, good.key, owned.cluster.secret.key, owned.prey.node.card.id)
    assert "has not signed" in owned.send(messages.NewSecret(good.key, 5, 600, owned.private.sign(words)))
    assert clusters.load("prey") == owned.cluster


def test_a_machine_that_knows_no_owner_takes_no_new_secret_from_the_network(home: Path) -> None:
    cluster, private = new_cluster(), Ed25519PrivateKey.generate()
    clusters.save(cluster)
    with victim(cluster) as prey:
        owned = Owned(prey, private)
        assert "`covey enroll`" in owned.send(owned.signed(fresh(), 5))
    assert clusters.load("prey") == cluster


def test_a_new_secret_replaces_only_the_one_that_is_in_use(home: Path) -> None:
    """The machine has another cluster of the same name on disk, even of the same owner."""
    public = owner.make("prey")
    saved = new_cluster(owner=public)
    private = owner.held(saved)
    assert private is not None
    clusters.save(saved)
    with victim(new_cluster(owner=public)) as prey:
        owned = Owned(prey, private)
        assert "change it there" in owned.send(owned.signed(fresh(), 5))
    assert clusters.load("prey") == saved


def test_a_new_secret_that_is_none_is_not_kept(owned: Owned) -> None:
    for key in (b"", bytes(31), bytes(33), bytes(64)):
        assert owned.send(messages.NewSecret(key, 5, 600, bytes(64)))
    with Insider(owned.prey, purpose="visitor") as insider:
        insider.say(messages.NewSecret(bytes(100_000), 5, 600, bytes(64)))
        with pytest.raises(BROKEN):
            insider.ping()
    assert clusters.load("prey") == owned.cluster
