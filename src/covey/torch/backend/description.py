"""What torch asks a process group about itself. torch keeps this in a C++ backend, which covey's groups do not have."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.distributed as dist

from covey.arrays.torch_devices import DEVICE_KINDS
from covey.torch.backend.async_saves import serve_async_saves
from covey.torch.entry import NAME


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
