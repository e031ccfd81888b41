"""Every helper for training, with every kind of codec: only gradients are rounded, and ranks hold the same bits."""

from __future__ import annotations

import functools
import os
import random
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.support.torch_ranks import run_torch_ranks
from torch.nn.parallel import DistributedDataParallel

from covey.base.errors import ConfigError, MismatchError
from covey.torch.backend.below import covey_group_of
from covey.torch.training.diloco import DiLoCo
from covey.torch.training.drift import DriftCheck, compare, digest, from_figures, to_figures
from covey.torch.training.hooks import WeightedHook, compress_hook, rescale_hook, weighted_hook
from covey.torch.training.local_sgd import LocalSGD
from covey.torch.training.strategy import ProcessGroupStrategy

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE, STEPS = 3, 4
CODECS = ["int8", "int4", "onebit", "fp8", "fp16", "bf16", "topk(0.3)", "randomk(0.3)", "threshold(0.5)", "powersgd(2)"]
MIXED = "b=none, a=int4, c=topk(0.2), *=int8, smallest=0"
COUNTS = (300, 35, 513)


class Terms(torch.nn.Module):
    """Parameters whose gradients are what one likes, and of very different magnitudes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Parameter(torch.zeros(count)) for count in COUNTS)
        self.d = torch.nn.Parameter(torch.zeros(8, 12))

    def forward(self, wanted: list[torch.Tensor]) -> torch.Tensor:
        return sum((p * x).sum() for p, x in zip(self.parameters(), wanted, strict=True))


def wanted(step: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [
        torch.randn(shape, generator=generator) * 10 ** (rank - 1)
        for shape in (*((count,) for count in COUNTS), (8, 12))
    ]


def samples(step: int, rank: int) -> int:
    return random.Random(f"{step} {rank}").choice((0, 1, 7, 1000, 100_000)) if rank else 1


# In a rank


def bits(model: torch.nn.Module) -> list[bytes]:
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


def trained(rank: int, step_of: Callable[[Terms, int], None], model: Terms) -> tuple[list[Any], list[np.ndarray]]:
    """The bits of the parameters after each step, and their values in the end."""
    after = []
    for step in range(STEPS):
        step_of(model, step)
        after.append(bits(model))
    return after, [parameter.detach().numpy().copy() for parameter in model.parameters()]


def with_ddp(rank: int, make: Any = None, compress: str | None = None) -> tuple[list[Any], list[np.ndarray]]:
    model = Terms()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    hook = None if make is None else make(compress, model=model)
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step_of(_: Terms, step: int) -> None:
        if isinstance(hook, WeightedHook):
            hook.samples = samples(step, rank)
        ddp(wanted(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(rank, step_of, model)


def locally(rank: int, make: Callable[[Terms, Any], Any]) -> tuple[list[Any], list[np.ndarray]]:
    model = Terms()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    averager = make(model, optimizer)

    def step_of(_: Terms, step: int) -> None:
        model(wanted(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        averager.step()

    return trained(rank, step_of, model)


def with_strategy(rank: int, op: Literal["mean", "sum"]) -> tuple[list[Any], list[np.ndarray]]:
    strategy = ProcessGroupStrategy()

    def step_of(model: Terms, step: int) -> None:
        grads = dict(zip("abcd", wanted(step, rank), strict=True))
        strategy.all_reduce_gradients(grads, op)
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), grads.values(), strict=True):
                parameter -= grad

    return trained(rank, step_of, Terms())


def plain_sums(rank: int) -> list[np.ndarray]:
    """Counters and gradients in one row: what torch's own calls send is exact, whatever the group compresses."""
    row = torch.cat([torch.tensor([1.0, 0.0, 100_000.0 + rank]), *(x.flatten() for x in wanted(0, rank))])
    dist.all_reduce(row)
    return [row.numpy()]


