"""What `covey bench train` makes of the courses that it has measured."""

from __future__ import annotations

import io
import math
from xml.etree import ElementTree

import pytest
from rich.console import Console

from covey.base.errors import ConfigError
from covey.lab.bench.train import TrainCourse, TrainTrial, as_json, draw, from_json, rows, table


def course(way: str, line: int, seed: int, *, steps_per_second: float, gain: float = 1.0) -> TrainCourse:
    """A loss that falls by a tenth with every `1 / gain` samples in a hundred."""
    points = [
        (float(second), round(100 * steps_per_second * second), float(5 * 0.9 ** (gain * steps_per_second * second)))
        for second in range(1, 11)
    ]
    return TrainCourse(model="mlp", way=way, line=line, seed=seed, points=points)


COURSES = [
    *(course("alone", 0, seed, steps_per_second=1.0) for seed in range(3)),
    *(course("bound", 0, seed, steps_per_second=2.0) for seed in range(3)),
    *(course("gloo", 100, seed, steps_per_second=0.2) for seed in range(3)),
    *(course("together", 100, seed, steps_per_second=1.8, gain=1 - 0.01 * seed) for seed in range(3)),
    course("ddp", 1000, 7, steps_per_second=2.0),  # without the runs that it is compared with
]


def test_rows_compare_each_run_with_those_of_its_seed_and_take_medians() -> None:
    found = {(row.way, row.line): row for row in rows(COURSES)}
    assert found.keys() == {("alone", 0), ("bound", 0), ("gloo", 100), ("together", 100)}
    assert found["alone", 0].seconds == pytest.approx(10)
    assert found["bound", 0].of_bound == 1
    assert found["bound", 0].against_alone == pytest.approx(2, rel=0.02)
    slow = found["gloo", 100]
    assert (slow.seconds, slow.of_bound, slow.against_alone) == (math.inf, 0, 0)
    assert slow.at_equal_samples == pytest.approx(1, rel=0.05)
    ours = found["together", 100]
    assert ours.of_bound == pytest.approx(0.9 * 0.99, rel=0.02)
    assert ours.at_equal_samples == pytest.approx(0.9 ** (18 * -0.01), rel=0.02)
    console = Console(width=200, file=io.StringIO())
    console.print(table(rows(COURSES)))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count("not reached") == 1
    assert "train_together" in shown


def test_courses_go_through_a_file_and_into_a_picture() -> None:
    assert from_json(as_json(COURSES)) == COURSES
    picture = ElementTree.fromstring(draw(COURSES))
    drawn = [each.get("class") for each in picture.iter("{http://www.w3.org/2000/svg}polyline")]
    assert sorted(filter(None, drawn)) == [
        *("line alone", "line alone", "line bound", "line bound", "line gloo", "line together")  # two lines
    ]


def test_trials_that_cannot_be_run_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown way tog"):
        TrainTrial(ways=("tog",))
    with pytest.raises(ConfigError, match="unknown model cnn"):
        TrainTrial(models=("cnn",))
    with pytest.raises(ConfigError, match="above 0"):
        TrainTrial(lines=(0,))
