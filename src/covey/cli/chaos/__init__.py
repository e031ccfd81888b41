"""`covey chaos`: runs a job, does to its processes what happens to processes, and tells what survived.

`app` is the command. It is imported when asked for: `covey bench recovery` uses the parts without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from covey.cli.chaos.command import app as app


def __getattr__(name: str) -> object:
    if name == "app":
        from covey.cli.chaos.command import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
