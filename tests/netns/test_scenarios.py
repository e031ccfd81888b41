"""Nodes on networks as people have them find each other, agree on their ranks and talk in secret."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest
from tests.support.nodes import PORT, Cluster, check_members, check_run, seconds_to_first_result

from covey.base.native import native
from covey.net.host.machine import usable_cores
from covey.runtime.lanes.kinds import STREAMS_FAR, streams_for
from covey.testing.netns import Lan

if TYPE_CHECKING:
    from collections.abc import Callable

QUICKLY = 5.0


def test_two_nodes_without_flags_have_a_result_within_five_seconds(promised: Callable[[float], float]) -> None:
    with Lan(hosts=2) as lan:
        cluster = Cluster()
        first = cluster.start(lan.hosts[0])
        first.wait_until_joining()
        second = cluster.start(lan.hosts[1])
        reports = check_run([first, second])
        assert seconds_to_first_result(second, reports) < promised(QUICKLY)


def test_five_nodes_find_each_other() -> None:
    with Lan(hosts=5) as lan:
        cluster = Cluster()
        check_run([cluster.start(host, size=5) for host in lan.hosts])


def test_nodes_of_one_host_have_adjacent_ranks_and_share_memory() -> None:
    with Lan(hosts=2) as lan:
        cluster = Cluster()
        reports = check_members([cluster.start(lan.hosts[i], size=4) for i in (0, 1, 0, 1)])
        hosts = reports[0]["hosts"]
        assert hosts in ([0, 0, 1, 1], [1, 1, 0, 0])
        for rank, report in enumerate(reports):
            assert report["local_rank"] == rank % 2
            lanes = {other: "shm" if other // 2 == rank // 2 else "secure" for other in range(4) if other != rank}
            assert report["lanes"] == {str(other): kind for other, kind in lanes.items()}


@pytest.mark.parametrize(("knowing", "family"), [(0, "ipv4"), (1, "ipv6")], ids=["the first", "the second"])
def test_where_multicast_is_dropped_a_seed_known_on_one_side_is_enough(knowing: int, family: str) -> None:
    with Lan(hosts=2, kind="switch") as lan:
        lan.switch.allow_multicast(False)
        known = lan.hosts[1 - knowing]
        seed = f"{known.ip4}:{PORT}" if family == "ipv4" else f"[{known.ip6}]:{PORT}"
        cluster = Cluster()
        nodes = []
        for i, host in enumerate(lan.hosts):
            nodes.append(cluster.start(host, env={"COVEY_SEEDS": seed} if i == knowing else {}))
            nodes[-1].wait_until_joining()
        check_run(nodes)


def test_one_seed_is_enough_for_three_nodes_without_multicast_and_its_port_may_be_fixed() -> None:
    with Lan(hosts=3, kind="switch") as lan:
        lan.switch.allow_multicast(False)
        cluster = Cluster()
        settings = [{"COVEY_PORT": "50123"}, *2 * [{"COVEY_SEEDS": f"{lan.hosts[0].ip4}:50123"}]]
        check_run([cluster.start(host, size=3, env=env) for host, env in zip(lan.hosts, settings, strict=True)])


def test_without_multicast_and_seeds_nodes_say_that_they_met_no_other() -> None:
    with Lan(hosts=2, kind="switch") as lan:
        lan.switch.allow_multicast(False)
        cluster = Cluster()
        for node in [cluster.start(host, env={"COVEY_JOIN_TIMEOUT": "2"}) for host in lan.hosts]:
            code, _, err = node.end()
            assert code == 1
            last = err.strip().splitlines()[-1]
            assert last.startswith("covey.DeadlineError")
            assert "1 of 2 nodes so far" in last


@pytest.mark.parametrize(
    ("broken", "ways"),
    [pytest.param(0, 2, marks=pytest.mark.thorough), (1, 1)],
    ids=["first, both ways", "second, one way"],
)
def test_of_two_networks_the_one_that_works_is_used(broken: int, ways: int) -> None:
    with Lan(hosts=2, kind="switch", two_networks=True) as lan:
        switch = lan.switches[broken]
        switch.cut("host0", "host1")
        if ways == 2:
            switch.cut("host1", "host0")
        cluster = Cluster()
        check_run([cluster.start(host) for host in lan.hosts])


def test_interfaces_that_lead_nowhere_do_no_harm() -> None:
    with Lan(hosts=2, two_networks=True) as lan:
        lan.hosts[0].run(["ip", "link", "set", "eth1", "down"])
        lan.hosts[1].run(["ip", "address", "add", "10.99.0.1/24", "dev", "eth1"])
        lan.hosts[1].run(["ip", "link", "add", "docker0", "type", "bridge"])
        lan.hosts[1].run(["ip", "address", "add", "172.17.0.1/16", "dev", "docker0"])
        lan.hosts[1].run(["ip", "link", "set", "docker0", "up"])
        cluster = Cluster()
        check_run([cluster.start(host) for host in lan.hosts])


@pytest.mark.parametrize("ula", [True, False], ids=["unique local", "link local"])
def test_ip_version_6_alone_is_enough(ula: bool) -> None:
    with Lan(hosts=2, ipv4=False, ula=ula) as lan:
        cluster = Cluster()
        check_run([cluster.start(host) for host in lan.hosts])


@pytest.mark.parametrize(("source", "destination"), [(0, 1), pytest.param(1, 0, marks=pytest.mark.thorough)])
def test_a_firewall_that_lets_connections_through_one_way_only_does_no_harm(source: int, destination: int) -> None:
    with Lan(hosts=2, kind="switch") as lan:
        lan.switch.forbid_dialling(f"host{source}", f"host{destination}")
        cluster = Cluster()
        check_run([cluster.start(host) for host in lan.hosts])


@pytest.mark.parametrize("seeds", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["mdns", "seeds"])
def test_hosts_that_call_themselves_127_0_1_1_are_found_by_their_real_addresses(seeds: bool) -> None:
    with Lan(hosts=2, kind="switch", hosts_file=True) as lan:
        lan.switch.allow_multicast(not seeds)
        cluster = Cluster()
        env = {"COVEY_SEEDS": f"{lan.hosts[0].ip4}:{PORT}"} if seeds else {}
        check_run([cluster.start(lan.hosts[0]), cluster.start(lan.hosts[1], env=env)])


@pytest.mark.thorough
def test_two_runs_of_one_cluster_do_not_meet() -> None:
    with Lan(hosts=2) as lan:
        cluster = Cluster()
        nodes = {run: [cluster.start(host, run) for host in lan.hosts] for run in ("blue", "green")}
        for members in nodes.values():
            reports = check_members(members)
            assert sorted(reports[0]["hosts"]) == [0, 1]
            assert [report["lanes"] for report in reports] == [{"1": "secure"}, {"0": "secure"}]


@pytest.mark.thorough
@pytest.mark.parametrize("names", [("", ""), ("blue", "green")], ids=["same name", "two names"])
def test_two_clusters_with_a_run_of_the_same_name_do_not_meet(names: tuple[str, str]) -> None:
    with Lan(hosts=4) as lan:
        clusters = [Cluster(name) for name in names]
        nodes = [clusters[host.index % 2].start(host, "same-name") for host in lan.hosts]
        for cluster in (0, 1):
            check_run(nodes[cluster::2])


@pytest.mark.thorough
def test_formations_in_a_row_agree() -> None:
    code = """
