"""What this machine keeps of runs that were started here: how each began and ended, and the output of its ranks.

Each run has a private folder below `history` in covey's folder: `about` describes the run; each process has a log
(`saved_output.py`) in a folder of its number, and what `covey run` itself said is in `keeper`. The keeper holds a lock
as long as it lives: a run without an end whose lock is free has ended unexpectedly. Output is bounded by process and in
total, the number of runs too; the oldest goes first, and never that of a run that goes on.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec

from covey.base.errors import ConfigError
from covey.base.numbers import NO_RANK
from covey.base.settings import SETTINGS
from covey.base.text import printable
from covey.base.version import NewerFormatError, check_format, newer_file
from covey.net.host import folders
from covey.net.host.locks import LockHolder
from covey.net.host.run_notes import last_reported, noted_checkpoints, noted_members
from covey.net.host.saved_output import KEEPER_FOLDER, SavedOutput, log_bytes, logs_in, remove_log

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from covey.net.host.run_notes import LastReported

HISTORY_FOLDER: Final = "history"
RECORD_FILE: Final = "about"
RECORD_LOCK: Final = "lock"
FORMAT: Final = 1
SAVED_RUNS_LIMIT: Final = 500
"""Runs that are remembered."""
ABSENCES_LIMIT: Final = 100
"""Absences of this machine that are remembered of a run."""
LEAST_KEPT_BYTES: Final = 64 << 10
"""What is kept of each process at least, however many there are."""
TIDY_BYTES: Final = 8 << 20
"""After so much new output, the bound on the total is looked after again."""
STOPPED_BY: Final = "stopped by "
"""How the reason of a run begins that a signal has ended."""
SHARE_SECONDS: Final = 10.0
"""An agent has begun its share of a run at most so long before the terminal wrote down that the run has begun."""
KEPT_COMMAND_LIMIT: Final = 200
"""Characters of the command that are kept."""

Text = Annotated[str, msgspec.Meta(max_length=2000)]


class OutputTerms(NamedTuple):
    """What is kept of the output of runs."""

    is_kept: bool
    output_bytes: int
    """Most bytes of output that are kept of each process."""
    total_bytes: int
    """Most bytes that are kept of all runs together."""

    @classmethod
    def read(cls, env: Mapping[str, str]) -> OutputTerms:
        """Return the terms from variables; ConfigError if one is malformed."""

        def value(variable: str) -> Any:
            row = SETTINGS[variable.removeprefix("COVEY_").lower()]
            return row.kind.read(variable, env[variable]) if variable in env else row.default

        return cls(value("COVEY_KEEP_OUTPUT"), value("COVEY_KEEP_OUTPUT_BYTES"), value("COVEY_KEEP_OUTPUT_TOTAL"))


class Absence(msgspec.Struct, frozen=True, kw_only=True):
    """A time in which this machine took no part in a run."""

    why: Text
    """What was true of the machine, such as `is on battery`; `slept` if it could not leave before."""
    left: float
    returned: float | None = None
    """None: it is still away, or the run ended first."""
    step: int | None = None
    """The last step that the program has reported before it left."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How a run began on this machine, and how it ended."""

    format: int = FORMAT
    name: Text
    cluster: Text = ""
    """Empty for a run on this machine only."""
    machine: Text = ""
    """This one."""
    machines: tuple[Text, ...] = ()
    """All that are known to have been in it."""
    program: Text = ""
    """The command, or the beginning of it."""
    processes: int = 0
    """On this machine."""
    by_agent: bool = False
    """Whether an agent started it, as its share of a run on several machines."""
    pid: int = 0
    """Process id of `covey run`, or of the program itself."""
    began: float = 0.0
    ended: float | None = None
    code: int | None = None
    reason: Text = ""
    """Why it ended, if not by itself."""
    absences: tuple[Absence, ...] = ()
    """The last ones, the latest last."""


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """A run as a reader finds it."""

    id: str
    folder: Path
    record: RunSummary
    is_running: bool
    share: PastRun | None = None
    """What an agent has started on this machine, of a run that was started from here on several machines."""

    @property
    def lasted(self) -> float | None:
        """Seconds from its start to its end, or to now while it runs; None if its end is not known."""
        if self.record.ended is not None:
            return max(self.record.ended - self.record.began, 0.0)
        return max(time.time() - self.record.began, 0.0) if self.is_running else None

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with an error, or without a word, and was not stopped."""
        record = self.record
        is_well = record.ended is not None and (not record.code or record.reason.startswith(STOPPED_BY))
        return not self.is_running and not is_well

    def outcome(self) -> str:
        """Return how it ended, in words."""
        record = self.record
        if self.is_running:
            away = record.absences[-1] if record.absences else None
            return f"away: {record.machine} {away.why}" if away is not None and away.returned is None else "running"
        if record.ended is None:
            return "ended unexpectedly"
        if record.code is None:
            return "ended"
        if record.code == 0:
            return "succeeded" + (f": {record.reason}" if record.reason else "")
        return f"exit code {record.code}" + (f": {record.reason}" if record.reason else "")

    def last_report(self) -> LastReported | None:
        """Return what its program has reported last; None if it has reported nothing."""
        return last_reported(self._with_ranks.folder)

    def checkpoints(self) -> list[str]:
        """Return where it has saved its last checkpoints, the latest last."""
        return noted_checkpoints(self._with_ranks.folder)

    def members(self) -> tuple[int, tuple[str, ...]]:
        """Return how many ranks it had at most, and the machines that have been in it, as far as is known here."""
        noted, record = noted_members(self._with_ranks.folder), self.record
        if noted is None:
            return record.processes, record.machines
        return max(noted.ranks, record.processes), noted.machines

    @property
    def _with_ranks(self) -> PastRun:
        """What the ranks on this machine belong to: they note what happens to them."""
        return self.share or self

    def logs(self) -> list[tuple[str, Path]]:
        """Return the logs of its processes, by number, and last that of `covey run` itself."""
        return logs_in(self.folder)


class SavedRun:
    """Writes what is kept of a run that goes on. Failing never stops the run. On one thread."""

    def __init__(self, record: RunSummary, *, output_bytes: int, total_bytes: int) -> None:
        """Keep at most `output_bytes` of each process, nothing if that is 0, and `total_bytes` of all runs.

        With more processes than `total_bytes` has room for, each keeps less.

        Raises:
            ConfigError: covey's folder cannot be used.
        """
        self._record = record
        folder = folders.private_folder(folders.home() / HISTORY_FOLDER)
        name = f"{int(record.began * 1000):013d}-{record.pid}"
        self.folder = folders.private_folder(folder / name)
        self._lock = LockHolder.take(self.folder / RECORD_LOCK, f"{self.folder} is in use")
        self._total_bytes = total_bytes
        fair = total_bytes // max(record.processes + 1, 1)
        self._output_bytes = max(min(output_bytes, fair), LEAST_KEPT_BYTES) if output_bytes else 0
        self._logs: dict[str, SavedOutput] = {}
        self._since_tidy, self._told = 0, ""
        self._write()
        tidy(total_bytes)

    def append(self, number: int | None, rank: int | None, stream: int, data: bytes) -> str:
        """Keep output of a process, by its number on this machine; None for `covey run` itself.

        Returns a sentence for the user if it cannot be kept for a new reason, else an empty text.
        """
        if not self._output_bytes:
            return ""
        name = KEEPER_FOLDER if number is None else str(number)
        log = self._logs.get(name)
        try:
            if log is None:
                log = self._logs[name] = SavedOutput(folders.private_folder(self.folder / name), self._output_bytes)
            why = log.append(stream, data, NO_RANK if rank is None else rank)
        except ConfigError as error:
            why = str(error)
        self._since_tidy += len(data)
        if self._since_tidy >= TIDY_BYTES:
            self._since_tidy = 0
            tidy(self._total_bytes)
        if not why or why == self._told:
            return ""
        self._told = why
        return f"output cannot be kept in {self.folder} ({why}); the run continues without that"

    def note_absence(self, absence: Absence) -> None:
        """Note that this machine takes no part in the run; the same again when more is known of it."""
        others = (each for each in self._record.absences if each.left != absence.left)
        self._record = msgspec.structs.replace(self._record, absences=(*others, absence)[-ABSENCES_LIMIT:])
        with contextlib.suppress(ConfigError):  # a full disk: an absence less is remembered
            self._write()

    def end(self, code: int | None, reason: str) -> None:
        """Note how the run has ended, and let go of it; `code` is None if that is not known."""
        self._record = msgspec.structs.replace(self._record, ended=time.time(), code=code, reason=printable(reason))
        with contextlib.suppress(ConfigError):  # a full disk: the run counts as ended unexpectedly
            self._write()
        self.close()

    def close(self) -> None:
        """Let go of the run: without `end`, it has ended unexpectedly."""
        self._lock.let_go()

    def _write(self) -> None:
        folders.write_private(self.folder / RECORD_FILE, msgspec.json.encode(self._record))


def past_runs() -> list[PastRun]:
    """Return the runs that this machine remembers, the oldest first. What cannot be read is left out.

    Raises:
        ConfigError: covey's folder is open to others, or a file is of a later release.
    """
    folder = folders.existing() / HISTORY_FOLDER
    try:
        names = sorted(os.listdir(folders.existing(HISTORY_FOLDER)))
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        try:
            record = _read(folder / name / RECORD_FILE)
        except FileNotFoundError:
            continue
        if record is not None:
            found.append(
                PastRun(
                    id=name, folder=folder / name, record=record, is_running=_is_locked(folder / name / RECORD_LOCK)
                )
            )
    return found


def whole_runs() -> list[PastRun]:
    """Return the runs that this machine remembers, the oldest first; its share of a run is not one of its own.

    Raises:
        ConfigError: covey's folder is open to others, or a file is of a later release.
    """
    found = past_runs()
    shares: dict[str, PastRun] = {}
    for share in (run for run in found if run.record.by_agent):
        of = [run for run in found if not run.record.by_agent and _contains(run, share)]
        shares |= {run.id: share for run in of[-1:]}
    hidden = {share.id for share in shares.values()}
    return [replace(run, share=shares.get(run.id)) for run in found if run.id not in hidden]


def _contains(run: PastRun, share: PastRun) -> bool:
    """Tell whether an agent has started `share` for a run that this machine has started on several."""
    whole, part = run.record, share.record
    is_same = (whole.cluster, whole.name) == (part.cluster, part.name) and bool(whole.cluster)
    ended = math.inf if run.is_running or whole.ended is None else whole.ended
    return is_same and whole.machine not in whole.machines and whole.began - SHARE_SECONDS <= part.began <= ended


def find_past_run(name: str, among: Sequence[PastRun] | None = None) -> PastRun | None:
    """Return the latest run of this name, or the one with this id or process id; None if there is none."""
    found = past_runs() if among is None else among
    exact = [run for run in found if name in (run.id, str(run.record.pid))]
    named = [run for run in found if run.record.name == name]
    return next(iter(reversed(named or exact)), None)


def tidy(total_bytes: int) -> None:
    """Remove the oldest output above `total_bytes`, and the oldest runs above SAVED_RUNS_LIMIT; running ones stay."""
    with contextlib.suppress(ConfigError, OSError):
        found = past_runs()
        sizes = {run.id: sum(log_bytes(folder) for _, folder in run.logs()) for run in found}
        total = sum(sizes.values())
        for at, run in enumerate(found):
            if run.is_running:
                continue
            if len(found) - at > SAVED_RUNS_LIMIT:
                shutil.rmtree(run.folder, ignore_errors=True)
                total -= sizes[run.id]
            elif total > total_bytes and sizes[run.id]:
                for _, folder in run.logs():
                    remove_log(folder)
                total -= sizes[run.id]


def _read(path: Path) -> RunSummary | None:
    data = folders.read_private(path)
    try:
        found = msgspec.json.decode(data)
        if isinstance(found, dict) and isinstance(number := found.get("format", 1), int):
            check_format(number, FORMAT)
        return msgspec.convert(found, RunSummary)
    except NewerFormatError as error:
        raise newer_file(path, error) from None
    except (msgspec.DecodeError, msgspec.ValidationError):  # damaged: a run less is remembered
        return None


def _is_locked(path: Path) -> bool:
    """Tell whether a process holds the lock."""
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
