"""A descriptor that wakes the thread which polls it."""

from __future__ import annotations

import contextlib
import os
import threading

WORD = b"\1\0\0\0\0\0\0\0"


class Bell:
    """Opened by the polling thread, rung by any thread. If it is rung before it is open, it rings when it is opened."""

    def __init__(self, descriptors: list[int]) -> None:
        """Add its descriptors to `descriptors`, which the owner closes after the bell."""
        self.fd = -1
        """The descriptor to poll: readable from `ring` until `hush`; -1 until `open`."""
        self._write_fd = -1
        self._is_rung = self._is_closed = False
        self._lock = threading.Lock()
        self._descriptors = descriptors

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

    def close(self) -> None:
        """Forget the descriptors, which the owner closes next."""
        with self._lock:
            self._is_closed = True
            self.fd = self._write_fd = -1

    def forked(self) -> None:
        """Replace the lock after a fork: another thread of the parent may have held it."""
        self._lock = threading.Lock()
