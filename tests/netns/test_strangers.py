"""A stranger on the network says what it likes by multicast: what that costs the nodes there is bounded."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.nodes import SOURCE, Cluster
from tests.support.waiting import DEADLINE

from covey.runtime.links.dial_limits import SOCKETS
from covey.testing.netns import Lan
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    import subprocess

    from covey.testing.netns import Host

GROWTH = 2 << 20

MULTICAST = """
import json, secrets, socket, sys, time
from zeroconf import DNSAddress, DNSOutgoing, DNSPointer, DNSQuestion, DNSService, DNSText
from covey.wire import beacon

FOREVER = 0x7FFFFFFF

def mouth(ip):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(ip))
    sock.bind((ip, 0))
    return sock

def announcement(txt, ips, port, ttl=FOREVER):
    name, host = f"{secrets.token_hex(8)}.{beacon.SERVICE}", f"{secrets.token_hex(8)}.local."
    text = b"".join(bytes((len(key) + 1 + len(value),)) + key + b"=" + value for key, value in txt.items())
    out = DNSOutgoing(0x8400)
    out.add_answer_at_time(DNSPointer(beacon.SERVICE, 12, 1, ttl, name), 0)
    out.add_answer_at_time(DNSService(name, 33, 1, ttl, 0, 0, port, host), 0)
    out.add_answer_at_time(DNSText(name, 16, 1, ttl, text), 0)
    for ip in ips:
        out.add_answer_at_time(DNSAddress(host, 1, 1, ttl, socket.inet_aton(ip)), 0)
    return out.packets()[0]

def invention(kind, number):
    if kind == "announcements":
        txt = beacon.make(bytes(31) + b"x", secrets.token_bytes(16), 9, ["127.0.0.1"])
        return announcement(txt, ["127.0.0.1"], 9)
    out = DNSOutgoing(0x8400 if kind == "pointers" else 0)
    if kind == "questions":
        out.add_question(DNSQuestion(beacon.SERVICE, 12, 1))
    for n in range(8):
        name = f"{number}-{n}-{'x' * 30}.{beacon.SERVICE}"
        out.add_answer_at_time(DNSPointer(beacon.SERVICE, 12, 1, FOREVER, name), 0)
    return out.packets()[0]
"""
LISTENER = """
import asyncio, sys
from covey.net.discovery.mdns import Beacon

async def main():
    beacon = Beacon(bytes(32), 9, "lo", lambda *_: None)
    await beacon.start()
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    (seen,) = beacon.observed()
    print(seen.heard, seen.dropped, flush=True)
    await beacon.close()

asyncio.run(main())
"""
FLOOD = (
    MULTICAST
    + """
kind, seconds = sys.argv[1], float(sys.argv[2])
until, number = time.monotonic() + seconds, 0
mouths = [mouth(f"127.0.2.{1 + n}") for n in range(32)]
while time.monotonic() < until:
    for each in mouths:
        number += 1
        each.sendto(invention(kind, number), ("224.0.0.251", 5353))
    time.sleep(0.002)  # or most are lost before any node hears them
print(number)
"""
)
REPEATER = (
    MULTICAST
    + """
# Announcements that members made once, for nodes that are gone: any host may have recorded them.
ip, key, network, count = sys.argv[1], bytes.fromhex(sys.argv[2]), sys.argv[3], int(sys.argv[4])
packets = []
for number in range(count):
    ips = [f"{network}.{100 + (number * 8 + n) % 64}" for n in range(8)]
    txt = beacon.make(key, secrets.token_bytes(16), 40000 + number, ips)
    packets.append(announcement(txt, [f"203.0.113.{1 + (number + n) % 200}" for n in range(8)], 40000 + number))
    packets.append(announcement(beacon.make(key, secrets.token_bytes(16), 9, ["203.0.113.7"]), ["203.0.113.8"], 9))
sock = mouth(ip)
print("begun", flush=True)
while True:
    for packet in packets:
        sock.sendto(packet, ("224.0.0.251", 5353))
        time.sleep(0.005)
"""
)

COUNTER = """
import select, socket, sys

counts = {sys.argv[1]: 0, "203.0.113": 0}
with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800)) as sock:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    sock.bind(("eth0", 0x0800))
    print(sock.getsockname()[4].hex(":"), flush=True)
    while sys.stdin not in select.select([sys.stdin, sock], [], [])[0]:
        packet = sock.recv(65535)
        flags = packet[4 * (packet[0] & 15) + 13 :][:1]
        network = ".".join(map(str, packet[16:19]))
        if packet[9] == socket.IPPROTO_TCP and flags and flags[0] & 0x12 == 0x02 and network in counts:
            counts[network] += 1  # it begins a connection
print(counts["203.0.113"], counts[sys.argv[1]])
"""
"""Counts the connections that are begun with addresses of a network, and of one beyond it."""


BUSY = """
import json, resource, sys, time
import numpy as np
import covey

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
host, run, options = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
print(json.dumps("ready"), flush=True)
with covey.join(run, **options) as group:
    x, count, until = np.empty(1000), 0, time.monotonic() + 20
    print(json.dumps("joined"), flush=True)
    while not group.all_reduce(int(time.monotonic() > until)):
        with group.split(0) as part:  # its lanes are opened now
            x[:] = group.rank
            assert part.all_reduce(x)[0] == 1
            if part.rank == 0:
                part.send(x, 1)
            else:
                assert part.recv(0)[0] == 1
        count += 1
        time.sleep(0.02)
    total = group.all_reduce(1)
