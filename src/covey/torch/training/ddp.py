"""What covey changes of DistributedDataParallel: `COVEY_COMPRESS` compresses, built-in hooks work, steps are timed.

torch passes DDP's gradients to a process group as any other sums, which covey does not round. So a hook is registered
with each DDP that has none, before its first backward pass.

torch's built-in hooks are C++, and expect futures that only C++ can make. On a process group of covey, torch's hooks in
Python that compute the same take their place.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from covey.torch.backend.backend import ProcessGroupCovey
from covey.torch.backend.below import covey_group_of
from covey.torch.training.hooks import compress_hook
from covey.torch.training.step_times import StepTimes, gradient_bytes

_times: WeakKeyDictionary[DistributedDataParallel, StepTimes | None] = WeakKeyDictionary()


@functools.cache
def compress_gradients() -> None:
    """Let every DDP on a process group of covey that compresses register `compress_hook` at its first forward pass.

    A program that registers a hook of its own before that keeps it. Calling this again does nothing.
    """
    register_module_forward_pre_hook(_before_forward)


@functools.cache
def serve_builtin_hooks() -> None:
    """Let DDPs on process groups of covey use torch's built-in hooks. Calling this again does nothing."""
    builtin = DistributedDataParallel._register_builtin_comm_hook

    @functools.wraps(builtin)
    def register(self: DistributedDataParallel, comm_hook_type: dist.BuiltinCommHookType) -> Any:
        if not isinstance(self.process_group, ProcessGroupCovey):
            return builtin(self, comm_hook_type)
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # slow to load

        is_plain = comm_hook_type == dist.BuiltinCommHookType.ALLREDUCE
        hook = default_hooks.allreduce_hook if is_plain else default_hooks.fp16_compress_hook
        return self.register_comm_hook(self.process_group, hook)

    DistributedDataParallel._register_builtin_comm_hook = register


@functools.cache
def time_steps() -> None:
    """Let the first steps of every DDP on a process group of covey be timed. Calling this again does nothing."""
    forward = DistributedDataParallel.forward

    @functools.wraps(forward)
    def timed(self: DistributedDataParallel, *inputs: Any, **named: Any) -> Any:
        is_timed = self.training and not torch.compiler.is_compiling()  # a compiler keeps no times
        times = _times_of(self) if is_timed else None
        if times is None:
            return forward(self, *inputs, **named)
        times.begin()
        result = forward(self, *inputs, **named)
        times.forwarded()
        return result

    DistributedDataParallel.forward = timed


def _times_of(ddp: Any) -> StepTimes | None:
    """Return what times the steps of a DDP; None if nothing does, or no longer."""
    if ddp not in _times:
        below = covey_group_of(ddp.process_group)
        _times[ddp] = StepTimes(below, gradient_bytes(ddp)) if below is not None and below.size > 1 else None
    times = _times[ddp]
    return None if times is None or times.is_over else times


def _before_forward(module: Any, _inputs: Any) -> None:
    if isinstance(module, DistributedDataParallel) and not hasattr(module, "_covey_looked"):
        module._covey_looked = True
        _register(module)


def _register(ddp: DistributedDataParallel) -> None:
    # A DDP that torch.compile reduces in Python calls hooks with other arguments.
    if not getattr(ddp.process_group, "compresses", False) or getattr(ddp, "_use_python_reducer", False):
        return
    if not getattr(ddp, "_comm_hooks", None):
        with contextlib.suppress(RuntimeError):  # one of torch's built-in hooks is registered
            ddp.register_comm_hook(ddp.process_group, compress_hook(None, model=ddp.module))
