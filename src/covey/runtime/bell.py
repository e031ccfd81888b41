"""A descriptor that wakes whoever polls it."""

from __future__ import annotations

import contextlib
import os
import threading

WORD = b"\1\0\0\0\0\0\0\0"


class Bell:
    """Opened by the one who polls, rung by anybody; rung before it is open, it rings when it is opened."""

    def __init__(self, descriptors: list[int]) -> None:
        """`descriptors` are closed by the owner, who outlives the bell; this one adds its own."""
        self.fd = -1
        """What to poll: readable from `ring` until `hush`; -1 until it is opened."""
        self._write_fd = -1
        self._is_rung = False
        self._lock = threading.Lock()
        self._descriptors = descriptors

    def open(self) -> None:
        """Make the descriptor, if there is none yet."""
        with self._lock:
            if self.fd >= 0:
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
        """Wake whoever polls, and all who will until it is hushed."""
        with self._lock:  # the number may mean another file once it is closed
            self._is_rung = True
            if self._write_fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._write_fd, WORD)

    def hush(self) -> None:
        """Be silent again."""
        with self._lock:
            self._is_rung = False
            if self.fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    while os.read(self.fd, 4096) and self.fd != self._write_fd:
                        pass

    def close(self) -> None:
        """Forget the descriptors, which the owner closes."""
        with self._lock:
            self.fd = self._write_fd = -1

    def forked(self) -> None:
        """Another thread may have held the lock in the process that this one was forked from."""
        self._lock = threading.Lock()
