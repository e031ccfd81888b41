"""Multicast DNS among real processes in network namespaces joined by bridges, and on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.support import forked
from tests.support.waiting import DEADLINE

from covey.base.errors import ConfigError
from covey.net.discovery import responder
from covey.net.discovery.interfaces import loopback_interfaces
from covey.net.discovery.mdns import Beacon
from covey.wire.beacon import SERVICE, read

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from covey.wire.messages import Address

SOON = 30.0
"""Seconds in which a node asks for others again and again; those that it finds later come with a rare announcement."""
KEY, OTHER_KEY = secrets.token_bytes(32), secrets.token_bytes(32)  # other test runs on this host have others
LO = loopback_interfaces()[0].name

PEER = """
import asyncio, json, socket, sys
from covey.net.discovery.interfaces import to_dial, usable_interfaces
from covey.net.discovery.mdns import Beacon

listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
own_port = listener.getsockname()[1]

def say(**what):
    print(json.dumps(what), flush=True)

def answering(places):
    for address in to_dial(usable_interfaces(), places, same_host=False):
        with socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET) as sock:
            sock.settimeout(3)
            try:
                sock.connect(address)
                return address[0]
            except OSError:
                pass

async def main(key, announce, pattern):
    loop = asyncio.get_running_loop()
    began = loop.time()
    def found(places, interface):
        after = loop.time() - began
        ips = [place.ip for place in places]
        say(found=ips, port=places[0].port, after=after, connected=answering(places), interface=interface)
    beacon = Beacon(bytes.fromhex(key), own_port, pattern, found, announce=announce == "announce")
    try:
        await beacon.start()
        say(state=beacon.state, port=own_port)
        while await loop.run_in_executor(None, sys.stdin.readline):
            observed = {o.interface: [o.sent, o.heard, o.matching, len(o.foreign)] for o in beacon.observed()}
            say(report=beacon.state, **observed)
    finally:
        await beacon.close()
        listener.close()

