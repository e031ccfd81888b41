"""Behind the door: only a node with a certificate of the cluster is heard, only by its own name, on both sides."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import ssl
import threading
from typing import TYPE_CHECKING, Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.support.attackers import (
    BROKEN,
    LOOPBACK,
    Insider,
    Tls,
    Victim,
    call_on_loop,
    card_of,
    dial_door,
    dial_tls,
    dialling_context,
    hear,
    is_hung_up,
    new_cluster,
    on_loop,
    read,
    until,
    victim,
    welcomes_members,
)
from tests.support.waiting import DEADLINE

from covey.base.errors import AuthError, ConnectError
from covey.base.numbers import Seat
from covey.net.audit import audit_reader
from covey.net.keys import tls
from covey.net.keys.identity import NodeIdentity
from covey.net.keys.tls import Credentials, signed_certificate
from covey.runtime import loop as control
from covey.runtime.environment import LaunchedRank
from covey.runtime.joining.launched_links import LaunchedLinks, launched_node
from covey.runtime.links import acceptor, handshake
from covey.runtime.links import link as link_module
from covey.runtime.links.acceptor import Acceptor
from covey.runtime.links.handshake import LinkCredentials, RefusedError, dial
from covey.runtime.peers.endpoint import cluster_endpoint
from covey.runtime.peers.hints import Hint
from covey.runtime.peers.peer_table import ranks_of
from covey.testing.proxy import Direction, Proxy
from covey.wire import decoding, door, messages
from covey.wire.versions import only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from covey.runtime.joining.node import NodeParts


def hello(identity: NodeIdentity, **changes: Any) -> messages.Hello:
    values: dict[str, Any] = {
        "version": messages.VERSION, "nonce": secrets.token_bytes(32), "purpose": "candidate", "run": "run",
        "rank": -1, "size": 0, "lanes": "secure", "card": card_of(identity),
    }  # fmt: skip
    return messages.Hello(**(values | changes))


# Diallers with wrong certificates


def no_certificate(_prey: Victim) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([tls.LINK_PROTOCOL])
    return context


def self_signed(_prey: Victim) -> ssl.SSLContext:
    own = Ed25519PrivateKey.generate()
    return dialling_context(own.private_bytes_raw(), own)


def other_clusters_authority(prey: Victim) -> ssl.SSLContext:
    return dialling_context(new_cluster(prey.cluster.name).secret.derive("node-ca"))


def other_purpose(prey: Victim) -> ssl.SSLContext:
    return dialling_context(prey.cluster.secret.derive("grpc-ca"))


def mdns_key_as_authority(prey: Victim) -> ssl.SSLContext:
    return dialling_context(prey.cluster.secret.derive("mdns"))


def signed_by_a_member(prey: Victim) -> ssl.SSLContext:
    """A chain: the authority signed a member, which signed the attacker."""
    member, own = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    authority = Ed25519PrivateKey.from_private_bytes(prey.cluster.secret.derive("node-ca"))
    middle = signed_certificate(authority, member.public_key(), "covey node", is_authority=False)
    leaf = signed_certificate(member, own.public_key(), "covey node", is_authority=False)
    context = no_certificate(prey)
    chain = leaf.public_bytes(serialization.Encoding.PEM) + middle.public_bytes(serialization.Encoding.PEM)
    load(context, own, chain)
    return context


def wrong_protocol(prey: Victim) -> ssl.SSLContext:
    context = dialling_context(prey.cluster.secret.derive("node-ca"))
    context.set_alpn_protocols(["h2", "covey/0"])
    return context


def no_protocol(prey: Victim) -> ssl.SSLContext:
    member = Ed25519PrivateKey.generate()
    authority = Ed25519PrivateKey.from_private_bytes(prey.cluster.secret.derive("node-ca"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    leaf = signed_certificate(authority, member.public_key(), "covey node", is_authority=False)
    load(context, member, leaf.public_bytes(serialization.Encoding.PEM))
    return context


def old_tls(prey: Victim) -> ssl.SSLContext:
    context = dialling_context(prey.cluster.secret.derive("node-ca"))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def load(context: ssl.SSLContext, private: Ed25519PrivateKey, chain: bytes) -> None:
    key = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with tls.readable_once(key + chain) as path:
        context.load_cert_chain(path)


IMPOSTORS: list[Callable[[Victim], ssl.SSLContext]] = [
    no_certificate,
    self_signed,
    other_clusters_authority,
    other_purpose,
    mdns_key_as_authority,
    signed_by_a_member,
    wrong_protocol,
    no_protocol,
    old_tls,
]


@pytest.mark.parametrize("papers", IMPOSTORS)
def test_wrong_papers_are_refused_before_anything_is_heard(
    prey: Victim, papers: Callable[[Victim], ssl.SSLContext], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    before = prey.acceptor.turned_away
    context = papers(prey)
    identity = NodeIdentity.ephemeral()

    def intrude() -> None:
        with dial_tls(prey.address, prey.cluster.secret.derive("door"), context) as secured:
            secured.sendall(decoding.frame(messages.encode(hello(identity))))
            hear(secured)

    with pytest.raises(BROKEN):
        intrude()
    until(lambda: prey.acceptor.turned_away > before)
    assert not prey.node.met
    assert not prey.node.problems.refusals
    lines = [record.getMessage() for record in caplog.records if record.name != "asyncio"]
    assert len(lines) == 1
    assert "refused" in lines[0]
    assert welcomes_members(prey)


def test_a_certificate_is_good_at_any_time(prey: Victim) -> None:
    """A board whose clock starts in 1970 or that of a careless owner in 2100 joins like any other."""
    authority = Ed25519PrivateKey.from_private_bytes(prey.cluster.secret.derive("node-ca"))
    leaf = signed_certificate(authority, authority.public_key(), "covey node", is_authority=False)
    assert leaf.not_valid_before_utc.year == 2000
    assert leaf.not_valid_after_utc.year == 9999


def test_a_certificate_that_only_openssl_can_read_is_refused_in_one_line(
    prey: Victim, caplog: pytest.LogCaptureFixture
) -> None:
    """A member can sign anything for itself, also what the library that reads the key chokes on."""
    own = Ed25519PrivateKey.generate()
    authority = Ed25519PrivateKey.from_private_bytes(prey.cluster.secret.derive("node-ca"))
    good = signed_certificate(authority, own.public_key(), "covey node", is_authority=False)
    body = good.tbs_certificate_bytes.replace(b"\x02\x01\x02", b"\x02\x01\xfe", 1)  # an impossible version
    der = good.public_bytes(serialization.Encoding.DER)
    start = der.index(good.tbs_certificate_bytes)
    odd = der[:start] + body + der[start + len(body) : -64] + authority.sign(body)
    context = no_certificate(prey)
    load(context, own, ssl.DER_cert_to_PEM_cert(odd).encode())
    before = prey.acceptor.turned_away
    for _ in range(5):
        key = prey.cluster.secret.derive("door")
        with contextlib.suppress(*BROKEN), dial_tls(prey.address, key, context) as secured:
            secured.sendall(b"\0")
            hear(secured)
    until(lambda: prey.acceptor.turned_away >= before + 5 or caplog.records)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


# What is said first


def test_a_member_cannot_pose_as_another(prey: Victim) -> None:
    other = NodeIdentity.ephemeral()
    with Insider(prey, card={"id": other.id, "life": other.life}) as member:
        assert isinstance(member.greeting, messages.Refusal)
        assert "key" in member.greeting.reason
        assert is_hung_up(member.link)
    with Insider(prey, card={"id": prey.node.card.id}) as member:
        assert isinstance(member.greeting, messages.Refusal)
    with Insider(prey, card={"id": b""}) as member:
        assert isinstance(member.greeting, messages.Refusal)
    assert not prey.node.met


def test_another_version_is_refused_with_the_reason(prey: Victim) -> None:
    mine, other = messages.VERSION, messages.VERSION + 1
    with Insider(prey, hello={"version": other, "versions": None}) as member:
        assert isinstance(member.greeting, messages.Refusal)
        assert not member.greeting.retry
        assert f"speaks protocol {other}" in member.greeting.reason
        assert f"speaks {mine}" in member.greeting.reason
    assert any(f"protocol {other}" in reason for reason in prey.node.problems.refusals.values())


def test_a_denied_node_is_refused_by_name_whichever_node_dials() -> None:
    outcast = NodeIdentity.ephemeral()
    with victim(new_cluster(denied=frozenset({outcast.id}))) as prey:
        for purpose in ("candidate", "visitor", "rank"):
            with Insider(prey, outcast, purpose=purpose) as member:
                assert isinstance(member.greeting, messages.Refusal)
                assert "denied" in member.greeting.reason
        same = type(prey.cluster)(prey.cluster.secret)
        with victim(same, outcast) as other:
            addresses = other.node.card.contact.addresses
            on_loop(prey.node.dial(Hint(addresses)))
            assert outcast.id not in prey.node.met
        assert any("denied" in reason for reason in prey.node.problems.refusals.values())
        assert welcomes_members(prey)


def launched(
    cluster: Any, rank: int, size: int, contacts: dict[Seat, messages.Contact] | None = None
) -> tuple[NodeParts, tuple[str, int]]:
    """A rank that a launcher started on several hosts, with the cluster's secret."""
    endpoint = cluster_endpoint(cluster, LOOPBACK, run="run", ports=(0,), identity=NodeIdentity.ephemeral())
    node, _ = launched_node(
        LaunchedRank(rank=rank, size=size), LOOPBACK, endpoint, ranks_of(size, rank, contacts or {})
    )
    return node, ("127.0.0.1", endpoint.card.contact.addresses[0].port)


