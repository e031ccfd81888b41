"""Accelerate on covey: `launch` starts the processes, or `prepare` readies those that a launcher has started."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from covey.runtime.keeper.launch import launch as launch_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["launch", "prepare"]


def launch(fn: Callable[..., Any], *args: Any, num_processes: int, timeout: float | None = None) -> list[Any]:
    """Call `fn(*args)` in `num_processes` new processes of this machine, in which Accelerate uses covey.

    Like Accelerate's `notebook_launcher`, but the results are returned, by rank. `fn` must be importable: a function at
    the top level of a module. For several machines, call `prepare` in a script that `covey run` starts.
    """
    return launch_ranks(_call, num_processes, fn, args, timeout=timeout)


def prepare(**options: Any) -> None:
    """Make the process group that `Accelerator()` then uses; call it first. `options` are torch's.

    Accelerate itself would refuse the backend "covey" on a CPU, and ask for MASTER_ADDR, which nothing uses then.
    """
    from covey.integrations.process_group import ready_group  # torch takes seconds to load

    ready_group(**options)
    os.environ.setdefault("MASTER_ADDR", "unused")
    os.environ.setdefault("MASTER_PORT", "0")


def _call(group: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    prepare()
    return fn(*args)
