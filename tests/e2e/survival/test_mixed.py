"""Ranks with the compiled executor and ranks with Python in one run, some of which are killed at random moments."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.support.compiled import needs_native
from tests.support.seeds import batches
from tests.support.sets import first
from tests.support.survivors import Members, covey, np, os, signal, threading, values
from tests.support.waiting import DEADLINE

pytestmark = needs_native

SIZE = 5


def run_mixed(seed: int, policy: covey.OnLoss, victims: dict[str, int], compiled: list[int], lanes: Any) -> Any:
    """Run random operations until all victims are lost and a few more; compare each result with the reference.

    A victim is killed by a thread, a random moment after it has begun the operation of its number.
    """
    import random

    from covey.base.native import native

    rank = int(os.environ["COVEY_RANK"])
    if rank not in compiled:
        os.environ["COVEY_NATIVE"] = "0"
    native.cache_clear()
    assert (native().module is not None) == (rank in compiled)
    told, own = random.Random(seed), random.Random(f"{seed} {rank}")
    wrong: list[Any] = []
    with covey.join(on_loss=policy, lanes=lanes, timeout=DEADLINE) as group:
        ranks, lost = list(range(group.size)), ""
        for number in range(120):
            kind = told.choice(["all_reduce", "all_reduce", "all_gather", "broadcast", "barrier"])
            count, scale = told.choice([1, 7, 500, 3000, 40_000, 200_000]), 1 + number % 5
            if victims.get(str(rank)) == number:
                delay = own.choice([0.0, 0.0002, 0.001, 0.003])
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            mine = values(ranks.index(group.rank) if policy == "raise" else rank, count) * scale
            root = told.choice([member for member in range(group.size) if str(member) not in victims] or [0])
            try:
                if kind == "all_reduce":
                    found = group.all_reduce(mine)
                    expected = values(0, count) * (scale * sum(4**each for each in group.contributors))
                elif kind == "all_gather":
                    parts, there = group.all_gather(mine), group.contributors
                    found = np.concatenate([parts[each] for each in there])
                    expected = np.concatenate([values(each, count) * scale for each in there])
                elif kind == "broadcast":
                    found, expected = group.broadcast(mine, root=root), values(root, count) * scale
                else:
                    group.barrier()
                    continue
            except covey.PeerLostError as error:
                lost = f"{type(error).__name__} {error.rank}"
                break
            if not np.array_equal(found, expected):
                wrong.append([number, kind, count, list(group.contributors), found[:4].tolist(), expected[:4].tolist()])
        if policy == "raise":
            again, _ = group.shrink()
            with again:
                total = again.all_reduce(values(again.rank, 5000))
                if not np.array_equal(total, values(0, 5000) * sum(4**each for each in range(again.size))):
                    wrong.append(["shrunk", total[:4].tolist()])
                return {"wrong": wrong, "lost": lost, "ranks": again.size}
        return {"wrong": wrong, "lost": lost, "ranks": len(group.contributors)}


def play(seed: int, policy: str) -> None:
    rng = random.Random(seed)
    dead = rng.sample(range(SIZE), 2 if policy == "continue" else 1)
    compiled = rng.sample(range(SIZE), rng.choice([2, 3]))
    victims = {str(rank): rng.randrange(5, 100) for rank in dead}
    lanes = rng.choice(["auto", "shm", "unix", "tcp"])
    others = [rank for rank in range(SIZE) if rank not in dead]
    with Members(SIZE, run_mixed, seed, policy, victims, compiled, lanes) as ranks:
        for rank, report in zip(others, ranks.results(others), strict=True):
            about = f"seed={seed} rank={rank} victims={victims} compiled={compiled} lanes={lanes}"
            assert report["wrong"] == [], about
            assert report["ranks"] == len(others), about
            assert (policy == "continue") == (report["lost"] == ""), about
        ranks.await_exit(others)


@pytest.mark.thorough
@pytest.mark.parametrize("batch", batches(8))
@pytest.mark.parametrize("policy", first(1, ["continue", "raise"]))
def test_what_mixed_ranks_compute_is_right_while_some_are_killed(policy: str, batch: int) -> None:
    for seed in range(2 * batch, 2 * batch + (1 if batch == 0 else 2)):
        play(seed, policy)
