"""How torch learns that there is a backend "covey": at `import torch`, or when `covey.torch` is imported."""

from __future__ import annotations

from typing import Any, Final

NAME: Final = "covey"


def register() -> None:
    """Make "covey" known to torch.distributed. More than once is fine.

    torch calls this while it is being imported, so nothing else is loaded before a process group is asked for.
    """
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _pg_options: Any) -> Any:
    from covey.torch.backend import create

    return create(options)
