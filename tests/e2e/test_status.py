"""`covey status`: the nodes of a cluster, as people and scripts see them."""

from __future__ import annotations

import json
import os
import re
import signal
import time

from tests.support import pipes
from tests.support.machines import end, heard, wait_until_joined
from tests.support.waiting import DEADLINE

from covey.base.version import __version__


def test_a_run_is_shown_with_its_nodes_by_rank_and_the_ways_between_them(lab) -> None:
    machine = lab.machine("one", "lab")
    nodes = [machine.node("mine", size=3) for _ in range(3)]
    pids = dict(zip(wait_until_joined(nodes), (node.pid for node in nodes), strict=True))
    ended = machine.covey("status", "--json")
    assert ended.returncode == 0, ended.stderr
    picture = json.loads(ended.stdout)
    assert (picture["cluster"], picture["silent"], picture["refused"]) == ("lab", [], {})
    (run,) = picture["runs"]
    assert (run["name"], run["state"]) == ("mine", "running")
    assert (run["events"][0]["kind"], run["events"][0]["generation"]) == ("generation", 0)
    assert [(node["rank"], node["pid"]) for node in run["nodes"]] == sorted(pids.items())
    assert [node["is_leader"] for node in run["nodes"]] == [True, False, False]
    assert [node["is_tie_breaker"] for node in run["nodes"]] == [True, False, False]
    for node in run["nodes"]:
        assert (node["version"], node["interface"], node["state"]) == (__version__, "lo", "running")
        assert node["name"] == f"{node['host'].partition('.')[0]}-{node['short_id'][:4]}"
        assert abs(node["clock_offset"]) < 60
        assert {peer["rank"] for peer in node["peers"]} == {0, 1, 2} - {node["rank"]}
        assert all(peer["lane"] in ("shm", "unix") and 0 < peer["round_trip"] < 60 for peer in node["peers"])
    shown = machine.covey("status").stdout.splitlines()
    assert shown[0].startswith("run mine in lab: running for ")
    assert shown[0].endswith(", 3 nodes")
    assert [line.split()[0] for line in shown[2:5]] == ["0", "1", "2"]
    assert [line.rstrip().endswith("leader, tie-breaker") for line in shown[2:5]] == [True, False, False]
    for node in nodes:
        assert end(node)[0] == 0
    assert lab.left_behind() == []


def test_agents_and_runs_of_this_machine_are_shown_though_no_run_of_the_cluster_goes_on(lab) -> None:
    machine = lab.machine("one", "lab")
    agent = machine.start("-m", "covey", "up")
    assert " is up in the cluster 'lab'" in pipes.stdout(agent).readline()
    local = machine.start("-m", "covey", "run", "-n", "2", "--solo", "sh", "-c", "echo up; exec sleep 600")
    assert pipes.stdout(local).readline().endswith("up\n")
    ended = machine.covey("status", "--wait", "2")
    assert ended.returncode == 0, ended.stderr
    assert "no node" not in ended.stderr
    assert re.search(r"^agent +", ended.stdout, re.MULTILINE)
    assert "no run of the cluster is running" in ended.stdout
    assert re.search(rf"^sh +2 +{local.pid}$", ended.stdout, re.MULTILINE)
    seen = json.loads(machine.covey("status", "--json", "--wait", "2").stdout)
    assert [each["version"] for each in seen["agents"]] == [__version__]
    assert ("sh", 2, local.pid) in [(each["name"], each["size"], each["pid"]) for each in seen["local"]]
    for process in (agent, local):
        process.terminate()
        process.wait(DEADLINE)
    assert lab.left_behind() == []


def test_no_node_is_an_answer_too(lab) -> None:
    machine = lab.machine("one", "lab")
    ended = machine.covey("status", "lab", "--wait", "0.3")  # without the name, runs of other tests here count, too
    assert (ended.returncode, ended.stdout.strip()) == (1, "")
    assert ended.stderr == "no node of cluster 'lab' is running or answering; `covey doctor` looks for the cause\n"
    ended = machine.covey("status", "lab", "--json", "--wait", "0.3")
    assert ended.returncode == 1
    assert json.loads(ended.stdout)["runs"] == []
    assert "not in a cluster 'den'" in machine.covey("status", "den").stderr
    assert machine.covey("status", "--wait", "-1").returncode == 2
    assert lab.left_behind() == []


def test_a_node_that_waits_for_others_is_shown_as_joining_and_other_clusters_are_not_shown(lab) -> None:
    one, two = lab.machine("one", "lab"), lab.machine("two", "den")
    waiting, foreign = one.node("mine", min_size=2), two.node("mine", min_size=2)
    assert heard(waiting) == heard(foreign) == "joining"
    (run,) = json.loads(one.covey("status", "--json", "--wait", "2").stdout)["runs"]
    assert run["state"] == "joining"
    assert [(node["pid"], node["rank"], node["state"]) for node in run["nodes"]] == [(waiting.pid, None, "joining")]
    (wait,) = run["waits"]
    assert f"  waits: {wait}\n" in one.covey("status", "--wait", "2").stdout


def test_a_frozen_node_is_shown_by_what_the_others_know_of_it(lab) -> None:
    machine = lab.machine("one", "lab")
    nodes = [machine.node("mine", size=2) for _ in range(2)]
    ranks = wait_until_joined(nodes)
    frozen = nodes[ranks.index(1)]
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + DEADLINE
        ended = machine.covey("status", "--json")
        while not json.loads(ended.stdout)["runs"][0]["waits"]:  # at first nothing is amiss
            assert time.monotonic() < deadline
            ended = machine.covey("status", "--json")
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    (run,) = json.loads(ended.stdout)["runs"]
    assert [(node["rank"], node["state"]) for node in run["nodes"]] == [(0, "running"), (1, "silent")]
    assert run["nodes"][1]["pid"] == frozen.pid
    assert run["waits"][0].startswith(f"rank 1 ({run['nodes'][1]['name']}) cannot be heard")


def test_watching_shows_nodes_that_come_and_go_until_ctrl_c(lab) -> None:
    machine = lab.machine("one", "lab")
    watch = machine.start("-m", "covey", "status", "lab", "--watch", "--json")
    assert heard(watch)["runs"] == []
    node = machine.node("mine", min_size=2)
    while not (runs := heard(watch)["runs"]) or not runs[0]["ranks"]:
        pass
    assert (runs[0]["name"], runs[0]["state"]) == ("mine", "waiting")
    assert [(each["pid"], each["state"]) for each in runs[0]["ranks"]] == [(node.pid, "joining")]
    assert runs[0]["sentence"]["text"] == "1 of 2 nodes so far"
    node.kill()
    node.wait(DEADLINE)
    while heard(watch)["runs"][0]["state"] != "ended":
        pass
    watch.send_signal(signal.SIGINT)
    assert end(watch)[0] == 0


def test_watching_without_a_terminal_prints_one_line_after_another(lab) -> None:
    machine = lab.machine("one", "lab")
    assert heard(machine.node("mine", min_size=2)) == "joining"
    watch = machine.start("-m", "covey", "status", "lab", "--watch")
    while "mine, waiting, 0 ranks" not in watch.stdout.readline():
        pass
    watch.send_signal(signal.SIGTERM)
    code, _, err = end(watch)
    assert (code, err) == (0, "")
