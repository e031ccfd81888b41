"""What `covey bench train` makes of the courses that it has measured."""

from __future__ import annotations

import io
import json
import math
from xml.etree import ElementTree

import pytest
from rich.console import Console

from covey.base.errors import ConfigError
from covey.lab.bench import train
from covey.lab.bench.train import UNEVEN_SPEEDS, TrainTrial, order_of, proof
from covey.lab.bench.train_courses import TrainCase, TrainCourse, as_json, draw, from_text, markdown, rows, table


def course(
    way: str, line: int, seed: int, *, steps_per_second: float, gain: float = 1.0, machines: str = "equal"
) -> TrainCourse:
    """A loss that falls by a tenth with every `1 / gain` samples in a hundred."""
    points = [
        (float(second), round(100 * steps_per_second * second), float(5 * 0.9 ** (gain * steps_per_second * second)))
        for second in range(1, 11)
    ]
    return TrainCourse(case=TrainCase("mlp", machines, way, line, seed), points=points)


COURSES = [
    *(course("alone", 0, seed, steps_per_second=1.0) for seed in range(3)),
    *(course("bound", 0, seed, steps_per_second=2.0) for seed in range(3)),
    *(course("gloo", 100, seed, steps_per_second=0.2) for seed in range(3)),
    *(course("together", 100, seed, steps_per_second=1.8, gain=1 - 0.01 * seed) for seed in range(3)),
    course("ddp", 1000, 7, steps_per_second=2.0),  # without the runs that it is compared with
]
UNEVEN = [
    course("alone", 0, 0, steps_per_second=1.0, machines="uneven"),
    course("bound", 0, 0, steps_per_second=2.5, machines="uneven"),
    course("together", 100, 0, steps_per_second=2.4, machines="uneven"),
    course("together", 100, 0, steps_per_second=2.2, machines="loss"),
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


def test_a_run_in_which_a_machine_was_lost_is_compared_with_the_bound_of_its_machines() -> None:
    found = {(row.machines, row.way): row for row in rows([*COURSES, *UNEVEN])}
    uneven, lost = "3, one at half speed", "3, one at half speed; one lost and back"
    assert found[uneven, "together"].of_bound == pytest.approx(2.4 / 2.5, rel=0.02)
    assert found[lost, "together"].of_bound == pytest.approx(2.2 / 2.5, rel=0.02)
    page = markdown(rows(UNEVEN)).splitlines()
    assert page[1] == "| --- | --- | --- | --- | --: | --: | --: | --: | --: |"
    assert f"| mlp | {lost} | 100 Mbit/s | train_together | 1 |" in "\n".join(page)


def test_the_proof_compares_every_run_with_one_alone_and_with_its_bound_over_the_same_seeds() -> None:
    cases = proof()
    assert len(set(cases)) == len(cases)
    references = {(*case[:2], case.way, case.seed) for case in cases if case.way in ("alone", "bound")}
    for case in cases:
        machines = "uneven" if case.machines == "loss" else case.machines
        for way in ("alone", "bound"):
            assert (case.model, machines, way, case.seed) in references, case
    together = [case for case in cases if case.way == "together"]
    assert {(case.model, case.line) for case in together if case.machines == "equal"} == {
        *((model, line) for model in ("mlp", "attention") for line in (10, 100, 1000)),
        ("lora", 10),
    }
    assert {case.seed for case in together} == {0, 1, 2}
    assert {case.machines for case in together} == {"equal", "uneven", "loss"}
    first = [place for place, case in enumerate(cases) if case.seed == 0]
    assert first == list(range(len(first))), "an interrupted proof has all rows of one seed first"
    # On two quiet cores it takes no longer than 150 minutes, also with the packages that may be installed.
    most = len(cases) + sum(case.way == "diloco" for case in cases) * (
        2 - sum(w in train.installed() for w in train.OTHER_PACKAGES)
    )
    assert most * (60 + train.LIKELY_START_SECONDS) < 150 * 60


def test_ranks_of_uneven_machines_compute_at_their_speeds_and_the_last_one_is_lost_once() -> None:
    uneven = TrainCase("mlp", "loss", "together", 100, 0, 3, 60.0)
    orders = [order_of(uneven, rank) for rank in range(3)]
    assert tuple(order.speed for order in orders) == UNEVEN_SPEEDS
    assert [order.lost_after for order in orders] == [0, 0, 24]
    assert order_of(uneven, 2, is_back=True).lost_after == 0
    assert {order.least for order in orders} == {2}
    bound = order_of(uneven._replace(machines="uneven", way="bound"), 0)
    assert (bound.way, bound.exact, bound.least) == ("together", True, 3)
    equal = order_of(TrainCase("mlp", "equal", "bound", 0, 0), 1)
    assert (equal.way, equal.exact, equal.speed) == ("bound", False, 1.0)


def test_courses_go_through_a_file_and_into_a_picture() -> None:
    text = json.dumps(as_json(COURSES)).encode()
    assert from_text(text) == COURSES
    older = text.replace(b'"equal"', b'"alike"')
    for damaged in (b"", text[:-20], b"\xff", b"5", b'[{"way": "alone"}]', older, text.replace(b'"alone"', b'"lone"')):
        with pytest.raises(ConfigError, match="no file of `covey bench train --add`"):
            from_text(damaged)
    picture = ElementTree.fromstring(draw([*COURSES, *UNEVEN]))
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
