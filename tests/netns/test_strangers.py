"""A stranger on the network says what it likes by multicast: what that costs the nodes there is bounded."""

from __future__ import annotations

import json
import select
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support import pipes
from tests.support.nodes import SOURCE, Cluster, wait_until_listening
from tests.support.waiting import DEADLINE

from covey.net.discovery.sieve import ALL_PACKETS_BURST, ALL_PACKETS_RATE
from covey.runtime.links.limits import SOCKETS
from covey.testing.netns import Lan
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from covey.testing.netns import Host

GROWTH = 2 << 20
SYN_SENT = "02"
QUIET = 20
"""Descriptors that a node has at most which waits for others and knows of none."""
WARM, HEARD = 1000, 8000
"""Packets that a node hears before its memory is looked at, and until it is looked at again."""

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
    while await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        (seen,) = beacon.observed()
        print(seen.heard, seen.dropped, flush=True)
    await beacon.close()

asyncio.run(main())
"""
FLOOD = (
    MULTICAST
    + """
kinds = sys.argv[1].split()
mouths = [mouth(f"127.0.2.{1 + n}") for n in range(32)]
for line in sys.stdin:
    for number in range(10):
        for each in mouths:
            each.sendto(invention(kinds[number % len(kinds)], secrets.token_hex(4)), ("224.0.0.251", 5353))
        time.sleep(0.002)  # or most are lost before any node hears them
    print("sent", flush=True)
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
            if counts[sys.argv[1]] == int(sys.argv[2]):
                print("led", flush=True)
print(counts["203.0.113"], counts[sys.argv[1]])
"""
"""Counts the connections that are begun with addresses of a network, and of one beyond it; says when there are many."""
LED = 4 * SOCKETS
"""Connections to a black hole after which all that a node has for strangers was in use."""


BUSY = """
import json, resource, select, sys, time
import numpy as np
import covey

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
host, run, options = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
print(json.dumps("ready"), flush=True)
with covey.join(run, **options) as group:
    x, count = np.empty(1000), 0
    print(json.dumps("joined"), flush=True)
    while not group.all_reduce(int(count > 20 and bool(select.select([sys.stdin], [], [], 0)[0]))):
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


def tell(process: subprocess.Popen[str]) -> str:
    """Give a program a line; return the one with which it answers."""
    pipes.stdin(process).write("\n")
    pipes.stdin(process).flush()
    return pipes.stdout(process).readline()


def test_a_flood_of_inventions_leaves_memory_as_it_was() -> None:
    """Whatever is invented, with lifetimes of years: nothing of it is kept, and no more is parsed than may be."""
    with Lan(hosts=1) as lan:
        (host,) = lan.hosts
        listener, flood = start(host, LISTENER), start(host, FLOOD, "announcements pointers questions")
        assert pipes.stdout(listener).readline() == "ready\n"
        began, heard, before = time.monotonic(), 0, 0
        while heard < WARM + HEARD:
            assert tell(flood) == "sent\n"
            heard, dropped = map(int, tell(listener).split())
            if not before and heard > WARM:  # what first packets bring in is there
                before = resident_bytes(listener.pid)
        grown = resident_bytes(listener.pid) - before
        assert grown < GROWTH, f"{grown >> 10} KiB after {heard} packets"
        assert heard - dropped <= ALL_PACKETS_BURST + ALL_PACKETS_RATE * (time.monotonic() - began)


class BlackHole:
    """A host to which the others send whatever is for many addresses, and that answers nothing; counts what comes."""

    def __init__(self, host: Host, victims: list[Host]) -> None:
        network = host.ip4.rpartition(".")[0]
        # None of the addresses is one of its own, and it forwards nothing: the kernel drops what is for them.
        self._counter = start(host, COUNTER, network, str(LED))
        ethernet = pipes.stdout(self._counter).readline().strip()
        for victim in victims:
            victim.run(["ip", "route", "add", "203.0.113.0/24", "via", host.ip4])
            rest = f"lladdr {ethernet} dev eth0 nud permanent"
            lines = [f"neighbour add {network}.{100 + number} {rest}" for number in range(64)]
            victim.run(["sh", "-c", 'echo "$0" | ip -batch -', "\n".join(lines)])

    def wait_until_led(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Return when many connections were begun, and do something again and again until then."""
        while not select.select([pipes.stdout(self._counter)], [], [], 0.02)[0]:
            meanwhile()
        assert pipes.stdout(self._counter).readline() == "led\n"

    def syns(self) -> tuple[int, int]:
        """Return how many connections were begun, beyond the network and on it."""
        out, err = self._counter.communicate("\n", timeout=DEADLINE)
        assert self._counter.returncode == 0, err
        beyond, here = map(int, out.split())
        return beyond, here


def repeat(stranger: Host, cluster: Cluster, count: int) -> None:
    key = ClusterSecret("default", bytes.fromhex(cluster.secret)).derive("mdns")
    process = start(stranger, REPEATER, stranger.ip4, key.hex(), stranger.ip4.rpartition(".")[0], str(count))
    assert pipes.stdout(process).readline() == "begun\n"


def sockets(pid: int) -> tuple[int, int]:
    """Return how many connections the only process of a host is about to make, and all that it has open."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    return sum(line[3] == SYN_SENT for line in lines), sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def test_announcements_that_a_stranger_repeats_open_few_sockets_and_none_beyond_the_network() -> None:
    with Lan(hosts=4) as lan:
        prey, friend, stranger, hole = lan.hosts
        cluster, black_hole = Cluster(), BlackHole(hole, [prey])
        waiting = cluster.start(prey, size=2, timeout=DEADLINE)
        waiting.wait_until_joining()
        wait_until_listening(prey)
        counts = [(0, 0)]
        repeat(stranger, cluster, 150)
        began = time.monotonic()
        black_hole.wait_until_led(lambda: counts.append(sockets(waiting.process.pid)))
        beyond, here = black_hole.syns()
        assert beyond == 0
        # All sockets are busy with what does not answer; on each the kernel asks once more every second, at most.
        assert here < SOCKETS * (time.monotonic() - began + 5)
        assert max(dialling for dialling, _ in counts) <= SOCKETS + 4  # the list changes while it is read
        assert max(opened for _, opened in counts) <= QUIET + SOCKETS
        coming = cluster.start(friend, size=2, timeout=DEADLINE)
        ends = [node.end() for node in (waiting, coming)]
        assert [code for code, _, _ in ends] == [0, 0], ends
        assert len(ends[0][2]) < 20_000, "the log has grown"


def test_a_stranger_does_not_take_the_descriptors_of_a_running_job() -> None:
    """Each process may have 128: enough for its run, and not for everything that others make it open besides."""
    with Lan(hosts=4) as lan:
        first, second, stranger, hole = lan.hosts
        cluster, black_hole = Cluster(), BlackHole(hole, [first, second])
        nodes = [cluster.start(host, code=BUSY, size=2, timeout=DEADLINE) for host in (first, second)]
        for node in nodes:
            node.wait_until_joining()
            assert pipes.stdout(node.process).readline() == '"joined"\n'
        repeat(stranger, cluster, 150)
        black_hole.wait_until_led()
        ends = [node.end() for node in nodes]
        assert [code for code, _, _ in ends] == [0, 0], ends
        counts = [json.loads(out.splitlines()[-1]) for _, out, _ in ends]
        assert counts[0] == counts[1]
        assert counts[0][0] > 20
        assert counts[0][1] == 2
        for _, _, err in ends:
            assert "Error" not in err
            assert "failed" not in err
