"""One loop that trains on all machines of a run in the way that is best there, and changes it when the line changes.

Invariants: all ranks make the same choice after the same exchange, since it follows from numbers that all of them have.
Samples are dealt alike on all ranks, each to one rank; one counts as trained once its rank has said so in an exchange,
and those of a lost rank are dealt again.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from covey.base.errors import ConfigError, GroupChangedError
from covey.compress.feedback import ErrorFeedback
from covey.compress.policy import make_policy
from covey.plan import training
from covey.runtime.group.internals import is_newcomer, report_for_program
from covey.torch.training.averaging import RankFigures
from covey.torch.training.diloco import DiLoCo
from covey.torch.training.generation_loop import GenerationLoop
from covey.torch.training.gradient_buckets import GradientBuckets
from covey.torch.training.local_sgd import flat, parts, trained_by
from covey.torch.training.pools import Pools
from covey.torch.training.sampler import ElasticSampler, Pace, by_speed
from covey.torch.training.step_times import is_asked
from covey.torch.training.structure import (
    from_plain,
    hand_over,
    make_dense,
    put_together,
    share_buffers,
    take_apart,
    to_plain,
)
from covey.torch.training.table_rows import tables_of
from covey.torch.training.ways import agree, choose, measure, own_pace, possible_ways, predicted, tell

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from covey.plan.training import TrainingWay
    from covey.runtime.group.group import Group
    from covey.torch.training.ways import MachinesAndLine

OPENING_STEPS: Final = 4
"""Steps that each rank takes alone at first, so that all know how fast they are."""
DEALT_AHEAD: Final = 3.0
"""A rank is dealt samples for so many exchanges: one is under way, one is being filled."""
MEASURE_AFTER: Final = (5.0, 60.0)
"""The ranks measure the line again after the first of these times, then after twice as long, up to the second."""
FIRST_CODEC: Final = "int8"
FIRST_WAY: Final = training.TrainingWay("diloco", FIRST_CODEC, 64, 0.0, 0.0, 1.0)
"""The way before anything is measured."""
EXACT_WAY: Final = training.TrainingWay("ddp", "", 1, 0.0, 0.0, 1.0)


class TrainTogether(GenerationLoop[Any]):
    """Train a model on all machines of a run, in the way that is fastest there.

        together = covey.torch.train_together(model, optimizer, loader, epochs=3)
        for inputs, targets in together:
            loss_fn(model(inputs), targets).backward()
            together.step()

    The batch size of `loader` is that of all ranks together, so the program is the one of a single machine, and gives
    what that would give: with `exact=True` the same numbers (every gradient is the mean over the whole batch), else a
    model that is about as good at equal samples.

    The ranks measure how fast they are and what the line sends, and take the most exact of the ways that are about as
    fast as the fastest: DDP (every gradient in every step), DDP with a codec and feedback, or DiLoCo, where each
    machine trains at its own pace on batches of its part, with a period that the line allows. They measure again after
    five seconds, and then less and less often, up to once a minute; all change to another way at the same step.

    Ranks may be lost, leave, join and come back, as with `Elastic`: `options` go to `covey.generations`. Newcomers get
    parameters, buffers, states of `optimizer` and `scheduler`, the position in the data, and `extra`: named objects
    with `state_dict` that are equal on all ranks. Each sample is trained on once an epoch, but for those of a rank that
    is lost before it has sent what it learned: they are dealt again. `scheduler` is stepped once for each batch of all.

    Parameters that the optimizer does not train are sent to newcomers only; a tied weight is sent once. Evaluate and
    save inside `with together.outer_parameters():`. Gradients that are clipped before `step()` are those of one rank.

    Raises:
        ConfigError: the loader's data set has no length, it has its own sampler, or the optimizer trains parameters
            that are not the model's, or sharded ones.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: DataLoader[Any],
        *,
        epochs: int = 1,
        exact: bool = False,
        scheduler: Any = None,
        seed: int = 0,
        extra: Mapping[str, Any] | None = None,
        run: str | None = None,
        **options: Any,
    ) -> None:
        self._batch, shuffle = _of_loader(loader)
        sampler = ElasticSampler(len(cast("Any", loader.dataset)), shuffle=shuffle, seed=seed)
        of_diloco = dict.fromkeys(("optimizer", "diloco", "outer"))  # which passes them on
        shared = {"together": _SharedPosition(self), "scheduler": scheduler, **of_diloco}
        super().__init__(sampler, epochs, shared, extra, run=run, **options)
        self._model, self._optimizer, self._scheduler, self._loader = model, optimizer, scheduler, loader
        self._is_exact = exact
        self._parameters = trained_by(optimizer, model)
        self._nbytes = 4 * sum(parameter.numel() for parameter in self._parameters.values())
        fragments = min(training.FRAGMENTS, len(self._parameters))
        self._diloco = DiLoCo(
            model, optimizer, every=FIRST_WAY.every, fragments=fragments, overlap=True, compress=FIRST_CODEC,
            generations=True, own_pace=True,
        )  # fmt: skip
        self._fragments = fragments
        self._feedback = ErrorFeedback()
        self._sums: GradientBuckets | None = None
        self._way: TrainingWay | None = None
        """None before the ranks have measured."""
        self._opening = 0
        """Steps of the opening of this generation that this rank has taken."""
        self._look_after, self._looks_in = MEASURE_AFTER[0], 0
        """Seconds until the next measurement, and exchanges until then."""
        self._pools = Pools(self._sampler, 0, 0)
        self._now: list[int] | None = None
        self._given_at = 0.0
        self._pace, self._steps = Pace(), 0
        self._credit = 0.0
        """Steps of the scheduler that are due."""
        self._outer_state: dict[str, Any] | None = None
        """That of a checkpoint, until the loop begins."""

    @property
    def way(self) -> str:
        """How the ranks train together now, in words."""
        if self._group is not None and self._group.size == 1:
            return "one machine alone"
        return "measuring" if self._way is None else self._way.text

    @contextlib.contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Let the model have what all ranks agree on inside a with statement: evaluate and save that."""
        with self._diloco.outer_parameters() if self._is_outer else contextlib.nullcontext():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training, and the outer optimizer's state and period, for a checkpoint.

        Samples that were dealt and are not trained on as of the last exchange are dealt again. Save the model with it,
        inside `outer_parameters()`.
        """
        return {**self._shared_state(), "diloco": self._diloco.outer_state() if self._has_outer_state else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. Call it before the loop, at least on rank 0, whose state all ranks get.

        Load the model's state before the loop, too.
        """
        self._load_shared_state(state)
        self._outer_state = state["diloco"]

    @property
    def _has_outer_state(self) -> bool:
        return self._group is not None and self._is_outer

    def _shared_state(self) -> dict[str, Any]:
        """Return what newcomers get besides what DiLoCo gives them."""
        place = self._place()
        place["sampler"]["owed"] = self._pools.untold + place["sampler"]["owed"]
        way = None if self._way is None else list(self._way[:3])
        return {**place, "steps": self._steps, "credit": self._credit, "way": way}

    def _load_shared_state(self, state: dict[str, Any]) -> None:
        self._go_to(state)
        self._steps, self._credit = state["steps"], state["credit"]
        if state["way"] is None:
            self._way = None
        else:
            kind, codec, every = state["way"]
            self._way = training.TrainingWay(kind, codec, every, 0.0, 0.0, 1.0)

    # A step

    def step(self) -> None:
        """Take a step with the gradients of the last batch, in the way that is used now, and clear them."""
        if self._now is None:
            raise ConfigError("there is no batch to step for: call step() once for each batch that the loop gives out")
        own, self._now = len(self._now), None
        self._pace.measure(own, time.perf_counter() - self._given_at)
        try:
            if self._is_outer:
                self._optimizer.step()
                self._optimizer.zero_grad()
                if self._diloco.step(float(own)):
                    self._after_outer_step()
            else:
                self._take_common_step(own)
        except GroupChangedError:
            self._is_outside = True  # the other ranks continue; the loop joins again
            self._optimizer.zero_grad()  # these gradients were in no step

    @property
    def _is_outer(self) -> bool:
        """Whether ranks train apart between outer steps."""
        return not self._is_exact and self.group.size > 1 and (self._way is None or self._way.kind == "diloco")

    def _take_common_step(self, own: int) -> None:
        """Average the gradients over all samples of this step, and step the optimizer."""
        self._follow_training()
        sums = self._sums
        assert sums is not None
        group, total = self.group, self._pools.total
        sums.figures.done[group.rank] = own
        sums.figures.speeds[group.rank] = self._pace.speed
        contributors = tuple(int(rank) for rank in sums.sum(own, total))
        speeds = sums.figures.speeds.tolist()
        seconds = [1 / speed if speed > 0 else 0.0 for speed in speeds]
        trained = self._settle(RankFigures(contributors, seconds, [int(done) for done in sums.figures.done.tolist()]))
        if trained:
            sums.store(total / trained)
            self._optimizer.step()
            self._schedule(1.0)
        sums.clear()
        self._optimizer.zero_grad()
        self._steps += 1
        report_for_program(group, self._steps, {"samples": float(own)})
        self._end_exchange(seconds)

    def _follow_training(self) -> None:
        """Follow a layer that was frozen, unfrozen or added, which outer steps cannot."""
        if self._sums is None or self._sums.is_up_to_date:
            return
        if not self._is_exact:
            self._diloco.check_trained()
        self._parameters = trained_by(self._optimizer, self._model)
        self._prepare_sums()

    def _after_outer_step(self) -> None:
        figures = self._diloco.figures
        assert figures is not None
        self._schedule(self._settle(figures) / self._batch)
        part = self._part
        self._end_exchange([each / part for each in figures.step_seconds])

    def _end_exchange(self, seconds: Sequence[float]) -> None:
        """Deal samples, and measure if it is time; all ranks are at the same place. `seconds` are those of a sample."""
        if not self._sampler.remaining and self._pools.is_empty:
            self._sampler.next_epoch()
        if self.done or self._is_over:
            return
        if self._looks_in == 1 and self.group.size > 1:
            self._look()
        self._looks_in = max(0, self._looks_in - 1)
        self._deal(seconds)

    @property
    def _is_over(self) -> bool:
        return self._is_outside or (self._diloco.change_pending if self._is_outer else self.group.change_pending)

    def _settle(self, figures: RankFigures) -> int:
        """Count what ranks have trained on, and take back what was dealt to lost ones; return the samples trained."""
        trained, lost = self._pools.settle(figures.contributors, figures.done)
        self._lost += lost
        self._working = figures.contributors
        self._samples += trained
        return trained

    def _count(self, told: Sequence[RankFigures]) -> None:
        for figures in told:
            self._schedule(self._settle(figures) / self._batch)

    def _schedule(self, steps: float) -> None:
        self._credit += steps
        while self._credit >= 1 - 1e-9:
            self._credit -= 1
            if self._scheduler is not None:
                self._scheduler.step()

    # Samples

    @property
    def _part(self) -> int:
        """The samples of an inner step of a rank that trains apart."""
        return max(1, self._batch // max(1, len(self._working)))

    def _deal(self, seconds: Sequence[float]) -> None:
        """Deal samples to all ranks, as all ranks do alike; `seconds` of a sample by rank, 0 of unknown ones."""
        speeds = [1 / seconds[rank] if seconds[rank] > 0 else 0.0 for rank in self._working]
        if self._is_outer:
            known = [speed for speed in speeds if speed > 0]
            pause = self._diloco.period_seconds / self._fragments
            least = OPENING_STEPS * self._part
            wanted = [
                max(least, round(DEALT_AHEAD * pause * speed) + self._part) if known else least for speed in speeds
            ]
        else:
            wanted = by_speed(self._batch, speeds)
        self._pools.deal(self._working, wanted)

    def _give_out(self, group: Group) -> Iterator[Any]:
        self._deal([0.0] * group.size)
        while not (self.done or self._is_over):
            if self._is_outer and self._way is None and self._opening == OPENING_STEPS:
                self._open()
                continue
            share = self._pools.take(self._part if self._is_outer else None)
            if not share:
                self._take_part_without_data()
                continue
            self._opening += self._way is None
            self._now, self._given_at = share, time.perf_counter()
            data = self._fetch(share)
            if self._sums is not None and not self._is_outer:
                self._sums.arm(len(share), self._pools.total)
            yield data
            if self._now is not None:
                raise ConfigError("step() was not called for the last batch; every rank must call it once for each")
        if self._is_outer and not self._is_outside and not self.done:
            self._count(self._diloco.flush())  # a rank that leaves keeps nothing to itself

    def _take_part_without_data(self) -> None:
        """Take part in the next exchange: the others still have samples."""
        if not self._is_outer:
            self._take_common_step(0)
        elif self._way is None:
            self._opening = OPENING_STEPS
        elif self._diloco.send():
            self._after_outer_step()

    def _fetch(self, indices: list[int]) -> Any:
        dataset: Any = self._loader.dataset
        fetch = getattr(dataset, "__getitems__", None)
        samples = [dataset[index] for index in indices] if fetch is None else fetch(indices)
        collate: Any = self._loader.collate_fn
        return collate(samples)

    # A generation, and the way in it

    def _enter(self, group: Group) -> None:
        was_outer = self._has_outer_state
        self._pools.take_all_back()
        self._group, self._is_outside, self._now = group, False, None
        if not was_outer and self._outer_state is not None:
            self._diloco.load_outer_state(self._outer_state)
        elif not was_outer:
            self._diloco.rebase()
        self._outer_state = None
        self._working, self._pools = tuple(range(group.size)), Pools(self._sampler, group.size, group.rank)
        self._diloco.enter(group, self._parts)
        share_buffers(group, self._model)
        self._opening, self._look_after, self._looks_in = 0, MEASURE_AFTER[0], 0
        if self._is_exact:
            self._way = EXACT_WAY
        if group.size > 1 and self._way is not None and not self._is_exact:
            self._adopt(self._way)
            self._looks_in = 1  # the machines are others now
        elif self._is_exact:
            self._looks_in = 2 * OPENING_STEPS if group.size > 1 else 0
        if not self._is_outer:  # the ranks take the same steps from here on
            hand_over(group, self._model, {"optimizer": self._optimizer}, fresh=is_newcomer(group))
        self._prepare_sums()

    def _open(self) -> None:
        """Measure for the first time. What the ranks have trained alone is part of what they send later."""
        found = self._look()
        self._deal(found.figures.step_seconds)

    def _look(self) -> MachinesAndLine:
        """Measure the ranks and the line, and use the way that is best; all ranks do it after the same exchange."""
        group = self.group
        sample_seconds = 1 / self._pace.speed if self._pace.speed else 0.0
        found, before = measure(group, sample_seconds, self._nbytes), self._way
        way = agree(group, choose(found, self._batch, self._nbytes, before, is_exact=self._is_exact))
        if group.rank == min(found.figures.contributors) and (before is None or way[:2] != before[:2]):
            tell(group, way, found, self._batch)
            if is_asked():
                ways = possible_ways(found, self._batch, self._nbytes, is_exact=self._is_exact)
                sys.stdout.write("\n".join(map(predicted, ways)) + "\n")
                sys.stdout.flush()
        if is_asked():
            sys.exit(0)
        self._change(way, found)
        pause = way.step_seconds
        if way.kind == "diloco":
            pause = self._diloco.period_seconds / self._fragments
        self._looks_in = 1 + max(1, round(self._look_after / max(pause, 1e-6)))
        self._look_after = min(2 * self._look_after, MEASURE_AFTER[1])
        return found

    def _change(self, way: TrainingWay, found: MachinesAndLine) -> None:
        was_outer, is_outer = self._is_outer, way.kind == "diloco"
        if was_outer and not is_outer:
            self._count(self._diloco.finish())
            self._share_optimizer()
        elif is_outer and not was_outer:
            self._diloco.rebase()
        if was_outer != is_outer:
            self._pools.take_all_back()
        is_new = self._way is None or way[:2] != self._way[:2]
        self._way = way
        if is_outer:
            self._adopt(way, found)
        if is_new:
            self._prepare_sums()

    def _adopt(self, way: TrainingWay, found: MachinesAndLine | None = None) -> None:
        """Let DiLoCo have the period and the codec of a way."""
        if way.kind != "diloco":
            return
        if found is None:
            self._diloco.retune(way.every, way.codec or "none")
            return
        members = own_pace(found, self._batch)
        seconds = [0.0] * self.group.size
        for rank, member in zip(found.speeds, members, strict=True):
            seconds[rank] = member.step_seconds
        slowest = max(member.step_seconds for member in members)
        pace = sum(1 / member.step_seconds for member in members) / len(members)
        every = max(self._fragments, round(way.every * slowest * pace))
        figures = RankFigures(found.figures.contributors, seconds, [])
        self._diloco.retune(every, way.codec or "none", figures)

    def _prepare_sums(self) -> None:
        self._close_sums()
        if self._is_outer:
            return
        codec = "" if self._way is None else self._way.codec
        policy = make_policy(codec or "none", smallest=0)
        self._sums = GradientBuckets(
            self.group, self._parameters, self._optimizer, policy, self._feedback, is_overlapped=True,
            tables=tables_of(self._model, self._parameters),
        )  # fmt: skip

    def _let_go(self) -> None:
        self._close_sums()

    def _finish(self) -> None:
        if self._is_outer:
            self._diloco.finish()
        share_buffers(self.group, self._model)

    def _close_sums(self) -> None:
        if self._sums is not None:
            self._sums.close()
            self._sums = None

    def _share_optimizer(self) -> None:
        """Make the state of the optimizer the mean over the ranks: from now on all take the same steps.

        What is no tensor is that of the lowest rank. Ranks may have states of other parameters, or none before their
        first step. Then all get that of one rank.
        """
        make_dense({"optimizer": self._optimizer})
        group, state = self.group, self._optimizer.state_dict()
        structure, tensors = take_apart({"state": state["state"]})
        form = [[name, *tensor.shape] for name, tensor in sorted(tensors.items())]
        told: list[Any] = group.all_gather_object([form, to_plain(structure)])
        there = group.contributors
        if any(told[rank][0] != told[there[0]][0] for rank in there):
            donor = max(there, key=lambda rank: (len(told[rank][0]), -rank))
            hand_over(group, self._model, {"optimizer": self._optimizer}, fresh=group.rank != donor)
            return
        if ordered := [tensors[name] for name in sorted(tensors) if tensors[name].is_floating_point()]:
            row = flat([tensor.cpu() for tensor in ordered])
            group.all_reduce(row)
            row /= len(group.contributors)
            with torch.no_grad():
                for tensor, mean in zip(ordered, parts(row, ordered), strict=True):
                    tensor.copy_(mean)
        if told[group.rank][1] != (first := told[there[0]][1]):  # some optimizers count steps in no tensor
            self._optimizer.load_state_dict({**state, **put_together(from_plain(first, structure), tensors)})


class _SharedPosition:
    """The position of a training, for newcomers."""

    def __init__(self, together: TrainTogether) -> None:
        self._together = together

    def state_dict(self) -> dict[str, Any]:
        return self._together._shared_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._together._load_shared_state(state)


train_together = TrainTogether
"""What programs call: it begins a training, which is a `TrainTogether`."""


def _of_loader(loader: Any) -> tuple[int, bool]:
    """Return the batch size of a loader, and whether it shuffles."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ConfigError("train_together needs a DataLoader of a data set with a length and numbered samples")
    if not len(cast("Any", loader.dataset)):
        raise ConfigError("the data set of the loader is empty")
    if loader.batch_size is None or not isinstance(loader.sampler, RandomSampler | SequentialSampler):
        raise ConfigError(
            "train_together deals samples itself: give the DataLoader batch_size= and shuffle=, and no sampler"
        )
    return loader.batch_size, isinstance(loader.sampler, RandomSampler)
