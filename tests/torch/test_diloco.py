"""DiLoCo over gloo against the same mathematics written out in one process."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.support.sets import pairs
from tests.support.torch_ranks import run_torch_ranks
from tests.torch.gloo_ranks import be_a_rank, run_ranks

from covey.base.errors import ConfigError
from covey.compress.quantisers import Int8
from covey.runtime.counters import process
from covey.torch.training.diloco import DiLoCo
from covey.torch.training.outer import STIFF_GAIN, cuts, outer_rule

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
    {"overlap": True, "delay": 5, "weighted": True},
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


def samples_of(rank: int, step: int) -> float:
    """How many samples a step of a rank counts as; a rank may have none."""
    return float((rank * 7 + step * 3) % 5)


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
        for number, full in enumerate(CASES):
            case = {key: value for key, value in full.items() if key != "weighted"}
            for resumes in (False, True):
                model = model_of(rank)
                inner = inner_of(model)
                diloco = DiLoCo(model, inner, every=EVERY, process_group=group, **case)
                taken = []
                for step in range(1, STEPS + 1):
                    train(model, inner, rank, step)
                    gradients = [parameter.grad for parameter in model.parameters()]
                    taken.append(diloco.step(samples_of(rank, step) if full.get("weighted") else None))
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
                with diloco.outer_parameters():
                    outer = numbers(model)
                assert all(np.array_equal(unfinished[name], x) for name, x in numbers(model).items())
                diloco.finish()
                results[size, number, resumes] = taken, unfinished, outer, numbers(model)
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

    def __init__(
        self,
        size: int,
        *,
        fragments: int = 1,
        overlap: bool = False,
        compress: str | None = None,
        delay: int = 1,
        weighted: bool = False,
    ) -> None:
        self.compress, self.fragments, self.weighted = compress, FRAGMENTS[fragments], weighted
        self.delay = delay if overlap else 0
        self.samples = [np.zeros(size) for _ in self.fragments]
        self.models = [model_of(0) for _ in range(size)]
        self.inners = [inner_of(model) for model in self.models]
        self.anchor = numbers(self.models[0])
        self.momentum: dict[str, Any] = {}
        self.remainder: dict[Any, Any] = {}
        self.due = 0
        self.waiting: tuple[list[str], list[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None

    def run(self) -> list[bool]:
        taken = []
        for step in range(1, STEPS + 1):
            for rank, (model, inner) in enumerate(zip(self.models, self.inners, strict=True)):
                train(model, inner, rank, step)
                for samples in self.samples:
                    samples[rank] += samples_of(rank, step) if self.weighted else 1
            is_taken = self.outer_step() if step == self.due else False
            for k, names in enumerate(self.fragments):
                if step % EVERY == (k + 1) * EVERY // len(self.fragments) % EVERY:
                    is_taken |= self.outer_step()
                    self.waiting = names, [numbers(model) for model in self.models], self.mean(k, names)
                    self.due = step + self.delay
                    if not self.delay:
                        is_taken |= self.outer_step()
            taken.append(is_taken)
        return taken

    def finish(self) -> None:
        self.outer_step()
        for k, names in enumerate(self.fragments):
            mean = self.mean(k, names)
            for name in names:
                self.anchor[name] = self.anchor[name] - mean[name]
                for model in self.models:
                    dict(model.named_parameters())[name].data.copy_(torch.from_numpy(self.anchor[name]))

    def flat(self, names: list[str]) -> np.ndarray:
        return np.concatenate([self.anchor[name].ravel() for name in names])

    def mean(self, k: int, names: list[str]) -> dict[str, np.ndarray]:
        rows = []
        for rank, model in enumerate(self.models):
            now = numbers(model)
            row = self.flat(names) - np.concatenate([now[name].ravel() for name in names])
            if self.compress:
                row = row.astype(np.float32) + self.remainder.get((rank, k), np.float32(0))
                self.remainder[rank, k] = row - round_to_int8(row)
                row = round_to_int8(row)
            rows.append(row)
        weights, start = self.samples[k], 0
        self.samples[k] = np.zeros(len(rows))
        if self.weighted:
            rows = [row * weight * len(rows) / max(1, weights.sum()) for row, weight in zip(rows, weights, strict=True)]
        mean = sum(rows, np.zeros(len(rows[0]), rows[0].dtype)) / rows[0].dtype.type(len(rows))
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
        rate = {2: 0.5 * 2**0.5, 3: 0.75}[len(self.models)]
        for name in names:
            self.momentum[name] = 0.5 * self.momentum.get(name, 0) + gradient[name]
            self.anchor[name] = self.anchor[name] - rate * (gradient[name] + 0.5 * self.momentum[name])
            for rank, model in enumerate(self.models):
                parameter = dict(model.named_parameters())[name]
                since = parameter.detach().numpy() - then[rank][name]
                parameter.data.copy_(torch.from_numpy(self.anchor[name] + since))
        return True


@pytest.mark.parametrize(("number", "size"), pairs(range(len(CASES)), [2, 3]))
def test_ranks_compute_what_one_process_computes(results: list[Any], number: int, size: int) -> None:
    reference = Reference(size, **CASES[number])
    expected = reference.run()
    for finished in (False, True):
        if finished:
            reference.finish()
        for rank in range(size):
            taken, unfinished, outer, final = results[rank][size, number, False]
            assert taken == expected
            for name, parameter in numbers(reference.models[rank]).items():
                found = final if finished else unfinished
                np.testing.assert_allclose(found[name], parameter, rtol=1e-9, atol=1e-9, err_msg=name)
                if not finished:
                    np.testing.assert_allclose(outer[name], reference.anchor[name], rtol=1e-9, atol=1e-9, err_msg=name)
                assert np.array_equal(final[name], results[0][size, number, False][3][name]), "ranks end alike"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_resuming_gives_the_same_numbers_to_the_last_bit(results: list[Any], size: int, number: int) -> None:
    for rank in range(size):
        (_, *straight), (_, *resumed) = (results[rank][size, number, resumes] for resumes in (False, True))
        for one, other in zip(straight, resumed, strict=True):
            assert all(np.array_equal(one[name], other[name]) for name in one)


def test_fragments_are_of_about_equal_size_and_none_is_empty() -> None:
    assert cuts([5, 5, 5, 5], 2) == [(0, 2), (2, 4)]
    assert cuts([100, 1, 1], 3) == [(0, 1), (1, 2), (2, 3)]
    assert cuts([1, 1, 100], 3) == [(0, 1), (1, 2), (2, 3)]
    assert cuts([1, 1, 1, 1, 100], 2) == [(0, 4), (4, 5)]
    assert cuts([3], 1) == [(0, 1)]


def test_outer_steps_follow_from_the_number_of_members_and_never_diverge_where_inner_steps_settle() -> None:
    assert outer_rule(1) == (1.0, 0.0), "one member keeps its own change"
    assert [round(outer_rule(members).gain, 3) for members in (2, 3, 4, 100)] == [1.414, 1.5, 1.5, 1.5]
    for gain, diverges in ((outer_rule(100).gain, False), (STIFF_GAIN * 0.98, False), (STIFF_GAIN * 1.02, True)):
        momentum = outer_rule(100).momentum
        place, speed = 1.0, 0.0
        for _ in range(500):  # inner steps of a period have gone all the way to the minimum at 0
            speed = momentum * speed + place
            place -= gain * (1 - momentum) * (place + momentum * speed)
        assert (abs(place) > 1) == diverges, gain


def own_pace(rank: int, size: int, store: str) -> Any:
    """Rank 1 takes four inner steps while rank 0 takes eight, and its samples count as often."""
    dist.init_process_group("covey", init_method=f"file://{store}", rank=rank, world_size=size)
    model = torch.nn.Linear(4, 2)
    every = (8, 4)[rank]
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    diloco = DiLoCo(model, inner, torch.optim.SGD(model.parameters(), lr=1.0), every=every, fragments=2, overlap=True)
    start = numbers(model)
    for period, steps in enumerate((8, 8, 8, 12)):
        for _ in range(steps // (rank + 1)):
            inner.zero_grad()
            (model.weight.sum() * (rank + 1)).backward()
            inner.step()
            diloco.step(samples=8)
        if period == 1:
            with pytest.raises(ConfigError, match="every=1: a period needs a step for each of the 2 fragments"):
                diloco.every = 1
            with pytest.raises(ConfigError, match="samples must be given in every step, or in none"):
                diloco.step()
            diloco.every = every // 2 * 3
    diloco.finish()
    return start, numbers(model)


def test_ranks_of_different_speed_take_the_steps_they_can_and_count_by_their_samples() -> None:
    results = run_torch_ranks(2, own_pace)
    for start, end in results:
        # A step of rank r moves by r + 1, and rank 0 has twice the samples: a period of 8 and 4 steps moves by
        # (2 * 8 * 1 + 1 * 4 * 2) / 3 = 8, and the last one, of 12 and 6, by 12.
        np.testing.assert_allclose(start["weight"] - end["weight"], 8 + 8 + 8 + 12, rtol=1e-5)
        assert np.array_equal(end["weight"], results[0][1]["weight"])


def test_nonsense_is_refused() -> None:
    model = model_of(0)
    inner = inner_of(model)
    with pytest.raises(ConfigError, match="delay=3: it needs overlap=True, and must be from 1 to every / fragments"):
        DiLoCo(model, inner, every=9, delay=3)
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
    # The outer step: 0.75 * (1 + 0.5) of the mean way of 0, 1 and 2, back from where all began.
    np.testing.assert_allclose(numbers(model)["2.weight"], started["2.weight"] - 1.125, rtol=1e-12)
    for name in ("0.weight", "0.bias", "2.bias"):
        np.testing.assert_array_equal(numbers(model)[name], numbers(model_of(0))[name], err_msg=name)


def test_parameters_that_are_frozen_thawed_or_added_are_named_and_what_nobody_trains_is_rank_0s() -> None:
    run_torch_ranks(3, change_what_is_trained)


if __name__ == "__main__":
    be_a_rank(body)
