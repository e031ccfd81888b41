"""Charters: members obey the owner's at once, and no one else's."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.support.attackers import BROKEN, Insider, Victim, call_on_loop, new_cluster, until, victim

from covey.net.keys import charter, clusters, owner
from covey.net.keys.identity import NodeIdentity
from covey.wire import messages
from covey.wire.signed import charter_words, machine_words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Owned:
    """A node of a machine that has pinned an owner, and the owner's key."""

    def __init__(self, prey: Victim, private: Ed25519PrivateKey) -> None:
        self.prey, self.private = prey, private

    def charter(
        self,
        serial: int = 1,
        denied: tuple[bytes, ...] = (),
        allowed: tuple[bytes, ...] | None = None,
        *,
        by: Ed25519PrivateKey | None = None,
        cluster: str = "prey",
    ) -> messages.Charter:
        unsigned = messages.Charter(serial, "owners-machine", denied, allowed)
        signature = (by or self.private).sign(charter_words(cluster, unsigned))
        return msgspec.structs.replace(unsigned, signature=signature)

    def spread(self, charter: messages.Charter) -> None:
        """Pass a charter on as a visitor with a fresh key that holds the secret."""
        with Insider(self.prey, purpose="visitor") as insider:
            insider.say(charter)
            with contextlib.suppress(*BROKEN):  # it may be denied by it
                insider.ping()

    def show(self, charter: messages.Charter) -> None:
        """Show a charter in a greeting, which may be refused."""
        with contextlib.suppress(*BROKEN), Insider(self.prey, purpose="visitor", hello={"charter": charter}):
            pass

    def serial(self) -> int:
        now = call_on_loop(lambda: self.prey.node.cluster.charter)
        return now.serial if now is not None else 0


@pytest.fixture
def owned(home: Path) -> Iterator[Owned]:
    cluster = new_cluster(owner=owner.make("prey"))
    private = owner.held(cluster)
    assert private is not None
    clusters.save(cluster)
    with victim(cluster) as prey:
        yield Owned(prey, private)


def test_only_the_owner_makes_charters_and_the_latest_counts(owned: Owned) -> None:
    node = secrets.token_bytes(32)
    for wrong in (
        owned.charter(9, (node,), by=Ed25519PrivateKey.generate()),
        owned.charter(9, (node,), cluster="other"),
        msgspec.structs.replace(owned.charter(9, (node,)), signature=b""),
        msgspec.structs.replace(owned.charter(9, (node,)), serial=10),
        msgspec.structs.replace(owned.charter(9, (node,)), denied=()),
    ):
        owned.spread(wrong)
        assert owned.serial() == 0
    owned.spread(owned.charter(9, (node,)))
    assert owned.serial() == 9
    owned.spread(owned.charter(8))
    owned.spread(owned.charter(9))
    charter = call_on_loop(lambda: owned.prey.node.cluster.charter)
    assert charter is not None
    assert charter.denied == (node,)
    until(lambda: clusters.load("prey").charter == owned.prey.node.cluster.charter)


def test_a_node_that_knows_no_owner_obeys_no_charter() -> None:
    with victim(new_cluster()) as prey:
        owned = Owned(prey, Ed25519PrivateKey.generate())
        owned.spread(owned.charter(9, allowed=()))
        assert owned.serial() == 0


def test_a_charter_ends_the_links_of_a_denied_node_at_once_and_refuses_new_ones(owned: Owned) -> None:
    with Insider(owned.prey) as outcast, Insider(owned.prey, purpose="visitor") as visitor:
        until(lambda: outcast.card.id in owned.prey.node.met)
        owned.spread(owned.charter(9, (outcast.card.id, visitor.card.id)))
        for each in (outcast, visitor):
            with pytest.raises(BROKEN):
                each.ping()
        until(lambda: outcast.card.id not in owned.prey.node.met)
    for identity in (outcast.identity, visitor.identity):
        with Insider(owned.prey, identity, purpose="visitor") as again:
            assert isinstance(again.greeting, messages.Refusal)
            assert "denied by the owner of the cluster; on owners-machine run `covey deny" in again.greeting.reason
    owned.spread(owned.charter(10))
    with Insider(owned.prey, outcast.identity) as again:
        assert isinstance(again.greeting, messages.Welcome)


def test_members_pass_a_charter_on_and_show_it_to_nodes_that_come(owned: Owned) -> None:
    with Insider(owned.prey) as member:
        member.ping()
        made = owned.charter(9, (secrets.token_bytes(32),))
        owned.spread(made)
        assert member.hear(messages.Charter) == made
    with Insider(owned.prey, purpose="visitor") as visitor:
        assert isinstance(visitor.greeting, messages.Welcome)
        assert visitor.greeting.charter == made
        visitor.say(messages.Ask())
        assert visitor.hear(messages.Tell).charter == 9


def test_a_charter_reaches_a_node_through_another_one(owned: Owned, home: Path) -> None:
    with victim(owned.prey.cluster) as second:
        until(lambda: second.node.card.id in owned.prey.node.met and owned.prey.node.card.id in second.node.met)
        made = owned.charter(9, (secrets.token_bytes(32),))
        owned.spread(made)
        until(lambda: second.node.cluster.charter == made)


