"""Sharded models are trained by replicas that lose ranks and get others: a step counts for whole replicas only."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.support.in_turn import in_turn
from tests.support.seeds import seeds
from tests.support.waiting import DEADLINE
from tests.torch.party import Party, await_newcomer
from torch.distributed.fsdp import fully_shard

from covey.base.errors import ConfigError, PeerLostError
from covey.proto.replica_agreement import NO_STATE, HeldShard, ReplicaLayout, form
from covey.torch.training.elastic import Elastic
from covey.torch.training.replica import ModelReplica
from covey.torch.training.sampler import ElasticSampler
from covey.torch.training.structure import local_part

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SAMPLES, BATCH, EPOCHS = 62, 10, 3  # the last batch of an epoch has two samples: none for some of four ranks

INPUTS = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS @ torch.tensor([1.0, -2.0, 3.0, 0.5])


class Net(torch.nn.Module):
    """A model whose parameters cannot be divided evenly, with a buffer that each rank changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 7), torch.nn.Linear(7, 1)
        self.register_buffer("seen", torch.zeros(SAMPLES), persistent=False)

    def forward(self, indices: list[int]) -> torch.Tensor:
        with torch.no_grad():
            self.seen[indices] += 1
        return self.last(torch.tanh(self.first(INPUTS[indices])))


