"""`covey bench`: how fast the collectives are here, alone or side by side with gloo and Open MPI."""

from typing import Any


def __getattr__(name: str) -> Any:
    # The ranks import this package too, and must not pay for the command line's libraries.
    if name == "app":
        from covey.cli.bench.command import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
