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
    from covey.torch.elastic import Elastic
    from covey.torch.hooks import compress_hook, rescale_hook, weighted_hook
    from covey.torch.late import who_is_late
    from covey.torch.local_sgd import LocalSGD
    from covey.torch.sampler import ElasticSampler

__all__ = [
    "DiLoCo",
    "Elastic",
    "ElasticSampler",
    "LocalSGD",
    "ProcessGroupCovey",
    "compress_hook",
    "load",
    "register",
    "rescale_hook",
    "save",
    "weighted_hook",
    "who_is_late",
]

_HOMES = {
    "DiLoCo": "covey.torch.diloco",
    "Elastic": "covey.torch.elastic",
    "ElasticSampler": "covey.torch.sampler",
    "LocalSGD": "covey.torch.local_sgd",
    "ProcessGroupCovey": "covey.torch.backend",
    "compress_hook": "covey.torch.hooks",
    "load": "covey.torch.checkpoint",
    "rescale_hook": "covey.torch.hooks",
    "save": "covey.torch.checkpoint",
    "weighted_hook": "covey.torch.hooks",
    "who_is_late": "covey.torch.late",
}
"""Where names live that are loaded on first use: `import torch` comes by here, and should stay quick."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'covey.torch' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


register()
