"""Lines of a log that others can cause: each kind at most every so many seconds, whatever they do."""

from __future__ import annotations

import logging
import time

from covey.base import pace
from covey.base.text import printable

logger = logging.getLogger("covey")


class LimitedLog:
    """One kind of line: written when it is news, counted otherwise."""

    def __init__(self, seconds: float, *, most: int = 2000) -> None:
        """A line has at most `most` characters."""
        self._seldom, self._most = pace.Seldom(seconds), most

    def log(self, level: int, text: str, *args: object) -> bool:
        """Write a line, unless one was written a moment ago; tell whether it was."""
        if not self._seldom.may(time.monotonic()):
            return False
        unsaid, self._seldom.unsaid = self._seldom.unsaid, 0
        note = f" ({unsaid} more like this were left out)" if unsaid else ""
        logger.log(level, "%s%s", printable(text % args, self._most), note)
        return True
