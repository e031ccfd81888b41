"""Training goes on while ranks are killed, stopped, and asked to leave: every sample counts once an epoch."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.support.in_turn import in_turn
from tests.support.seeds import seeds
from tests.support.waiting import DEADLINE
from tests.torch.party import Party, await_newcomer

import covey.torch.training.elastic as elastic_module
from covey.base.errors import ConfigError, MismatchError
from covey.runtime.counters import process
from covey.torch.training.checkpoint import load, save
from covey.torch.training.elastic import Elastic
from covey.torch.training.sampler import ElasticSampler

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from covey.wire.progress import ReportRow

SAMPLES, BATCH, EPOCHS = 62, 10, 3  # the last batch of an epoch has two samples: not enough for three ranks


class Net(torch.nn.Module):
    """A model with a parameter that few samples need, one that nobody needs, and a buffer that each rank changes."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1).double()
        self.rare, self.never = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))
        self.narrow = torch.nn.Parameter(torch.ones(8, dtype=dtype))
        self.register_buffer("seen", torch.zeros(SAMPLES), persistent=False)

    def forward(self, indices: list[int]) -> torch.Tensor:
        with torch.no_grad():
            self.seen[indices] += 1
        hidden = torch.tanh(self.first(INPUTS[indices])) * self.narrow.float()
        result = self.last(hidden.double())[:, 0]
        return result + (torch.tensor(indices) == 7) * self.rare.sum() if 7 in indices else result


INPUTS = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
TARGETS = (INPUTS @ torch.tensor([1.0, -2.0, 3.0, 0.5])).double()


class Training:
    """One process's loop, which tells what it did."""

    def __init__(
        self, slot: int, tell: Callable[..., None], dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        self.tell, self.model = tell, Net(slot, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [5, 9], gamma=0.5)
        self.extra = torch.nn.Linear(2, 2)
        self.elastic = Elastic(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            sampler=ElasticSampler(SAMPLES, seed=3),
            batch=BATCH,
            epochs=EPOCHS,
            extra={"extra": self.extra},
            timeout=DEADLINE,
            **options,
        )

    def run(
        self,
        before_step: Callable[[], None] = lambda: None,
        after_step: Callable[[], None] = lambda: None,
        *,
        clips: bool = False,
        syncs_once: bool = True,
    ) -> None:
        elastic = self.elastic
        for indices in elastic:
            epoch = elastic.epoch
            for part in (indices[:2], indices[2:]):  # gradients add up
                if part:
                    error = (self.model(part) - TARGETS[part]).square().sum() / len(indices)
                    is_last = not syncs_once or part[-1] == indices[-1]
                    with contextlib.nullcontext() if is_last else elastic.no_sync():
                        error.backward()
            before_step()
            if clips:
                elastic.sync()
                assert self.model.never.grad is None
                assert self.model.first.weight.grad is not None
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
            if elastic.step():
                self.tell("trained", (epoch, indices))
            after_step()

    def parts(self) -> dict[str, Any]:
        """What a checkpoint has."""
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {**parts, "extra": self.extra, "elastic": self.elastic}

    def numbers(self) -> dict[str, np.ndarray]:
        """All that a checkpoint brings back."""
        return {name: tensor for name, tensor in self.state()["tensors"].items() if name != "seen"} | {
            "rates": np.array([group["lr"] for group in self.optimizer.param_groups])
        }

    def state(self) -> dict[str, Any]:
        """All numbers that must be equal on all ranks at the end."""
        moments = self.optimizer.state_dict()["state"]
        tensors = {**self.model.state_dict(), "seen": self.model.seen, **self.extra.state_dict()}
        tensors |= {f"{place}.{name}": value for place, state in moments.items() for name, value in state.items()}
        return {
            "tensors": {name: tensor.double().numpy().copy() for name, tensor in tensors.items()},
            "schedule": {name: value for name, value in self.scheduler.state_dict().items() if name != "_is_initial"},
            "rest": [self.elastic.samples, self.elastic.lost, self.elastic.epoch],
        }

    def loss(self) -> float:
        with torch.no_grad():
            return float((self.model(list(range(SAMPLES))) - TARGETS).square().mean())


def single(**options: Any) -> Training:
    """The same training by one process."""
    training = Training(0, lambda *_: None)
    training.run(**options)
    assert training.elastic.done
    return training


def compare_with_whole_batch(training: Training) -> None:
    """Check that averaged gradients are those of the samples of the ranks that are left."""
    elastic, model, shares = training.elastic, training.model, training.elastic._out
    assert shares is not None
    elastic.sync()
    left = [index for rank in elastic.group.contributors for part in shares.by_replica[rank] for index in part]
    assert len(elastic.group.contributors) == 2
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.grad is not None}
    wanted = torch.autograd.grad(
        (model(left) - TARGETS[left]).square().mean(), list(trained.values()), allow_unused=True
    )
    for (name, parameter), expected in zip(trained.items(), wanted, strict=True):
        if expected is not None:
            torch.testing.assert_close(parameter.grad, expected, rtol=3e-2, atol=1e-5, msg=name)


