"""The folder for sockets and locks of runs, and the errors when it cannot be used."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError, CoveyError
from covey.net.descriptors import explain

if TYPE_CHECKING:
    from collections.abc import Iterator

ADVICE: Final = "set TMPDIR or XDG_RUNTIME_DIR to a folder that you can write"
TMPDIR_ADVICE: Final = "set TMPDIR to a folder that you can write"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def temporary_folder() -> str:
    """Return the folder for temporary files: TMPDIR, or what the system has.

    Raises:
        ConfigError: there is none that can be written; says why not. The folder where the program happens to be started
            is not taken: processes that meet in a folder of this host must find the same one.
    """
    usual = [folder for name in ("TMPDIR", "TEMP", "TMP") if (folder := os.environ.get(name))] + ["/tmp", "/var/tmp"]
    with contextlib.suppress(FileNotFoundError):
        import tempfile  # slow to load: it loads compression, too

        found = tempfile.gettempdir()
        if found != os.path.abspath(os.curdir) or found in usual:
            return found
    problems = ", ".join(f"{folder} ({_problem(folder)})" for folder in dict.fromkeys(usual))
    raise ConfigError(f"no folder for temporary files can be written: {problems}. Free some space, or {TMPDIR_ADVICE}")


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
    try:
        import tempfile  # slow to load: it loads compression, too

        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"covey")
    except OSError as error:
        return explain(error)
    return "it can be written now"
