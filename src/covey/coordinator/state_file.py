"""The file in which the coordinator keeps its runs: sqlite with a write-ahead log, one row for each run."""

from __future__ import annotations

import os
import sqlite3
from typing import TYPE_CHECKING, Final

import msgspec

from covey.base.errors import ConfigError
from covey.base.version import NewerFormatError, check_format, newer_file
from covey.coordinator.records import RunRecord
from covey.net.host.descriptors import explain
from covey.net.host.folders import private_folder
from covey.net.host.locks import try_lock

if TYPE_CHECKING:
    from pathlib import Path

STATE_FILE_FORMAT: Final = 1
"""The format of the file."""


class StateFile:
    """Reads and writes the records of runs. One process at a time uses a folder."""

    def __init__(self, folder: Path) -> None:
        """Open the file in `folder`, made if missing.

        Raises:
            ConfigError: another coordinator uses it, it is damaged, or it cannot be written.
        """
        self._lock = _lock(private_folder(folder))
        self._path = folder / "coordinator.sqlite3"
        try:
            self._connection = sqlite3.connect(self._path, isolation_level=None)
            check_format(self._connection.execute("PRAGMA user_version").fetchone()[0], STATE_FILE_FORMAT)
            os.chmod(self._path, 0o600)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")  # a rank that was given out is never given to another
            self._connection.execute("CREATE TABLE IF NOT EXISTS runs (name TEXT PRIMARY KEY, record BLOB NOT NULL)")
            self._connection.execute(f"PRAGMA user_version={STATE_FILE_FORMAT}")
        except NewerFormatError as error:
            self._connection.close()
            os.close(self._lock)
            raise newer_file(self._path, error) from None
        except (sqlite3.Error, OSError) as error:
            os.close(self._lock)
            raise ConfigError(
                f"{self._path} cannot be used: {error}; choose another folder with --state, or move the file away: "
                "workers that run tell the coordinator their ranks again"
            ) from error
        except BaseException:
            os.close(self._lock)
            raise

    def load(self) -> list[RunRecord]:
        """Return all runs."""
        try:
            rows = self._connection.execute("SELECT record FROM runs ORDER BY name").fetchall()
            return [msgspec.json.decode(row[0], type=RunRecord) for row in rows]
        except (sqlite3.Error, msgspec.DecodeError, TypeError) as error:
            raise ConfigError(
                f"{self._path} is damaged: {error}; move it away: workers that run tell the coordinator their ranks "
                "again"
            ) from error

    def save(self, record: RunRecord) -> None:
        """Write a run; it is on disk when this returns. ConfigError if it cannot be written."""
        try:
            self._connection.execute(
                "INSERT INTO runs VALUES (?, ?) ON CONFLICT(name) DO UPDATE SET record=excluded.record",
                (record.name, msgspec.json.encode(record)),
            )
        except sqlite3.Error as error:
            raise ConfigError(f"{self._path} cannot be written: {error}; make room, and start again") from error

    def forget(self, name: str) -> None:
        """Remove a run."""
        try:
            self._connection.execute("DELETE FROM runs WHERE name=?", (name,))
        except sqlite3.Error as error:
            raise ConfigError(f"{self._path} cannot be written: {error}; make room, and start again") from error

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._connection.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _lock(folder: Path) -> int:
    path = folder / "lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {explain(error)}; choose another folder with --state") from error
    if not try_lock(lock, path):
        os.close(lock)
        raise ConfigError(f"another coordinator uses {folder}; end it, or choose another folder with --state")
    return lock
