"""Training that can be compared: of several ranks, and of one process that sees the same batches whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 4
ROWS = 12
"""In a batch of all ranks together: a multiple of any number of ranks that is tested."""


def start(rank: int, size: int, store: str, backend: str = "covey", **options: Any) -> None:
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, **options)


def small_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step))


def share(rank: int, size: int) -> slice:
    """Return which rows of a batch are this rank's."""
    return slice(rank, None, size)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@dataclass
class Trace:
    """What training went through: of all ranks, so the same on each of them."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[list[torch.Tensor]] = field(default_factory=list)
    """By step, in the order of parameters; zeros where there is none."""
    parameters: list[torch.Tensor] = field(default_factory=list)
    moments: list[torch.Tensor] = field(default_factory=list)
    """All that the optimizer keeps."""

    def close_to(self, other: Trace, rtol: float = 1e-4, atol: float = 1e-5) -> None:
        """Fail unless both went through the same."""
        for kind in ("losses", "gradients", "parameters", "moments"):
            torch.testing.assert_close(
                getattr(self, kind), getattr(other, kind), rtol=rtol, atol=atol, msg=lambda text, kind=kind: kind + text
            )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, of all of a tensor that is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module, int], torch.Tensor] | None = None,
    *,
    rows: slice = slice(None),
    optimizer: torch.optim.Optimizer | None = None,
    is_mean: bool = True,
) -> Trace:
    """Train for some steps, on these rows of every batch; the loss recorded is the mean of all ranks' if `is_mean`."""
    optimizer = optimizer or adam(model)
    loss_of = loss_of or (lambda model, step: model(batch(step)[rows]).square().mean())
    trace = Trace()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if loss.requires_grad:
            loss.backward()
        trace.losses.append(average(loss) if is_mean and rows != slice(None) else whole(loss))
        trace.gradients.append(
            [whole(torch.zeros_like(p) if p.grad is None else p.grad) for p in model.parameters() if p.requires_grad]
        )
        optimizer.step()
    trace.parameters = [whole(p) for p in model.parameters()]
    trace.moments = moments(optimizer)
    return trace


def average(loss: torch.Tensor) -> torch.Tensor:
    mean = whole(loss)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return mean


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all tensors that the optimizer keeps, in the order of parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [whole(value) for p in parameters for _, value in sorted(optimizer.state[p].items())]
