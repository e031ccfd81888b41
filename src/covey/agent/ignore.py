"""Files of a working folder that are not sent: those that `.coveyignore` names, and those that look sensitive. No I/O.

`.coveyignore` has patterns as in `.gitignore`. Keys, passwords, histories and browser profiles are sent only if a
person names them.
"""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

IGNORE_FILE: Final = ".coveyignore"
IGNORE_LINES_LIMIT: Final = 1000
ALWAYS: Final = (".git/", ".hg/", "__pycache__/", "*.pyc", ".venv/", "venv/", ".mypy_cache/", ".pytest_cache/")
"""Patterns before those of the file, which can undo them with `!`."""
SENSITIVE_NAMES: Final = (
    *(".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".config", ".password-store", ".kaggle"),
    *(".netrc", "_netrc", ".pgpass", ".pypirc", ".npmrc", ".git-credentials", ".vault-token"),
    *(".env", ".env.*", ".*_history"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.p12", "*.pfx", "*.kdbx", "*.keychain-db"),
    *(".mozilla", ".thunderbird", "key3.db", "key4.db", "logins.json", "cookies.sqlite", "Login Data"),
)
"""Names of files and folders that may hold secrets, at any depth, in upper or lower case."""
PROFILE_MARKS: Final = ("key3.db", "key4.db", "cookies.sqlite", "places.sqlite", "Login Data")
"""A folder that has a file of one of these names is the profile of a browser."""
HEAD_BYTES: Final = 4096
"""How much of a file shows whether it is a private key."""
_SENSITIVE: Final = re.compile("|".join(fnmatch.translate(name.casefold()) for name in SENSITIVE_NAMES))
_KEY: Final = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*"
    rb"(?:-{4,5} ?BEGIN [A-Z0-9 ]*PRIVATE KEY|PuTTY-User-Key-File-|AGE-SECRET-KEY-|openssh-key-v1\0)"
)


class IgnoreRules:
    """Tells which paths are left out. The last pattern that matches a path decides.

    A file in a folder that is left out cannot be taken in again, as with git.
    """

    def __init__(self, lines: Iterable[str] = ()) -> None:
        """Read patterns, one a line; ConfigError if there are too many, or one cannot be read."""
        read = list(lines)
        if len(read) > IGNORE_LINES_LIMIT:
            raise ConfigError(f"{IGNORE_FILE} has {len(read)} lines; it may have {IGNORE_LINES_LIMIT}")
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
    read = read_pattern(text, IGNORE_FILE)
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


def is_private_key(head: bytes) -> bool:
    """Tell whether a file that begins so is a private key: PEM, OpenSSH, PGP, PuTTY or age."""
    return _KEY.match(head) is not None


class SensitiveRules:
    """Tells which paths of a working folder may hold secrets, and which of these a person has named."""

    def __init__(self, includes: Iterable[str] = ()) -> None:
        """Read the patterns of --include, as in `.coveyignore`; ConfigError if one cannot be read.

        A pattern without `/` names files and folders of that name at any depth, but not inside a folder that is left
        out; one with `/` is the path of a file or folder.
        """
        self._includes: dict[str, tuple[bool, re.Pattern[str]]] = {}
        self._unused: dict[str, None] = {}
        for text in includes:
            read = read_pattern(text[1:] if text.startswith("./") else text, "--include")
            if read is None or text.startswith(("!", "#")):
                raise ConfigError(f"--include {text!r} names no file; write its path in the folder that is sent")
            self._includes[text], self._unused[text] = read, None

    @property
    def unused(self) -> list[str]:
        """The patterns that have named nothing sensitive so far."""
        return list(self._unused)

    def at(self, path: str) -> list[int]:
        """Return the positions of the parts of a path whose names are sensitive."""
        return [number for number, part in enumerate(path.split("/")) if _SENSITIVE.match(part.casefold())]

    def covers(self, path: str, at: Sequence[int]) -> bool:
        """Tell whether a person has named all of the sensitive parts of a path, which are at these positions."""
        parts = path.split("/")
        used, deepest = list[str](), -1
        for text, (is_anchored, pattern) in self._includes.items():
            if is_anchored:
                named = [end for end in range(len(parts)) if pattern.fullmatch("/".join(parts[: end + 1]))]
                if named and at and named[-1] >= at[0]:
                    used.append(text)
                    deepest = max(deepest, named[-1])
        plain = [(text, pattern) for text, (is_anchored, pattern) in self._includes.items() if not is_anchored]
        for number in at:
            names = [text for text, pattern in plain if pattern.fullmatch(parts[number])]
            if not names and number > deepest:
                return False
            used += names
        for text in used:
            self._unused.pop(text, None)
        return True

    def may_name_below(self, folder: str) -> bool:
        """Tell whether a person may have named something in a sensitive folder, by its path."""
        return any(is_anchored and _reaches(text, folder) for text, (is_anchored, _) in self._includes.items())


def _reaches(pattern: str, folder: str) -> bool:
    """Tell whether a pattern with `/` can match something below a folder."""
    wanted = pattern.removeprefix("./").strip("/").split("/")
    parts = folder.split("/")
    for number, part in enumerate(parts):
        if number >= len(wanted):
            return False
        if wanted[number] == "**":
            return True
        if not fnmatch.fnmatchcase(part, wanted[number]):
            return False
    return len(wanted) > len(parts)
