"""Tables with a row and a column for each rank, in blocks that fit the terminal. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from covey.cli.layout import GAP, Column, lay_out
from covey.lab.bench.report import three_digits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from covey.cli.layout import Piece

LABEL_WIDTH: Final = 18
"""The most characters of a rank with the name of its machine."""
FAST_SHARE, SLOW_SHARE = 0.5, 0.1
"""A link of at least this share of the best one is green, or yellow; a slower one is red."""


def matrix(
    title: str,
    labels: Sequence[str],
    values: Mapping[tuple[int, int], float],
    write: Callable[[float], str],
    width: int | None,
    *,
    is_less_better: bool = False,
) -> list[Text]:
    """Return a title and lines of at most `width` characters: rows are senders, columns are receivers.

    `values` are by sender and receiver. If not all columns fit, they follow in several blocks, each with all rows.
    """
    best = min(values.values()) if is_less_better else max(values.values())
    ranks = range(len(labels))

    def cell(sender: int, receiver: int) -> Piece:
        if (value := values.get((sender, receiver))) is None:
            return "-", "dim"
        return write(value), _style(best / value if is_less_better else value / best)

    senders = Column("from", [_shortened(label) for label in labels])
    columns = [
        Column(f"to {receiver}", [cell(sender, receiver) for sender in ranks], is_right=True) for receiver in ranks
    ]
    lines = [Text(title, "bold")]
    for block in _blocks(senders, columns, width):
        lines += [Text.assemble(*line) for line in lay_out([senders, *block], width, "bold")]
    return lines


def _blocks(senders: Column, columns: Sequence[Column], width: int | None) -> list[list[Column]]:
    blocks: list[list[Column]] = [[]]
    used = senders.width()
    for column in columns:
        if width is not None and blocks[-1] and used + GAP + column.width() > width:
            blocks.append([])
            used = senders.width()
        blocks[-1].append(column)
        used += GAP + column.width()
    return blocks


def _shortened(label: str) -> str:
    return label if cell_len(label) <= LABEL_WIDTH else set_cell_size(label, LABEL_WIDTH - 2).rstrip() + ".."


def _style(share: float) -> str:
    return "green" if share >= FAST_SHARE else "yellow" if share >= SLOW_SHARE else "red"


def bits(bytes_per_second: float) -> str:
    """Write a speed in bits per second with three digits and the letter of its unit, as in `941M`."""
    value = bytes_per_second * 8
    for letter, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * scale:
            return f"{three_digits(value / scale)}{letter}"
    return three_digits(value)


def bits_per_second(bytes_per_second: float) -> str:
    """Write a speed as in `941 Mbit/s`."""
    text = bits(bytes_per_second)
    return f"{text[:-1]} {text[-1]}bit/s" if text[-1].isalpha() else f"{text} bit/s"


def short_seconds(seconds: float) -> str:
    """Write a duration with three digits and its unit, without a blank."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * scale:
            return f"{three_digits(seconds / scale)}{unit}"
    return f"{three_digits(seconds / 1e-6)}us"