# A rank is killed, another is stopped; both come back


def survive(slot: int, tell: Callable[..., None]) -> Any:
    os.environ["COVEY_BUCKET_BYTES"] = "64"  # four buckets
    training = Training(slot, tell, torch.bfloat16)
    elastic = training.elastic
    torn: list[Any] = []

    def die(_: torch.Tensor) -> None:
        """Be killed in the middle of a backward pass, when all ranks have a sum with a part of this one."""
        first = elastic._sums._buckets[0]
        if elastic.generation == 0 and elastic.samples >= 2 * BATCH and first.finish is not None:
            assert 1 in first.finish()
            os.kill(os.getpid(), signal.SIGKILL)

    if slot == 1:
        training.model.first.weight.register_post_accumulate_grad_hook(die)

    def before_step() -> None:
        if elastic.generation == 0 and elastic.samples == 2 * BATCH:
            compare_with_whole_batch(training)
        if elastic.generation == 0 and elastic.lost:
            await_newcomer(elastic)
        if elastic.generation == 1 and elastic.epoch == 1:
            if slot == 2 and not torn:
                torn.append(elastic.lost)
                os.kill(os.getpid(), signal.SIGSTOP)  # the others go on, and it finds out when it is continued
            if torn and elastic.lost > torn[0]:
                tell("torn")
                await_newcomer(elastic)
            torn.append(elastic.lost)

    training.run(before_step)
    return elastic.done, training.state(), training.loss(), torch.rand(1).item()


def test_every_sample_counts_once_an_epoch_though_ranks_are_killed_and_cut_off_and_come_back() -> None:
    with Party(3, survive) as party:
        pids = [party.start(slot) for slot in range(3)]
        party.await_heard("gone", 1)
        party.start(1, restart=1)
        party.await_heard("torn")
        os.kill(pids[2], signal.SIGCONT)
        returned = party.await_all()
        assert party.counts(EPOCHS) == {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)}
    assert all(done for done, *_ in returned.values())
    states = [state for _, state, *_ in returned.values()]
    assert states[0]["rest"][0] == EPOCHS * SAMPLES
    assert states[0]["rest"][1] > 3
    for state in states[1:]:
        assert state["rest"] == states[0]["rest"]
        assert state["schedule"] == states[0]["schedule"]
        for name, tensor in states[0]["tensors"].items():
            np.testing.assert_array_equal(state["tensors"][name], tensor, err_msg=name)
    assert len({number for *_, number in returned.values()}) == 3  # everyone draws numbers of its own
    assert returned[0][2] == pytest.approx(single().loss(), rel=0.2)


# A rank is asked to leave


