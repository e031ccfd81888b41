"""Communication hooks for DistributedDataParallel: how the gradients of a bucket are combined.

    hook = covey.torch.weighted_hook()
    ddp.register_comm_hook(None, hook)  # None, or the process group of ddp, as for torch's own hooks

DDP reads the annotations of a hook and needs types, not strings: this module does not postpone annotations.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from covey.base.errors import ConfigError
from covey.torch.backend.lost import gather_rows, there
from covey.torch.training.codec import pack_int8, unpack_int8

_HALVES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}


class _Hook:
    """A hook: DDP calls it with a state, here a process group or None for the default one, and a bucket."""

    def __init__(self) -> None:
        self.__name__ = self.__qualname__ = type(self).__name__  # for DDP's log

    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return self._combine(dist.group.WORLD if state is None else state, bucket)

    def _combine(self, group: Any, bucket: Any) -> Any:
        raise NotImplementedError


class WeightedHook(_Hook):
    """Makes gradients the mean over all samples instead of over ranks, for batches of different sizes.

    Before backward(), set `samples` to the number of samples that this rank's loss is the mean over, or to the number
    of tokens, or any other weight. It stays until it is set again; with 0 this rank's gradients are ignored. Under
    `DDP.join`, set it to 0 after the last batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.samples: float | None = None

    def _combine(self, group: Any, bucket: Any) -> Any:
        if self.samples is None or not 0 <= self.samples < float("inf"):
            raise ConfigError(f"weighted_hook: samples={self.samples!r}; set hook.samples before backward()")
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
        buffer = bucket.buffer().mul_(1.0 / group.size())  # before the sum, which might overflow; as DDP does
        work = dist.all_reduce(buffer, group=group, async_op=True)
        return _after(work, lambda: _mean_of_contributors(buffer, work, group))


class CompressHook(_Hook):
    """Sends gradients as "fp16", "bf16", or "int8" with a scale for every 256 elements.

    With `feedback`, the rounding error of a rank's gradient is added to its next one, so that nothing is lost in the
    long run. These remainders differ between ranks; each rank saves its own `state_dict()`, which holds them.

    With int8 every rank sends its row to every other rank. That is less than an all-reduce of float32 sends in groups
    of up to seven ranks; of up to three, if the group survives losses.
    """

    def __init__(self, codec: str, *, feedback: bool) -> None:
        super().__init__()
        if codec not in (*_HALVES, "int8"):
            raise ConfigError(f"codec={codec!r}: gradients can be sent as 'fp16', 'bf16' or 'int8'")
        self._codec, self._feedback = codec, feedback
        self._numbers: dict[torch.Tensor, int] = {}
        """Numbers of parameters, in the order of their first gradients. DDP rearranges its buckets after the first
        step, but this order is equal on all ranks and in every run."""
        self._remainders: dict[int, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"remainders": {number: row.clone() for number, row in sorted(self._remainders.items())}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the remainders of a hook for the same model."""
        self._remainders = {number: row.clone() for number, row in state["remainders"].items()}

    def _combine(self, group: Any, bucket: Any) -> Any:
        buffer = bucket.buffer().mul_(1.0 / group.size())
        if self._feedback:
            self._add_remainders(bucket)
        if self._codec == "int8":
            return self._gather(group, bucket, buffer)
        half = buffer.to(_HALVES[self._codec])
        self._keep_remainders(bucket, half)
        work = dist.all_reduce(half, group=group, async_op=True)
        return _after(work, lambda: _mean_of_contributors(buffer.copy_(half), work, group))

    def _gather(self, group: Any, bucket: Any, buffer: torch.Tensor) -> Any:
        packed = pack_int8(buffer)
        self._keep_remainders(bucket, unpack_int8(packed, buffer))
        rows, work = gather_rows(packed, group)

        def add_up() -> torch.Tensor:
            buffer.zero_()
            for row in rows:
                buffer.add_(unpack_int8(row, buffer))
            return _mean_of_contributors(buffer, work, group)

        return _after(work, add_up)

    def _add_remainders(self, bucket: Any) -> None:
        for number, part in self._parts(bucket, bucket.buffer()):
            if (remainder := self._remainders.get(number)) is not None and remainder.shape == part.shape:
                part.add_(remainder.to(part))

    def _keep_remainders(self, bucket: Any, sent: torch.Tensor) -> None:
        """Keep the difference to `sent` as remainder; 0 for a gradient that is not finite, or it would stay so."""
        if self._feedback:
            rest = (bucket.buffer() - sent).nan_to_num_(0.0, 0.0, 0.0)
            self._remainders.update(self._parts(bucket, rest))

    def _parts(self, bucket: Any, row: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """Return the number of each parameter of the bucket, with its part of `row`."""
        parameters = bucket.parameters()
        numbers = [self._numbers.setdefault(parameter, len(self._numbers)) for parameter in parameters]
        return list(zip(numbers, row.split([parameter.numel() for parameter in parameters]), strict=True))


def weighted_hook() -> WeightedHook:
    """Return a hook that weights each rank's gradients by its number of samples; see `WeightedHook`."""
    return WeightedHook()


def rescale_hook() -> RescaleHook:
    """Return a hook that divides by the number of ranks that contributed; see `RescaleHook`."""
    return RescaleHook()


def compress_hook(codec: str = "bf16", *, feedback: bool = True) -> CompressHook:
    """Return a hook that sends gradients in fewer bytes; see `CompressHook`."""
    return CompressHook(codec, feedback=feedback)


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
