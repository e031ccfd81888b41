"""Only members that the owner of a machine named may start programs, by their keys."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covey.agent.agent import Permission
from covey.net.keys.identity import NodeIdentity, id_text, node_name
from covey.wire.messages import Card, Contact


def card_of(identity: NodeIdentity, *, machine: bytes = b"", endorsement: bytes = b"", name: str = "") -> Card:
    """Return the card of a node, which may claim another name or machine than its own."""
    return Card(
        identity.id, identity.life, name or identity.name, "north", 1, Contact("host", (), ""),
        machine=machine or identity.machine, endorsement=endorsement or identity.endorsement,
    )  # fmt: skip


HERE, NORTH = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
OWN, ALLOWED = HERE.public_key().public_bytes_raw(), NORTH.public_key().public_bytes_raw()


def terminal_of(machine: Ed25519PrivateKey) -> NodeIdentity:
    """Return the identity of a command: a new key, which the machine has signed."""
    return NodeIdentity(Ed25519PrivateKey.generate(), 1, machine=machine)


def test_without_a_list_only_this_machine_itself_may() -> None:
    permission = Permission(OWN, here="here")
    assert permission.objection(card_of(terminal_of(HERE))) == ""
    assert permission.objection(card_of(NodeIdentity(HERE, 1))) == ""
    text = permission.objection(card_of(terminal_of(NORTH)))
    assert f"--allow {id_text(ALLOWED)}" in text
    assert text.startswith(f"{node_name('north', ALLOWED)} may not use here"), "as that machine calls itself everywhere"


def test_commands_of_a_machine_on_the_list_may() -> None:
    permission = Permission(OWN, frozenset({ALLOWED}))
    assert permission.objection(card_of(terminal_of(NORTH))) == ""
    assert permission.objection(card_of(terminal_of(Ed25519PrivateKey.generate()))) != ""
    assert permission.objection(card_of(NodeIdentity.ephemeral())) != ""


def test_a_name_or_a_machine_that_a_node_only_claims_does_not_help() -> None:
    permission = Permission(OWN, frozenset({ALLOWED}))
    stranger, real = NodeIdentity.ephemeral(), terminal_of(NORTH)
    for machine in (OWN, ALLOWED):
        assert "has not signed" in permission.objection(card_of(stranger, machine=machine))
        assert "has not signed" in permission.objection(
            card_of(stranger, machine=machine, endorsement=real.endorsement)
        )
    assert permission.objection(card_of(stranger, name=real.name)) != ""


def test_all_means_every_member_whose_card_is_genuine() -> None:
    permission = Permission(OWN, is_for_all=True)
    assert permission.objection(card_of(NodeIdentity.ephemeral())) == ""
    assert permission.objection(card_of(NodeIdentity.ephemeral(), machine=ALLOWED)) != ""
