"""What torch asks a process group about itself. torch keeps this in a C++ backend, which covey's groups do not have.

`torch.distributed.checkpoint.async_save` asks a group for its devices before it starts a thread, which calls
collectives whenever it has written something. In the group of the training they would meet the operations of other
ranks. torch asks users to pass a second group; on covey, one is made if none is passed.
"""

from __future__ import annotations

import functools
import sys
from datetime import timedelta
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from covey.arrays.torch_devices import DEVICE_KINDS
from covey.torch.entry import NAME

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


class DescribedProcessGroup(dist.ProcessGroup):  # type: ignore[misc]  # torch is not followed by the type checker
    """A process group that knows its rank, size, name, store and devices."""

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def __init__(self, rank: int, size: int, name: str, store: Any) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name, self._desc, self._store = rank, size, name, "", store
        self.called = NAME
        """The name of the backend that the program asked for: another one's, if covey takes its place."""

    def getBackendName(self) -> str:  # noqa: N802
        return NAME  # C++ takes a group of this name for its own, and looks into it

    def name(self) -> str:
        return self.called

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size  # noqa: N815

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def get_group_store(self) -> Any:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        serve_async_saves(DescribedProcessGroup)
        return [
            torch.device(kind) for kind in DEVICE_KINDS if kind == "cpu" or torch.get_device_module(kind).is_available()
        ]

    def _get_backend(self, _device: torch.device) -> Self:
        return self

    def supports_tensor_alloc(self, _device: torch.device) -> bool:
        return False
