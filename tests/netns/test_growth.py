"""Runs between machines take newcomers in: hosts that are added, spares, and members that come back again and again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from tests.support.members import ELASTIC, check_same_end, indexes, start, together
from tests.support.nodes import Cluster
from tests.support.waiting import DEADLINE

from covey.testing.netns import Lan

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX = "covey-growth"
STALL_SECONDS = 2.0
"""An operation of a run that takes newcomers in, or does not get to see one, is never held up for as long, on a machine
that does nothing else."""


def test_a_host_that_is_added_gets_in_a_spare_when_there_is_room_and_no_node_waits_for_one_that_is_out_of_reach(
    promised: Callable[[float], float],
) -> None:
    with Lan(hosts=4, kind="switch", prefix=PREFIX) as lan:
        cluster = Cluster()
        one, two, third, far = lan.hosts
        grows = [start(cluster, host, "grows", ELASTIC, min_size=2) for host in (one, two)]
        full = [start(cluster, host, "full", ELASTIC, min_size=2, max_size=2) for host in (one, two)]
        assert [together(members)["number"] for members in (grows, full)] == [0, 0]

        lan.switch.forbid_dialling(third.name, two.name)  # one of a pair has to be able to reach the other
        for source, destination in ((two, far), (far, two)):
            lan.switch.cut(source.name, destination.name)
        unreached = start(cluster, far, "grows", ELASTIC, min_size=2)
        unreached.said("joining")
        grows.append(start(cluster, third, "grows", ELASTIC, min_size=2))
        spare = start(cluster, third, "full", ELASTIC, min_size=2, max_size=2)
        spare.said("joining")
        grown = together(grows)
        assert grown["step"] > 0
        founded = len(grows[0].all_said("generation"))
        time.sleep(1.5)  # in which neither may get in
        assert spare.all_said("generation") == []
        assert unreached.all_said("generation") == []
        assert len(grows[0].all_said("generation")) <= founded + 1

        staying, lost = sorted(full, key=lambda member: member.said("generation")["rank"])
        lost.kill()
        assert together([staying, spare])["hosts"] == indexes([staying, spare])
        lan.switch.mend()
        together([*grows, unreached])
        for members in ([*grows, unreached], [staying, spare]):
            members[-1].ask_to_end()
            check_same_end(members)
        for member in grows:
            assert member.end()["gap"] < promised(STALL_SECONDS)


@pytest.mark.thorough
def test_a_member_that_crashes_and_is_back_in_a_moment_again_and_again_has_the_state_of_the_others_each_time() -> None:
    with Lan(hosts=3, kind="switch", prefix=PREFIX) as lan:
        cluster = Cluster()
        members = [start(cluster, host, "stubborn", ELASTIC, min_size=2) for host in lan.hosts]
        said = together(members)
        for index in range(3):
            members[index].kill()
            members[index].process.wait(DEADLINE)
            members[index] = start(cluster, lan.hosts[index], "stubborn", ELASTIC, min_size=2)
            step, said = said["step"], together(members, after=said["number"])
            assert said["step"] > step
        members[0].ask_to_end()
        check_same_end(members)
