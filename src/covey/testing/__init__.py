"""Tools to test programs that use covey: whole groups inside one process."""

from covey.testing.threads import run_threads

__all__ = ["run_threads"]