class Training:
    """The loop of one process, sharded between two ranks or not."""

    def __init__(self, tell: Callable[..., None], *, is_sharded: bool = True, **options: Any) -> None:
        torch.manual_seed(5)
        self.tell, self.model = tell, Net()
        if is_sharded:
            replica = options["replica"] = ModelReplica(2)
            for module in (self.model.first, self.model):
                fully_shard(module, mesh=replica.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [5, 9], gamma=0.5)
        sampler = ElasticSampler(SAMPLES, seed=3)
        self.elastic = Elastic(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, sampler=sampler, batch=BATCH,
            epochs=EPOCHS, timeout=DEADLINE, **options,
        )  # fmt: skip

    def run(
        self,
        before_step: Callable[[], None] = lambda: None,
        after_sync: Callable[[], None] = lambda: None,
        *,
        clips: bool = False,
    ) -> None:
        shares: list[int] = []
        for indices in self.elastic:
            epoch = self.elastic.epoch
            (self.model(indices)[:, 0] - TARGETS[indices]).square().mean().backward()
            before_step()
            if clips:
                self.elastic.sync()
                after_sync()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
            shares += indices
            is_stepped = self.elastic.step()
            if self.elastic._out is None:  # it was the last micro-batch
                if is_stepped and self.is_counted():
                    self.tell("trained", (epoch, shares))
                shares = []

    def is_counted(self) -> bool:
        """Whether the gradients of this rank's replica were in the last step."""
        replicas = self.elastic._replicas
        return replicas is None or replicas.number in self.elastic._working

    def state(self) -> dict[str, Any]:
        """What this rank has of everything that must survive."""
        moments = {
            place: {name: local_part(value).numpy().copy() for name, value in each.items()}
            for place, each in self.optimizer.state_dict()["state"].items()
        }
        return {
            "parameters": [local_part(parameter.detach()).numpy().copy() for parameter in self.model.parameters()],
            "moments": moments,
            "schedule": self.scheduler.state_dict(),
            "elastic": self.elastic.state_dict(),
        }

    def continue_from(self, state: dict[str, Any]) -> None:
        """Take a state of a rank with the same shard."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()  # makes room for the moments
        self.optimizer.zero_grad()
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), state["parameters"], strict=True):
                local_part(parameter.detach()).copy_(torch.from_numpy(value))
        for place, each in self.optimizer.state_dict()["state"].items():
            for name, value in each.items():
                local_part(value).copy_(torch.from_numpy(state["moments"][place][name]))
        self.scheduler.load_state_dict(state["schedule"])
        for group in self.optimizer.param_groups:
            group["lr"] = state["schedule"]["_last_lr"][0]
        self.elastic.load_state_dict(state["elastic"])


def assert_same_bits(state: dict[str, Any], other: dict[str, Any]) -> None:
    for mine, its in zip(state["parameters"], other["parameters"], strict=True):
        np.testing.assert_array_equal(mine, its)
    assert state["moments"].keys() == other["moments"].keys()
    for place, each in state["moments"].items():
        for name, value in each.items():
            np.testing.assert_array_equal(value, other["moments"][place][name], err_msg=name)


# A replica loses a rank in the middle of a step, and then another one loses both


def survive(slot: int, tell: Callable[..., None]) -> Any:
    training = Training(tell)
    elastic, told = training.elastic, list[dict[str, Any]]()

    def die() -> None:
        if elastic.generation == 0 and elastic.samples >= 2 * BATCH:
            os.kill(os.getpid(), signal.SIGKILL)

    def before_step() -> None:
        if elastic.generation == 0 and elastic.lost:
            await_newcomer(elastic)
        if elastic.generation == 1 and not told:
            told.append(training.state() | {"elastic": elastic._before})  # this batch is trained on once more
            tell("healed", (elastic.samples, elastic.lost))

    if slot == 3:
        training.model.last.register_full_backward_hook(lambda *_: die())
    training.run(before_step)
    return elastic.done, told, training.state(), training.model.seen.numpy().copy()


def continue_undisturbed(states: list[dict[str, Any]], slot: int, tell: Callable[..., None]) -> Any:
    training = Training(tell)
    training.continue_from(states[slot % 2])
    training.run()
    return training.state()


def test_a_replica_that_lost_a_rank_in_mid_step_does_not_count_and_comes_back_with_the_state_of_the_others() -> None:
    with Party(4, survive) as party:
        for slot in range(4):
            party.start(slot)
        party.await_heard("gone", 3)
        party.start(3, restart=1)
        returned = party.await_all()
        assert party.counts(EPOCHS) == {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)}
        healed = {value for _, kind, value in party.heard if kind == "healed"}
    assert len(healed) == 1, "all ranks continue at the same sample"
    ((samples, lost),) = healed
    assert lost == BATCH // 2, "the whole share of a replica is given out again if it loses one of its ranks"
    assert samples > 2 * BATCH
    assert all(done for done, *_ in returned.values())
    for slot in (0, 1):
        assert_same_bits(returned[slot][2], returned[slot + 2][2])
        assert_same_bits(returned[slot][1][0], returned[slot + 2][1][0])
    assert returned[0][2]["elastic"]["samples"] == EPOCHS * SAMPLES
    for _, _, _, seen in returned.values():
        np.testing.assert_array_equal(seen, returned[0][3])

    with Party(4, partial(continue_undisturbed, [returned[0][1][0], returned[1][1][0]])) as party:
        for slot in range(4):
            party.start(slot)
        undisturbed = party.await_all()
    for slot in range(4):
        assert_same_bits(returned[slot][2], undisturbed[slot])


# A replica is lost as a whole, and another one loses a rank while it clips gradients that all have averaged


def clip(slot: int, tell: Callable[..., None]) -> Any:
    training = Training(tell, balance=True)
    elastic = training.elastic

    def before_step() -> None:
        if elastic.generation == 0 and slot in (2, 3) and elastic.samples == 2 * BATCH:
            os.kill(os.getpid(), signal.SIGKILL)
        if elastic.generation == 0 and elastic.lost:
            tell("lost", elastic.samples)
            await_newcomer(elastic)

    def after_sync() -> None:
        if elastic.generation and elastic.epoch == 2 and slot == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    training.run(before_step, after_sync, clips=True)
    return elastic.done, training.state()


def test_a_step_is_undone_on_ranks_whose_replica_is_lost_while_it_clips_and_they_get_the_state_of_the_others() -> None:
    with Party(4, clip) as party:
        for slot in range(4):
            party.start(slot)
        party.await_heard("lost")
        for slot in (2, 3):
            party.start(slot, restart=1)
        party.await_heard("gone", 1)
        returned = party.await_all()
    assert sorted(returned) == [0, 2, 3]
    for slot in (2, 3):
        assert returned[slot][0]
        assert returned[slot][1]["elastic"]["samples"] == EPOCHS * SAMPLES
    assert_same_bits(returned[0][1], returned[2][1])  # it had no replica any more, and got the state at the end

    alone = Training(lambda *_: None, is_sharded=False)
    alone.run(clips=True)
    mine = [np.concatenate(pair) for pair in zip(*(returned[slot][1]["parameters"] for slot in (2, 3)), strict=True)]
    for parameter, whole in zip(alone.model.parameters(), mine, strict=True):
        assert whole.shape == tuple(parameter.shape)
        assert np.isfinite(whole).all()
    assert loss_of(mine) < 1.5 * loss_of([each.detach().numpy() for each in alone.model.parameters()])


def loss_of(parameters: list[Any]) -> float:
    model = Net()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), parameters, strict=True):
            parameter.copy_(torch.from_numpy(value))
        return float((model(list(range(SAMPLES)))[:, 0] - TARGETS).square().mean())


# Nothing is lost


def train(options: dict[str, Any], slot: int, tell: Callable[..., None]) -> Any:
    training = Training(tell, **options)
    training.run(clips=True)
    return training.state()


def test_two_replicas_of_two_shards_compute_what_one_process_computes() -> None:
    with Party(4, partial(train, {"micro_batch": 2})) as party:
        for slot in range(4):
            party.start(slot)
        returned = party.await_all()
        assert party.counts(EPOCHS) == {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)}
    alone = Training(lambda *_: None, is_sharded=False)
    alone.run(clips=True)
    shards = zip(returned[0]["parameters"], returned[1]["parameters"], strict=True)
    for parameter, pair in zip(alone.model.parameters(), shards, strict=True):
        np.testing.assert_allclose(np.concatenate(pair), parameter.detach().numpy(), rtol=1e-3, atol=1e-5)
    for slot in (0, 1):
        assert_same_bits(returned[slot], returned[slot + 2])


# A rank asks to leave in the last step, and another one has no replica


def leave_last(slot: int, tell: Callable[..., None]) -> Any:
    training = Training(tell)
    elastic = training.elastic

    def before_step() -> None:
        if slot == 0 and elastic.samples == EPOCHS * SAMPLES - 2:
            os.kill(os.getpid(), signal.SIGTERM)
            await_newcomer(elastic)  # or know of another change

    training.run(before_step)
    return elastic.done, training.state()


def test_a_rank_without_a_replica_gets_the_last_state_also_if_a_change_waits_after_the_last_step() -> None:
    with Party(3, leave_last) as party:
        for slot in range(3):
            party.start(slot)
        returned = party.await_all()
    assert [returned[slot][0] for slot in range(3)] == [True] * 3
    assert_same_bits(returned[0][1], returned[2][1])


# A shard is on no rank any more


def lose(slot: int, tell: Callable[..., None]) -> str:
    training = Training(tell)

    def before_step() -> None:
        if slot in (1, 3) and training.elastic.samples == 2 * BATCH:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        training.run(before_step)
    except PeerLostError as error:
        return str(error)
    return ""


def test_ranks_say_which_shard_is_lost_if_no_whole_replica_can_be_made_of_them() -> None:
    with Party(4, lose) as party:
        for slot in range(4):
            party.start(slot)
        returned = party.await_all()
    assert sorted(returned) == [0, 2]
    for text in returned.values():
        assert "no remaining process has shard 1 of 2 of the model" in text
        assert "elastic.keep_checkpoints" in text


def return_to_checkpoint(folder: str, slot: int, tell: Callable[..., None]) -> Any:
    os.environ["COVEY_HOME"] = folder
    training = Training(tell)
    elastic = training.elastic
    elastic.keep_checkpoints(every=2)

    def before_step() -> None:
        if elastic.generation == 0 and slot in (1, 3) and elastic.samples == 5 * BATCH:
            assert elastic._saves is not None
            elastic._saves.settle()
            os.kill(os.getpid(), signal.SIGKILL)
        if elastic.generation == 1:
            tell("at", elastic.samples)

    training.run(before_step, clips=True)
    return training.state()


def test_a_run_whose_shards_are_lost_continues_from_the_last_checkpoint_once_enough_processes_are_there(
    tmp_path: Path,
) -> None:
    with Party(4, partial(return_to_checkpoint, str(tmp_path))) as party:
        for slot in range(4):
            party.start(slot)
        party.await_gone(1, 3)
        for slot in (1, 3):
            party.start(slot, restart=1)
        returned = party.await_all()
        first = next(value for _, kind, value in party.heard if kind == "at")
    assert first == 4 * BATCH, "the checkpoint of step 4 is the newest"
    with Party(4, partial(train, {})) as party:
        for slot in range(4):
            party.start(slot)
        undisturbed = party.await_all()
    for slot in range(4):
        for mine, its in zip(returned[slot]["parameters"], undisturbed[slot]["parameters"], strict=True):
            np.testing.assert_array_equal(mine, its)


def begin_anew(folder: str, slot: int, tell: Callable[..., None]) -> Any:
    os.environ["COVEY_HOME"] = folder
    torch.manual_seed(5)
    model, replica = Net(), ModelReplica(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    elastic = Elastic(model=model, optimizer=optimizer, sampler=ElasticSampler(SAMPLES), batch=BATCH, replica=replica)
    elastic.keep_checkpoints(every=3)
    assert elastic._replicas is not None
    assert elastic._saves is not None
    elastic._replicas.is_due = True  # of a step that had begun when a generation ended without this process
    saves = set()
    for indices in elastic:
        if elastic._saves._saving is not None:
            saves.add((elastic._saved_at, elastic._saves._saving))
        model(indices).square().mean().backward()
        elastic.step()
    return sorted(step for step, _ in saves)


def test_a_checkpoint_that_was_due_in_an_earlier_generation_is_not_saved_in_the_next_one(tmp_path: Path) -> None:
    with Party(1, partial(begin_anew, str(tmp_path))) as party:
        party.start(0)
        assert party.await_all()[0] == [3, 6]


# Forming replicas, and what is refused


def test_replicas_are_of_one_place_if_possible_and_the_newest_state_that_all_shards_have_counts() -> None:
    def places(*rows: tuple[int, str, int, int]) -> dict[int, HeldShard]:
        return {
            rank: HeldShard(shard, 2, host, home, version) for rank, (shard, host, home, version) in enumerate(rows)
        }

    apart = places((0, "a", 0, NO_STATE), (0, "b", 0, NO_STATE), (1, "b", 0, NO_STATE), (1, "a", 0, NO_STATE))
    assert form(apart) == ReplicaLayout(((0, 3), (1, 2)), NO_STATE, ())
    mixed = places((0, "a", 0, 7), (1, "b", 0, 7), (0, "b", 1, NO_STATE), (0, "c", 0, 6))
    assert form(mixed) == ReplicaLayout(((2, 1),), 7, ()), "of one host, though another rank has the state already"
    behind = places((0, "a", 0, 7), (1, "a", 0, 6), (0, "b", 0, 6))
    assert form(behind).version == 6, "shard 1 has no newer one"
    assert form(places((0, "a", 0, 7), (1, "a", 0, NO_STATE))) == ReplicaLayout(((0, 1),), 7, (1,))
    assert form(places((0, "a", 0, 7), (1, "a", 0, 6))).lost == (1,)
    assert form(places((0, "a", 0, 7), (0, "b", 0, 7))) == ReplicaLayout((), 7, (1,))
    with pytest.raises(ConfigError, match="no rank has shard 1 of 2: start at least 2 processes on a machine"):
        form(places((0, "a", 0, NO_STATE), (0, "b", 0, NO_STATE)))
    with pytest.raises(ConfigError, match="rank 0 has shards=2; rank 1 has shards=3"):
        form({0: HeldShard(0, 2, "a", 0, NO_STATE), 1: HeldShard(1, 3, "a", 0, NO_STATE)})


def refuse(slot: int, tell: Callable[..., None]) -> list[str]:
    said = []
    for wrong in (lambda: ModelReplica(0), lambda: ModelReplica(2, index=2)):
        with pytest.raises(ConfigError) as caught:
            wrong()
        said.append(str(caught.value))
    replica = ModelReplica(2)
    with pytest.raises(ConfigError) as caught:
        ModelReplica(2)
    said.append(str(caught.value))
    model = Net()
    fully_shard(model.first, mesh=replica.mesh)
    optimizer, sampler = torch.optim.SGD(model.parameters(), lr=0.1), ElasticSampler(SAMPLES)
    with pytest.raises(ConfigError) as caught:
        Elastic(model=model, optimizer=optimizer, sampler=sampler, batch=4, replica=replica)
    said.append(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        dist.all_reduce(torch.ones(1))
    said.append(str(caught.value))
    return said


def test_calls_that_cannot_work_are_refused() -> None:
    with Party(1, refuse) as party:
        party.start(0)
        said = party.await_all()[0]
    for text, expected in zip(
        said,
        (
            "shards=0 must be at least 1",
            "index=2 must be from 0 to 1",
            "leave out init_process_group",
            "last.weight is not sharded",
            "inside of the loop over Elastic",
        ),
        strict=True,
    ):
        assert expected in text


# Ranks are killed at moments that nothing in the training knows of


@pytest.mark.thorough
@in_turn(seed=seeds(4))
def test_ranks_that_are_killed_at_any_moment_leave_whole_replicas_with_the_same_bits(seed: int) -> None:
    rng = random.Random(seed)
    with Party(6, partial(train_slowly, rng.random() < 0.5)) as party:
        pids = dict(enumerate(map(party.start, range(6))))
        victims = rng.sample(range(6), 3)
        if len({victim % 2 for victim in victims}) == 1:
            victims[0] = next(slot for slot in range(6) if slot % 2 != victims[1] % 2)
        for number, victim in enumerate(victims):
            for _ in range(rng.randrange(6, 18)):
                party.await_heard("trained")
            time.sleep(rng.uniform(0, 0.004))  # no moment in particular
            os.kill(pids[victim], signal.SIGKILL)
            party.await_heard("gone", victim)
            if number < 2 and rng.random() < 0.7:
                party.start(victim, restart=1)
        returned = party.await_all()
        counts = party.counts(EPOCHS)
    done = {slot: state for slot, (is_done, state) in returned.items() if is_done}
    assert {slot % 2 for slot in done} == {0, 1}, f"{seed=}"
    for slot, state in done.items():
        other = done[min(each for each in done if each % 2 == slot % 2)]
        assert state["elastic"]["samples"] == other["elastic"]["samples"] == EPOCHS * SAMPLES
        assert_same_bits(state, other)
    assert all(most == 1 for epoch in range(EPOCHS) for most in counts[epoch].values()), "a sample counted twice"


def train_slowly(clips: bool, slot: int, tell: Callable[..., None]) -> Any:
    training = Training(tell)
    training.run(before_step=lambda: time.sleep(0.002), clips=clips)
    return training.elastic.done, training.state()
