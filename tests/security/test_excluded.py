"""A member that the others went on without: it is still linked with them, and must not get a byte into their work."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.support.attackers import LOOPBACK, call_on_loop, new_cluster, run_nodes, until
from tests.support.runs import node_of
from tests.support.waiting import DEADLINE

from covey.base.arithmetic import dtype_code
from covey.base.errors import CoveyError, PeerLostError
from covey.base.numbers import Seat
from covey.runtime import loop as control
from covey.runtime.group.internals import engine_of
from covey.wire import message_header as wire
from covey.wire import messages

if TYPE_CHECKING:
    from covey.runtime.group.group import Group
    from covey.runtime.joining.node import NodeParts
    from covey.runtime.lanes.table import LaneKey

SURVIVING = replace(LOOPBACK, on_loss="continue")
ATTACKER = 2
POISON = np.full(5, 666.0)


def leave_secretly(group: Group) -> None:
    """Have the others go on without this process, which stays linked with them."""
    generation = engine_of(group).generation
    assert generation is not None
    control.soon(generation.withdraw)
    until(lambda: generation.is_over)


def await_exclusion(group: Group) -> None:
    node = node_of(group)
    until(lambda: node.peers[Seat(ATTACKER)].is_excluded)


def poison(number: int) -> bytes:
    """Return the frame of a message that no rank should get."""
    data = POISON.tobytes()
    code = dtype_code(POISON.dtype)
    header = wire.MessageHeader(wire.EAGER, number, len(data), 7, False, code, POISON.shape)
    return wire.encode(header) + data


def write(sock: Any, data: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.send(data)


class Words:
    """What others say about lanes to a node that is under the attacker's control."""

    def __init__(self, node: NodeParts) -> None:
        self.invitations: list[messages.Control] = []
        self.refusals: list[str] = []
        heard = node.inbox.heard

        def listen(rank: int, message: messages.Control) -> None:
            if isinstance(message, messages.Expect | messages.Offer):
                self.invitations.append(message)
            if isinstance(message, messages.NoLane):
                self.refusals.append(message.reason)
            heard(Seat(rank), message)

        call_on_loop(setattr, node.inbox, "heard", listen)


@pytest.mark.parametrize("has_lanes", [True, False], ids=["with lanes", "without lanes"])
def test_an_excluded_member_gets_no_message_and_no_lane(has_lanes: bool) -> None:
    turn = threading.Barrier(3, timeout=DEADLINE)

    def rank_main(group: Group) -> Any:
        node, others = node_of(group), [rank for rank in range(3) if rank != group.rank]
        group.barrier()
        if has_lanes:
            for rank in others:
                group.send(np.arange(3.0) + group.rank, dst=rank, tag=7)
            for rank in others:
                assert group.recv(src=rank, tag=7).tolist() == [rank, rank + 1.0, rank + 2.0]
        group.barrier()
        if group.rank == ATTACKER:
            attack(group, node, others)
            return None
        turn.wait()
        await_exclusion(group)
        turn.wait()
        open_lanes = call_on_loop(
            lambda: [key for key, lane in node.lanes.table._lanes.items() if is_usable(key, lane)]
        )
        turn.wait()  # the attacker has done its worst
        with pytest.raises(PeerLostError) as lost:
            group.recv(src=ATTACKER, timeout=DEADLINE)
        got = group.all_reduce(np.array([1.0, 10.0 * group.rank])).tolist()
        group.send(np.arange(4.0), dst=1 - group.rank, tag=9)
        return lost.value.rank, got, group.recv(src=1 - group.rank, tag=9).tolist(), open_lanes

    def attack(group: Group, node: NodeParts, others: list[int]) -> None:
        held = dict(engine_of(group).routing.messenger()._lanes.by_rank)
        turn.wait()
        leave_secretly(group)
        turn.wait()
        words = Words(node)
        for rank in others:
            if has_lanes:
                for number in range(3):
                    write(held[rank].sock, poison(number))
            for purpose in ("messages", "collectives"):
                for attempt in range(4):
                    offer = messages.Offer(
                        secrets.token_bytes(16), secrets.token_bytes(32), engine_of(group).id, purpose, "secure", 0, 1,
                        attempt,
                    )  # fmt: skip
                    control.soon(node.peers.send, rank, offer)
                    control.soon(node.peers.send, rank, messages.Dial(engine_of(group).id, purpose, attempt))
        until(lambda: len(words.refusals) >= len(others) * 8)
        assert words.invitations == []
        turn.wait()

    def is_usable(key: LaneKey, future: Any) -> bool:
        if key.peer != ATTACKER or not future.done() or future.exception() is not None:
            return False
        assert key.purpose == "messages"  # those of collectives were closed
        try:
            future.result().send(b"x")
        except OSError:
            return False
        return True

    results = run_nodes(new_cluster(), rank_main, size=3, config=SURVIVING)
    for result in results[:2]:
        assert result == (ATTACKER, [2.0, 10.0], [0.0, 1.0, 2.0, 3.0], [])


