"""`torch.distributed.checkpoint.async_save` beside training: its thread gets a process group of its own.

The thread of an asynchronous save calls collectives whenever it has written something. In the group of the training
they would meet the operations of other ranks. torch asks users to pass a second group; on covey, one is made if none is
passed.
"""

from __future__ import annotations

import functools
import sys
from datetime import timedelta
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch.distributed as dist

APART_SECONDS: Final = 300.0
"""How long an asynchronous save waits for the other ranks."""
_EXECUTOR: Final = "torch.distributed.checkpoint._async_thread_executor"

_apart: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""For each group that saved asynchronously, a second group of the same ranks."""


def apart(group: Any) -> Any:
    """Return a second group of the ranks of `group`, whose operations may run beside its own. Every rank calls it."""
    if group not in _apart:
        backend = "gloo" if dist.get_backend(group) == "nccl" else None  # the staged state is in host memory
        ranks = dist.get_process_group_ranks(group)
        # torch names a group of all ranks by a counter that is equal on all of them. It names a group of some ranks
        # by these and by a count that may differ between them; then the group is not made, and this timeout ends.
        is_whole = len(ranks) == dist.get_world_size()
        _apart[group] = dist.new_group(
            None if is_whole else ranks,
            timeout=timedelta(seconds=APART_SECONDS),
            backend=backend,
            use_local_synchronization=not is_whole,
        )
    return _apart[group]


def serve_async_saves(kind: type) -> None:
    """Let saves of torch's thread, without a process group or in the default one, be apart if that is a `kind`.

    `async_save` asks the group for its devices before it starts the thread, and the group calls this then: the module
    is loaded by that time, and takes two seconds to load otherwise. A second call does nothing.
    """
    module = sys.modules.get(_EXECUTOR)
    if module is not None:
        _wrap(module._ThreadBasedAsyncCheckpointExecutor, kind)


@functools.cache
def _wrap(executor: Any, kind: type) -> None:
    execute = executor.execute_save

    @functools.wraps(execute)
    def execute_save(self: Any, *args: Any, process_group: Any = None, **options: Any) -> Any:
        group = process_group
        is_default = dist.is_initialized() and group in (None, dist.group.WORLD) and not options.get("no_dist")
        if is_default and isinstance(dist.group.WORLD, kind):
            group = apart(dist.group.WORLD)
        return execute(self, *args, process_group=group, **options)

    executor.execute_save = execute_save
