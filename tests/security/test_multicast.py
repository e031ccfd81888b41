"""Strangers on the same network's multicast: what they repeat or invent costs little, and leads no node astray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import select
import socket
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.attackers import call_on_loop, new_cluster, resident_bytes, until, victim, welcomes_members
from tests.support.waiting import DEADLINE
from zeroconf._dns import DNSAddress, DNSPointer, DNSService, DNSText
from zeroconf._protocol.outgoing import DNSOutgoing
from zeroconf.const import _CLASS_IN, _TYPE_A, _TYPE_PTR, _TYPE_SRV, _TYPE_TXT

from covey.net.discovery import sieve
from covey.wire import beacon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.attackers import Victim

GROUP = ("224.0.0.251", 5353)
GROWTH = 30 << 20
ANSWER = 0x8400


@contextlib.contextmanager
def microphone(ip: str = "127.0.0.1") -> Iterator[socket.socket]:
    """A socket that speaks to every process on loopback, as a machine of its own."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
        sock.bind((ip, 0))
        yield sock


def announcement(txt: dict[bytes, bytes], ip: str, port: int, ttl: int = 120) -> bytes:
    """An announcement under a new name; `ip` is in an address record, outside of the tag."""
    name = f"{secrets.token_hex(8)}.{beacon.SERVICE}"
    host = f"{secrets.token_hex(8)}.local."
    text = b"".join(bytes((len(key) + 1 + len(value),)) + key + b"=" + value for key, value in txt.items())
    out = DNSOutgoing(ANSWER)
    for record in (
        DNSPointer(beacon.SERVICE, _TYPE_PTR, _CLASS_IN, ttl, name),
        DNSService(name, _TYPE_SRV, _CLASS_IN, ttl, 0, 0, port, host),
        DNSText(name, _TYPE_TXT, _CLASS_IN, ttl, text),
        DNSAddress(host, _TYPE_A, _CLASS_IN, ttl, socket.inet_aton(ip)),
    ):
        out.add_answer_at_time(record, 0)
    return out.packets()[0]


def made(prey: Victim, port: int, *ips: str, key: bytes | None = None) -> dict[bytes, bytes]:
    """The text of an announcement, by a member or by the holder of another key."""
    key = prey.cluster.secret.derive("mdns") if key is None else key
    return beacon.make(key, secrets.token_bytes(16), port, ips)


def observed(prey: Victim) -> Any:
    (observation,) = prey.node.search.beacon.observed()
    return observation


def wait_until_announced(prey: Victim) -> None:
    until(lambda: any(each.announced for each in prey.node.search.beacon.observed()))


def tasks() -> int:
    return call_on_loop(lambda: len(asyncio.all_tasks()))


def say(prey: Victim, packets: list[bytes]) -> None:
    """Say everything, at a rate at which all of it is looked at."""
    wait_until_announced(prey)
    for number, packet in enumerate(packets):
        # From several machines, so that none of them is too loud.
        with microphone(f"127.0.1.{1 + number % 16}") as sock:
            before = observed(prey).heard
            sock.sendto(packet, GROUP)
            until(lambda before=before: observed(prey).heard > before)  # type: ignore[misc]


def found_a_friend(prey: Victim) -> None:
    """Return when another node was found by the same ways, after all that was said before was heard."""
    with victim(prey.cluster) as friend:
        until(lambda: friend.node.card.id in prey.node.met)


@contextlib.contextmanager
def trap(ip: str = "127.0.0.1") -> Iterator[int]:
    """The port of a listener to which no node may be led."""
    with socket.create_server((ip, 0)) as listener:
        listener.setblocking(False)
        yield listener.getsockname()[1]
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_only_addresses_inside_the_tag_are_believed(prey: Victim) -> None:
    with trap() as port, socket.create_server(("127.0.0.99", port)) as meant:
        meant.settimeout(DEADLINE)
        txt = made(prey, port, "127.0.0.99")
        say(prey, [announcement(txt, "127.0.0.1", port), announcement(txt, "127.0.0.1", port)])
        meant.accept()[0].close()


def test_an_announcement_that_a_stranger_repeats_is_followed_like_one(prey: Victim) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        listener.setblocking(False)
        txt = made(prey, listener.getsockname()[1], "127.0.0.1")  # of a node that has gone; any host may have heard it
        say(prey, [announcement(txt, "127.0.0.1", 9) for _ in range(40)])
        assert observed(prey).matching == 1
        found_a_friend(prey)
        callers = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                listener.accept()[0].close()
                callers += 1
        assert callers <= 3  # one try, and those that its pauses allow in the meantime


