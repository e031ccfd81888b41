"""Output of a keeper that cannot be written for a while: it is counted, and told of when there is room again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from covey.runtime.keeper import output_descriptor
from covey.runtime.keeper.output_descriptor import OutputDescriptor

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def descriptor(tmp_path: Path):
    """One that leads to a file, and may be turned to another place."""
    number = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    yield number
    os.close(number)


def turn(descriptor: int, path: Path | str) -> None:
    target = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(target, descriptor)
    os.close(target)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device")
def test_output_goes_on_where_it_can_be_written_again_and_says_what_is_missing(
    descriptor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_descriptor, "RETRY_SECONDS", 0.0)
    output = OutputDescriptor(descriptor)
    assert output.write(b"[0] one\n[0] tw") == 14
    turn(descriptor, "/dev/full")
    assert output.write(b"o\n[0] three\n") == 0
    assert output.failure == "No space left on device"
    output.drop(b"o\n[0] three\n")
    assert output.is_open(), "it is tried again"
    assert output.write(b"[0] four\n") == 0
    output.drop(b"[0] four\n")
    turn(descriptor, tmp_path / "log")
    assert output.write(b"[0] five\n") == 9
    assert output.failure == ""
    assert (tmp_path / "log").read_text().splitlines() == [
        "[0] one",
        "[0] tw",
        "covey: output can be written again; 21 bytes could not be (No space left on device)",
        "[0] five",
    ]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device")
def test_a_full_disk_is_not_tried_for_every_line(descriptor: int) -> None:
    output = OutputDescriptor(descriptor)
    turn(descriptor, "/dev/full")
    assert output.write(b"one\n") == 0
    assert not output.is_open()


def test_a_pipe_without_a_reader_is_never_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_descriptor, "RETRY_SECONDS", 0.0)
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        output = OutputDescriptor(write_end)
        assert output.write(b"one\n") == 0
        assert output.failure == "Broken pipe"
        assert not output.is_open()
    finally:
        os.close(write_end)
