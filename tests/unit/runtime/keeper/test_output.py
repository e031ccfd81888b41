"""What ranks say: prefixed, whole, and in order."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.base.errors import ConfigError
from covey.runtime.keeper import output as output_module
from covey.runtime.keeper.output import (
    LINE_LIMIT_BYTES,
    PROMPT_SECONDS,
    Cursor,
    OutputDescriptor,
    OutputStream,
    RankLogs,
    note_line,
)

if TYPE_CHECKING:
    from pathlib import Path


def two_outputs() -> tuple[OutputStream, OutputStream]:
    cursor = Cursor()
    return OutputStream(0, cursor, coloured=False), OutputStream(1, cursor, coloured=False)


def test_a_line_is_shown_when_it_is_finished() -> None:
    first, second = two_outputs()
    assert first.feed(b"ab", now=5.0) == b""
    assert first.show_at == 5.0 + PROMPT_SECONDS
    assert second.feed(b"x\ny\n", now=5.1) == b"[1] x\n[1] y\n"
    assert first.feed(b"c\nd", now=5.1) == b"[0] abc\n"
    assert first.end() == b"[0] d\n"
    assert first.show_at is None


def test_an_unfinished_line_goes_on_in_place_if_no_other_rank_wrote_meanwhile() -> None:
    first, _ = two_outputs()
    first.feed(b"loading", now=0.0)
    assert first.flush() == b"[0] loading"
    assert first.feed(b"... done\nnext\n", now=1.0) == b"... done\n[0] next\n"


def test_the_output_of_another_rank_never_ends_up_in_an_unfinished_line() -> None:
    first, second = two_outputs()
    first.feed(b"loading", now=0.0)
    assert first.flush() == b"[0] loading"
    assert second.feed(b"hello\n", now=1.0) == b"\n[1] hello\n"
    assert first.feed(b" done\n", now=2.0) == b"[0]  done\n"


def test_the_end_of_a_line_that_another_rank_has_ended_makes_no_empty_line() -> None:
    first, second = two_outputs()
    first.feed(b"loaded", now=0.0)
    assert first.flush() == b"[0] loaded"
    assert second.feed(b"hello\n", now=1.0) == b"\n[1] hello\n"
    assert first.feed(b"\n", now=2.0) == b""
    assert first.feed(b"\n", now=2.1) == b"[0] \n"


def test_a_progress_bar_keeps_its_prefix_when_it_is_redrawn() -> None:
    first, second = two_outputs()
    assert first.feed(b"10%\r20%\r", now=0.0) == b"[0] 10%\r[0] 20%\r"
    assert first.feed(b"30%", now=0.1) == b""
    assert first.flush() == b"[0] 30%"
    assert first.feed(b"\r40%\r", now=0.2) == b"\r[0] 40%\r"
    assert second.feed(b"hello\n", now=0.3) == b"\n[1] hello\n"
    assert first.feed(b"\n", now=0.4) == b""


def test_a_carriage_return_before_a_newline_is_part_of_the_line_end() -> None:
    first, _ = two_outputs()
    assert first.feed(b"one\r\ntwo\r", now=0.0) == b"[0] one\r\n[0] two\r"
    assert first.feed(b"\nthree\n", now=0.1) == b"\n[0] three\n"


def test_little_of_an_endless_line_is_held_back() -> None:
    first, _ = two_outputs()
    shown = sum(len(first.feed(b"x" * 1000, now=0.0)) for _ in range(1000))
    assert shown >= 1_000_000 - LINE_LIMIT_BYTES


SPEECH = st.lists(
    st.tuples(st.sampled_from([0, 1]), st.text(alphabet="ab\n", max_size=6).map(str.encode), st.booleans()), max_size=20
)


@given(SPEECH)
def test_every_shown_line_has_one_speaker_and_nothing_is_lost(speech: list[tuple[int, bytes, bool]]) -> None:
    streams = two_outputs()
    shown = b""
    for rank, text, pause in speech:
        shown += streams[rank].feed(text, now=0.0)
        if pause:
            shown += streams[rank].flush()
    shown += streams[0].end() + streams[1].end()
    lines = shown.splitlines(keepends=True)
    assert all(line.startswith((b"[0] ", b"[1] ")) and line.endswith(b"\n") for line in lines)
    for rank in range(2):
        prefix = b"[%d] " % rank
        heard = b"".join(text for speaker, text, _ in speech if speaker == rank)
        said = b"".join(line.removeprefix(prefix) for line in lines if line.startswith(prefix))
        assert said.replace(b"\n", b"") == heard.replace(b"\n", b"")


def test_what_is_said_of_a_run_is_wrapped_at_words_on_a_terminal_only() -> None:
    text = "a machine with a name: it makes the environment of the requirements, which takes a while"
    ours, theirs = pty.openpty()
    reader, writer = os.pipe()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        shown = note_line(text, theirs).decode()
        assert max(map(len, shown.splitlines())) <= 40
        assert shown.split() == ["covey:", *text.split()]
        assert note_line(text, writer) == f"covey: {text}\n".encode()
    finally:
        for descriptor in (ours, theirs, reader, writer):
            os.close(descriptor)


FULL = "/dev/full"


def test_a_file_on_a_full_disk_is_told_of_once_and_says_later_what_it_lacks(tmp_path: Path) -> None:
    logs, file = RankLogs(str(tmp_path)), tmp_path / "rank-3.log"
    assert logs.write("3", b"a\n") == ""
    assert logs.is_complete
    file.rename(tmp_path / "before")
    file.symlink_to(FULL)
    told = logs.write("3", b"bcd\n")
    assert told.startswith(f"{file} cannot be written (No space left on device)")
    assert logs.write("3", b"ef\n") == ""
    assert not logs.is_complete
    file.unlink()
    (tmp_path / "before").rename(file)
    assert logs.write("3", b"g\n") == ""
    assert logs.write("3", b"h\n") == ""
    gap = "\ncovey: 7 bytes could not be written here (No space left on device)\n"
    assert file.read_text() == f"a\n{gap}g\nh\n"
    assert not logs.is_complete


def test_a_folder_that_takes_no_byte_is_refused_before_the_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: object) -> object:
        return open(FULL, "wb")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(ConfigError, match="No space left on device; choose a folder that can be written"):
        RankLogs(str(tmp_path))


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
    monkeypatch.setattr(output_module, "RETRY_SECONDS", 0.0)
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
    monkeypatch.setattr(output_module, "RETRY_SECONDS", 0.0)
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        output = OutputDescriptor(write_end)
        assert output.write(b"one\n") == 0
        assert output.failure == "Broken pipe"
        assert not output.is_open()
    finally:
        os.close(write_end)
