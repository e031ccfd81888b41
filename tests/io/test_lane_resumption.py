"""Streams of lanes that go on over other connections: who may do that, and what becomes of operations meanwhile."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.waiting import DEADLINE

from covey.base.errors import ConnectError, PeerLostError
from covey.base.lane_kinds import LANE_KINDS
from covey.net.lanes.stream import is_resumable
from covey.runtime import loop as control
from covey.runtime.group.internals import engine_of
from covey.runtime.joining.node import node_of
from covey.runtime.lanes.resumption import NUMBER_BYTES, RESUME_BIT, LaneResumption
from covey.testing.threads import run_threads
from covey.wire import door, messages

if TYPE_CHECKING:
    from covey import Group
    from covey.base.numbers import Seat

OPTIONS: dict[str, Any] = {"lanes": "secure", "on_loss": "raise", "timeout": DEADLINE}
every_kind = pytest.mark.parametrize("kind", [kind.name for kind in LANE_KINDS.values() if kind.is_resumable])


@pytest.fixture(autouse=True)
def _as_if_between_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lanes of one host be resumable."""

    def is_wanted(_self: LaneResumption, _peer: Seat, kind: str) -> bool:
        return LANE_KINDS[kind].is_resumable

    monkeypatch.setattr(LaneResumption, "is_wanted", is_wanted)


def on_loop(work: Any) -> Any:
    """Run a coroutine on the control loop."""
    return control.run(work, DEADLINE)


def resumption_of(group: Group) -> tuple[LaneResumption, Any]:
    """Return what keeps the lanes of a group of two alive, and what it knows of its lane."""
    node = node_of(group)
    assert node is not None
    resumption = node.lanes.resumption
    (lane,) = [each for each in resumption._lanes.values() if each.group == engine_of(group).id]
    assert is_resumable(lane.lane)
    return resumption, lane


@every_kind
def test_operations_are_right_while_connections_are_replaced_again_and_again(kind: str) -> None:
    ports = [0, 0]

    def body(group: Group) -> int:
        other, rng = 1 - group.rank, random.Random(group.rank)
        node = node_of(group)
        assert node is not None
        if kind == "quic":
            ports[group.rank] = node.lanes.openers["quic"].port()
        group.barrier()
        resumption, lane = resumption_of(group)
        is_over, replaced = threading.Event(), 0

        async def replace() -> None:
            nonlocal replaced
            while not is_over.is_set() and replaced < 30:
                before = lane.lane.sockets()[0]
                resumption.heard(lane.peer, messages.StreamNews(lane.id, 0, "dial", ports[other]))
                until = time.monotonic() + DEADLINE
                while (  # noqa: ASYNC110  (lanes tell no loop of their connections)
                    lane.lane.sockets()[0] is before and time.monotonic() < until and not is_over.is_set()
                ):
                    await asyncio.sleep(0.002)
                replaced += 1
                await asyncio.sleep(rng.uniform(0.0, 0.02))

        work = control.start(replace()) if group.rank == 0 else None
        step = 0
        while group.all_reduce(float(work is not None and not work.done())):
            count = rng.choice([3, 3]) if step % 3 else 200_000
            x = np.arange(count, dtype=np.float64) * (group.rank + 1) + step
            group.all_reduce(x)
            assert np.array_equal(x, 3 * np.arange(count) + 2.0 * step)
            y = np.full(60_000, step + group.rank)
            group.broadcast(y, root=step % 2)
            assert (y == step + step % 2).all()
            step += 1
        is_over.set()
        assert other in group.lanes()
        return replaced

    assert run_threads(2, body, **OPTIONS | {"lanes": kind})[0] == 30


def test_a_connection_without_the_key_or_with_an_old_number_changes_nothing() -> None:
    def body(group: Group) -> None:
        group.barrier()
        if group.rank == 0:
            resumption, lane = resumption_of(group)

            async def claim(secret: bytes, number: int, lane_id: bytes = lane.id, stream: int = 0) -> None:
                one, other = socket.socketpair()
                with one, other:
                    one.setblocking(False)
                    other.send(number.to_bytes(NUMBER_BYTES, "big"))
                    proof = door.resume_proof(secret, b"dial", lane_id, stream, number, 0)
                    await resumption.claim(one, lane_id, stream | RESUME_BIT, proof)

            with pytest.raises(ConnectError, match="without its key"):
                on_loop(claim(bytes(32), 7))
            with pytest.raises(ConnectError, match="does not exist"):
                on_loop(claim(lane.secret, 7, bytes(16)))
            with pytest.raises(ConnectError, match="does not exist"):
                on_loop(claim(lane.secret, 7, stream=63))
            lane.streams[0].number = 7
            with pytest.raises(ConnectError, match="another one has claimed"):
                on_loop(claim(lane.secret, 7))
            assert lane.lane.broken() == []
        x = np.arange(5.0) + group.rank
        group.all_reduce(x)
        assert np.array_equal(x, 2 * np.arange(5.0) + 1)

    run_threads(2, body, **OPTIONS)


def test_a_position_that_was_changed_on_the_way_ends_no_lane() -> None:
    """The try fails, and the next one, which is honest, goes on."""
    is_frozen = threading.Event()

    def body(group: Group) -> None:
        group.barrier()
        if group.rank == 1:  # as an end does that has begun to dial
            resumption_of(group)[1].lane.freeze(0)
            is_frozen.set()
        if group.rank == 0:
            assert is_frozen.wait(DEADLINE)
            resumption, lane = resumption_of(group)

            async def lie() -> None:
                one, other = socket.socketpair()
                with one, other:
                    for sock in (one, other):
                        sock.setblocking(False)
                    proof = door.resume_proof(lane.secret, b"dial", lane.id, 0, 9, 0)
                    go = door.resume_proof(lane.secret, b"go", lane.id, 0, 9, 1)
                    zero = bytes(NUMBER_BYTES)
                    other.send((9).to_bytes(NUMBER_BYTES, "big") + zero + go)
                    await resumption.claim(one, lane.id, RESUME_BIT, proof)

            with pytest.raises(ConnectError, match="does not know the lane's key"):
                on_loop(lie())
        x = np.arange(100_000.0) + group.rank
        group.all_reduce(x)
        assert np.array_equal(x, 2 * np.arange(100_000.0) + 1)

    run_threads(2, body, **OPTIONS)


def sum_for_ever(group: Group) -> None:
    while True:
        group.all_reduce(np.arange(3.0))


def test_a_lane_that_the_other_end_does_not_have_ends_with_the_reason() -> None:
    def body(group: Group) -> None:
        group.barrier()
        if group.rank == 1:
            _, lane = resumption_of(group)
            node = node_of(group)
            assert node is not None
            control.soon(node.peers.send, lane.peer, messages.StreamNews(lane.id, 0, "gone", 0))
        with pytest.raises(PeerLostError):
            sum_for_ever(group)

    run_threads(2, body, **OPTIONS)
