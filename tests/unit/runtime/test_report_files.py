"""Files of reports: lines of JSON, and event files that TensorBoard reads."""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from typing import TYPE_CHECKING, Any

import pytest

from covey.base.errors import ConfigError
from covey.runtime.report_files import JsonLines, ScalarFile, masked_crc, open_sinks, record
from covey.runtime.report_log import ReportLog
from covey.wire.progress import ReportRow

if TYPE_CHECKING:
    from pathlib import Path

ROW = ReportRow(1700000000.25, 300, {"loss": 0.5, "rate": math.nan, "norm": math.inf}, 0.25, 0.125)


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of data, bit by bit, as its definition says."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def fields(data: bytes) -> list[tuple[int, Any]]:
    """Return the fields of a protobuf message: numbers, and what follows on the wire."""
    found: list[tuple[int, Any]] = []
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value

    while at < len(data):
        key = varint()
        number, kind = key >> 3, key & 7
        if kind == 0:
            found.append((number, varint()))
        else:
            size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
            found.append((number, data[at : at + size]))
            at += size
    return found


def records(data: bytes) -> list[bytes]:
    """Return the records of an event file, and check both sums of each."""
    found, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        (length_crc,) = struct.unpack_from("<I", data, at + 8)
        body = data[at + 12 : at + 12 + length]
        (body_crc,) = struct.unpack_from("<I", data, at + 12 + length)
        for part, stored in ((data[at : at + 8], length_crc), (body, body_crc)):
            unmasked = (stored - 0xA282EAD8) & 0xFFFFFFFF
            assert (unmasked >> 17 | unmasked << 15) & 0xFFFFFFFF == crc32c(part)
        found.append(body)
        at += 16 + length
    return found


def test_the_sum_is_that_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283, "the check value of CRC-32C"
    unmasked = (masked_crc(b"123456789") - 0xA282EAD8) & 0xFFFFFFFF
    assert (unmasked >> 17 | unmasked << 15) & 0xFFFFFFFF == 0xE3069283
    assert record(b"")[:8] == bytes(8)


def test_an_event_file_has_a_version_and_every_scalar_with_its_step_and_time(tmp_path: Path) -> None:
    sink = ScalarFile(tmp_path / "logs", "my run/1", lambda: 2)
    assert list((tmp_path / "logs").iterdir()) == [], "no file before the first report"
    sink.write([ROW, ReportRow(1700000001.0, None, {"loss": 1e300})])
    sink.write([ReportRow(1700000002.0, -1, {"loss": 2.0})])
    sink.close()
    (file,) = (tmp_path / "logs").rglob("events.out.tfevents.*")
    assert file.parent.name == "my-run-1-rank2"
    first, *events = records(file.read_bytes())
    assert fields(first)[1] == (3, b"brain.Event:2")
    wall, step, summary = fields(events[0])
    assert struct.unpack("<d", wall[1]) == (1700000000.25,)
    assert step == (2, 300)
    scalars = {}
    for number, value in fields(summary[1]):
        assert number == 1
        (_, tag), (key, raw) = fields(value)
        assert key == 2, "simple_value"
        scalars[tag.decode()] = struct.unpack("<f", raw)[0]
    assert math.isnan(scalars.pop("rate"))
    assert scalars == {"loss": 0.5, "norm": math.inf, "seconds/compute": 0.25, "seconds/sync": 0.125}
    assert fields(events[1])[1] == (2, 0), "a row without a step"
    assert fields(events[2])[1] == (2, (1 << 64) - 1), "a negative step, as protobuf has it"
    ((_, large),) = [pair for pair in fields(fields(fields(events[1])[2][1])[0][1]) if pair[0] == 2]
    assert struct.unpack("<f", large) == (math.inf,)


def test_lines_are_strict_json_and_numbers_that_it_has_not_are_named(tmp_path: Path) -> None:
    path = tmp_path / "reports"
    JsonLines(str(path), "train", lambda: 3).write([ROW, ReportRow(1.0, None, {})])
    assert oct(path.stat().st_mode & 0o777) == "0o600"

    def refuse(word: str) -> None:
        raise AssertionError(word)

    first, second = (json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines())
    assert first == {
        "run": "train", "rank": 3, "pid": os.getpid(), "time": 1700000000.25, "step": 300, "compute": 0.25,
        "sync": 0.125, "values": {"loss": 0.5, "rate": "NaN", "norm": "Infinity"},
    }  # fmt: skip
    assert (second["step"], second["compute"], second["values"]) == (None, None, {})


def test_processes_share_a_file_line_by_line(tmp_path: Path) -> None:
    path = str(tmp_path / "reports")
    sinks = [JsonLines(path, "train", lambda rank=rank: rank) for rank in range(4)]  # type: ignore[misc]
    threads = [threading.Thread(target=lambda sink=sink: [sink.write([ROW] * 10) for _ in range(20)]) for sink in sinks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ranks = [json.loads(line)["rank"] for line in (tmp_path / "reports").read_text().splitlines()]
    assert sorted(ranks) == [rank for rank in range(4) for _ in range(200)]


def test_a_file_or_folder_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"COVEY_REPORTS=.*nowhere.*cannot be written"):
        open_sinks({"COVEY_REPORTS": str(tmp_path / "nowhere" / "file")}, "run", lambda: 0)
    with pytest.raises(ConfigError, match=r"COVEY_TENSORBOARD=.*cannot be made"):
        open_sinks({"COVEY_TENSORBOARD": str(tmp_path / "file" / "logs")}, "run", lambda: 0)
    assert open_sinks({}, "run", lambda: 0) == []


def test_a_disk_that_fills_up_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "reports"
    log = ReportLog(None, open_sinks({"COVEY_REPORTS": str(path)}, "run", lambda: 0))
    log.add(1, {"loss": 1.0})
    path.unlink()
    path.mkdir()
    log.close()
    assert "reports could not be written" in caplog.text
