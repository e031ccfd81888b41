"""The switch that tests run their networks on does what its controls say, and nothing else.

Whether something does *not* arrive is asked without waiting: a marker is sent after it, and frames keep their order.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

import pytest
from tests.support.waiting import DEADLINE

from covey.testing.frames import Capture
from covey.testing.netns import Lan, require_namespaces

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.testing.netns import Host

PORT = 7000
MDNS = "224.0.0.251"
MDNS6 = "ff02::fb"
FAMILIES = [socket.AF_INET, socket.AF_INET6]


@pytest.fixture(scope="module")
def network() -> Iterator[Lan]:
    require_namespaces()
    with Lan(hosts=3, kind="switch", prefix="covey-switch") as lan:
        yield lan


@pytest.fixture
def lan(network: Lan) -> Iterator[Lan]:
    yield network
    network.switch.shape()
    network.switch.allow_multicast(True)
    network.switch.mend()
    network.switch.captured()


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    """Whatever is put here is closed at the end."""
    kept: list[socket.socket] = []
    yield kept
    for sock in kept:
        sock.close()


def address(host: Host, family: int) -> str:
    return host.ip4 if family == socket.AF_INET else host.ip6


def listen(host: Host, sockets: list[socket.socket], family: int = socket.AF_INET) -> socket.socket:
    sock = host.socket(family)
    sockets.append(sock)
    sock.settimeout(DEADLINE)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((address(host, family), PORT))
    sock.listen()
    return sock


def dial(
    host: Host, other: Host, sockets: list[socket.socket], family: int = socket.AF_INET, timeout: float = DEADLINE
) -> socket.socket:
    sock = host.socket(family)
    sockets.append(sock)
    sock.settimeout(timeout)
    sock.connect((address(other, family), PORT))
    return sock


def connect(
    host: Host, other: Host, sockets: list[socket.socket], family: int = socket.AF_INET
) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection from `host` to `other`, where no other process may listen."""
    with listen(other, [], family) as listener:
        client = dial(host, other, sockets, family)
        server, _ = listener.accept()
    sockets.append(server)
    server.settimeout(DEADLINE)
    return client, server


def datagrams(host: Host, sockets: list[socket.socket], family: int = socket.AF_INET) -> socket.socket:
    """Return a socket that gets datagrams to PORT, also those to the groups of mDNS."""
    sock = host.socket(family, socket.SOCK_DGRAM)
    sockets.append(sock)
    sock.settimeout(DEADLINE)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    sock.bind(("", PORT))
    if family == socket.AF_INET:
        here = socket.inet_aton(host.ip4)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(MDNS) + here)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, here)
    else:
        device = struct.pack("@I", 2)  # eth0, after lo
        group = socket.inet_pton(family, MDNS6) + device
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, device)
    return sock


