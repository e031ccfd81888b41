"""What attackers leave in the audit log of a node: entries that say what they did, and never more than a few."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING

import pytest
from tests.support.attackers import (
    BROKEN,
    Insider,
    Victim,
    dial_door,
    dial_tls,
    dialling_context,
    new_cluster,
    read,
    until,
    victim,
)
from tests.support.waiting import DEADLINE

from covey.net.audit import audit_reader
from covey.net.keys.identity import NodeIdentity
from covey.runtime.state.audit import SOURCE_ENTRIES_BURST, STRANGERS_BURST
from covey.wire import door, messages
from covey.wire import formation as forming

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from covey.net.audit.audit_log import AuditEntry

CROWD = 300


def entries(prey: Victim, is_enough: Callable[[list[AuditEntry]], bool] = bool) -> list[AuditEntry]:
    """Return what is in the log as soon as that is enough."""
    deadline = time.monotonic() + DEADLINE
    while True:
        prey.node.audit.flush()
        found = list(audit_reader.entries())
        if is_enough(found):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


def of(event: str) -> Callable[[list[AuditEntry]], bool]:
    return lambda found: any(entry.event == event for entry in found)


def invade(prey: Victim, source: str) -> None:
    """Come to the door without the key."""
    sock = socket.create_connection(prey.address, timeout=DEADLINE, source_address=(source, 0))
    with sock, contextlib.suppress(*BROKEN):
        read(sock, door.CHALLENGE_BYTES)
        sock.sendall(bytes(door.DOOR_ANSWER_BYTES))
        sock.recv(1)


def test_a_stranger_with_another_secret_is_noted_with_its_address(prey: Victim) -> None:
    namesake = new_cluster(prey.cluster.name)
    with (
        contextlib.suppress(*BROKEN),
        dial_door(prey.address, namesake.secret.derive("door"), source="127.0.0.66") as sock,
    ):
        sock.recv(1)
    (entry,) = entries(prey)
    assert (entry.event, entry.cluster, entry.address, entry.node) == ("refused", "prey", "127.0.0.66", "")
    assert entry.reason.startswith("secret: ")


def test_a_stranger_that_says_nothing_is_noted(prey: Victim) -> None:
    with socket.create_connection(prey.address, timeout=DEADLINE, source_address=("127.0.0.67", 0)) as sock:
        read(sock, door.CHALLENGE_BYTES)
        (entry,) = entries(prey)
    assert (entry.event, entry.address) == ("refused", "127.0.0.67")
    assert entry.reason.startswith("silent: ")


def test_a_flood_of_strangers_is_bounded_in_the_log_and_counted(prey: Victim, home: Path) -> None:
    for number in range(CROWD):
        invade(prey, f"127.0.0.{100 + number % 3}")
    until(lambda: prey.acceptor.turned_away == CROWD)
    found = entries(prey)
    assert len(found) <= 3 * SOURCE_ENTRIES_BURST + 1
    assert len(found) <= STRANGERS_BURST
    assert sum(path.stat().st_size for path in (home / "audit").iterdir()) < 100_000
    assert {entry.address for entry in found} == {f"127.0.0.{100 + number}" for number in range(3)}


def test_the_number_of_a_flood_is_written_when_the_node_leaves() -> None:
    with victim(new_cluster()) as prey:
        for _ in range(40):
            invade(prey, "127.0.0.1")
        until(lambda: prey.acceptor.turned_away == 40)
    found = entries(prey, lambda found: sum(entry.count for entry in found) == 40)
    assert len(found) == SOURCE_ENTRIES_BURST + 1


def test_a_denied_node_and_another_version_are_noted_by_the_key_they_proved() -> None:
    outcast, other = NodeIdentity.ephemeral(), NodeIdentity.ephemeral()
    with victim(new_cluster(denied=frozenset({outcast.id}))) as prey:
        with Insider(prey, outcast) as member:
            assert isinstance(member.greeting, messages.Refusal)
        with Insider(prey, other, hello={"version": 99, "versions": None}) as member:
            assert isinstance(member.greeting, messages.Refusal)
        denied, version = entries(prey, lambda found: len(found) == 2)
    assert (denied.event, denied.node, denied.name) == ("refused", outcast.id.hex(), outcast.name)
    assert (denied.address, version.address) == ("127.0.0.1", "127.0.0.1")
    assert "denied" in denied.reason
    assert (version.event, version.node) == ("refused", other.id.hex())
    assert "protocol 99" in version.reason


@pytest.mark.parametrize("moment", ["at the door", "after the door", "after TLS"])
def test_a_dial_that_a_member_drops_is_not_noted(prey: Victim, moment: str) -> None:
    """A node dials all addresses of another, and drops all connections but the first that works."""
    secret, identity = prey.cluster.secret, NodeIdentity.ephemeral()
    key, before = secret.derive("door"), prey.acceptor.turned_away
    if moment == "at the door":
        socket.create_connection(prey.address, timeout=DEADLINE).close()
    elif moment == "after the door":
        dial_door(prey.address, key).close()
    else:
        dial_tls(prey.address, key, dialling_context(secret.derive("node-ca"), identity.private)).close()
    until(lambda: prey.acceptor.turned_away == before + 1)
    invade(prey, "127.0.0.66")
    assert [entry.address for entry in entries(prey)] == ["127.0.0.66"]


def test_a_node_that_gives_the_id_of_another_or_a_launchers_rank_is_noted(prey: Victim) -> None:
    other, rank = NodeIdentity.ephemeral(), NodeIdentity.ephemeral()
    with Insider(prey, card={"id": other.id}) as member:
        assert isinstance(member.greeting, messages.Refusal)
    with Insider(prey, rank, purpose="rank") as member:
        assert isinstance(member.greeting, messages.Refusal)
    forged, launched = entries(prey, lambda found: len(found) == 2)
    assert (forged.event, forged.node, forged.address) == ("refused", "", "127.0.0.1")
    assert forged.reason == "key: it gave an id whose key it does not have"
    assert (launched.event, launched.node) == ("refused", rank.id.hex())
    assert "a launcher cannot set them" in launched.reason


def test_a_node_that_asks_for_a_run_under_other_terms_is_noted(prey: Victim) -> None:
    with Insider(prey) as member, Insider(prey) as elsewhere:
        for each, run in ((member, "run"), (elsewhere, "another")):
            identity = each.identity
            me = forming.FoundingMember(identity.id, identity.life, identity.name, "host", b"")
            terms = forming.Terms(run, "program", 3, 2, None, f"{messages.VERSION}", "secure")
            here = forming.Here(terms, me, (), forming.Phase.JOINING)
            each.say(messages.Forming(messages.encode(here)))
            each.ping()
        found = entries(prey, of("refused"))
    (entry,) = (entry for entry in found if entry.event == "refused")
    assert (entry.node, entry.address) == (member.identity.id.hex(), "127.0.0.1")
    assert "was started with --size 3, this node --min 2" in entry.reason


def test_members_and_visitors_are_noted_when_they_are_met(prey: Victim) -> None:
    with Insider(prey) as member, Insider(prey, purpose="visitor") as visitor:
        member.ping()
        visitor.ping()
        found = entries(prey, lambda found: len(found) >= 2)
    assert {(entry.event, entry.node, entry.life, entry.address) for entry in found} == {
        ("met", member.identity.id.hex(), member.identity.life.hex(), "127.0.0.1"),
        ("visited", visitor.identity.id.hex(), visitor.identity.life.hex(), "127.0.0.1"),
    }


def test_a_new_secret_that_a_node_is_sent_is_noted_with_its_sender(prey: Victim) -> None:
    with Insider(prey, purpose="visitor") as visitor:
        visitor.say(messages.NewSecret(bytes(32), 1, 600, bytes(64)))
        visitor.hear(messages.SecretKept)
        found = entries(prey, of("secret-received"))
    (entry,) = (entry for entry in found if entry.event == "secret-received")
    assert entry.node == visitor.identity.id.hex()
    assert entry.reason.startswith("not kept: ")


@pytest.mark.parametrize("field", ["name", "host_name"])
def test_a_members_name_reaches_the_log_as_printable_text(field: str) -> None:
    outcast = NodeIdentity.ephemeral()
    forged = 'x\n{"number":1}\x1b[31m'
    with victim(new_cluster(denied=frozenset({outcast.id}))) as prey:
        with contextlib.suppress(*BROKEN), Insider(prey, outcast, card={field: forged}):
            pass
        (entry,) = entries(prey)
    assert all(text.isprintable() for text in (entry.name, entry.reason, entry.address))
    assert audit_reader.verify().problems == ()
