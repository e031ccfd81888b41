"""`covey bench`: measures the collectives on this machine, alone or side by side with gloo and Open MPI."""

from typing import Any


def __getattr__(name: str) -> Any:
    # The ranks import this package too, and need not load the libraries of the command line.
    if name == "app":
        from covey.lab.bench.command import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
