"""Memory shared between ranks that are threads of one process: handed over by name instead of by descriptor."""

from __future__ import annotations

import secrets
import threading

_offered: dict[str, bytearray] = {}
_lock = threading.Lock()


def offer(nbytes: int) -> tuple[str, bytearray]:
    """Allocate memory that another rank of this process can `take`; return its name and the memory."""
    name, memory = secrets.token_hex(16), bytearray(nbytes)
    with _lock:
        _offered[name] = memory
    return name, memory


def take(name: str) -> bytearray | None:
    """Return the memory that was offered under `name`, and forget the name; None if there is none."""
    with _lock:
        return _offered.pop(name, None)
