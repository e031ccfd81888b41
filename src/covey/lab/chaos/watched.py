"""The processes of a checked run, as their records describe them."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
from typing import TYPE_CHECKING

from covey.lab.chaos.processes import READ_BYTES
from covey.lab.chaos.records import (
    Began,
    Entered,
    Exclusion,
    Left,
    Obeyed,
    ProcessEnded,
    Restored,
    Stepped,
    from_lines,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.lab.chaos.records import Record


class Watched:
    """One process."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._rest = b""
        self.records: list[Record] = []
        self.name, self.pid, self.host = "", 0, 0
        self.rank = self.generation = -1
        self.members: tuple[str | None, ...] = ()
        self.story = ""
        self.is_member = False
        """Whether it is in a generation, and knows its members."""
        self.steps: list[float] = []
        """When the state changed in this generation."""
        self.ended = ""

    def read(self) -> list[Obeyed]:
        """Read new records; return the orders that the process obeyed."""
        while data := os.read(self._file, READ_BYTES):
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        obeyed = []
        for record in from_lines(lines):
            self.records.append(record)
            match record:
                case Began():
                    self.name, self.pid, self.host = record.name, record.pid, record.host
                case Entered():
                    self.generation, self.rank, self.is_member = record.generation, record.rank, False
                case Restored():
                    self.members, self.story, self.is_member, self.steps = record.members, record.story, True, []
                case Stepped():
                    self.steps.append(record.at)
                case Left() | Exclusion():
                    self.is_member = False
                case ProcessEnded():
                    self.ended, self.is_member = record.how, False
                case Obeyed():
                    obeyed.append(record)
        return obeyed

    @property
    def title(self) -> str:
        return f"{self.name} (rank {self.rank})"

    @property
    def is_alive(self) -> bool:
        return bool(self.pid) and not self.ended and is_running(self.pid)

    def signal(self, signum: int) -> None:
        """Send a signal, if the process still exists."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)

    def close(self) -> None:
        os.close(self._file)


class Processes:
    """All processes that ever began in a run."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._by_path: dict[str, Watched] = {}

    def look(self) -> list[tuple[Watched, Obeyed]]:
        """Read new records of all processes; return the orders that were obeyed."""
        for path in glob.glob(os.path.join(glob.escape(self._folder), "*.jsonl")):
            if path not in self._by_path:
                self._by_path[path] = Watched(path)
        return [(each, obeyed) for each in self._by_path.values() for obeyed in each.read()]

    def __iter__(self) -> Iterator[Watched]:
        return iter(list(self._by_path.values()))

    def named(self, pid: int) -> str:
        """Return the name of the latest process with this number."""
        return next((each.name for each in reversed(list(self._by_path.values())) if each.pid == pid), "")

    def alive(self) -> list[Watched]:
        return [each for each in self if each.is_alive]

    def members(self) -> list[Watched]:
        """Return the processes that are at work, by rank."""
        found = [each for each in self.alive() if each.is_member]
        return sorted(found, key=lambda each: (each.generation, each.rank, each.name))

    def records(self) -> dict[str, list[Record]]:
        return {each.name: each.records for each in self if each.name}

    def close(self) -> None:
        for each in self:
            each.close()


def is_running(pid: int) -> bool:
    """Tell whether a process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def started_for(folder: str) -> list[int]:
    """Return the processes whose environment names the folder of a run."""
    found, mark = [], os.fsencode(folder)
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if mark in file.read() and int(name) != os.getpid() and is_running(int(name)):
                found.append(int(name))
    return found


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        for signum in (signal.SIGKILL, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