def outer(model: Any, inner: Any, **options: Any) -> DiLoCo:
    return DiLoCo(model, inner, torch.optim.SGD(model.parameters(), lr=1.0), every=1, **options)


def averaging(model: Any, _: Any, **options: Any) -> LocalSGD:
    return LocalSGD(model, every=1, **options)


def every_helper(rank: int, size: int, store: str, codecs: list[str], default: str) -> dict[str, Any]:
    os.environ["COVEY_COMPRESS"] = default
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size)
    found: dict[str, Any] = {"plain": plain_sums(rank)}
    below = covey_group_of()
    assert below is not None
    assert below.compression.operations == 0, "a plain sum was compressed"
    for name, run in {
        "ddp default": lambda: with_ddp(rank),
        "weighted default": lambda: with_ddp(rank, weighted_hook),
        "rescale default": lambda: with_ddp(rank, rescale_hook),
        "diloco default": lambda: locally(rank, outer),
        "strategy mean default": lambda: with_strategy(rank, "mean"),
        "strategy sum default": lambda: with_strategy(rank, "sum"),
    }.items():
        before = below.compression.operations
        found[name] = run()
        assert below.compression.operations > before, f"{name} compressed nothing"
    before = below.compression.operations
    found["local exact"] = locally(rank, averaging)
    found["weighted exact"] = with_ddp(rank, weighted_hook, "none")
    found["rescale exact"] = with_ddp(rank, rescale_hook, "none")
    assert below.compression.operations == before, "what must be exact was compressed"
    for codec in codecs:
        found[f"compress {codec}"] = with_ddp(rank, compress_hook, codec)
        found[f"weighted {codec}"] = with_ddp(rank, weighted_hook, codec)
        found[f"rescale {codec}"] = with_ddp(rank, rescale_hook, codec)
        found[f"local {codec}"] = locally(rank, functools.partial(averaging, compress=codec))
        found[f"diloco {codec}"] = locally(rank, functools.partial(outer, compress=codec))
    return found


def exact(name: str) -> list[np.ndarray]:
    """The parameters that one process computes without rounding what is sent."""
    total = [np.zeros(tuple(x.shape)) for x in wanted(0, 0)]
    for step in range(STEPS):
        weights = [samples(step, rank) for rank in range(SIZE)] if name.startswith("weighted") else [1] * SIZE
        divisor = 1 if name == "strategy sum default" else sum(weights)
        for rank, weight in enumerate(weights):
            for sum_, x in zip(total, wanted(step, rank), strict=True):
                sum_ -= x.double().numpy() * weight / divisor
    return total


TOLERANCES = {"exact": 1e-5, "fp16": 0.01, "bf16": 0.05, "int8": 0.05, "default": 0.05, "fp8": 0.2}
"""By codec: the largest error after all steps, relative to the largest element."""


def test_only_gradients_are_rounded_and_all_ranks_hold_the_same_bits() -> None:
    results = run_torch_ranks(SIZE, every_helper, [*CODECS, MIXED], "int8, smallest=0")
    rows = [result.pop("plain")[0] for result in results]
    assert rows[0].tobytes() == rows[1].tobytes() == rows[2].tobytes()
    assert rows[0][:3].tolist() == [3.0, 0.0, 300_003.0]
    expected = sum(np.concatenate([x.numpy().ravel() for x in wanted(0, rank)]).astype(float) for rank in range(SIZE))
    np.testing.assert_allclose(rows[0][3:], expected, rtol=1e-5, atol=1e-5)
    for name in results[0]:
        after, values = results[0][name]
        for rank in (1, 2):
            for step, (mine, other) in enumerate(zip(after, results[rank][name][0], strict=True)):
                assert mine == other, f"{name}: ranks 0 and {rank} differ after step {step}"
        tolerance = TOLERANCES.get(name.split()[-1])
        for number, (value, right) in enumerate(zip(values, exact(name), strict=True)):
            scale = np.abs(right).max()
            if tolerance is not None:
                np.testing.assert_allclose(value / scale, right / scale, atol=tolerance, err_msg=name)
            elif MIXED in name and number == 1:  # b, which the policy sends as it is
                np.testing.assert_allclose(value / scale, right / scale, atol=1e-5, err_msg=name)


