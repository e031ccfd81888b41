"""Virtual environments for programs, one for each requirements file, made when a program first needs it.

An environment sees the packages of the agent, covey among them, and what it has itself comes first. So pip fetches only
what is not here. A covey of another release is installed from the wheel that the terminal has sent.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

import covey
from covey.agent.jobs import environment
from covey.agent.requests import OUTPUT_CHUNK_BYTES
from covey.base.errors import ConfigError
from covey.base.version import __version__
from covey.net.host.folders import private_folder
from covey.runtime.processes import Children, OutputTail

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from covey.agent.requests import Interpreter
    from covey.runtime.processes import Child

PACKAGES: Final = Path(covey.__file__).parents[1]
"""The folder in which the package lies, which an installation for its developers has elsewhere."""
ENVIRONMENTS_LIMIT: Final = 8
"""The one that was used longest ago makes room for another."""
NEEDS_INDEX: Final = b"covey: pip gets from an index: "
"""Begins the line that names what is not here."""
_PIP_ERROR: Final = "ERROR: "
"""Begins the lines in which pip says why it has failed."""
_READY: Final = "ready"
_SEEN: Final = "packages-of-the-agent.pth"
PRINT_MISSING: Final = """
import sys, zipfile
from importlib import metadata
from pip._vendor.packaging.requirements import InvalidRequirement, Requirement
lines = open(sys.argv[1]).read().splitlines()
for wheel in sys.argv[2:]:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        told = archive.read(path).decode().splitlines()
    lines += [line.partition(":")[2] for line in told if line.startswith("Requires-Dist:")]
for line in lines:
    try:
        wanted = Requirement(line.partition(" #")[0].strip())
    except InvalidRequirement:  # an option, a path, or nothing
        continue
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        continue
    try:
        is_here = wanted.url is None and wanted.specifier.contains(metadata.version(wanted.name), prereleases=True)
    except metadata.PackageNotFoundError:
        is_here = False
    if not is_here and not (wanted.name == "covey" and sys.argv[2:]):
        print(wanted)
"""
"""Prints the requirements of a file, and of wheels, that are not satisfied. Runs in an environment, which has pip."""


class Environments:
    """The environments of one agent. Any thread may call any method."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._making = threading.Lock()
        self._child: Child | None = None

    def python(self, wanted: Interpreter) -> str:
        """Return the interpreter of an environment; ConfigError if `make` has not made it."""
        folder = self._path(wanted)
        if not (folder / _READY).exists():
            raise ConfigError("the environment of these requirements is gone; start again")
        os.utime(folder / _READY)
        return str(folder / "bin" / "python")

    def make(self, wanted: Interpreter, in_use: Collection[Interpreter], wheel: Path | None = None) -> Iterator[bytes]:
        """Make an environment unless there is one; yield what the installer prints, and before that a line that begins
        with NEEDS_INDEX if something has to be fetched.

        `wheel` is that of the covey that it gets; without, it sees the one that runs here. Environments `in_use` are
        not removed to make room.

        Raises:
            ConfigError: another one is being made, or it cannot be made; with the end of what was printed.
        """
        folder = self._path(wanted)
        if (folder / _READY).exists():
            return
        if not self._making.acquire(blocking=False):
            raise ConfigError("an environment is being made here for another program; try again in a while")
        try:
            private_folder(self._folder)
            self._make_room({self._path(each) for each in in_use})
            shutil.rmtree(folder, ignore_errors=True)
            private_folder(folder)
            file = folder / "requirements.txt"
            file.write_text(wanted.requirements)
            python, wheels = str(folder / "bin" / "python"), [] if wheel is None else [str(wheel)]
            yield from self._run("make an environment", sys.executable, "-m", "venv", str(folder))
            _show_packages(folder)
            listing = b"".join(self._run("read the requirements", python, "-c", PRINT_MISSING, str(file), *wheels))
            if missing := listing.split(b"\n")[:-1]:
                yield (NEEDS_INDEX + b", ".join(missing))[: OUTPUT_CHUNK_BYTES - 1] + b"\n"
            install = (python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check")
            yield from self._run("install", *install, *wheels, "-r", str(file))
            yield from self._run("import covey in the environment", python, "-c", "import covey")
            (folder / _READY).touch()
        finally:
            if not (folder / _READY).exists():
                shutil.rmtree(folder, ignore_errors=True)
            self._making.release()

    def close(self) -> None:
        """Stop making an environment."""
        if (child := self._child) is not None:
            child.signal(signal.SIGKILL)

    def _path(self, wanted: Interpreter) -> Path:
        text = f"{sys.version}\n{sys.prefix}\n{__version__}\n{wanted.release}\n{wanted.requirements}"
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
            problems = [line.removeprefix(_PIP_ERROR) for line in tail.lines() if line.startswith(_PIP_ERROR)]
            why = f": {'; '.join(problems)}" if problems else tail.quote()
            raise ConfigError(f"cannot {what} (exit code {child.code}){why}")


def _show_packages(folder: Path) -> None:
    """Let an environment see the packages of this interpreter, after its own."""
    (own,) = folder.glob("lib/python*/site-packages")
    seen = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(PACKAGES)])
    (own / _SEEN).write_text("".join(f"{path}\n" for path in seen))


def _pieces(data: bytes) -> Iterator[bytes]:
    return (data[at : at + OUTPUT_CHUNK_BYTES] for at in range(0, len(data), OUTPUT_CHUNK_BYTES))
