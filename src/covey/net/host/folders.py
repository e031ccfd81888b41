"""Folders of this machine: for temporary files, for what processes of one host share, and for this user's keys.

Wrong permissions of private files are an error and never repaired: a key that others could read may have been read.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError, CoveyError
from covey.base.version import NewerFormatError, check_format, newer_file
from covey.net.host.descriptors import explain, with_the_spare

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER_ADVICE: Final = "set XDG_RUNTIME_DIR to a folder that you can write, for all processes of the run"
TMPDIR_ADVICE: Final = "set TMPDIR to a folder that you can write"
HOST_FOLDERS: Final = ("/run/user/{uid}", "/tmp", "/var/tmp")
"""Where processes of one user on one host meet if XDG_RUNTIME_DIR does not say; the first that can be written."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_proven: Final[set[str]] = set()
"""Folders in which this process has written a file."""
_PRIVATE_FILE_BYTES: Final = 1 << 20
KEY_FORMAT: Final = 1
"""The format of files with keys."""


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
    advice = f"free some space there, or {FOLDER_ADVICE}" if error.errno in _FULL else FOLDER_ADVICE
    return f"cannot write to {os.fspath(folder)}: {explain(error)}; {advice}"


def _problem(folder: str) -> str:
    """Return why no file can be written in a folder; empty if one can."""
    try:
        import tempfile  # slow to load: it loads compression, too

        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(b"covey")
    except OSError as error:
        return explain(error)
    return ""


def home() -> Path:
    """Return covey's configuration folder, made if missing: $COVEY_HOME, $XDG_CONFIG_HOME/covey or ~/.config/covey.

    Raises:
        ConfigError: other users may enter it, it belongs to another user, or it cannot be made.
    """
    return private_folder(home_path())


def existing(name: str = "") -> Path:
    """Return the configuration folder, or the folder `name` in it, for reading: checked if it exists, never made.

    Raises:
        ConfigError: it exists, and other users may enter it, or it belongs to another user.
    """
    folder = _check_folder(home_path())
    return _check_folder(folder / name) if name else folder


def home_path() -> Path:
    """Return the path of the configuration folder, which need not exist."""
    if chosen := os.environ.get("COVEY_HOME"):
        return Path(chosen).absolute()
    config = os.environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(config):  # the XDG standard says to ignore relative paths
        return Path(config) / "covey"
    try:
        return Path.home() / ".config" / "covey"
    except RuntimeError:
        raise ConfigError("this user has no home folder for covey's keys; set COVEY_HOME to a folder") from None


def private_folder(folder: Path) -> Path:
    """Return `folder`, made if missing, if only this user can enter it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {explain(error)}; set COVEY_HOME to another") from error
    return _check_folder(folder)


def _check_folder(folder: Path) -> Path:
    """Return `folder` if only this user can enter it, or if it does not exist."""
    import shlex  # slow to load, and rarely needed

    try:
        status = folder.stat()
    except FileNotFoundError:
        return folder
    except OSError as error:
        raise ConfigError(f"cannot use the folder {folder}: {explain(error)}; set COVEY_HOME to another") from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{folder} is not a folder; move it away, or set COVEY_HOME to another place")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"{folder} belongs to user {status.st_uid}, and you are {os.geteuid()}; set COVEY_HOME to a folder of yours"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{folder} holds keys, and others may enter it (mode {stat.S_IMODE(status.st_mode):04o}); "
            f"run: chmod 700 {shlex.quote(str(folder))}"
        )
    return folder


def read_private(path: Path, *, may_be_mounted: bool = False, most: int = _PRIVATE_FILE_BYTES) -> bytes:
    """Return the content of a file that only this user can read.

    With `may_be_mounted` it may also be a secret as container engines mount it: perhaps by way of a link, a file of
    root that is read-only and closed to all users outside its group.

    Raises:
        FileNotFoundError: there is none.
        ConfigError: other users can read it, it belongs to another user, is no regular file, or cannot be read.
    """
    try:
        # O_NONBLOCK: opening a pipe without a writer would block.
        links = 0 if may_be_mounted else os.O_NOFOLLOW
        descriptor = os.open(path, os.O_RDONLY | links | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else explain(error)
        raise ConfigError(f"cannot read {path}: {reason}; put a file of yours with mode 0600 there") from error
    try:
        status = os.fstat(descriptor)
        if not (may_be_mounted and _is_mounted_secret(status)):
            check_private(path, status, most=most)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def key_words(path: Path) -> list[bytes]:
    """Return the words of a file with a key: the private half, and the public one; perhaps `format=N` after them.

    Raises:
        FileNotFoundError, ConfigError: as `read_private`; or a later release has written the file.
    """
    words = read_private(path).split()
    if len(words) > 2 and (number := words[2].removeprefix(b"format=")).isdigit() and len(number) < 9:
        try:
            check_format(int(number), KEY_FORMAT)
        except NewerFormatError as error:
            raise newer_file(path, error) from None
    return words


def _is_mounted_secret(status: os.stat_result) -> bool:
    is_closed = status.st_mode & (0o777 & ~(stat.S_IRUSR | stat.S_IRGRP)) == 0
    return stat.S_ISREG(status.st_mode) and status.st_uid == 0 and is_closed and status.st_size <= _PRIVATE_FILE_BYTES


def check_private(path: Path, status: os.stat_result, *, most: int = _PRIVATE_FILE_BYTES) -> None:
    """Raise a ConfigError unless this is the status of a private file of this user."""
    import shlex  # slow to load, and rarely needed

    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path} is not a file; put a file of yours with mode 0600 there")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to user {status.st_uid}, and you are {os.geteuid()}; put a copy of your own there"
        )
    if stat.S_IMODE(status.st_mode) & 0o177:
        raise ConfigError(
            f"{path} is private, and others may read it (mode {stat.S_IMODE(status.st_mode):04o}); "
            f"run: chmod 600 {shlex.quote(str(path))}"
        )
    if status.st_size > most:
        raise ConfigError(f"{path} has {status.st_size} bytes, far more than any file of covey's; move it away")


def write_private(path: Path, data: bytes, *, otherwise: str = "set COVEY_HOME elsewhere") -> None:
    """Write `data` to a private file atomically: after a crash it has the old content or the new.

    The ConfigError for one that cannot be written says to make room, or what to do `otherwise`.
    """
    try:
        with_the_spare(functools.partial(_write, path, data))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {explain(error)}; make room, or {otherwise}") from error


def _write(path: Path, data: bytes) -> None:
    import tempfile  # slow to load, and rarely needed

    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
