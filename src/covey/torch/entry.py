"""Registers the backend "covey" and the address scheme `covey://` with torch, at `import torch` or `covey.torch`."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME: Final = "covey"

LAUNCHED: Final = "COVEY_LAUNCHED"
"""Names the run in which the workers of torchrun agents that met through covey, or of an engine, meet in turn."""

AS: Final = "COVEY_AS"
"""Names the backend whose place covey takes."""


def register() -> None:
    """Register "covey" with torch.distributed. A second call does nothing.

    torch calls this while it is being imported, so nothing else is loaded before a process group is made.
    """
    import torch.distributed as dist

    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    rendezvous = import_module("torch.distributed.rendezvous")  # a function of the same name hides the module
    rendezvous.register_rendezvous_handler(NAME, _meet)
    handlers = rendezvous._rendezvous_handlers
    handlers["env"] = _meet_as_launched(handlers["env"])
    if replaced := os.environ.get(AS):
        from covey.torch.backend.replacement import replace

        replace(replaced)


def is_launched() -> bool:
    """Tell whether `covey run` or `covey worker` started this process."""
    return any(name in os.environ for name in ("COVEY_RANK", "COVEY_RUN", "COVEY_WORKER"))


def _has_joined() -> bool:
    bootstrap = sys.modules.get("covey.runtime.joining.bootstrap")  # a process that has not loaded it has not joined
    return bootstrap is not None and bootstrap.joined() is not None


def _create(options: Any, _pg_options: Any) -> Any:
    from covey.torch.backend.backend import create
    from covey.torch.backend.work import torchs_errors
    from covey.torch.training.ddp import serve_builtin_hooks, time_steps

    with torchs_errors():
        made = create(options)
    serve_builtin_hooks()
    time_steps()
    if made.compresses:
        from covey.torch.training.ddp import compress_gradients

        compress_gradients()
    return made


def _meet(url: str, **options: Any) -> Iterator[Any]:
    from covey.torch.backend.rendezvous import meet
    from covey.torch.backend.work import torchs_errors

    with torchs_errors():
        yield from meet(url, **options)


def _meet_as_launched(torchs: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Return a handler of env:// that uses covey if covey knows the ranks and no other launcher has set them."""

    def handler(url: str, **options: Any) -> Iterator[Any]:
        from covey.runtime.joining.torch_env import is_given

        is_told = "RANK" in os.environ and not is_given(os.environ)
        is_ours = LAUNCHED in os.environ or (not is_told and (is_launched() or _has_joined()))
        return (_meet if is_ours else torchs)(url, **options)

    return handler
