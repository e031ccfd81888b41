"""Virtual environments for programs, one for each requirements file, made when a program first needs it."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Final

from covey.agent.jobs import environment
from covey.agent.requests import OUTPUT_CHUNK_BYTES
from covey.base.errors import ConfigError
from covey.net.host.folders import private_folder
from covey.runtime.processes import Children, OutputTail

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from covey.runtime.processes import Child

ENVIRONMENTS_LIMIT: Final = 8
"""The one that was used longest ago makes room for another."""
_READY: Final = "ready"


class Environments:
    """The environments of one agent. Any thread may call any method."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._making = threading.Lock()
        self._child: Child | None = None

    def python(self, requirements: str) -> str:
        """Return the interpreter of an environment; ConfigError if `make` has not made it."""
        folder = self._path(requirements)
        if not (folder / _READY).exists():
            raise ConfigError("the environment of these requirements is gone; start again")
        os.utime(folder / _READY)
        return str(folder / "bin" / "python")

    def make(self, requirements: str, in_use: Collection[str]) -> Iterator[bytes]:
        """Make an environment unless there is one; yield what the installer prints.

        Environments of the requirements `in_use` are not removed to make room.

        Raises:
            ConfigError: another one is being made, or it cannot be made; with the end of what was printed.
        """
        folder = self._path(requirements)
        if (folder / _READY).exists():
            return
        if not self._making.acquire(blocking=False):
            raise ConfigError("an environment is being made here for another program; try again in a while")
        try:
            private_folder(self._folder)
            self._make_room({self._path(each) for each in in_use})
            shutil.rmtree(folder, ignore_errors=True)
            private_folder(folder)
            (folder / "requirements.txt").write_text(requirements)
            python = str(folder / "bin" / "python")
            yield from self._run("make an environment", sys.executable, "-m", "venv", str(folder))
            install = (python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check")
            yield from self._run("install", *install, "-r", str(folder / "requirements.txt"))
            yield from self._run(
                "import covey, which programs need; add it to the requirements", python, "-c", "import covey"
            )
            (folder / _READY).touch()
        finally:
            if not (folder / _READY).exists():
                shutil.rmtree(folder, ignore_errors=True)
            self._making.release()

    def close(self) -> None:
        """Stop making an environment."""
        if (child := self._child) is not None:
            child.signal(signal.SIGKILL)

    def _path(self, requirements: str) -> Path:
        text = f"{sys.version}\n{sys.prefix}\n{requirements}"
        return self._folder / hashlib.sha256(text.encode()).hexdigest()[:16]

    def _make_room(self, in_use: set[Path]) -> None:
        ready = [path for path in self._folder.iterdir() if (path / _READY).exists() and path not in in_use]
        ready.sort(key=lambda path: (path / _READY).stat().st_mtime)
        for path in ready[: max(0, len(ready) - ENVIRONMENTS_LIMIT + 1)]:
            shutil.rmtree(path, ignore_errors=True)

    def _run(self, what: str, *argv: str) -> Iterator[bytes]:
        tail = OutputTail()
        with Children() as children:  # ends it if the caller has gone
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            child = self._child = children.start(argv, env=environment(), is_bound=False, **streams)
            try:
                while not children.ended():
                    for printed in children.outputs(None):
                        tail.add(printed.data)
                        yield from _pieces(printed.data)
                for printed in children.rest_of(child):
                    tail.add(printed.data)
                    yield from _pieces(printed.data)
            finally:
                self._child = None
        if child.code:
            raise ConfigError(f"cannot {what} (exit code {child.code}){tail.quote()}")


def _pieces(data: bytes) -> Iterator[bytes]:
    return (data[at : at + OUTPUT_CHUNK_BYTES] for at in range(0, len(data), OUTPUT_CHUNK_BYTES))
