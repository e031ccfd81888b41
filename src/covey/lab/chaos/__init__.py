"""`covey chaos`: runs a job, breaks its processes and connections, and reports what survived.

`faults` plans the faults of a run from its seed, and an `injector` performs them. `command_run` runs a command of the
user, whose events tell what became of it. `checked_run` runs `workload` instead, on this machine or on `hosts` made of
namespaces: every process records the outcome of each operation (`records`), and `checker` compares all records with
each other and with the exact values (`operations`). Both give one `report`.

`app` is the command. It is imported on first use, because `covey bench recovery` needs only `processes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from covey.lab.chaos.command import app as app


def __getattr__(name: str) -> object:
    if name == "app":
        from covey.lab.chaos.command import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
