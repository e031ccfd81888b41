"""Files that are not sent unless a person names them: keys, passwords, histories, browser profiles. No I/O."""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING, Final

from covey.agent.ignore import read_pattern
from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NAMES: Final = (
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
_NAME: Final = re.compile("|".join(fnmatch.translate(name.casefold()) for name in NAMES))
_KEY: Final = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*"
    rb"(?:-{4,5} ?BEGIN [A-Z0-9 ]*PRIVATE KEY|PuTTY-User-Key-File-|AGE-SECRET-KEY-|openssh-key-v1\0)"
)


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
        return [number for number, part in enumerate(path.split("/")) if _NAME.match(part.casefold())]

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