@pytest.mark.parametrize("stage", ["offered", "claimed"])
def test_a_lane_that_is_being_opened_as_the_view_comes_is_not_opened(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attacker holds the opening of a lane up at one of its steps until it is excluded."""
    turn = threading.Barrier(3, timeout=DEADLINE)

    def rank_main(group: Group) -> Any:
        node = node_of(group)
        group.barrier()
        if group.rank == ATTACKER:
            return attack(group, node)
        held_up: asyncio.Event = call_on_loop(asyncio.Event)
        began: asyncio.Event = call_on_loop(asyncio.Event)
        owner: Any
        if node.peers[Seat(ATTACKER)].is_dialled:
            owner, name = node.lanes.dialler, "_make_offer" if stage == "offered" else "_open_stream"
        else:
            acceptor = node.lanes.acceptor
            owner, name = (acceptor, "_prove_claim") if stage == "offered" else (acceptor._maker, "accepted")
        proceed = getattr(owner, name)

        async def hold_up(*args: Any) -> Any:
            result = await proceed(*args)
            if is_attackers(args):
                began.set()
                await held_up.wait()
            return result

        def is_attackers(args: tuple[Any, ...]) -> bool:
            return name == "_prove_claim" or args[0] == ATTACKER or getattr(args[0], "seat", -1) == ATTACKER

        call_on_loop(setattr, owner, name, hold_up)
        turn.wait()
        until(began.is_set)
        turn.wait()
        await_exclusion(group)
        call_on_loop(held_up.set)
        turn.wait()
        call_on_loop(lambda: None)
        with pytest.raises(PeerLostError):
            group.recv(src=ATTACKER, timeout=DEADLINE)
        return call_on_loop(
            lambda: [
                key
                for key, future in node.lanes.table._lanes.items()
                if key.peer == ATTACKER and key.purpose == "messages" and future.done() and future.exception() is None
            ]
        )

    def attack(group: Group, node: NodeParts) -> None:
        turn.wait()

        def send(rank: int) -> None:
            with contextlib.suppress(CoveyError):
                group.send(POISON, dst=rank, tag=7, timeout=DEADLINE)

        threads = [threading.Thread(target=send, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        turn.wait()
        leave_secretly(group)
        turn.wait()
        for thread in threads:
            thread.join()

    assert run_nodes(new_cluster(), rank_main, size=3, config=SURVIVING)[:2] == [[], []]


def test_a_member_that_is_not_in_a_group_gets_no_lane_of_it() -> None:
    turn = threading.Barrier(3, timeout=DEADLINE)

    def rank_main(group: Group) -> Any:
        node = node_of(group)
        part = group.split(None if group.rank == ATTACKER else 0)
        group.barrier()
        if part is None:
            name = f"{engine_of(group).id}/{engine_of(group).operation.sequence - 1}/0"
            words = Words(node)
            number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
            for rank in range(2):
                offer = messages.Offer(
                    secrets.token_bytes(16), secrets.token_bytes(32), number, "messages", "secure", 0, 1
                )
                control.soon(node.peers.send, rank, offer)
                control.soon(node.peers.send, rank, messages.Dial(number, "messages"))
            until(lambda: len(words.refusals) >= 2)
            assert words.invitations == []
            turn.wait()
            return number
        turn.wait()
        part.send(np.arange(3.0) + part.rank, dst=1 - part.rank)
        assert part.recv().tolist() == [1.0 - part.rank, 2.0 - part.rank, 3.0 - part.rank]
        return engine_of(part).id

    assert len(set(run_nodes(new_cluster(), rank_main, size=3, config=SURVIVING))) == 1