def launched_links(node: NodeParts) -> LaunchedLinks:
    assert isinstance(node.links, LaunchedLinks)
    return node.links


@contextlib.contextmanager
def launching(node: NodeParts) -> Iterator[None]:
    future = control.start(launched_links(node).form(within=DEADLINE))
    try:
        yield
    finally:
        future.cancel()
        node.close()


def test_a_denied_node_is_no_rank_of_a_launcher_either() -> None:
    outcast = NodeIdentity.ephemeral()
    cluster = new_cluster(denied=frozenset({outcast.id}))
    node, address = launched(cluster, 0, 2)
    with launching(node):
        prey = Victim(cluster, None, None, address)  # type: ignore[arg-type]
        with Insider(prey, outcast, purpose="rank", hello={"rank": 1, "size": 2}) as member:
            assert isinstance(member.greeting, messages.Refusal)


def test_a_node_that_is_not_on_the_list_is_no_rank_of_a_launcher() -> None:
    listed, other = NodeIdentity.ephemeral(), NodeIdentity.ephemeral()
    cluster = new_cluster(charter=messages.Charter(1, "owners-machine", (), (listed.id,)))
    node, address = launched(cluster, 0, 2)
    with launching(node):
        prey = Victim(cluster, None, None, address)  # type: ignore[arg-type]
        with Insider(prey, other, purpose="rank", hello={"rank": 1, "size": 2}) as member:
            assert isinstance(member.greeting, messages.Refusal)
            assert "waiting for approval: on owners-machine" in member.greeting.reason
        with Insider(prey, listed, purpose="rank", hello={"rank": 1, "size": 2}) as member:
            assert isinstance(member.greeting, messages.Welcome)


