"""Runs between machines go on when cables are pulled, networks fall apart, connections are reset and hosts die.

Several runs share each network and its faults, so that their waits pass together.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest
from tests.support.members import (
    ELASTIC,
    STEADY,
    Member,
    agree_on_loss,
    by_rank,
    check_same_end,
    indexes,
    start,
    start_with_keeper,
    together,
)
from tests.support.nodes import Cluster
from tests.support.waiting import DEADLINE

from covey.testing.netns import Lan

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX = "covey-survival"
CABLE_SECONDS = 5.0
"""A machine that fell silent is known, and the others go on, in this time and that of an operation."""
OPERATION_SECONDS = 1.0
BACK_SECONDS = 4.0
"""Seconds after it can be reached again in which a node that was cut off knows what the others decided."""


def parts(members: list[Member], hosts: set[int]) -> tuple[list[Member], list[Member]]:
    """Return the members on these hosts, and the others."""
    return [each for each in members if each.host.index in hosts], [
        each for each in members if each.host.index not in hosts
    ]


def kinds(member: Member) -> list[str]:
    return [kind for kind, _, _ in member.said("events")["kinds"]]


def check_quorum_lost(member: Member, missing: list[Member], ranks: list[Member]) -> None:
    """The error names the missing ranks and the tie-breaker, and says what can be done."""
    error = member.said("error")
    assert error["kind"] == "QuorumLostError", member.story()
    for other in missing:
        assert f"rank {ranks.index(other)} (" in error["text"].partition("did not answer")[0]
    assert "tie-breaker, rank 0 (" in error["text"]
    for option in ("Start the missing ones again", "patience=", "quorum='any'"):
        assert option in error["text"]


def test_the_others_go_on_without_a_pulled_cable_and_its_node_comes_back_with_their_state(
    promised: Callable[[float], float],
) -> None:
    with Lan(hosts=4, kind="switch", prefix=PREFIX) as lan:
        cluster = Cluster()
        pulled = lan.hosts[2]
        elastic = [start(cluster, host, "elastic", ELASTIC, min_size=2, patience=30) for host in lan.hosts[:3]]
        one_way = by_rank([start(cluster, lan.hosts[index], "one-way", size=3, patience=5) for index in (0, 1, 3)])
        before = together(elastic)
        at = time.monotonic()
        pulled.run(["ip", "link", "set", "eth0", "down"])
        lan.switch.cut("host3", "host0")

        said = [member.said("contributors") for member in elastic[:2]]
        for each in said:
            assert sorted(each["hosts"]) == [0, 1]
            assert each["at"] - at < promised(CABLE_SECONDS + OPERATION_SECONDS)
        assert said[0]["step"] == said[1]["step"]

        # Of host 0 and host 3 only one hears the other: one of them goes on with host 1.
        (middle,), _ = parts(one_way, {1})
        went_on = set(middle.said("contributors")["hosts"])
        assert went_on in ({0, 1}, {1, 3})
        staying, (gone,) = parts(one_way, went_on)
        agree_on_loss(staying)
        assert gone.said("error")["kind"] in ("QuorumLostError", "GroupChangedError")
        staying[0].ask_to_end()
        assert len({member.end()["step"] for member in staying}) == 1

        pulled.run(["ip", "link", "set", "eth0", "up"])
        assert "the run continues without this process" in elastic[2].said("changed")["text"]
        assert together(elastic, after=before["number"])["step"] > elastic[2].said("changed")["step"]
        elastic[2].ask_to_end()
        check_same_end(elastic)


@pytest.mark.thorough
@pytest.mark.alone  # a cut of two seconds must not become one of five
def test_a_network_that_falls_apart_leaves_one_half_or_with_any_quorum_two_that_never_merge() -> None:
    with Lan(hosts=5, kind="switch", prefix=PREFIX) as lan:
        cluster = Cluster()
        five = [start(cluster, host, "five", ELASTIC, min_size=2, patience=30) for host in lan.hosts]
        four = [start(cluster, host, "four", size=4, patience=4) for host in lan.hosts[:4]]
        two = [start(cluster, lan.hosts[index], "two", size=2, patience=4, quorum="any") for index in (1, 4)]
        four, two, before = by_rank(four), by_rank(two), together(five)
        sides = ({0, 1}, {2, 3, 4})

        def part() -> float:
            for one in sides[0]:
                for other in sides[1]:
                    lan.switch.cut(f"host{one}", f"host{other}")
                    lan.switch.cut(f"host{other}", f"host{one}")
            return time.monotonic()

        part()
        time.sleep(2)  # shorter than the silence after which a host is taken for dead
        lan.switch.mend()
        at = time.monotonic()
        for members in (five, four, two):
            members[0].signal(signal.SIGUSR2)
        for member in (*five, *four, *two):
            assert member.said("marked")["at"] - at < CABLE_SECONDS + OPERATION_SECONDS
            assert member.all_said("contributors") == []

        at = part()
        said = [member.said("contributors") for member in five[2:]]
        assert {(tuple(sorted(each["hosts"])), each["step"]) for each in said} == {((2, 3, 4), said[0]["step"])}
        assert max(each["at"] for each in said) - at < CABLE_SECONDS + OPERATION_SECONDS
        staying, gone = parts(four, next(side for side in sides if four[0].host.index in side))  # the tie-breaker's
        assert max(agree_on_loss(staying)) - at < CABLE_SECONDS + OPERATION_SECONDS
        for member in gone:
            check_quorum_lost(member, staying, four)
        for member in two:
            agree_on_loss([member])

        lan.switch.mend()
        at = time.monotonic()
        for member in two:
            member.signal(signal.SIGUSR2)
        for member in five[:2]:
            assert member.said("changed")["at"] - at < BACK_SECONDS
        assert together(five, after=before["number"])["step"] > said[0]["step"]
        for member in two:
            member.said("marked", 1)
            member.ask_to_end()
            assert member.end()["hosts"] == [member.host.index]
            assert kinds(member).count("lost") == 1
        five[0].ask_to_end()
        check_same_end(five)
        staying[0].ask_to_end()
        assert len({member.end()["step"] for member in staying}) == 1


def test_forged_resets_in_the_middle_of_operations_evict_no_node_that_can_be_reached_again_in_a_moment() -> None:
    with Lan(hosts=3, kind="switch", prefix=PREFIX) as lan:
        cluster = Cluster()
        members = by_rank([start(cluster, host, "big", size=3, count=1 << 18, pause=0) for host in lan.hosts])
        for number, connections in enumerate((6, 3)):  # links and lanes; which are seen again when they are used
            members[number].signal(signal.SIGUSR2)
            for member in members:
                member.said("marked", number)
            assert lan.switch.reset_connections() >= connections
        members[1].signal(signal.SIGUSR2)
        for member in members:
            member.said("marked", 2)
            assert member.all_said("contributors") == []

        *staying, gone = members
        lan.switch.cut(lan.hosts[gone.host.index].name)
        lan.switch.reset_connections()
        agree_on_loss(staying)
        lan.switch.mend()
        assert gone.said("error")["kind"] == "GroupChangedError"
        staying[0].ask_to_end()
        for member in staying:
            member.end()
            assert (kinds(member).count("lost"), "view" in kinds(member)) == (1, True)


@pytest.mark.thorough
def test_of_two_hosts_the_tie_breaker_goes_on_alone_and_the_other_needs_its_vote(
    promised: Callable[[float], float],
) -> None:
    with Lan(hosts=2, kind="switch", prefix=PREFIX) as lan:
        cluster = Cluster()
        alone = [start(cluster, host, "alone", size=2) for host in lan.hosts]
        lost = [start(cluster, host, "lost", size=2, patience=4) for host in lan.hosts]
        elastic = [start(cluster, host, "voted", ELASTIC, min_size=2, patience=DEADLINE) for host in lan.hosts]
        alone, lost = by_rank(alone), by_rank(lost)
        elastic.sort(key=lambda member: member.said("generation")["rank"])
        assert all(len(member.said("generation")["hosts"]) == 2 for member in elastic)

        at = lost[0].kill()
        elastic[0].kill()
        elastic[0].process.wait(DEADLINE)
        again = start(cluster, lan.hosts[elastic[0].host.index], "voted", ELASTIC, min_size=2, patience=DEADLINE)
        alone[1].kill()

        assert agree_on_loss(alone[:1])[0] - at < promised(CABLE_SECONDS)
        went_on = elastic[1].said("contributors")
        assert went_on["hosts"] == [elastic[1].host.index]
        assert together([elastic[1], again])["hosts"] == indexes([elastic[1], again])
        check_quorum_lost(lost[1], lost[:1], lost)
        assert 3.5 < lost[1].said("error")["at"] - at < promised(6.0)

        again.ask_to_end()
        alone[0].ask_to_end()
        check_same_end([elastic[1], again])
        alone[0].end()


def test_keepers_tell_other_machines_of_stopped_and_killed_processes_and_vouch_for_busy_ones(
    promised: Callable[[float], float],
) -> None:
    with Lan(hosts=4, kind="switch", prefix=PREFIX) as lan:
        cluster = Cluster()
        busy = [
            start_with_keeper(cluster, host, "busy", STEADY, "--size", "2", patience=5, holds=1)
            for host in lan.hosts[:2]
        ]
        kept = [start_with_keeper(cluster, host, "kept", STEADY, "--size", "4", patience=5) for host in lan.hosts]
        ranks = by_rank(kept)
        by_rank(busy)
        stopped, killed = ranks[1], ranks[2]
        at = stopped.signal(signal.SIGSTOP)
        left = [member for member in ranks if member is not stopped]
        for known_at in agree_on_loss(left):
            assert known_at - at < promised(1.5)
        at = killed.kill()
        left.remove(killed)
        for known_at in agree_on_loss(left, 1):
            assert known_at - at < promised(1.0)
        stopped.signal(signal.SIGCONT)
        assert stopped.said("error")["kind"] == "GroupChangedError"
        left[0].ask_to_end()
        assert {tuple(member.end()["hosts"]) for member in left} == {tuple(indexes(left))}
        assert busy[1].said("held")["took"] > 7
        busy[0].ask_to_end()
        for member in busy:
            assert sorted(member.end()["hosts"]) == [0, 1]
            assert "lost" not in kinds(member)
