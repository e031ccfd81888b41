"""PyTorch on covey: the backend of `torch.distributed.init_process_group("covey")`, and helpers for training.

Importing this package registers the backend. An installed covey registers it at `import torch`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from covey.torch.entry import register

if TYPE_CHECKING:
    from covey.torch.backend.backend import ProcessGroupCovey
    from covey.torch.backend.below import who_is_late
    from covey.torch.backend.replacement import replace
    from covey.torch.training.batch_norm import SyncBatchNorm, convert_sync_batchnorm
    from covey.torch.training.checkpoint import load, save
    from covey.torch.training.diloco import DiLoCo
    from covey.torch.training.elastic import Elastic
    from covey.torch.training.hooks import compress_hook, rescale_hook, weighted_hook
    from covey.torch.training.local_sgd import LocalSGD
    from covey.torch.training.replica import ModelReplica
    from covey.torch.training.sampler import ElasticSampler
    from covey.torch.training.strategy import ProcessGroupStrategy
    from covey.torch.training.together import TrainTogether, train_together

__all__ = [
    "DiLoCo",
    "Elastic",
    "ElasticSampler",
    "LocalSGD",
    "ModelReplica",
    "ProcessGroupCovey",
    "ProcessGroupStrategy",
    "SyncBatchNorm",
    "TrainTogether",
    "compress_hook",
    "convert_sync_batchnorm",
    "load",
    "register",
    "replace",
    "rescale_hook",
    "save",
    "train_together",
    "weighted_hook",
    "who_is_late",
]

_TORCH_HOMES = {
    "DiLoCo": "covey.torch.training.diloco",
    "Elastic": "covey.torch.training.elastic",
    "ElasticSampler": "covey.torch.training.sampler",
    "LocalSGD": "covey.torch.training.local_sgd",
    "ModelReplica": "covey.torch.training.replica",
    "ProcessGroupCovey": "covey.torch.backend.backend",
    "ProcessGroupStrategy": "covey.torch.training.strategy",
    "SyncBatchNorm": "covey.torch.training.batch_norm",
    "TrainTogether": "covey.torch.training.together",
    "convert_sync_batchnorm": "covey.torch.training.batch_norm",
    "compress_hook": "covey.torch.training.hooks",
    "load": "covey.torch.training.checkpoint",
    "replace": "covey.torch.backend.replacement",
    "rescale_hook": "covey.torch.training.hooks",
    "save": "covey.torch.training.checkpoint",
    "train_together": "covey.torch.training.together",
    "weighted_hook": "covey.torch.training.hooks",
    "who_is_late": "covey.torch.backend.below",
}
"""The modules of names that are loaded on first use: `import torch` imports this package, and must stay fast."""


def __getattr__(name: str) -> Any:
    if name not in _TORCH_HOMES:
        raise AttributeError(f"module 'covey.torch' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_TORCH_HOMES[name]), name)
    return value


register()
