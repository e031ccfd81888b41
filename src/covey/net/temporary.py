"""The folders for temporary files and for what processes of one host share, and the errors when they cannot be used."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError, CoveyError
from covey.net.descriptors import explain

if TYPE_CHECKING:
    from collections.abc import Iterator

ADVICE: Final = "set XDG_RUNTIME_DIR to a folder that you can write, for all processes of the run"
TMPDIR_ADVICE: Final = "set TMPDIR to a folder that you can write"
HOST_FOLDERS: Final = ("/run/user/{uid}", "/tmp", "/var/tmp")
"""Where processes of one user on one host meet if XDG_RUNTIME_DIR does not say; the first that can be written."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def temporary_folder() -> str:
    """Return the folder for temporary files: TMPDIR, or what the system has.

    Raises:
        ConfigError: there is none that can be written; says why not. The folder where the program happens to be started
            is not taken.
    """
    usual = [folder for name in ("TMPDIR", "TEMP", "TMP") if (folder := os.environ.get(name))] + ["/tmp", "/var/tmp"]
    with contextlib.suppress(FileNotFoundError):
        import tempfile  # slow to load: it loads compression, too

        found = tempfile.gettempdir()
        if found != os.path.abspath(os.curdir) or found in usual:
            return found
    found_now = "it can be written now"
    problems = ", ".join(f"{folder} ({_problem(folder) or found_now})" for folder in dict.fromkeys(usual))
    raise ConfigError(f"no folder for temporary files can be written: {problems}. Free some space, or {TMPDIR_ADVICE}")


def host_folder() -> str:
    """Return the folder in which processes of this user on this host meet: they share sockets, locks and tokens there.

    XDG_RUNTIME_DIR, which systemd sets to `/run/user/UID` in some processes of a user and not in others; without it
    the first of `HOST_FOLDERS`. TMPDIR decides only where none of them can be written: processes of one run may have
    different ones, and have to meet all the same.

    Raises:
        ConfigError: there is none that can be written; says why not.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK):
        return runtime
    for place in HOST_FOLDERS:
        folder = place.format(uid=os.getuid())
        if _takes_files(folder):
            return folder
    return temporary_folder()


def _takes_files(folder: str) -> bool:
    """Tell whether a file can be written in a folder. What was true once stays so: a process must not move later."""
    if folder not in _proven and os.path.isdir(folder) and not _problem(folder):
        _proven.add(folder)
    return folder in _proven


_proven: Final[set[str]] = set()
"""Folders in which this process has written a file."""


@contextlib.contextmanager
def writing_to(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Raise ConfigError with the folder, the reason and a remedy if the `with` block cannot write to it."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CoveyError):
            raise
        raise ConfigError(unwritable(folder, error)) from error


def unwritable(folder: str | os.PathLike[str], error: OSError) -> str:
    """Return the message that a folder cannot be written: why, and what to do."""
    is_full = error.errno in _FULL
    return f"cannot write to {os.fspath(folder)}: {explain(error)}; {'free some space there, or ' * is_full}{ADVICE}"


def _problem(folder: str) -> str:
    """Return why no file can be written in a folder; empty if one can."""
    try:
        import tempfile  # slow to load: it loads compression, too

        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"covey")
    except OSError as error:
        return explain(error)
    return ""
