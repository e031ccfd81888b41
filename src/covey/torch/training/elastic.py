"""The elastic training loop in one object: ranks may come and go, and each sample is trained on once an epoch."""

from __future__ import annotations

import contextlib
import hashlib
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from covey.base.errors import ConfigError, GroupChangedError
from covey.compress.feedback import ErrorFeedback
from covey.compress.policy import make_policy
from covey.proto.replica_agreement import NO_STATE
from covey.runtime.group.internals import is_leaving, is_newcomer, report_for_program, steps_between_checks
from covey.runtime.joining.generations import MEMBERS_WAIT_SECONDS, ROUND_SECONDS
from covey.torch.training.drift import compare, digest, from_figures, to_figures
from covey.torch.training.generation_loop import GenerationLoop
from covey.torch.training.gradient_buckets import GradientBuckets
from covey.torch.training.local_sgd import trained_by
from covey.torch.training.periodic_saves import PeriodicSaves
from covey.torch.training.replica import WeightedReduceScatter
from covey.torch.training.replicas import Replicas
from covey.torch.training.sampler import DealtBatch, Pace, by_speed, cut, even
from covey.torch.training.shadowing import SHADOW_KEPT_BYTES, NewcomerSupport
from covey.torch.training.structure import hand_over, local_part, share_buffers
from covey.torch.training.table_rows import tables_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from covey.compress.policy import CompressValue
    from covey.runtime.group.group import Group
    from covey.torch.training.replica import ModelReplica
    from covey.torch.training.sampler import ElasticSampler


LATE_AFTER: Final = 1.25
"""A rank leaves the rest of its share after so many times the time in which all should have theirs."""


