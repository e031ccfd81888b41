"""Machines with two networks between them: when one dies, operations go on over the other."""

from __future__ import annotations

import signal
import time

import pytest
from tests.support.members import STEADY, by_rank, start_with_keeper
from tests.support.nodes import Cluster

from covey.testing.netns import Lan

PREFIX = "covey-paths"
MOVE_SECONDS = 5.0
"""An operation moves within this time whenever there is a path."""
STANDSTILL_SECONDS = 2.0
"""What the machine that runs the test may stand still."""


def kill_network(lan: Lan, number: int, kind: str) -> None:
    """Let nothing pass on one of the two networks."""
    if kind == "interface":
        lan.hosts[1].run(["ip", "link", "set", f"eth{number}", "down"])
    else:
        for one, other in (("host0", "host1"), ("host1", "host0")):
            lan.switches[number].cut(one, other)


def revive(lan: Lan, number: int, kind: str) -> None:
    if kind == "interface":
        lan.hosts[1].run(["ip", "link", "set", f"eth{number}", "up"])
    else:
        lan.switches[number].mend()


@pytest.mark.parametrize("kind", ["cable", "interface"])
def test_an_operation_moves_over_the_other_network_when_one_dies(kind: str) -> None:
    with Lan(hosts=2, kind="switch", two_networks=True, prefix=PREFIX) as lan:
        cluster = Cluster()
        options = {"patience": 20, "count": 200_000, "pause": 0.04, "talks": True}
        started = [start_with_keeper(cluster, host, "paths", STEADY, "--size", "2", **options) for host in lan.hosts]
        members = by_rank(started)
        for number in (0, 1):  # one of them carries links and lanes
            time.sleep(1.0)
            kill_network(lan, number, kind)
            at = time.monotonic()
            time.sleep(0.5)  # so that what follows is after the cut
            members[0].signal(signal.SIGUSR2)
            for member in members:
                taken = member.said("marked", number)["at"] - at
                assert taken < MOVE_SECONDS + STANDSTILL_SECONDS, member.story()
            revive(lan, number, kind)
            time.sleep(2.5)  # addresses come back, and what was tried in vain is tried again
        for member in members:
            assert member.all_said("contributors") == [], f"no member is lost\n{member.story()}"
        members[0].ask_to_end()
        assert len({member.end()["step"] for member in members}) == 1
