"""DDP with communication hooks against what one process computes, on covey and gloo."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.support.torch_ranks import Lost, run_torch_ranks
from torch.nn.parallel import DistributedDataParallel

from covey.base.errors import ConfigError
from covey.torch.training.hooks import compress_hook, rescale_hook, weighted_hook

SIZE, STEPS = 3, 6
COUNTS = [[3, 1, 4], [5, 0, 2], [1, 6, 1]]  # samples by step and rank


def net() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 7))


def samples(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(COUNTS[step][rank], 20, generator=generator)


def numbers(model: torch.nn.Module) -> list[np.ndarray]:
    return [parameter.detach().double().numpy().copy() for parameter in model.parameters()]


class Terms(torch.nn.Module):
    """Parameters whose gradients are what one likes; the order in which they come is not that of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Parameter(torch.zeros(count)) for count in (300, 35, 513))

    def forward(self, wanted: list[torch.Tensor]) -> torch.Tensor:
        a, b, c = wanted
        return (self.a * a).sum() + (self.c * c).sum() + (self.b * b).sum()


def wanted(step: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(count, generator=generator) * torch.logspace(-3, 2, count, base=2) for count in (300, 35, 513)]


# In a rank


def every_hook(rank: int, size: int, store: str, backend: str) -> dict[str, Any]:
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    results: dict[str, Any] = {}
    results["weighted"] = weighted(rank)
    results["joined"] = joined(rank)
    hook = weighted_hook()
    hook.samples = 257 + rank  # a number that bfloat16 has not
    results["weighted bf16"] = averages(rank, hook, torch.bfloat16)
    results["rescaled"] = [averages(rank, None), averages(rank, rescale_hook())]
    for codec in ("fp16", "bf16", "int8"):
        for cap in (25.0, 0.001):
            results[f"{codec} {cap}"] = compressed(rank, codec, cap)
        results[f"{codec} infinite"] = with_an_infinity(rank, codec)
    forgetful = compress_hook("int8", feedback=False)
    results["no feedback"] = averages(rank, forgetful), forgetful.state_dict()
    results["converged"] = converge(rank)
    hook = weighted_hook()
    for nonsense in (None, -1, float("nan"), float("inf")):
        hook.samples = nonsense
        with pytest.raises(ConfigError, match=rf"samples={nonsense}; set hook\.samples"):
            averages(rank, hook)
    hook.samples = 0
    results["nobody"] = averages(rank, hook)
    results["pair"] = in_a_pair(rank)
    return results


def in_a_pair(rank: int) -> dict[str, list[np.ndarray]]:
    """The averages of a model that ranks 0 and 2 have together."""
    pair = dist.new_group([0, 2])
    if rank == 1:
        return {}
    found, weighted = {}, weighted_hook()
    weighted.samples = rank + 1
    for name, hook in {"weighted": weighted, "rescale": rescale_hook(), "int8": compress_hook("int8")}.items():
        ddp = DistributedDataParallel(Terms(), process_group=pair)
        ddp.register_comm_hook(pair, hook)
        found[name] = average(ddp, rank, 0)
    return found


def weighing() -> tuple[DistributedDataParallel, Any, torch.optim.Optimizer]:
    """Return a model whose gradients are weighted, the hook that does it, and an optimizer."""
    ddp = DistributedDataParallel(net(), bucket_cap_mb=0.001)
    hook = weighted_hook()
    ddp.register_comm_hook(None, hook)
    return ddp, hook, torch.optim.SGD(ddp.parameters(), lr=0.1)


def weighted(rank: int) -> list[np.ndarray]:
    ddp, hook, optimizer = weighing()
    for step in range(len(COUNTS)):
        hook.samples = COUNTS[step][rank]
        ddp(samples(step, rank)).square().mean().backward()  # of nothing, that is not a number
        optimizer.step()
        optimizer.zero_grad()
    return numbers(ddp.module)