class Elastic(GenerationLoop[list[int]]):
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
        replica: ModelReplica | None = None,
        balance: bool = False,
        micro_batch: int | None = None,
        overlap: bool = True,
        compress: CompressValue = None,
        extra: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if batch < 1:
            raise ConfigError(f"batch={batch}: batch must be at least 1")
        if micro_batch is not None and not 1 <= micro_batch <= batch:
            raise ConfigError(f"micro_batch={micro_batch} must be from 1 to batch={batch}")
        parts = {"elastic": self, "optimizer": optimizer, "scheduler": scheduler}
        super().__init__(sampler, epochs, parts, extra, **options)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) or isinstance(
            optimizer, torch.optim.LBFGS
        ):
            raise ConfigError(
                f"{type(optimizer).__name__} with {type(scheduler).__name__}: Elastic calls step() of both without "
                "arguments; step a scheduler that needs a loss yourself, and pass it in extra="
            )
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._replica, self._replicas = replica, None if replica is None else Replicas(replica)
        self._reduce_scatter = WeightedReduceScatter()
        self._parameters = self._trained()
        self._batch, self._micro_batch = batch, micro_batch
        self._is_overlapped, self._is_balanced = overlap, balance
        if replica is not None:
            self._options.setdefault("min_size", replica.shards)
        self._seed, self._pace = torch.initial_seed(), Pace()
        self._policy = None if compress is None else make_policy(compress, smallest=0)
        self.feedback = ErrorFeedback()
        """What compressed gradients have lost so far, by name; each rank has its own."""
        self._steps = 0
        """Steps of this generation."""
        self._reported = 0
        """Steps of the whole training, as views show them."""
        self._made: GradientBuckets | None = None
        self._speeds: Sequence[float] = []
        """Speeds of the replicas that get shares, which `_working` has; without `replica=`, each rank is one."""
        self._out: DealtBatch | None = None
        self._before: dict[str, Any] = {}
        """The position before the batch that is out, if models are sharded."""
        self._has_state = False
        self._saves: PeriodicSaves | None = None
        self._saved_at, self._owes_save = 0, False
        self._most_kept = 0
        """The bytes of averages that a newcomer keeps while it gets the state; 0: all ranks wait for it."""
        self._newcomers: NewcomerSupport | None = None

    # Position

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
        """Whether this is the lowest remaining rank: the one that should print, and save what is not sharded."""
        if self._replicas is None:
            return super().is_first
        return self.rank == self._replicas.formation.replicas[min(self._working)][0]

    # A step

    def sync(self) -> None:
        """Average the gradients over the samples of all ranks; the `step()` that follows does not do it again.

        After a micro-batch that is not the last one, it only puts the gradients aside.
        """
        self._sync(is_early=True)

    def _sync(self, *, is_early: bool) -> None:
        out = self._out
        if out is None:
            raise ConfigError("there is no batch to step for: call step() once for each share that the loop gives out")
        if out.is_synced or out.is_held:
            return
        self._follow_training()
        samples = len(out.now)
        out.begun += 1
        if out.begun < len(out.parts) and not self._is_late(out):
            self._sums.hold(samples)
            out.is_held = True
            return
        figures = self._sums.figures
        trained = sum(map(len, out.parts[: out.begun]))
        self._pace.measure(trained, time.perf_counter() - out.given_at)
        figures.done[out.own] = out.begun
        if self._is_balanced:
            figures.speeds[out.own] = self._pace.speed
        if (every := steps_between_checks(self.group)) and self._steps % every == 0:
            own = [local_part(parameter) for parameter in self._parameters.values()]
            figures.digests[out.own] = torch.tensor(to_figures(digest(own)))
        out.is_synced = True
        try:
            self._working = self._sum(samples, out, is_early=is_early)
        except GroupChangedError:
            self._is_outside = True  # the other ranks continue; the loop joins again
            return
        self._settle(out)
        if out.trained:
            self._sums.store(out.total / out.trained)
        if self._replicas is None:
            self._speeds = figures.speeds.tolist() if self._is_balanced else []
        compare(
            {self._rank_in(each): from_figures(figures.digests[each].tolist()) for each in self._working},
            f"the parameters before step {self._steps} of generation {self.generation}",
        )
        self._steps += 1

    def _sum(self, samples: int, out: DealtBatch, *, is_early: bool) -> Sequence[int]:
        """Sum the gradients of all replicas; return those whose gradients are in the sums of all ranks."""
        if self._replicas is None or self._replica is None:
            ranks = self._sums.sum(samples, out.total)
            return ranks if self._newcomers is None else self._newcomers.trainers(ranks)
        is_torn = self._replica.is_torn
        counted: Sequence[int] = (
            self._sums.sum_without_own(out.total) if is_torn else self._sums.sum(samples, out.total)
        )
        while True:
            done = self._sums.figures.done.tolist()
            counted = [each for each in counted if done[each]]
            verdict = self._replicas.agree(counted, self._pace.speed, is_early=is_early, is_due=self._is_due(1))
            if verdict.is_decided:
                self._speeds = self._replicas.speeds if self._is_balanced else []
                return verdict.counted
            if tuple(counted) != verdict.counted:
                is_in = out.own in verdict.counted
                counted = self._sums.sum_again(samples, out.total, is_in=is_in)

    def _rank_in(self, replica: int) -> int:
        """Return the rank of a replica that has the shard of this rank."""
        if self._replicas is None or self._replica is None:
            return replica
        return self._replicas.formation.replicas[replica][self._replica.index]

    def _settle(self, out: DealtBatch) -> None:
        """Count the samples of a step, and give back those of lost replicas and of ranks that have left some."""
        done = [int(count) for count in self._sums.figures.done.tolist()]
        for replica, parts in enumerate(out.by_replica):
            left = parts[done[replica] :] if replica in self._working else parts
            samples = [index for part in left for index in part]
            self._sampler.give_back(samples)
            self._lost += 0 if replica in self._working else len(samples)
            out.left += len(samples)
        out.trained = out.total - out.left
        self._samples += out.trained

    def _is_late(self, out: DealtBatch) -> bool:
        """Tell whether this rank should leave the rest of its share: the others have theirs by now."""
        speeds = [self._speeds[each] for each in self._working] if self._speeds else []
        if not (speeds and min(speeds) > 0) or self._replicas is not None:  # ranks of a replica must agree
            return False
        return time.perf_counter() - out.given_at > LATE_AFTER * out.total / sum(speeds)

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        trained = trained_by(self._optimizer, self._model, may_be_sharded=self._replica is not None)
        if self._replica is not None and self._replica.shards > 1:
            self._reduce_scatter.attach(self._model, trained)
        return trained

    def _follow_training(self) -> None:
        """Follow a layer that was frozen, unfrozen or added."""
        if self._sums.is_up_to_date:
            return
        if self._sums.has_begun:
            raise ConfigError("a layer was frozen or unfrozen in the middle of a step; do it after step()")
        self._parameters = self._trained()
        self._sums.close()
        line = None if self._replicas is None else self._replicas.line
        self._made = self._new_sums(self.group if line is None else line)

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
        self._sync(is_early=False)
        out = self._out
        assert out is not None
        if out.is_held:
            out.is_held = False
            return False
        self._out = None
        self._sums.clear()
        own = sum(map(len, out.parts[: out.begun]))
        if self._replicas is not None and not self._is_outside and not self._may_step(self._replicas):
            self.load_state_dict(self._before)
            self._optimizer.zero_grad()
            return False
        newcomers = self._newcomers
        if out.trained and not (newcomers and newcomers.keeps_step(list(self._parameters.values()))):
            self._take_step()
        self._optimizer.zero_grad()
        self._reported += 1
        report_for_program(self.group, self._reported, {"samples": float(own)})
        if not self._sampler.remaining and not self._is_outside:
            self._sampler.next_epoch()
        return out.trained > 0

    def _take_step(self) -> None:
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()

    def _may_step(self, replicas: Replicas) -> bool:
        """Tell whether this rank's gradients are still right after what the program did since it called `sync`.

        Clipping needs the norm of the whole replica, so if one has lost a rank by then, all of its ranks stay where
        they are: otherwise two replicas that each lose one of their ranks could leave shards of different steps.
        """
        if not replicas.was_early:
            return True
        try:
            replicas.agree((), self._pace.speed, is_due=replicas.is_due)
        except GroupChangedError:
            self._is_outside = True
        return replicas.may_step

    def keep_checkpoints(self, *, every: int, keep: int = 3, resume: bool = False) -> None:
        """Save the whole training after each `every` steps, on the machines of the run, in the background.

        Call it before the loop, on all ranks. No shared folder is needed; each machine keeps the `keep` newest, as
        `group.checkpoint.save` does. If some shard of a sharded model is on no rank any more, the run waits until there
        are enough processes for a replica, and continues from the newest checkpoint, instead of raising an error. With
        `resume`, a run that begins continues from the newest checkpoint of an earlier run of its name, if there is one.
        """
        parts = {"model": self._model, **self._parts}
        self._saves = PeriodicSaves(parts, every, keep, resume=resume)

    def shadow_newcomers(self, *, most_bytes: int = SHADOW_KEPT_BYTES) -> None:
        """Let newcomers get the state in the background, while the others train; without it, all ranks wait for them.

        Call it before the loop, on all ranks. A newcomer goes through the loop with empty shares: its `step()` keeps
        averaged gradients, clipped as the program does it, until it has the state of an earlier step, and has taken
        all steps since. It gets shares once its state was compared with that of the others. Checkpoints wait for that.

        All ranks wait, and a line says why, if its state differs then, as with an optimizer that is not deterministic,
        or a program that changes the state between steps; or if it had to keep more than `most_bytes` twice; or if all
        ranks that have the state are asked to leave.

        Raises:
            ConfigError: the model is sharded, or `most_bytes` is not above 0.
        """
        if self._replica is not None or most_bytes < 1:
            raise ConfigError(
                f"shadow_newcomers(most_bytes={most_bytes}) is for models that each rank has whole, and most_bytes "
                "must be above 0; with replica=, ranks that wait for a replica hold no other rank up"
            )
        self._most_kept = most_bytes

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training, for a checkpoint with the states of model, optimizer and the rest."""
        return {**self._place(), "steps": self._reported, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. Call it before the loop, at least on rank 0, whose state all ranks get."""
        self._go_to(state)
        self._reported, self._seed = state.get("steps", 0), state["seed"]

    # A generation

    def _enter(self, group: Group) -> None:
        self._group, self._out, self._is_outside = group, None, False
        self._working, self._speeds, self._steps = range(group.size), [], 0
        self._has_state = self._has_state and not is_newcomer(group)
        self._owes_save = False
        if self._replicas is None:
            self._made = self._new_sums(group)
            if self._saves is not None and self._saves.resume and not group.generation:
                self._saves.load(group)
            self._get_state(group)
        else:
            self._replicas.is_due = False  # this process may have been cut off before it saved, and the others have
            self._form(self._replicas)
        self._saved_at = self._reported  # equal on all ranks: they have saved this state, or continue from it
        self._share_buffers()
        if is_newcomer(group) and (group.generation or group.rank):  # rank 0 of the first generation keeps its own seed
            words = f"{self._seed} {group.generation} {group.rank}".encode()
            torch.manual_seed(int.from_bytes(hashlib.blake2b(words, digest_size=8).digest()) >> 1)

    def _get_state(self, group: Group) -> None:
        if self._most_kept and group.generation:
            self._newcomers = NewcomerSupport.begin(
                group, self._model, self._parts, self._take_step, self._most_kept, has_state=self._has_state
            )
        if self._newcomers is None:
            hand_over(group, self._model, self._parts, fresh=not self._has_state if self._most_kept else None)
            self._has_state = True
        else:
            self._working = self._newcomers.trainers(range(group.size))

    def _follow_newcomers(self, newcomers: NewcomerSupport) -> None:
        """Let newcomers in that have the state; at the end of the training all get it."""
        is_going_on = self._steps == newcomers.steps or newcomers.settle()
        if is_going_on and self.done:
            newcomers.wait()
            is_going_on = False
        if not is_going_on:
            self._newcomers, self._has_state = None, True
        elif self._steps:
            self._working = newcomers.trainers(self.group.contributors)
        if self._newcomers is None:
            self._working = self.group.contributors

    def _end_admission(self, newcomers: NewcomerSupport) -> None:
        """Let newcomers have the state if all ranks leave that have it: the generation ends."""
        if newcomers.end(leaves=is_leaving(self.group)):
            self._working = newcomers.trainers(self.group.contributors)
            self._share_buffers()
            self._newcomers, self._has_state = None, True

    def _form(self, replicas: Replicas) -> None:
        """Form replicas of the ranks that are left, and give all of them the newest state."""
        if self._made is not None:
            self._made.close()
        version = self._reported if self._has_state else NO_STATE
        saves, self._made = self._saves, None
        is_needed = replicas.form(self.group, version, can_load=saves is not None)
        newest = replicas.formation.version
        self._working, self._speeds = range(replicas.count), []
        if replicas.must_wait:
            return
        is_loaded = False
        if saves is not None and newest == NO_STATE and (replicas.must_load or saves.resume):
            is_loaded = saves.load(self.group) is not None
        if replicas.must_load and not is_loaded:
            raise replicas.state_is_lost()
        if not is_loaded and (is_needed or newest == NO_STATE):
            self._hand_over(replicas, is_behind=newest == NO_STATE or version != newest)
        self._has_state = True
        self._made = None if replicas.line is None else self._new_sums(replicas.line)

    def _hand_over(self, replicas: Replicas, *, is_behind: bool) -> None:
        assert replicas.holders is not None
        hand_over(replicas.holders, self._model, self._parts, fresh=is_behind)

    def _let_go(self) -> None:
        if self._made is not None:
            self._made.close()
        self._leave_newcomers()
        if self._saves is not None:
            self._saves.settle()
        if self._replicas is not None:
            self._replicas.close()

    def _leave_newcomers(self) -> None:
        newcomers, self._newcomers = self._newcomers, None
        if newcomers is not None:
            newcomers.leave()

    def _finish(self) -> None:
        self._share_buffers()

    def _share_buffers(self) -> None:
        if not self._working:
            return
        is_donor = self.is_first and not (self._replicas is None and self._newcomers is None)
        share_buffers(self.group, self._model, is_donor=is_donor)

    def _new_sums(self, group: Group) -> GradientBuckets:
        return GradientBuckets(
            group,
            self._parameters,
            self._optimizer,
            self._policy,
            self.feedback,
            is_overlapped=self._is_overlapped,
            tables=tables_of(self._model, self._parameters) if self._replica is None else None,
        )

    def _give_out(self, group: Group) -> Iterator[list[int]]:
        while not (self._is_outside or self._is_finished() or group.change_pending):
            count = group.size if self._replicas is None else self._replicas.count
            own = group.rank if self._replicas is None else self._replicas.number
            if own is None:
                self._watch()
                continue
            if self._replicas is not None:
                self._before = self.state_dict()
            shares = self._sampler.deal(self._counts(count))
            if not any(shares):
                self._sampler.next_epoch()
                continue
            part_of = list if self._replica is None else self._replica.part_of
            out = DealtBatch([cut(share, self._most) for share in shares], own, time.perf_counter(), part_of)
            self._out = out
            while self._out is out:
                given = out.begun
                self._arm(out)
                yield out.part
                if self._out is out and (out.begun == given or out.is_held):
                    raise ConfigError(
                        "step() was not called for the last share; every rank must call it, also for an empty share"
                    )
        if self._newcomers is not None and not self._is_outside:
            self._end_admission(self._newcomers)

    def _is_finished(self) -> bool:
        """Tell whether all epochs are done. Before, form new replicas if one lost a rank, and save if it is time."""
        replicas = self._replicas
        if replicas is not None and replicas.is_broken:
            self._form(replicas)
        if self._newcomers is not None:
            self._follow_newcomers(self._newcomers)
        self._save_if_due()
        if replicas is None:
            return self.done
        # Ranks without a replica do not know that all is done; they ask before they leave the loop for a change.
        can_ask = replicas.has_idle and not (replicas.is_over or replicas.must_wait)
        if can_ask and (self.done or self.group.change_pending):
            replicas.agree((), 0.0, is_over=self.done)
            if replicas.is_over:
                self._hand_over(replicas, is_behind=replicas.number is None)
        return self.done

    def _watch(self) -> None:
        """Take part in a step of the others as a rank without a replica."""
        replicas = self._replicas
        assert replicas is not None
        if replicas.must_wait:
            self._await_members(replicas)
            return
        while not replicas.agree((), 0.0).is_decided:
            pass
        if replicas.was_early:
            replicas.agree((), 0.0)
        if replicas.is_over:
            self._hand_over(replicas, is_behind=True)

    def _await_members(self, replicas: Replicas) -> None:
        """Wait until newcomers are there, with which the next generation may have a replica."""
        until = time.monotonic() + float(self._options.get("timeout", MEMBERS_WAIT_SECONDS))
        while not self.group.change_pending:
            is_late = self.group.all_reduce(np.array([time.monotonic() > until]), op="max")
            if is_late[0]:
                raise replicas.state_is_lost()
            time.sleep(ROUND_SECONDS)

    def _is_due(self, further: int = 0) -> bool:
        """Tell whether a checkpoint is to be saved now, or after so many further steps."""
        return self._saves is not None and self._saves.is_due(self._reported + further)

    def _save_if_due(self) -> None:
        replicas = self._replicas
        is_due = self._is_due() and self._saved_at != self._reported if replicas is None else replicas.is_due
        is_due = is_due or self._owes_save
        if self._saves is None or not is_due or self._is_outside:
            return
        self._owes_save = self._newcomers is not None  # all ranks save, and what they save must be equal
        if self._owes_save:
            return
        if replicas is not None:
            replicas.is_due = False
            if replicas.has_idle:  # all ranks save, and what they save must be equal
                self._hand_over(replicas, is_behind=replicas.number is None)
        self._saved_at = self._reported
        self._saves.save(self.group, self._reported)

    @property
    def _sums(self) -> GradientBuckets:
        assert self._made is not None, "a rank without a replica sums no gradients"
        return self._made

    @property
    def _most(self) -> int | None:
        """The most samples of a replica in a micro-batch; None for a whole share."""
        if self._micro_batch is None or self._replica is None:
            return self._micro_batch
        return self._micro_batch * self._replica.shards

    def _arm(self, out: DealtBatch) -> None:
        if self._replica is not None:
            self._reduce_scatter.weigh(len(out.part), len(out.now), self._replica.shards)
        if out.begun == len(out.parts) - 1:
            self._sums.arm(len(out.now), out.total)

    def _counts(self, size: int) -> list[int]:
        unit = (self._most or 1) if self._speeds else 1  # shares by speed are whole micro-batches
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
