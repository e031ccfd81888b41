"""Newcomers get the state of an elastic training while the others train, and train with the same bits afterwards."""

from __future__ import annotations

import logging
import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.support.in_turn import in_turn
from tests.support.waiting import DEADLINE
from tests.torch.party import Party, await_newcomer

import covey.torch.training.shadowing as shadowing
from covey.base.errors import ConfigError, RemoteProtocolError
from covey.proto.shadowing import AdmissionOrder, ShadowAdmission, ShadowPhase, ShadowReport
from covey.testing.threads import run_threads
from covey.torch.training.elastic import Elastic
from covey.torch.training.sampler import ElasticSampler

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from covey.runtime.group.group import Group

SAMPLES, BATCH = 60, 12
INPUTS = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
TARGETS = (INPUTS @ torch.arange(-4.0, 4.0))[:, None]


class Training:
    """The loop of one process, which ends so many steps after all newcomers have the state."""

    def __init__(self, slot: int, tell: Callable[..., None], **options: Any) -> None:
        torch.manual_seed(slot)
        self.tell, self.slot = tell, slot
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.999)
        self.elastic = Elastic(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, batch=BATCH, epochs=1 << 30,
            sampler=ElasticSampler(SAMPLES, seed=3), timeout=DEADLINE,
        )  # fmt: skip
        self.elastic.shadow_newcomers(**options)
        self.shares: list[int] = []
        """Of the last generation: how many samples this rank was given in each step."""
        self.phases: list[int] = []
        """Of the last generation: how far this rank was after each step in which it did not have the state."""
        self.said: list[str] = []
        logging.getLogger("covey").addFilter(self.hear)

    def run(self, size: int, after_step: Callable[[], None] = lambda: None, further: int = 6) -> Any:
        """Train until a generation of so many ranks has made some steps in which all of them train."""
        elastic, together, generation = self.elastic, 0, -1
        for indices in elastic:
            if elastic.generation != generation:
                generation, self.shares, self.phases = elastic.generation, [], []
            self.one_step(indices)
            after_step()
            is_whole = elastic.generation > 0 and len(elastic.group.contributors) == size
            together = together + 1 if is_whole and elastic._newcomers is None else 0
            if together == further:
                break
        return self.state(), self.shares, self.phases

    def one_step(self, indices: list[int]) -> None:
        self.shares.append(len(indices))
        (self.model(INPUTS[indices]) - TARGETS[indices]).square().mean().backward()
        self.elastic.sync()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.elastic.step()
        if (newcomers := self.elastic._newcomers) is not None and newcomers._follower is not None:
            self.phases.append(int(newcomers._follower.phase))

    def hear(self, record: logging.LogRecord) -> bool:
        self.said.append(record.getMessage())
        return True

    @property
    def phase(self) -> ShadowPhase | None:
        """How far this rank is if it does not have the state."""
        return ShadowPhase(self.phases[-1]) if self.phases and self.elastic._newcomers is not None else None

    def state(self) -> dict[str, Any]:
        moments = self.optimizer.state_dict()["state"]
        tensors = {**self.model.state_dict()}
        tensors |= {f"{place}.{name}": value for place, state in moments.items() for name, value in state.items()}
        return {
            "tensors": {name: tensor.double().numpy().copy() for name, tensor in tensors.items()},
            "rate": self.scheduler.get_last_lr(),
            "position": self.elastic.state_dict(),
        }


def assert_equal(states: list[dict[str, Any]]) -> None:
    for state in states[1:]:
        assert state["rate"] == states[0]["rate"]
        assert state["position"] == states[0]["position"]
        for name, tensor in states[0]["tensors"].items():
            np.testing.assert_array_equal(state["tensors"][name], tensor, err_msg=name)


def patch(owner: object, name: str, function: Callable[..., Any]) -> None:
    """Replace a function in this process, which ends with the test."""
    setattr(owner, name, function)


def delay_snapshot(elastic: Elastic, steps: int) -> None:
    """Let no snapshot of this rank be complete before so many steps of the generation."""
    has_come = shadowing._Snapshot.has_come

    def has_come_late(stream: shadowing._Snapshot) -> bool:
        return elastic._steps >= steps and has_come(stream)

    patch(shadowing._Snapshot, "has_come", has_come_late)


