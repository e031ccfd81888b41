"""`.coveyignore`: which files of a working folder are not sent. Patterns as in `.gitignore`; no I/O."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

FILE_NAME: Final = ".coveyignore"
LINES_LIMIT: Final = 1000
ALWAYS: Final = (".git/", ".hg/", "__pycache__/", "*.pyc", ".venv/", "venv/", ".mypy_cache/", ".pytest_cache/")
"""Patterns before those of the file, which can undo them with `!`."""


class IgnoreRules:
    """Tells which paths are left out. The last pattern that matches a path decides.

    A file in a folder that is left out cannot be taken in again, as with git.
    """

    def __init__(self, lines: Iterable[str] = ()) -> None:
        """Read patterns, one a line; ConfigError if there are too many, or one cannot be read."""
        read = list(lines)
        if len(read) > LINES_LIMIT:
            raise ConfigError(f"{FILE_NAME} has {len(read)} lines; it may have {LINES_LIMIT}")
        self._rules = [rule for line in (*ALWAYS, *read) if (rule := _rule(line)) is not None]

    def ignores(self, path: str, *, is_folder: bool) -> bool:
        """Tell whether a path, relative to the working folder, is left out."""
        verdict = False
        for is_left_out, folders_only, matches in self._rules:
            if (is_folder or not folders_only) and matches.fullmatch(path):
                verdict = is_left_out
        return verdict


def _rule(line: str) -> tuple[bool, bool, re.Pattern[str]] | None:
    """Return whether a pattern leaves out, whether it is for folders only, and what it matches; None for no pattern."""
    text = line.rstrip("\r\n")
    text = text if text.endswith("\\ ") else text.rstrip(" ")
    if not text or text.startswith("#"):
        return None
    is_left_out = not text.startswith("!")
    text = text.removeprefix("!")
    folders_only = text.endswith("/")
    read = read_pattern(text, FILE_NAME)
    return None if read is None else (is_left_out, folders_only, read[1])


def read_pattern(text: str, where: str) -> tuple[bool, re.Pattern[str]] | None:
    """Return whether a pattern is a path from the working folder on, and what it matches; None if it is empty.

    Raises:
        ConfigError: it cannot be read.
    """
    pattern = text.rstrip("/")
    is_anchored = "/" in pattern
    pattern = pattern.removeprefix("/")
    if not pattern:
        return None
    try:
        return is_anchored, re.compile(("" if is_anchored else "(?:.*/)?") + _regex(pattern), re.DOTALL)
    except re.error as error:
        raise ConfigError(f"{where}: the pattern {text.strip()!r} cannot be read: {error}") from None


def _regex(pattern: str) -> str:
    """Return a regular expression for a pattern: `*` and `?` stop at `/`, `**` does not."""
    made, i = "", 0
    while i < len(pattern):
        rest = pattern[i:]
        if rest.startswith("**/") and (i == 0 or pattern[i - 1] == "/"):
            made, i = made + "(?:.*/)?", i + 3
        elif rest == "**" and (i == 0 or pattern[i - 1] == "/"):
            made, i = made + ".*", i + 2
        elif rest[0] == "*":
            made, i = made + "[^/]*", i + len(rest) - len(rest.lstrip("*"))
        elif rest[0] == "?":
            made, i = made + "[^/]", i + 1
        elif rest[0] == "[" and (end := pattern.find("]", i + 2)) > 0:
            inner = pattern[i + 1 : end].replace("\\", "\\\\").replace("[", "\\[")
            inner = "^/" + inner[1:] if inner[0] in "!^" else inner
            made, i = f"{made}[{inner}]", end + 1
        elif rest[0] == "\\" and len(rest) > 1:
            made, i = made + re.escape(rest[1]), i + 2
        else:
            made, i = made + re.escape(rest[0]), i + 1
    return made