def leave(slot: int, tell: Callable[..., None]) -> Any:
    os.environ["COVEY_BUCKET_BYTES"] = "64"
    training = Training(slot, tell)
    reported: list[ReportRow] = []

    def before_step() -> None:
        if slot == 1 and training.elastic.samples == 3 * BATCH:
            os.kill(os.getpid(), signal.SIGTERM)

    def after_step() -> None:
        reported.extend(row for node in process.nodes if (row := node.reports.latest()) is not None)

    training.run(before_step, after_step, clips=True)
    return training.elastic.done, training.state(), (len(reported), [row.step for row in reported])


def test_ranks_that_share_a_batch_compute_what_one_process_computes_and_one_may_leave() -> None:
    with Party(3, leave) as party:
        for slot in range(3):
            party.start(slot)
        returned = party.await_all()
        assert party.counts(EPOCHS) == {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)}
    assert [returned[slot][0] for slot in range(3)] == [True, False, True]
    alone = single(clips=True).state()
    for slot in (0, 2):
        state = returned[slot][1]
        assert state["rest"] == alone["rest"]
        assert state["schedule"] == alone["schedule"]
        for name in alone["tensors"].keys() - {"seen"}:
            expected = alone["tensors"][name]
            np.testing.assert_allclose(state["tensors"][name], expected, rtol=1e-4, atol=1e-6, err_msg=name)
        count, steps = returned[slot][2]
        assert steps == list(range(1, count + 1)), "steps are reported by themselves"
        assert count > 3


# Gradients are compressed, and counts and speeds are not


def round_gradients(slot: int, tell: Callable[..., None]) -> Any:
    """Train with codecs that one setting chooses by name, until rank 1 changes a parameter on its own."""
    os.environ["COVEY_COMPRESS"] = "never=onebit, rare=topk(0.5), *.bias=none, *=int8, smallest=0"
    os.environ["COVEY_CHECK_EVERY"] = "1"
    os.environ["COVEY_BUCKET_BYTES"] = "64"
    training = Training(slot, tell, balance=True)
    elastic, bits, losses = training.elastic, [], []

    def after_step() -> None:
        bits.append([parameter.detach().numpy().tobytes() for parameter in training.model.parameters()])
        if elastic.samples >= 2 * SAMPLES:
            losses.append(training.loss())
            if len(losses) == 1 and slot == 1:
                with torch.no_grad():
                    training.model.rare[1] += 1e-6

    error = ""
    try:
        training.run(after_step=after_step, syncs_once=False)  # gradients that were sent are changed
    except MismatchError as found:
        error = str(found)
    names = set(elastic.feedback.names())
    return bits, losses, error, names, elastic.rank


def test_counts_and_speeds_are_exact_whatever_compresses_gradients_and_a_rank_that_drifts_is_named() -> None:
    with Party(3, round_gradients) as party:
        for slot in range(3):
            party.start(slot)
        returned = party.await_all()
    drifted = returned[1][4]
    others = ", ".join(str(rank) for rank in range(3) if rank != drifted)
    for bits, losses, error, names, _ in returned.values():
        assert len(losses) == 1, "the difference was found in the next step"
        for step, (mine, first) in enumerate(zip(bits, returned[0][0], strict=True)):
            assert step == len(bits) - 1 or mine == first, f"ranks differ after step {step}"
        assert f"ranks {others} have digest" in error
        assert f"rank {drifted} has digest" in error
        assert "rare" in names
        assert "first.weight" in names
        assert "first.bias" not in names
    alone: list[float] = []
    training = Training(0, lambda *_: None)
    training.run(after_step=lambda: alone.append(training.loss()) if training.elastic.samples >= 2 * SAMPLES else None)
    assert returned[0][1][0] == pytest.approx(alone[0], rel=0.2)


# All were lost, and one of those who begin anew has a checkpoint


