"""The distribution of recoveries, as numbers and as a picture."""

from __future__ import annotations

import pytest

from covey.base.errors import ConfigError
from covey.lab.bench.recovery import Drill, Kill, headline, histogram, summary


def kill(total: float, **phases: float) -> Kill:
    return Kill(1, 2, True, total, phases, True)


def test_percentiles_are_values_that_were_measured() -> None:
    kills = [kill(float(number), detect=number / 2) for number in range(1, 21)] + [kill(500.0)]
    assert summary(kills) == {
        "total": {"p50": 11.0, "p95": 20.0, "max": 500.0},
        "detect": {"p50": 5.25, "p95": 9.5, "max": 10.0},
    }


def test_a_histogram_counts_every_value_once() -> None:
    lines = histogram([10.0, 10.5, 11.0, 50.0])
    assert [line.split()[0] for line in lines[:2]] == ["10.0", "15.0"]
    assert lines[0].endswith("# 3")
    assert lines[-1].endswith("# 1")
    assert sum(int(line.split()[-1]) for line in lines if "#" in line) == 4
    assert histogram([7.0])[0].endswith("# 1")


def test_the_headline_says_what_was_measured() -> None:
    drill = Drill(size=3, lanes="tcp", nbytes=64 << 20)
    assert headline(drill, [kill(1.0)]) == "all_reduce of 64 MiB, 3 ranks, tcp: 1 kills, 1 in mid-operation"


@pytest.mark.parametrize("change", [{"size": 1}, {"size": 33}, {"lanes": "pigeon"}, {"kills": 0}])
def test_nonsense_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Drill(**change)  # type: ignore[arg-type]
