"""Accelerate on covey: `launch` starts the processes, or `prepare` readies those that a launcher has started."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from covey.runtime.keeper.launch import launch as launch_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["launch", "prepare", "tracker"]


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


def tracker() -> Any:
    """Return a tracker of Accelerate that reports what `accelerator.log` gets: `Accelerator(log_with=tracker())`.

    Accelerate logs on its first rank only, so that rank reports for all. Call `prepare` before.
    """
    from accelerate.tracking import GeneralTracker

    from covey.integrations.process_group import ready_group
    from covey.runtime.group.internals import report_for_program

    group = ready_group()

    class CoveyTracker(GeneralTracker):  # type: ignore[misc]  # Accelerate is not followed by mypy
        """Passes values on to the group."""

        name, requires_logging_directory = "covey", False

        @property
        def tracker(self) -> Any:
            return group

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            """Do nothing: settings are no series."""

        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            """Report the values that are numbers."""
            report_for_program(group, step, values)

    return CoveyTracker()


def _call(group: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    prepare()
    return fn(*args)
