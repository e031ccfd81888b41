"""Runs of `covey run -n` on this host: the private folder of each, and how commands of the same user find it by name.

The keeper of a run holds a lock in its folder as long as it lives, and describes the run in two files there: `about`
has its process id, its number of ranks and its name; `token` has what proves membership. No other user may enter the
folder. A description counts as long as the keeper holds its lock.

A killed keeper cannot remove its folder, so the next one that makes a folder beside it does. Only folders that are
certainly abandoned are removed: made by this user, on this machine since its last boot, some time ago, with a lock that
no process holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import socket
import stat
import tempfile
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.base.errors import ConfigError
from covey.base.text import printable
from covey.net.host.descriptors import explain
from covey.net.host.folders import FOLDER_ADVICE, host_folder, temporary_folder
from covey.net.host.locks import LockHolder

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN_FOLDER_PREFIX: Final = "covey-run-"
KEEPER_LOCK: Final = "keeper.lock"
TOKEN: Final = "token"
"""The file with what proves membership."""
FOLDER_PATH_BYTES: Final = 75
"""Longest path of a run's folder. A unix socket's path may have 103 bytes, so its name in the folder may have 27."""
YOUNG_FOLDER_SECONDS: Final = 60.0
"""Folders that changed within this time are left alone: their keeper may be about to lock them."""
LOOKED_AT: Final = 4096
"""The most names that are read in one folder."""
_MARK_TRIES: Final = 100
RUN_FILE: Final = "about"
TOKEN_LIMIT: Final = 64
RUN_FILE_LIMIT: Final = 1000
LOCAL_RANKS_LIMIT: Final = 1 << 16


class RunFolder(LockHolder):
    """A new folder that only this user may enter."""

    def __init__(self) -> None:
        """Make the folder, and remove abandoned ones beside it.

        Raises:
            ConfigError: no folder can be made.
        """
        super().__init__()
        self.path = self._make()
        with contextlib.suppress(OSError):
            sweep(os.path.dirname(self.path))

    def remove(self) -> None:
        """Remove the folder with its contents. Removing it twice is fine."""
        if self.path:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path = ""
        self.let_go()

    def forked(self) -> None:
        super().forked()
        self.path = ""  # it belongs to the parent

    def _make(self) -> str:
        problems: dict[str, str] = {}
        for base in base_folders():
            try:
                for _ in range(_MARK_TRIES if _is_guarded(base) else 0):
                    folder = tempfile.mkdtemp(prefix=RUN_FOLDER_PREFIX, dir=base)
                    if len(os.fsencode(folder)) > FOLDER_PATH_BYTES:
                        os.rmdir(folder)
                        problems[base] = "its path is too long for a socket's"
                        break
                    if self._take(folder):
                        return folder
            except OSError as error:
                problems[base] = explain(error)
            problems.setdefault(base, "other users could replace a folder there")
        told = ", ".join(f"{base} ({problem})" for base, problem in problems.items())
        raise ConfigError(f"no folder for a run's sockets can be made: {told}. Free some space, or {FOLDER_ADVICE}")

    def _take(self, folder: str) -> bool:
        """Lock a new folder; tell whether it still exists: this process may have been stopped for long."""
        path = os.path.join(folder, KEEPER_LOCK)
        try:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(
                OSError
            ):  # some file systems have no locks; folders there are never removed by others
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._lock, _this_machine())
            if os.path.samestat(os.stat(path), os.fstat(self._lock)):
                return True
        except FileNotFoundError:
            pass
        except BaseException:
            self.let_go()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.let_go()
        return False


def base_folders() -> Iterator[str]:
    """Yield folders in which a run may have its folder, best first, each once; lazily."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime:
        yield runtime
    if (shared := host_folder()) != runtime:
        yield shared
    if (temporary := temporary_folder()) not in (runtime, shared):
        yield temporary
    if "/tmp" not in (runtime, shared, temporary):
        yield "/tmp"


def sweep(base: str) -> None:
    """Remove the folders of runs in `base` whose keepers have ended.

    Raises:
        OSError: `base` cannot be read.
    """
    with os.scandir(base) as entries:
        names = [
            entry.name for entry in itertools.islice(entries, LOOKED_AT) if entry.name.startswith(RUN_FOLDER_PREFIX)
        ]
    for name in names:
        with contextlib.suppress(OSError):
            _sweep_one(os.path.join(base, name))


