"""Reads covey.toml: of the working folder, and of the user's configuration folder.

A file is used only if it belongs to this user or to root, and no other user can write to it: a stranger's file in a
shared folder like /tmp must not change how covey works.
"""

from __future__ import annotations

import os
import stat
from collections import ChainMap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from covey.base.config import from_file
from covey.base.errors import ConfigError
from covey.base.settings import SETTINGS_FILE
from covey.net.host.descriptors import explain
from covey.net.host.folders import home_path

if TYPE_CHECKING:
    from collections.abc import MutableMapping

_SETTINGS_FILE_BYTES: Final = 1 << 16


def effective_environment() -> MutableMapping[str, str]:
    """Return the environment of this process, with the settings of both covey.toml below it, as COVEY_ variables.

    What is written to or removed from it is written to or removed from the environment.

    Raises:
        ConfigError: a file cannot be used; the text names the file and the setting.
    """
    return ChainMap(os.environ, *settings_of_files().values())


def settings_of_files() -> dict[str, dict[str, str]]:
    """Return the settings of each covey.toml by its path, as COVEY_ variables; the working folder's comes first."""
    folders, users = _working_folder(), _users_folder()
    found = {}
    for folder in dict.fromkeys((folders, users)):
        if folder is not None and (content := _read(folder / SETTINGS_FILE)):
            found[str(folder / SETTINGS_FILE)] = from_file(
                content, str(folder / SETTINGS_FILE), is_users=folder == users
            )
    return found


def _working_folder() -> Path | None:
    try:
        return Path.cwd()
    except OSError:  # it was removed
        return None


def _users_folder() -> Path | None:
    try:
        return home_path().resolve()
    except ConfigError:  # this user has no home folder
        return None


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a file; nothing if there is none."""
    import shlex  # slow to load, and rarely needed

    try:
        _check_owner(path, path.lstat())  # of a link too: another user may have put it there
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe must not block
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {explain(error)}; make it readable, or move it away") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _SETTINGS_FILE_BYTES:
            raise ConfigError(f"{path} is not a file of settings; move it away")
        _check_owner(path, status)
        if status.st_mode & 0o022:
            raise ConfigError(
                f"{path} can be changed by other users (mode {stat.S_IMODE(status.st_mode):04o}); "
                f"run: chmod go-w {shlex.quote(str(path))}"
            )
        content = os.read(descriptor, _SETTINGS_FILE_BYTES)
    finally:
        os.close(descriptor)
    import tomllib  # slow to load, and few have such a file

    try:
        return tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{path} belongs to user {status.st_uid}, and you are {os.geteuid()}; move it away, put a copy of your own "
            "there, or work in another folder"
        )
