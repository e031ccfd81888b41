"""The process group that the libraries use, and covey's group below it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from covey.base.errors import ConfigError
from covey.runtime.joining.torch_env import TORCH_VARIABLES
from covey.torch.backend.below import covey_group_of

if TYPE_CHECKING:
    from covey.runtime.group.group import Group


def ready_group(**options: Any) -> Group:
    """Return the group below torch's default process group, which is made with backend "covey" if there is none.

    `options` are those of `torch.distributed.init_process_group`.

    Raises:
        ConfigError: there is a default process group, and it has another backend.
    """
    if not dist.is_initialized():
        dist.init_process_group("covey", **options)
    below = covey_group_of()
    if below is None:
        raise ConfigError(
            f'the default process group has backend "{dist.get_backend()}"; make it with '
            'torch.distributed.init_process_group("covey"), or let covey make it'
        )
    return below


def as_one_machine() -> None:
    """Let libraries train as if there were one process: `covey.torch.train_together` joins the ranks itself.

    Call it before anything of the library is made. It then makes no process group, and wraps no model.

    Raises:
        ConfigError: torchrun has started this process, which joins the ranks by the variables that would be removed.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError("train_together in a library needs covey's launcher: start the script with `covey run`")
    for name in TORCH_VARIABLES:
        os.environ.pop(name, None)