def test_with_a_list_a_fresh_key_is_refused_although_it_holds_the_secret(owned: Owned) -> None:
    listed, stranger = NodeIdentity.ephemeral(), NodeIdentity.ephemeral()
    own = owned.prey.node.card.id
    owned.spread(owned.charter(9, allowed=(listed.id, own)))
    with Insider(owned.prey, listed) as welcome:
        assert isinstance(welcome.greeting, messages.Welcome)
        with Insider(owned.prey, stranger) as refused:
            assert isinstance(refused.greeting, messages.Refusal)
            assert "is waiting for approval: on owners-machine run `covey allow" in refused.greeting.reason
        welcome.say(messages.Ask())
        last = welcome.hear(messages.Tell).waiting[-1]  # the one before is the visitor that passed the charter on
        assert (last.id, last.name, last.ip) == (stranger.id, stranger.name, "127.0.0.1")
    until(lambda: clusters.waiting("prey").get(stranger.id) == stranger.name)
    # A visitor or keeper of a machine on the list has a fresh key, which the machine's first key has signed.
    endorsed = {"machine": listed.id, "endorsement": listed.private.sign(machine_words(stranger.id))}
    with Insider(owned.prey, stranger, purpose="visitor", card=endorsed) as visitor:
        assert isinstance(visitor.greeting, messages.Welcome)
    with Insider(owned.prey, NodeIdentity.ephemeral(), card=endorsed) as thief:
        assert isinstance(thief.greeting, messages.Refusal)
        assert "has not signed" in thief.greeting.reason


def test_a_node_that_was_approved_shows_the_charter_to_one_that_has_missed_it(owned: Owned) -> None:
    late, own = NodeIdentity.ephemeral(), owned.prey.node.card.id
    owned.spread(owned.charter(9, allowed=(own,)))
    forged = msgspec.structs.replace(owned.charter(10, allowed=(own, late.id)), signature=bytes(64))
    for shown in (None, owned.charter(8), forged):
        with Insider(owned.prey, late, hello={"charter": shown}) as refused:
            assert isinstance(refused.greeting, messages.Refusal)
    with Insider(owned.prey, late, hello={"charter": owned.charter(10, allowed=(own, late.id))}) as member:
        assert isinstance(member.greeting, messages.Welcome)
        assert owned.serial() == 10


def test_a_node_that_hears_that_it_is_not_on_the_list_goes_on_waiting_and_a_denied_one_does_not(owned: Owned) -> None:
    own, joining = owned.prey.node.card.id, owned.prey.joiner._formed
    owned.spread(owned.charter(9, allowed=(secrets.token_bytes(32),)))
    assert owned.serial() == 9
    assert not joining.done()
    assert "is waiting for approval" in call_on_loop(owned.prey.node.report_problems)["this node"]
    owned.show(owned.charter(10, allowed=(own,)))
    assert "this node" not in call_on_loop(owned.prey.node.report_problems)
    owned.show(owned.charter(11, (own,)))
    until(joining.done)
    assert "is denied by the owner" in str(joining.exception())


def test_denying_a_machine_denies_its_other_nodes(owned: Owned) -> None:
    first, second = NodeIdentity.ephemeral(), NodeIdentity.ephemeral()
    owned.spread(owned.charter(9, (first.id,)))
    endorsed = {"machine": first.id, "endorsement": first.private.sign(machine_words(second.id))}
    with Insider(owned.prey, second, card=endorsed) as refused:
        assert isinstance(refused.greeting, messages.Refusal)


def test_nodes_that_wait_are_bounded_however_many_come(owned: Owned) -> None:
    owned.spread(owned.charter(9, allowed=(owned.prey.node.card.id,)))
    for _ in range(messages.WAITING_NODES_LIMIT + 10):
        with Insider(owned.prey, NodeIdentity.ephemeral()) as refused:
            assert isinstance(refused.greeting, messages.Refusal)
    assert call_on_loop(lambda: len(owned.prey.node.rules.waiting())) == messages.WAITING_NODES_LIMIT
    assert len(clusters.waiting("prey")) <= messages.WAITING_NODES_LIMIT


def test_a_running_node_obeys_what_commands_write_to_the_file_within_two_seconds(owned: Owned) -> None:
    with Insider(owned.prey) as outcast, Insider(owned.prey) as other:
        until(lambda: outcast.card.id in owned.prey.node.met and other.card.id in owned.prey.node.met)
        clusters.update("prey", lambda now: replace(now, denied=frozenset({outcast.card.id})))
        until(lambda: outcast.card.id not in owned.prey.node.met)
        changed = charter.amend(clusters.load("prey"), owned.private, lambda now: (now[0] | {other.card.id}, now[1]))
        until(lambda: owned.prey.node.cluster.charter == changed.charter)
        with pytest.raises(BROKEN):
            other.ping()
    with Insider(owned.prey, outcast.identity) as again:
        assert isinstance(again.greeting, messages.Refusal)
        assert f"is denied on {owned.prey.node.card.name}" in again.greeting.reason
