"""Sockets that a forked child must not keep: they would hide this process's death from its peers."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

_tracked: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def track(sock: socket.socket) -> socket.socket:
    """Close `sock` in every child that this process forks. Returns it."""
    _tracked.add(sock)
    return sock


def _close_in_child() -> None:
    # Only close: an orderly shutdown would say goodbye in the parent's name.
    for sock in list(_tracked):
        descriptor = sock.detach()
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    _tracked.clear()


os.register_at_fork(after_in_child=_close_in_child)
