"""train_together: one loop that keeps its promises in each way, changes ways, and survives losses."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.waiting import DEADLINE
from tests.torch.party import Party
from torch.utils.data import DataLoader, TensorDataset

import covey.torch.training.diloco as diloco_module
import covey.torch.training.own_pace as own_pace_module
import covey.torch.training.together as together_module
from covey.base.errors import ConfigError, GroupChangedError
from covey.plan.training import FRAGMENTS, SlowestLine, TrainingWay
from covey.runtime.counters import process
from covey.runtime.group.internals import engine_of
from covey.testing.threads import run_threads
from covey.torch.training.averaging import RankFigures
from covey.torch.training.together import TrainTogether, train_together
from covey.torch.training.ways import MachinesAndLine, agree, choose, possible_ways

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from covey import Group

SAMPLES, BATCH = 220, 12
TOGETHER: Any = together_module
DILOCO: Any = diloco_module
OWN_PACE: Any = own_pace_module
WAYS = [("diloco", "int8", 8), ("ddp", "", 1), ("diloco", "int4", 6), ("ddp", "int8", 1)]
INPUTS = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
TARGETS = torch.tanh(INPUTS @ torch.tensor([1.0, -2.0, 3.0, 0.5]))


class Net(torch.nn.Module):
    """A model with a frozen layer, a tied weight, and a parameter that is not trained by the optimizer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.frozen = torch.nn.Linear(4, 8), torch.nn.Linear(4096, 8)
        self.last, self.tied = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
        self.tied.weight = self.last.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(torch.tanh(self.last(torch.tanh(self.first(x))))).sum(1)

    def loss(self) -> float:
        with torch.no_grad():
            return float((self(INPUTS) - TARGETS).square().mean())


class Training:
    """One process's loop, which tells what it did."""

    def __init__(self, slot: int, tell: Callable[..., None], **options: Any) -> None:
        self.tell, self.model = tell, Net(slot)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        self.model.first.bias.requires_grad_(not options.pop("is_bias_frozen", False))
        data = TensorDataset(INPUTS, TARGETS, torch.arange(SAMPLES))
        self.together: TrainTogether = train_together(
            self.model, self.optimizer, DataLoader(data, batch_size=BATCH, shuffle=True), scheduler=self.scheduler,
            timeout=DEADLINE, **{"epochs": 2, **options},
        )  # fmt: skip

    def run(self, before_step: Callable[[], None] = lambda: None) -> None:
        together = self.together
        for inputs, targets, numbers in together:
            epoch = together.epoch
            (self.model(inputs) - targets).square().mean().backward()
            before_step()
            together.step()
            self.tell("trained", (epoch, numbers.tolist(), together.way))

    def result(self) -> dict[str, Any]:
        together = self.together
        return {
            "done": together.done,
            "samples": together.samples,
            "lost": together.lost,
            "rate": self.scheduler.get_last_lr(),
            "parameters": [parameter.detach().tolist() for parameter in self.model.parameters()],
            "loss": self.model.loss(),
        }


def take_a_step(training: Training) -> None:
    (training.model(INPUTS) - TARGETS).square().mean().backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


def counts(party: Party) -> Counter[tuple[int, int]]:
    return Counter((value[0], number) for _, kind, value in party.heard if kind == "trained" for number in value[1])


def exactly(slot: int, tell: Callable[..., None]) -> Any:
    training = Training(slot, tell, exact=True, is_bias_frozen=True)
    if slot == 0:
        take_a_step(training)  # as after a checkpoint that one rank has loaded
    training.run(lambda: thaw_bias(training))
    return training.result()


def thaw_bias(training: Training) -> None:
    training.model.first.bias.requires_grad_(training.together.epoch > 0)


def test_with_exact_the_numbers_are_those_of_one_machine_with_the_whole_batch_also_of_a_layer_that_is_thawed() -> None:
    with Party(2, exactly) as party:
        for slot in range(2):
            party.start(slot)
        returned = party.await_all()
    single = exactly(0, lambda *_: None)
    frozen = Net(0).first.bias.tolist()
    assert all(frozen[i] != value for i, value in enumerate(single["parameters"][1]))
    for found in returned.values():
        assert (found["samples"], found["lost"], found["rate"]) == (2 * SAMPLES, 0, single["rate"])
        for mine, wanted in zip(found["parameters"], single["parameters"], strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(wanted), rtol=1e-3, atol=1e-5)
    assert counts(party) == Counter({(epoch, n): 1 for epoch in range(2) for n in range(SAMPLES)})
    assert {value[2] for _, kind, value in party.heard if kind == "trained"} == {"DDP"}


