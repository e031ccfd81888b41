"""Communication hooks for DistributedDataParallel: how the gradients of a bucket are combined.

    hook = covey.torch.weighted_hook()
    ddp.register_comm_hook(None, hook)  # None, or the process group of ddp, as for torch's own hooks

DDP reads the annotations of a hook and needs types, not strings: this module does not postpone annotations.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from covey.base.errors import ConfigError
from covey.compress.feedback import ErrorFeedback
from covey.compress.policy import CompressValue
from covey.torch.backend.below import there
from covey.torch.training.drift import DriftCheck
from covey.torch.training.gradient_mean import GradientMean, consecutive


class _Hook:
    """A hook: DDP calls it with a state, here a process group or None for the default one, and a bucket.

    `compress` is a codec like "int8", or a mapping of names to codecs; None is what covey's group was told to compress.
    With `feedback`, what a step loses is added to the next one, so that nothing is lost in the long run. What is held
    back differs between ranks; each rank saves its own `state_dict()`.

    Parameters have the names of `model`, if it is given, else numbers in the order of their first gradients.

    On a process group of another backend, every rank sends its bytes to every other rank, and one codec is used for
    all: a cast or a quantiser.
    """

    def __init__(
        self, compress: CompressValue, *, feedback: ErrorFeedback | bool, model: torch.nn.Module | None
    ) -> None:
        self.__name__ = self.__qualname__ = type(self).__name__  # for DDP's log
        self._mean, self._drift = GradientMean(compress, feedback), DriftCheck()
        self._names: dict[torch.Tensor, str] = {}
        """By parameter. DDP rearranges its buckets after the first step, but numbers in the order of the first one are
        equal on all ranks and in every run."""
        if model is not None:
            self._names = {parameter: name for name, parameter in model.named_parameters()}

    @property
    def feedback(self) -> ErrorFeedback | None:
        """What was lost so far, by name; None if it is not kept."""
        return self._mean.feedback

    def state_dict(self) -> dict[str, Any]:
        return self._mean.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what a hook for the same model has held back."""
        self._mean.load_state_dict(state)

    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        group = dist.group.WORLD if state is None else state
        # A rank that has joined, under `DDP.join`, sends zeros and does not step: its parameters are old.
        self._drift.look(f"parameters of bucket {bucket.index()}", bucket.parameters(), group, bucket.buffer())
        return self._combine(group, bucket)

    def _combine(self, group: Any, bucket: Any) -> Any:
        raise NotImplementedError

    def _average(self, group: Any, bucket: Any, weight: float | None = None) -> Any:
        """Return a future of the mean of a bucket, compressed."""
        named = [
            (self._names.setdefault(parameter, str(len(self._names))), parameter.shape)
            for parameter in bucket.parameters()
        ]
        return _after(*self._mean.start(bucket.buffer(), consecutive(named), group, weight))


class WeightedHook(_Hook):
    """Makes gradients the mean over all samples instead of over ranks, for batches of different sizes.

    Before backward(), set `samples` to the number of samples that this rank's loss is the mean over, or to the number
    of tokens, or any other weight. It stays until it is set again; with 0 this rank's gradients are ignored. Under
    `DDP.join`, set it to 0 after the last batch. The weights are exact, whatever compresses the gradients.
    """

    def __init__(
        self, compress: CompressValue, *, feedback: ErrorFeedback | bool, model: torch.nn.Module | None
    ) -> None:
        super().__init__(compress, feedback=feedback, model=model)
        self.samples: float | None = None

    def _combine(self, group: Any, bucket: Any) -> Any:
        if self.samples is None or not 0 <= self.samples < float("inf"):
            raise ConfigError(f"weighted_hook: samples={self.samples!r}; set hook.samples before backward()")
        if self._mean.is_compressed(group):
            return self._average(group, bucket, float(self.samples))
        buffer = bucket.buffer()
        # The weight is in the same row, so that it has the same contributors as the gradients.
        row = buffer.new_zeros(buffer.numel() + 1, dtype=_wide(buffer.dtype))
        if self.samples:
            row[:-1].copy_(buffer).mul_(self.samples)
            row[-1] = self.samples

        def divide() -> torch.Tensor:
            total = row[-1]
            return buffer.copy_(row[:-1].div_(torch.where(total > 0, total, 1)))

        return _after(dist.all_reduce(row, group=group, async_op=True), divide)


class RescaleHook(_Hook):
    """Makes gradients the mean over the remaining ranks, in groups that survive losses.

    DDP divides by the number of ranks it started with. Groups of other backends do not survive losses; there this hook
    does what DDP does without a hook.
    """

    def _combine(self, group: Any, bucket: Any) -> Any:
        if self._mean.is_compressed(group):
            return self._average(group, bucket)
        buffer = bucket.buffer().mul_(1.0 / group.size())  # before the sum, which might overflow; as DDP does
        work = dist.all_reduce(buffer, group=group, async_op=True)
        return _after(work, lambda: _mean_of_contributors(buffer, work, group))


class CompressHook(_Hook):
    """Makes gradients the mean over the ranks, sent in fewer bytes."""

    def _combine(self, group: Any, bucket: Any) -> Any:
        return self._average(group, bucket)


def weighted_hook(
    compress: CompressValue = None, *, feedback: ErrorFeedback | bool = True, model: torch.nn.Module | None = None
) -> WeightedHook:
    """Return a hook that weights each rank's gradients by its number of samples; see `WeightedHook`."""
    return WeightedHook(compress, feedback=feedback, model=model)


def rescale_hook(
    compress: CompressValue = None, *, feedback: ErrorFeedback | bool = True, model: torch.nn.Module | None = None
) -> RescaleHook:
    """Return a hook that divides by the number of ranks that contributed; see `RescaleHook`."""
    return RescaleHook(compress, feedback=feedback, model=model)


def compress_hook(
    compress: CompressValue = "bf16", *, feedback: ErrorFeedback | bool = True, model: torch.nn.Module | None = None
) -> CompressHook:
    """Return a hook that sends gradients in fewer bytes; see `CompressHook`."""
    return CompressHook(compress, feedback=feedback, model=model)


def _after(work: Any, finish: Callable[[], torch.Tensor]) -> Any:
    """Return a future of what `finish` returns; it is called once the operation has succeeded."""

    def then(ended: Any) -> torch.Tensor:
        ended.value()  # raises the error of the operation
        return finish()

    return work.get_future().then(then)


def _mean_of_contributors(mean: torch.Tensor, work: Any, group: Any) -> torch.Tensor:
    """Turn a sum that was divided by the size of the group into the mean over the contributors."""
    left = there(work, group)
    return mean if left == group.size() else mean.mul_(group.size() / left)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype in which sums and numbers of samples stay exact."""
    return torch.float32 if dtype.itemsize < 4 else dtype
