"""DiLoCo over gloo against the same mathematics written out in one process."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.support.torch_ranks import run_torch_ranks
from tests.torch.gloo_ranks import be_a_rank, run_ranks

from covey.base.errors import ConfigError
from covey.compress.quantisers import Int8
from covey.runtime.counters import process
from covey.torch.training.diloco import DiLoCo, _cuts

if TYPE_CHECKING:
    from collections.abc import Callable

EVERY, STEPS, RESUME = 6, 20, 10
FRAGMENTS = {
    1: [["0.weight", "0.bias", "2.weight", "2.bias"]],
    2: [["0.weight"], ["0.bias", "2.weight", "2.bias"]],
    3: [["0.weight"], ["0.bias"], ["2.weight", "2.bias"]],
}
CASES: list[dict[str, Any]] = [
    {},
    {"fragments": 2},
    {"fragments": 3, "overlap": True},
    {"overlap": True},
    {"fragments": 2, "compress": "int8"},
    {"fragments": 2, "overlap": True, "compress": "int8"},
]


def model_of(rank: int) -> torch.nn.Module:
    torch.manual_seed(rank)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 7)).double()


def inner_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: torch.nn.Module, inner: torch.optim.Optimizer, rank: int, step: int) -> None:
    """One inner step on data that no other rank and no other step has."""
    data = torch.randn(6, 20, generator=torch.Generator().manual_seed(1000 * rank + step), dtype=torch.float64)
    inner.zero_grad()
    (model(data) - rank).square().mean().backward()
    inner.step()


def numbers(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def body(rank: int) -> dict[Any, Any]:
    groups = {2: dist.new_group([0, 1]), 3: dist.group.WORLD}
    results: dict[Any, Any] = {}
    for size, group in groups.items():
        if rank >= size:
            continue
        for number, case in enumerate(CASES):
            for resumes in (False, True):
                model = model_of(rank)
                inner = inner_of(model)
                diloco = DiLoCo(model, inner, every=EVERY, process_group=group, **case)
                taken = []
                for step in range(1, STEPS + 1):
                    train(model, inner, rank, step)
                    gradients = [parameter.grad for parameter in model.parameters()]
                    taken.append(diloco.step())
                    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
                    if resumes and step == RESUME:
                        saved = through_a_file([model.state_dict(), inner.state_dict(), diloco.state_dict()])
                        diloco.finish()
                        model = model_of(5)
                        inner = inner_of(model)
                        diloco = DiLoCo(model, inner, every=EVERY, process_group=group, **case)
                        for part, state in zip((model, inner, diloco), saved, strict=True):
                            part.load_state_dict(state)
                        with pytest.raises(ConfigError, match=r"in 4 fragments, here are 4 in \d; they must be"):
                            diloco.load_state_dict(saved[2] | {"fragments": [["a"], ["b"], ["c"], ["d"]]})
                unfinished = numbers(model)
                assert diloco.finish() == bool(case.get("overlap"))
                results[size, number, resumes] = taken, unfinished, numbers(model)
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks("tests.torch.test_diloco", 3, tmp_path_factory.mktemp("diloco"))


def round_to_int8(row: np.ndarray) -> np.ndarray:
    """What int8 makes of a row."""
    codec, rounded = Int8(), np.empty_like(row)
    wire = np.empty(codec.wire_bytes(row.size), np.uint8)
    codec.encode(row, wire)
    codec.decode(wire, rounded)
    return rounded


class Reference:
    """All ranks of a DiLoCo in one process."""

    def __init__(self, size: int, *, fragments: int = 1, overlap: bool = False, compress: str | None = None) -> None:
        self.overlap, self.compress, self.fragments = overlap, compress, FRAGMENTS[fragments]
        self.models = [model_of(0) for _ in range(size)]
        self.inners = [inner_of(model) for model in self.models]
        self.anchor = numbers(self.models[0])
        self.momentum: dict[str, Any] = {}
        self.remainder: dict[Any, Any] = {}
        self.waiting: tuple[list[str], list[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None

    def run(self) -> list[bool]:
        taken = []
        for step in range(1, STEPS + 1):
            for rank, (model, inner) in enumerate(zip(self.models, self.inners, strict=True)):
                train(model, inner, rank, step)
            outer_steps = 0
            for k, names in enumerate(self.fragments):
                if step % EVERY == (k + 1) * EVERY // len(self.fragments) % EVERY:
                    outer_steps += self.outer_step()
                    self.waiting = names, [numbers(model) for model in self.models], self.mean(k, names)
                    if not self.overlap:
                        outer_steps += self.outer_step()
            taken.append(outer_steps > 0)
        return taken

    def mean(self, k: int, names: list[str]) -> dict[str, np.ndarray]:
        rows = []
        for rank, model in enumerate(self.models):
            now = numbers(model)
            row = np.concatenate([(self.anchor[name] - now[name]).ravel() for name in names])
            if self.compress:
                row = row.astype(np.float32) + self.remainder.get((rank, k), np.float32(0))
                self.remainder[rank, k] = row - round_to_int8(row)
                row = round_to_int8(row)
            rows.append(row)
        mean, start = sum(rows, np.zeros(len(rows[0]), rows[0].dtype)) / rows[0].dtype.type(len(rows)), 0
        mean = mean.astype(np.float64)
        result: dict[str, np.ndarray] = {}
        for name in names:
            shape = self.anchor[name].shape
            result[name] = mean[start : start + self.anchor[name].size].reshape(shape)
            start += self.anchor[name].size
        return result

    def outer_step(self) -> bool:
        if self.waiting is None:
            return False
        (names, then, gradient), self.waiting = self.waiting, None
        for name in names:
            self.momentum[name] = 0.9 * self.momentum.get(name, 0) + gradient[name]
            self.anchor[name] = self.anchor[name] - 0.7 * (gradient[name] + 0.9 * self.momentum[name])
            for rank, model in enumerate(self.models):
                parameter = dict(model.named_parameters())[name]
                since = parameter.detach().numpy() - then[rank][name]
                parameter.data.copy_(torch.from_numpy(self.anchor[name] + since))
        return True


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_ranks_compute_what_one_process_computes(results: list[Any], size: int, number: int) -> None:
    reference = Reference(size, **CASES[number])
    expected = reference.run()
    for finished in (False, True):
        if finished:
            reference.outer_step()
        for rank in range(size):
            taken, *models = results[rank][size, number, False]
            assert taken == expected
            for name, parameter in numbers(reference.models[rank]).items():
                np.testing.assert_allclose(models[finished][name], parameter, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_resuming_gives_the_same_numbers_to_the_last_bit(results: list[Any], size: int, number: int) -> None:
    for rank in range(size):
        (_, *straight), (_, *resumed) = (results[rank][size, number, resumes] for resumes in (False, True))
        for one, other in zip(straight, resumed, strict=True):
            assert all(np.array_equal(one[name], other[name]) for name in one)


def test_fragments_are_of_about_equal_size_and_none_is_empty() -> None:
    assert _cuts([5, 5, 5, 5], 2) == [(0, 2), (2, 4)]
    assert _cuts([100, 1, 1], 3) == [(0, 1), (1, 2), (2, 3)]
    assert _cuts([1, 1, 100], 3) == [(0, 1), (1, 2), (2, 3)]
    assert _cuts([1, 1, 1, 1, 100], 2) == [(0, 4), (4, 5)]
    assert _cuts([3], 1) == [(0, 1)]


def test_nonsense_is_refused() -> None:
    model = model_of(0)
    inner = inner_of(model)
    with pytest.raises(ConfigError, match="fragments=5, every=9, 4 parameters"):
        DiLoCo(model, inner, every=9, fragments=5)
    with pytest.raises(ConfigError, match="fragments=1, every=0"):
        DiLoCo(model, inner, every=0)
    with pytest.raises(ConfigError, match="there is no codec 'fp4'"):
        DiLoCo(model, inner, every=9, compress="fp4")
    shapes = re.escape("(of shape [30, 20], [30], [7, 30], [7])")
    with pytest.raises(ConfigError, match=f"trains 4 parameters {shapes} that are not the model's; make it with"):
        DiLoCo(model, torch.optim.SGD([*model.parameters(), *model_of(1).parameters()]), every=9)
    with pytest.raises(ConfigError, match=r"exactly the parameters .* lacks 0\.weight, 2\.bias, and has none besides"):
        DiLoCo(model, inner, torch.optim.SGD(list(model.parameters())[1:3]), every=9)
    extra = torch.nn.Parameter(torch.zeros(2, 5))
    with pytest.raises(ConfigError, match=r"lacks none, and has 1 parameter \(of shape \[2, 5\]\) besides"):
        DiLoCo(model, inner, torch.optim.SGD([*model.parameters(), extra]), every=9)


def change_what_is_trained(rank: int, size: int, store: str) -> None:
    """All ranks freeze, thaw and add parameters; each time they are told which, before anything is sent."""
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size)
    model = model_of(rank)
    model[0].weight.requires_grad_(False)
    inner = torch.optim.SGD([*model[0].parameters(), model[2].weight], lr=0.1)
    diloco = DiLoCo(model, inner, every=2)
    assert not diloco.step()
    started = numbers(model)
    changes: list[tuple[Callable[[], Any], Callable[[], Any], str]] = [
        (lambda: model[0].bias.requires_grad_(False), lambda: model[0].bias.requires_grad_(True), "0.bias was frozen"),
        (
            lambda: model[0].weight.requires_grad_(True),
            lambda: model[0].weight.requires_grad_(False),
            "0.weight was thawed or added",
        ),
        (
            lambda: (model[0].requires_grad_(True), model[2].requires_grad_(False)),
            lambda: (model[0].weight.requires_grad_(False), model[2].requires_grad_(True)),
            "2.weight was frozen, and 0.weight was thawed or added",
        ),
        (
            lambda: inner.add_param_group({"params": [model[2].bias, torch.nn.Parameter(torch.zeros(rank + 1))]}),
            inner.param_groups.pop,
            f"2.bias, 1 parameter (of shape [{rank + 1}]) that are not the model's was thawed or added",
        ),
    ]
    for change, undo, words in changes:
        change()
        for _ in range(2):
            with pytest.raises(ConfigError, match=re.escape(f"{words} since DiLoCo was made; make a new one")):
                diloco.step()
        undo()
    inner.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3), requires_grad=False)]})  # trains nothing
    with torch.no_grad():
        model[2].weight -= rank
    assert diloco.step()  # the second of two: what failed did not count
    (node,) = process.nodes
    assert node.reports.latest().step == 2, "inner steps are reported by themselves"
    # The outer step: 0.7 * (1 + 0.9) of the mean way of 0, 1 and 2, back from where all began.
    np.testing.assert_allclose(numbers(model)["2.weight"], started["2.weight"] - 1.33, rtol=1e-12)
    for name in ("0.weight", "0.bias", "2.bias"):
        np.testing.assert_array_equal(numbers(model)[name], numbers(model_of(0))[name], err_msg=name)


def test_parameters_that_are_frozen_thawed_or_added_are_named_and_what_nobody_trains_is_rank_0s() -> None:
    run_torch_ranks(3, change_what_is_trained)


if __name__ == "__main__":
    be_a_rank(body)