def delay_replay(elastic: Elastic, steps: int) -> None:
    """Let this rank take none of the steps that it kept before so many steps of the generation."""
    replay = shadowing.NewcomerSupport._replay_one

    def replay_late(newcomers: shadowing.NewcomerSupport, follower: Any) -> bool:
        return elastic._steps >= steps and replay(newcomers, follower)

    patch(shadowing.NewcomerSupport, "_replay_one", replay_late)


def keep(size: int, elastic: Elastic) -> None:
    """Wait for a newcomer if ranks were lost."""
    if len(elastic.group.contributors) < size:
        await_newcomer(elastic)


# A rank is killed, and comes back while the others train


def follow(folder: str, slot: int, tell: Callable[..., None]) -> Any:
    os.environ["COVEY_HOME"] = folder
    shadowing.SNAPSHOT_MESSAGE_BYTES = 256  # type: ignore[misc]
    shadowing.COMPARED_BYTES = 2048  # type: ignore[misc]
    training = Training(slot, tell)
    elastic, saved = training.elastic, list[tuple[int, int, bool]]()
    elastic.keep_checkpoints(every=2)
    assert elastic._saves is not None
    save = elastic._saves.save

    def note_save(group: Group, step: int) -> None:
        saved.append((elastic.generation, step, elastic._newcomers is None))
        save(group, step)

    patch(elastic._saves, "save", note_save)
    has_come = shadowing._Snapshot.has_come
    patch(shadowing._Snapshot, "has_come", lambda stream: elastic.generation > 1 and has_come(stream))

    def after_step() -> None:
        if elastic.generation == 0 and elastic.samples >= 3 * BATCH and slot >= 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if elastic.generation == 0:
            keep(3, elastic)
        if elastic.generation == 1 and elastic._steps == 3:
            tell("followed")

    return (*training.run(4, after_step), [each for each in saved if each[0] == 2])


def test_newcomers_follow_as_shadows_and_train_with_the_same_bits_as_the_others(tmp_path: Path) -> None:
    with Party(4, partial(follow, str(tmp_path))) as party:
        for slot in range(4):
            party.start(slot)
        party.await_gone(2, 3)
        party.start(2, restart=1)
        party.await_heard("followed", 2)
        party.start(3, restart=1)  # a generation ends in which rank 2 was a shadow
        returned = party.await_all()
    assert_equal([state for state, *_ in returned.values()])
    for slot in (2, 3):
        _, shares, phases, _ = returned[slot]
        entered = next(step for step, share in enumerate(shares) if share)
        assert entered >= 2, "it gets no share before its state was compared"
        assert all(shares[entered:])
        assert phases[-1] == ShadowPhase.READY
    for slot in range(2):
        assert all(returned[slot][1]), "the others got shares in all steps"
    saves = [saved for *_, saved in returned.values()]
    assert saves[0], "a checkpoint was saved when all had the state"
    assert all(each == saves[0] for each in saves)
    assert all(all_have_state for _, _, all_have_state in saves[0])


# Newcomers are killed, in each phase


def die_in_phases(slot: int, tell: Callable[..., None]) -> Any:
    restart = int(os.environ["COVEY_RESTART"])
    training = Training(slot, tell)
    elastic, dying = (
        training.elastic,
        {1: ShadowPhase.RECEIVES, 2: ShadowPhase.REPLAYS, 3: ShadowPhase.READY}.get(restart),
    )
    if dying in (ShadowPhase.RECEIVES, ShadowPhase.REPLAYS):
        delay_snapshot(elastic, 4)
    if dying is ShadowPhase.REPLAYS:
        delay_replay(elastic, 1 << 30)

    def after_step() -> None:
        if slot == 2 and (elastic.generation == 0 or (dying is not None and training.phase is dying)):
            os.kill(os.getpid(), signal.SIGKILL)
        keep(3, elastic)

    return (*training.run(3, after_step), elastic.generation)


def test_a_newcomer_that_is_killed_in_any_phase_leaves_the_others_training() -> None:
    with Party(3, die_in_phases) as party:
        for slot in range(3):
            party.start(slot)
        for restart in range(1, 5):
            party.await_gone(2)
            party.start(2, restart=restart)
        returned = party.await_all()
    assert_equal([state for state, *_ in returned.values()])
    for slot in range(2):
        assert all(returned[slot][1]), "the others got shares in all steps"
    assert {generation for *_, generation in returned.values()} == {4}


