"""Hosts that cannot connect with each other: a relay that both reach is enough for everything that a run does."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sys
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from tests.support import pipes
from tests.support.members import STEADY, Member, by_rank
from tests.support.nodes import SOURCE, Cluster, Node
from tests.support.waiting import DEADLINE, wait_until

from covey.net.keys import clusters
from covey.testing.netns import Lan
from covey.wire.secret import ClusterSecret

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from covey.testing.netns import Host

PYTHONPATH = {"PYTHONPATH": str(SOURCE)}
every_policy = pytest.mark.parametrize("on_loss", ["raise", pytest.param("continue", marks=pytest.mark.thorough)])
JOB = """
import json, sys, time
import numpy as np
import covey

host, run, options = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
with covey.join(run, **options) as group:
    other = 1 - group.rank
    node = group.node
    node.register("scale", lambda values: values * (group.rank + 2))
    x = np.arange(200_003, dtype=np.float64) * (group.rank + 1)
    group.all_reduce(x)
    report = dict(rank=group.rank, sums=[float(x[1]), float(x[-1])])
    sent = np.arange(70_001, dtype=np.int64) + 1000 * group.rank
    sending = group.send(sent, other, async_op=True)
    taken = group.recv(other)
    sending.wait()
    report |= dict(taken=[int(taken[0]), int(taken[-1])])
    report |= dict(called=node.call(other, "scale", np.arange(5.0)).tolist())
    report |= dict(relays=[each.relay for each in node.links()], lanes=group.lanes())
    print(json.dumps(report), flush=True)
    sys.stdin.readline()
    steps, slowest = 0, 0.0
    try:
        while steps < 30:
            began = time.monotonic()
            x = np.full(1000, 10.0 ** group.rank)
            group.all_reduce(x)
            slowest = max(slowest, time.monotonic() - began)
            steps += 1
            assert x[0] == x[-1] == 11.0, x
            time.sleep(0.02)
        print(json.dumps(dict(steps=steps, slowest=slowest, relays=[each.relay for each in node.links()])))
    except covey.PeerLostError as error:
        print(json.dumps(dict(lost=error.rank, text=str(error), seconds=time.monotonic() - began)))
