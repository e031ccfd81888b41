"""A process group of torch.distributed as a strategy of covey: NCCL, gloo, MPI, or covey's own backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
import torch.distributed as dist

from covey.base.errors import ConfigError
from covey.runtime.group.strategy import Strategy, check_floats, check_op
from covey.torch.backend.below import there
from covey.torch.training.gradient_mean import GradientMean, consecutive

if TYPE_CHECKING:
    from collections.abc import Mapping

BUCKET_BYTES: Final = 25 << 20
"""Gradients of one dtype and device are combined in buckets of this size, as DDP does."""


class ProcessGroupStrategy(Strategy):
    """A strategy on an initialised process group; default: the one that `init_process_group` made.

    It takes tensors on the devices of the group's backend, and numpy arrays and CPU tensors, which are copied to its
    device if it has no backend for the CPU. `shutdown` destroys the process group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Use a process group.

        Raises:
            ConfigError: torch.distributed is not initialised, or this process is not in the group.
        """
        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
        if dist.get_rank(process_group) < 0:
            raise ConfigError("this process is not in the process group")
        self._group = process_group
        self._rank: int = dist.get_rank(process_group)
        self._size: int = dist.get_world_size(process_group)
        self._is_shut, self._mean = False, GradientMean(None, feedback=True)
        group = process_group if process_group is not None else dist.group.WORLD
        self._devices: list[str] = [device.type for device in group._device_types]

    def init(self) -> None:
        """Do nothing: the process group is initialised."""

    @property
    def rank(self) -> int:
        """The rank in the process group."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks of the process group."""
        return self._size

    def all_reduce_gradients(self, gradients: Mapping[str, Any], op: Literal["mean", "sum"] = "mean") -> None:
        """Replace each array by the mean over all ranks, or by the sum, in buckets.

        On covey's backend they are compressed as `COVEY_COMPRESS` says.
        """
        check_op(op)
        tensors = [(name, self._tensor(gradients[name])) for name in sorted(gradients)]
        if op == "mean":
            for name, tensor in tensors:
                check_floats(name, tensor)
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for _, tensor in bucket])
            staged = self._staged(flat)
            if self._mean.is_compressed(self._group):
                work, finish = self._mean.start(
                    staged, consecutive([(name, tensor.shape) for name, tensor in bucket]), self._group
                )
                work.wait()
                staged = finish()
                if op == "sum":
                    staged *= there(work, self._group)
            else:
                dist.all_reduce(staged, group=self._group)
                if op == "mean":
                    staged /= self._size
            at = 0
            for _, tensor in bucket:
                tensor.detach().copy_(staged[at : at + tensor.numel()].view(tensor.shape))
                at += tensor.numel()

    def broadcast(self, x: Any, root: int = 0) -> None:
        """Copy `x` of rank `root` of the group into `x` of all ranks."""
        if not 0 <= root < self._size:
            raise ConfigError(f"root={root!r} is not a rank; there are ranks 0 to {self._size - 1}")
        tensor = self._tensor(x).detach()
        staged = self._staged(tensor.contiguous())
        source = root if self._group is None else dist.get_global_rank(self._group, root)
        dist.broadcast(staged, source, group=self._group)
        if staged is not tensor:
            tensor.copy_(staged)

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        dist.barrier(group=self._group)

    def shutdown(self) -> None:
        """Destroy the process group. A second call does nothing."""
        if not self._is_shut:
            self._is_shut = True
            dist.destroy_process_group(self._group)

    def _tensor(self, x: Any) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return x
        if not isinstance(x, np.ndarray):
            raise ConfigError(f"a {type(x).__name__} cannot be sent by torch; pass a tensor or a numpy array")
        try:
            return torch.from_numpy(x)
        except TypeError as error:
            raise ConfigError(f"torch has no dtype for numpy's {x.dtype}; pass a tensor") from error

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on a device that the backend reaches: the same one, if it does."""
        if tensor.device.type in self._devices:
            return tensor
        return tensor.to(self._devices[0])


def _buckets(tensors: list[tuple[str, torch.Tensor]]) -> list[list[tuple[str, torch.Tensor]]]:
    """Return the tensors in runs of one dtype and device, each up to BUCKET_BYTES; the same on all ranks."""
    buckets: list[list[tuple[str, torch.Tensor]]] = []
    open_ones: dict[tuple[str, str], tuple[list[tuple[str, torch.Tensor]], int]] = {}
    for name, tensor in tensors:
        kind = str(tensor.dtype), tensor.device.type
        bucket, nbytes = open_ones.get(kind, ([], 0))
        if not bucket or nbytes + tensor.nbytes > BUCKET_BYTES:
            bucket, nbytes = [], 0
            buckets.append(bucket)
        bucket.append((name, tensor))
        open_ones[kind] = bucket, nbytes + tensor.nbytes
    return buckets
