"""Files that reports of a program are written to: lines of JSON, and event files for TensorBoard."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import struct
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConfigError
from covey.net.host.descriptors import explain
from covey.net.host.run_notes import KEPT_FOLDER, REPORT_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from covey.runtime.report_log import ReportSink
    from covey.wire.progress import ReportRow

_CRC_MASK: Final = 0xA282EAD8
LAST_EVERY: Final = 10.0
"""How often the last report is written down."""
_CASTAGNOLI: Final = 0x82F63B78
"""The polynomial of CRC-32C, reflected."""


def open_sinks(env: Mapping[str, str], run: str, rank: Callable[[], int]) -> list[ReportSink]:
    """Return what COVEY_REPORTS and COVEY_TENSORBOARD ask for; `rank` returns the rank of this process.

    Raises:
        ConfigError: a file or a folder cannot be written.
    """
    sinks: list[ReportSink] = []
    if path := env.get("COVEY_REPORTS", ""):
        sinks.append(JsonLines(path, run, rank))
    if folder := env.get("COVEY_TENSORBOARD", ""):
        sinks.append(ScalarFile(Path(folder), run, rank))
    if folder := env.get(KEPT_FOLDER, ""):
        sinks.append(LastReport(Path(folder), rank))
    return sinks


class LastReport:
    """Keeps the last report of this process for `covey history`, beside the output of its run. Failing does no harm."""

    def __init__(self, folder: Path, rank: Callable[[], int]) -> None:
        self._path, self._rank = folder / f"{REPORT_PREFIX}{os.getpid()}", rank
        self._last: ReportRow | None = None
        self._values: dict[str, float] = {}
        """The last value of each name."""
        self._written = -LAST_EVERY

    def write(self, rows: Sequence[ReportRow]) -> None:
        """Keep the last of the rows; write it now and then."""
        for row in rows:
            self._last = row
            self._values.update(row.values)
        if time.monotonic() - self._written >= LAST_EVERY:
            self._store()

    def close(self) -> None:
        """Write the last row."""
        self._store()

    def _store(self) -> None:
        self._written = time.monotonic()
        row = self._last
        if row is None:
            return
        values = {name: _spelled(value) for name, value in self._values.items()}
        about = {"rank": self._rank(), "step": row.step, "at": round(row.at, 3), "values": values}
        with contextlib.suppress(OSError):  # a full disk, or a folder that was removed
            new = self._path.with_suffix(".new")
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(descriptor, "w") as file:
                json.dump(about, file)
            os.replace(new, self._path)


class JsonLines:
    """Appends a line of JSON for each row. Processes may share the file: each write has whole lines."""

    def __init__(self, path: str, run: str, rank: Callable[[], int]) -> None:
        self._path, self._run, self._rank = path, run, rank
        try:
            self._append(b"")
        except OSError as error:
            raise ConfigError(f"COVEY_REPORTS={path!r} cannot be written: {explain(error)}") from error

    def write(self, rows: Sequence[ReportRow]) -> None:
        """Append the rows; OSError if that cannot be done."""
        lines = (json.dumps(self._line(row), allow_nan=False) + "\n" for row in rows)
        self._append("".join(lines).encode())

    def close(self) -> None:
        """Do nothing: no descriptor is kept."""

    def _line(self, row: ReportRow) -> dict[str, Any]:
        return {
            "run": self._run,
            "rank": self._rank(),
            "pid": os.getpid(),
            "time": round(row.at, 3),
            "step": row.step,
            "compute": None if row.compute < 0 else round(row.compute, 6),
            "sync": None if row.sync < 0 else round(row.sync, 6),
            "values": {name: _spelled(value) for name, value in row.values.items()},
        }

    def _append(self, data: bytes) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)


def _spelled(value: float) -> float | str:
    """Return a number that JSON has, or the name of one that it has not."""
    return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


class ScalarFile:
    """An event file of TensorBoard with scalars, in a folder for this run and rank.

    A file is a list of records: the length in 8 bytes, its CRC, an `Event` message of protobuf, its CRC. A CRC is
    CRC-32C, rotated and added to a constant. The file is made with the first row.
    """

    def __init__(self, folder: Path, run: str, rank: Callable[[], int]) -> None:
        self._folder, self._run, self._rank = folder, run, rank
        self._descriptor = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"COVEY_TENSORBOARD={str(folder)!r} cannot be made: {explain(error)}") from error

    def write(self, rows: Sequence[ReportRow]) -> None:
        """Append the rows; OSError if that cannot be done."""
        if self._descriptor < 0:
            self._open()
        os.write(self._descriptor, b"".join(record(scalars(row)) for row in rows if row.values or row.compute >= 0))

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in self._run)[:60] or "run"
        folder = self._folder / f"{name}-rank{self._rank()}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        version = _field(3, b"brain.Event:2")
        os.write(self._descriptor, record(_double(1, time.time()) + version))


def scalars(row: ReportRow) -> bytes:
    """Return an `Event` message: wall_time (1), step (2), and a summary (5) with a tag (1) and a value (2) for each."""
    values = dict(row.values)
    if row.compute >= 0:
        values |= {"seconds/compute": row.compute, "seconds/sync": row.sync}
    summary = b"".join(
        _field(1, _field(1, name.encode()) + _key(2, 5) + struct.pack("<f", _single(value)))
        for name, value in values.items()
    )
    step = _key(2, 0) + _varint((row.step or 0) & (1 << 64) - 1)
    return _double(1, row.at) + step + _field(5, summary)


def record(data: bytes) -> bytes:
    """Return data as one record of an event file."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


def masked_crc(data: bytes) -> int:
    """Return the CRC-32C of data, masked as event files have it."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _CRC_MASK) & 0xFFFFFFFF


@cache
def _crc_table() -> tuple[int, ...]:
    return tuple(_crc_entries())


def _crc_entries() -> Iterator[int]:
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (_CASTAGNOLI if entry & 1 else 0)
        yield entry


def _single(value: float) -> float:
    """Return a number that fits into 32 bits: what is too large is infinite."""
    return math.copysign(math.inf, value) if math.isfinite(value) and abs(value) > 3.4028235e38 else value


def _key(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _field(number: int, data: bytes) -> bytes:
    return _key(number, 2) + _varint(len(data)) + data


def _double(number: int, value: float) -> bytes:
    return _key(number, 1) + struct.pack("<d", value)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*parts, value))
