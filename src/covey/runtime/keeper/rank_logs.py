"""Log files of a run, one for each rank (`covey run --log-dir`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from covey.base.errors import ConfigError

FILES_LIMIT: Final = 4096
"""Labels come from other machines; beyond this many, all others go into one file."""
_RANK: Final = re.compile(r"(?:(.+) )?(\d{1,6})")


class RankLogs:
    """Appends output to files in a folder, by the label before its lines."""

    def __init__(self, folder: str) -> None:
        """Make the folder; ConfigError if that is not possible."""
        self._folder = Path(folder)
        self._names: set[str] = set()
        self.failure = ""
        """Why a file could not be written, the last time that happened."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--log-dir {folder}: {error.strerror}; choose a folder that can be written") from error

    def write(self, label: str, data: bytes) -> None:
        """Append output of the process with this label, such as `3` or `north 3`."""
        name = file_name(label)
        if name not in self._names and len(self._names) >= FILES_LIMIT:
            name = "others.log"
        self._names.add(name)
        try:
            with open(self._folder / name, "ab") as file:
                file.write(data)
        except OSError as error:  # the run goes on
            self.failure = f"{self._folder / name}: {error.strerror}"


def file_name(label: str) -> str:
    """Return the name of the log file for a label; two labels of a run have different names."""
    found = _RANK.fullmatch(label)
    words = [found[1] or "", f"rank-{found[2]}"] if found is not None else [label.replace("/", "-process-")]
    name = "-".join(re.sub(r"[^A-Za-z0-9._-]", "_", word).lstrip(".")[:120] for word in words if word)
    return f"{name or 'unnamed'}.log"
