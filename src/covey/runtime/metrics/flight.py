"""The flight recorder's output: the last operations of this process, for other processes and for files.

A file is written when a group fails and when the process gets SIGUSR1. `covey trace` reads such files.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConfigError, RemoteProtocolError
from covey.base.text import printable
from covey.net.host import folders
from covey.net.host.descriptors import explain
from covey.runtime import loop as control
from covey.runtime.counters import process
from covey.runtime.recorder import clock_ns
from covey.wire import reports as wire

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from covey.runtime.counters import GroupCounters

logger = logging.getLogger("covey")

SUFFIX: Final = ".covey-trace"
NOTE: Final = "`covey trace` shows the last operations:"
"""Begins the note of an error that names a file."""
FLIGHT_FILES_LIMIT: Final = 256
"""Files that are kept, twice as many as a run can have ranks; older ones are removed."""


def flight(groups: Sequence[GroupCounters]) -> wire.Flight:
    """Return the last operations of these groups of the process. On any thread."""
    node: Any = next(iter(list(process.nodes)), None)
    card = None if node is None else node.card
    now = clock_ns()
    return wire.Flight(
        run="" if node is None else node.run,
        name="" if card is None else card.name,
        host="" if card is None else card.contact.host,
        host_name=_ascii(socket.gethostname() if card is None else card.host_name),
        pid=os.getpid(),
        seat=groups[0].seats[groups[0].rank] if groups else 0 if node is None else node.seat,
        clock_ns=time.time_ns() - now,
        taken_ns=now,
        offsets=() if node is None else tuple(node.views.clocks.offsets().items()),
        groups=tuple(map(_flown, groups[: wire.REPORTED_GROUPS_LIMIT])),
        run_id=b"" if node is None else node.run_id,
    )


def _flown(group: GroupCounters) -> wire.FlownGroup:
    operations = tuple(wire.FlownOperation(*record) for record in group.recorder.records(0))
    return wire.FlownGroup(group.name, group.rank, len(group.seats), group.fault, operations)


def _ascii(name: str) -> str:
    return name.encode("ascii", "replace").decode()[:100]


# Files


def folder() -> Path:
    """Return the folder of the files, `traces` in covey's configuration folder; make it if it is missing.

    Raises:
        ConfigError: it cannot be made or used.
    """
    return folders.private_folder(folders.home() / "traces")


def path_for(taken: wire.Flight) -> Path:
    """Return the path of a new file; ConfigError if its folder cannot be used."""
    rank = taken.groups[0].rank if taken.groups else taken.seat
    return folder() / f"{_run_part(taken.run)}-rank{rank}-{taken.pid}-{time.time_ns()}{SUFFIX}"


def store(taken: wire.Flight, path: Path) -> None:
    """Write the last operations of a process to a new file, and remove the oldest files.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(wire.encode(taken))
    except OSError as error:
        text = f"cannot write {path}: {explain(error)}; make room, or set COVEY_HOME elsewhere"
        raise ConfigError(text) from error
    _remove_old(path.parent)


def fault_of(pids: Collection[int], since: float) -> str:
    """Return the error of a group that failed in one of these processes since a time, from their files; or empty."""
    with contextlib.suppress(ConfigError, OSError):
        files = sorted(folder().glob(f"*{SUFFIX}"), key=lambda path: path.name)[-FLIGHT_FILES_LIMIT:]
        for path in files:
            if _pid_in(path.name) in pids and _ns_in(path.name) >= since * 1e9:
                with contextlib.suppress(RemoteProtocolError):
                    groups = wire.decode_flight(path.read_bytes()).groups
                    if fault := next((group.fault for group in groups if group.fault), ""):
                        return fault
    return ""


def traces_of(run: str, since: float, until: float) -> list[Path]:
    """Return the files that processes of a run of this name have written between two times, the oldest first."""
    with contextlib.suppress(ConfigError, OSError):
        found = [(_ns_in(path.name), path) for path in folder().glob(f"{glob.escape(_run_part(run))}-rank*{SUFFIX}")]
        return [path for at, path in sorted(found) if since * 1e9 <= at <= until * 1e9]
    return []


def _ns_in(name: str) -> int:
    """Return when a file was written, as its name says; 0 if it does not."""
    words = name.removesuffix(SUFFIX).split("-")
    return int(words[-1]) if words[-1].isdigit() else 0


def _run_part(run: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in run)[:60] or "run"


def _pid_in(name: str) -> int:
    """Return the process in the name of a file (`path_for`); 0 if there is none."""
    words = name.removesuffix(SUFFIX).split("-")
    return int(words[-2]) if len(words) > 2 and words[-2].isdigit() else 0


def _remove_old(place: Path) -> None:
    with contextlib.suppress(OSError):  # another process removes files as well
        files = sorted(place.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
        for path in files[:-FLIGHT_FILES_LIMIT]:
            path.unlink(missing_ok=True)


def write_failed(group: GroupCounters, error: BaseException) -> None:
    """Write the last operations of a group that has failed, and name the file in the error. On any thread."""
    if not group.recorder.records(0):
        return
    group.fault = printable(f"{type(error).__name__}: {error}", 8 * 1000)
    taken = flight([group])
    try:
        path = path_for(taken)
        if control.is_here():  # which must not wait for a disk
            threading.Thread(target=_store_in_background, args=(taken, path), name="covey-trace", daemon=True).start()
        else:
            store(taken, path)
    except (ConfigError, RuntimeError) as problem:  # no folder, no room, no more threads
        logger.info("the last operations of group %r could not be written: %s", group.name, problem)
    else:
        error.add_note(f"{NOTE} {path}")


def _store_in_background(taken: wire.Flight, path: Path) -> None:
    try:
        store(taken, path)
    except ConfigError as problem:
        logger.info("the last operations could not be written: %s", problem)


def write_all() -> None:
    """Write the last operations of all groups, and log where."""
    try:
        taken = flight(process.groups())
        path = path_for(taken)
        store(taken, path)
    except ConfigError as error:
        logger.warning("the last operations could not be written: %s", error)
    else:
        logger.warning("the last operations are in %s", path)