def test_a_state_that_is_taken_within_an_epoch_knows_the_samples_that_were_dealt_and_not_trained_on() -> None:
    seen: Counter[int] = Counter()
    first = Training(0, lambda *_: None, epochs=1)
    for inputs, targets, numbers in first.together:
        (first.model(inputs) - targets).square().mean().backward()
        first.together.step()
        seen.update(numbers.tolist())
        if first.together.samples > SAMPLES // 2:
            break
    second = Training(0, lambda _, value: seen.update(value[1]), epochs=1)
    second.together.load_state_dict(first.together.state_dict())
    second.run()
    assert seen == Counter(range(SAMPLES))
    assert second.together.samples == SAMPLES


def test_gradients_of_a_step_from_which_this_process_was_cut_off_are_not_in_its_next_one() -> None:
    def cut_off(*_: Any) -> None:
        raise GroupChangedError("cut off")

    training = Training(0, lambda *_: None)
    together = training.together
    for inputs, targets, _ in together:
        (training.model(inputs) - targets).square().mean().backward()
        vars(together)["_take_common_step"] = cut_off
        together.step()
        assert together._is_outside
        assert all(parameter.grad is None for parameter in training.model.parameters())
        break


def test_ranks_whose_optimizers_have_states_of_other_parameters_get_that_of_one_rank_when_they_begin_to_share() -> None:
    def body(group: Group) -> Any:
        training = Training(group.rank, lambda *_: None)
        together = training.together
        vars(together)["_group"] = group
        if group.rank == 2:
            training.model.first.bias.grad = torch.ones(8)
            training.optimizer.step()
        elif group.rank == 1:
            take_a_step(training)
        together._share_optimizer()
        group.barrier()
        return training.optimizer.state_dict()["state"]

    first, *others = run_threads(3, body)
    assert len(first) == 3
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def test_ranks_that_begin_to_share_count_steps_alike_also_with_an_optimizer_that_counts_them_in_no_tensor() -> None:
    def body(group: Group) -> Any:
        table = torch.nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters())
        together = train_together(table, optimizer, DataLoader(TensorDataset(torch.arange(5)), batch_size=2))
        vars(together)["_group"] = group
        for _ in range(group.rank + 2):
            table(torch.arange(group.rank + 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        own = optimizer.state_dict()["state"][0]["exp_avg"].clone()
        together._share_optimizer()
        group.barrier()
        return own, optimizer.state_dict()["state"]

    made = run_threads(2, body)
    mean = (made[0][0] + made[1][0]) / 2
    for _, state in made:
        assert state[0]["step"] == 2
        torch.testing.assert_close(state[0]["exp_avg"], mean)
        torch.testing.assert_close(state, made[0][1], rtol=0, atol=0)


def test_a_layer_that_is_thawed_is_named_where_ranks_may_train_apart_later() -> None:
    training = Training(0, lambda *_: None, is_bias_frozen=True)
    for inputs, targets, _ in training.together:
        (training.model(inputs) - targets).square().mean().backward()
        training.model.first.bias.requires_grad_(True)
        with pytest.raises(ConfigError, match=r"first\.bias was thawed"):
            training.together.step()
        break


def in_turns(slot: int, tell: Callable[..., None]) -> Any:
    """Use one way after the other, as if the line changed at each measurement."""
    ways = itertools.cycle(WAYS)
    TOGETHER.choose = lambda *_, **__: TrainingWay(*next(ways), 1e-3, 1.0, 1.0)
    TOGETHER.MEASURE_AFTER = (0.01, 0.01)
    training = Training(slot, tell, epochs=6)
    training.run()
    return training.result(), process.coded()[1]


def test_all_ranks_change_their_way_at_the_same_step_and_each_sample_is_trained_on_once() -> None:
    with Party(2, in_turns) as party:
        for slot in range(2):
            party.start(slot)
        returned = party.await_all()
    assert counts(party) == Counter({(epoch, n): 1 for epoch in range(6) for n in range(SAMPLES)})
    (first, coded), (second, _) = returned.values()
    assert first == second
    assert first["done"]
    assert first["samples"] == 6 * SAMPLES
    used = {value[2] for _, kind, value in party.heard if kind == "trained"}
    assert {"measuring", "DDP", "DDP int8"} < used
    assert {way.split(" every")[0] for way in used} > {"DiLoCo int8", "DiLoCo int4"}
    assert first["loss"] < 0.5 * Net(0).loss()
    # What is not trained is never sent, and the tied weight once: 104 parameters in each exchange.
    batches = sum(kind == "trained" for _, kind, _ in party.heard)
    assert 0 < coded < 4 * 104 * (batches + 100)


def survive(slot: int, tell: Callable[..., None]) -> Any:
    kind = os.environ["TOGETHER_WAY"]
    way = TrainingWay(*WAYS[int(kind)], 1e-3, 1.0, 1.0)
    TOGETHER.choose = lambda *_, **__: way
    training = Training(slot, tell, epochs=6)
    together = training.together

    def before_step() -> None:
        group = together.group
        if group.generation == 0 and together.samples > 4 * BATCH:
            if slot == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            until = time.monotonic() + DEADLINE
            while together.lost and not engine_of(group).knows_change:
                assert time.monotonic() < until
                time.sleep(0.002)

    training.run(before_step)
    return training.result(), together.group.generation, together.group.size


@pytest.mark.parametrize("way", [0, 1])
def test_a_rank_is_killed_and_comes_back_and_no_sample_is_left_out(way: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOGETHER_WAY", str(way))
    with Party(2, survive) as party:
        for slot in range(2):
            party.start(slot)
        party.await_heard("gone", 1)
        party.start(1, restart=1)
        returned = party.await_all()
        trained = counts(party)
    results = [result for result, *_ in returned.values()]
    assert all((generation, size) == (1, 2) for _, generation, size in returned.values())
    assert results[0] == results[1]
    assert results[0]["samples"] == 6 * SAMPLES
    assert 0 < results[0]["lost"] < SAMPLES
    assert trained.keys() == {(epoch, n) for epoch in range(6) for n in range(SAMPLES)}
    again = sum(times - 1 for times in trained.values())
    assert again <= results[0]["lost"]  # only what the lost rank had been dealt
    assert results[0]["loss"] < 0.5 * Net(0).loss()


class Marked(torch.nn.Module):
    """Four parameters, one in each fragment, with an entry for each process that only its gradients change."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.zeros(3) for _ in range(FRAGMENTS)])


class CountedTime:
    """The time as training code reads it: a part of a second for each step of this process."""

    def __init__(self) -> None:
        self.now = 1.0

    def step(self) -> None:
        self.now += 2**-10

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


def with_counted_time(slot: int, tell: Callable[..., None]) -> Any:
    """Train with exact outer steps; rank 1 of three processes leaves, and the third one takes its place."""
    clock: Any = CountedTime()
    TOGETHER.time = DILOCO.time = OWN_PACE.time = clock
    TOGETHER.choose = lambda *_, **__: TrainingWay("diloco", "", 8, 1e-3, 1.0, 1.0)
    saved = os.environ.get("TOGETHER_STATE")
    model = Marked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(INPUTS[:, 0], torch.arange(SAMPLES)), batch_size=8, shuffle=True)
    together = train_together(model, optimizer, loader, epochs=2, timeout=DEADLINE, max_size=2, min_size=2)
    if saved is not None and slot == 0:
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        together.load_state_dict(state["together"])
    is_leaving = False
    for inputs, numbers in together:
        group = together.group
        tell("trained", (together.epoch, numbers.tolist(), group.generation))
        if saved is None and group.rank == 0 and group.generation == 2 and not os.path.exists("state"):
            with together.outer_parameters():
                torch.save({"model": model.state_dict(), "together": together.state_dict()}, "state")
        if saved is None and group.rank == 1 and group.generation == 1 and not is_leaving:
            is_leaving = True  # before anything is sent: its fragments follow one after the other
            os.kill(os.getpid(), signal.SIGTERM)
        place = group.rank if group.generation < 2 and saved is None else 2 * group.rank
        sum((part[place] - inputs.mean()).square() for part in model.parts).backward()
        clock.step()
        together.step()
    return together.done, together.samples, [part.tolist() for part in model.parts]


def test_a_rank_that_leaves_sends_what_it_learned_and_a_checkpoint_continues_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOGETHER_STATE", raising=False)
    with Party(3, with_counted_time) as party:
        for slot in range(3):
            party.start(slot)
        returned = party.await_all()
    assert counts(party) == Counter({(epoch, n): 1 for epoch in range(2) for n in range(SAMPLES)})
    left = [slot for slot, (is_done, *_) in returned.items() if not is_done]
    assert len(left) == 1
    trained = [value for slot, kind, value in party.heard if kind == "trained" and slot in left]
    assert {generation for *_, generation in trained} == {1}
    state = torch.load("state", weights_only=True)
    for part in state["model"].values():
        assert part[0] != 0
        assert part[1] != 0, "what the rank that left has learned of this fragment"
        assert part[2] == 0
    assert state["together"]["samples"] >= sum(len(numbers) for _, numbers, _ in trained)
    ended = next(result for slot, result in returned.items() if slot not in left)
    assert ended[:2] == (True, 2 * SAMPLES)

    monkeypatch.setenv("TOGETHER_STATE", str(tmp_path / "state"))
    with Party(2, with_counted_time) as again:
        for slot in range(2):
            again.start(slot)
        continued = again.await_all()
    assert list(continued.values()) == [ended] * 2


def test_the_choice_follows_from_the_line_the_machines_and_the_promise() -> None:
    def found(mbit: float, *seconds: float) -> MachinesAndLine:
        ranks = tuple(range(len(seconds)))
        return MachinesAndLine(RankFigures(ranks, list(seconds), [0] * len(seconds)), SlowestLine(mbit * 1e6 / 8, 2e-4))

    nbytes, batch, each = 4 * 3_200_000, 128, 0.082 / 64
    assert choose(found(100_000, each, each), batch, nbytes, None, is_exact=False).text == "DDP"
    slow = choose(found(100, each, each), batch, nbytes, None, is_exact=False)
    assert slow.kind == "diloco"
    assert choose(found(100, each, each), batch, nbytes, None, is_exact=True).text == "DDP"
    slower = choose(found(10, each, each), batch, nbytes, None, is_exact=False)
    assert (slower.kind, slower.every > slow.every) == ("diloco", True)
    lora = choose(found(10, each, each), batch, nbytes // 100, None, is_exact=False)
    assert lora.kind == "ddp" or lora.every <= slow.every
    now, changes = None, 0
    for step in range(300):  # a line that becomes slower, and whose measurements vary
        mbit = 3000 * 0.98**step * (1.03 if step % 2 else 0.97)
        way = choose(found(mbit, each, each), batch, nbytes, now, is_exact=False)
        changes += now is not None and way[:2] != now[:2]
        now = way
    assert 1 <= changes <= 6
    assert choose(found(100_000, each, each), batch, nbytes, slower, is_exact=False).kind == "ddp"
    # A machine at half speed still adds what it has.
    uneven = possible_ways(found(100, each, each, 2 * each), batch, nbytes, is_exact=False)[0]
    even = possible_ways(found(100, each, each), batch, nbytes, is_exact=False)[0]
    assert uneven.samples_per_second > 1.2 * even.samples_per_second


def test_ranks_whose_predictions_are_rounded_differently_agree_on_the_way_and_on_when_to_measure_again() -> None:
    def body(group: Group) -> TrainingWay:
        kind, every = ("ddp", 1) if group.rank else ("diloco", 8)
        return agree(group, TrainingWay(kind, "int8", every, 0.1 + 0.01 * group.rank, 1.0, 1.0))

    assert [way[:4] for way in run_threads(2, body)] == [("diloco", "int8", 8, 0.1)] * 2


def test_loaders_that_it_cannot_deal_from_are_refused() -> None:
    model = Net(0)
    optimizer = torch.optim.SGD(model.first.parameters(), lr=0.1)
    data = TensorDataset(INPUTS)
    with pytest.raises(ConfigError, match="no sampler"):
        train_together(model, optimizer, DataLoader(data, batch_size=None))
    with pytest.raises(ConfigError, match="empty"):
        train_together(model, optimizer, DataLoader(TensorDataset(INPUTS[:0]), batch_size=2))
    with pytest.raises(ConfigError, match="data set with a length"):
        train_together(model, optimizer, [1, 2])
