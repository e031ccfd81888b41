"""An output stream of the keeper that may fail while the run goes on: a full disk, a reader that has ended.

Bytes that cannot be written are dropped and counted. A stream that failed on a full disk is tried again every few
seconds; once it works, a line in it says how many bytes are missing.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import time
from typing import Final

RETRY_SECONDS: Final = 2.0
"""Pause between attempts to write to a failed stream."""
FOR_GOOD: Final = (errno.EPIPE, errno.EBADF)
"""Errors after which a stream never works again."""


class OutputDescriptor:
    """A descriptor to write to, and its failure, if any."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.failure = ""
        """Why nothing can be written now; "" while writing works."""
        self._dropped = 0
        self._retry_at = 0.0
        self._is_in_line = False
        """Whether the last byte that was written is in an unfinished line."""

    def is_open(self) -> bool:
        """Tell whether to try to write now."""
        return not self.failure or time.monotonic() >= self._retry_at

    def drop(self, data: bytes | memoryview) -> None:
        """Count bytes that are not written."""
        self._dropped += len(data)

    def write(self, data: bytes | memoryview) -> int:
        """Write up to PIPE_BUF bytes, which does not block after `select`; return how many were written.

        After a failure, a line about the missing bytes is written first. If nothing can be written, `failure` says
        why.
        """
        try:
            if self.failure:
                self._report_gap()
            taken = os.write(self.descriptor, data[: select.PIPE_BUF])
        except BlockingIOError:  # another process has made the descriptor non-blocking
            return 0
        except OSError as error:
            self.fail(error)
            return 0
        if taken:
            self._is_in_line = data[taken - 1 : taken] != b"\n"
        return taken

    def fail(self, error: OSError) -> None:
        """Note that nothing can be written for now, or ever again."""
        self.failure = error.strerror or str(error)
        self._retry_at = math.inf if error.errno in FOR_GOOD else time.monotonic() + RETRY_SECONDS

    def _report_gap(self) -> None:
        count = f"{self._dropped} byte{'s' if self._dropped != 1 else ''}"
        text = f"covey: output can be written again; {count} could not be ({self.failure})\n"
        line = ("\n" * self._is_in_line + text).encode()
        if (taken := os.write(self.descriptor, line)) < len(line):
            self._is_in_line = self._is_in_line or taken > 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.failure, self._dropped, self._is_in_line = "", 0, False


def fill_standard_descriptors() -> None:
    """Open missing standard descriptors: else a socket could get such a number, and receive the output."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def is_same_file(one: int, other: int) -> bool:
    """Tell whether two descriptors are of one file; False if one of them is closed."""
    with contextlib.suppress(OSError):
        return os.path.sameopenfile(one, other)
    return False
