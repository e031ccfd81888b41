"""Lanes that move to another path while operations run: nothing is lost, and no result changes."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import Ranks
from tests.support.waiting import DEADLINE

import covey

MOVES = 6
"""How many lanes each rank must have seen move. Of three ranks, two see twice as many."""


def work_while_lanes_move(moves: int, seconds: float) -> dict[str, Any]:
    from covey.runtime import loop as control
    from covey.runtime.joining.node import node_of

    is_over = threading.Event()

    def move_again_and_again(node: Any) -> None:
        while not is_over.wait(0.01):
            for peer in node.peers.values():
                if peer.is_dialled:
                    control.soon(node.lanes.moves.move, peer.seat)

    with covey.join() as group:
        mover = threading.Thread(target=move_again_and_again, args=(node_of(group),))
        mover.start()
        size, rank, wrong = group.size, group.rank, []
        small, large = np.arange(100.0), np.arange(40_000.0)
        ends, step, is_last = time.monotonic() + seconds, 0, False
        while not is_last:
            step += 1
            total = size * step + size * (size - 1) / 2
            for x in (small, small, large):  # repeated small calls take the shortcut
                y = group.all_reduce(x * (rank + step))
                wrong += [] if (y == x * total).all() else [["sum", step, x.size]]
            works = [group.all_reduce(small * (rank + step + i), async_op=True) for i in range(3)]
            root = step % size
            y = group.broadcast(small * (rank + step), root=root)
            wrong += [] if (y == small * (root + step)).all() else [["broadcast", step]]
            for i, work in enumerate(works):
                wrong += [] if (work.wait() == small * (total + size * i)).all() else [["work", step, i]]
            gathered = group.all_gather(np.full(7, 100.0 * step + rank))
            expected = [100.0 * step + each for each in range(size)]
            wrong += [] if [part[0] for part in gathered] == expected else [["gathered", step]]
            if rank == 0:  # runs ahead of the rank that it sends to
                for each in [group.send(large + step, dst=1, async_op=True) for _ in range(2)]:
                    each.wait()
            elif rank == 1:
                for _ in range(2):
                    wrong += [] if (group.recv(src=0) == large + step).all() else [["message", step]]
            told = [event.text for event in group.events() if event.kind == "moved"]
            is_last = bool(group.all_reduce(np.array([len(told) >= moves or time.monotonic() > ends]), "and")[0])
        is_over.set()
        mover.join()
        group.barrier()
        return {"steps": step, "wrong": wrong, "moved": len(told), "told": told[-1:]}


@pytest.mark.parametrize(
    ("lanes", "on_loss", "native"),
    [
        *(("tcp", "raise", "1"), ("secure", "continue", "0")),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (("secure", "raise", "0"), ("tcp", "continue", "1"))
        ),
    ],
)
def test_operations_of_all_kinds_are_right_while_lanes_move(lanes: str, on_loss: str, native: str) -> None:
    env = {"COVEY_ON_LOSS": on_loss, "COVEY_NATIVE": native, "COVEY_TIMEOUT": str(DEADLINE)}
    with Ranks(3, work_while_lanes_move, MOVES, DEADLINE, lanes=lanes, env=env) as ranks:
        reports = ranks.results()
        ranks.await_exit()
    assert len({report["steps"] for report in reports}) == 1
    for report in reports:
        assert report["wrong"] == []
        assert report["moved"] >= MOVES, report
        assert report["told"][0].startswith(f"{lanes} lane moved from 127.0.0.1")
