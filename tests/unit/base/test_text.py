"""Text of others: bounded, on one line, and nothing in it that a terminal would obey."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.base.text import TEXT_LIMIT, printable


@given(st.text(), st.integers(10, 50))
def test_whatever_it_was_it_is_printable_and_bounded(text: str, most: int) -> None:
    shown = printable(text, most)
    assert shown.isprintable()
    assert len(shown) <= most
    if text.isprintable() and len(text) <= most:
        assert shown == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("one\ntwo\r\n", r"one\ntwo\r\n"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\u2028line", r"\u2028line"),
        ("\x9b31m", r"\x9b31m"),
        ("\ud800", r"\ud800"),
        ("größer als 日本語 😀", "größer als 日本語 😀"),
    ],
)
def test_characters_that_do_something_are_written_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_long_text_is_cut_and_shows_it() -> None:
    assert printable("x" * 900_000) == "x" * (TEXT_LIMIT - 3) + "..."
    assert printable("\n" * 900_000).startswith(r"\n\n")
    assert len(printable("\n" * 900_000)) == TEXT_LIMIT
