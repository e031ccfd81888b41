"""A better network appears while a run goes on: its lanes move there, and no operation notices."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.members import STEADY, by_rank, start_with_keeper
from tests.support.nodes import Cluster

from covey.testing.netns import Lan
from covey.testing.switch import inside

if TYPE_CHECKING:
    from covey.testing.netns import Host

PREFIX = "covey-better"
MOVE_SECONDS = 10.0
"""Lanes are on the better network within this time."""
STANDSTILL_SECONDS = 5.0
"""What the machine that runs the test may stand still meanwhile."""
PROGRAM = STEADY.replace('on_loss="continue", ', "").replace(
    "[[e.kind, e.generation, list(e.ranks)]",
    '[[e.kind, e.generation, list(e.ranks), e.text if e.kind == "moved" else ""]',
)


def sent(host: Host, device: str) -> int:
    """Return how many bytes an interface of a host has sent."""
    with inside(host.namespace):
        lines = [line.split() for line in Path("/proc/thread-self/net/dev").read_text().splitlines()]
    return next(int(line[9]) for line in lines if line[0] == f"{device}:")


def narrow(host: Host, device: str, rate: str) -> None:
    words = f"tc qdisc add dev {device} root tbf rate {rate} burst 64kb latency 100ms"
    host.run(words.split())


@pytest.mark.thorough
@pytest.mark.alone
def test_lanes_move_to_a_faster_network_that_appears() -> None:
    """Under `raise`, where no view gives the group new lanes."""
    with Lan(hosts=2, two_networks=True, prefix=PREFIX) as lan:
        for host in lan.hosts:
            narrow(host, "eth0", "40mbit")
            host.run(["ip", "link", "set", "eth1", "down"])
        cluster = Cluster()
        options = {"patience": 20, "count": 50_000, "pause": 0.05, "talks": True, "on_loss": "raise"}
        words = (
            "--size",
            "2",
            "--stripe",
            "off",
        )  # it may use both networks otherwise
        started = [start_with_keeper(cluster, host, "better", PROGRAM, *words, **options) for host in lan.hosts]
        members = by_rank(started)
        time.sleep(1.0)
        for host in lan.hosts:
            host.run(["ip", "link", "set", "eth1", "up"])
        appeared = time.monotonic()
        while True:
            before = [sent(host, "eth0") for host in lan.hosts]
            time.sleep(0.5)
            idle = [sent(host, "eth0") - old < 100_000 for host, old in zip(lan.hosts, before, strict=True)]
            if all(idle) and all(sent(host, "eth1") > 1_000_000 for host in lan.hosts):
                break
            stories = "\n".join(member.story() for member in members)
            assert time.monotonic() < appeared + MOVE_SECONDS + STANDSTILL_SECONDS, stories
        members[0].signal(signal.SIGUSR2)
        for member in members:
            member.said("marked")
        members[0].ask_to_end()
        assert len({member.end()["step"] for member in members}) == 1
        for member in members:
            assert member.all_said("error") == member.all_said("contributors") == [], member.story()
            (events,) = member.all_said("events")
            moved = [text for kind, _, _, text in events["kinds"] if kind == "moved"]
            assert len(moved) == 1, events
            assert "10.213.0." in moved[0] or "fd00:213::" in moved[0] or "fe80" in moved[0]
