"""One of the keeper's own output streams, which may fail while the run must go on: a full disk, a reader that ended.

What cannot be written is dropped and counted. A stream that failed for want of space is tried again now and then; once
it takes bytes again, a line in it tells how many are missing.
"""

from __future__ import annotations

import errno
import math
import os
import select
import time
from typing import Final

RETRY_SECONDS: Final = 2.0
"""Pause between attempts to write to a stream that has failed."""
FOR_GOOD: Final = (errno.EPIPE, errno.EBADF)
"""Errors of a stream that never takes a byte again."""


class Outlet:
    """A descriptor to write to, and what is known of its failure."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.failure = ""
        """Why nothing can be written now; empty while that works."""
        self._dropped = 0
        self._retry_at = 0.0
        self._is_in_line = False
        """The last byte that was written did not end a line."""

    def is_open(self) -> bool:
        """Tell whether to try to write now."""
        return not self.failure or time.monotonic() >= self._retry_at

    def drop(self, data: bytes | memoryview) -> None:
        """Give up bytes that were to be written."""
        self._dropped += len(data)

    def write(self, data: bytes | memoryview) -> int:
        """Write up to PIPE_BUF bytes, which does not block where select saw room; return how many were taken.

        After a failure the missing bytes are told of first, on a line of their own. If nothing can be written,
        `failure` tells why.
        """
        try:
            if self.failure:
                self._tell_of_gap()
            taken = os.write(self.descriptor, data[: select.PIPE_BUF])
        except BlockingIOError:  # another process has set the descriptor so
            return 0
        except OSError as error:
            self.fail(error)
            return 0
        if taken:
            self._is_in_line = data[taken - 1 : taken] != b"\n"
        return taken

    def fail(self, error: OSError) -> None:
        """Take it that nothing can be written for now, or ever again."""
        self.failure = error.strerror or str(error)
        self._retry_at = math.inf if error.errno in FOR_GOOD else time.monotonic() + RETRY_SECONDS

    def _tell_of_gap(self) -> None:
        count = f"{self._dropped} byte{'s' if self._dropped != 1 else ''}"
        text = f"covey: output can be written again; {count} could not be ({self.failure})\n"
        line = ("\n" * self._is_in_line + text).encode()
        if (taken := os.write(self.descriptor, line)) < len(line):
            self._is_in_line = self._is_in_line or taken > 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.failure, self._dropped, self._is_in_line = "", 0, False
