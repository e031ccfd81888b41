"""Waiting in tests: for a cause, never for a time.

A limit here is a guard against hangs. It decides nothing else: no test passes or fails because a machine is slow, or
stands still for some seconds. A test whose subject is a timeout of covey sets that timeout, and looks at what happened
in which order.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

HANG: Final = 600.0
"""Seconds after which a test hangs: it fails, and the stacks of its processes are printed (`tests.support.guard`)."""
DEADLINE: Final = 500.0
"""Seconds after which a test gives up waiting, and tells what it waited for; also a timeout that is never reached."""
LOOK_EVERY: Final = 0.01
"""Seconds between two looks at what a test waits for."""


def wait_until(condition: Callable[[], object], story: Callable[[], object] | str = "not in time") -> None:
    """Return when a condition is true. `story` tells why it is not, if the wait is given up."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, story if isinstance(story, str) else story()
        time.sleep(LOOK_EVERY)
