"""`covey trace`: the last operations of all ranks of a run on one time line, and which rank waited for which."""

from covey.cli.trace.command import app

__all__ = ["app"]
