"""The elastic training loop in one object: ranks may come and go, and each sample is trained on once an epoch."""

from __future__ import annotations

import contextlib
import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from covey.base.errors import ConfigError, GroupChangedError
from covey.compress.feedback import ErrorFeedback
from covey.compress.policy import make_policy
from covey.runtime.group.internals import (
    gradients_of,
    is_newcomer,
    policy_of,
    report_for_program,
    steps_between_checks,
)
from covey.runtime.joining.generations import generations
from covey.torch.training.drift import DIGEST_FIGURES, compare, digest, from_figures, to_figures
from covey.torch.training.gradient_mean import consecutive
from covey.torch.training.local_sgd import parts, trained_by, which_train
from covey.torch.training.sampler import Pace, by_speed, even
from covey.torch.training.structure import hand_over, share_buffers

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from covey.compress.policy import CompressValue
    from covey.runtime.group.group import Group
    from covey.torch.training.sampler import ElasticSampler


class Elastic:
    """Yields this rank's share of one global batch after another, while ranks come and go.

        elastic = Elastic(model=model, optimizer=optimizer, sampler=ElasticSampler(len(data)), batch=256, epochs=3)
        for indices in elastic:
            loss = loss_fn(model(data[indices]), targets[indices])  # the mean over these samples
            loss.backward()
            elastic.step()

    `batch` is the number of samples that all ranks together train on in a step, so the optimisation does not depend on
    the number of ranks; `step()` makes every gradient the mean over the batch. If a rank is lost in a step, its
    gradients are not in the result, and its samples are given out again, so that each sample is trained on once an
    epoch. Near the end of an epoch a share may be empty: that rank calls `step()`, too, and its gradients are ignored.
    A missing gradient counts as zero if another rank has one for the parameter, and stays missing if no rank has.

    The ranks are those of `covey.generations(run, **options)`, which also says what SIGTERM does. Newcomers, and a
    process that was cut off and joined again, get parameters, buffers, `optimizer`, `scheduler` (stepped after every
    step), sampler, and `extra`: named objects with `state_dict` and `load_state_dict`. All of these but the buffers
    must be equal on all ranks between steps. Buffers may differ; at the start of a generation and at the end all ranks
    get those of the lowest rank. A newcomer seeds torch's generators from the seed of the run (rank 0's
    `torch.initial_seed()`), the generation and its rank; other ranks keep theirs. So ranks draw different numbers, and
    a repeated run draws the same. If all ranks with the state are lost, the run starts again with what its processes
    hold: load a checkpoint before the loop.

    `balance` gives faster ranks larger shares; the speed is measured from when a share is given out to `step()`.

    `compress` sends gradients in fewer bytes: a codec like "int8", or a mapping of names of parameters to codecs; by
    default what the group was told to compress. What a step loses is added to the next one (`feedback`). Everything
    else that ranks exchange is exact.

    Gradients may be accumulated: call backward() several times, for losses that add up to the mean over `indices`. To
    clip gradients, call `sync()` before, which averages them; `step()` then only steps.

    Raises:
        ConfigError: the optimizer trains parameters that are not the model's, or sharded or complex ones; or an
            argument is out of range.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        sampler: ElasticSampler,
        batch: int,
        epochs: int = 1,
        scheduler: Any = None,
        run: str | None = None,
        balance: bool = False,
        compress: CompressValue = None,
        extra: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if batch < 1 or epochs < 0:
            raise ConfigError(f"batch={batch}, epochs={epochs}: batch must be at least 1, and epochs at least 0")
        own = {"elastic": self, "optimizer": optimizer, "scheduler": scheduler}
        if taken := sorted({"model", *own} & (extra or {}).keys()):
            raise ConfigError(f"extra has {', '.join(taken)}, which Elastic passes on itself; use other names")
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or isinstance(
            optimizer, torch.optim.LBFGS
        ):
            raise ConfigError(
                f"{type(optimizer).__name__} with {type(scheduler).__name__}: Elastic calls step() of both without "
                "arguments; step a scheduler that needs a loss yourself, and pass it in extra="
            )
        self._parts = {name: part for name, part in {**own, **(extra or {})}.items() if part is not None}
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._parameters, self._trains = trained_by(optimizer, model), which_train(optimizer)
        self._sampler, self._batch, self._epochs = sampler, batch, epochs
        self._run, self._options, self._is_balanced = run, options, balance
        self._seed, self._samples, self._lost = torch.initial_seed(), 0, 0
        self._pace = Pace()
        self._policy = None if compress is None else make_policy(compress, smallest=0)
        self.feedback = ErrorFeedback()
        """What compressed gradients have lost so far, by name; each rank has its own."""
        self._steps = 0
        """Steps of this generation."""
        self._reported = 0
        """Steps of the whole training, as views show them."""
        self._group: Group | None = None
        self._row: _Row
        self._working: Sequence[int] = ()
        """The ranks that get shares: those that took part in the last step. Equal on all ranks."""
        self._speeds: list[float] = []
        self._out: _Out | None = None
        self._is_outside = False

    def __iter__(self) -> Iterator[list[int]]:
        groups = cast("Generator[Group]", generations(self._run, **self._options))
        with contextlib.closing(groups):
            for group in groups:
                with contextlib.suppress(GroupChangedError):  # this process joins again with the next group
                    self._enter(group)
                    yield from self._shares(group)
                    if self.done:
                        share_buffers(group, self._model)
                        return

    # Position

    @property
    def group(self) -> Group:
        """The group of the current generation."""
        if self._group is None:
            raise ConfigError("there is no group before the loop over Elastic has started")
        return self._group

    @property
    def rank(self) -> int:
        """The rank of this process in the current generation."""
        return self.group.rank

    @property
    def size(self) -> int:
        """The number of ranks with which the current generation started."""
        return self.group.size

    @property
    def generation(self) -> int:
        return self.group.generation

    @property
    def is_first(self) -> bool:
        """Whether this is the lowest remaining rank: the one that should print and save checkpoints."""
        return self.rank == min(self._working)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch. The last `step()` of an epoch advances it."""
        return self._sampler.epoch

    @property
    def samples(self) -> int:
        """The number of samples that all ranks have trained on, over all epochs."""
        return self._samples

    @property
    def lost(self) -> int:
        """The number of samples that were given out again because their rank was lost."""
        return self._lost

    @property
    def done(self) -> bool:
        """Whether all epochs are done. False after the loop means that this process was asked to leave."""
        return self._sampler.epoch >= self._epochs

    # A step

    def sync(self) -> None:
        """Average the gradients over the samples of all ranks; the `step()` that follows does not do it again."""
        out = self._out
        if out is None:
            raise ConfigError("there is no batch to step for: call step() once for each share that the loop gives out")
        if out.is_synced:
            return
        if self._trains != (trains := which_train(self._optimizer)):  # a layer was unfrozen, or added
            self._parameters, self._trains = trained_by(self._optimizer, self._model), trains
            self._row = self._new_row()
        own = len(out.shares[self.rank])
        self._row.load(own / out.total)
        self._pace.measure(own, time.perf_counter() - out.given_at)
        if self._is_balanced:
            self._row.speeds[self.rank] = self._pace.speed
        if (every := steps_between_checks(self.group)) and self._steps % every == 0:
            self._row.digests[self.rank] = torch.tensor(to_figures(digest(self._parameters.values())))
        policy = policy_of(self.group) if self._policy is None else self._policy
        try:
            gradients_of(self.group).sum_row(self._row.memory, self._row.parts, policy, self.feedback)
        except GroupChangedError:
            out.is_synced = self._is_outside = True  # the other ranks continue; the loop joins again
            return
        self._working = self.group.contributors
        lost = [i for rank, share in enumerate(out.shares) if rank not in self._working for i in share]
        out.trained = out.total - len(lost)
        self._sampler.give_back(lost)
        self._samples, self._lost = self._samples + out.trained, self._lost + len(lost)
        if out.trained:
            self._row.store(out.total / out.trained)
        self._speeds, out.is_synced = self._row.speeds.tolist(), True
        compare(
            {rank: from_figures(self._row.digests[rank].tolist()) for rank in self._working},
            f"the parameters before step {self._steps} of generation {self.generation}",
        )
        self._steps += 1

    def step(self) -> bool:
        """Step the optimizer with the averaged gradients, and clear them; return whether it was stepped.

        It is not if the ranks that had all samples were lost, or this process was cut off from the others.
        """
        self.sync()
        out, self._out = self._out, None
        assert out is not None
        own = len(out.shares[self.rank])
        if out.trained:
            self._optimizer.step()
            if self._scheduler is not None:
                self._scheduler.step()
        self._optimizer.zero_grad()
        self._reported += 1
        report_for_program(self.group, self._reported, {"samples": float(own)})
        if not self._sampler.remaining and not self._is_outside:
            self._sampler.next_epoch()
        return out.trained > 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training, for a checkpoint with the states of model, optimizer and the rest."""
        return {
            "samples": self._samples,
            "lost": self._lost,
            "steps": self._reported,
            "seed": self._seed,
            "sampler": self._sampler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. Call it before the loop, at least on rank 0, whose state all ranks get."""
        self._samples, self._lost, self._seed = state["samples"], state["lost"], state["seed"]
        self._reported = state.get("steps", 0)
        self._sampler.load_state_dict(state["sampler"])

    # A generation

    def _enter(self, group: Group) -> None:
        self._group, self._out, self._is_outside = group, None, False
        self._working, self._speeds, self._steps = range(group.size), [], 0
        self._row = self._new_row()
        hand_over(group, self._model, self._parts)
        share_buffers(group, self._model)
        if is_newcomer(group) and (group.generation or group.rank):  # rank 0 of the first generation keeps its own seed
            words = f"{self._seed} {group.generation} {group.rank}".encode()
            torch.manual_seed(int.from_bytes(hashlib.blake2b(words, digest_size=8).digest()) >> 1)

    def _new_row(self) -> _Row:
        return _Row(self._parameters, self.size, is_balanced=self._is_balanced)

    def _shares(self, group: Group) -> Iterator[list[int]]:
        """Yield this rank's shares until the generation ends, which it does after the same step on all ranks."""
        while not (self.done or self._is_outside or group.change_pending):
            shares = self._sampler.deal(self._counts(group.size))
            if not any(shares):
                self._sampler.next_epoch()
                continue
            self._out = _Out(shares, time.perf_counter())
            yield shares[group.rank]
            if self._out is not None:
                raise ConfigError(
                    "step() was not called for the last share; every rank must call it, also for an empty share"
                )

    def _counts(self, size: int) -> list[int]:
        if self._speeds:
            counts = by_speed(self._batch, [self._speeds[rank] for rank in self._working])
        else:
            counts = even(self._batch, len(self._working))
        by_rank = dict(zip(self._working, counts, strict=True))
        return [by_rank.get(rank, 0) for rank in range(size)]


