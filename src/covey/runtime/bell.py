"""A descriptor that wakes the thread which polls it."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

NEWS_CHECK_EVERY: Final = 0.01
"""How often a thread that waits for news checks whether it has come."""
WORD = b"\1\0\0\0\0\0\0\0"


class Bell:
    """Opened by the polling thread, rung by any thread. If it is rung before it is open, it rings when it is opened.

    A bell that is dropped closes its descriptors: a part that can ring it keeps it, so no other file has its number.
    """

    def __init__(self) -> None:
        self.fd = -1
        """The descriptor to poll: readable from `ring` until `hush`; -1 until `open`."""
        self._write_fd = -1
        self._is_rung = self._is_closed = False
        self._lock = threading.Lock()
        self._descriptors: list[int] = []
        self._dropped = weakref.finalize(self, _close_all, self._descriptors)

    def open(self) -> None:
        """Make the descriptor, if there is none yet; a closed bell has none."""
        with self._lock:
            if self.fd >= 0 or self._is_closed:
                return
            if hasattr(os, "eventfd"):
                self.fd = self._write_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            else:
                self.fd, self._write_fd = os.pipe()
                os.set_blocking(self.fd, False)
                os.set_blocking(self._write_fd, False)
            self._descriptors += {self.fd, self._write_fd}
            if self._is_rung:
                os.write(self._write_fd, WORD)

    def ring(self) -> None:
        """Make the descriptor readable until `hush`."""
        with self._lock:  # its number may belong to another file once it is closed
            self._is_rung = True
            if self._write_fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._write_fd, WORD)

    def hush(self) -> None:
        """Make the descriptor unreadable again."""
        with self._lock:
            self._is_rung = False
            if self.fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    while os.read(self.fd, 4096) and self.fd != self._write_fd:
                        pass

    def await_news(self, seconds: float, has_come: Callable[[], bool]) -> None:
        """Return once `has_come()` is true, or after `seconds`. The bell may make that earlier."""
        poll = select.poll()
        if self.fd >= 0:
            poll.register(self.fd, select.POLLIN)
        until, looks = time.monotonic() + seconds, seconds / NEWS_CHECK_EVERY
        # `looks`: if this process is suspended meanwhile, its control loop must get time to read the news afterwards.
        while not has_come() and (time.monotonic() < until or looks > 0):
            if poll.poll(1e3 * NEWS_CHECK_EVERY):
                # It has rung, and rings until it is hushed: the control loop needs the interpreter.
                poll = select.poll()
            looks -= 1

    def close(self) -> None:
        """Close the descriptors; no thread may be polling them."""
        with self._lock:
            self._is_closed = True
            self.fd = self._write_fd = -1
            _close_all(self._descriptors)

    def forked(self) -> None:
        """Replace the lock after a fork: another thread of the parent may have held it. The parent has its own copy."""
        self._lock = threading.Lock()


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
