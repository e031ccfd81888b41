"""Sockets that a forked child must not keep: they would hide this process's death from its peers."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import socket

LEAST_PRUNED: Final = 256

# References without callbacks, unlike a WeakSet's: Python ignores a KeyboardInterrupt that arrives in a callback, and
# sockets go while people wait for operations that they may want to interrupt.
_tracked: list[weakref.ref[socket.socket]] = []
_tracking = threading.Lock()
_prune_at = LEAST_PRUNED


def track(sock: socket.socket) -> socket.socket:
    """Close `sock` in every child that this process forks. Returns it."""
    global _prune_at
    with _tracking:
        _tracked.append(weakref.ref(sock))
        if len(_tracked) >= _prune_at:
            _tracked[:] = [reference for reference in _tracked if reference() is not None]
            _prune_at = max(LEAST_PRUNED, 2 * len(_tracked))
    return sock


def _close_in_child() -> None:
    global _tracking
    _tracking = threading.Lock()  # another thread of the parent may have held it
    # Only close: an orderly shutdown would say goodbye in the parent's name.
    for reference in _tracked:
        sock = reference()
        descriptor = sock.detach() if sock is not None else -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    _tracked.clear()


os.register_at_fork(after_in_child=_close_in_child)
