"""Which paths a member may name in a working folder. No I/O.

A path has one spelling and stays inside: two paths of a list never mean one file, on any file system, whatever it does
about case or about letters that can be written in two ways.
"""

from __future__ import annotations

import unicodedata
from typing import Final

from covey.agent.requests import PATH_BYTES
from covey.base.errors import ConfigError
from covey.base.text import printable

NAME_BYTES: Final = 255
"""Of one part of a path: file systems take no more."""
DEPTH_LIMIT: Final = 32


def check_path(path: str) -> tuple[str, ...]:
    """Return the parts of a relative path; ConfigError if it is not the plain path of a file below a folder."""
    parts = tuple(path.split("/"))
    problem = _problem(path, parts)
    if problem:
        raise ConfigError(f"the path {printable(path, 200)!r} cannot be sent: {problem}")
    return parts


def _problem(path: str, parts: tuple[str, ...]) -> str:
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        return "it is no UTF-8"
    if sum(sizes) + len(sizes) - 1 > PATH_BYTES or max(sizes) > NAME_BYTES or len(parts) > DEPTH_LIMIT:
        return f"it is longer than {PATH_BYTES} bytes, {NAME_BYTES} for a name, or deeper than {DEPTH_LIMIT} folders"
    if path.startswith("/"):
        return "it is absolute"
    if any(part in ("", ".", "..") for part in parts):
        return "it has a part that is empty, `.` or `..`"
    if any(unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") for letter in path):
        return "it has letters that cannot be seen"
    if "\\" in path or (len(parts[0]) > 1 and parts[0][1] == ":"):
        return "it could mean another folder on another system"
    if unicodedata.normalize("NFC", path) != path:
        return "it has letters that can be written in two ways; rename it to the composed form (NFC)"
    return ""


class PathSet:
    """The paths of one list: each is checked, and none of them means the same file or a folder of another one."""

    def __init__(self) -> None:
        self._files: dict[str, str] = {}
        self._folders: dict[str, str] = {}
        """By the form that ignores case: the first spelling."""

    def add(self, path: str) -> tuple[str, ...]:
        """Return the parts of a path; ConfigError if it cannot be used, or collides with another one."""
        parts = check_path(path)
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            other = self._files.get(_folded(folder)) or self._folders.setdefault(_folded(folder), folder)
            if other != folder or _folded(folder) in self._files:
                raise _collision(other, folder)
        key = _folded(path)
        if (found := self._files.get(key) or self._folders.get(key)) is not None:
            raise _collision(found, path)
        self._files[key] = path
        return parts


def _collision(one: str, other: str) -> ConfigError:
    return ConfigError(f"the paths {printable(one, 200)!r} and {printable(other, 200)!r} mean one file on some systems")


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFKC", path).casefold())
