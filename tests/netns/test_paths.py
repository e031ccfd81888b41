"""Machines with two networks between them: when one dies, operations go on over the other."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest
from tests.support.members import STEADY, by_rank, start_with_keeper
from tests.support.nodes import Cluster
from tests.support.waiting import DEADLINE

from covey.testing.netns import Lan

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.members import Member

PREFIX = "covey-paths"
MOVE_SECONDS = 5.0
"""An operation moves within this time whenever there is a path, on a machine that does nothing else."""


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


def marked_at(members: list[Member], number: int) -> list[float]:
    """Return when each member had taken a step that began after this call."""
    members[0].signal(signal.SIGUSR2)
    return [member.said("marked", number)["at"] for member in members]


@pytest.mark.parametrize("kind", [pytest.param("cable", marks=pytest.mark.thorough), "interface"])
def test_an_operation_moves_over_the_other_network_when_one_dies(kind: str, promised: Callable[[float], float]) -> None:
    with Lan(hosts=2, kind="switch", two_networks=True, prefix=PREFIX) as lan:
        cluster = Cluster()
        options = {"patience": DEADLINE, "count": 20_000, "pause": 0.1, "talks": True}
        started = [start_with_keeper(cluster, host, "paths", STEADY, "--size", "2", **options) for host in lan.hosts]
        members = by_rank(started)
        for number in (0, 1):  # one of them carries links and lanes
            marked_at(members, 2 * number)  # operations go on
            kill_network(lan, number, kind)
            at = time.monotonic()
            assert max(marked_at(members, 2 * number + 1)) - at < promised(MOVE_SECONDS), members[0].story()
            revive(lan, number, kind)
        for member in members:
            assert member.all_said("contributors") == [], f"no member is lost\n{member.story()}"
        members[0].ask_to_end()
        assert len({member.end()["step"] for member in members}) == 1
