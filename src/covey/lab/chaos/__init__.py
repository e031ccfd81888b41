"""`covey chaos`: runs a job, breaks its processes and connections, and reports what survived.

`app` is the command. It is imported on first use, because `covey bench recovery` needs only the other parts.
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
