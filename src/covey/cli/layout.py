"""Lays out tables to fit a width: leaves out the least important columns and wraps long texts.

A column is never cut off. If even the columns that must stay are too wide, each row becomes a few lines instead.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

COLUMN_GAP: Final = 2
"""Blanks between columns."""
NO_VALUE: Final = "-"
"""Stands in a cell whose value is not known."""
NARROWEST: Final = 16
"""Least width of a column that wraps, in characters."""

Piece = tuple[str, str]
"""Text, and its style as rich names it; empty for none."""
Line = list[Piece]


@dataclass(frozen=True)
class Column:
    """A column of a table: its title and what stands below it."""

    title: str
    cells: Sequence[str | Piece]
    leave_out: int = 0
    """0: always shown. If there is too little room, columns with higher numbers are left out first."""
    wraps: bool = False
    """Long texts take several lines; a text without blanks is broken anywhere."""
    is_right: bool = False

    def width(self) -> int:
        return max(cell_len(self.title), *(cell_len(_text(cell)) for cell in self.cells))

    def least(self) -> int:
        return min(self.width(), max(NARROWEST, cell_len(self.title))) if self.wraps else self.width()


def room() -> int | None:
    """Return how many characters a line on standard output may have; None without a terminal."""
    if (text := os.environ.get("COLUMNS", "")).isdecimal() and int(text) > 0:
        return int(text)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def error_room() -> int | None:
    """Return how many characters a line on standard error may have; None without a terminal, where programs read it."""
    if not sys.stderr.isatty():
        return None
    try:
        return room() or os.get_terminal_size(sys.stderr.fileno()).columns or None
    except OSError:
        return None


def table(columns: Sequence[Column], width: int | None) -> str:
    """Return columns as lines of at most `width` characters, without styles and trailing blanks."""
    return "\n".join("".join(text for text, _ in line) for line in lay_out(columns, width))


def lay_out(columns: Sequence[Column], width: int | None, title_style: str = "") -> list[Line]:
    """Return columns as lines of at most `width` characters: pieces of text with their styles."""
    if not columns[0].cells:
        return []
    shown = [column for column in columns if column.title or any(map(_text, column.cells))]
    while width is not None and not fits(shown, width):
        surplus = max(shown, key=lambda each: each.leave_out)
        if surplus.leave_out == 0:
            return list(_records(shown, width, title_style))
        shown = [each for each in shown if each is not surplus]
    widths = _widths(shown, width)
    titles: list[Piece] = [(each.title, title_style) for each in shown]
    rows = [titles, *([_piece(each.cells[at]) for each in shown] for at in range(len(columns[0].cells)))]
    return [line for row in rows for line in _row(row, shown, widths)]


def fits(columns: Sequence[Column], width: int | None) -> bool:
    """Tell whether all of these columns have room beside each other."""
    return width is None or sum(each.least() + COLUMN_GAP for each in columns) - COLUMN_GAP <= width


def wrap(text: str, width: int) -> list[str]:
    """Return a text as lines of at most `width` characters, broken at blanks where possible.

    All lines are indented as the text is.
    """
    if cell_len(text) <= width:
        return [text.rstrip()]
    indent = " " * min(len(text) - len(text.lstrip(" ")), width // 2)
    width -= len(indent)
    lines = [""]
    for word in text.split():
        if lines[-1] and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if cell_len(lines[-1]) + cell_len(letter) > width:
                lines.append("")
            lines[-1] += letter
    return [indent + line if line else "" for line in lines]


def _widths(shown: Sequence[Column], width: int | None) -> list[int]:
    """Return the width of each column; those that wrap share the remaining room, the widest one last."""
    if width is None:
        return [each.width() for each in shown]
    widths = [each.least() for each in shown]
    spare = width - sum(widths) - COLUMN_GAP * (len(widths) - 1)
    for at in sorted(range(len(shown)), key=lambda at: shown[at].width()):
        more = min(spare, shown[at].width() - widths[at])
        widths[at] += more
        spare -= more
    return widths


def _row(row: Sequence[Piece], shown: Sequence[Column], widths: Sequence[int]) -> Iterator[Line]:
    cells = [wrap(text, width) for (text, _), width in zip(row, widths, strict=True)]
    for at in range(max(map(len, cells))):
        line: Line = []
        blanks = 0
        for lines, (_, style), column, width in zip(cells, row, shown, widths, strict=True):
            text = lines[at] if at < len(lines) else ""
            padding = width - cell_len(text)
            if text:
                before = blanks + (padding if column.is_right else 0)
                line += [(" " * before, "")] * bool(before) + [(text, style)]
                blanks = 0 if column.is_right else padding
            else:
                blanks += width
            blanks += COLUMN_GAP
        yield line


def _records(shown: Sequence[Column], width: int, title_style: str) -> Iterator[Line]:
    """Yield each row as several lines, one for each cell that is not empty."""
    indent = min(max(cell_len(each.title) for each in shown) + COLUMN_GAP, width // 2)
    for at in range(len(shown[0].cells)):
        if at:
            yield []
        for column in shown:
            text, style = _piece(column.cells[at])
            for number, line in enumerate(wrap(text, width - indent) if text else ()):
                title = column.title if number == 0 else ""
                pad = " " * (indent - cell_len(title))
                yield [(title, title_style), (pad, ""), (line, style)]


def _piece(cell: str | Piece) -> Piece:
    return (cell, "") if isinstance(cell, str) else cell


def _text(cell: str | Piece) -> str:
    return _piece(cell)[0]
