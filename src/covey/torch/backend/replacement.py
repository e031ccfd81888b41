"""`gloo` means covey: programs that ask torch for another backend by its name get process groups of covey.

torch chooses its own backends by name before it looks at registered ones, in `_new_process_group_helper`. So that
function is wrapped: it is told "covey" where the program said "gloo", and what torch notes of the group, and the group
says of itself, has the name that the program used. Programs that compare `dist.get_backend()` with "gloo" continue to
work.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, Final

from torch.distributed import distributed_c10d as c10d

from covey.base.errors import ConfigError
from covey.torch.entry import NAME

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("covey")

REPLACEABLE: Final = ("gloo",)
"""Backends whose place covey can take: what they can do, covey can do."""


def replace(name: str = "gloo") -> None:
    """Let process groups that are made from now on be covey's where the program asks for backend `name`.

    That holds for `init_process_group("gloo")`, for "cpu:gloo,cuda:nccl" (covey then carries the tensors of all
    devices), for groups without a named backend whose CPU backend would be gloo, as `init_device_mesh` makes them, and
    for `new_group`. A second call does nothing.

    Raises:
        ConfigError: covey cannot take the place of this backend.
    """
    if name not in REPLACEABLE:
        raise ConfigError(f"covey cannot take the place of {name!r}, only of {', '.join(REPLACEABLE)}")
    helper = c10d._new_process_group_helper
    if not hasattr(helper, "__wrapped__"):
        c10d._new_process_group_helper = _replacing(helper, name)


def _replacing(helper: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(helper)
    def made(size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **options: Any) -> Any:
        if not is_meant(str(backend), name):
            return helper(size, rank, ranks, backend, *args, **options)
        asked = c10d.BackendConfig(backend)
        others = sorted(set(map(str, asked.get_device_backend_map().values())) - {name})
        if others:
            logger.info("covey takes the place of %s, and of %s beside it", name, ", ".join(others))
        group, store = helper(size, rank, ranks, c10d.Backend(NAME), *args, **options)
        if isinstance(group, c10d.ProcessGroup) and group.getBackendName() == NAME:
            group.called = name
            c10d._world.pg_map[group] = (backend, c10d._world.pg_map[group][1])
            c10d._world.pg_backend_config[group] = str(asked)
        return group, store

    return made


def is_meant(backend: str, name: str) -> bool:
    """Tell whether torch would use backend `name` for tensors on the CPU, if it were asked for `backend`.

    `backend` is what programs give to `init_process_group`: a name, "undefined", or pairs such as "cpu:gloo,cuda:nccl".
    """
    if backend == name:
        return True
    if backend == c10d.Backend.UNDEFINED or ":" in backend:
        return str(c10d.BackendConfig(c10d.Backend(backend)).get_device_backend_map().get("cpu")) == name
    return False
