"""What `COVEY_COMPRESS` means for DistributedDataParallel: gradients are compressed, with feedback.

torch passes DDP's gradients to a process group as any other sums, which covey does not round. So a hook is registered
with each DDP that has none, before its first backward pass.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from covey.torch.training.hooks import compress_hook


@functools.cache
def compress_gradients() -> None:
    """Let every DDP on a process group of covey that compresses register `compress_hook` at its first forward pass.

    A program that registers a hook of its own before that keeps it. Calling this again does nothing.
    """
    register_module_forward_pre_hook(_before_forward)


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