"""


@contextlib.contextmanager
def two_networks(hosts: int = 3) -> Iterator[list[Host]]:
    """Two hosts on different networks, without a route to each other, and others that are on both networks."""
    with Lan(hosts=hosts, two_networks=True) as lan:
        for index in (0, 1):
            lan.hosts[index].run(["ip", "link", "set", f"eth{1 - index}", "down"])
        yield lan.hosts


def start_relay(host: Host) -> subprocess.Popen[str]:
    process = host.popen([sys.executable, "-m", "covey", "relay", "--report", "1"], env=PYTHONPATH)
    assert pipes.stdout(process).readline() == "The relay listens at [::]:47690.\n"
    return process


def start_nodes(cluster: Cluster, hosts: list[Host], **options: Any) -> list[Node]:
    """Start a node on each of the two networks; each knows the relays by their addresses on its own network."""
    relays = [",".join(relay.ip4s[network] for relay in hosts[2:]) for network in (0, 1)]
    return [cluster.start(hosts[i], env={"COVEY_RELAYS": relays[i]}, code=JOB, **options) for i in (0, 1)]


def hear(node: Node) -> dict[str, Any]:
    line = pipes.stdout(node.process).readline()
    assert line, pipes.stderr(node.process).read()
    return dict(json.loads(line))


def go_on(nodes: list[Node]) -> None:
    for node in nodes:
        stdin = node.process.stdin
        assert stdin is not None
        stdin.write("\n")
        stdin.flush()


def ended(node: Node) -> dict[str, Any]:
    code, out, err = node.end()
    assert code == 0, err
    return dict(json.loads(out.splitlines()[-1]))


def test_a_relay_that_both_hosts_reach_is_enough_for_collectives_messages_and_calls() -> None:
    with two_networks() as hosts:
        relay, cluster = start_relay(hosts[2]), Cluster()
        nodes = start_nodes(cluster, hosts)
        reports = sorted((hear(node) for node in nodes), key=lambda report: report["rank"])
        for rank, report in enumerate(reports):
            assert report["sums"] == [3.0, 3.0 * 200_002]
            assert report["taken"] == [1000 * (1 - rank), 1000 * (1 - rank) + 70_000]
            assert report["called"] == [value * (3 - rank) for value in (0.0, 1.0, 2.0, 3.0, 4.0)]
            assert report["lanes"] == {str(1 - rank): "secure"}
        assert sorted(report["relays"][0] for report in reports) == sorted(f"{ip}:47690" for ip in hosts[2].ip4s)
        env = {**PYTHONPATH, "COVEY_SECRET": cluster.secret, "COVEY_RELAYS": hosts[2].ip4s[0]}
        wanted = [f"relayed by {ip}:47690: 1 link" for ip in hosts[2].ip4s]

        def is_shown() -> bool:
            """Tell whether both nodes have answered; a look is over after a while, whoever has answered."""
            shown = hosts[0].run([sys.executable, "-m", "covey", "status"], env=env).stdout
            return all(line in shown for line in wanted)

        wait_until(is_shown)
        go_on(nodes)
        assert [ended(node)["steps"] for node in nodes] == [30, 30]
        audit = hosts[0].run([sys.executable, "-m", "covey", "audit", "--event", "met", "--json"], env=env).stdout
        assert f"relayed by {hosts[2].ip4s[0]}:47690" in audit
        relay.send_signal(signal.SIGTERM)
        out, err = relay.communicate(timeout=DEADLINE)
        assert (relay.returncode, err) == (0, "")
        assert out.endswith("The relay has ended.\n")


def test_without_its_relay_a_run_that_raises_names_the_peer_that_is_lost() -> None:
    with two_networks() as hosts:
        relay = start_relay(hosts[2])
        nodes = start_nodes(Cluster(), hosts, on_loss="raise", timeout=DEADLINE)
        ranks = [hear(node)["rank"] for node in nodes]
        relay.kill()
        relay.wait(DEADLINE)
        go_on(nodes)
        for rank, node in zip(ranks, nodes, strict=True):
            report = ended(node)
            assert report["lost"] == 1 - rank
            assert f"rank {1 - rank}" in report["text"]
            assert report["seconds"] < DEADLINE / 2


@every_policy
def test_when_one_of_two_relays_is_lost_the_run_goes_on_through_the_other(on_loss: str) -> None:
    with two_networks(hosts=4) as hosts:
        relays = [start_relay(host) for host in hosts[2:]]
        nodes = start_nodes(Cluster(), hosts, on_loss=on_loss)
        used = [hear(node)["relays"][0].partition(":")[0] for node in nodes]
        first = next(index for index, host in enumerate(hosts[2:]) if used[0] in host.ip4s)
        assert used[1] in hosts[2 + first].ip4s
        relays[first].kill()
        relays[first].wait(DEADLINE)
        go_on(nodes)
        for node in nodes:
            report = ended(node)
            assert report["steps"] == 30
            assert report["relays"][0].partition(":")[0] in hosts[3 - first].ip4s


@pytest.mark.thorough
@every_policy
def test_relays_that_end_one_after_the_other_cost_no_member(on_loss: str) -> None:
    """The second one ends as soon as the first one has returned: no node is registered there yet."""
    with two_networks(hosts=4) as hosts:
        relays = [start_relay(host) for host in hosts[2:]]
        told = [",".join(relay.ip4s[network] for relay in hosts[2:]) for network in (0, 1)]
        cluster = Cluster()
        program = STEADY.replace('on_loss="continue"', f'on_loss="{on_loss}"')
        options: dict[str, Any] = {"count": 500, "pause": 0.02, "talks": True, "patience": DEADLINE}
        started = [
            cluster.start(hosts[i], env={"COVEY_RELAYS": told[i]}, code=program, size=2, **options) for i in (0, 1)
        ]
        members = by_rank([Member(node.host, node.process) for node in started])
        for number, index in enumerate((0, 1, 0)):
            relays[index].kill()
            relays[index].wait(DEADLINE)
            members[0].signal(signal.SIGUSR2)
            if number == 0:  # one of them carries the links
                for member in members:
                    member.said("marked")
            relays[index] = start_relay(hosts[2 + index])
        members[0].signal(signal.SIGUSR2)
        for member in members:
            member.said("marked", 1)
        members[0].ask_to_end()
        assert len({member.end()["step"] for member in members}) == 1
        for member in members:
            assert member.all_said("contributors") == member.all_said("error") == [], member.story()


def test_a_relay_that_does_not_run_is_named_by_the_node_and_by_the_doctor() -> None:
    with two_networks() as hosts:
        cluster, started = Cluster(), time.monotonic()
        (node,) = start_nodes(cluster, hosts, timeout=12)[:1]
        env = {**PYTHONPATH, "COVEY_SECRET": cluster.secret, "COVEY_RELAYS": hosts[2].ip4s[0]}
        doctor = hosts[0].popen([sys.executable, "-m", "covey", "doctor", "--json"], env=env)
        facts = json.loads(doctor.communicate(timeout=DEADLINE)[0])
        (finding,) = [each for each in facts["findings"] if each["code"] == "relay-silent"]
        assert hosts[2].ip4s[0] in finding["text"]
        assert "covey relay" in finding["remedy"]
        code, _, err = node.end()
        assert code == 1
        assert f"{hosts[2].ip4s[0]}: Connection refused" in err, (err, time.monotonic() - started)


FAR = """
import sys
from covey.testing.proxy import Proxy

