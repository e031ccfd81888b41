"""Networks that lose packets, delay them, swallow long ones, or come and go: runs go on, or say what was lost, and no
number is wrong."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.members import STEADY, by_rank, start_with_keeper
from tests.support.nodes import Cluster
from tests.support.waiting import DEADLINE

from covey.testing.netns import Lan

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.members import Member

PREFIX = "covey-faults"
NOTICE_SECONDS = 12.0
"""How soon an operation ends whose path is dead, on a machine that does nothing else."""
FLAPS = int(os.environ.get("FLAPS", "2"))
"""How often a network goes down and comes back."""
PROGRAM = STEADY.replace('on_loss="continue", ', "")
every_policy = pytest.mark.parametrize("on_loss", ["raise", pytest.param("continue", marks=pytest.mark.thorough)])

LOSSY = """
import json, logging, sys
import numpy as np
import covey

said = []
class Keep(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("covey").addHandler(Keep())
logging.getLogger("covey").setLevel(logging.INFO)
print(json.dumps("ready"), flush=True)
with covey.join(sys.argv[2], **json.loads(sys.argv[3])) as group:
    is_done = False
    while not is_done:
        x = np.arange(250_000, dtype=np.float32) + group.rank
        group.all_reduce(x)
        assert np.array_equal(x, 2 * np.arange(250_000, dtype=np.float32) + 1)
        now = any("BBR" in each for each in said)
        is_done = bool(group.all_reduce(float(now), op="min"))
    print(json.dumps([each for each in said if "BBR" in each]))
"""


def start_run(lan: Lan, **options: Any) -> list[Member]:
    cluster = Cluster()
    given = {"patience": DEADLINE, "count": 5_000, "pause": 0.1, "talks": True, "on_loss": "continue"} | options
    return by_rank([start_with_keeper(cluster, host, "faults", PROGRAM, "--size", "2", **given) for host in lan.hosts])


def await_progress(members: list[Member], number: int) -> None:
    """Return once all members have taken a step that began after this call."""
    members[0].signal(signal.SIGUSR2)
    for member in members:
        member.said("marked", number)


def end_well(members: list[Member]) -> None:
    members[0].ask_to_end()
    assert len({member.end()["step"] for member in members}) == 1
    for member in members:
        assert member.all_said("error") == member.all_said("contributors") == [], member.story()


@pytest.mark.thorough
def test_packets_that_are_lost_or_late_cost_time_and_nothing_else() -> None:
    """Under `raise`, where the first member that is taken for lost ends the run."""
    with Lan(hosts=2, kind="switch", prefix=PREFIX) as lan:
        members = start_run(lan, on_loss="raise")
        faults = [{"loss": 0.01}, {"loss": 0.05}, {"delay": 0.2}, {"delay": 0.05, "jitter": 0.05, "loss": 0.01}]
        number = 0
        for fault in faults:
            lan.switch.shape(**fault)
            for _ in range(2):
                await_progress(members, number)
                number += 1
        lan.switch.shape()
        lan.switch.lose("host0", "host1", 0.15)  # and nothing on the way back
        await_progress(members, number)
        lan.switch.mend()
        await_progress(members, number + 1)
        end_well(members)


@pytest.mark.parametrize("on_loss", [pytest.param("raise", marks=pytest.mark.thorough), "continue"])
def test_an_operation_whose_only_network_dies_ends_with_the_reason(
    on_loss: str, promised: Callable[[float], float]
) -> None:
    with Lan(hosts=2, kind="switch", prefix=PREFIX) as lan:
        members = start_run(lan, on_loss=on_loss, patience=3, count=2_000_000, pause=0.0, talks=False)
        await_progress(members, 0)
        lan.hosts[1].run(["ip", "link", "set", "eth0", "down"])  # in the middle of an all_reduce, most likely
        at = time.monotonic()
        for member in members:
            if on_loss == "continue" and member is members[0]:  # the tie-breaker goes on alone
                said = member.said("contributors")
                assert said["hosts"] == [member.host.index], member.story()
            else:
                said = member.said("error")
                assert said["kind"] == ("PeerLostError" if on_loss == "raise" else "QuorumLostError"), said
            assert said["at"] - at < promised(NOTICE_SECONDS), member.story()


@every_policy
def test_a_network_that_goes_and_comes_again_and_again_stops_no_run_that_has_another(on_loss: str) -> None:
    with Lan(hosts=2, kind="switch", two_networks=True, prefix=PREFIX) as lan:
        members = start_run(lan, on_loss=on_loss)
        for number in range(FLAPS):
            lan.switches[0].cut("host0")
            await_progress(members, 2 * number)
            lan.switches[0].mend()
            await_progress(members, 2 * number + 1)
        end_well(members)


@every_policy
def test_a_path_that_swallows_long_packets_is_left(on_loss: str) -> None:
    with Lan(hosts=2, kind="switch", two_networks=True, prefix=PREFIX) as lan:
        members = start_run(lan, on_loss=on_loss)
        number = 0
        for switch in lan.switches:  # one of them carries the lanes
            switch.swallow(longer_than=1000)
            await_progress(members, number)
            switch.mend()
            await_progress(members, number + 1)
            number += 2
        end_well(members)


@pytest.mark.thorough
@pytest.mark.parametrize("longest", [1000, 1300])
def test_where_only_short_packets_pass_lanes_send_short_ones(longest: int) -> None:
    with Lan(hosts=2, kind="switch", prefix=PREFIX) as lan:
        members = start_run(lan)
        lan.switch.swallow(longer_than=longest)
        for number in range(2):
            await_progress(members, number)
        end_well(members)
        told = [kind for member in members for kind, *_ in member.said("events")["kinds"]]
        assert told.count("mtu") == (2 if longest < 1280 else 1), "the end that dials says so for each size"


@pytest.mark.parametrize("on_loss", [pytest.param("raise", marks=pytest.mark.thorough), "continue"])
def test_what_the_firewall_of_this_machine_drops_costs_no_operation_and_no_message(on_loss: str) -> None:
    """The kernel does not even send it: nothing is unacknowledged, and nothing times out.

    The rank whose message was dropped has sent it, as far as it knows, and waits in the next operation.
    """
    with Lan(hosts=2, kind="switch", prefix=PREFIX) as lan:
        members = start_run(lan, on_loss=on_loss)
        await_progress(members, 0)
        words = "tc qdisc add dev eth0 root tbf rate 1gbit burst 1000 latency 100ms"  # drops what is longer than 1000
        lan.hosts[members[0].host.index].run(words.split())
        for number in (1, 2):
            await_progress(members, number)
        end_well(members)
        told = [kind for member in members for kind, *_ in member.said("events")["kinds"]]
        assert "mtu" in told, "the end that dials says what it found"


def test_lanes_on_which_packets_get_lost_use_bbr() -> None:
    with Lan(hosts=2, kind="switch", prefix=PREFIX) as lan:
        for host in lan.hosts:
            host.run(["sh", "-c", "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"])
        has_bbr = "bbr" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text()
        expected = "the lane uses BBR from now on" if has_bbr else "does not let covey use BBR"
        cluster = Cluster()
        nodes = [cluster.start(host, code=LOSSY, size=2) for host in lan.hosts]
        lan.switch.shape(loss=0.03)
        for code, out, err in [node.end() for node in nodes]:
            assert code == 0, err
            said = json.loads(out.splitlines()[-1])
            assert any(expected in each for each in said), said
