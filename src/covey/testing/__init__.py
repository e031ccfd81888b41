"""Tools to test programs that use covey: whole groups inside one process, and nodes without a network."""

from covey.testing.calls import LinkedNodes
from covey.testing.threads import run_threads

__all__ = ["LinkedNodes", "run_threads"]
