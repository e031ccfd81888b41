"""A rate limit for log lines that other machines can cause."""

from __future__ import annotations

import logging
import time

from covey.base import pace
from covey.base.text import printable

logger = logging.getLogger("covey")


class LimitedLog:
    """One kind of line: written at most once in some seconds, and counted in between."""

    def __init__(self, seconds: float, *, most: int = 2000) -> None:
        """Write at most one line in `seconds`, of at most `most` characters."""
        self._seldom, self._most = pace.Seldom(seconds), most

    def log(self, level: int, text: str, *args: object) -> bool:
        """Write a line, unless one was written within the limit; tell whether it was written."""
        if not self._seldom.may(time.monotonic()):
            return False
        unsaid, self._seldom.unsaid = self._seldom.unsaid, 0
        note = f" ({unsaid} more like this were left out)" if unsaid else ""
        logger.log(level, "%s%s", printable(text % args, self._most), note)
        return True