def resume(folder: str, slot: int, tell: Callable[..., None]) -> Any:
    training = Training(slot, tell)
    elastic = training.elastic
    if slot == 0:
        assert load(training.parts(), folder) == 3 * BATCH
    began: list[Any] = []

    def before_step() -> None:
        began[:] = began or [elastic.samples, training.numbers()]
        tell("first", (elastic.lost > 0, elastic.rank, elastic.is_first))
        if slot == 0 and elastic.samples == SAMPLES + 2 * BATCH:
            os.kill(os.getpid(), signal.SIGKILL)

    training.run(before_step)
    return began, training.state()


def test_a_checkpoint_on_rank_0_is_enough_and_when_that_rank_is_lost_the_next_is_the_first(tmp_path: Path) -> None:
    told: list[list[int]] = []
    training = Training(5, lambda _, value: told.append(value[1]))
    training.optimizer.param_groups[0]["lr"] = 0.003  # comes with the checkpoint

    class EnoughError(Exception):
        pass

    def enough() -> None:
        if training.elastic.samples == 3 * BATCH and training.elastic.is_first:
            save(training.parts(), tmp_path, step=training.elastic.samples)
            raise EnoughError

    with pytest.raises(EnoughError):
        training.run(after_step=enough)
    with Party(3, partial(resume, str(tmp_path))) as party:
        for slot in range(3):
            party.start(slot)
        returned = party.await_all()
        rest = Counter(range(SAMPLES)) - Counter(index for share in told for index in share)
        assert party.counts(EPOCHS) == {0: rest, 1: Counter(range(SAMPLES)), 2: Counter(range(SAMPLES))}
        firsts = {value for _, kind, value in party.heard if kind == "first"}
    assert firsts == {(False, 0, True), (False, 1, False), (False, 2, False), (True, 1, True), (True, 2, False)}
    assert sorted(returned) == [1, 2]
    for (samples, numbers), state in returned.values():
        assert samples == 3 * BATCH
        for name, expected in training.numbers().items():
            np.testing.assert_array_equal(numbers[name], expected, err_msg=name)
        assert state["rest"][:2] == [EPOCHS * SAMPLES, 3]  # its share of ten, among three
    one, other = (state["tensors"] for _, state in returned.values())
    assert all(np.array_equal(one[name], other[name]) for name in one)


# Random numbers


def draw(own: int, slot: int, _tell: Callable[..., None]) -> Any:
    random.seed(slot)
    np.random.seed(slot)
    torch.manual_seed(11 if slot == 0 else own)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    elastic = Elastic(model=model, optimizer=optimizer, sampler=ElasticSampler(4), batch=4)
    drawn = []
    for indices in elastic:
        drawn += [torch.rand(3).tolist(), random.random(), np.random.random()]
        model(torch.ones(len(indices), 1)).sum().backward()
        elastic.step()
    return drawn


def test_the_same_history_draws_the_same_numbers_of_torch_and_others_are_left_alone() -> None:
    found = []
    for own in (1, 2):
        with Party(3, partial(draw, own)) as party:
            for slot in range(3):
                party.start(slot)
            found.append(party.await_all())
    assert found[0] == found[1]
    for slot, (_, *others) in found[0].items():
        assert others == [random.Random(slot).random(), np.random.RandomState(slot).random()]
    torch.manual_seed(11)
    torch.nn.Linear(1, 1)
    assert found[0][0][0] == torch.rand(3).tolist()  # who was there first keeps its own
    assert len({tuple(drawn[0]) for drawn in found[0].values()}) == 3


# A newcomer comes right after a checkpoint


def save_often(folder: str, slot: int, tell: Callable[..., None]) -> Any:
    os.environ["COVEY_HOME"] = folder
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = Elastic(model=model, optimizer=optimizer, sampler=ElasticSampler(24), batch=4, epochs=2, timeout=DEADLINE)
    elastic.keep_checkpoints(every=1)
    for indices in elastic:
        if elastic.generation == 0 and slot == 1 and elastic.samples == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        if elastic.generation == 0 and elastic.lost:
            await_newcomer(elastic)
        model(torch.full((len(indices), 1), slot + 1.0)).mean().backward()
        elastic.step()
    return elastic.done, elastic.generation, [parameter.item() for parameter in model.parameters()]


