"""`covey demo`: a few local processes train one small model together, shown live.

`app` is the command. It is imported on first use, because every rank imports this package for its worker and needs no
terminal view.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from covey.lab.demo.command import app as app


def __getattr__(name: str) -> object:
    if name == "app":
        from covey.lab.demo.command import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
