"""What a node says about the members of its group, their machines, links and health, and the events of the run."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.support.waiting import DEADLINE

from covey import ConfigError, Event
from covey.base.numbers import Seat
from covey.base.version import __version__
from covey.runtime import loop as control
from covey.runtime.events import Events, decode_last, encode_last, follow
from covey.runtime.joining.node import node_of
from covey.testing.threads import run_threads
from covey.wire import messages

if TYPE_CHECKING:
    from covey import Group
    from covey.runtime.joining.node import NodeParts


def test_members_are_described_by_name_machine_and_what_it_has() -> None:
    def body(group: Group) -> None:
        members = group.node.members
        assert members == group.members
        assert [member.rank for member in members] == [0, 1, 2]
        for member in members:
            assert member.pid == os.getpid()
            assert member.host == os.uname().nodename
            assert member.cores == len(os.sched_getaffinity(0))
            assert member.memory_bytes > 1 << 28
            assert os.uname().machine in member.platform
            assert member.version == __version__
        assert group.node.name == members[group.rank].name
        assert group.node.hosts() == {os.uname().nodename: (0, 1, 2)}
        group.barrier()  # before a rank leaves

    run_threads(3, body)


def test_a_group_of_one_describes_itself() -> None:
    def body(group: Group) -> None:
        (member,) = group.members
        assert member.pid == os.getpid()
        assert member.cores > 0
        assert group.node.hosts() == {os.uname().nodename: (0,)}
        assert group.node.links() == ()
        assert [each.state for each in group.node.health()] == ["active"]
        assert group.node.leader is None
        assert group.to_run(0) == group.to_parent(0) == 0

    run_threads(1, body)


def test_ranks_of_split_groups_are_mapped_to_the_parent_and_to_the_run() -> None:
    def body(group: Group) -> None:
        with group.split(group.rank % 2, key=-group.rank) as half:
            parents = [half.to_parent(rank) for rank in range(half.size)]
            assert parents == sorted((rank for rank in range(5) if rank % 2 == group.rank % 2), reverse=True)
            assert [half.to_run(rank) for rank in range(half.size)] == parents
            with half.split(0, key=group.rank) as quarter:
                assert [quarter.to_parent(rank) for rank in range(quarter.size)] == list(reversed(range(half.size)))
                assert [quarter.to_run(rank) for rank in range(quarter.size)] == sorted(parents)
                with pytest.raises(ConfigError, match="rank=9 is not a rank of this group"):
                    quarter.to_run(9)
        with group.split_by_host() as here:
            assert here.size == 5
        group.barrier()  # before a rank leaves

    run_threads(5, body)


@pytest.mark.parametrize("lanes", ["tcp", "shm", "secure"])
def test_links_tell_the_lane_and_after_transfers_their_speed(lanes: str) -> None:
    def body(group: Group) -> None:
        (before,) = group.node.links()
        assert (before.rank, before.lane) == (1 - group.rank, lanes)
        assert before.bytes_per_second is None
        for _ in range(200):  # until the kernel has seen it busy for a moment
            group.all_reduce(np.ones(1 << 19, np.float32))
            (after,) = group.node.links()
            if group.all_reduce(lanes == "shm" or after.bytes_per_second is not None, "and"):
                break
        assert after.medium == "local"
        assert after.interface == ""
        if lanes == "shm":
            assert after.bytes_per_second is None
        else:
            assert after.bytes_per_second is not None
            assert 1e6 < after.bytes_per_second < 1e12
        group.barrier()  # before a rank leaves

    run_threads(2, body, lanes=lanes)


def test_health_tells_since_when_a_member_is_active() -> None:
    began = time.time()

    def body(group: Group) -> None:
        states = group.node.health()
        assert [each.state for each in states] == ["active", "active", "active"]
        assert all(began <= each.since <= time.time() for each in states)
        assert states[group.rank].since <= group.events()[0].time, "since it joined, not since it was asked"
        assert all(not each.why for each in states)
        group.barrier()  # before a rank leaves

    run_threads(3, body)


def test_unknown_kinds_of_events_are_refused_with_a_suggestion() -> None:
    def body(group: Group) -> None:
        with pytest.raises(ConfigError, match="did you mean 'suspected'"):
            group.node.on_event(print, kinds=["suspect"])
        with pytest.raises(ConfigError, match="must be a list of kinds"):
            group.node.on_event(print, kinds="lost")

    run_threads(1, body)


def event(kind: str, number: int) -> Event:
    return Event(kind, float(number), 0, number)


def test_followers_get_the_last_events_and_then_new_ones_until_the_end() -> None:
    events = Events()
    events.add(event("joined", 1))
    events.add(event("codec", 2))

    async def read() -> list[float]:
        seen = []
        async for each in follow(events, frozenset({"joined", "suspected"})):
            seen.append(each.time)
            if len(seen) == 1:
                events.add(event("lane", 3))
                events.add(event("suspected", 4))
            elif len(seen) == 2:
                events.close()
        return seen

    assert asyncio.run(asyncio.wait_for(read(), DEADLINE)) == [1.0, 4.0]
    assert asyncio.run(asyncio.wait_for(read(), DEADLINE)) == [1.0, 4.0]


def test_a_suspicion_does_not_hide_when_the_first_sign_of_a_loss_came() -> None:
    events = Events()
    events.phase("detect")
    events.add(event("suspected", 1))
    events.phase("freeze")
    events.add(event("lost", 2))
    assert events.all()[-1].phases["detect"] == 0.0
    assert "freeze" in events.all()[-1].phases


def test_members_from_the_beginning_are_told_no_past_and_nonsense_from_a_member_is_no_event() -> None:
    def body(group: Group) -> None:
        node = node_of(group)
        assert node is not None
        other, said = Seat(1 - group.rank), encode_last(node.events)
        told = decode_last(said)

        def earlier() -> list[Event]:
            return [event for event in group.events() if event.is_earlier]

        control.run(_tell(node, other, said), 10.0)
        assert earlier() == []
        node.generation_table._lacks_past = True  # as in a newcomer
        control.run(_tell(node, other, b"nonsense"), 10.0)
        assert earlier() == []
        for _ in range(2):
            control.run(_tell(node, other, said), 10.0)
        assert earlier() == [replace(event, is_earlier=True) for event in told]
        assert group.events()[: len(told)] == earlier()
        group.barrier()  # before a rank leaves

    run_threads(2, body)


async def _tell(node: NodeParts, seat: Seat, body: bytes) -> None:
    node.inbox.heard(seat, messages.Past(body))