def test_a_newcomer_saves_when_the_others_do_also_if_it_comes_right_after_a_checkpoint(tmp_path: Path) -> None:
    with Party(2, partial(save_often, str(tmp_path))) as party:
        for slot in range(2):
            party.start(slot)
        party.await_heard("gone", 1)
        party.start(1, restart=1)
        returned = party.await_all()
    assert returned[0] == returned[1]
    assert returned[0][:2] == (True, 1)


# One is slow, and both thaw a layer


def hurry(slot: int, tell: Callable[..., None]) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)).requires_grad_(False)
    model[0].requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = ElasticSampler(20 * 12)
    elastic = Elastic(model=model, optimizer=optimizer, sampler=sampler, batch=20, balance=True, micro_batch=2)
    trained: list[list[int]] = [[]]
    now = 0.0
    vars(elastic_module)["time"] = SimpleNamespace(perf_counter=lambda: now)  # in this process, which ends with it
    for indices in elastic:
        model[1].requires_grad_(len(trained) > 6)
        model(torch.full((len(indices), 1), slot + 1.0)).mean().backward()
        is_ill = slot == 1 and len(trained) == 9
        now += (0.08 if is_ill else 0.005 if slot else 0.02) * len(indices)
        trained[-1] += indices
        if elastic.step():
            trained.append([])
    return trained[:-1], [parameter.item() for parameter in model.parameters()]


def test_each_rank_trains_at_its_own_pace_and_leaves_what_it_cannot_do_in_time_and_a_thawed_layer_is_averaged() -> None:
    with Party(2, hurry) as party:
        for slot in range(2):
            party.start(slot)
        returned = party.await_all()
    (slow, mine), (fast, theirs) = returned[0], returned[1]
    counts = [(len(one), len(other)) for one, other in zip(slow, fast, strict=True)]
    assert counts[0] == (10, 10)
    assert counts[2:8] == [(4, 16)] * 6  # four times slower: a quarter of the micro-batches
    assert counts[8] == (4, 2), "one that became slower left its rest after a quarter more than its time"
    assert sorted(index for shares in (slow, fast) for share in shares for index in share) == list(range(240))
    assert mine == theirs


# Alone


