"""`covey demo`: a few local processes train one small model together, and you watch.

`app` is the command. It is imported when asked for, because every rank imports this package to get at its worker and
has no use for a terminal view.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from covey.cli.demo.command import app as app


def __getattr__(name: str) -> object:
    if name == "app":
        from covey.cli.demo.command import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
