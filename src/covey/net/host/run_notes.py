"""What the processes of a run note in its folder for `covey history`: its members, last reports, where checkpoints are.

`covey run` names the folder to its processes. Notes are small, and a process that cannot write one goes on without.

Another note is in one private file of the machine, `last-wait` in covey's folder: what the latest process waited for
that gave up, so that `covey doctor` explains it after the timeout, too. A join of the same run removes it. It is a
hint: if it cannot be written or read, there is none.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec

from covey.base.errors import ConfigError
from covey.base.text import printable
from covey.base.version import NewerFormatError, check_format, newer_file
from covey.net.host import folders
from covey.wire.messages import Wait  # noqa: TC001 - a field, which msgspec reads

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

LAST_WAIT_FILE: Final = "last-wait"
LAST_WAIT_FORMAT: Final = 1
WAIT_RECENT_SECONDS: Final = 3600.0
"""A wait that failed longer ago is not told: since then much may have changed."""

Text = Annotated[str, msgspec.Meta(max_length=200)]
KEPT_FOLDER: Final = "COVEY_KEPT_FOLDER"
"""The variable that names the folder."""
REPORT_PREFIX: Final = "report-"
"""How the names of files with last reports begin; then comes the process."""
CHECKPOINTS_FILE: Final = "checkpoints"
"""The file with a path a line, the latest last."""
CHECKPOINTS_BYTES: Final = 64 << 10
SHOWN_CHECKPOINTS: Final = 10
"""Checkpoints that are read, the latest."""
NOTE_FILES_LIMIT: Final = 1024
READ_LIMIT: Final = 64 << 10
NOTED_NAMES_LIMIT: Final = 32
MEMBERS_FILE: Final = "members"
"""The file with a line for each generation: its number of ranks and its machines."""
MEMBERS_BYTES: Final = 64 << 10
NOTED_MACHINES_LIMIT: Final = 64
"""Machines that are noted of a run."""


class _FormatOnly(msgspec.Struct):
    """The one field that every release reads first."""

    format: int = LAST_WAIT_FORMAT


class FailedWait(msgspec.Struct, frozen=True, kw_only=True):
    """A run that a process of this machine waited for, in vain."""

    format: int = LAST_WAIT_FORMAT
    run: Text
    cluster: Text
    at: float
    """When it gave up, in seconds since 1970."""
    seconds: float
    """How long it had waited."""
    node: Text
    """Its name."""
    wait: Wait
    """What it waited for, in the words with which it would have answered a command."""


def keep_wait(failed: FailedWait) -> None:
    """Write down a wait that has failed; does nothing if that cannot be written. Blocks while it is written."""
    with contextlib.suppress(ConfigError, OSError):
        path = folders.home() / LAST_WAIT_FILE
        _read_wait(path)  # that of a later release stays
        folders.write_private(path, msgspec.json.encode(failed))


def forget_wait(run: str, cluster: str) -> None:
    """Remove the wait for this run, which has begun now."""
    with contextlib.suppress(ConfigError, OSError, ValueError):
        path = folders.existing() / LAST_WAIT_FILE
        if path.exists() and (found := _read_wait(path)) is not None and (found.run, found.cluster) == (run, cluster):
            path.unlink(missing_ok=True)


def last_wait(cluster: str) -> FailedWait | None:
    """Return the latest wait in a cluster that failed on this machine; None if it was long ago, or is not known."""
    with contextlib.suppress(ConfigError, OSError):
        found = _read_wait(folders.existing() / LAST_WAIT_FILE)
        if found is not None and found.cluster == cluster and 0 <= time.time() - found.at <= WAIT_RECENT_SECONDS:
            return found
    return None


def _read_wait(path: Path) -> FailedWait | None:
    """Return what the file has; None if there is none, or it is damaged.

    Raises:
        ConfigError: a later release has written it, or others may read it.
    """
    try:
        data = folders.read_private(path)
        check_format(msgspec.json.decode(data, type=_FormatOnly).format, LAST_WAIT_FORMAT)
        return msgspec.json.decode(data, type=FailedWait)
    except NewerFormatError as error:
        raise newer_file(path, error) from None
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


class LastReported(NamedTuple):
    """The last report of a run."""

    rank: int
    step: int | None
    at: float
    values: dict[str, float]


def note_checkpoint(path: str) -> None:
    """Note where this process has saved a checkpoint, if its run is kept."""
    _append(CHECKPOINTS_FILE, CHECKPOINTS_BYTES, os.path.abspath(path))


def _append(name: str, most: int, value: object) -> None:
    """Append a line of JSON to a note of this run; one of more than `most` bytes begins anew: what is in it is old."""
    folder = os.environ.get(KEPT_FOLDER, "")
    if not folder:
        return
    with contextlib.suppress(OSError):
        file = os.path.join(folder, name)
        if os.path.exists(file) and os.path.getsize(file) > most:
            os.unlink(file)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, json.dumps(value).encode() + b"\n")
        finally:
            os.close(descriptor)


def noted_checkpoints(folder: Path) -> list[str]:
    """Return where the last checkpoints of a run are, the latest last, each once."""
    found: dict[str, None] = {}
    for line in _read(folder / CHECKPOINTS_FILE, -2 * CHECKPOINTS_BYTES).splitlines():
        with contextlib.suppress(ValueError):
            path = printable(str(json.loads(line)))
            found.pop(path, None)
            found[path] = None
    return list(found)[-SHOWN_CHECKPOINTS:]


class NotedMembers(NamedTuple):
    """The members of a run, over all its generations."""

    ranks: int
    """In the largest generation."""
    machines: tuple[str, ...]
    """All that have been in it, by name, the first ones first."""


def note_members(ranks: int, machines: Iterable[str]) -> None:
    """Note how many ranks a generation has, and on which machines, if the run of this process is kept."""
    names = list(dict.fromkeys(machines))[:NOTED_MACHINES_LIMIT]
    _append(MEMBERS_FILE, MEMBERS_BYTES, {"ranks": ranks, "machines": names})


def noted_members(folder: Path) -> NotedMembers | None:
    """Return the members of a run; None if none are noted."""
    ranks, machines = 0, dict[str, None]()
    for line in _read(folder / MEMBERS_FILE, -2 * MEMBERS_BYTES).splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            about = json.loads(line)
            ranks = max(ranks, int(about["ranks"]))
            machines.update((printable(str(name), 100), None) for name in about["machines"][:NOTED_MACHINES_LIMIT])
    return NotedMembers(ranks, tuple(machines)[:NOTED_MACHINES_LIMIT]) if ranks else None


def last_reported(folder: Path) -> LastReported | None:
    """Return the last report of a run, of its highest step, by the lowest rank; None if there is none."""
    found = []
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(folder) if name[len(REPORT_PREFIX) :].isdecimal())
        found = [_report(_read(folder / name)) for name in names[:NOTE_FILES_LIMIT] if name.startswith(REPORT_PREFIX)]
    known = [each for each in found if each is not None]
    return max(known, key=lambda each: (-math.inf if each.step is None else each.step, -each.rank), default=None)


def _report(text: str) -> LastReported | None:
    """Return what one process has noted; None if that cannot be read."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        about = json.loads(text)
        values = {
            printable(str(name), 40): float(value) for name, value in list(about["values"].items())[:NOTED_NAMES_LIMIT]
        }
        step = about["step"]
        return LastReported(int(about["rank"]), None if step is None else int(step), float(about["at"]), values)
    return None


def _read(path: Path, most: int = READ_LIMIT) -> str:
    """Return a text of this user; of one that is longer the beginning, or with a negative number the end."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if most < 0:
                file.seek(max(0, os.fstat(descriptor).st_size + most))
            return file.read(abs(most)).decode(errors="replace")
    return ""
