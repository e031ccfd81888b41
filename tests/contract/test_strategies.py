"""Strategies over groups: hosts of unequal size give the mean over all ranks, with the same bits on each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import covey
from covey.testing import run_threads

HOSTS = (0, 1, 1, 0, 0, 2)
"""By rank of the run: its host. So hosts have 3, 2 and 1 ranks."""


def hierarchy(group: covey.Group) -> covey.HierarchicalStrategy:
    host = HOSTS[group.rank]
    local = group.split(host)
    across = group.split(0 if local.rank == 0 else None, key=-host)  # hosts in another order than ranks
    strategy = covey.HierarchicalStrategy(
        covey.GroupStrategy(local), None if across is None else covey.GroupStrategy(across)
    )
    strategy.init()
    return strategy


def gradients(rank: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(rank)
    return {
        "weights": rng.normal(size=(17, 5)).astype(np.float32),
        "bias": rng.normal(size=3),
        "empty": np.zeros((0, 2), np.float32),
        "strided": rng.normal(size=(6, 4)).astype(np.float32)[:, ::2],
    }


def use(group: covey.Group) -> dict[str, Any]:
    strategy = hierarchy(group)
    mine = gradients(group.rank)
    strategy.all_reduce_gradients(mine)
    summed = {"n": np.array([group.rank, 1])}
    strategy.all_reduce_gradients(summed, "sum")
    with pytest.raises(covey.ConfigError, match="no mean"):
        strategy.all_reduce_gradients(summed)
    heard = []
    for root in range(strategy.size):
        x = np.array([100.0 * strategy.rank + group.rank, strategy.rank])
        strategy.broadcast(x, root)
        heard.append(x.tolist())
    with pytest.raises(covey.ConfigError, match="ranks 0 to 5"):
        strategy.broadcast(np.zeros(1), 6)
    strategy.barrier()
    ranks = strategy.rank, strategy.size
    strategy.shutdown()
    strategy.shutdown()
    return {"ranks": ranks, "mean": mine, "sum": summed["n"].tolist(), "heard": heard}


def test_a_hierarchy_of_unequal_hosts_gives_the_mean_over_ranks() -> None:
    results = run_threads(len(HOSTS), use)
    # Hosts in the order 2, 1, 0: ranks 5, then 1 and 2, then 0, 3 and 4.
    assert [result["ranks"] for result in results] == [(3, 6), (1, 6), (2, 6), (4, 6), (5, 6), (0, 6)]
    order = {strategy_rank: rank for rank, (strategy_rank, _) in enumerate(result["ranks"] for result in results)}
    for result in results:
        assert result["heard"] == [[100.0 * root + order[root], root] for root in range(6)]
        assert result["sum"] == [15, 6]
    for name in gradients(0):
        exact = np.mean([gradients(rank)[name].astype(np.float64) for rank in range(6)], axis=0)
        for result in results:
            assert result["mean"][name].tobytes() == results[0]["mean"][name].tobytes()
            np.testing.assert_allclose(result["mean"][name], exact, rtol=1e-5, atol=1e-6)


def test_a_group_is_a_strategy() -> None:
    def rank_main(group: covey.Group) -> list[float]:
        strategy = covey.GroupStrategy(group)
        strategy.init()
        x = np.array([float(strategy.rank), 10.0 * strategy.size])
        strategy.all_reduce_gradients({"x": x})
        with pytest.raises(covey.ConfigError, match="'mean' or 'sum'"):
            strategy.all_reduce_gradients({"x": x}, "max")  # type: ignore[arg-type]
        strategy.broadcast(x, 1)
        strategy.barrier()
        return list(x)

    assert run_threads(3, rank_main) == [[1.0, 30.0]] * 3


def test_a_hierarchy_is_refused_where_its_mean_would_be_wrong() -> None:
    with covey.join(on_loss="continue") as group:
        strategy = covey.HierarchicalStrategy(covey.GroupStrategy(group), covey.GroupStrategy(group))
        with pytest.raises(covey.ConfigError, match="on_loss='raise'"):
            strategy.init()
    with covey.join() as group:
        strategy = covey.HierarchicalStrategy(covey.GroupStrategy(group), None)
        with pytest.raises(covey.ConfigError, match="across is missing on rank 0"):
            strategy.init()
        with pytest.raises(covey.ConfigError, match=r"call init\(\)"):
            strategy.barrier()
