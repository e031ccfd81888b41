"""What ranks say: prefixed, whole, and in order."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios

from hypothesis import given
from hypothesis import strategies as st

from covey.runtime.keeper.output import LINE_LIMIT_BYTES, PROMPT_SECONDS, Cursor, OutputStream, note_line


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