def test_what_a_rank_of_a_launcher_refuses_is_in_the_audit_log(home: Path) -> None:
    cluster, members = new_cluster(), [NodeIdentity.ephemeral() for _ in range(3)]
    node, address = launched(cluster, 0, 2)
    changes: dict[str, dict[str, Any]] = {
        "candidate": {}, "rank": {"rank": 0, "size": 2}, "newcomer": {"rank": 1, "size": 3, "purpose": "rank"},
    }  # fmt: skip
    with launching(node):
        prey = Victim(cluster, None, None, address)  # type: ignore[arg-type]
        for identity, (purpose, hello) in zip(members, changes.items(), strict=True):
            with Insider(prey, identity, purpose=purpose, hello=hello) as member:
                assert isinstance(member.greeting, messages.Refusal)
        with Insider(prey, members[0], purpose="newcomer", hello={"rank": 1}) as member:
            assert member.greeting == messages.Refusal("the run has not begun", retry=True)
        node.audit.flush()
        found = list(audit_reader.entries())
    assert [(entry.event, entry.node, entry.address) for entry in found] == [
        ("refused", identity.id.hex(), "127.0.0.1") for identity in members
    ]
    for entry, text in zip(found, ("launcher", "must not dial", "size is 3 on rank 1"), strict=True):
        assert text in entry.reason


