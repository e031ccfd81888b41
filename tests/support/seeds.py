"""How many random courses of events a simulation plays: a few in each run of the tests, more with TEST_SEEDS.

`make simulate` plays twenty times as many (`SEEDS=100` for more). Seeds count from 0, so that more of them include the
fewer, and a message of a failure names the seed that repeats it.
"""

from __future__ import annotations

import os
from typing import Final

TIMES: Final = int(os.environ.get("TEST_SEEDS", "1"))


def seeds(count: int) -> range:
    """Return as many seeds, or TEST_SEEDS times as many."""
    return range(count * TIMES)
