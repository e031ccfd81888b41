"""Small HTML for notebooks: tables and marks that read well on a light and on a dark page. Every text is escaped."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MARK_COLOURS: Final = {"good": "#16a34a", "busy": "#2563eb", "warn": "#d97706", "bad": "#dc2626", "off": "#94a3b8"}
"""What a mark says, beside its words."""
_CELL: Final = "padding:2px 12px 2px 0;text-align:left;vertical-align:top"


class Mark(NamedTuple):
    """A text with a coloured dot before it."""

    text: str
    kind: str
    """One of MARK_COLOURS."""


class Shade(NamedTuple):
    """A text on a background that is the darker, the larger its share (0 to 1) is."""

    text: str
    share: float


Cell: TypeAlias = str | Mark | Shade


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]], note: str = "") -> str:
    """Return a table as HTML, below a title."""
    head = "".join(f'<th style="{_CELL};font-weight:600">{html.escape(each)}</th>' for each in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    below = f'<div style="opacity:.7">{html.escape(note)}</div>' if note else ""
    return (
        f'<div><div style="font-weight:600">{html.escape(title)}</div><table style="border-collapse:collapse">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}</div>"
    )


def line(mark: Mark) -> str:
    """Return one line as HTML."""
    return f"<div>{_marked(mark)}</div>"


def _cell(cell: Cell) -> str:
    if isinstance(cell, Shade):
        colour = f"rgba(37,99,235,{0.08 + 0.42 * cell.share:.2f})"
        return f'<td style="{_CELL};background:{colour}">{html.escape(cell.text)}</td>'
    return f'<td style="{_CELL}">{_marked(cell) if isinstance(cell, Mark) else html.escape(cell)}</td>'


def _marked(mark: Mark) -> str:
    return f'<span style="color:{MARK_COLOURS[mark.kind]}">&#9679;</span> {html.escape(mark.text)}'
