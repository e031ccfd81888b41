"""The states of a peer, and what moves it from one to another."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from covey.base.config import GroupConfig
from covey.base.numbers import Seat
from covey.runtime.peers.peer_table import PeerTable
from covey.runtime.peers.remote_process import TRANSITIONS, PeerEvent, PeerState, RemoteProcess
from covey.runtime.tasks import Tasks
from covey.runtime.views import health_monitor
from covey.runtime.views.health_monitor import ClockOffsets, HealthMonitor
from covey.wire.messages import Card, Contact

READY, SUSPECTED, TRUSTED = PeerEvent.READY, PeerEvent.SUSPECTED, PeerEvent.TRUSTED
GOODBYE, GIVEN_UP = PeerEvent.SAID_GOODBYE, PeerEvent.GIVEN_UP
RELINKED, EXCLUDED = PeerEvent.RELINKED, PeerEvent.EXCLUDED


CARD = Card(b"i" * 32, b"l" * 16, "n", "h", 0, Contact("elsewhere", (), ""), "", b"")


def peer_after(*events: PeerEvent) -> RemoteProcess:
    peer = RemoteProcess(CARD, seat=Seat(1))
    for event in events:
        peer.note(event)
    return peer


def test_every_state_is_in_the_table_and_can_be_reached() -> None:
    assert set(TRANSITIONS) == set(PeerState)
    reached = {PeerState.EXPECTED}
    while more := {after for state in reached for after in TRANSITIONS[state].values()} - reached:
        reached |= more
    assert reached == set(PeerState)


def test_exclusion_is_final_and_can_come_in_every_state() -> None:
    out = {PeerState.EXCLUDED, PeerState.RELEASED}
    for state, follows in TRANSITIONS.items():
        if state in out:
            assert set(follows.values()) <= out
        else:
            assert follows[EXCLUDED] in out


@pytest.mark.parametrize("event", [TRUSTED, SUSPECTED, READY, RELINKED, GIVEN_UP, EXCLUDED], ids=lambda each: each.name)
def test_a_goodbye_is_never_forgotten(event: PeerEvent) -> None:
    for before in ((), (SUSPECTED,), (GIVEN_UP,), (EXCLUDED,)):
        assert peer_after(READY, *before, GOODBYE, event).has_left


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ((), PeerState.EXPECTED),
        ((GOODBYE,), PeerState.EXPECTED),  # it never saw the run formed, so it may come again
        ((READY,), PeerState.ACTIVE),
        ((READY, SUSPECTED), PeerState.SUSPECTED),
        ((READY, SUSPECTED, TRUSTED), PeerState.ACTIVE),
        ((READY, GIVEN_UP), PeerState.LOST),
        ((READY, GIVEN_UP, SUSPECTED), PeerState.LOST),
        ((READY, GIVEN_UP, RELINKED), PeerState.ACTIVE),
        ((READY, GIVEN_UP, EXCLUDED, RELINKED), PeerState.EXCLUDED),
        ((READY, GOODBYE), PeerState.LEAVING),
        ((READY, GOODBYE, SUSPECTED), PeerState.LEAVING),
        ((READY, GOODBYE, GIVEN_UP), PeerState.LEFT),
        ((READY, GOODBYE, EXCLUDED), PeerState.RELEASED),
        ((READY, EXCLUDED, GOODBYE), PeerState.RELEASED),
    ],
)
def test_what_becomes_of_a_peer(events: tuple[PeerEvent, ...], state: PeerState) -> None:
    assert peer_after(*events).state is state


def test_the_readers_of_each_state() -> None:
    def where(name: str) -> set[PeerState]:
        peer, found = RemoteProcess(CARD, seat=Seat(1)), set()
        for peer.state in PeerState:
            if getattr(peer, name):
                found.add(peer.state)
        return found

    assert where("is_ready") == set(PeerState) - {PeerState.EXPECTED}
    assert where("is_suspected") == {PeerState.SUSPECTED}
    assert where("has_left") == {PeerState.LEAVING, PeerState.LEFT, PeerState.RELEASED}
    assert where("is_gone") == {PeerState.LEFT, PeerState.LOST, PeerState.EXCLUDED, PeerState.RELEASED}
    assert where("is_excluded") == {PeerState.EXCLUDED, PeerState.RELEASED}


def test_a_lost_link_makes_a_peer_suspected_and_a_new_one_makes_it_active() -> None:
    peer = peer_after(READY)
    told: list[str] = []
    listener: Any = SimpleNamespace()
    monitor = HealthMonitor(
        PeerTable(Seat(0), {Seat(1): peer}),
        "here",
        GroupConfig(),
        listener,
        tell_of_peer=lambda kind, _peer: told.append(kind),
        clocks=ClockOffsets(),
        tasks=Tasks("a test"),
    )
    monitor.watch(peer)
    monitor.link_up(peer)
    assert not peer.is_suspected
    monitor.link_lost(Seat(1))
    assert peer.is_suspected
    began = peer.since
    assert began > 0
    monitor.link_up(peer)
    assert peer.state is PeerState.ACTIVE
    assert told == ["suspected", "recovered"]


def test_a_peer_is_as_trusted_after_a_sleep_of_this_machine_as_before_and_may_be_silent_as_long_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(health_monitor, "waking_clock", lambda: now)
    peer, other = peer_after(READY), RemoteProcess(replace(CARD, contact=Contact("a third", (), "")), seat=Seat(2))
    table = PeerTable(Seat(0), {Seat(1): peer, Seat(2): other})
    listener: Any = SimpleNamespace()
    monitor = HealthMonitor(
        table,
        "here",
        GroupConfig(),
        listener,
        tell_of_peer=lambda _kind, _peer: None,
        clocks=ClockOffsets(),
        tasks=Tasks("a test"),
    )

    async def tick_at(time: float) -> None:
        """Let the clock say so, and the monitor look at its peers."""
        nonlocal now
        now = time
        monitor.vouched(other, 1)  # any input has it set its timer by the clock
        for _ in range(5):
            await asyncio.sleep(0.002)

    async def story() -> None:
        keeping = asyncio.create_task(monitor.keep())
        await asyncio.sleep(0)
        monitor.link_up(peer)
        for at in range(1, 12):
            await tick_at(1000.0 + at / 4)
        assert not peer.is_suspected
        await tick_at(1200.0)  # it slept for three minutes
        for at in range(1, 12):
            await tick_at(1200.0 + at / 4)
            assert not peer.is_suspected, at
        for at in range(12, 15):
            await tick_at(1200.0 + at / 4)
        assert peer.is_suspected
        keeping.cancel()

    asyncio.run(story())
