"""How many random courses of events a test tries: a few in each run of all tests, more with TEST_SEEDS.

`make simulate` tries twenty times as many in the simulations of protocols (`SEEDS=100` for more); hypothesis and some
tests that repeat what may go wrong now and then heed it, too. Seeds count from 0, so that more of them include the
fewer, and a message of a failure names the seed that repeats it.
"""

from __future__ import annotations

import os
from typing import Any, Final

from tests.support.sets import first

TIMES: Final = int(os.environ.get("TEST_SEEDS", "1"))


def seeds(count: int) -> range:
    """Return as many seeds, or TEST_SEEDS times as many."""
    return range(count * TIMES)


def examples(count: int) -> int:
    """Return how many examples hypothesis tries: a third of them in `make test`."""
    return len(seeds(count if "TEST_FEWER" not in os.environ else -(-count // 3)))


def batches(count: int) -> list[Any]:
    """Return numbers of batches of seeds, for `parametrize`: only the first one is in `make test`."""
    return first(1, seeds(count))