def test_one_process_alone_trains_as_a_plain_loop_does_and_resumes_from_a_state() -> None:
    expected = Net(0)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    sampler = ElasticSampler(SAMPLES, drop_last=True)
    for _ in range(2):
        while indices := sampler.take(7):
            (expected(indices) - TARGETS[indices]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sampler.next_epoch()

    def elastic_of(seed: int) -> tuple[Net, Elastic]:
        model = Net(seed)
        own = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = ElasticSampler(SAMPLES, drop_last=True)
        return model, Elastic(model=model, optimizer=own, sampler=sampler, batch=7, epochs=2)

    model, elastic = elastic_of(0)
    for indices in elastic:
        (model(indices) - TARGETS[indices]).square().mean().backward()
        assert elastic.step()
        assert elastic.is_first
        if elastic.samples == 35:
            break
    other, resumed = elastic_of(1)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(elastic.state_dict())
    for indices in resumed:
        (other(indices) - TARGETS[indices]).square().mean().backward()
        resumed.step()
    assert resumed.done
    assert resumed.samples == 2 * (SAMPLES - SAMPLES % 7)
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(parameter, dict(expected.named_parameters())[name], rtol=0, atol=0)


def test_calls_that_cannot_work_are_refused() -> None:
    model = Net(0)
    optimizer = torch.optim.SGD(model.parameters())
    sampler = ElasticSampler(SAMPLES)
    with pytest.raises(ConfigError, match="batch=0: batch must be at least 1"):
        Elastic(model=model, optimizer=optimizer, sampler=sampler, batch=0)
    with pytest.raises(
        ConfigError, match=r"trains 7 parameters \(of shape \[3\], .*, \.\.\.\) that are not the model's"
    ):
        Elastic(model=torch.nn.Linear(1, 1), optimizer=optimizer, sampler=sampler, batch=4)
    with pytest.raises(ConfigError, match="extra has model, optimizer"):
        Elastic(model=model, optimizer=optimizer, sampler=sampler, batch=4, extra={"optimizer": 1, "model": 2})
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ConfigError, match="step a scheduler that needs a loss yourself"):
        Elastic(model=model, optimizer=optimizer, scheduler=plateau, sampler=sampler, batch=4)
    with pytest.raises(ConfigError, match="LBFGS with NoneType: Elastic calls"):
        Elastic(model=model, optimizer=torch.optim.LBFGS(model.parameters()), sampler=sampler, batch=4)
    spiral = torch.nn.Linear(1, 1, dtype=torch.complex64)
    with pytest.raises(ConfigError, match="weight is complex"):
        Elastic(model=spiral, optimizer=torch.optim.SGD(spiral.parameters()), sampler=sampler, batch=4)
    elastic = Elastic(model=model, optimizer=optimizer, sampler=sampler, batch=4)
    with pytest.raises(ConfigError, match="no group before the loop"):
        _ = elastic.rank
    with pytest.raises(ConfigError, match="no batch to step for"):
        elastic.step()
    with pytest.raises(ConfigError, match=r"step\(\) was not called"):
        for _ in elastic:
            pass
    table = torch.nn.Parameter(torch.ones(SAMPLES, 2))
    holder = torch.nn.ParameterList([table])
    elastic = Elastic(model=holder, optimizer=torch.optim.SparseAdam(holder.parameters()), sampler=sampler, batch=4)
    for indices in elastic:
        torch.nn.functional.embedding(torch.tensor(indices), table, sparse=True).sum().backward()
        with pytest.raises(ConfigError, match="gradient of 0 is sparse"):
            elastic.step()
        break


# Ranks are killed at moments that nothing in the training knows of


def train_slowly(slot: int, tell: Callable[..., None]) -> Any:
    training = Training(slot, tell)
    training.run(before_step=lambda: time.sleep(0.002))
    return training.elastic.done, training.state()


@pytest.mark.thorough
@in_turn(seed=seeds(3))
def test_ranks_that_are_killed_at_any_moment_leave_the_others_with_equal_numbers_and_each_sample_once(
    seed: int,
) -> None:
    rng = random.Random(seed)
    with Party(4, train_slowly) as party:
        pids = dict(enumerate(map(party.start, range(4))))
        victims = rng.sample(range(4), 2)
        for number, victim in enumerate(victims):
            for _ in range(rng.randrange(4, 12)):
                party.await_heard("trained")
            time.sleep(rng.uniform(0, 0.004))  # no moment in particular
            os.kill(pids[victim], signal.SIGKILL)
            party.await_heard("gone", victim)
            if number == 0 and rng.random() < 0.7:
                party.start(victim, restart=1)
        returned = party.await_all()
        counts = party.counts(EPOCHS)
    states = [state for done, state in returned.values() if done]
    assert len(states) >= 2
    assert states[0]["rest"][0] == EPOCHS * SAMPLES
    for state in states[1:]:
        assert state["rest"] == states[0]["rest"]
        assert state["schedule"] == states[0]["schedule"]
        for name, tensor in states[0]["tensors"].items():
            assert np.isfinite(tensor).all()
            np.testing.assert_array_equal(state["tensors"][name], tensor, err_msg=name)
    told = sum((counts[epoch] for epoch in range(EPOCHS)), Counter[int]())
    assert all(most == 1 for epoch in range(EPOCHS) for most in counts[epoch].values()), "a sample counted twice"
    missing = EPOCHS * SAMPLES - told.total()
    assert missing <= len(victims) * BATCH, "a rank may be killed after its step and before it tells"
