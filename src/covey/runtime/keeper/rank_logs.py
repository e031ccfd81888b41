"""Log files of a run, one for each rank (`covey run --log-dir`).

What cannot be written, because the disk is full for instance, is counted. The run continues; a line in its output says
so at once, another in the file as soon as it can be written again, and the exit code of the run is not 0.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from pathlib import Path
from typing import Final

from covey.base.errors import ConfigError

RANK_LOGS_LIMIT: Final = 4096
"""Labels come from other machines; beyond this many, all others go into one file."""
_RANK: Final = re.compile(r"(?:(.+) )?(\d{1,6})")


class RankLogs:
    """Appends output to files in a folder, by the label before its lines."""

    def __init__(self, folder: str) -> None:
        """Make the folder; ConfigError if that is not possible."""
        self._folder = Path(folder)
        self._names: set[str] = set()
        self._missing: dict[str, tuple[int, str]] = {}
        """By file: how many bytes could not be written since the last that were, and why."""
        self._told = ""
        self.is_complete = True
        """Whether all output was written so far."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder) as probe:
                probe.write(b"x")
        except OSError as error:
            raise ConfigError(f"--log-dir {folder}: {error.strerror}; choose a folder that can be written") from error

    def write(self, label: str, data: bytes) -> str:
        """Append output of the process with this label, such as `3` or `north 3`; return what to tell the user.

        That is a sentence if the files cannot be written for a new reason, and else empty.
        """
        name = file_name(label)
        if name not in self._names and len(self._names) >= RANK_LOGS_LIMIT:
            name = "others.log"
        self._names.add(name)
        missing, why = self._missing.get(name, (0, ""))
        gap = (
            f"\ncovey: {missing} byte{'s' * (missing != 1)} could not be written here ({why})\n".encode()
            if missing
            else b""
        )
        try:
            with open(self._folder / name, "ab", buffering=0) as file:
                taken = file.write(gap + data)
        except OSError as error:  # the run goes on
            taken, why = 0, error.strerror or str(error)
        if taken >= len(gap):
            self._missing.pop(name, None)
            missing, taken = 0, taken - len(gap)
        else:
            taken = 0
        if taken == len(data):
            return ""
        why = why or os.strerror(errno.ENOSPC)  # what a write that is cut short means
        self._missing[name] = missing + len(data) - taken, why
        self.is_complete = False
        is_news, self._told = self._told != why, why
        return f"{self._folder / name} cannot be written ({why}); the run continues without its logs" if is_news else ""


def file_name(label: str) -> str:
    """Return the name of the log file for a label; two labels of a run have different names."""
    found = _RANK.fullmatch(label)
    words = [found[1] or "", f"rank-{found[2]}"] if found is not None else [label.replace("/", "-process-")]
    name = "-".join(re.sub(r"[^A-Za-z0-9._-]", "_", word).lstrip(".")[:120] for word in words if word)
    return f"{name or 'unnamed'}.log"