# Those that have the state are killed, one after the other


def die_as_holder(slot: int, tell: Callable[..., None]) -> Any:
    training = Training(slot, tell)
    elastic, alone = training.elastic, list[Any]()
    if os.environ["COVEY_RESTART"] != "0":
        delay_snapshot(elastic, 6)
        delay_replay(elastic, 9)

    def after_step() -> None:
        if elastic.generation == 0:
            if slot == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            keep(3, elastic)
        elif slot == 1 and elastic._steps == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        elif slot == 0 and elastic._steps == 9:
            assert elastic._newcomers is not None
            assert elastic._newcomers._admission.donors == (0,), "another snapshot was made without the lost donor"
            tell("state", training.state())
            os.kill(os.getpid(), signal.SIGKILL)
        elif slot == 2:
            alone.append(training.phase)

    for indices in elastic:
        if alone and elastic._newcomers is None:
            return training.state(), training.said
        training.one_step(indices)
        after_step()
    raise AssertionError("the loop ended")


def test_if_donors_are_killed_others_give_a_newer_snapshot_and_a_newcomer_that_is_alone_has_the_last_state() -> None:
    with Party(3, die_as_holder) as party:
        for slot in range(3):
            party.start(slot)
        party.await_gone(2)
        party.start(2, restart=1)
        last = party.await_heard("state", 0)
        state, said = party.await_all()[2]
    assert state["position"]["samples"] == last["position"]["samples"]
    assert_equal([{**each, "position": None} for each in (last, state)])
    assert any("the newcomers continue with what they have" in line for line in said)


# The only rank that has the state is asked to leave


def leave_as_holder(slot: int, tell: Callable[..., None]) -> Any:
    training = Training(slot, tell)
    elastic, followed = training.elastic, list[int]()
    training.model.register_buffer("seen", torch.tensor(float(slot)))
    delay_snapshot(elastic, 1 << 30)  # also as the generation ends, a part of the state is missing

    def after_step() -> None:
        if elastic.generation == 0:
            if slot == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            keep(2, elastic)
        elif slot == 0 and elastic._steps == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    for indices in elastic:
        if elastic.generation == 2:
            return training.state(), float(training.model.seen), followed
        training.one_step(indices)
        training.model.seen += 1 - slot
        after_step()
        followed += training.phases[-1:]
    return training.state(), float(training.model.seen), training.said


def test_if_all_ranks_that_have_the_state_are_asked_to_leave_they_give_it_to_the_newcomers_before() -> None:
    with Party(2, leave_as_holder) as party:
        for slot in range(2):
            party.start(slot)
        party.await_gone(1)
        party.start(1, restart=1)
        returned = party.await_all()
    (left, seen, said), (state, buffer, followed) = returned[0], returned[1]
    assert left["position"]["samples"] > 3 * BATCH
    for each in (left, state):
        del each["position"]["sampler"]  # the next generation has given out a share
    assert_equal([left, state])
    assert buffer == seen
    assert set(followed) == {ShadowPhase.RECEIVES}
    assert any("the ranks that have it leave" in line for line in said)


# A generation ends while this rank enters it


def test_what_is_made_of_a_generation_that_ends_while_this_rank_enters_it_is_let_go() -> None:
    training = Training(0, lambda *_: None)
    elastic, entered = training.elastic, list[Any]()

    def enter(group: Group) -> None:
        Elastic._enter(elastic, group)
        assert elastic._made is not None
        entered.append(elastic._made)
        vars(elastic._made)["close"] = lambda: entered.append("closed")
        raise ConfigError("the state of this rank cannot be sent")

    vars(elastic)["_enter"] = enter
    with pytest.raises(ConfigError, match="cannot be sent"):
        next(iter(elastic))
    assert entered[1:] == ["closed"]


# What a newcomer keeps reaches the bound; then its state differs


