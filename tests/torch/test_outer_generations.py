"""DiLoCo and LocalSGD while ranks are killed and cut off in the middle of a period, and come back."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.waiting import DEADLINE
from tests.torch.party import Party

import covey
import covey.testing
from covey.base.errors import ConfigError
from covey.runtime.group.internals import engine_of
from covey.torch.training.diloco import DiLoCo
from covey.torch.training.local_sgd import LocalSGD

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.group.group import Group

EVERY, ROUNDS = 6, 12


class Rounds:
    """How many outer steps the run has taken: newcomers get it."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def model_of(slot: int) -> torch.nn.Module:
    torch.manual_seed(slot)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 7), torch.nn.Linear(7, 7))
    model[3].requires_grad_(False)
    return model


def train(model: torch.nn.Module, inner: torch.optim.Optimizer, slot: int, step: int) -> None:
    data = torch.randn(6, 20, generator=torch.Generator().manual_seed(1000 * slot + step))
    inner.zero_grad()
    (model(data) - slot).square().mean().backward()
    inner.step()


def digest(tensors: Any) -> str:
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


def outer_state(diloco: DiLoCo) -> str:
    momenta = [state["momentum_buffer"] for state in diloco.outer.state_dict()["state"].values()]
    return digest([*diloco._steps_of.anchors.values(), *momenta])


def await_newcomer(group: Group) -> None:
    until = time.monotonic() + DEADLINE
    while not engine_of(group).knows_change:
        assert time.monotonic() < until
        time.sleep(0.002)


def interrupt(slot: int, group: Group, count: int, met: set[str], tell: Callable[..., None]) -> None:
    """Be killed or stopped after an outer step and before the next; or wait until the lost rank wants to come back."""
    if group.generation == 0 and count == 3:
        if slot == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    elif group.generation == 0 and len(group.contributors) == 2:
        await_newcomer(group)
    if group.generation == 1 and count >= 6:
        if slot == 2 and "stopped" not in met:
            met.add("stopped")
            os.kill(os.getpid(), signal.SIGSTOP)
        if len(group.contributors) == 2:
            tell("torn")
            await_newcomer(group)


def survive(slot: int, tell: Callable[..., None]) -> Any:
    model, rounds, met = model_of(slot), Rounds(), set[str]()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    diloco = DiLoCo(model, inner, every=EVERY, fragments=2, overlap=True, compress="int8", generations=True)
    with pytest.raises(ConfigError, match="call enter"):
        diloco.finish()
    step, taken = 0, []
    for group in covey.generations(timeout=DEADLINE):
        with contextlib.suppress(covey.GroupChangedError):
            diloco.enter(group, {"rounds": rounds})
            tell("entered", (group.generation, rounds.count, outer_state(diloco), len(inner.state) > 0))
            while not diloco.change_pending and rounds.count < ROUNDS:
                step += 1
                train(model, inner, slot, step)
                if diloco.step(float(slot + step % 3)):
                    rounds.count += 1
                    taken.append((rounds.count, group.generation, outer_state(diloco)))
                elif diloco._in_period in (2, 5):
                    interrupt(slot, group, rounds.count, met, tell)
            if rounds.count >= ROUNDS:
                diloco.finish()
                return taken, digest(model.parameters()), group.generation, list(group.contributors)
    return None


def test_the_outer_state_is_the_same_bits_on_all_ranks_though_ranks_are_killed_and_cut_off_and_come_back() -> None:
    with Party(3, survive) as party:
        pids = [party.start(slot) for slot in range(3)]
        party.await_heard("gone", 1)
        party.start(1, restart=1)
        party.await_heard("torn")
        os.kill(pids[2], signal.SIGCONT)
        returned = party.await_all()
        entered = [(slot, *value) for slot, kind, value in party.heard if kind == "entered"]
    by_round: dict[int, set[str]] = {}
    for taken, *_ in returned.values():
        for count, _, state in taken:
            by_round.setdefault(count, set()).add(state)
    assert by_round.keys() == set(range(1, ROUNDS + 1))
    assert all(len(states) == 1 for states in by_round.values()), by_round
    assert len({states.copy().pop() for states in by_round.values()}) == ROUNDS
    assert len({parameters for _, parameters, *_ in returned.values()}) == 1
    assert [(generation, there) for *_, generation, there in returned.values()] == [(2, [0, 1, 2])] * 3
    for generation in (1, 2):
        came = {(count, state) for _, entry, count, state, _ in entered if entry == generation}
        assert len(came) == 1, entered  # the outer state survives, and newcomers have it
        ((count, state),) = came
        assert by_round[count] == {state}
    assert all(
        has_state for _, generation, _, _, has_state in entered if generation
    )  # that of the inner optimizer, too


