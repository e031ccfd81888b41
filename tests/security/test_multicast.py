"""Strangers on the same network's multicast: what they repeat or invent costs little, and leads nobody astray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import socket
import time
from typing import TYPE_CHECKING

import pytest
from tests.security.attackers import call_on_loop, new_cluster, resident_bytes, until, victim, welcomes_members
from zeroconf import DNSAddress, DNSOutgoing, DNSPointer, DNSService, DNSText
from zeroconf.const import _CLASS_IN, _TYPE_A, _TYPE_PTR, _TYPE_SRV, _TYPE_TXT

from covey.wire import beacon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.security.attackers import Victim

GROUP = ("224.0.0.251", 5353)
GROWTH = 30 << 20
ANSWER = 0x8400


@contextlib.contextmanager
def microphone() -> Iterator[socket.socket]:
    """A socket that speaks to everybody on loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
        sock.bind(("127.0.0.1", 0))
        yield sock


def announcement(txt: dict[bytes, bytes], ip: str, port: int) -> bytes:
    """An announcement under a new name."""
    name = f"{secrets.token_hex(8)}.{beacon.SERVICE}"
    host = f"{secrets.token_hex(8)}.local."
    text = b"".join(bytes((len(key) + 1 + len(value),)) + key + b"=" + value for key, value in txt.items())
    out = DNSOutgoing(ANSWER)
    for record in (
        DNSPointer(beacon.SERVICE, _TYPE_PTR, _CLASS_IN, 120, name),
        DNSService(name, _TYPE_SRV, _CLASS_IN, 120, 0, 0, port, host),
        DNSText(name, _TYPE_TXT, _CLASS_IN, 120, text),
        DNSAddress(host, _TYPE_A, _CLASS_IN, 120, socket.inet_aton(ip)),
    ):
        out.add_answer_at_time(record, 0)
    return out.packets()[0]


def heard(prey: Victim) -> int:
    return sum(observation.heard for observation in prey.node.search.beacon.observed())


def tasks() -> int:
    return call_on_loop(lambda: len(asyncio.all_tasks()))


def say(prey: Victim, packets: list[bytes]) -> None:
    """Say everything, as fast as it is heard."""
    with microphone() as sock:
        for number, packet in enumerate(packets):
            before = heard(prey)
            sock.sendto(packet, GROUP)
            if number % 20 == 0:
                until(lambda before=before: heard(prey) > before)  # type: ignore[misc]


def test_announcements_repeated_with_other_addresses_are_followed_a_few_at_a_time(
    prey: Victim, caplog: pytest.LogCaptureFixture
) -> None:
    until(lambda: any(observation.announced for observation in prey.node.search.beacon.observed()))
    key = prey.cluster.secret.derive("mdns")
    txt = beacon.make(key, secrets.token_bytes(16), 9)  # what a member said once, and anybody heard
    memory, before = resident_bytes(), tasks()
    say(prey, [announcement(txt, f"127.9.{n >> 8}.{n & 255}", 9) for n in range(1, 1500)])
    assert sum(observation.matching for observation in prey.node.search.beacon.observed()) > 100
    assert tasks() - before < 300
    assert resident_bytes() - memory < GROWTH
    assert welcomes_members(prey)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_announcements_of_strangers_are_never_dialled(prey: Victim) -> None:
    until(lambda: any(observation.announced for observation in prey.node.search.beacon.observed()))
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.0)
        port = trap.getsockname()[1]
        foreign = beacon.make(secrets.token_bytes(32), secrets.token_bytes(16), port)
        moved = beacon.make(prey.cluster.secret.derive("mdns"), secrets.token_bytes(16), port + 1)
        halves = [{b"v": b"1"}, {b"v": b"1", b"n": b"0" * 32, b"t": b"0" * 32}, {b"": b""}]
        say(prey, [announcement(txt, "127.0.0.1", port) for txt in (foreign, moved, *halves) for _ in range(3)])
        with victim(prey.cluster) as friend:  # found by the same ways, after all of that was heard
            until(lambda: friend.node.card.id in prey.node.met)
        with pytest.raises(BlockingIOError):
            trap.accept()


def test_garbage_on_multicast_is_passed_over(prey: Victim, caplog: pytest.LogCaptureFixture) -> None:
    until(lambda: any(observation.announced for observation in prey.node.search.beacon.observed()))
    rng = random.Random(5)
    good = announcement(beacon.make(bytes(32), bytes(16), 9), "127.0.0.1", 9)
    loop = b"\0\0\x84\0\0\0\0\1\0\0\0\0" + b"\xc0\x0c" + b"\0\x0c\0\1\0\0\0\x78\0\2\xc0\x0c"
    packets = [rng.randbytes(rng.randrange(1, 1400)) for _ in range(100)] + [loop]
    for _ in range(200):
        spoiled = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            spoiled[rng.randrange(len(good))] = rng.randrange(256)
        packets.append(bytes(spoiled[: rng.randrange(1, len(good))] if rng.random() < 0.3 else spoiled))
    began = time.monotonic()
    say(prey, packets)
    assert welcomes_members(prey)
    assert time.monotonic() - began < 10
    with victim(prey.cluster) as friend:
        until(lambda: friend.node.card.id in prey.node.met)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_two_announcements_of_one_node_have_nothing_in_common_but_the_port() -> None:
    cluster = new_cluster()
    key = cluster.secret.derive("mdns")
    one, other = (beacon.make(key, secrets.token_bytes(16), 47700) for _ in range(2))
    assert {name for name in one if one[name] == other[name]} == {b"v"}