def joined(rank: int) -> list[np.ndarray]:
    """Rank r runs out of batches after r + 1 steps, and says so; those who are left go on."""
    ddp, hook, optimizer = weighing()
    with ddp.join():
        for step in range(rank + 1):
            hook.samples = COUNTS[step][rank]
            ddp(samples(step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        hook.samples = 0
    return numbers(ddp.module)


def averages(rank: int, hook: Any, dtype: torch.dtype = torch.float32) -> list[list[np.ndarray]]:
    """What DDP makes of the gradients of some steps."""
    ddp = DistributedDataParallel(Terms().to(dtype))
    if hook is not None:
        ddp.register_comm_hook(dist.group.WORLD, hook)
    return [average(ddp, rank, step) for step in range(STEPS)]


def average(ddp: DistributedDataParallel, rank: int, step: int) -> list[np.ndarray]:
    ddp.zero_grad()
    ddp(wanted(step, rank)).backward()
    return [parameter.grad.double().numpy().copy() for parameter in ddp.parameters()]


def compressed(rank: int, codec: str, cap: float) -> tuple[list[list[np.ndarray]], dict[int, np.ndarray]]:
    """The averages, and what is owed at the end, by the length of the parameter; half way all begins anew."""
    got: list[list[np.ndarray]] = []
    state: dict[str, Any] | None = None
    for steps in (range(STEPS // 2), range(STEPS // 2, STEPS)):
        ddp, hook = DistributedDataParallel(Terms(), bucket_cap_mb=cap), compress_hook(codec)
        ddp.register_comm_hook(None, hook)
        if state is not None:
            hook.load_state_dict(state)
        got += [average(ddp, rank, step) for step in steps]
        state = hook.state_dict()
    assert state is not None
    return got, {len(row): row.double().numpy() for row in state["residuals"].values()}


def with_an_infinity(rank: int, codec: str) -> list[bool]:
    ddp = DistributedDataParallel(Terms())
    ddp.register_comm_hook(None, compress_hook(codec))
    finite = []
    for step in range(3):
        terms = wanted(step, rank)
        if step == 1 and rank == 2:
            terms[1][3] = torch.inf
        ddp.zero_grad()
        ddp(terms).backward()
        finite.append(all(bool(parameter.grad.isfinite().all()) for parameter in ddp.parameters()))
    return finite


def converge(rank: int) -> float:
    """How far from the best a model ends that pulls every rank elsewhere."""
    model = torch.nn.Linear(50, 6, bias=False)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, compress_hook("int8"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    goals = torch.randn(SIZE, 6, 50, generator=torch.Generator().manual_seed(9))
    for _ in range(80):
        optimizer.zero_grad()
        (ddp(torch.eye(50)) - goals[rank].t()).square().sum().div(2).backward()
        optimizer.step()
    return float((model.weight - goals.mean(0)).abs().max())


# The tests


@functools.cache
def results_on(backend: str) -> list[dict[str, Any]]:
    return run_torch_ranks(SIZE, every_hook, backend)


@pytest.fixture(params=["covey", "gloo"])
def results(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What the ranks found. A fixture of the module would be made anew when the next test has the other backend."""
    return results_on(request.param)


def test_unequal_batches_are_trained_on_as_one_process_trains_on_all_of_them(results: list[dict[str, Any]]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(len(COUNTS)):
        optimizer.zero_grad()
        model(torch.cat([samples(step, rank) for rank in range(SIZE)])).square().mean().backward()
        optimizer.step()
    for result in results:
        for got, expected in zip(result["weighted"], numbers(model), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_under_join_ranks_without_batches_do_not_count(results: list[dict[str, Any]]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(SIZE):
        optimizer.zero_grad()
        model(torch.cat([samples(step, rank) for rank in range(step, SIZE)])).square().mean().backward()
        optimizer.step()
    for result in results:
        for got, expected in zip(result["joined"], numbers(model), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_where_nobody_has_samples_gradients_are_zero(results: list[dict[str, Any]]) -> None:
    assert all(not row.any() for result in results for step in result["nobody"] for row in step)


def test_a_hook_with_a_group_averages_over_that(results: list[dict[str, Any]]) -> None:
    for rank in (0, 2):
        for place in range(3):
            rows = [wanted(0, each)[place].double().numpy() for each in (0, 2)]
            got = {name: average[place] for name, average in results[rank]["pair"].items()}
            np.testing.assert_allclose(got["rescale"], np.mean(rows, axis=0), rtol=1e-5, atol=1e-6)
            weighted = np.average(rows, axis=0, weights=[1, 3])
            np.testing.assert_allclose(got["weighted"], weighted, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(got["int8"], np.mean(rows, axis=0), atol=np.abs(rows).max() / 60)


def test_weights_are_exact_where_gradients_are_narrow(results: list[dict[str, Any]]) -> None:
    weights = np.arange(257, 257 + SIZE)
    for step, average in enumerate(results[1]["weighted bf16"]):
        for place in range(3):
            rows = [wanted(step, rank)[place].bfloat16().double().numpy() for rank in range(SIZE)]
            expected = torch.from_numpy(np.average(rows, axis=0, weights=weights)).bfloat16().double().numpy()
            np.testing.assert_allclose(average[place], expected, rtol=2**-7)


def test_rescaling_changes_nothing_while_all_are_there(results: list[dict[str, Any]]) -> None:
    for result in results:
        for plain, rescaled in zip(*result["rescaled"], strict=True):
            assert all(np.array_equal(one, other) for one, other in zip(plain, rescaled, strict=True))


@pytest.mark.parametrize("cap", [25.0, 0.001])
@pytest.mark.parametrize(("codec", "rounding"), [("fp16", 1e-3), ("bf16", 8e-3), ("int8", 4e-3)])
def test_what_rounding_takes_is_small_and_comes_later(
    results: list[dict[str, Any]], codec: str, cap: float, rounding: float
) -> None:
    for place, count in enumerate((300, 35, 513)):
        given = [[wanted(step, rank)[place].double().numpy() / SIZE for step in range(STEPS)] for rank in range(SIZE)]
        sent = np.sum([step[place] for step in results[0][f"{codec} {cap}"][0]], axis=0)
        owed = [result[f"{codec} {cap}"][1][count] for result in results]
        largest = max(float(np.abs(rows).max()) for rows in given)
        total = sent + sum(owed) / SIZE
        np.testing.assert_allclose(total, np.sum(given, axis=(0, 1)), atol=1e-5 * largest * STEPS)
        # Each rank has rounded the sum of some ranks' gradients, or the mean for all of them.
        assert all(0 < np.abs(rows).max() <= rounding * SIZE * SIZE * largest for rows in owed)
    for result in results[1:]:
        for one, other in zip(results[0][f"{codec} {cap}"][0], result[f"{codec} {cap}"][0], strict=True):
            assert all(np.array_equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def test_without_feedback_nothing_is_owed_and_every_step_stands_alone(results: list[dict[str, Any]]) -> None:
    averages, state = results[0]["no feedback"]
    assert state == {}
    for step, average in enumerate(averages):
        for place in range(3):
            expected = sum(wanted(step, rank)[place].double().numpy() for rank in range(SIZE)) / SIZE
            np.testing.assert_allclose(average[place], expected, atol=np.abs(expected).max() / 40)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8"])
def test_an_infinity_shows_in_its_step_and_no_longer(results: list[dict[str, Any]], codec: str) -> None:
    assert all(result[f"{codec} infinite"] == [True, False, True] for result in results)


def test_int8_finds_the_optimum(results: list[dict[str, Any]]) -> None:
    assert all(result["converged"] < 1e-3 for result in results)


def lose_one(rank: int, size: int, store: str) -> Any:
    os.environ["COVEY_ON_LOSS"] = "continue"
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size)
    results = {}
    weighted = weighted_hook()
    weighted.samples = rank + 1
    codecs = {codec: compress_hook(codec) for codec in ("fp16", "bf16", "int8")}
    for name, hook in {"plain": None, "rescale": rescale_hook(), "weighted": weighted, **codecs}.items():
        ddp = DistributedDataParallel(Terms())
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        results[name] = ddp, [average(ddp, rank, 0)]
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return {name: [*got, average(ddp, rank, 1)] for name, (ddp, got) in results.items()}


def test_after_a_loss_gradients_are_the_mean_over_those_who_are_left() -> None:
    returned = run_torch_ranks(SIZE, lose_one)
    assert returned[1] is Lost
    for rank in (0, 2):
        for place in range(3):
            rows = [wanted(1, each)[place].double().numpy() for each in (0, 2)]
            expected = np.mean(rows, axis=0)
            got = {name: steps[1][place] for name, steps in returned[rank].items()}
            np.testing.assert_allclose(got["plain"], expected * 2 / SIZE, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(got["rescale"], expected, rtol=1e-5, atol=1e-6)
            weighted = np.average(rows, axis=0, weights=[1, 3])
            np.testing.assert_allclose(got["weighted"], weighted, rtol=1e-5, atol=1e-6)
            for codec, part in (("fp16", 400), ("bf16", 50), ("int8", 60)):
                np.testing.assert_allclose(got[codec], expected, atol=np.abs(rows).max() / part, err_msg=codec)


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no codec 'fp4'"):
        compress_hook("fp4")
