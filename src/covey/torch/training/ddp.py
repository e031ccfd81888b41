"""What covey changes of DistributedDataParallel: `COVEY_COMPRESS` compresses gradients, and built-in hooks work.

torch passes DDP's gradients to a process group as any other sums, which covey does not round. So a hook is registered
with each DDP that has none, before its first backward pass.

torch's built-in hooks are C++, and expect futures that only C++ can make. On a process group of covey, torch's hooks in
Python that compute the same take their place.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from covey.torch.backend.backend import ProcessGroupCovey
from covey.torch.training.hooks import compress_hook


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
