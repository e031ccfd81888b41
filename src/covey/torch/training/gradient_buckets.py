"""Sums of gradients over a covey group, in buckets that are sent while the backward pass makes further gradients.

The last bucket travels with exact figures, such as counts. A step's result is that of one set of ranks: if a rank is
lost between two buckets, those with its gradients are summed again, until all have the same contributors. The gradients
of this rank stay in `.grad` until then.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import torch

from covey.base.errors import ConfigError, CoveyError
from covey.plan.training import FIRST_BUCKET
from covey.runtime.group.internals import engine_of, gradients_of, policy_of
from covey.torch.training.drift import DIGEST_FIGURES
from covey.torch.training.gradient_mean import consecutive
from covey.torch.training.local_sgd import parts, which_train
from covey.torch.training.structure import local_part
from covey.torch.training.table_rows import TableRows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from covey.compress.feedback import ErrorFeedback
    from covey.compress.policy import Policy
    from covey.runtime.group.group import Group

logger = logging.getLogger("covey")


class Figures:
    """What ranks exchange besides gradients: one row of numbers that stay exact, in which each rank has its places."""

    def __init__(self, row: torch.Tensor, counts: int, size: int, tables: int = 0) -> None:
        """`counts` is the number of parameters, `size` that of ranks, `tables` that of what may be sent as rows."""
        self.row = row
        lengths = self._lengths(counts, size, tables)
        self.counts, self.speeds, self.done, digests, self.again, self.rows = row.split(lengths)
        """`counts`: on how many ranks each parameter has a gradient. `speeds`, `done` (micro-batches): by rank.
        `again`: how many ranks have changed gradients after they were sent. `rows`: those of all ranks by table."""
        self.digests = digests.view(size, DIGEST_FIGURES)
        """Those of the parameters by rank, if they are compared in this step."""

    @staticmethod
    def _lengths(counts: int, size: int, tables: int) -> list[int]:
        return [counts, size, size, size * DIGEST_FIGURES, 1, tables]

    @classmethod
    def length(cls, counts: int, size: int, tables: int = 0) -> int:
        return sum(cls._lengths(counts, size, tables))


class _Bucket:
    """Some parameters, consecutive in memory, and how far their sum is."""

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]], figures: int) -> None:
        self.named = named
        tensors = [local_part(parameter.detach()) for _, parameter in named]
        wide = any(tensor.dtype == torch.float64 for tensor in tensors)
        self.parts = consecutive([(name, tensor.shape) for (name, _), tensor in zip(named, tensors, strict=True)])
        elements = self.parts[-1].stop if self.parts else 0
        self.row = torch.zeros(elements + figures, dtype=torch.float64 if wide else torch.float32)
        self.rooms = parts(self.row[:elements], tensors)
        self.missing = {name for name, _ in named}
        """The parameters whose gradient the backward pass has not made yet."""
        self.sent: list[tuple[int, int]] = []
        """What identified each gradient when it was sent."""
        self.finish: Callable[[], tuple[int, ...]] | None = None
        """Waits for the sum, and returns its contributors; None if it has not begun."""
        self.contributors: tuple[int, ...] = ()


class GradientBuckets:
    """The sums of one model's gradients over the ranks of one group."""

    def __init__(
        self,
        group: Group,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        policy: Policy | None,
        feedback: ErrorFeedback,
        *,
        is_overlapped: bool,
        tables: Mapping[str, bool] | None = None,
    ) -> None:
        """`parameters` are those that `optimizer` trains now; `tables`, which `tables_of` returns, may be sent as rows.

        `policy` chooses codecs by name; None for what the group was told to compress.
        """
        self._optimizer, self._trains = optimizer, which_train(optimizer)
        self._group, self._parameters, self._feedback = group, parameters, feedback
        self._policy = policy_of(group) if policy is None else policy
        self._nbytes = sum(local_part(parameter.detach()).numel() * 4 for parameter in parameters.values())
        limit = engine_of(group).config.bucket_bytes if is_overlapped and group.size > 1 else self._nbytes
        self._tables = [
            TableRows(name, parameters[name], is_sparse=is_sparse) for name, is_sparse in (tables or {}).items()
        ]
        self._summed: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        whole = [(name, parameter) for name, parameter in parameters.items() if name not in (tables or {})]
        runs = _runs(whole[::-1], limit)
        count = Figures.length(len(parameters), group.size, len(self._tables))
        self._buckets = [_Bucket(run, count if run is runs[-1] else 0) for run in runs]
        last = self._buckets[-1]
        self.figures = Figures(last.row[-count:], len(parameters), group.size, len(self._tables))
        self._own_figures = torch.zeros_like(self.figures.row)
        self._of = {name: bucket for bucket in self._buckets for name, _ in bucket.named}
        self._held: dict[str, torch.Tensor] = {}
        """By name: the sum of the gradients of earlier micro-batches, times their samples."""
        self._samples, self._total = 0, 1
        self._is_armed = False
        """Whether a backward pass sends what it makes."""
        self._failure: CoveyError | None = None
        self._kept: dict[str, Any] | None = None
        """What feedback held back before this step, in case that it has to be repeated."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook_of(name))
            for name, parameter in whole
            if len(self._buckets) > 1
        ]

    @property
    def is_overlapped(self) -> bool:
        """Whether some bucket may be sent during a backward pass."""
        return bool(self._hooks)

    @property
    def has_begun(self) -> bool:
        """Whether a bucket of this step was sent, or gradients were put aside."""
        return bool(self._held) or self._buckets[0].finish is not None

    @property
    def is_up_to_date(self) -> bool:
        """Whether the optimizer trains the same parameters as when this was made."""
        return self._trains == which_train(self._optimizer)

    def close(self) -> None:
        """Send nothing any more; wait for what is under way, which uses memory of this object."""
        self._is_armed = False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for bucket in self._buckets:
            self._drop(bucket)

    def arm(self, samples: int, total: int) -> None:
        """Let the next backward pass send what it makes: the mean over `samples` samples of `total` of all ranks."""
        self._samples, self._total = samples, total
        self._is_armed = bool(samples)

    def disarm(self) -> None:
        self._is_armed = False

    def hold(self, samples: int) -> None:
        """Put gradients, the mean over `samples` samples, aside; they are a part of this step's contribution."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                gradient, parameter.grad = parameter.grad, None
                if gradient is None or not samples:
                    continue
                self._refuse_sparse(name, gradient)
                local = local_part(gradient.detach())
                if name not in self._held:
                    self._held[name] = local.mul(samples)
                elif local.is_sparse:
                    self._held[name] = self._held[name] + local * samples
                else:
                    self._held[name].add_(local, alpha=samples)

    def sum(self, samples: int, total: int) -> tuple[int, ...]:
        """Sum what was held, the gradients, a mean over `samples` samples, and the figures; return the contributors.

        Raises:
            GroupChangedError: this process was cut off from the others.
        """
        self._samples, self._total, self._is_armed = samples, total, False
        if self._failure is not None:
            raise self._failure
        for bucket in self._buckets[:-1]:
            if bucket.finish is None:
                self._send(bucket)
        last = self._buckets[-1]
        self.figures.counts.copy_(torch.tensor([self._has_any(name) for name in self._parameters]))
        changed = any(bucket.sent != _identities(bucket) for bucket in self._buckets[:-1])
        self.figures.again.fill_(changed)
        for place, table in enumerate(self._tables):
            self.figures.rows[place] = table.load(self._contribution(table.name))
        self._own_figures.copy_(self.figures.row)
        self._sum_now(last)
        for bucket in self._buckets[:-1]:
            assert bucket.finish is not None
            bucket.contributors = bucket.finish()
        repeated = self._buckets[:-1] if self.figures.again else []
        if repeated:
            self._stop_overlap()
        latest = last.contributors
        every: list[_Bucket | TableRows] = [*self._buckets, *self._tables]
        while stale := [each for each in every if each in repeated or each.contributors != latest]:
            repeated = []
            self._undo_feedback(stale)
            for each in stale:
                if each is last:
                    self.figures.row.copy_(self._own_figures)
                if isinstance(each, TableRows):
                    self._sum_table(each)
                else:
                    self._sum_now(each)
                latest = each.contributors
        return latest

    def sum_without_own(self, total: int) -> tuple[int, ...]:
        """Do what `sum` does, with no gradients and figures of this rank: these do not count."""
        self._held = {}
        self.figures.row.zero_()
        for bucket in self._buckets:
            bucket.sent = []  # what was sent of it is sent again
        return self.sum(0, total)

    def sum_again(self, samples: int, total: int, *, is_in: bool) -> tuple[int, ...]:
        """Sum the same once more; the ranks that are not in it only take part."""
        self._undo_feedback(self._buckets)
        for bucket in self._buckets:
            bucket.finish = None
        if not is_in:
            return self.sum_without_own(total)
        self.figures.row.copy_(self._own_figures)
        return self.sum(samples, total)

    def store(self, factor: float) -> None:
        """Set the gradient of every parameter that has one on some rank to the sum, times `factor`."""
        counts = dict(zip(self._parameters, self.figures.counts.tolist(), strict=True))
        with torch.no_grad():
            for bucket in self._buckets:
                for (name, parameter), room in zip(bucket.named, bucket.rooms, strict=True):
                    if not counts[name]:
                        parameter.grad = None  # this rank may have one over no samples
                        continue
                    if parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter)
                    local_part(parameter.grad.detach()).copy_(room.mul_(factor))
            for table in self._tables:
                if counts[table.name]:
                    table.store(self._summed[table.name], factor)
                else:
                    table.parameter.grad = None

    def clear(self) -> None:
        """Be ready for the next step."""
        self._held, self._kept, self._summed, self._is_armed = {}, None, {}, False
        for bucket in self._buckets:
            bucket.missing, bucket.finish = {name for name, _ in bucket.named}, None
        self.figures.row.zero_()

    # A bucket

    def _hook_of(self, name: str) -> Callable[[torch.Tensor], None]:
        def ready(_: torch.Tensor) -> None:
            if self._is_armed:
                self._of[name].missing.discard(name)
                self._send_ready()

        return ready

    def _send_ready(self) -> None:
        """Send the buckets that are complete; always in the same order, which must be that of all ranks."""
        if self._buckets[0].finish is None and not self.is_up_to_date:
            self._is_armed = False
            return
        for bucket in self._buckets[:-1]:
            if bucket.finish is None:
                if bucket.missing or self._failure is not None:
                    return
                try:
                    self._send(bucket)
                except CoveyError as error:  # a backward pass is no place to raise it
                    self._failure = error

    def _send(self, bucket: _Bucket) -> None:
        self._load(bucket)
        bucket.sent = _identities(bucket)
        bucket.finish = gradients_of(self._group).start_row(
            bucket.row.numpy(), bucket.parts, self._policy, self._feedback, self._nbytes
        )

    def _sum_now(self, bucket: _Bucket) -> None:
        self._load(bucket)
        gradients_of(self._group).sum_row(bucket.row.numpy(), bucket.parts, self._policy, self._feedback, self._nbytes)
        bucket.contributors = self._group.contributors

    def _sum_table(self, table: TableRows) -> None:
        self._keep_feedback()
        rows = float(self.figures.rows[self._tables.index(table)])
        self._summed[table.name] = table.sum(self._group, rows, self._policy, self._feedback, self._nbytes)

    def _contribution(self, name: str) -> torch.Tensor | None:
        """Return what this rank adds to the sum of a table."""
        gradient, held = self._parameters[name].grad, self._held.get(name)
        if not self._has_any(name):
            return None
        own = None
        if gradient is not None and self._samples:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            own = gradient.detach().to(wide) * (self._samples / self._total)
        if held is None:
            return own
        return held / self._total if own is None else own + held / self._total

    def _keep_feedback(self) -> None:
        if self._kept is None and self._policy is not None:
            self._kept = self._feedback.state_dict()

    def _load(self, bucket: _Bucket) -> None:
        """Copy the contribution of this rank in."""
        self._keep_feedback()
        with torch.no_grad():
            for (name, parameter), room in zip(bucket.named, bucket.rooms, strict=True):
                held = self._held.get(name)
                gradient = None if parameter.grad is None else local_part(parameter.grad.detach())
                if gradient is not None:
                    self._refuse_sparse(name, gradient)
                if not self._has_any(name):
                    room.zero_()  # the gradient over no samples may be anything
                elif held is None:
                    room.copy_(gradient).mul_(self._samples / self._total)
                else:
                    room.copy_(held)
                    if gradient is not None and self._samples:
                        room.add_(gradient.to(room), alpha=self._samples)
                    room.div_(self._total)

    def _has_any(self, name: str) -> bool:
        return name in self._held or (self._samples > 0 and self._parameters[name].grad is not None)

    def _refuse_sparse(self, name: str, gradient: torch.Tensor) -> None:
        if gradient.is_sparse and all(name != table.name for table in self._tables):
            raise ConfigError(
                f"the gradient of {name} is sparse; only that of an nn.Embedding or nn.EmbeddingBag that is not "
                "sharded, and not tied to another layer, is averaged as rows: sparse=False"
            )

    def _undo_feedback(self, stale: Sequence[_Bucket | TableRows]) -> None:
        """Forget what the sums that are repeated have left out: they did not count."""
        if self._kept:
            now = self._feedback.state_dict()
            names = {name for each in stale if isinstance(each, _Bucket) for name, _ in each.named}
            names |= {each.name for each in stale if isinstance(each, TableRows)}
            merged = {
                part: {name: value for name, value in kept.items() if name in names}
                | {name: value for name, value in now[part].items() if name not in names}
                for part, kept in self._kept.items()
            }
            self._feedback.load_state_dict(merged)

    def _stop_overlap(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._group.rank == min(self._group.contributors):
            logger.warning(
                "a rank changed gradients after they were sent during backward(), so they were sent again, and are "
                "sent at step() from now on: enter no_sync() for all backward() of a step but the last, or pass "
                "overlap=False"
            )

    @staticmethod
    def _drop(bucket: _Bucket) -> None:
        if bucket.finish is not None:
            with contextlib.suppress(CoveyError):  # the group has ended, which its loop learns
                bucket.finish()
            bucket.finish = None


def _identities(bucket: _Bucket) -> list[tuple[int, int]]:
    """Return what changes when gradients are changed or replaced."""
    gradients = [parameter.grad for _, parameter in bucket.named]
    return [(0, 0) if each is None else (id(each), each._version) for each in gradients]


def _runs(named: Sequence[tuple[str, torch.nn.Parameter]], limit: int) -> list[list[tuple[str, torch.nn.Parameter]]]:
    """Cut a list of parameters into runs of up to `limit` bytes; the first one is smaller, to begin sending early.

    A model that is as small as that has one bucket.
    """
    runs: list[list[tuple[str, torch.nn.Parameter]]] = [[]]
    nbytes, most = 0, min(limit, FIRST_BUCKET)
    for name, parameter in named:
        own = local_part(parameter.detach()).numel() * 4
        if runs[-1] and nbytes + own > most:
            runs.append([])
            nbytes, most = 0, limit
        runs[-1].append((name, parameter))
        nbytes += own
    return runs
