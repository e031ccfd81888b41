"""Batch normalization over the batches of all ranks, on any device: torch's own works on GPUs only.

Forward and backward pass compute what one process with the whole batch computes. Batches may have different sizes, and
may be empty on some ranks. As in torch's SyncBatchNorm, gradients of weight and bias are those of the rank's own batch:
DistributedDataParallel averages them with all others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm


class SyncBatchNorm(_BatchNorm):  # type: ignore[misc]  # torch is not followed by the type checker
    """Batch normalization of inputs of shape (N, C, ...) with the statistics of all ranks of a process group.

    Arguments are those of `torch.nn.SyncBatchNorm`; `process_group` is by default that of all ranks. Every rank calls
    forward and backward equally often. In eval mode, or without a process group, it is plain batch normalization.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        **factory: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **factory)
        self.process_group = process_group

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """Return `module` with every batch normalization layer in it replaced by one over all ranks.

        The new layers share parameters and buffers with the old ones.
        """
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            made = cls(
                module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats,
                process_group, device="meta",
            )  # fmt: skip
            for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
                setattr(made, name, getattr(module, name))
            made.training = module.training
            if hasattr(module, "qconfig"):
                made.qconfig = module.qconfig
            return made
        for name, child in module.named_children():
            module.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return module

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each channel, and update the running statistics in training mode."""
        self._check_input_dim(input)
        uses_batch = self.training or self.running_mean is None
        group = self.process_group if self.process_group is not None else _world()
        if not uses_batch or group is None or dist.get_world_size(group) == 1:
            return super().forward(input)
        result, mean, variance, count = _Normalized.apply(input, self.weight, self.bias, self.eps, group)
        if self.training and self.track_running_stats:
            self._note(mean, variance, count)
        return result

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            shape = list(input.shape)
            raise ValueError(f"expected input of shape (N, {self.num_features}, ...), and got {shape}")

    def _note(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


def convert_sync_batchnorm(module: nn.Module, process_group: Any = None) -> nn.Module:
    """Return `module` with every batch normalization layer in it replaced by `SyncBatchNorm`."""
    return SyncBatchNorm.convert_sync_batchnorm(module, process_group)


def _world() -> Any:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


class _Normalized(Function):  # type: ignore[misc]  # torch is not followed by the type checker
    """Normalization by the mean and variance of all ranks' batches; gradients pass through both."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values = _wide(x)
        # The variance is summed around the mean of all ranks: a difference of large sums would lose its digits.
        total = _summed(group, values.sum(_others(x)), values.new_tensor([values.numel() / x.shape[1]]))
        count = total[-1:]
        if not bool(count >= 2):
            raise ValueError(f"batch normalization needs more than 1 value per channel, and all ranks have {count}")
        mean = total[:-1] / count
        centred = values - _wide_shape(mean, x)
        variance = _summed(group, (centred * centred).sum(_others(x))) / count
        scale = torch.rsqrt(variance + eps)
        normal = centred * _wide_shape(scale, x)
        ctx.save_for_backward(normal, scale, weight, count)
        ctx.group, ctx.dtype = group, x.dtype
        result = normal if weight is None else normal * _wide_shape(weight.to(normal.dtype), x)
        result = result if bias is None else result + _wide_shape(bias.to(normal.dtype), x)
        ctx.mark_non_differentiable(mean, variance, count)
        return result.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, given: Tensor, *_: Any) -> tuple[Any, ...]:
        normal, scale, weight, count = ctx.saved_tensors
        given = _wide(given)
        own_sum = given.sum(_others(given))
        own_dot = (given * normal).sum(_others(given))
        gradient = None
        if ctx.needs_input_grad[0]:
            channels = own_sum.numel()
            total = _summed(ctx.group, own_sum, own_dot) / count
            mean, dot = total[:channels], total[channels:]
            factor = scale if weight is None else scale * weight.to(scale.dtype)
            flat = given - _wide_shape(mean, given) - normal * _wide_shape(dot, given)
            gradient = (flat * _wide_shape(factor, given)).to(ctx.dtype)
        of_weight = own_dot.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        of_bias = own_sum.to(weight.dtype) if weight is not None and ctx.needs_input_grad[2] else None
        return gradient, of_weight, of_bias, None, None


def _wide(x: Tensor) -> Tensor:
    """Return a tensor in which sums are exact enough: half precision becomes float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _others(x: Tensor) -> list[int]:
    """Return all axes but that of channels."""
    return [axis for axis in range(x.dim()) if axis != 1]


def _wide_shape(of_channels: Tensor, x: Tensor) -> Tensor:
    return of_channels.view(1, -1, *[1] * (x.dim() - 2))


def _summed(group: Any, *parts: Tensor) -> Tensor:
    row = torch.cat(parts)
    dist.all_reduce(row, group=group)
    return row
