"""Queued collectives are cancelled on all remaining ranks or on none while a rank is killed."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.ranks import Ranks, await_go, say
from tests.support.waiting import DEADLINE

import covey

VICTIM, SIZE = 2, 4


def cancel_at_random(victim: int, batches: int, seed: int) -> Any:
    """Issue batches of sums, cancel some of them, and tell what became of each; the victim stops in the middle."""
    import random

    import numpy as np

    told, unheard = [], []
    with covey.join() as group:
        own = random.Random(100 * seed + group.rank)
        for batch in range(batches):
            if batch == batches // 2 and group.rank == victim:  # what others issue now waits behind their first sum
                say("half")
                await_go()
            arrays = [np.full(1000, 1.0 + group.rank) for _ in range(8)]
            with group.cancellable():
                works = [group.all_reduce(x, async_op=True) for x in arrays]
            asked = {which for which in range(8) if own.random() < 0.1 and works[which].cancel()}
            if batch == batches // 2:
                say("waits")
            for which, work in enumerate(works):
                error = work.exception()
                if error is None:
                    told.append([arrays[which][0], list(work.contributors)])
                else:
                    told.append([type(error).__name__, str(error).rpartition(": ")[2]])
                if which in asked and not isinstance(error, covey.CancelledError):
                    unheard.append([batch, which])
        say("over", told=told, live=list(group.live), unheard=unheard)
        await_go()
    return None


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2, 3))])
def test_all_remaining_ranks_cancel_the_same_operations_when_one_is_killed(seed: int) -> None:
    others = [rank for rank in range(SIZE) if rank != VICTIM]
    env = {"COVEY_ON_LOSS": "continue"}
    with Ranks(SIZE, cancel_at_random, VICTIM, 12, seed, lanes="unix", env=env) as ranks:
        ranks.hear("half", [VICTIM])
        ranks.hear("waits", others)
        ranks.kill(VICTIM)
        first, *rest = ranks.hear("over", others, timeout=DEADLINE)
        for rank in others:
            ranks.go(rank)
    assert first["live"] == others
    assert [told["unheard"] for told in (first, *rest)] == [[], [], []]
    assert all(other["told"] == first["told"] for other in rest)
    kinds = [each[0] for each in first["told"]]
    assert len(kinds) == 96
    assert 0 < kinds.count("CancelledError") < 96
    assert [each[1] for each in first["told"] if each[0] == 7.0][-1] == others
    assert {each[0] for each in first["told"]} == {10.0, 7.0, "CancelledError"}
