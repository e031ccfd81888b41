"""What processes note for `covey history`: bounded, harmless if it cannot be written, and nothing of it is believed."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING

import pytest

from covey.net.host import run_notes
from covey.net.host.run_notes import last_reported, note_checkpoint, note_members, noted_checkpoints, noted_members
from covey.runtime.metrics import flight
from covey.runtime.report_files import LastReport
from covey.wire.progress import ReportRow

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COVEY_KEPT_FOLDER", str(tmp_path))
    return tmp_path


def test_the_last_report_is_that_of_the_highest_step_by_the_lowest_rank(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert last_reported(kept) is None
    for rank in (1, 0, 2):
        monkeypatch.setattr(os, "getpid", lambda: 100 + rank)  # noqa: B023
        sink = LastReport(kept, lambda: rank)  # noqa: B023
        sink.write([ReportRow(10.0, 1, {"loss": 5.0, "lr": 0.1})])
        sink.write([ReportRow(20.0, 7 if rank < 2 else 6, {"loss": math.nan if rank else 2.0})])
        sink.close()
    found = last_reported(kept)
    assert found is not None
    assert found == (0, 7, 20.0, {"loss": 2.0, "lr": 0.1})


def test_what_cannot_be_read_is_left_out(kept: Path) -> None:
    good = {"rank": 3, "step": None, "at": 5.0, "values": {"los\x1bs": "nan"}}
    for number, text in enumerate(["", "{", "[]", '{"rank": "x"}', json.dumps(good)]):
        (kept / f"report-{number}").write_text(text)
    (kept / "report-x").write_text("{}")
    found = last_reported(kept)
    assert found is not None
    assert (found.rank, found.step, list(found.values)) == (3, None, ["los\\x1bs"])


def test_checkpoints_are_noted_each_once_and_the_file_is_bounded(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in [*range(30), 25]:
        note_checkpoint(f"/models/step {step}\n")
    found = noted_checkpoints(kept)
    assert found == [f"/models/step {step}\\n" for step in [*range(20, 25), *range(26, 30), 25]]
    monkeypatch.setattr(run_notes, "CHECKPOINTS_BYTES", 1000)
    for step in range(100):
        note_checkpoint(f"/models/step {step}")
    assert (kept / "checkpoints").stat().st_size < 1100
    assert noted_checkpoints(kept)[-1] == "/models/step 99"
    monkeypatch.setenv("COVEY_KEPT_FOLDER", str(kept / "gone"))
    note_checkpoint("/models/step 100")
    monkeypatch.delenv("COVEY_KEPT_FOLDER")
    note_checkpoint("/models/step 101")
    assert noted_checkpoints(kept)[-1] == "/models/step 99"


def test_members_are_those_of_all_generations_and_the_file_is_bounded(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert noted_members(kept) is None
    note_members(4, ["north", "south", "south"])
    note_members(2, ["north"])
    with (kept / "members").open("a") as file:
        file.write('nonsense\n{"ranks": "x"}\n[]\n')
    note_members(3, ["north", "at\x1btic"])
    assert noted_members(kept) == (4, ("north", "south", "at\\x1btic"))
    monkeypatch.setattr(run_notes, "MEMBERS_BYTES", 1000)
    for number in range(100):
        note_members(number, [f"machine {number}"])
    assert (kept / "members").stat().st_size < 1100
    found = noted_members(kept)
    assert found is not None
    assert (found.ranks, found.machines[-1]) == (99, "machine 99")


def test_the_traces_of_a_run_are_those_of_its_name_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "folder", lambda: tmp_path)
    for name in (
        "my-run-rank0-7-5000000000",
        "my-run-rank1-8-9000000000",
        "my-run-2-rank0-7-5000000000",
        "other-rank0-7-5",
    ):
        (tmp_path / f"{name}.covey-trace").touch()
    assert [path.name[:12] for path in flight.traces_of("my run", 4.0, 6.0)] == ["my-run-rank0"]
    assert len(flight.traces_of("my run", 0.0, 100.0)) == 2
    assert flight.traces_of("*", 0.0, 100.0) == []