@pytest.mark.parametrize("where", ["203.0.113.9", "8.8.8.8", "10.213.0.1", "fe80::1", "fd00::1", "224.0.0.251", "::"])
def test_addresses_that_are_not_on_the_network_where_they_were_heard_are_not_dialled(prey: Victim, where: str) -> None:
    say(prey, [announcement(made(prey, 9, where), "127.0.0.1", 9)])
    assert (observed(prey).heard > 0, observed(prey).matching) == (True, 0)
    assert len(prey.node.follower._hints) == 0


def test_many_announcements_of_members_are_followed_a_few_at_a_time(
    prey: Victim, caplog: pytest.LogCaptureFixture
) -> None:
    wait_until_announced(prey)
    memory, before = resident_bytes(), tasks()
    with microphone() as sock:
        for number in range(3000):
            place = f"127.9.{number >> 8}.{number & 255}"
            sock.sendto(announcement(made(prey, 9, place), place, 9), GROUP)
    until(lambda: observed(prey).heard > 100)
    assert tasks() - before < 300
    assert resident_bytes() - memory < GROWTH
    assert welcomes_members(prey)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_announcements_of_strangers_are_never_dialled(prey: Victim) -> None:
    with trap() as port:
        foreign = made(prey, port, "127.0.0.1", key=secrets.token_bytes(32))
        moved = made(prey, port + 1, "127.0.0.1") | {b"p": b"%d" % port}
        led_astray = made(prey, port, "127.0.0.2") | {b"4": socket.inet_aton("127.0.0.1")}
        halves = [{b"v": b"1"}, {b"v": b"1", b"n": b"0" * 32, b"t": b"0" * 32}, {b"": b""}]
        everything = [foreign, moved, led_astray, *halves]
        say(prey, [announcement(txt, "127.0.0.1", port) for txt in everything for _ in range(3)])
        found_a_friend(prey)


def test_garbage_on_multicast_is_passed_over(prey: Victim, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(5)
    good = announcement(made(prey, 9, "127.0.0.1", key=bytes(32)), "127.0.0.1", 9)
    loop = b"\0\0\x84\0\0\0\0\1\0\0\0\0" + b"\xc0\x0c" + b"\0\x0c\0\1\0\0\0\x78\0\2\xc0\x0c"
    packets = [rng.randbytes(rng.randrange(1, 1400)) for _ in range(100)] + [loop]
    for _ in range(200):
        spoiled = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            spoiled[rng.randrange(len(good))] = rng.randrange(256)
        packets.append(bytes(spoiled[: rng.randrange(1, len(good))] if rng.random() < 0.3 else spoiled))
    say(prey, packets)
    assert welcomes_members(prey)
    found_a_friend(prey)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_one_loud_machine_does_not_keep_others_from_being_heard(prey: Victim) -> None:
    wait_until_announced(prey)
    noise = announcement(made(prey, 9, "127.0.0.1", key=bytes(32)), "127.0.0.1", 9)
    with microphone("127.0.0.66") as loud, socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(2000):
            loud.sendto(noise, GROUP)
        until(lambda: observed(prey).dropped > 100)
        listener.setblocking(False)
        with microphone("127.0.0.67") as member:
            port = listener.getsockname()[1]
            for _ in range(500):  # the kernel drops what comes while the noise fills the socket; members say it again
                member.sendto(announcement(made(prey, port, "127.0.0.1"), "127.0.0.1", 9), GROUP)
                if select.select([listener], [], [], DEADLINE / 500)[0]:
                    break
        listener.accept()[0].close()


def test_packets_of_unusual_size_are_counted_and_not_looked_at(prey: Victim) -> None:
    wait_until_announced(prey)
    good = announcement(made(prey, 9, "127.0.0.77"), "127.0.0.1", 9)
    too_many = good[:6] + (1000).to_bytes(2, "big") + good[8:]
    truncated = good[:2] + bytes((good[2] | 0x02,)) + good[3:]
    before = observed(prey).dropped
    say(prey, [good + bytes(sieve.MOST_BYTES), too_many, truncated])
    assert observed(prey).dropped >= before + 3
    assert observed(prey).matching == 0


def test_two_announcements_of_one_node_have_nothing_in_common_but_where_it_is() -> None:
    key = new_cluster().secret.derive("mdns")
    one, other = (beacon.make(key, secrets.token_bytes(16), 47700, ["10.0.0.1"]) for _ in range(2))
    assert {name for name in one if one[name] == other[name]} == {b"v", b"p", b"4", b"6"}