def read(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (more := sock.recv(1 << 16)):
        data += more
    return bytes(data)


def carry(sender: socket.socket, receiver: socket.socket, data: bytes) -> bytes:
    """Send more than buffers hold, and return what came."""
    thread = threading.Thread(target=sender.sendall, args=(data,), daemon=True)
    thread.start()
    got = read(receiver, len(data))
    thread.join(DEADLINE)
    return got


@pytest.mark.parametrize("family", FAMILIES)
def test_hosts_talk_over_both_families(lan: Lan, sockets: list[socket.socket], family: int) -> None:
    data = os.urandom(300_000)
    for host, other in ((0, 1), (2, 0)):
        client, server = connect(lan.hosts[host], lan.hosts[other], sockets, family)
        assert carry(client, server, data[:100_000]) == data[:100_000]
        assert carry(server, client, data[100_000:]) == data[100_000:]


def test_a_frame_for_a_known_host_reaches_no_other(lan: Lan, sockets: list[socket.socket]) -> None:
    client, server = connect(lan.hosts[0], lan.hosts[1], sockets)
    wire = lan.hosts[2].socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    sockets.append(wire)
    wire.settimeout(DEADLINE)
    client.sendall(b"between two" * 100)
    read(server, 1100)
    marker = datagrams(lan.hosts[0], sockets)
    marker.sendto(b"to all", (MDNS, PORT))
    while b"to all" not in (frame := wire.recv(2048)):
        assert b"between two" not in frame


@pytest.mark.parametrize("family", FAMILIES)
def test_multicast_can_be_stopped_while_the_rest_of_ip_works(
    lan: Lan, sockets: list[socket.socket], family: int
) -> None:
    here, there = (datagrams(host, sockets, family) for host in lan.hosts[:2])
    group = MDNS if family == socket.AF_INET else MDNS6
    here.sendto(b"before", (group, PORT))
    assert there.recv(100) == b"before"
    lan.switch.allow_multicast(False)
    lan.hosts[0].run(["ip", "neighbour", "flush", "all"])  # it has to ask again where its neighbour is
    here.sendto(b"stopped", (group, PORT))
    here.sendto(b"marker", (address(lan.hosts[1], family), PORT))
    assert there.recv(100) == b"marker"
    lan.switch.allow_multicast(True)
    here.sendto(b"after", (group, PORT))
    assert there.recv(100) == b"after"


def test_frames_are_late_by_the_delay_and_in_order_whatever_the_jitter(lan: Lan, sockets: list[socket.socket]) -> None:
    here, there = (datagrams(host, sockets) for host in lan.hosts[:2])
    here.sendto(b"hello", (lan.hosts[1].ip4, PORT))
    there.recv(100)
    lan.switch.shape(delay=0.05, jitter=0.05)
    start = time.monotonic()
    for number in range(100):
        here.sendto(b"%d" % number, (lan.hosts[1].ip4, PORT))
    assert [there.recv(100) for _ in range(100)] == [b"%d" % number for number in range(100)]
    assert 0.05 <= time.monotonic() - start < 100 * 0.05, "one after the other they would take that long"


def test_the_asked_share_of_frames_gets_lost(lan: Lan, sockets: list[socket.socket]) -> None:
    here, there = (datagrams(host, sockets) for host in lan.hosts[:2])
    here.sendto(b"hello", (lan.hosts[1].ip4, PORT))
    there.recv(100)
    lan.switch.shape(loss=0.25)
    got: list[bytes] = []
    for batch in range(8):  # of 50, fewer than a device queues
        for number in range(50):
            here.sendto(b"%d" % (50 * batch + number), (lan.hosts[1].ip4, PORT))
        lan.switch.shape()
        here.sendto(b"marker", (lan.hosts[1].ip4, PORT))
        while (data := there.recv(100)) != b"marker":
            got.append(data)
        lan.switch.shape(loss=0.25)
    assert 250 < len(got) < 350  # six standard deviations each way
    assert got == sorted(got, key=int)


def test_a_port_gets_no_more_than_its_bandwidth(lan: Lan, sockets: list[socket.socket]) -> None:
    client, server = connect(lan.hosts[0], lan.hosts[1], sockets)
    lan.switch.shape(bytes_per_second=2e6)
    start = time.monotonic()
    carry(server, client, bytes(800_000))
    assert 0.3 < time.monotonic() - start < 4.0


def test_a_way_can_be_cut_in_one_direction_only(lan: Lan, sockets: list[socket.socket]) -> None:
    ends = [datagrams(host, sockets) for host in lan.hosts]
    connect(lan.hosts[0], lan.hosts[1], sockets)  # they know where to find each other
    connect(lan.hosts[0], lan.hosts[2], sockets)
    lan.switch.cut("host0", "host1")
    ends[0].sendto(b"lost", (lan.hosts[1].ip4, PORT))
    ends[0].sendto(b"to the third", (lan.hosts[2].ip4, PORT))
    ends[1].sendto(b"the other way", (lan.hosts[0].ip4, PORT))
    assert ends[0].recv(100) == b"the other way"
    assert ends[2].recv(100) == b"to the third"
    lan.switch.mend()
    ends[0].sendto(b"mended", (lan.hosts[1].ip4, PORT))
    assert ends[1].recv(100) == b"mended"


def test_frames_can_get_lost_in_one_direction_only(lan: Lan, sockets: list[socket.socket]) -> None:
    here, there = (datagrams(host, sockets) for host in lan.hosts[:2])
    connect(lan.hosts[0], lan.hosts[1], sockets)  # they know where to find each other
    lan.switch.lose("host0", "host1", 1.0)
    here.sendto(b"lost", (lan.hosts[1].ip4, PORT))
    there.sendto(b"back", (lan.hosts[0].ip4, PORT))
    assert here.recv(100) == b"back"
    lan.switch.mend()
    here.sendto(b"marker", (lan.hosts[1].ip4, PORT))
    assert there.recv(100) == b"marker"


def test_long_frames_can_be_swallowed(lan: Lan, sockets: list[socket.socket]) -> None:
    here, there = (datagrams(host, sockets) for host in lan.hosts[:2])
    connect(lan.hosts[0], lan.hosts[1], sockets)
    lan.switch.swallow(longer_than=500)
    for data in (bytes(600), bytes(400)):
        here.sendto(data, (lan.hosts[1].ip4, PORT))
    assert there.recv(1000) == bytes(400)
    lan.switch.mend()
    here.sendto(bytes(600), (lan.hosts[1].ip4, PORT))
    assert there.recv(1000) == bytes(600)


def test_a_cut_port_hears_and_says_nothing(lan: Lan, sockets: list[socket.socket]) -> None:
    ends = [datagrams(host, sockets) for host in lan.hosts]
    lan.switch.cut("host1")
    ends[0].sendto(b"lost", (MDNS, PORT))
    ends[1].sendto(b"lost too", (MDNS, PORT))
    assert ends[2].recv(100) == b"lost"
    ends[2].sendto(b"marker", (MDNS, PORT))
    assert [ends[0].recv(100) for _ in range(2)] == [b"lost", b"marker"]  # its own, and the third's
    lan.switch.mend()
    ends[2].sendto(b"mended", (MDNS, PORT))
    assert [ends[1].recv(100) for _ in range(2)] == [b"lost too", b"mended"]  # its own, and the third's


@pytest.mark.parametrize("family", FAMILIES)
def test_a_one_way_firewall_stops_dialling_and_nothing_else(
    lan: Lan, sockets: list[socket.socket], family: int
) -> None:
    client, server = connect(lan.hosts[0], lan.hosts[1], sockets, family)
    lan.switch.forbid_dialling("host0", "host1")
    client.sendall(b"still")
    assert read(server, 5) == b"still"
    for host, other in ((1, 0), (2, 1), (0, 2)):
        connect(lan.hosts[host], lan.hosts[other], sockets, family)
    with listen(lan.hosts[1], [], family):
        with pytest.raises(TimeoutError):
            dial(lan.hosts[0], lan.hosts[1], sockets, family, timeout=0.3)
        lan.switch.mend()
        dial(lan.hosts[0], lan.hosts[1], sockets, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_forged_resets_end_a_connection_at_both_ends(lan: Lan, sockets: list[socket.socket], family: int) -> None:
    client, server = connect(lan.hosts[0], lan.hosts[1], sockets, family)
    client.sendall(b"hello")
    assert read(server, 5) == b"hello"
    assert lan.switch.reset_connections(PORT + 1) == 0
    assert lan.switch.reset_connections(PORT) >= 1  # those of earlier tests may still be known
    for sock in (client, server):
        with pytest.raises(ConnectionResetError):
            sock.recv(1)


def test_a_capture_finds_what_crossed_the_wire_even_across_frames(lan: Lan, sockets: list[socket.socket]) -> None:
    secret, data = os.urandom(32), os.urandom(200_000)
    client, server = connect(lan.hosts[0], lan.hosts[1], sockets)
    lan.switch.start_capture()
    for half in (secret[:16], secret[16:]):
        client.sendall(half)
        assert read(server, 16) == half
    carry(client, server, data)
    udp = datagrams(lan.hosts[0], sockets)
    udp.sendto(b"announcement", (lan.hosts[1].ip4, PORT))
    server.sendall(b"done")
    read(client, 4)
    capture = lan.switch.captured()
    assert capture.complete
    assert capture.streams()[*client.getsockname(), *client.getpeername()] == secret + data
    assert not any(secret in frame for frame in capture.frames)
    assert secret in capture
    assert os.urandom(32) not in capture
    assert capture.datagrams(PORT) == [b"announcement"]
    assert lan.switch.captured() == Capture([])


def test_a_capture_that_had_to_leave_something_out_says_so(lan: Lan, sockets: list[socket.socket]) -> None:
    client, server = connect(lan.hosts[0], lan.hosts[1], sockets)
    lan.switch.start_capture(limit_bytes=10_000)
    client.sendall(bytes(20_000))
    read(server, 20_000)
    capture = lan.switch.captured()
    assert not capture.complete
    assert sum(map(len, capture.frames)) <= 10_000


def test_a_port_that_does_not_exist_is_an_error(lan: Lan) -> None:
    with pytest.raises(ValueError, match="no port is called host7"):
        lan.switch.cut("host0", "host7")
    with pytest.raises(ValueError, match="port host0 is taken"):
        lan.switch.attach("host0", lan.hosts[0].namespace, "eth5")
    with pytest.raises(FileNotFoundError):
        lan.switch.attach("host9", "no-such-namespace")
