"""`covey doctor` on networks with something wrong says what, and which side has to mend it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.support import pipes
from tests.support.nodes import PORT, SOURCE, Cluster, Node, wait_until_listening
from tests.support.waiting import DEADLINE

from covey.testing.netns import Lan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from covey.testing.netns import Host

PREFIX = "covey-doctor"
MOST_SECONDS = 10.0
"""What a doctor takes at most, on a machine that does nothing else."""
RATE = 12.5e6
PORTS_TO_OPEN = "47700-47731/tcp"


@dataclass
class Diagnosis:
    """What one doctor said."""

    code: int
    seconds: float
    facts: dict[str, Any]
    findings: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def nodes(self) -> list[dict[str, Any]]:
        return self.facts["nodes"]

    def interface(self, name: str) -> dict[str, Any]:
        return next(each for each in self.facts["interfaces"] if each["name"] == name)


def start_doctor(host: Host, cluster: Cluster, *words: str) -> Node:
    env = {"PYTHONPATH": str(SOURCE), "COVEY_SECRET": cluster.secret}
    return Node(host, host.popen([sys.executable, "-m", "covey", "doctor", "--json", *words], env=env))


def end_doctor(doctor: Node) -> Diagnosis:
    out, err = doctor.process.communicate(timeout=DEADLINE)
    seconds = time.monotonic() - doctor.started_at
    assert doctor.process.returncode in (0, 1), err
    assert err == ""
    facts = json.loads(out)
    return Diagnosis(doctor.process.returncode, seconds, facts, {each["code"]: each for each in facts["findings"]})


def see_doctor(host: Host, cluster: Cluster, *words: str) -> Diagnosis:
    return end_doctor(start_doctor(host, cluster, *words))


def start_node(host: Host, cluster: Cluster) -> str:
    """Start a node that waits for a second one, and return its seed when it listens."""
    node = cluster.start(host, timeout=DEADLINE)
    node.wait_until_joining()
    wait_until_listening(host)
    return f"{host.ip4}:{PORT}"


def test_on_a_network_in_order_two_doctors_and_a_waiting_node_find_each_other_and_nothing_wrong(
    promised: Callable[[float], float],
) -> None:
    with Lan(hosts=3, rate=f"{RATE * 8:.0f}bit", prefix=PREFIX) as lan:
        cluster = Cluster()
        start_node(lan.hosts[0], cluster)
        diagnoses = [end_doctor(doctor) for doctor in [start_doctor(host, cluster) for host in lan.hosts[1:]]]
        purposes = [sorted(met["purpose"] for met in said.nodes) for said in diagnoses]
        assert ["candidate", "visitor"] in purposes  # one may have left when the other comes
        assert all(each in (["candidate"], ["candidate", "visitor"]) for each in purposes)
        is_alone = promised(1) == 1  # beside other tests, a visitor may leave early, and speeds are what they are
        for said in diagnoses:
            assert (said.code, list(said.findings)) == (0, ["waiting-nodes"])
            assert said.seconds < promised(MOST_SECONDS)
            for met in said.nodes:
                assert "multicast" in met["found_by"]
                for ways in (met["ways_there"], met["ways_back"]):
                    assert len(ways) == 3  # IPv4, unique local and link-local
                    if met["purpose"] == "candidate" or is_alone:
                        assert all(0 <= way["round_trip"] < promised(1) for way in ways), ways
                assert met["path_mtu"] == 1500
                if met["purpose"] == "candidate" and is_alone:
                    # Two measure it at the same time; and if the node is slow to confirm what came in the first half
                    # of the time, it counts in the second.
                    assert 0.1 * RATE < met["bytes_per_second"] < 2.1 * RATE
            used = said.interface("eth0")
            assert min(used["sent"], used["came_back"], used["heard"]) > 0
            assert len(used["heard_from"]) >= len(said.nodes)
            assert not said.interface("lo")["is_used"]


def test_where_multicast_is_dropped_it_says_so_with_and_without_a_seed(promised: Callable[[float], float]) -> None:
    with Lan(hosts=3, kind="switch", prefix=PREFIX) as lan:
        lan.switch.allow_multicast(False)
        cluster = Cluster()
        seed = start_node(lan.hosts[0], cluster)
        doctors = [start_doctor(lan.hosts[1], cluster, "--seeds", seed), start_doctor(lan.hosts[2], cluster)]
        seeded, alone = [end_doctor(doctor) for doctor in doctors]
        for said in (seeded, alone):
            assert said.seconds < promised(MOST_SECONDS)
            assert said.interface("eth0")["came_back"] > 0
            assert said.interface("eth0")["heard"] == 0
        assert (seeded.code, list(seeded.findings)) == (0, ["multicast-blocked", "waiting-nodes"])
        assert [met["found_by"] for met in seeded.nodes] == [["seed"]]
        assert (alone.code, list(alone.findings)) == (1, ["nobody"])
        assert "not one multicast packet" in alone.findings["nobody"]["text"]


def test_a_one_way_firewall_is_noticed_and_the_side_that_has_it_named(promised: Callable[[float], float]) -> None:
    with Lan(hosts=3, kind="switch", prefix=PREFIX) as lan:
        lan.switch.cut("host1", "host2")
        lan.switch.cut("host2", "host1")
        lan.switch.forbid_dialling("host1", "host0")
        lan.switch.forbid_dialling("host0", "host2")
        cluster = Cluster()
        start_node(lan.hosts[0], cluster)
        doctors = [start_doctor(host, cluster) for host in lan.hosts[1:]]
        for reaches_node, doctor in zip((False, True), doctors, strict=True):
            said = end_doctor(doctor)
            assert said.seconds < promised(MOST_SECONDS)
            (met,) = said.nodes
            assert {way["round_trip"] >= 0 for way in met["ways_there"]} == {reaches_node}
            assert {way["round_trip"] >= 0 for way in met["ways_back"]} == {not reaches_node}
            assert (said.code, list(said.findings)) == (0, ["one-way-firewall", "waiting-nodes"])
            where = "this machine" if reaches_node else f"{met['name']} ({lan.hosts[0].ip4})"
            advice = f"allow {PORTS_TO_OPEN} in the firewall of {where}:"
            assert advice in said.findings["one-way-firewall"]["remedy"]


def test_a_machine_that_is_heard_but_closed_both_ways_is_named(promised: Callable[[float], float]) -> None:
    with Lan(hosts=2, kind="switch", prefix=PREFIX) as lan:
        lan.switch.forbid_dialling("host0", "host1")
        lan.switch.forbid_dialling("host1", "host0")
        cluster = Cluster()
        start_node(lan.hosts[0], cluster)
        said = see_doctor(lan.hosts[1], cluster)
        assert said.seconds < promised(MOST_SECONDS)
        assert said.code == 1
        assert list(said.findings) == ["unreachable"]
        assert lan.hosts[0].ip4 in said.facts["unreachable"]
        assert PORTS_TO_OPEN in said.findings["unreachable"]["remedy"]


def test_a_node_with_another_secret_nearby_is_noticed_by_its_announcement_and_at_a_seed(
    promised: Callable[[float], float],
) -> None:
    with Lan(hosts=2, kind="switch", prefix=PREFIX) as lan:
        seed = start_node(lan.hosts[0], Cluster())
        said = see_doctor(lan.hosts[1], Cluster(), "--seeds", seed)
        assert said.seconds < promised(MOST_SECONDS)
        assert said.code == 1
        assert list(said.findings) == ["wrong-secret-at-seed", "wrong-secret-nearby"]
        for code in ("wrong-secret-at-seed", "wrong-secret-nearby"):
            assert seed in said.findings[code]["text"]


def test_two_nodes_that_wait_with_different_sizes_are_told_apart_and_the_doctor_leaves_no_trace(
    promised: Callable[[float], float],
) -> None:
    with Lan(hosts=2, kind="bridge", prefix=PREFIX) as lan:
        cluster = Cluster()
        three, two = (
            cluster.start(host, size=size, timeout=DEADLINE) for host, size in zip(lan.hosts, (3, 2), strict=True)
        )
        for node in (three, two):
            node.wait_until_joining()
        _wait_until_refused(lan.hosts[0], cluster)
        said = see_doctor(lan.hosts[0], cluster)
        assert said.seconds < promised(MOST_SECONDS)
        assert (said.code, next(iter(said.findings))) == (1, "waiting-differs")
        finding = said.findings["waiting-differs"]
        assert finding["text"].startswith("Run 'my-run' has waited ")
        assert "this machine was started with --size 3 and " in finding["text"]
        assert "was started with --size 2." in finding["text"]
        assert "--size" in finding["remedy"]
        waits = {met["is_here"]: met["wait"] for met in said.nodes}
        assert (waits[True]["size"], waits[False]["size"]) == (3, 2)
        said = see_doctor(lan.hosts[1], cluster)
        assert all("47731" not in where for met in said.nodes for where in met["wait"]["problems"])


def _wait_until_refused(host: Host, cluster: Cluster) -> None:
    """Return when the node on a host has refused another one."""
    deadline = time.monotonic() + DEADLINE
    env = {"PYTHONPATH": str(SOURCE), "COVEY_SECRET": cluster.secret}
    while True:
        status = host.popen([sys.executable, "-m", "covey", "status", "--json", "--wait", "1"], env=env)
        out, err = status.communicate(timeout=DEADLINE)
        runs = json.loads(out)["runs"] if out else []
        if any(len(run["waits"]) > 1 for run in runs):
            return
        assert time.monotonic() < deadline, err


def test_an_interface_that_is_down_is_named_and_no_firewall_is_blamed() -> None:
    with Lan(hosts=2, kind="bridge", prefix=PREFIX) as lan:
        cluster = Cluster()
        start_node(lan.hosts[1], cluster)
        lan.hosts[1].run(["ip", "link", "set", "eth0", "down"])
        said = see_doctor(lan.hosts[1], cluster, "--seeds", lan.hosts[0].ip4)
        assert (said.code, list(said.findings)[:2]) == (1, ["waiting-no-network", "interface-down"])
        for finding in list(said.findings.values())[:2]:
            assert finding["remedy"] == "ip link set eth0 up"
        assert "firewall" not in json.dumps(list(said.findings.values()))


def test_a_seed_that_refuses_connections_is_a_machine_where_covey_is_to_be_started() -> None:
    with Lan(hosts=2, kind="bridge", prefix=PREFIX) as lan:
        cluster, seed = Cluster(), lan.hosts[0].ip4
        node = cluster.start(lan.hosts[1], seeds=[seed], timeout=DEADLINE)
        node.wait_until_joining()
        deadline = time.monotonic() + DEADLINE
        while "waiting-seed" not in (said := see_doctor(lan.hosts[1], cluster)).findings:  # it may not listen yet
            assert time.monotonic() < deadline, said
        finding = said.findings["waiting-seed"]
        assert (said.code, next(iter(said.findings))) == (1, "waiting-seed")
        assert f"{seed}:47700: Connection refused" in finding["text"]
        assert "Start covey run on that machine" in finding["remedy"]
        assert "firewall" not in finding["remedy"]
        idle = see_doctor(lan.hosts[1], cluster, "--seeds", f"{seed}:47701")
        assert "firewall" not in idle.findings["seed-silent"]["remedy"]


def test_init_typed_on_both_machines_is_told_by_the_node_that_waits_and_by_the_doctor() -> None:
    with Lan(hosts=2, kind="bridge", prefix=PREFIX) as lan:
        env = {"PYTHONPATH": str(SOURCE)}
        for host in lan.hosts:
            init = host.popen([sys.executable, "-m", "covey", "init"], env=env)
            assert init.wait(DEADLINE) == 0
        join = "import covey; covey.join('train', timeout=500)"
        nodes = [host.popen([sys.executable, "-c", join], env=env) for host in lan.hosts]
        told = pipes.read_until(pipes.stderr(nodes[0]), "type `covey pair` here and `covey enroll` there")
        assert f"{lan.hosts[1].ip4}" in told
        assert "another secret than cluster 'home' has here" in told
        doctor = lan.hosts[0].popen([sys.executable, "-m", "covey", "doctor"], env=env)
        out, err = doctor.communicate(timeout=DEADLINE)
        assert (doctor.returncode, err) == (1, "")
        words = " ".join(out.split())
        assert words.startswith("problem ")
        assert "`covey init` was probably typed on both" in words
        assert lan.hosts[1].ip4 in words


@contextlib.contextmanager
def small_disk(host: Host, path: Path, options: str) -> Iterator[None]:
    """Put a file system of 64 kB at a folder of a host."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size=64k,mode=700,{options}", "tmpfs", path], check=True)
    try:
        yield
    finally:
        host.end_processes()
        subprocess.run(["umount", path], check=True)


def test_a_full_temporary_folder_and_a_read_only_home_are_named() -> None:
    with Lan(hosts=1, kind="bridge", prefix=PREFIX) as lan:
        (host,), cluster = lan.hosts, Cluster()
        with small_disk(host, host.temp, "rw"), small_disk(host, host.home, "ro"):
            with contextlib.suppress(OSError):
                (host.temp / "full").write_bytes(bytes(1 << 17))
            said = see_doctor(host, cluster)
        assert (said.code, list(said.findings)[:2]) == (1, ["configuration-folder", "temporary-folder"])
        finding = said.findings["configuration-folder"]
        assert f"{host.home} cannot be written: Read-only file system." in finding["text"]
        assert "COVEY_HOME" in finding["remedy"]
        finding = said.findings["temporary-folder"]
        assert str(host.temp) in finding["text"]
        assert "No space left on device" in finding["text"]
        assert "0 bytes free" in finding["text"]
        assert "TMPDIR and XDG_RUNTIME_DIR" in finding["remedy"]
