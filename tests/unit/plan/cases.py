"""What the plan tests share: the cases to prove, and an obvious executor that runs plans in a random order."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeVarTuple

import pytest
from tests.support.in_turn import in_turn
from tests.support.sets import first

from covey.plan.moves import LEFT_OPERAND, REDUCE, Plan

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence

Args = TypeVarTuple("Args")

SIZES = range(1, 34)
SOME_SIZES = (*range(1, 14), 16, 17, 33)
"""All small ones, and those around powers of two: what a large one takes grows with its cube."""
SEGMENTS = (1, 2, 1000)


def at_every_size(test: Callable[[int], None]) -> Callable[..., None]:
    """Prove something for all SIZES, of which SOME_SIZES are in `make test`."""

    @pytest.mark.parametrize("sizes", first(1, [SOME_SIZES, SIZES]), ids=["some", "all"])
    @functools.wraps(test)
    def prove(sizes: Sequence[int]) -> None:
        in_turn(size=sizes)(test)()

    del prove.__dict__["__wrapped__"]  # pytest would see the parameters of the test
    return prove


def counts(size: int) -> list[int]:
    """Element counts around the places where parts become empty or uneven."""
    return sorted({0, 1, size - 1, size, 2 * size + 3})


def roots(size: int, count: int) -> list[int]:
    """Every root of a small group; of a large one the first, the last or one between, as `count` varies."""
    return list(range(size)) if size <= 8 else [count % size]


def lengths(size: int, count: int) -> list[int]:
    """Uneven lengths, one a rank, some of them 0, of about `count` in total."""
    return [(3 * rank + count) % 5 * count // (2 * size) for rank in range(size)]


def each_rank(size: int, plan: Callable[[int, *Args], Plan], *args: *Args) -> list[Plan]:
    """Return `plan(rank, *args)` of every rank."""
    return [plan(rank, *args) for rank in range(size)]


def segmented(size: int, plan: Callable[[int, *Args, int], Plan], *args: *Args) -> Iterator[list[Plan]]:
    """Yield `plan(rank, *args, segment)` of every rank for each segment length, once where several cut alike."""
    seen: list[list[Plan]] = []
    for segment in SEGMENTS:
        plans = [plan(rank, *args, segment) for rank in range(size)]
        if plans not in seen:
            seen.append(plans)
            yield plans


class StuckError(Exception):
    """No rank can take a step, yet not all are finished."""


def run(plans: Sequence[Plan], memory: list[list[list[str]]], rng: random.Random, room: int) -> None:
    """Carry out plans in a random order, on lanes that hold up to `room` transfers not yet received.

    A value is the text of its expression. A send reads each element at its start or at its end, by chance.
    """
    size = len(plans)
    started: list[dict[int, str] | None] = [None] * size  # what the current send has read so far
    done, applied = [0] * size, [0] * size
    lanes: dict[tuple[int, int], list[list[str]]] = {(a, b): [] for a in range(size) for b in range(size)}

    def steps() -> Iterator[Callable[[], None]]:
        for rank, plan in enumerate(plans):
            if done[rank] < len(plan.sends):
                send = plan.sends[done[rank]]
                if started[rank] is None:
                    if applied[rank] >= send.after:
                        yield functools.partial(start, rank)
                elif len(lanes[rank, send.peer]) < room + (awaited(send.peer) == rank):
                    yield functools.partial(complete, rank)
            if applied[rank] < len(plan.recvs):
                recv = plan.recvs[applied[rank]]
                if lanes[recv.peer, rank] and done[rank] >= recv.after:
                    yield functools.partial(apply, rank)

    def awaited(rank: int) -> int | None:
        return plans[rank].recvs[applied[rank]].peer if applied[rank] < len(plans[rank].recvs) else None

    def start(rank: int) -> None:
        send = plans[rank].sends[done[rank]]
        early = [element for element in range(send.start, send.stop) if rng.random() < 0.5]
        started[rank] = {element: memory[rank][send.buffer][element] for element in early}

    def complete(rank: int) -> None:
        send, read = plans[rank].sends[done[rank]], started[rank]
        assert read is not None
        whole = [read.get(element, memory[rank][send.buffer][element]) for element in range(send.start, send.stop)]
        lanes[rank, send.peer].append(whole)
        started[rank] = None
        done[rank] += 1

    def apply(rank: int) -> None:
        recv = plans[rank].recvs[applied[rank]]
        own = memory[rank][recv.buffer]
        for element, value in enumerate(lanes[recv.peer, rank].pop(0), recv.start):
            left, right = (value, own[element]) if recv.action & LEFT_OPERAND else (own[element], value)
            own[element] = f"({left} {right})" if recv.action & REDUCE else value
        applied[rank] += 1

    while possible := list(steps()):
        rng.choice(possible)()
    for rank, plan in enumerate(plans):
        if done[rank] < len(plan.sends) or applied[rank] < len(plan.recvs):
            raise StuckError(rank)