def is_of_this_user(status: os.stat_result) -> bool:
    """Tell whether a file of this status is a folder that this user has made, and that no other may enter."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700


def has_keeper(folder: str) -> bool:
    """Tell whether the keeper of the run in this folder lives, on this machine; OSError if there is no lock."""
    with contextlib.ExitStack() as held:
        lock = _open(os.path.join(folder, KEEPER_LOCK), held)
        if os.read(lock, 256) != _this_machine():
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _sweep_one(folder: str) -> None:
    status = os.lstat(folder)
    if not is_of_this_user(status):
        return
    is_old = time.time() >= status.st_mtime + YOUNG_FOLDER_SECONDS
    with contextlib.ExitStack() as held:
        try:
            lock = _open(os.path.join(folder, KEEPER_LOCK), held)
        except FileNotFoundError:
            if is_old:
                os.rmdir(folder)  # works only if it is empty: its keeper was killed as it started
            return
        if os.read(lock, 256) != _this_machine():
            return  # of another machine, or no folder of a run
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, TOKEN))  # a keeper writes it after its lock: this one has ended
        if not is_old:
            return
        for name in os.listdir(folder):
            if name.endswith(".lock") and name != KEEPER_LOCK:
                # Ranks have locks, too: where they do not die with their keeper, they may still run.
                fcntl.flock(_open(os.path.join(folder, name), held), fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)


def _open(path: str, held: contextlib.ExitStack) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    held.callback(os.close, descriptor)
    return descriptor


def _this_machine() -> bytes:
    """Return a name for this machine and boot: other machines may share its folders."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname().encode()


def _is_guarded(base: str) -> bool:
    """Tell whether no other user could replace a folder in `base`."""
    if not os.path.isabs(base):
        return False
    info = os.stat(base)
    others_may_write = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return info.st_uid in (0, os.geteuid()) and (not others_may_write or bool(info.st_mode & stat.S_ISVTX))


class LocalRunFound(NamedTuple):
    """A run that goes on here."""

    name: str
    pid: int
    """Process id of its keeper."""
    size: int
    folder: str

    def token(self) -> bytes:
        """Return what proves membership; ConfigError if the run is over."""
        try:
            return _read(os.path.join(self.folder, TOKEN), TOKEN_LIMIT)
        except OSError as error:
            raise ConfigError(f"the run {self.name!r} of process {self.pid} is over") from error


def describe(folder: str, name: str, size: int, token: bytes) -> None:
    """Describe the run of this process in its folder; OSError if that cannot be written."""
    for file, text in ((TOKEN, token), (RUN_FILE, f"{os.getpid()} {size} {printable(name, 100)}".encode())):
        descriptor = os.open(os.path.join(folder, file), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, text)
        finally:
            os.close(descriptor)


def local_runs() -> list[LocalRunFound]:
    """Return the runs of this user that go on here, by name and process."""
    found = []
    for base in dict.fromkeys(map(os.path.realpath, base_folders())):
        with contextlib.suppress(OSError), os.scandir(base) as entries:
            names = [
                entry.name for entry in itertools.islice(entries, LOOKED_AT) if entry.name.startswith(RUN_FOLDER_PREFIX)
            ]
            for name in names:
                with contextlib.suppress(OSError, ValueError):
                    found.append(_read_about(os.path.join(base, name)))
    return sorted(found)


def find_local_run(name: str) -> LocalRunFound | None:
    """Return the run of this name, or of the keeper with this process id; None if there is none.

    Raises:
        ConfigError: several runs have this name.
    """
    found = [run for run in local_runs() if name in (run.name, str(run.pid))]
    if len(found) > 1:
        pids = " and ".join(str(run.pid) for run in found)
        raise ConfigError(f"{len(found)} runs {name!r} are running here; name one by its process: {pids}")
    return found[0] if found else None


def _read_about(folder: str) -> LocalRunFound:
    """Read the description of a run; OSError or ValueError if the folder has none, or the run is over."""
    if not is_of_this_user(os.lstat(folder)) or not has_keeper(folder):
        raise ValueError("not a running run of this user")
    pid, size, name = _read(os.path.join(folder, RUN_FILE), RUN_FILE_LIMIT).decode().split(" ", 2)
    if not 0 < int(size) < LOCAL_RANKS_LIMIT:
        raise ValueError(f"{size} ranks")
    return LocalRunFound(name, int(pid), int(size), folder)


def _read(path: str, limit: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(descriptor, limit)
    finally:
        os.close(descriptor)
