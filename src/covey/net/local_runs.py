"""The runs of `covey run -n` on this host, by name, for commands of the same user.

The keeper of a run describes it in two files of its private folder: `about` has its process id, its number of ranks and
its name; `token` has what proves membership. No other user may enter the folder. A description counts as long as the
keeper holds its lock.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import Final, NamedTuple

from covey.base.errors import ConfigError
from covey.base.text import printable
from covey.net.run_folder import LOOKED_AT, PREFIX, TOKEN, base_folders, has_keeper, is_of_this_user

ABOUT: Final = "about"
TOKEN_LIMIT: Final = 64
ABOUT_LIMIT: Final = 1000
MOST_RANKS: Final = 1 << 16


class LocalRunFound(NamedTuple):
    """A run that goes on here."""

    name: str
    pid: int
    """Of its keeper."""
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
    for file, text in ((TOKEN, token), (ABOUT, f"{os.getpid()} {size} {printable(name, 100)}".encode())):
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
            names = [entry.name for entry in itertools.islice(entries, LOOKED_AT) if entry.name.startswith(PREFIX)]
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
        raise ConfigError(f"{len(found)} runs {name!r} go on here; name one by its process: {pids}")
    return found[0] if found else None


def _read_about(folder: str) -> LocalRunFound:
    """Read the description of a run; OSError or ValueError if the folder has none, or the run is over."""
    if not is_of_this_user(os.lstat(folder)) or not has_keeper(folder):
        raise ValueError("not a run of this user that goes on")
    pid, size, name = _read(os.path.join(folder, ABOUT), ABOUT_LIMIT).decode().split(" ", 2)
    if not 0 < int(size) < MOST_RANKS:
        raise ValueError(f"{size} ranks")
    return LocalRunFound(name, int(pid), int(size), folder)


def _read(path: str, limit: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(descriptor, limit)
    finally:
        os.close(descriptor)
