"""Write what `covey bench train --all` has measured into README and the guide, as a table and a picture.

    sudo covey bench train --all --add docs/training.json
    python -m tools.training_pages

No number of these tables is written by hand: a test compares both pages and the picture with what this makes of
`docs/training.json`. Without that file the pages have no table.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from covey.lab.bench.train_courses import draw, from_text, markdown, rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.lab.bench.train_courses import TrainCourse

ROOT: Final = Path(__file__).parents[1]
BEGIN: Final = "<!-- Made by `python -m tools.training_pages` from docs/training.json: do not edit. -->\n"
END: Final = "<!-- end -->\n"
SHORT: Final = ("gloo", "together")
"""The ways that README shows."""


def pages(courses: Sequence[TrainCourse], root: Path = ROOT) -> dict[Path, str]:
    """Return the files with the text that they should have."""
    found = rows(courses)
    shown = {
        root / "README.md": ([row for row in found if row.way in SHORT], "docs/training.svg"),
        root / "docs" / "guides" / "training-together.md": (found, "../training.svg"),
    }
    made = {
        path: with_block(path.read_text(), f"{markdown(of_page)}\n![Loss against time]({picture})\n" if found else "")
        for path, (of_page, picture) in shown.items()
    }
    return made | ({root / "docs" / "training.svg": draw(courses)} if found else {})


def with_block(page: str, block: str) -> str:
    """Return a page with `block` where the last one was."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise ValueError("the page has no place for the table")
    return "".join([before, BEGIN, f"\n{block}\n" if block else "", END, after])


def measured(root: Path = ROOT) -> list[TrainCourse]:
    """Return the courses of the proof; none before it has run."""
    file = root / "docs" / "training.json"
    return from_text(file.read_bytes()) if file.exists() else []


if __name__ == "__main__":
    for path, text in pages(measured()).items():
        path.write_text(text)
