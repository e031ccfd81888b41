"""Pieces of a picture in a terminal: cells of fixed width, bars, curves, short numbers. Pure.

Widths are those of the terminal's cells. Texts may come from other machines: `clip` makes each line harmless, whatever
is in it.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len, set_cell_size

from covey.cli.layout import NO_VALUE, wrap

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from covey.cli.layout import Line

_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
PLAIN_LETTERS: Final = str.maketrans("─│▁▂▃▄▅▆▇█…·°", "-|__..--##..*")
"""For terminals without UTF-8."""


def clip(line: Line, width: int) -> Line:
    """Return a line of at most `width` cells, in which no character moves the cursor or changes the terminal."""
    kept: Line = []
    left = width
    for text, style in line:
        shown = text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)
        if (size := cell_len(shown)) > left:
            shown, size = set_cell_size(shown, left), left
        if shown:
            kept.append((shown, style))
        left -= size
    return kept


def width_of(line: Line) -> int:
    """Return how many cells a line takes."""
    return sum(cell_len(text) for text, _ in line)


def padded(line: Line, width: int) -> Line:
    """Return a line of exactly `width` cells."""
    kept = clip(line, width)
    missing = width - width_of(kept)
    return [*kept, (" " * missing, "")] if missing else kept


def fit(text: str, width: int, *, right: bool = False) -> str:
    """Return a text of exactly `width` cells; one that is too long ends with an ellipsis."""
    size = cell_len(text)
    if size > width:
        return set_cell_size(text, width - 1) + "…" if width > 1 else set_cell_size(text, width)
    return " " * (width - size) + text if right else text + " " * (width - size)


def rule(title: str, width: int, *, chosen: bool = False) -> Line:
    """Return a line across a panel, with its title."""
    shown = fit(f" {title} ", min(cell_len(title) + 2, max(width - 2, 1)))
    rest = max(width - 1 - cell_len(shown), 0)
    return [("─", "dim"), (shown, "bold" if chosen else ""), ("─" * rest, "dim")]


def paragraph(text: str, width: int, most: int) -> list[str]:
    """Return a text as at most `most` lines; the last one ends with an ellipsis if there is more."""
    lines = wrap(text, width)
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], fit(" ".join(lines[most - 1 :]), width).rstrip()] if most > 0 else []


def beside(left: Sequence[Line], right: Sequence[Line], widths: tuple[int, int], rows: int) -> list[Line]:
    """Return two columns of lines next to each other, with a line between them."""
    lines: list[Line] = []
    for at in range(rows):
        one = left[at] if at < len(left) else []
        other = right[at] if at < len(right) else []
        lines.append([*padded(one, widths[0]), ("│", "dim"), *clip(other, widths[1])])
    return lines


def bar(share: float, width: int) -> str:
    """Return a bar whose filled part is `share`, 0 to 1, of `width` cells."""
    if not math.isfinite(share):
        return ""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "▇" * max(filled, 1 if share > 0 else 0)


def curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return the last values as a curve of `height` rows, as wide as there are values, at most `width`.

    Where more values than columns are, each column has the mean of its values. A value that is no number is `!`.
    """
    columns = _columns(values, width)
    finite = [value for value in columns if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    steps = height * 8
    rows = [""] * height
    for value in columns:
        if not math.isfinite(value):
            cells = [" "] * (height - 1) + ["!"]
        else:
            filled = steps // 2 if high == low else 1 + round((value - low) / (high - low) * (steps - 1))
            cells = [_EIGHTHS[min(max(filled - 8 * (height - 1 - row), 0), 8)] for row in range(height)]
        rows = [row + cell for row, cell in zip(rows, cells, strict=True)]
    return rows


def _columns(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [len(values) * at // width for at in range(width + 1)]
    return [_mean(values[begin:end]) for begin, end in itertools.pairwise(edges)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if all(map(math.isfinite, values)) else math.nan


def number(value: float | None) -> str:
    """Return a number with four digits at most, or more before the point."""
    if value is None:
        return NO_VALUE
    if not math.isfinite(value):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 or (value == int(value) and abs(value) < 1e6) else f"{value:.4g}"


def seconds(value: float | None) -> str:
    """Return a duration in at most seven characters."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    if value < 0.9995:
        return f"{value * 1e3:.0f} ms" if value >= 0.00995 or value == 0 else f"{value * 1e3:.1f} ms"
    if value < 99.5:
        return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"
    minutes = int(value // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h" if minutes < 2880 else f"{minutes // 1440} d"


def lasted(value: float) -> str:
    """Return how long something has been going on: `2 h 13 min`."""
    minutes, whole = int(value // 60), max(int(value), 0)
    return (
        f"{whole} s" if whole < 120 else f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
    )


def byte_count(value: float | None) -> str:
    """Return a number of bytes in at most six characters."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if value >= 9.95 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def share(value: float | None) -> str:
    """Return a share, 0 to 1, as per cent in at most four characters."""
    return NO_VALUE if value is None or not math.isfinite(value) else f"{min(value * 100, 999):.0f}%"


def joined(parts: Iterable[str], between: str = "  ") -> str:
    """Return the parts that are not empty, with blanks between them."""
    return between.join(part for part in parts if part)
