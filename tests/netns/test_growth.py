"""Runs between machines take newcomers in: hosts that are added, spares, and members that come back again and again."""

from __future__ import annotations

import time

import pytest
from tests.netns.members import ELASTIC, Member, check_same_end, indexes, start, together
from tests.netns.nodes import Cluster

from covey.testing.netns import Lan

pytestmark = pytest.mark.slow

PREFIX = "covey-growth"
COMES_BACK_SECONDS = 0.3
STALL_SECONDS = 2.0
"""An operation of a run that takes newcomers in, or does not get to see one, is never held up for as long."""


def by_rank(members: list[Member]) -> list[Member]:
    """Return the members of a generation by their rank in it."""
    hosts = together(members)["hosts"]
    return sorted(members, key=lambda member: hosts.index(member.host.index))


def test_a_host_that_is_added_gets_in_a_spare_when_there_is_room_and_nobody_waits_for_one_who_is_out_of_reach() -> None:
    with Lan(hosts=4, kind="switch", prefix=PREFIX) as lan:
        cluster = Cluster()
        one, two, spare, far = lan.hosts
        lan.switch.cut(two.name, far.name)
        lan.switch.cut(far.name, two.name)
        grows = [start(cluster, host, "grows", ELASTIC, min_size=2) for host in (one, two)]
        full = [start(cluster, host, "full", ELASTIC, min_size=2, max_size=2) for host in (one, two)]
        before = [by_rank(members) and together(members)["number"] for members in (grows, full)]
        assert before == [0, 0]

        grows.append(start(cluster, spare, "grows", ELASTIC, min_size=2))
        full.append(start(cluster, spare, "full", ELASTIC, min_size=2, max_size=2))
        unreached = start(cluster, far, "grows", ELASTIC, min_size=2)
        assert together(grows)["step"] > 0
        unreached.said("joining")
        full[2].said("joining")

        _, lost = ordered = by_rank(full[:2])
        marks = len(grows[0].all_said("generation"))
        time.sleep(1.5)  # in which neither may get in
        assert full[2].all_said("generation") == []
        assert unreached.all_said("generation") == []
        assert len(grows[0].all_said("generation")) <= marks + 1
        lost.kill()
        left = [ordered[0], full[2]]
        assert together(left)["hosts"] == indexes(left)

        lan.switch.mend()
        together([*grows, unreached])
        unreached.ask_to_end()
        left[1].ask_to_end()
        check_same_end([*grows, unreached])
        check_same_end(left)
        for member in grows:
            assert member.end()["gap"] < STALL_SECONDS


def test_a_member_that_crashes_and_is_back_in_a_moment_ten_times_has_the_state_of_the_others_each_time() -> None:
    with Lan(hosts=3, kind="switch", prefix=PREFIX) as lan:
        cluster = Cluster()
        members = [start(cluster, host, "stubborn", ELASTIC, min_size=2) for host in lan.hosts]
        said = together(members)
        for number in range(10):
            index = number % 3
            members[index].kill()
            time.sleep(COMES_BACK_SECONDS)
            members[index] = start(cluster, lan.hosts[index], "stubborn", ELASTIC, min_size=2)
            step, said = said["step"], together(members, after=said["number"])
            assert said["step"] > step
        members[0].ask_to_end()
        check_same_end(members)