@dataclass(slots=True)
class _Out:
    """A global batch that was given out."""

    shares: list[list[int]]
    """By rank."""
    given_at: float
    is_synced: bool = False
    trained: int = 0
    """The number of its samples that are in the average."""

    @property
    def total(self) -> int:
        return sum(map(len, self.shares))


class _Row:
    """What the ranks exchange in a step: gradients, then exact figures. All have the same contributors."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], size: int, *, is_balanced: bool) -> None:
        """`size` is the number of ranks; their speeds are exchanged if shares are balanced."""
        self._parameters = parameters
        tensors = list(parameters.values())
        self.parts = consecutive([(name, tensor.shape) for name, tensor in parameters.items()])
        """Where the gradients are in `memory`; exact figures follow."""
        wide = any(tensor.dtype == torch.float64 for tensor in tensors)
        lengths = [self.parts[-1].stop, len(tensors), size if is_balanced else 0, size * DIGEST_FIGURES]
        row = torch.zeros(sum(lengths), dtype=torch.float64 if wide else torch.float32)
        gradients, self._counts, self.speeds, digests = row.split(lengths)
        self._gradients, self.digests = parts(gradients, tensors), digests.view(size, DIGEST_FIGURES)
        """`digests` are those of the parameters by rank, if they are compared in this step."""
        self.memory = row.numpy()

    def load(self, weight: float) -> None:
        """Copy the gradients in, times `weight`, this rank's part of the batch."""
        has_any = []
        for (name, parameter), room in zip(self._parameters.items(), self._gradients, strict=True):
            gradient = parameter.grad
            has_any.append(gradient is not None and weight > 0)
            if gradient is None or not weight:
                room.zero_()  # the gradient over no samples may be anything
            elif gradient.is_sparse:
                raise ConfigError(f"the gradient of {name} is sparse; Elastic averages dense ones: sparse=False")
            else:
                room.copy_(gradient.detach()).mul_(weight)
        self._counts.copy_(torch.tensor(has_any))
        self.speeds.zero_()
        self.digests.zero_()

    def store(self, factor: float) -> None:
        """Set the gradient of every parameter that has one on some rank to the sum, times `factor`."""
        for parameter, total, count in zip(
            self._parameters.values(), self._gradients, self._counts.tolist(), strict=True
        ):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(total.mul_(factor))