with Proxy((sys.argv[1], 47690)) as proxy:
    proxy.delay = 0.02
    print(proxy.address[1], flush=True)
    sys.stdin.readline()
"""
MOVING = """
import json, sys, time
import numpy as np
import covey

host, run, options = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
with covey.join(run, **options) as group:
    print(json.dumps(dict(relays=[each.relay for each in group.node.links()])), flush=True)
    steps, is_over = 0, 0.0
    while is_over < 2:
        moves = [event.text for event in group.events() if event.kind == "moved"]
        has_moved = any("lane moved" in text for text in moves)
        x = np.array([has_moved, 10.0 ** group.rank])
        group.all_reduce(x)
        assert x[1] == 11.0, x
        steps, is_over = steps + 1, x[0]
        time.sleep(0.01)
    print(json.dumps(dict(moves=moves, relays=[each.relay for each in group.node.links()])), flush=True)
    sys.stdin.readline()
    for _ in range(5):
        x = np.array([1.0 + group.rank])
        group.all_reduce(x)
        assert x[0] == 3.0
    print(json.dumps(dict(steps=steps)), flush=True)
"""


@pytest.mark.thorough
@pytest.mark.alone  # which relay is nearer is measured
def test_lanes_move_to_a_nearer_relay_that_appears_and_no_operation_fails() -> None:
    with two_networks(hosts=4) as hosts:
        relay, cluster = start_relay(hosts[2]), Cluster()
        far = hosts[0].popen([sys.executable, "-c", FAR, hosts[2].ip4s[0]], env=PYTHONPATH)
        first = f"127.0.0.1:{pipes.stdout(far).readline().strip()}"
        relays = [f"{first},{hosts[3].ip4s[0]}", f"{hosts[2].ip4s[1]},{hosts[3].ip4s[1]}"]
        nodes = [
            cluster.start(hosts[i], env={"COVEY_RELAYS": relays[i]}, code=MOVING, on_loss="raise", timeout=DEADLINE)
            for i in (0, 1)
        ]
        assert [hear(node)["relays"] for node in nodes] == [[first], [f"{hosts[2].ip4s[1]}:47690"]]
        nearer = start_relay(hosts[3])
        for network, node in enumerate(nodes):
            report, there = hear(node), f"{hosts[3].ip4s[network]}:47690"
            assert report["relays"] == [there]
            before = first if network == 0 else f"{hosts[2].ip4s[1]}:47690"
            assert f"secure lane moved from relay {before} to relay {there}" in report["moves"]
        go_on(nodes)
        assert all(ended(node)["steps"] > 10 for node in nodes)
        for process in (far, relay, nearer):
            process.kill()
            process.wait(DEADLINE)


@pytest.mark.thorough
def test_lanes_leave_the_relay_when_a_direct_way_appears_and_no_operation_fails() -> None:
    with two_networks() as hosts:
        relay, cluster = start_relay(hosts[2]), Cluster()
        nodes = [
            cluster.start(
                hosts[i], env={"COVEY_RELAYS": hosts[2].ip4s[i]}, code=MOVING, on_loss="raise", timeout=DEADLINE
            )
            for i in (0, 1)
        ]
        assert [hear(node)["relays"] for node in nodes] == [[f"{hosts[2].ip4s[i]}:47690"] for i in (0, 1)]
        hosts[0].run(["ip", "link", "set", "eth1", "up"])
        for i, node in enumerate(nodes):
            report = hear(node)
            assert report["relays"] == [""]
            (text,) = report["moves"]
            assert text.startswith(f"secure lane moved from relay {hosts[2].ip4s[i]}:47690 to ")
            assert "relay" not in text.partition(" to ")[2]
        go_on(nodes)
        assert all(ended(node)["steps"] > 10 for node in nodes)
        relay.kill()
        relay.wait(DEADLINE)


THREE = """
import json, sys, time
import numpy as np
import covey

