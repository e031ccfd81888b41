"""The tables and the picture about training together are those of the measured runs."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from tools import training_pages

from covey.lab.bench.train_courses import TrainCase, TrainCourse

if TYPE_CHECKING:
    from pathlib import Path


def course(way: str, line: int, speed: float) -> TrainCourse:
    points = [(float(at), round(100 * speed * at), 5 * 0.9 ** (speed * at)) for at in range(1, 11)]
    return TrainCourse(case=TrainCase("mlp", "equal", way, line, 0), points=points)


def test_the_pages_have_what_was_measured() -> None:
    for path, text in training_pages.pages(training_pages.measured()).items():
        assert path.read_text() == text, "run `python -m tools.training_pages`"


def test_a_new_proof_replaces_the_tables_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "docs" / "guides").mkdir(parents=True)
    for name in ("README.md", "docs/guides/training-together.md"):
        shutil.copy(training_pages.ROOT / name, tmp_path / name)
    before = (tmp_path / "README.md").read_text()
    for speed in (1.8, 1.5):
        courses = [course("alone", 0, 1.0), course("bound", 0, 2.0), course("together", 10, speed)]
        for path, text in training_pages.pages(courses, tmp_path).items():
            path.write_text(text)
    readme, guide = (tmp_path / "README.md").read_text(), (tmp_path / "docs/guides/training-together.md").read_text()
    assert readme.count("| mlp | 2 equal | 10 Mbit/s | train_together | 1 | 6.7 s | 1.50x | 0.75 |") == 1
    assert "bound: exact" not in readme
    assert guide.count("| mlp | 2 equal | - | bound: exact, unshaped | 1 | 5.0 s | 2.00x | 1.00 |") == 1
    assert "polyline" in (tmp_path / "docs" / "training.svg").read_text()
    for path, text in training_pages.pages([], tmp_path).items():
        path.write_text(text)
    assert (tmp_path / "README.md").read_text() == training_pages.with_block(before, "")
    with pytest.raises(ValueError, match="no place"):
        training_pages.with_block("# A page\n", "")
