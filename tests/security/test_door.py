"""Strangers at the door: none gets further, all are closed at once or in time, and members still come in."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import ssl
import time
from typing import TYPE_CHECKING

import pytest
from tests.support.attackers import (
    BROKEN,
    Insider,
    call_on_loop,
    dial_door,
    hear,
    is_hung_up,
    new_cluster,
    read,
    until,
    victim,
    welcomes_members,
)
from tests.support.waiting import DEADLINE

from covey.runtime.links import acceptor
from covey.runtime.links.acceptor import NODE_STRANGERS_AT_ONCE
from covey.runtime.links.limits import SOURCE_CONNECTIONS_BURST
from covey.testing.proxy import Direction, Proxy
from covey.wire import door, messages
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    from tests.support.attackers import Victim


def visit(prey: Victim) -> socket.socket:
    sock = socket.create_connection(prey.address, timeout=DEADLINE)
    read(sock, door.CHALLENGE_BYTES)
    return sock


def client_hello() -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


GARBAGE = {
    "zeros": lambda: bytes(door.DOOR_ANSWER_BYTES),
    "random": lambda: secrets.token_bytes(door.DOOR_ANSWER_BYTES),
    "much": lambda: os.urandom(100_000),
    "a TLS ClientHello": client_hello,
    "HTTP": lambda: b"GET / HTTP/1.1\r\nHost: prey\r\nUser-Agent: scanner\r\n\r\n",
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_at_the_door_ends_the_connection_at_once(
    prey: Victim, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        acceptor, "NODE_STRANGER_SECONDS", 2 * DEADLINE
    )  # nothing else ends a connection before the test
    with visit(prey) as sock:
        sock.sendall(GARBAGE[what]())
        assert is_hung_up(sock)
    assert welcomes_members(prey)


@pytest.mark.parametrize("purpose", [*door.Purpose, 0, 4, 255])
def test_another_clusters_key_does_not_open_the_door_for_anything(prey: Victim, purpose: int) -> None:
    namesake = new_cluster(prey.cluster.name)
    with dial_door(prey.address, namesake.secret.derive("door"), purpose) as sock:
        assert is_hung_up(sock)


@pytest.mark.parametrize("purpose", ["node-ca", "mdns", "local", "grpc-ca"])
def test_a_key_for_another_purpose_does_not_open_the_door(prey: Victim, purpose: str) -> None:
    with dial_door(prey.address, prey.cluster.secret.derive(purpose)) as sock:
        assert is_hung_up(sock)


def test_the_same_secret_under_another_name_is_another_cluster(prey: Victim) -> None:
    with dial_door(prey.address, ClusterSecret("other", prey.cluster.secret.key).derive("door")) as sock:
        assert is_hung_up(sock)


def test_an_unknown_purpose_is_refused_even_with_the_key(prey: Victim) -> None:
    for purpose in (0, 4, 255):
        with dial_door(prey.address, prey.cluster.secret.derive("door"), purpose) as sock:
            assert is_hung_up(sock)


def test_an_answer_opens_one_door_once(prey: Victim) -> None:
    key = prey.cluster.secret.derive("door")
    with victim(prey.cluster) as other, visit(other) as elsewhere:
        challenge = secrets.token_bytes(16)
        stale = door.answer(key, challenge, door.Purpose.PROBE, bytes(15))
        for sock in (visit(prey), elsewhere):
            with sock:
                sock.sendall(stale)
                assert is_hung_up(sock)


def test_a_recorded_exchange_replayed_gets_no_answer(prey: Victim) -> None:
    with Proxy(prey.address) as proxy:
        relayed = type(prey)(prey.cluster, prey.endpoint, prey.node, proxy.address)
        with Insider(relayed, purpose="visitor") as honest:
            honest.ping()
        assert len(proxy.recorded(0, Direction.TO_TARGET)) > 1000
        with proxy.replay(0) as sock:
            sock.settimeout(DEADLINE)
            read(sock, door.CHALLENGE_BYTES)
            assert is_hung_up(sock)


def test_a_dialler_that_does_not_finish_its_answer_is_sent_away_in_time(
    prey: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, began = (0, 1, door.DOOR_ANSWER_BYTES - 1), time.monotonic()
    monkeypatch.setattr(acceptor, "NODE_STRANGER_SECONDS", 0.5)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(visit(prey)) for _ in counts]
        for sock, count in zip(slow, counts, strict=True):
            sock.sendall(bytes(count))
        assert all(is_hung_up(sock) for sock in slow)
    assert time.monotonic() - began >= 0.5, "no sooner: a slow dialler is not refused"
    monkeypatch.setattr(acceptor, "NODE_STRANGER_SECONDS", 2 * DEADLINE)
    for count in counts:
        with visit(prey) as sock:
            sock.sendall(bytes(count))
            sock.shutdown(socket.SHUT_WR)
            assert is_hung_up(sock)


def test_a_stranger_costs_no_more_than_a_place_at_the_door(prey: Victim) -> None:
    crowd = [visit(prey) for _ in range(3 * NODE_STRANGERS_AT_ONCE)]
    try:
        assert call_on_loop(lambda: len(prey.acceptor._strangers)) <= NODE_STRANGERS_AT_ONCE
        assert sum(is_hung_up(sock) for sock in crowd[:NODE_STRANGERS_AT_ONCE]) == NODE_STRANGERS_AT_ONCE
        assert welcomes_members(prey)
    finally:
        for sock in crowd:
            sock.close()


def test_a_crowd_from_a_members_address_does_not_lock_others_out(prey: Victim) -> None:
    """Another user of a member's host, or a host with the address of a member that is gone, has no advantage."""
    with Insider(prey):
        until(lambda: prey.acceptor.member_ips)
        crowd = [visit(prey) for _ in range(2 * NODE_STRANGERS_AT_ONCE)]
        try:
            with dial_door(prey.address, prey.cluster.secret.derive("door"), door.Purpose.PROBE, "127.0.0.77") as sock:
                sock.sendall(b"ping1234")
                assert read(sock, 8) == b"ping1234"
        finally:
            for sock in crowd:
                sock.close()