asyncio.run(main(*sys.argv[1:]))
"""


class Peer:
    """A process with a beacon in a namespace."""

    def __init__(self, namespace: str, key: bytes = KEY, *, announce: bool = True, pattern: str = "") -> None:
        enter = ["ip", "netns", "exec", namespace, sys.executable, "-W", "error", "-c", PEER]
        self._process = forked.Popen(
            [*enter, key.hex(), "announce" if announce else "listen", pattern],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._waiting: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        try:
            self.port = self.next("state")["port"]
        except BaseException:
            self.kill()
            raise

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))

    def next(self, kind: str, **wanted: object) -> dict[str, Any]:
        """Return the first thing it says that is of a kind and has what is wanted; other things wait."""
        deadline = time.monotonic() + DEADLINE
        for said in self._waiting:
            if kind in said and wanted.items() <= said.items():
                self._waiting.remove(said)
                return said
        while True:
            try:
                said = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"no {kind} with {wanted}, but {self._waiting}") from None
            if kind in said and wanted.items() <= said.items():
                return said
            self._waiting.append(said)

    def report(self) -> dict[str, Any]:
        """Return what it is doing, and what it observed on each interface."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.next("report")

    def report_once(self, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE
        while not condition(report := self.report()):
            assert time.monotonic() < deadline, report
            time.sleep(0.02)
        return report

    def end(self) -> None:
        """Let it close; it has no complaints."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(DEADLINE) == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Lan:
    """Namespaces as hosts; each network is a bridge in a namespace that has nothing else."""

    def __init__(self) -> None:
        self._unique = secrets.token_hex(2)
        self._made: list[str] = []
        self._peers: list[Peer] = []
        self.switch = self.host("switch")

    def host(self, name: str, *, ipv6: bool = True, checks_duplicates: bool = False) -> str:
        namespace = f"cvm{self._unique}-{name}"
        ip("netns", "add", namespace)
        self._made.append(namespace)
        for setting, value in (("disable_ipv6", not ipv6), ("accept_dad", checks_duplicates)):
            for where in ("default", "all"):
                path = f"/proc/sys/net/ipv6/conf/{where}/{setting}"
                run("ip", "netns", "exec", namespace, "sh", "-c", f"echo {int(value)} > {path}")
        ip("-n", namespace, "link", "set", "lo", "up")
        return namespace

    def plug(self, host: str, device: str, bridge: str, *addresses: str) -> None:
        """Connect a new device of a host to a bridge."""
        if forked.run(["ip", "-n", self.switch, "link", "show", bridge], capture_output=True).returncode:
            ip("-n", self.switch, "link", "add", bridge, "type", "bridge")
            ip("-n", self.switch, "link", "set", bridge, "up")
        port = f"p{secrets.token_hex(4)}"
        ip("-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", device, "netns", host)
        ip("-n", self.switch, "link", "set", port, "master", bridge, "up")
        for address in addresses:
            ip("-n", host, "address", "add", address, "dev", device)
        ip("-n", host, "link", "set", device, "up")

    def start(self, host: str, key: bytes = KEY, *, announce: bool = True, pattern: str = "") -> Peer:
        peer = Peer(host, key, announce=announce, pattern=pattern)
        self._peers.append(peer)
        return peer

    def close(self) -> None:
        for peer in self._peers:
            peer.kill()
        for namespace in self._made:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", namespace)


def run(*words: str) -> str:
    return forked.run(words, check=True, capture_output=True, text=True, timeout=DEADLINE).stdout


def ip(*words: str) -> str:
    return run("ip", *words)


@pytest.fixture
def lan() -> Iterator[Lan]:
    lan = None
    give_up: Callable[[str], None] = pytest.fail if os.environ.get("CI") else pytest.skip
    if shutil.which("ip") is None:
        give_up("there is no `ip` command to make network namespaces with")
    try:
        try:
            lan = Lan()
        except subprocess.CalledProcessError as error:
            give_up(f"network namespaces are not permitted here: {error.stderr.strip()}")
        assert lan is not None
        yield lan
    finally:
        if lan is not None:
            lan.close()


def test_two_hosts_find_each_other_whichever_comes_first(lan: Lan) -> None:
    hosts = [lan.host("a"), lan.host("b")]
    for i, host in enumerate(hosts):
        lan.plug(host, "eth0", "br0", f"10.9.0.{i + 1}/24")
    first = lan.start(hosts[0])
    second = lan.start(hosts[1])
    of_second = first.next("found", port=second.port)
    of_first = second.next("found", port=first.port)
    assert of_first["after"] < SOON
    assert (of_second["connected"], of_first["connected"]) == ("10.9.0.2", "10.9.0.1")
    third = lan.start(hosts[1], announce=False)  # two processes on a host; this one only listens
    assert third.next("found", port=first.port)["after"] < SOON
    assert third.next("found", port=second.port)["after"] < SOON
    report = third.report()
    assert report["report"] == "listening on eth0"
    sent, heard, matching, foreign = report["eth0"]
    assert (sent > 0, heard > 0, matching, foreign) == (True, True, 2, 0)
    assert first.report()["report"] == second.report()["report"] == "announced on eth0"
    for peer in (third, first, second):
        peer.end()


def test_ipv4_alone_is_enough(lan: Lan) -> None:
    hosts = [lan.host(name, ipv6=False) for name in "ab"]
    for i, host in enumerate(hosts):
        lan.plug(host, "eth0", "br0", f"10.9.0.{i + 1}/24")
    peers = [lan.start(host) for host in hosts]
    for i, peer in enumerate(peers):
        said = peer.next("found", port=peers[1 - i].port)
        assert said["found"] == [f"10.9.0.{2 - i}"] == [said["connected"]]


def test_ipv6_link_local_addresses_alone_are_enough(lan: Lan) -> None:
    hosts = [lan.host(name) for name in "ab"]
    for host in hosts:
        lan.plug(host, "eth0", "br0")
    peers = [lan.start(host) for host in hosts]
    for i, peer in enumerate(peers):
        said = peer.next("found", port=peers[1 - i].port)
        (address,) = said["found"]
        assert address.startswith("fe80::")
        assert "%" not in address
        assert said["connected"] == address


def test_each_network_is_told_its_own_addresses_and_counted_apart(lan: Lan) -> None:
    both, one, two = lan.host("both"), lan.host("one"), lan.host("two")
    lan.plug(both, "eth0", "br0", "10.9.0.1/24")
    lan.plug(both, "eth1", "br1", "10.8.0.1/24")
    lan.plug(both, "docker0", "br2", "172.17.0.1/16")
    lan.plug(one, "eth0", "br0", "10.9.0.2/24")
    lan.plug(two, "eth0", "br1", "10.8.0.2/24")
    middle = lan.start(both, pattern="!172.16.0.0/12,10.0.0.0/8")
    left, right = lan.start(one), lan.start(two, OTHER_KEY)
    assert left.next("found", port=middle.port)["found"] == ["10.9.0.1"]
    said = middle.next("found", port=left.port)  # its link-local address is not on a network that the pattern allows
    assert (said["found"], said["interface"]) == (["10.9.0.2"], "eth0")
    assert right.report_once(lambda report: report["eth0"][3] == 1)["eth0"][2] == 0
    report = middle.report_once(lambda report: report["eth1"][3] == 1)  # one node with another key
    assert report["report"] == "announced on eth0, eth1"
    assert report["eth0"][2:] == [1, 0]
    assert report["eth1"][2] == 0


def test_silence_on_one_network_is_not_hidden_by_talk_on_another(lan: Lan) -> None:
    both, one = lan.host("both", ipv6=False), lan.host("one", ipv6=False)
    lan.plug(both, "eth0", "br0", "10.9.0.1/24")
    lan.plug(both, "eth1", "br1", "10.8.0.1/24")
    lan.plug(one, "eth0", "br0", "10.9.0.2/24")
    listening, speaking = lan.start(both), lan.start(one)
    listening.next("found", port=speaking.port)
    report = listening.report()
    assert report["eth0"][1] > 0
    assert report["eth1"][0] > 0
    assert report["eth1"][1] == 0


def test_an_interface_that_comes_later_is_used_and_one_that_goes_is_forgotten(lan: Lan) -> None:
    laptop, client = lan.host("laptop", checks_duplicates=True), lan.host("desk")
    lan.plug(client, "eth0", "br0", "10.9.0.2/24")
    late, early = lan.start(laptop), lan.start(client)
    lan.plug(laptop, "wlan0", "br0", "10.9.0.1/24")
    assert late.next("found", port=early.port)["connected"] == "10.9.0.2"
    assert early.next("found", port=late.port)["connected"] == "10.9.0.1"
    ip("-n", laptop, "link", "set", "wlan0", "down")
    again = lan.start(laptop)
    ip("-n", laptop, "link", "set", "wlan0", "up")
    assert again.next("found", port=early.port)["connected"]
    for peer in (again, late):
        peer.report_once(lambda report: report["report"] == "announced on wlan0")


def test_a_host_without_any_network_is_no_error(lan: Lan) -> None:
    alone = lan.host("alone")
    peers = [lan.start(alone), lan.start(alone)]
    for i, peer in enumerate(peers):
        said = peer.next("found", port=peers[1 - i].port)
        assert said["found"] == ["127.0.0.1", "::1"]
        assert said["connected"] is None  # no node knows yet that it is the same host
    ip("-n", alone, "link", "set", "lo", "down")
    assert lan.start(alone).report() == {"report": "no network is up"}


def beacon(found: list[tuple[Address, ...]], port: int = 5, key: bytes = KEY, *, announce: bool = True) -> Beacon:
    return Beacon(key, port, LO, lambda places, _interface: found.append(places), announce=announce)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110  # nothing tells when a counter moves
            await asyncio.sleep(0.01)


def on_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test on a loop of its own, and see that it leaves no task and no complaint."""
    complaints: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
        async with asyncio.timeout(DEADLINE):
            await test()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(watched())
    assert complaints == []


def places(found: list[tuple[Address, ...]]) -> set[tuple[str, int]]:
    return {(place.ip, place.port) for hint in found for place in hint}


def test_beacons_on_loopback_find_each_other_and_not_themselves() -> None:
    async def meet() -> None:
        one: list[tuple[Address, ...]] = []
        two: list[tuple[Address, ...]] = []
        watched: list[tuple[Address, ...]] = []
        beacons = [beacon(one, 1001), beacon(two, 1002), beacon(watched, 1003, announce=False)]
        try:
            for each in beacons:
                await each.start()
            await until(lambda: one and two and len(watched) == 2)
            assert [{port for _, port in places(heard)} for heard in (one, two, watched)] == [
                {1002},
                {1001},
                {1001, 1002},
            ]
            assert beacons[0].state == f"announced on {LO}"
            assert beacons[2].observed()[0].announced is False
        finally:
            for each in beacons:
                await each.close()
        assert beacons[0].observed() == []
        assert beacons[0].state == "closed"

    on_loop(meet)


def test_a_node_is_announced_anew_under_a_fresh_tag_and_an_announcement_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(responder, "RENEW_SECONDS", 0.3)

    async def listen() -> None:
        found: list[tuple[Address, ...]] = []
        texts: set[bytes] = set()
        ours, theirs = beacon(found, 1001, announce=False), beacon([], 1002)
        heard = Beacon._heard

        def hear(self: Beacon, *said: Any) -> None:
            announced = read(KEY, said[1])  # the other one hears itself, and all hear what else runs on this machine
            if self is ours and announced is not None and announced.is_ours:
                texts.add(said[1][b"t"])
            heard(self, *said)

        monkeypatch.setattr(Beacon, "_heard", hear)
        try:
            await ours.start()
            await theirs.start()
            await until(lambda: len(texts) >= 3)
            assert len(found) == len(texts) == ours.observed()[0].matching  # each is sent several times
            assert set(found) == {found[0]}
        finally:
            await ours.close()
            await theirs.close()

    on_loop(listen)


def test_another_key_is_noticed_and_not_followed() -> None:
    async def meet() -> None:
        found: list[tuple[Address, ...]] = []
        ours, theirs = beacon(found, 1001), beacon(found, 1002, OTHER_KEY)
        try:
            await ours.start()
            await theirs.start()
            await until(lambda: any(place.port == 1002 for place in ours.observed()[0].foreign))
            await until(lambda: any(place.port == 1001 for place in theirs.observed()[0].foreign))
            assert found == []
        finally:
            await ours.close()
            await theirs.close()

    on_loop(meet)


@pytest.mark.parametrize("steps", range(12))
def test_closing_at_any_moment_of_the_start_leaves_nothing(steps: int) -> None:
    async def interrupt() -> None:
        each = beacon([])
        starting = asyncio.create_task(each.start())
        for _ in range(steps):
            await asyncio.sleep(0)
        if steps % 2:
            starting.cancel()
        await each.close()
        await asyncio.wait([starting])
        await each.close()
        assert starting.cancelled() or starting.exception() is None

    on_loop(interrupt)


def test_what_was_never_started_can_be_closed() -> None:
    async def close() -> None:
        each = beacon([])
        assert each.state == "not started"
        await each.close()
        await each.close()

    on_loop(close)


def test_a_pattern_is_checked_at_once_and_one_that_selects_nothing_is_told_in_the_state() -> None:
    with pytest.raises(ConfigError):
        Beacon(KEY, 1, "eth0,,", lambda *_: None)

    async def start() -> None:
        each = Beacon(KEY, 1, "nosuch*", lambda *_: None)
        try:
            await each.start()
            assert "nosuch*" in each.state
            assert each.observed() == []
        finally:
            await each.close()

    on_loop(start)


@contextlib.contextmanager
def multicast_socket() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("", 5353))
        group = socket.inet_aton("224.0.0.251") + socket.inet_aton("127.0.0.1")
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
        sock.setblocking(False)
        yield sock