def average(slot: int, tell: Callable[..., None]) -> Any:
    found = {}
    for generation_codec in (None, "int8"):
        model, rounds = model_of(slot), Rounds()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        local = LocalSGD(model, every=4, compress=generation_codec, generations=True)
        found[generation_codec] = model, inner, local, rounds
    step, taken = 0, []
    for group in covey.generations(timeout=DEADLINE):
        with contextlib.suppress(covey.GroupChangedError):
            for _, _, local, rounds in found.values():
                local.enter(group, {"rounds": rounds})
            while not any(local.change_pending for _, _, local, _ in found.values()) and rounds.count < 6:
                step += 1
                for model, inner, local, rounds in found.values():
                    train(model, inner, slot, step)
                    if local.step():
                        rounds.count += 1
                        taken.append((local._is_compressed, rounds.count, digest(model.parameters())))
                if step % 4 == 2:
                    interrupt(slot, group, rounds.count if group.generation == 0 else 0, set(), tell)
            if rounds.count >= 6:
                return taken, group.generation
    return None


def test_local_sgd_averages_over_the_members_that_are_left_and_gives_newcomers_the_average() -> None:
    with Party(3, average) as party:
        for slot in range(3):
            party.start(slot)
        party.await_heard("gone", 1)
        party.start(1, restart=1)
        returned = party.await_all()
    by_round: dict[tuple[bool, int], set[str]] = {}
    for taken, generation in returned.values():
        assert generation == 1
        for is_compressed, count, parameters in taken:
            by_round.setdefault((is_compressed, count), set()).add(parameters)
    assert len(by_round) == 12
    assert all(len(states) == 1 for states in by_round.values()), by_round


def test_what_is_trained_for_the_first_time_is_averaged_exactly_also_if_changes_are_compressed() -> None:
    def body(group: Group) -> list[float]:
        model = torch.nn.Linear(3, 1)
        local = LocalSGD(model, every=1, compress="int4", generations=True)
        local.enter(group)
        values = torch.arange(40.0) ** 2 + group.rank
        model.added = torch.nn.Parameter(values.clone())
        assert local.step()
        change = model.added.detach() - values
        return [float(change.min()), float(change.max())]

    assert covey.testing.run_threads(2, body) == [[0.5, 0.5], [-0.5, -0.5]]


@pytest.mark.parametrize("compress", [None, "fp16"])
def test_ranks_that_enter_a_generation_between_two_averages_keep_what_they_have_changed(compress: str | None) -> None:
    def body(group: Group) -> tuple[list[float], list[float]]:
        torch.manual_seed(group.rank)
        model = torch.nn.Linear(3, 1, bias=False)
        local = LocalSGD(model, every=2, compress=compress, generations=True)
        local.enter(group)
        start = model.weight.detach().clone()
        for step in range(2):
            with torch.no_grad():
                model.weight += group.rank + 1.0
            if step == 0:
                local.step()
                local.enter(group)
        assert local.step()
        return start.flatten().tolist(), model.weight.flatten().tolist()

    (start, first), (other, second) = covey.testing.run_threads(2, body)
    assert start == other
    assert first == second
    assert first == pytest.approx([value + 3.0 for value in start], abs=0.01)


def test_own_pace_is_for_generations() -> None:
    model = model_of(0)
    with pytest.raises(ConfigError, match="own_pace=True needs generations=True"):
        DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), every=4, own_pace=True)


def test_a_slow_rank_at_its_own_pace_takes_fewer_steps_and_its_changes_count_by_samples() -> None:
    steps = [0, 0]

    def body(group: Group) -> tuple[str, float]:
        model = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        diloco = DiLoCo(model, inner, outer, every=8, generations=True, own_pace=True)
        diloco.enter(group)
        landed = 0
        while landed < 6:
            time.sleep(0.04 if group.rank else 0.002)  # the machine
            with torch.no_grad():
                model.weight += torch.tensor([1.0, float(group.rank), 0.5])
            steps[group.rank] += 1
            landed += diloco.step()
        assert diloco.figures is not None
        return digest([model.weight]), float(model.weight.detach()[0, 0])

    (first, moved), (second, _) = covey.testing.run_threads(2, body)
    assert first == second
    assert steps[0] > steps[1]
    assert min(steps) < moved < max(steps)  # a mean that is closer to the rank with more steps
    assert moved > sum(steps) / 2
