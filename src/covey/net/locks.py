"""Locks on files: for a moment, or for as long as their holder lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import weakref
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError
from covey.net.descriptors import explain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK_SECONDS: Final = 10.0


@contextlib.contextmanager
def only_one(path: Path, *, setting: str = "COVEY_HOME") -> Iterator[None]:
    """Let one process at a time do a few file operations; `path` is the lock, and stays.

    Raises:
        ConfigError: it cannot be locked, or another process keeps it for 10 s. `setting` is what chooses another place.
    """
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {explain(error)}; set {setting} to a folder of yours") from error
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while not try_lock(lock, path, setting=setting):
            if time.monotonic() > deadline:
                raise ConfigError(f"another process of yours keeps {path} locked; is it stopped?")
            time.sleep(0.002)
        yield
    finally:
        os.close(lock)


def try_lock(descriptor: int, path: Path, *, setting: str = "COVEY_HOME") -> bool:
    """Lock an open file until it is closed; False if another opening of it has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(f"files like {path} cannot be locked: {explain(error)}; set {setting} elsewhere") from error
    return True


class LockHolder:
    """Has a file locked by an open descriptor, while it holds one."""

    def __init__(self, lock: int = -1) -> None:
        self._lock = lock
        _holders.add(self)

    def let_go(self) -> None:
        """Give the lock up, if there is one."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def forked(self) -> None:
        """This is a fork of the process that locked. A lock stays for as long as any process has the descriptor, so a
        child would keep what its dead parent had taken."""
        self.let_go()


_holders: weakref.WeakSet[LockHolder] = weakref.WeakSet()


def _forget_in_child() -> None:
    for holder in list(_holders):
        holder.forked()
    _holders.clear()


os.register_at_fork(after_in_child=_forget_in_child)
