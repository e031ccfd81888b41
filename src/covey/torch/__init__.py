"""PyTorch on covey: `torch.distributed.init_process_group("covey")`, and everything on top of it as it is.

Importing this package registers the backend; an installed covey registers it at `import torch` already.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from covey.torch.entry import register

if TYPE_CHECKING:
    from covey.torch.backend import ProcessGroupCovey
    from covey.torch.checkpoint import load, save
    from covey.torch.diloco import DiLoCo
    from covey.torch.local_sgd import LocalSGD
    from covey.torch.sampler import ElasticSampler

__all__ = ["DiLoCo", "ElasticSampler", "LocalSGD", "ProcessGroupCovey", "load", "register", "save"]

_HOMES = {
    "DiLoCo": "covey.torch.diloco",
    "ElasticSampler": "covey.torch.sampler",
    "LocalSGD": "covey.torch.local_sgd",
    "ProcessGroupCovey": "covey.torch.backend",
    "load": "covey.torch.checkpoint",
    "save": "covey.torch.checkpoint",
}
"""Where names live that are loaded on first use: `import torch` comes by here, and should stay quick."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'covey.torch' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


register()
