"""The cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return how many cores the threads of this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
