"""`covey doctor` on networks with something wrong says what, and which side has to mend it."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from tests.netns.nodes import SOURCE, Cluster, Node

from covey.testing.netns import Lan

if TYPE_CHECKING:
    from covey.testing.netns import Host

pytestmark = pytest.mark.slow

PREFIX = "covey-doctor"
PORT = 47700
DEADLINE = 30.0
MOST_SECONDS = 10.0
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
    def people(self) -> list[dict[str, Any]]:
        return self.facts["people"]

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
    deadline = time.monotonic() + DEADLINE
    while True:
        with host.socket() as knock:
            knock.settimeout(DEADLINE)
            if knock.connect_ex((host.ip4, PORT)) == 0:
                return f"{host.ip4}:{PORT}"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_on_a_network_in_order_two_doctors_and_a_node_find_each_other_and_nothing_wrong() -> None:
    with Lan(hosts=3, rate=f"{RATE * 8:.0f}bit", prefix=PREFIX) as lan:
        cluster = Cluster()
        start_node(lan.hosts[0], cluster)
        diagnoses = [end_doctor(doctor) for doctor in [start_doctor(host, cluster) for host in lan.hosts[1:]]]
        purposes = [sorted(person["purpose"] for person in said.people) for said in diagnoses]
        assert ["candidate", "visitor"] in purposes  # one may have left when the other comes
        assert all(each in (["candidate"], ["candidate", "visitor"]) for each in purposes)
        for said in diagnoses:
            assert (said.code, said.findings) == (0, {})
            assert said.seconds < MOST_SECONDS
            for person in said.people:
                assert "multicast" in person["found_by"]
                for ways in (person["ways_there"], person["ways_back"]):
                    assert len(ways) == 3  # IPv4, unique local and link-local
                    assert all(0 <= way["round_trip"] < 1 for way in ways), ways
                assert person["path_mtu"] == 1500
                if person["purpose"] == "candidate":  # a visitor may be about to leave
                    # Two measure it at the same time; and if the node is slow to confirm what came in the first half
                    # of the time, it counts in the second.
                    assert 0.1 * RATE < person["bytes_per_second"] < 2.1 * RATE
            used = said.interface("eth0")
            assert min(used["sent"], used["came_back"], used["heard"]) > 0
            assert len(used["heard_from"]) >= len(said.people)
            assert not said.interface("lo")["is_used"]


def test_where_multicast_is_dropped_it_says_so_with_and_without_a_seed() -> None:
    with Lan(hosts=3, kind="switch", prefix=PREFIX) as lan:
        lan.switch.allow_multicast(False)
        cluster = Cluster()
        seed = start_node(lan.hosts[0], cluster)
        doctors = [start_doctor(lan.hosts[1], cluster, "--seeds", seed), start_doctor(lan.hosts[2], cluster)]
        seeded, alone = [end_doctor(doctor) for doctor in doctors]
        for said in (seeded, alone):
            assert said.seconds < MOST_SECONDS
            assert said.interface("eth0")["came_back"] > 0
            assert said.interface("eth0")["heard"] == 0
        assert (seeded.code, list(seeded.findings)) == (0, ["multicast-blocked"])
        assert [person["found_by"] for person in seeded.people] == [["seed"]]
        assert (alone.code, list(alone.findings)) == (1, ["nobody"])
        assert "not one multicast packet" in alone.findings["nobody"]["text"]


def test_a_one_way_firewall_is_noticed_and_the_side_that_has_it_named() -> None:
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
            assert said.seconds < MOST_SECONDS
            (person,) = said.people
            assert {way["round_trip"] >= 0 for way in person["ways_there"]} == {reaches_node}
            assert {way["round_trip"] >= 0 for way in person["ways_back"]} == {not reaches_node}
            assert (said.code, list(said.findings)) == (0, ["one-way-firewall"])
            where = "this machine" if reaches_node else f"{person['name']} ({lan.hosts[0].ip4})"
            advice = f"open {PORTS_TO_OPEN} in the firewall of {where}:"
            assert advice in said.findings["one-way-firewall"]["remedy"]


def test_a_machine_that_is_heard_but_closed_both_ways_is_named() -> None:
    with Lan(hosts=2, kind="switch", prefix=PREFIX) as lan:
        lan.switch.forbid_dialling("host0", "host1")
        lan.switch.forbid_dialling("host1", "host0")
        cluster = Cluster()
        start_node(lan.hosts[0], cluster)
        said = see_doctor(lan.hosts[1], cluster)
        assert said.seconds < MOST_SECONDS
        assert said.code == 1
        assert list(said.findings) == ["unreachable", "nobody"]
        assert lan.hosts[0].ip4 in said.facts["unreachable"]
        assert PORTS_TO_OPEN in said.findings["unreachable"]["remedy"]


def test_a_node_with_another_secret_nearby_is_noticed_by_its_announcement_and_at_a_seed() -> None:
    with Lan(hosts=2, kind="switch", prefix=PREFIX) as lan:
        seed = start_node(lan.hosts[0], Cluster())
        said = see_doctor(lan.hosts[1], Cluster(), "--seeds", seed)
        assert said.seconds < MOST_SECONDS
        assert said.code == 1
        assert list(said.findings) == ["wrong-secret-at-seed", "wrong-secret-nearby", "nobody"]
        for code in ("wrong-secret-at-seed", "wrong-secret-nearby"):
            assert seed in said.findings[code]["text"]