with covey.join("three", size=3, timeout=500) as group:
    x = np.arange(100_003, dtype=np.float64) * (group.rank + 1)
    group.all_reduce(x)
    found = {each.rank: each.relay for each in group.node.links()}
    hosts = group.all_gather_object((sys.argv[1], found))
    print(json.dumps(dict(sums=[float(x[1]), float(x[-1])], hosts=hosts)), flush=True)
"""


def test_a_member_that_both_hosts_reach_is_their_relay_if_its_owner_allows_it(tmp_path: Path) -> None:
    script = tmp_path / "three.py"
    script.write_text(THREE)
    with two_networks() as hosts:
        cluster = Cluster()
        env = {**PYTHONPATH, "COVEY_SECRET": cluster.secret}
        covey_run = [sys.executable, "-m", "covey", "run", "--run", "three", "--size", "3"]
        offering = hosts[2].popen([*covey_run, "--relay-limit", "50M", str(script), "2"], env=env)
        others = [
            hosts[index].popen([sys.executable, str(script), str(index)], env=env | {"COVEY_RUN": "three"})
            for index in (0, 1)
        ]
        ends = [process.communicate(timeout=DEADLINE) for process in (offering, *others)]
        assert [process.returncode for process in (offering, *others)] == [0, 0, 0], ends
        report = json.loads(ends[1][0].splitlines()[-1])
        assert report["sums"] == [6.0, 6.0 * 100_002]
        ranks = {host: rank for rank, (host, _) in enumerate(report["hosts"])}
        relays = {host: {int(rank): relay for rank, relay in found.items()} for host, found in report["hosts"]}
        for host, other in (("0", "1"), ("1", "0")):
            assert relays[host][ranks[other]] == f"{hosts[2].ip4s[int(host)]}:47690"
            assert relays[host][ranks["2"]] == relays["2"][ranks[host]] == ""


LAUNCHED = """
import json
import numpy as np
import covey

with covey.join(timeout=500) as group:
    x = np.arange(100_003, dtype=np.float64) * (group.rank + 1)
    group.all_reduce(x)
    group.barrier()
    relays = {each.rank: each.relay for each in group.node.links()}
    print(json.dumps(dict(sums=[float(x[1]), float(x[-1])], relays=relays)), flush=True)
