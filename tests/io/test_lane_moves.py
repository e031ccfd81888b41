"""Steps of moving a lane that no honest peer sends, or that come twice: they change nothing."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.waiting import DEADLINE

from covey.base.config import GroupConfig
from covey.base.errors import PeerLostError
from covey.base.numbers import Seat
from covey.net.host import descriptors
from covey.runtime import loop as control
from covey.runtime.group.internals import engine_of
from covey.runtime.joining.node import node_of
from covey.runtime.lanes.table import REPLACEMENT, LaneTable
from covey.runtime.lanes.tuning import trials
from covey.runtime.lanes.tuning.moves import RETIRE_CHECK_EVERY, LaneMoves
from covey.testing.threads import run_threads
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey import Group
    from covey.runtime.lanes.table import LaneKey


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[messages.MoveLane]]:
    """Return a function that waits for so many answers of rank 0, and returns all that came."""
    found: list[messages.MoveLane] = []
    came = threading.Condition()
    heard = LaneMoves.heard

    def hear(self: LaneMoves, seat: Seat, message: messages.MoveLane) -> None:
        heard(self, seat, message)
        if seat == 0:
            with came:
                found.append(message)
                came.notify_all()

    def wait(count: int) -> list[messages.MoveLane]:
        with came:
            assert came.wait_for(lambda: len(found) >= count, DEADLINE), found
            return found

    monkeypatch.setattr(LaneMoves, "heard", hear)
    return wait


def test_proposals_for_lanes_that_are_not_there_are_refused_and_repeated_ones_get_the_same_answer(
    answers: Callable[[int], list[messages.MoveLane]],
) -> None:
    def body(group: Group) -> None:
        node, engine = node_of(group), engine_of(group)
        assert node is not None
        total = group.all_reduce(np.arange(9.0) + group.rank)
        if group.rank == 1:
            steps = [(engine.id, 0, 50), (engine.id, 0, 50), (engine.id, 0, 49), (engine.id, 3, 60), (77, 0, 60)]
            for number, attempt, sequence in steps:
                node.peers.tell((Seat(0),), messages.MoveLane(number, attempt, "propose", sequence))
            for step in ("accept", "refuse"):  # of something that was never proposed
                node.peers.tell((Seat(0),), messages.MoveLane(engine.id, 0, step, 50, 1))
            assert answers(4) == [
                messages.MoveLane(number, attempt, "refuse", sequence)
                for number, attempt, sequence in steps
                if sequence != 49  # which is answered already, by what followed
            ]
        group.barrier()
        assert (group.all_reduce(np.arange(9.0) + group.rank) == total).all()

    run_threads(2, body, lanes="tcp")


def test_an_accepted_proposal_that_is_repeated_is_accepted_again(
    answers: Callable[[int], list[messages.MoveLane]],
) -> None:
    def body(group: Group) -> None:
        node: Any = node_of(group)
        group.barrier()
        if group.rank == 1:
            control.soon(node.lanes.moves.move, Seat(0))
            (first, *_) = answers(1)
            assert first.step == "accept"
            node.peers.tell((Seat(0),), messages.MoveLane(first.group, first.attempt, "propose", first.sequence))
            assert answers(2)[1] == first
        group.send_object("go on", 1 - group.rank)
        group.recv_object(1 - group.rank)
        for turn in range(10):
            assert (group.all_reduce(np.arange(9.0) + group.rank + turn) == 2 * np.arange(9.0) + 1 + 2 * turn).all()
        if group.rank == 1:
            node.peers.tell((Seat(0),), messages.MoveLane(first.group, first.attempt, "propose", first.sequence))
            assert answers(3)[2] == first, "also after the switch"
        group.barrier()
        assert [event.kind for event in group.events()].count("moved") == 1

    run_threads(2, body, lanes="tcp")


def test_a_lane_is_replaced_by_one_with_64_streams_and_all_say_so() -> None:
    def body(group: Group) -> None:
        node: Any = node_of(group)
        group.barrier()
        (before,) = group.lanes().streams.values()
        if group.rank == 1:
            ((key, _),) = node.lanes.table.open_lanes("collectives")
            control.soon(node.lanes.moves.reopen, key, 64)
        until, turn = time.monotonic() + DEADLINE, 0
        told: list[str] = []
        while group.all_reduce(float(bool(told)), "min") < 1:
            turn += 1
            expected = np.arange(300_000.0) * 2 + 1 + 2 * turn
            assert (group.all_reduce(np.arange(300_000.0) + group.rank + turn) == expected).all()
            told = [event.text for event in group.events() if event.kind == "moved"]
            assert time.monotonic() < until
        assert told == [f"secure lane has 64 streams instead of {before}"]
        assert group.lanes().streams == {1 - group.rank: 64}
        assert group.node.links()[0].streams == 64
        group.barrier()

    run_threads(2, body, lanes="secure")


def test_a_lane_that_should_move_while_it_gets_more_streams_moves_afterwards() -> None:
    def body(group: Group) -> None:
        node: Any = node_of(group)
        group.barrier()
        if group.rank == 1:
            ((key, _),) = node.lanes.table.open_lanes("collectives")
            control.soon(node.lanes.moves.reopen, key, 5)
            control.soon(node.lanes.moves.move, Seat(0))
        until = time.monotonic() + DEADLINE
        (before,) = group.lanes().streams.values()
        is_over = False
        while not is_over:
            told = [event.text for event in group.events() if event.kind == "moved"]
            is_over = group.all_reduce(float(len(told) >= 2), "min") > 0
            assert time.monotonic() < until
        assert told[0] == f"secure lane has 5 streams instead of {before}"
        assert list(group.lanes().streams.values()) == [before], "the second one is a new lane"
        group.barrier()

    run_threads(2, body, lanes="secure")


def test_a_replacement_is_offered_again_to_an_end_that_does_not_use_the_last_one_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: list[LaneKey] = []
    is_open = LaneTable.is_open

    def is_open_at_first(table: LaneTable, key: LaneKey, attempt: int) -> bool:
        if key.purpose == REPLACEMENT and len(refused) < 3:
            refused.append(key)
            return True
        return is_open(table, key, attempt)

    monkeypatch.setattr(LaneTable, "is_open", is_open_at_first)

    def body(group: Group) -> None:
        node: Any = node_of(group)
        group.barrier()
        if group.rank == 1:
            control.soon(node.lanes.moves.move, Seat(0))
        until, is_over = time.monotonic() + DEADLINE, False
        while not is_over:
            told = [event.text for event in group.events() if event.kind == "moved"]
            is_over = group.all_reduce(float(bool(told)), "min") > 0
            assert time.monotonic() < until
        group.barrier()

    run_threads(2, body, lanes="secure")
    assert len(refused) == 3


def test_nothing_is_tried_with_a_set_number_or_limit_or_over_other_lanes() -> None:
    auto = GroupConfig(lanes="secure")
    assert trials.may_try_streams(auto)
    changes: tuple[dict[str, Any], ...] = ({"streams": "4"}, {"limit": 10_000_000}, {"lanes": "quic"}, {"lanes": "tcp"})
    for change in changes:
        assert not trials.may_try_streams(dataclasses.replace(auto, **change))


def test_a_replacement_with_more_streams_than_descriptors_is_refused_and_the_lane_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(descriptors, "left", lambda: 15)
    caplog.set_level(logging.INFO, "covey")

    def body(group: Group) -> None:
        node: Any = node_of(group)
        group.barrier()
        before = group.lanes().streams
        if group.rank == 1:
            ((key, _),) = node.lanes.table.open_lanes("collectives")
            control.soon(node.lanes.moves.reopen, key, 16)
            until = time.monotonic() + DEADLINE
            while "cannot open 16 streams" not in caplog.text or node.lanes.moves.is_replacing(key):
                assert time.monotonic() < until
                time.sleep(0.01)
        assert (group.all_reduce(np.arange(9.0) + group.rank) == np.arange(9.0) * 2 + 1).all()
        assert group.lanes().streams == before
        group.barrier()

    run_threads(2, body, lanes="secure")


def test_more_streams_than_half_of_the_descriptors_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "left", lambda: 7)
    monkeypatch.setattr(trials, "FAR_ROUND_TRIP", 0.0)
    monkeypatch.setattr(trials, "WINDOW_SECONDS", 1e-6)  # loopback is hardly ever busy
    monkeypatch.setattr(trials, "LEAST_SENDING_SHARE", 0.0)

    def body(group: Group) -> None:
        node: Any = node_of(group)
        until, reason = time.monotonic() + DEADLINE, ""
        while group.all_reduce(float(bool(reason)), "max") < 1:
            group.all_reduce(np.arange(1 << 19, dtype=np.float64))
            control.run(look(node), DEADLINE)
            reason = node.lanes.stream_trials.reason(Seat(0)) if group.rank == 1 else ""  # which dials
            assert time.monotonic() < until
        (streams,) = group.lanes().streams.values()
        assert reason == (f"{4 * streams} could not be opened" if group.rank == 1 else "")
        assert "moved" not in [event.kind for event in group.events()]
        group.barrier()

    async def look(node: Any) -> None:
        node.lanes.stream_trials.look([peer for peer in node.peers.values() if peer.is_dialled])

    run_threads(2, body, lanes="secure")


def test_the_old_lane_is_closed_when_both_ends_have_switched_and_not_before() -> None:
    is_ahead = threading.Event()

    def await_that(condition: Callable[[], bool]) -> None:
        until = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < until
            time.sleep(0.01)

    def body(group: Group) -> None:
        node: Any = node_of(group)
        engine = engine_of(group)
        group.barrier()
        (old,) = node.lanes.arrived(engine.id, "collectives").values()
        if group.rank == 1:
            control.soon(node.lanes.moves.move, Seat(0))
            await_that(lambda: any(each.is_agreed for each in engine.attempt.switch.pending))
        else:
            assert is_ahead.wait(DEADLINE)
        for turn in range(6):  # the root waits for nothing, and is done before the other rank begins
            assert (group.broadcast(np.arange(3.0) * (turn + group.rank), root=1) == np.arange(3.0) * (turn + 1)).all()
        assert old not in node.lanes.arrived(engine.id, "collectives").values()
        if group.rank == 1:
            time.sleep(2 * RETIRE_CHECK_EVERY)
            assert old.sockets()[0].fileno() >= 0, "the other end still reads from it"
            is_ahead.set()
        await_that(lambda: old.sockets()[0].fileno() < 0)
        group.barrier()

    run_threads(2, body, lanes="tcp")


def test_a_lane_that_gets_stuck_while_its_rank_is_in_no_operation_ends_the_wait_of_the_other() -> None:
    """Rank 0 has sent its part, which is lost, and gone on; rank 1 has nothing to send that could get stuck."""

    def body(group: Group) -> None:
        node: Any = node_of(group)
        group.barrier()
        if group.rank == 0:
            ((_, lane),) = node.lanes.table.open_lanes("collectives")
            lane.is_stuck = lambda **_: True
            with pytest.raises(PeerLostError, match=r"rank 1 .*MTU"):
                group.recv(1)
        else:
            with pytest.raises(PeerLostError, match=r"rank 1 .*MTU"):
                group.barrier()

    run_threads(2, body, lanes="tcp")