def dns_name(name: str) -> bytes:
    return b"".join(bytes([len(part)]) + part.encode() for part in name.rstrip(".").split(".")) + b"\0"


def record(name: str, kind: int, data: bytes) -> bytes:
    return dns_name(name) + struct.pack("!HHIH", kind, 1, 20, len(data)) + data


def answer(*records: bytes) -> bytes:
    return struct.pack("!6H", 0, 0x8400, 0, len(records), 0, 0) + b"".join(records)


def test_junk_from_strangers_neither_stops_it_nor_is_followed() -> None:
    said = (b"v=1", b"n=" + b"a" * 32, b"t=" + b"b" * 32, b"p=9", b"4=" + bytes([127, 0, 0, 1]))
    txt = b"".join(bytes([len(part)]) + part for part in said)
    foreign = f"evil.{SERVICE}"
    packets = [
        b"",
        b"\0",
        os.urandom(200),
        answer(record(SERVICE, 12, dns_name("evil._http._tcp.local."))),
        answer(record(SERVICE, 12, dns_name(SERVICE))),
        answer(record(SERVICE, 12, b"\xc0\x0c")),
        *(answer(record(SERVICE, 12, dns_name(f"flood{i}.{SERVICE}"))) for i in range(300)),
        answer(
            record(SERVICE, 12, dns_name(foreign)),
            record(foreign, 33, struct.pack("!3H", 0, 0, 0) + dns_name("evil.local.")),
            record(foreign, 16, txt),
            record("evil.local.", 1, bytes([127, 0, 0, 1])),
        ),
    ]

    async def bombard() -> None:
        found: list[tuple[Address, ...]] = []
        ours = beacon(found)
        friend = beacon([], 1002)
        try:
            await ours.start()
            with multicast_socket() as stranger:
                for packet in packets:
                    stranger.sendto(packet, ("224.0.0.251", 5353))
                    await asyncio.sleep(0)
            await until(lambda: ours.observed()[0].heard >= len(packets) // 2)
            await friend.start()
            await until(lambda: found)
            assert {port for _, port in places(found)} == {1002}
            assert all(place.port for place in ours.observed()[0].foreign)
        finally:
            await ours.close()
            await friend.close()

    on_loop(bombard)


GOODBYE = struct.pack("!HHI", 16, 0x8001, 0)  # a TXT record that lives no longer


def test_nothing_on_the_wire_names_host_or_key() -> None:
    async def listen() -> None:
        heard: list[bytes] = []
        each = beacon([], 1001)
        with multicast_socket() as stranger:
            asyncio.get_running_loop().add_reader(stranger, lambda: heard.append(stranger.recv(9000)))
            try:
                await each.start()
                await until(lambda: sum(b"v=1" in packet for packet in heard) >= 3)
            finally:
                await each.close()
            await until(lambda: any(GOODBYE in packet for packet in heard))
            asyncio.get_running_loop().remove_reader(stranger)
        everything = b"".join(heard)
        host = socket.gethostname().encode()
        for private in (bytes([len(host)]) + host, KEY, KEY.hex().encode()):
            assert private not in everything

    on_loop(listen)


def test_a_forked_child_keeps_no_multicast_socket() -> None:
    code = f"""
import asyncio, os
from covey.net.discovery.mdns import Beacon
def sockets():
    links = [os.path.realpath("/proc/self/fd/" + number).split("/")[-1] for number in os.listdir("/proc/self/fd")]
    udp = [line.split()[9] for kind in ("udp", "udp6") for line in open("/proc/self/net/" + kind) if ":14E9 " in line]
    return sum(link == f"socket:[{{inode}}]" for link in links for inode in udp)
async def main():
    beacon = Beacon(b"k" * 32, 1, {LO!r}, lambda *_: None)
    await beacon.start()
    child = os.fork()
    if not child:
        os._exit(sockets())
    kept = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(kept, sockets())
    await beacon.close()
    print(sockets())
asyncio.run(main())
"""
    if not os.path.exists("/proc/self/net/udp"):
        pytest.skip("sockets of a process are looked up in /proc")
    ended = forked.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE)
    assert ended.stdout == "0 2\n0\n", ended.stderr
