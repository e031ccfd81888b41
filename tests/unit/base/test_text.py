"""Text of others: bounded, on one line, and nothing in it that a terminal would obey."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.base.text import TEXT_LIMIT, listed_briefly, listed_ranks, printable


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


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "3"),
        ([0, 1, 3], "0, 1 and 3"),
        (range(16), "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14 and 15"),
        ([0, 1, 2, 3, 4, *range(6, 128)], "0 to 4 and 6 to 127"),
        ([0, 2, *range(4, 1000), 1023], "0, 2, 4 to 999 and 1023"),
        (range(0, 1024, 2), "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28 and 497 others"),
    ],
)
def test_many_ranks_are_told_as_intervals(ranks: list[int], text: str) -> None:
    assert listed_ranks(ranks) == text


def test_of_many_items_the_first_are_named_and_the_others_counted() -> None:
    assert listed_briefly(range(16)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14 and 15"
    assert listed_briefly(f"n{i}" for i in range(17)) == ", ".join(f"n{i}" for i in range(15)) + " and 2 others"