print(json.dumps([count, total]))
"""


def start(host: Host, code: str, *words: str) -> subprocess.Popen[str]:
    return host.popen([sys.executable, "-c", code, *words], env={"PYTHONPATH": str(SOURCE)})


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("kind", ["announcements", "pointers", "questions"])
def test_a_flood_of_inventions_leaves_memory_as_it_was(kind: str) -> None:
    """Whatever is invented, with lifetimes of years: nothing of it is kept."""
    with Lan(hosts=1) as lan:
        (host,) = lan.hosts
        listener = start(host, LISTENER)
        assert listener.stdout is not None
        assert listener.stdin is not None
        assert listener.stdout.readline() == "ready\n"
        flood(host, kind, 1.0)  # what a first packet brings in
        before = resident_bytes(listener.pid)
        sent = flood(host, kind, 6.0)
        grown = resident_bytes(listener.pid) - before
        listener.stdin.write("\n")
        listener.stdin.flush()
        heard, dropped = map(int, listener.stdout.readline().split())
    assert heard > sent / 4
    assert dropped > heard / 2
    assert grown < GROWTH, f"{grown >> 10} KiB after {heard} of {sent} packets"


def flood(host: Host, kind: str, seconds: float) -> int:
    process = start(host, FLOOD, kind, str(seconds))
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    return int(out)


class BlackHole:
    """A host to which the others send whatever is for many addresses, and that answers nothing; counts what comes."""

    def __init__(self, host: Host, victims: list[Host]) -> None:
        network = host.ip4.rpartition(".")[0]
        # None of the addresses is one of its own, and it forwards nothing: the kernel drops what is for them.
        self._counter = start(host, COUNTER, network)
        assert self._counter.stdout is not None
        ethernet = self._counter.stdout.readline().strip()
        for victim in victims:
            victim.run(["ip", "route", "add", "203.0.113.0/24", "via", host.ip4])
            for number in range(64):
                address = f"{network}.{100 + number}"
                victim.run(["ip", "neighbour", "add", address, "lladdr", ethernet, "dev", "eth0", "nud", "permanent"])

    def syns(self) -> tuple[int, int]:
        """Return how many connections were begun, beyond the network and on it."""
        out, err = self._counter.communicate("\n", timeout=DEADLINE)
        assert self._counter.returncode == 0, err
        beyond, here = map(int, out.split())
        return beyond, here


def repeat(stranger: Host, cluster: Cluster, count: int) -> None:
    key = ClusterSecret("default", bytes.fromhex(cluster.secret)).derive("mdns")
    process = start(stranger, REPEATER, stranger.ip4, key.hex(), stranger.ip4.rpartition(".")[0], str(count))
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"


def sockets(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def test_announcements_that_a_stranger_repeats_open_few_sockets_and_none_beyond_the_network() -> None:
    seconds = 20.0
    with Lan(hosts=4) as lan:
        prey, friend, stranger, hole = lan.hosts
        cluster, black_hole = Cluster(), BlackHole(hole, [prey])
        waiting = cluster.start(prey, size=2, timeout=DEADLINE)
        waiting.wait_until_joining()
        time.sleep(2.0)
        quiet = sockets(waiting.process.pid)
        repeat(stranger, cluster, 150)
        most, began = 0, time.monotonic()
        while time.monotonic() < began + seconds:
            most = max(most, sockets(waiting.process.pid))
            time.sleep(0.02)
        beyond, here = black_hole.syns()
        assert beyond == 0
        assert here > SOCKETS  # it was led there, or this shows nothing
        # All sockets are busy with what does not answer; on each the kernel asks once more every second, at most.
        assert here < SOCKETS * (time.monotonic() - began + 5)
        assert most - quiet <= SOCKETS + 4
        coming = cluster.start(friend, size=2, timeout=DEADLINE)
        ends = [node.end() for node in (waiting, coming)]
        assert [code for code, _, _ in ends] == [0, 0], ends
        assert len(ends[0][2]) < 20_000, "the log has grown"


def test_a_stranger_does_not_take_the_descriptors_of_a_running_job() -> None:
    """Each process may have 128: enough for its run, and not for everything that others make it open besides."""
    with Lan(hosts=4) as lan:
        first, second, stranger, hole = lan.hosts
        cluster = Cluster()
        BlackHole(hole, [first, second])
        nodes = [cluster.start(host, code=BUSY, size=2, timeout=DEADLINE) for host in (first, second)]
        for node in nodes:
            node.wait_until_joining()
            assert node.process.stdout is not None
            assert node.process.stdout.readline() == '"joined"\n'
        repeat(stranger, cluster, 150)
        ends = [node.end() for node in nodes]
        assert [code for code, _, _ in ends] == [0, 0], ends
        counts = [json.loads(out.splitlines()[-1]) for _, out, _ in ends]
        assert counts[0] == counts[1]
        assert counts[0][0] > 20
        assert counts[0][1] == 2
        for _, _, err in ends:
            assert "Error" not in err
            assert "failed" not in err