import json, random, sys, time
import covey

host, run, options = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
starts = random.Random(host)
reports = []
for number in range(4):
    time.sleep(starts.uniform(0, 0.2))  # people do not start their machines at the same time
    with covey.join(f"{run}-{number}", **options) as group:
        total = group.all_reduce(10 ** group.rank)
        reports.append([group.rank, group.all_gather_object(host), total, group.lanes()])
print(json.dumps(reports))
"""
    with Lan(hosts=3) as lan:
        cluster = Cluster()
        nodes = [cluster.start(host, code=code, size=3) for host in lan.hosts]
        ends = [node.end() for node in nodes]
        assert [code for code, _, _ in ends] == [0, 0, 0], ends
        by_host = [json.loads(out) for _, out, _ in ends]
        for formation in zip(*by_host, strict=True):
            hosts = formation[0][1]
            assert sorted(hosts) == [0, 1, 2]
            for host, (rank, order, total, lanes) in enumerate(formation):
                assert (order, hosts[rank], total) == (hosts, host, 111)
                assert set(lanes.values()) == {"secure"}


def test_a_slow_and_lossy_network_takes_longer_and_nothing_else() -> None:
    with Lan(hosts=3, kind="switch") as lan:
        lan.switch.shape(delay=0.01, jitter=0.005, loss=0.02)
        cluster = Cluster()
        check_run([cluster.start(host, size=3) for host in lan.hosts])


CONNECTIONS = """
import json, os, sys, time
from pathlib import Path
import numpy as np
import covey

with covey.join(sys.argv[2], **json.loads(sys.argv[3])) as group:
    x = np.arange(300_000.0) * (group.rank + 1)
    group.all_reduce(x)

    def established():
        lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/self/net", name).open()]
        return sum(line[3] == "01" for line in lines)

    while established() != int(os.environ["EXPECTED"]):  # if they met twice at first, one of the links ends later
        time.sleep(0.05)
    streams = group.lanes().streams[1 - group.rank]
    group.barrier()
print(json.dumps([group.rank, streams, float(x[-1])]))
"""


NEAR = streams_for(0.0, usable_cores() if native().module is not None else 0, ranks_here=1)
MEASURED = [pytest.mark.thorough, pytest.mark.alone]
"""A busy machine may take a near host for a distant one."""


@pytest.mark.parametrize(
    ("delay", "streams", "expected"),
    [
        pytest.param(0.0, None, NEAR, marks=MEASURED),
        pytest.param(0.015, None, 4, marks=MEASURED),
        (0.04, None, STREAMS_FAR),
        (0.0, 3, 3),
    ],
)
def test_a_lane_has_more_streams_the_longer_the_way_or_as_many_as_asked(
    delay: float, streams: int | None, expected: int
) -> None:
    with Lan(hosts=2, kind="switch") as lan:
        lan.switch.shape(delay=delay)
        cluster = Cluster()
        env = {"EXPECTED": str(1 + expected)}  # a link and the streams of a lane
        nodes = [cluster.start(host, code=CONNECTIONS, env=env, size=2, streams=streams) for host in lan.hosts]
        ends = [node.end() for node in nodes]
        assert [code for code, _, _ in ends] == [0, 0], ends
        assert sorted(json.loads(out) for _, out, _ in ends) == [[rank, expected, 3.0 * 299_999] for rank in range(2)]


@pytest.mark.thorough
def test_a_node_that_comes_long_before_the_others_waits_for_them() -> None:
    with Lan(hosts=2, kind="switch") as lan:
        lan.switch.cut("host0")
        cluster = Cluster()
        nodes = [cluster.start(host) for host in lan.hosts]
        for node in nodes:
            node.wait_until_joining()
        time.sleep(1.5)  # the time in which announcements are most frequent
        lan.switch.mend()
        check_run(nodes)
