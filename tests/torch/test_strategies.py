"""Strategies with torch: gloo inside a host and covey between hosts; accumulation and clipping as torch does them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.support.torch_ranks import run_torch_ranks

import covey

HOSTS = (0, 0, 1)
"""By rank: its host."""


def combine(rank: int, size: int, store: str) -> dict[str, Any]:
    """Be a rank: gloo with the ranks of the same host, covey between the first ranks of the hosts."""
    from covey.torch import ProcessGroupStrategy

    host = HOSTS[rank]
    mates = [each for each, its_host in enumerate(HOSTS) if its_host == host]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    locals_ = [dist.new_group([each for each in range(size) if HOSTS[each] == one]) for one in (0, 1)]
    firsts = [HOSTS.index(one) for one in (0, 1)]
    leaders = dist.new_group(firsts, backend="covey")
    local = ProcessGroupStrategy(locals_[host])
    across = ProcessGroupStrategy(leaders) if mates[0] == rank else None
    strategy = covey.HierarchicalStrategy(local, across)
    strategy.init()
    rng = np.random.default_rng(rank)
    gradients: dict[str, Any] = {
        "tensor": torch.from_numpy(rng.normal(size=(4, 3)).astype(np.float32)),
        "strided": torch.from_numpy(rng.normal(size=(4, 6)).astype(np.float32))[:, ::2],
        "array": rng.normal(size=7),
    }
    strategy.all_reduce_gradients(gradients)
    heard = []
    for root in range(size):
        x = torch.tensor([10.0 * rank + 1])
        strategy.broadcast(x, root)
        heard.append(x.item())
    strategy.barrier()
    result = {"rank": strategy.rank, "size": strategy.size, "heard": heard}
    strategy.shutdown()
    dist.destroy_process_group()
    return result | {name: np.asarray(x).copy() for name, x in gradients.items()}


def test_gloo_inside_hosts_and_covey_between_them_give_the_mean_over_ranks() -> None:
    results = run_torch_ranks(3, combine)
    assert [(result["rank"], result["size"]) for result in results] == [(0, 3), (1, 3), (2, 3)]
    assert [result["heard"] for result in results] == [[1.0, 11.0, 21.0]] * 3
    drawn = [np.random.default_rng(rank) for rank in range(3)]
    tensors, strided, arrays = zip(
        *((rng.normal(size=(4, 3)), rng.normal(size=(4, 6))[:, ::2], rng.normal(size=7)) for rng in drawn), strict=True
    )
    for name, all_of_them in (("tensor", tensors), ("strided", strided), ("array", arrays)):
        for result in results:
            assert result[name].tobytes() == results[0][name].tobytes()
            np.testing.assert_allclose(result[name], np.mean(all_of_them, axis=0), rtol=1e-5, atol=1e-6)


def parameters(seed: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((50, 30), (30,), (1,))]


def test_accumulated_gradients_have_the_bits_of_torch() -> None:
    ours: dict[str, Any] = {}
    theirs = parameters(0)
    for seed in range(1, 5):
        parts = parameters(seed)
        for parameter, part in zip(theirs, parts, strict=True):
            (parameter * part.detach()).sum().backward()
        covey.accumulate(ours, {str(n): part.detach().numpy() for n, part in enumerate(parts)})
    for number, parameter in enumerate(theirs):
        assert parameter.grad is not None
        assert ours[str(number)].tobytes() == parameter.grad.numpy().tobytes()
    halves: dict[str, Any] = {}
    for part in (np.array([2.0, 4.0]), np.array([4.0, 8.0])):
        covey.accumulate(halves, {"x": part}, 0.5)
        assert part[0] in (2.0, 4.0)
    assert halves["x"].tolist() == [3.0, 6.0]
    with pytest.raises(covey.ConfigError, match=r"'x' is float32\[2\], and was float64\[2\] before"):
        covey.accumulate(halves, {"y": np.ones(2), "x": np.ones(2, np.float32)})
    assert list(halves) == ["x"]  # nothing was added


@pytest.mark.parametrize("max_norm", [0.5, 20.0, 1e6])
def test_gradients_are_clipped_as_torch_clips_them(max_norm: float) -> None:
    theirs = parameters(7)
    for parameter in theirs:
        parameter.grad = parameter.detach().clone()
    ours = {str(n): parameter.detach().numpy().copy() for n, parameter in enumerate(theirs)}
    norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert covey.clip_norm(ours, max_norm) == pytest.approx(float(norm), rel=1e-6)
    for number, parameter in enumerate(theirs):
        assert parameter.grad is not None
        np.testing.assert_allclose(ours[str(number)], parameter.grad.numpy(), rtol=2e-6)
    after = covey.clip_norm(ours, 1e9)
    assert after <= max_norm * (1 + 1e-6)
    with pytest.raises(covey.ConfigError, match="above 0"):
        covey.clip_norm(ours, 0)
    assert np.isnan(covey.clip_norm({"x": np.array([np.nan, 1.0])}, 1.0))