def hit_bounds(slot: int, tell: Callable[..., None]) -> Any:
    restart = int(os.environ["COVEY_RESTART"])
    training = Training(slot, tell, most_bytes=3 * 401 * 4)
    elastic = training.elastic
    if restart == 1:
        delay_snapshot(elastic, 1 << 30)
    if restart == 2:
        delay_snapshot(elastic, 6)  # the bound is hit once
        step = training.optimizer.step

        def step_oddly() -> None:
            step()
            if elastic._newcomers is not None:
                with torch.no_grad():
                    training.model[0].weight[3, 4] += 1e-7

        patch(training.optimizer, "step", step_oddly)

    def after_step() -> None:
        has_entered = restart == 1 and elastic._newcomers is None
        if slot == 2 and (elastic.generation == 0 or has_entered):
            os.kill(os.getpid(), signal.SIGKILL)
        keep(3, elastic)

    return (*training.run(3, after_step), [line for line in training.said if "all ranks wait" in line])


def test_all_wait_and_a_line_says_why_if_the_bound_is_hit_twice_or_the_state_differs() -> None:
    with Party(3, hit_bounds) as party:
        for slot in range(3):
            party.start(slot)
        for restart in (1, 2):
            party.await_gone(2)
            party.start(2, restart=restart)
        returned = party.await_all()
    assert_equal([state for state, *_ in returned.values()])
    said = returned[0][-1]
    assert len(said) == 2, said
    assert "rank 2 could not take the state in the background: twice" in said[0]
    assert "the state of rank 2 differs from that of rank 0" in said[1]


def test_calls_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be above 0"):
        Training(0, lambda *_: None, most_bytes=0)


def test_a_donor_that_cannot_give_its_part_says_so_and_all_ranks_wait_after_the_second_time() -> None:
    def body(group: Group) -> bool:
        parts = {0: [shadowing._PlacedTensor("model.weight", torch.float32, (3,), 0)]}
        stream = shadowing._Snapshot(group, parts, [1])
        stream.give({"model.bias": torch.ones(3)})
        stream.settle()
        failed = stream.has_failed
        group.barrier()
        stream.close()
        return failed

    assert run_threads(2, body) == [True, False]
    admission = ShadowAdmission([0, 1], [2])
    failed = {0: ShadowReport(ShadowPhase.HOLDS), 1: ShadowReport(ShadowPhase.FULL)}
    told = {**failed, 2: ShadowReport(ShadowPhase.RECEIVES)}
    assert admission.settle(told) is AdmissionOrder.SNAPSHOT
    assert admission.settle(told) is AdmissionOrder.WAIT
    assert "a part of the state did not come" in admission.reason
    admission = ShadowAdmission([0, 1], [2])
    assert admission.settle({**failed, 2: ShadowReport(ShadowPhase.REPLAYS)}) is AdmissionOrder.TRAIN


@in_turn(table=[[["a", "nn", [2]]], [["a", "float32", [-2]]], [["a", "float32", "b"]], [["a", 3, [2]]], [1], 5])
def test_a_table_of_tensors_that_makes_no_sense_is_refused(table: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="makes no sense"):
        shadowing._parts_of(table, [0, 1])


def test_of_a_large_state_only_the_compared_piece_leaves_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadowing, "COMPARED_BYTES", 100)
    model, copied = torch.nn.Linear(30, 2), list[int]()
    to_host = torch.Tensor.cpu

    def count(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor.nbytes)
        return to_host(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", count)

    def body(group: Group) -> list[tuple[int, int]]:
        parts = {"elastic": ElasticSampler(3), "state": torch.nn.BatchNorm1d(2)}
        made = shadowing.NewcomerSupport(group, model, parts, lambda: None, 1, ShadowAdmission([0], [1]))
        found = [made._digest(piece) for piece in range(3)]
        with torch.no_grad():
            model.weight[1, 20] += 1  # byte 8 (the bias) + 4 * 50 of the model, in the piece after the first two
        return [*found, *(made._digest(piece) for piece in range(3))]

    (found,) = run_threads(1, body)
    assert [pieces for pieces, _ in found] == [3] * 6
    assert [before == after for before, after in zip(found[:3], found[3:], strict=True)] == [True, True, False]
    assert sum(copied) <= 2 * (model.weight.nbytes + model.bias.nbytes + 3 * 100)


def test_a_kept_gradient_of_a_sparse_table_counts_with_its_rows() -> None:
    rows = torch.sparse_coo_tensor(torch.tensor([[1, 5]]), torch.ones(2, 4), (100, 4), check_invariants=True)
    assert shadowing._bytes_of(rows) == 2 * 8 + 2 * 4 * 4
    assert shadowing._bytes_of(torch.ones(100, 4)) == 1600