"""


@pytest.mark.parametrize("first", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_ranks_of_a_launcher_that_cannot_connect_use_a_relay(first: int) -> None:
    """Rank 0 is out of reach for another rank, or all reach it and two others do not reach each other."""
    with two_networks() as hosts:
        relay, cluster = start_relay(hosts[2]), Cluster()
        ranks = [hosts[2], *hosts[:2]] if first == 2 else hosts
        started = []
        for rank, host in enumerate(ranks):
            network = host.index if host.index < 2 else 0
            master = hosts[2].ip4s[network] if first == 2 else hosts[0].ip4s[0]
            env = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
            env |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_NAMESPACE": "j", "MASTER_ADDR": master}
            env |= {"MASTER_PORT": "29500", "COVEY_SECRET": cluster.secret, "COVEY_RELAYS": hosts[2].ip4s[network]}
            started.append(host.popen([sys.executable, "-c", LAUNCHED], env=PYTHONPATH | env))
        ends = [process.communicate(timeout=DEADLINE) for process in started]
        assert [process.returncode for process in started] == [0, 0, 0], ends
        reports = [json.loads(out) for out, _ in ends]
        apart = {(1, 2), (2, 1)} if first == 2 else {(0, 1), (1, 0)}
        for rank, report in enumerate(reports):
            assert report["sums"] == [6.0, 6.0 * 100_002]
            for other, used in report["relays"].items():
                expected = f"{hosts[2].ip4s[ranks[rank].index]}:47690" if (rank, int(other)) in apart else ""
                assert used == expected, (rank, other, used)
        relay.kill()
        relay.wait(DEADLINE)


def test_a_machine_that_is_up_is_a_relay_for_others_if_its_owner_allows_it() -> None:
    with two_networks() as hosts:
        key = secrets.token_bytes(32)
        for host in hosts:
            with patch.dict(os.environ, COVEY_HOME=str(host.home)):
                clusters.save(clusters.Cluster(ClusterSecret("home", key)))
        up = [sys.executable, "-m", "covey", "up", "--relay-limit", "50M"]
        agent = hosts[2].popen(up, env=PYTHONPATH)
        said = [pipes.stdout(agent).readline() for _ in range(3)]
        assert said[2] == "It is a relay for nodes of the cluster, at port 47690.\n", said
        argv = [sys.executable, "-c", JOB, "0", "pair", json.dumps({"size": 2, "timeout": DEADLINE})]
        nodes = [
            Node(hosts[i], hosts[i].popen(argv, env=PYTHONPATH | {"COVEY_SEEDS": hosts[2].ip4s[i]})) for i in (0, 1)
        ]
        assert [hear(node)["relays"] for node in nodes] == [[f"{hosts[2].ip4s[i]}:47690"] for i in (0, 1)]
        go_on(nodes)
        assert [ended(node)["steps"] for node in nodes] == [30, 30]
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(DEADLINE) == 0


@pytest.mark.parametrize(
    "speaks", ["pcp", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("pmp", "upnp"))]
)
def test_a_mapped_port_of_the_router_is_enough_for_two_hosts_that_cannot_connect(speaks: str) -> None:
    with two_networks() as hosts:
        router, cluster = hosts[2], Cluster()
        hosts[0].run(["ip", "route", "add", "default", "via", router.ip4s[0]])
        argv = [sys.executable, "-m", "covey.testing.gateway", *router.ip4s[:2], "--speaks", speaks]
        gateway = router.popen(argv, env=PYTHONPATH)
        assert pipes.stdout(gateway).readline() == "ready\n"
        inside = cluster.start(hosts[0], env={"COVEY_MAP_PORT": "1"}, code=JOB, timeout=DEADLINE)
        mapped = json.loads(pipes.stdout(gateway).readline())
        assert (mapped["what"], mapped["client"]) == ("mapped", hosts[0].ip4s[0])
        env = {**PYTHONPATH, "COVEY_SECRET": cluster.secret, "COVEY_MAP_PORT": "1"}
        doctor = hosts[0].popen([sys.executable, "-m", "covey", "doctor", "--json"], env=env)
        seed = f"{router.ip4s[1]}:{mapped['external']}"
        outside = cluster.start(hosts[1], env={"COVEY_SEEDS": seed}, code=JOB, timeout=DEADLINE)
        nodes = [inside, outside]
        facts = json.loads(doctor.communicate(timeout=DEADLINE)[0])
        assert facts["router"] == {"pcp": "PCP", "pmp": "NAT-PMP", "upnp": "UPnP"}[speaks]
        for report in (hear(node) for node in nodes):
            assert report["sums"] == [3.0, 3.0 * 200_002]
            assert report["relays"] == [""]
            assert list(report["lanes"].values()) == ["secure"]
        go_on(nodes)
        assert [ended(node)["steps"] for node in nodes] == [30, 30]
        assert json.loads(pipes.stdout(gateway).readline()) == mapped | {"what": "unmapped"}
        gateway.kill()
        gateway.wait(DEADLINE)