def test_a_dialled_rank_that_turns_out_to_be_another_is_not_taken_for_it() -> None:
    """An attacker that holds the wire can lead a connection to another rank: that must not exchange their numbers."""
    cluster = new_cluster()
    one, address = launched(cluster, 1, 3)
    with launching(one), Proxy(address) as proxy:
        led_astray = messages.Contact(one.host, (messages.Address(*proxy.address),), "")
        two, _ = launched(cluster, 2, 3, {Seat(0): led_astray})
        assembly = launched_links(two).assembly
        with launching(two):
            until(lambda: proxy.connections() and (two.peers[Seat(0)].link or assembly._complaint or assembly._refusal))
            assert two.peers[Seat(0)].link is None


def test_an_identity_in_use_is_refused_and_named(prey: Victim) -> None:
    first = NodeIdentity.ephemeral()
    copy = NodeIdentity(first.private, 1)
    with Insider(prey, first):
        until(lambda: prey.node.met)
        with Insider(prey, copy) as second:
            assert isinstance(second.greeting, messages.Refusal)
            assert f"in use by process {os.getpid()} on host" in second.greeting.reason
        assert [remote.card.life for remote in prey.node.met.values()] == [first.life]


@pytest.mark.parametrize(
    "what",
    [
        b"\xff\xff\xff\xff",
        decoding.FRAME_LENGTH.pack(decoding.CONTROL_LIMIT + 1),
        decoding.frame(b""),
        decoding.frame(b"\xc1"),
        decoding.frame(secrets.token_bytes(4000)),
        decoding.frame(b"\x91" * 100_000),
        decoding.frame(messages.encode(messages.Welcome(0, card_of(NodeIdentity.ephemeral())))),
        decoding.frame(messages.encode(messages.Ping(1))),
    ],
    ids=["4 GiB", "too long", "empty", "no msgpack", "random", "deep", "Welcome", "Ping"],
)
def test_a_dialler_that_does_not_say_hello_is_cut_off(
    prey: Victim, what: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_for_greetings(monkeypatch, 2 * DEADLINE)  # no lack of time ends the connection
    secret = prey.cluster.secret
    with dial_tls(prey.address, secret.derive("door"), dialling_context(secret.derive("node-ca"))) as secured:
        secured.sendall(what)
        assert is_hung_up(secured)
    assert not prey.node.met


def allow_for_greetings(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for module in (acceptor, handshake, link_module):
        monkeypatch.setattr(module, "HANDSHAKE_SECONDS", seconds)


def test_a_dialler_that_does_not_finish_its_hello_is_cut_off_in_time(
    prey: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_for_greetings(monkeypatch, 0.5)
    secret = prey.cluster.secret
    key, context = secret.derive("door"), dialling_context(secret.derive("node-ca"))
    with dial_door(prey.address, key) as silent, dial_door(prey.address, key) as slow:
        slow.sendall(b"\x16\x03\x01\x02\x00\x01")  # a part of a ClientHello
        assert is_hung_up(silent)
        assert is_hung_up(slow)
    for part in (b"", decoding.FRAME_LENGTH.pack(1000) + bytes(999)):
        with contextlib.suppress(*BROKEN), dial_tls(prey.address, key, context) as secured:  # or before TLS is done
            secured.sendall(part)
            assert is_hung_up(secured)


# Acceptors with wrong certificates


@contextlib.contextmanager
def impostor(serve: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """A server that lets every dialler through its door and then does as it likes."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(DEADLINE)

    def main() -> None:
        with contextlib.suppress(*BROKEN):
            sock, _ = listener.accept()
            with sock, contextlib.suppress(*BROKEN):
                sock.settimeout(DEADLINE)
                sock.sendall(bytes(door.CHALLENGE_BYTES))
                read(sock, door.DOOR_ANSWER_BYTES)
                serve(sock)

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        listener.close()
        thread.join(DEADLINE)


def accept_with(context: ssl.SSLContext, answer: Callable[[messages.Hello], Any]) -> Callable[[socket.socket], None]:
    context.verify_mode = ssl.CERT_NONE

    def serve(sock: socket.socket) -> None:
        with context.wrap_socket(sock, server_side=True) as secured:
            greeting = messages.decode_handshake(hear(secured))
            assert isinstance(greeting, messages.Hello)
            secured.sendall(decoding.frame(messages.encode(answer(greeting))))
            hear(secured)

    return serve


def handshake_with(address: tuple[str, int], cluster: Any) -> Any:
    identity = NodeIdentity.ephemeral()
    credentials = LinkCredentials(
        cluster.secret.derive("door"), tls=Credentials(cluster.secret.derive("node-ca"), identity.private)
    )
    link, welcome, peer = on_loop(dial(address, credentials, hello(identity)))
    call_on_loop(link.abort)
    return welcome, peer


@pytest.mark.parametrize("purpose", ["another cluster", "grpc-ca", "self-signed"])
def test_a_caller_gets_an_autherror_from_a_server_with_the_wrong_certificate(purpose: str) -> None:
    cluster, own = new_cluster(), Ed25519PrivateKey.generate()
    seed = {
        "another cluster": new_cluster(cluster.name).secret.derive("node-ca"),
        "grpc-ca": cluster.secret.derive("grpc-ca"),
        "self-signed": own.private_bytes_raw(),
    }[purpose]
    serve = accept_with(Credentials(seed, own).accepting, lambda _hello: messages.Refusal("?", retry=True))
    with impostor(serve) as address, pytest.raises(AuthError):
        handshake_with(address, cluster)


def test_a_caller_gets_an_autherror_from_a_member_that_poses_as_another() -> None:
    cluster, own, other = new_cluster(), NodeIdentity.ephemeral(), NodeIdentity.ephemeral()
    credentials = Credentials(cluster.secret.derive("node-ca"), own.private)
    serve = accept_with(credentials.accepting, lambda _hello: messages.Welcome(-1, card_of(other), "candidate"))
    with impostor(serve) as address, pytest.raises(AuthError, match="poses"):
        handshake_with(address, cluster)


def test_a_caller_is_not_fooled_by_old_tls_another_protocol_or_silence() -> None:
    cluster = new_cluster()
    seed = cluster.secret.derive("node-ca")
    old, odd = (Credentials(seed, Ed25519PrivateKey.generate()).accepting for _ in range(2))
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    odd.set_alpn_protocols(["h2"])
    for serve in (
        accept_with(old, lambda _hello: messages.Refusal("?", retry=True)),
        accept_with(odd, lambda _hello: messages.Refusal("?", retry=True)),
        lambda sock: sock.close(),
        lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    ):
        with impostor(serve) as address, pytest.raises((AuthError, ConnectError)):
            handshake_with(address, cluster)


def test_a_caller_with_the_wrong_secret_learns_so(prey: Victim) -> None:
    with pytest.raises(ConnectError, match="did not accept this cluster's secret"):
        handshake_with(prey.address, new_cluster(prey.cluster.name))


def test_a_refused_caller_is_told_why(prey: Victim) -> None:
    identity, secret = NodeIdentity.ephemeral(), prey.cluster.secret
    credentials = LinkCredentials(secret.derive("door"), tls=Credentials(secret.derive("node-ca"), identity.private))
    with pytest.raises(RefusedError, match="speaks protocol 9"):
        on_loop(dial(prey.address, credentials, hello(identity, versions=only(9))))


# An attacker between two nodes


@contextlib.contextmanager
def led_astray(cluster: Any, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    """An honest node dials a stranger, which does with the connection as it likes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def main() -> None:
        caller, _ = listener.accept()
        with caller, contextlib.suppress(*BROKEN):
            caller.settimeout(DEADLINE)
            serve(caller)

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    try:
        with pytest.raises((AuthError, ConnectError)):
            handshake_with(listener.getsockname(), cluster)
        thread.join(DEADLINE)
        assert not thread.is_alive()
        yield
    finally:
        listener.close()


def anyones_context() -> ssl.SSLContext:
    """What a stranger dials with: it has no certificate, and takes any."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([tls.LINK_PROTOCOL])
    return context


def test_a_stranger_that_passes_on_an_answer_to_the_door_sees_no_certificate(prey: Victim) -> None:
    """It leads one node to itself, has it answer the challenge of another, and goes on by itself."""
    seen: list[Any] = []

    def relay(caller: socket.socket) -> None:
        with socket.create_connection(prey.address, timeout=DEADLINE) as sock:
            caller.sendall(read(sock, door.CHALLENGE_BYTES))
            answer = read(caller, door.DOOR_ANSWER_BYTES)
            own = Tls(anyones_context())
            sock.sendall(answer + own.hello)
            with contextlib.suppress(*BROKEN):
                own.shake_hands(sock)
            seen.append(own.getpeercert())

    before = prey.acceptor.turned_away
    with led_astray(prey.cluster, relay):
        assert seen == [None]
        until(lambda: prey.acceptor.turned_away > before)
        assert not prey.node.met


def test_a_stranger_that_passes_everything_on_sees_nothing_that_names_a_node_or_its_cluster(prey: Victim) -> None:
    with Proxy(prey.address) as proxy:
        welcome, peer = handshake_with(proxy.address, prey.cluster)
        assert welcome.card.id == peer
        seen = proxy.recorded(0, Direction.TO_TARGET) + proxy.recorded(0, Direction.TO_CLIENT)
    assert len(seen) > 1000
    authority = Ed25519PrivateKey.from_private_bytes(prey.cluster.secret.derive("node-ca")).public_key()
    names = (welcome.card.name, prey.cluster.name, "covey node", "covey authority")
    for telling in (peer, authority.public_bytes_raw(), *(name.encode() for name in names)):
        assert telling not in seen


def test_an_answer_to_the_door_is_good_for_one_client_hello_only(prey: Victim) -> None:
    key, context = prey.cluster.secret.derive("door"), dialling_context(prey.cluster.secret.derive("node-ca"))
    for follows in (Tls(context).hello, Tls(anyones_context()).hello, b"", b"\x16\x03\x01\x00\x01\x00"):
        meant = Tls(context)
        with socket.create_connection(prey.address, timeout=DEADLINE) as sock:
            challenge = read(sock, door.CHALLENGE_BYTES)
            sock.sendall(door.answer(key, challenge, door.Purpose.LINK, door.bind(meant.hello)) + follows)
            if not follows:
                sock.shutdown(socket.SHUT_WR)
            assert is_hung_up(sock)
    assert welcomes_members(prey)


def test_a_certificate_names_no_key_but_its_own() -> None:
    own, authority = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    leaf = signed_certificate(authority, own.public_key(), "covey node", is_authority=False)
    assert [type(extension.value).__name__ for extension in leaf.extensions] == ["BasicConstraints", "KeyUsage"]
    key = authority.public_key()
    identifier = x509.SubjectKeyIdentifier.from_public_key(key).digest
    der = leaf.public_bytes(serialization.Encoding.DER)
    assert key.public_bytes_raw() not in der
    assert identifier not in der


def test_a_connection_led_to_another_node_is_known_as_that_nodes(prey: Victim) -> None:
    with victim(prey.cluster) as other, Proxy(other.address) as proxy:
        welcome, peer = handshake_with(proxy.address, prey.cluster)
        assert welcome.card.id == peer == other.node.card.id != prey.node.card.id


def test_an_altered_handshake_makes_no_link(prey: Victim) -> None:
    for way, places in (
        (Direction.TO_TARGET, (0, 20, 60, 120, 400, 900)),
        (Direction.TO_CLIENT, (3, 20, 80, 200, 400, 900)),
    ):
        for place in places:
            with Proxy(prey.address) as proxy:
                proxy.flip_bit(way, place)
                with pytest.raises((AuthError, ConnectError)):
                    handshake_with(proxy.address, prey.cluster)
                assert proxy.flips_done
    assert welcomes_members(prey)


def test_the_door_stays_closed_to_interfaces_that_are_excluded(home: Path) -> None:
    key = secrets.token_bytes(32)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    address = listener.getsockname()
    acceptor = call_on_loop(lambda: Acceptor([listener], key, "test", allows=lambda _ip: False))
    call_on_loop(acceptor.open)
    try:
        with pytest.raises(BROKEN), dial_door(address, key):
            pass
    finally:
        on_loop(acceptor.close())
