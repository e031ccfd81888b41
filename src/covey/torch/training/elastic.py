"""The elastic training loop in one object: ranks may come and go, and each sample is trained on once an epoch."""

from __future__ import annotations

import contextlib
import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from covey.base.errors import ConfigError, GroupChangedError
from covey.compress.feedback import ErrorFeedback
from covey.compress.policy import make_policy
from covey.runtime.group.internals import is_newcomer, report_for_program, steps_between_checks
from covey.runtime.joining.generations import generations
from covey.torch.training.drift import compare, digest, from_figures, to_figures
from covey.torch.training.gradient_buckets import GradientBuckets
from covey.torch.training.local_sgd import trained_by
from covey.torch.training.sampler import Pace, by_speed, even
from covey.torch.training.structure import hand_over, share_buffers

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from covey.compress.policy import CompressValue
    from covey.runtime.group.group import Group
    from covey.torch.training.sampler import ElasticSampler


LATE_AFTER: Final = 1.25
"""A rank leaves the rest of its share after so many times the time in which all should have theirs."""


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

    With `micro_batch`, the loop gives out a share in parts of at most so many samples; call backward() and `step()` for
    each. The optimizer is stepped after the last one, with the mean over the batch. With `balance`, each machine then
    trains at its own pace: shares are whole parts in proportion to speed, and a rank that has become slower leaves the
    rest of its share, which is given out again, so that it holds the others up by a part and a quarter of a step.

    Gradients are sent in buckets while backward() makes further ones, if the model has more than one bucket
    (`bucket_bytes`, a setting); `overlap=False` sends them in `step()`. A step still counts as a whole: if a rank is
    lost between two buckets, the others average theirs without it.

    `compress` sends gradients in fewer bytes: a codec like "int8", or a mapping of names of parameters to codecs; by
    default what the group was told to compress. What a step loses is added to the next one (`feedback`). Everything
    else that ranks exchange is exact.

    Gradients may be accumulated: call backward() several times, for losses that add up to the mean over `indices`, all
    but the last inside `no_sync()`: otherwise they are sent twice in the first step, and in `step()` from then on. To
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
        micro_batch: int | None = None,
        overlap: bool = True,
        compress: CompressValue = None,
        extra: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if batch < 1 or epochs < 0:
            raise ConfigError(f"batch={batch}, epochs={epochs}: batch must be at least 1, and epochs at least 0")
        if micro_batch is not None and not 1 <= micro_batch <= batch:
            raise ConfigError(f"micro_batch={micro_batch} must be from 1 to batch={batch}")
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
        self._parameters = trained_by(optimizer, model)
        self._sampler, self._batch, self._epochs = sampler, batch, epochs
        self._micro_batch, self._is_overlapped = micro_batch, overlap
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
        self._sums: GradientBuckets
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
                    try:
                        yield from self._shares(group)
                    finally:
                        self._sums.close()
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
        """Average the gradients over the samples of all ranks; the `step()` that follows does not do it again.

        After a micro-batch that is not the last one, it only puts the gradients aside.
        """
        out = self._out
        if out is None:
            raise ConfigError("there is no batch to step for: call step() once for each share that the loop gives out")
        if out.is_synced:
            return
        self._follow_training()
        samples = len(out.part)
        out.begun += 1
        if out.begun < len(out.parts) and not self._is_late(out):
            self._sums.hold(samples)
            out.is_held = True
            return
        figures = self._sums.figures
        trained = sum(map(len, out.parts[: out.begun]))
        self._pace.measure(trained, time.perf_counter() - out.given_at)
        figures.done[self.rank] = out.begun
        if self._is_balanced:
            figures.speeds[self.rank] = self._pace.speed
        if (every := steps_between_checks(self.group)) and self._steps % every == 0:
            figures.digests[self.rank] = torch.tensor(to_figures(digest(self._parameters.values())))
        out.is_synced = True
        try:
            self._working = self._sums.sum(samples, out.total)
        except GroupChangedError:
            self._is_outside = True  # the other ranks continue; the loop joins again
            return
        self._settle(out)
        if out.trained:
            self._sums.store(out.total / out.trained)
        self._speeds = figures.speeds.tolist() if self._is_balanced else []
        compare(
            {rank: from_figures(figures.digests[rank].tolist()) for rank in self._working},
            f"the parameters before step {self._steps} of generation {self.generation}",
        )
        self._steps += 1

    def _settle(self, out: _Out) -> None:
        """Count the samples of a step, and give back those of lost ranks and of ranks that have left some."""
        done = [int(count) for count in self._sums.figures.done.tolist()]
        for rank, parts in enumerate(out.by_rank):
            left = parts[done[rank] :] if rank in self._working else parts
            samples = [index for part in left for index in part]
            self._sampler.give_back(samples)
            self._lost += 0 if rank in self._working else len(samples)
            out.left += len(samples)
        out.trained = out.total - out.left
        self._samples += out.trained

    def _is_late(self, out: _Out) -> bool:
        """Tell whether this rank should leave the rest of its share: the others have theirs by now."""
        speeds = [self._speeds[rank] for rank in self._working] if self._speeds else []
        if not (speeds and min(speeds) > 0):
            return False
        return time.perf_counter() - out.given_at > LATE_AFTER * out.total / sum(speeds)

    def _follow_training(self) -> None:
        """Follow a layer that was frozen, unfrozen or added."""
        if self._sums.is_up_to_date:
            return
        if self._sums.has_begun:
            raise ConfigError("a layer was frozen or unfrozen in the middle of a step; do it after step()")
        self._parameters = trained_by(self._optimizer, self._model)
        self._sums.close()
        self._sums = self._new_sums()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward() inside the with statement send nothing: a later backward() adds to its gradients."""
        if (out := self._out) is None:
            raise ConfigError("no_sync() belongs into the loop over Elastic, around backward()")
        self._sums.disarm()
        try:
            yield
        finally:
            self._arm(out)

    def step(self) -> bool:
        """Step the optimizer with the averaged gradients, and clear them; return whether it was stepped.

        It is not if the ranks that had all samples were lost, if this process was cut off from the others, or after a
        micro-batch that is not the last one of a share.
        """
        self.sync()
        out = self._out
        assert out is not None
        if out.is_held:
            out.is_held = False
            return False
        self._out = None
        self._sums.clear()
        own = sum(map(len, out.parts[: out.begun]))
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
        self._sums = self._new_sums()
        hand_over(group, self._model, self._parts)
        share_buffers(group, self._model)
        if is_newcomer(group) and (group.generation or group.rank):  # rank 0 of the first generation keeps its own seed
            words = f"{self._seed} {group.generation} {group.rank}".encode()
            torch.manual_seed(int.from_bytes(hashlib.blake2b(words, digest_size=8).digest()) >> 1)

    def _new_sums(self) -> GradientBuckets:
        return GradientBuckets(
            self.group,
            self._parameters,
            self._optimizer,
            self._policy,
            self.feedback,
            is_overlapped=self._is_overlapped,
        )

    def _shares(self, group: Group) -> Iterator[list[int]]:
        """Yield this rank's shares until the generation ends, which it does after the same step on all ranks."""
        while not (self.done or self._is_outside or group.change_pending):
            shares = self._sampler.deal(self._counts(group.size))
            if not any(shares):
                self._sampler.next_epoch()
                continue
            out = _Out([_cut(share, self._micro_batch) for share in shares], group.rank, time.perf_counter())
            self._out = out
            while self._out is out:
                given = out.begun
                self._arm(out)
                yield out.part
                if self._out is out and (out.begun == given or out.is_held):
                    raise ConfigError(
                        "step() was not called for the last share; every rank must call it, also for an empty share"
                    )

    def _arm(self, out: _Out) -> None:
        if out.begun == len(out.parts) - 1:
            self._sums.arm(len(out.part), out.total)

    def _counts(self, size: int) -> list[int]:
        unit = (self._micro_batch or 1) if self._speeds else 1  # shares by speed are whole micro-batches
        if self._speeds and self._batch // unit >= len(self._working):
            counts = [
                units * unit for units in by_speed(self._batch // unit, [self._speeds[rank] for rank in self._working])
            ]
            counts[counts.index(max(counts))] += self._batch % unit
        elif self._speeds:
            counts = by_speed(self._batch, [self._speeds[rank] for rank in self._working])
        else:
            counts = even(self._batch, len(self._working))
        by_rank = dict(zip(self._working, counts, strict=True))
        return [by_rank.get(rank, 0) for rank in range(size)]


@dataclass(slots=True)
class _Out:
    """A global batch that was given out."""

    by_rank: list[list[list[int]]]
    """Of each rank its micro-batches, at least one."""
    rank: int
    given_at: float
    begun: int = 0
    """How many of its own this rank has trained on."""
    is_held: bool = False
    """Whether the gradients of the last one were put aside, and `step()` was not called for it."""
    is_synced: bool = False
    left: int = 0
    trained: int = 0
    """The number of its samples that are in the average."""

    @property
    def parts(self) -> list[list[int]]:
        """The micro-batches of this rank."""
        return self.by_rank[self.rank]

    @property
    def part(self) -> list[int]:
        """The micro-batch that this rank trains on now."""
        return self.parts[min(self.begun, len(self.parts) - 1)]

    @property
    def total(self) -> int:
        return sum(len(part) for parts in self.by_rank for part in parts)


def _cut(share: list[int], most: int | None) -> list[list[int]]:
    """Return a share in parts of at most `most` samples; an empty one has one part."""
    if most is None or not share:
        return [share]
    return [share[start : start + most] for start in range(0, len(share), most)]