# Drift


def drifting(rank: int, size: int, store: str) -> dict[str, str]:
    """Let rank 1 change a parameter on its own; return what each helper says of it."""
    os.environ["COVEY_CHECK_EVERY"] = "2" if rank else "1"  # the ranks agree on the larger number
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size)
    said = {}

    def spoil(parameter: torch.Tensor) -> None:
        if rank == 1:
            parameter.detach()[3] += 1e-6

    model = Terms()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, rescale_hook())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    said["ddp"] = ""
    for step in range(9):
        try:
            ddp(wanted(step, rank)).backward()
        except MismatchError as error:
            said["ddp"] = f"{step}: {error}"
            break
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            spoil(model.a)
    model = Terms()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, rescale_hook())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with ddp.join():  # ranks that ran out of batches hold old parameters, which is no drift
        for step in range(2 + 3 * rank):
            ddp(wanted(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
    model = Terms()
    local, check = LocalSGD(model, every=1), DriftCheck()
    for _ in range(5):
        local.step()  # averages, so that nothing differs
        check.look("parameters", [model.a], None)
    check.finish("parameters")
    spoil(model.a)
    check.look("parameters", [model.a], None)
    check.look("parameters", [model.a], None)
    with pytest.raises(MismatchError) as found:
        check.finish("parameters")
    said["direct"] = str(found.value)
    return said


def test_a_rank_whose_parameters_drift_is_named_on_all_ranks() -> None:
    results = run_torch_ranks(SIZE, drifting)
    for said in results:
        assert said == results[0]
        for story in said.values():
            assert "differ between ranks" in story
            assert "ranks 0, 2 have digest" in story
            assert "rank 1 has digest" in story
    assert results[0]["ddp"].startswith("6: ")  # compared at 4, known at 6


def test_digests_see_single_bits_and_travel_as_small_numbers() -> None:
    seen = set()
    for seed in range(50):
        model = Terms()
        with torch.no_grad():
            for parameter, x in zip(model.parameters(), wanted(seed // 10, 0), strict=True):
                parameter.copy_(x)
            if seed % 10:
                flat = model.c if seed % 2 else model.d.view(-1)
                place = random.Random(seed).randrange(flat.numel())
                flat[place] = torch.nextafter(flat[place], torch.tensor(9e9))
        value = digest(model.parameters())
        assert from_figures(to_figures(value)) == value
        assert max(to_figures(value)) <= 16
        seen.add(value)
    assert len(seen) == 50
    assert digest([torch.tensor([1, 2, 3], dtype=torch.uint8), torch.zeros(0)]) != digest([torch.zeros(0)])
    assert from_figures([0.0] * len(to_figures(bytes(6)))) == b""
    compare({0: b"a", 1: b"a", 2: b""}, "nothing")
    with pytest.raises(MismatchError, match=r"x differ .*ranks 0, 2 have digest 61; rank 1 has digest 62"):
        compare({0: b"a", 1: b"b", 2: b"a"}, "x")


def test_a_state_without_compression_is_not_loaded_with_it() -> None:
    assert run_torch_ranks(1, saved_otherwise) == ["the state was saved by a LocalSGD without compress="]


def saved_otherwise(rank: int, size: int, store: str) -> str:
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size)
    local = LocalSGD(Terms(), every=2, compress="int8")
    with pytest.raises(ConfigError) as found:
        local.load_state_dict(LocalSGD(Terms(), every=2).state_dict())
    state = local.state_dict()
    other = LocalSGD(Terms(), every=2, compress="int8")
    other.load_state_dict(state)
    assert other.state_dict()["anchors"].keys() == {"a", "b", "c", "d"}
    return str(found.value).split(";")[0]
