"""The output of a program: in order, bounded, and readable from any record on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from covey.agent import jobs
from covey.agent.jobs import OutputLog
from covey.agent.requests import OUTPUT_CHUNK_BYTES
from covey.base.errors import ConfigError
from covey.net.host.saved_output import LOG_HEADER_BYTES

if TYPE_CHECKING:
    from pathlib import Path


def read_all(log: OutputLog, offset: int = 0) -> tuple[list[tuple[int, bytes]], int]:
    """Return all records from an offset on, and how many bytes were missing."""
    records, missing = list[tuple[int, bytes]](), 0
    while True:
        batch = log.read(offset)
        records += batch.records
        missing += batch.missing
        if batch.next == offset or batch.code is not None:
            return records, missing
        offset = batch.next


def test_records_come_in_order_with_their_streams_and_the_exit_code_last(tmp_path: Path) -> None:
    log = OutputLog(tmp_path)
    written = [(1 + number % 2, b"%d " % number * (number + 1)) for number in range(500)]
    for stream, data in written:
        log.append(stream, data)
    assert log.read(0).code is None
    log.end(3)
    records, missing = read_all(log)
    assert (records, missing) == (written, 0)
    middle = log.read(0).next
    assert read_all(log, middle)[0] == written[len(log.read(0).records) :]
    end = log.read(middle)
    while end.code is None:
        end = log.read(end.next)
    assert end.code == 3


def test_a_reader_that_falls_behind_is_told_how_much_it_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "LOG_BYTES", 4000)
    log = OutputLog(tmp_path)
    for number in range(200):
        log.append(1, (b"%d" % number).zfill(100 - LOG_HEADER_BYTES))  # with its header, 100 bytes
    records, missing = read_all(log)
    assert [int(data) for _, data in records] == list(range(160, 200))
    assert missing == 160 * 100
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 4000


def test_a_flood_stays_within_the_files_and_a_batch_within_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "LOG_BYTES", 400_000)
    log = OutputLog(tmp_path)
    for _ in range(20):
        log.append(2, b"x" * 64_000)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 400_000
    batch = log.read(0)
    assert 0 < sum(len(data) for _, data in batch.records) <= OUTPUT_CHUNK_BYTES


def test_an_offset_at_which_no_record_begins_is_refused(tmp_path: Path) -> None:
    log = OutputLog(tmp_path)
    log.append(1, b"\xff" * 100)
    with pytest.raises(ConfigError, match="no output begins at 7"):
        log.read(7)
    assert log.read(10_000).records == ()


def test_listeners_hear_of_output_and_of_the_end_until_they_stop(tmp_path: Path) -> None:
    log, heard = OutputLog(tmp_path), list[int]()
    stop = log.listen(lambda: heard.append(1))
    log.append(1, b"a")
    log.end(0)
    stop()
    log.remove()
    assert heard == [1, 1]
    assert list(tmp_path.iterdir()) == []