def test_strangers_leave_one_line_in_the_log_however_many_they_are(
    prey: Victim, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "covey")
    before = prey.acceptor.turned_away
    for _ in range(200):
        with visit(prey) as sock:
            sock.sendall(secrets.token_bytes(door.DOOR_ANSWER_BYTES))
            assert is_hung_up(sock)
    until(lambda: prey.acceptor.turned_away >= before + 200)
    lines = [record for record in caplog.records if record.name == "covey" and "has refused" in record.message]
    assert len(lines) <= 1


def test_the_right_key_gets_in(prey: Victim) -> None:
    with dial_door(prey.address, prey.cluster.secret.derive("door"), door.Purpose.PROBE) as sock:
        sock.sendall(b"ping5678")
        assert read(sock, 8) == b"ping5678"
    with Insider(prey) as member:
        assert isinstance(member.greeting, messages.Welcome)
        member.ping()
    with pytest.raises(BROKEN), dial_door(prey.address, bytes(32)) as sock:
        hear(sock)


def test_a_crowd_without_the_key_is_counted_and_members_get_in_meanwhile(prey: Victim) -> None:
    with Insider(prey) as member:
        member.ping()
        before = prey.acceptor.turned_away
        for _ in range(2 * int(SOURCE_CONNECTIONS_BURST)):
            with contextlib.suppress(OSError), socket.create_connection(prey.address, source_address=("127.0.0.8", 0)):
                pass
        assert welcomes_members(prey)
        until(lambda: prey.acceptor.turned_away >= before + 2 * SOURCE_CONNECTIONS_BURST)
        member.say(messages.Ask())
        told = member.hear(messages.Tell)
        assert told.too_many == prey.acceptor.arrivals.refused > 0
        assert told.turned_away == prey.acceptor.turned_away
