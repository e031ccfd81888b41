"""Locks on files: for a moment, or for as long as their holder lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import weakref
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError
from covey.net.host.descriptors import explain

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK_SECONDS: Final = 10.0


@contextlib.contextmanager
def only_one(path: Path, *, setting: str = "COVEY_HOME") -> Iterator[None]:
    """Let one process at a time run the `with` block; `path` is the lock file, which stays.

    Raises:
        ConfigError: it cannot be locked, or another process holds it for 10 s. `setting` names the variable to change.
    """
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritable(path, setting, error) from error
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while not try_lock(lock, path, setting=setting):
            if time.monotonic() > deadline:
                raise ConfigError(f"another process of yours keeps {path} locked; is it stopped?")
            time.sleep(0.002)
        yield
    finally:
        os.close(lock)


def _unwritable(path: Path, setting: str, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {path}: {explain(error)}; set {setting} to a folder of yours")


def try_lock(descriptor: int, path: Path, *, setting: str = "COVEY_HOME") -> bool:
    """Lock an open file until it is closed; False if the lock is held elsewhere."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(f"files like {path} cannot be locked: {explain(error)}; set {setting} elsewhere") from error
    return True


class LockHolder:
    """Holds a lock on a file by an open descriptor; a forked child gives it up."""

    def __init__(self, lock: int = -1) -> None:
        self._lock = lock
        _holders.add(self)

    @classmethod
    def take(cls, path: Path, taken: str, *, setting: str = "COVEY_HOME") -> LockHolder:
        """Lock the file `path`, which stays; ConfigError that says `taken` if another process has locked it."""
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unwritable(path, setting, error) from error
        holder = cls(lock)
        try:
            if try_lock(lock, path, setting=setting):
                return holder
        except ConfigError:
            holder.let_go()
            raise
        holder.let_go()
        raise ConfigError(taken)

    def let_go(self) -> None:
        """Release the lock, if it is held."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def forked(self) -> None:
        """Close the descriptor in a forked child: a lock lasts as long as any process has it open, so the child would
        hold the lock of its dead parent."""
        self.let_go()


_holders: weakref.WeakSet[LockHolder] = weakref.WeakSet()


def _forget_in_child() -> None:
    for holder in list(_holders):
        holder.forked()
    _holders.clear()


os.register_at_fork(after_in_child=_forget_in_child)
