import io
import json
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

from covey.lab.bench import metrics
from covey.lab.bench.plot import decades, draw
from covey.lab.bench.report import Measurement, Round, as_json, format_seconds, line, ratios, table
from covey.lab.bench.sweep import MEASURED_OPERATIONS, Case, Contender, Sweep
from covey.runtime.counters import process

SHM, TCP = Contender("covey shm", "covey", "shm"), Contender("covey tcp", "covey", "tcp")
GLOO, MPI, MPI_TCP = Contender("gloo", "gloo"), Contender("mpi", "mpi"), Contender("mpi-tcp", "mpi", "tcp")
SVG = "{http://www.w3.org/2000/svg}"


def case(size: int = 1 << 20, operation: str = "all_reduce", ranks: int = 4) -> Case:
    return Case(MEASURED_OPERATIONS[operation], size, ranks, "float32")


def measured(contender: Contender, microseconds: int, of: Case | None = None) -> Measurement:
    """Two rounds of two iterations; the last rank is the slowest, and each round costs a second a rank."""
    of = of or case()
    times = tuple((microseconds * 500, microseconds * 500) for _ in range(of.ranks - 1))
    turn = Round((*times, (microseconds * 1000, microseconds * 1000)), (1.0,) * of.ranks)
    return Measurement(of, contender, (turn, turn))


def all_engines(of: Case) -> list[Measurement]:
    speeds = {SHM: 100, TCP: 200, GLOO: 400, MPI: 50, MPI_TCP: 100}
    return [measured(contender, speed, of) for contender, speed in speeds.items()]


def shown(measurements: list[Measurement], width: int | None = None) -> str:
    out = io.StringIO()
    Console(file=out).print(table(measurements, width), soft_wrap=True)
    return out.getvalue()


def test_an_iteration_takes_as_long_as_its_slowest_rank() -> None:
    turn = Round(((1000, 4000), (3000, 2000)), (0.0, 0.0))
    assert turn.seconds == pytest.approx([3e-6, 4e-6])


def test_percentiles_are_taken_over_all_rounds() -> None:
    rounds = tuple(Round((tuple(range(start, 101_000, 2000)),), (0.0,)) for start in (0, 1000))
    row = Measurement(case(), SHM, rounds)
    assert row.p50 == pytest.approx(50e-6)
    assert row.p99 == pytest.approx(99e-6)


def test_bandwidths_and_processor_time_follow_from_the_median_and_the_buffer() -> None:
    row = measured(SHM, 1000)
    assert row.algorithm_bandwidth == pytest.approx((1 << 20) / 1e-3)
    assert row.bus_bandwidth == pytest.approx(1.5 * (1 << 20) / 1e-3)
    assert row.cpu_per_gib == pytest.approx(8 / (4 / 1024))


def test_a_barrier_has_a_latency_and_no_bandwidth() -> None:
    row = measured(SHM, 10, case(0, "barrier"))
    assert row.p50 == pytest.approx(10e-6)
    assert row.algorithm_bandwidth == 0
    assert row.cpu_per_gib is None
    assert "10.0 us" in shown([row])


def test_every_lane_meets_gloo_and_open_mpi_meets_its_like() -> None:
    found = {(r.contender.name, r.opponent.name): r.value for r in ratios(all_engines(case()))}
    assert found == pytest.approx(
        {
            ("covey shm", "gloo"): 4.0,
            ("covey shm", "mpi"): 0.5,
            ("covey tcp", "gloo"): 2.0,
            ("covey tcp", "mpi-tcp"): 0.5,
        }
    )


def test_ratios_never_mix_sizes() -> None:
    mixed = [measured(SHM, 100, case(4)), measured(GLOO, 400, case(8))]
    assert ratios(mixed) == []


def test_the_table_names_each_size_once_and_puts_ratios_in_coveys_rows() -> None:
    text = shown(all_engines(case(4)) + all_engines(case(1 << 20)) + all_engines(case(512 << 20)))
    assert text.count("1 MiB") == 1
    assert "…" not in text
    for heading in ("p50", "p99", "alg GB/s", "bus GB/s", "CPU s/GiB", "vs gloo", "vs mpi", "vs mpi-tcp"):
        assert heading in text
    (shm, *_) = [row for row in text.splitlines() if "covey shm" in row]
    (gloo, *_) = [row for row in text.splitlines() if row.strip().startswith("gloo")]
    assert "4.00x" in shm
    assert "0.50x" in shm
    assert "x" not in gloo.replace("gloo", "")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_and_keeps_sizes_contenders_medians_and_ratios(width: int) -> None:
    text = shown(all_engines(case(4)) + all_engines(case(512 << 20)), width)
    for each in text.splitlines():
        assert len(each) <= width
        assert each == each.rstrip()
    for word in ("size", "512 MiB", "covey shm", "mpi-tcp", "p50", "100 us", "vs gloo", "4.00x"):
        assert word in text
    assert ("CPU s/GiB" in text) == (width == 120)


def test_the_table_alone_has_no_ratio_columns() -> None:
    text = shown([measured(SHM, 100), measured(TCP, 200)])
    assert "covey tcp" in text
    assert "vs" not in text


def test_a_case_fits_in_one_plain_line() -> None:
    rows = [measured(SHM, 100), measured(GLOO, 1400)]
    assert line(case(), rows) == "all_reduce 1 MiB, 4 ranks: covey shm 100 us, gloo 1.40 ms"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.5e-8, "25.0 ns"), (1.234e-6, "1.23 us"), (12.34e-6, "12.3 us"), (0.1234, "123 ms"), (12.3, "12.3 s")],
)
def test_durations_have_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_the_json_has_every_raw_number_and_survives_the_round_trip() -> None:
    sweep = Sweep(ranks=(4,), opponents=("gloo",))
    document = as_json(sweep, [measured(SHM, 100), measured(GLOO, 400)], {"cores": 2}, {"torch": "9"})
    document = json.loads(json.dumps(document))
    first = document["results"][0]
    assert first["rounds"][1]["nanoseconds_by_rank"] == [[50_000, 50_000]] * 3 + [[100_000, 100_000]]
    assert first["rounds"][1]["cpu_seconds_by_rank"] == [1.0] * 4
    assert (first["operation"], first["ranks"], first["contender"], first["iterations"]) == (
        "all_reduce",
        4,
        "covey shm",
        4,
    )
    assert document["ratios"][0]["times_faster"] == pytest.approx(4.0)
    assert document["machine"] == {"cores": 2}
    assert document["versions"] == {"torch": "9"}
    assert document["settings"]["against"] == ["gloo"]


def test_the_plot_is_well_formed_and_shows_each_contender_in_both_panels() -> None:
    rows = [row for size in (4, 65536, 1 << 20) for row in all_engines(case(size))]
    root = ElementTree.fromstring(draw(rows, "a <machine> & a date"))
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert "a <machine> & a date" in texts
    for contender in (SHM, TCP, GLOO, MPI, MPI_TCP):
        assert contender.name in texts
        slug = contender.name.replace(" ", "-")
        lines = [line for line in root.iter(f"{SVG}polyline") if slug in line.get("class", "").split()]
        assert len(lines) == 2
        assert all(len(line.get("points", "").split()) == 3 for line in lines)
    assert "prefers-color-scheme: dark" in "".join(root.itertext())


def test_faster_is_lower_in_latency_and_higher_in_bandwidth() -> None:
    rows = [measured(SHM, 100), measured(GLOO, 400)]
    root = ElementTree.fromstring(draw(rows, ""))
    heights = {}
    for dot in root.iter(f"{SVG}circle"):
        title = dot.find(f"{SVG}title")
        if title is not None and title.text is not None:
            name, _, value = title.text.partition(", 1 MiB: ")
            heights[name, "B/s" in value] = float(dot.get("cy", ""))
    assert heights["covey shm", False] > heights["gloo", False]
    assert heights["covey shm", True] < heights["gloo", True]


def test_a_plot_of_one_size_or_of_nothing_is_still_a_picture() -> None:
    for rows in ([measured(SHM, 100)], [measured(SHM, 10, case(0, "barrier"))], []):
        ElementTree.fromstring(draw(rows, "here"))


def test_everything_drawn_lies_inside_the_picture() -> None:
    rows = [row for size in (4, 1 << 26) for op in ("all_reduce", "reduce") for row in all_engines(case(size, op))]
    root = ElementTree.fromstring(draw(rows, ""))
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    for dot in root.iter(f"{SVG}circle"):
        assert 0 < float(dot.get("cx", "")) < width
        assert 0 < float(dot.get("cy", "")) < height


def test_axis_ticks_are_round_numbers_and_few() -> None:
    assert decades(0.9e-6, 1.1e-5) == pytest.approx([1e-6, 2e-6, 5e-6, 1e-5])
    assert len(decades(1e-6, 1.0)) == 7


def test_the_costs_of_metrics_are_a_table_with_their_limits() -> None:
    groups = process.groups()
    costs = metrics.measure(rounds=2)
    assert process.groups() == groups, "what was measured is not counted"
    assert all(0 < cost.seconds < 1 for cost in costs)
    written = io.StringIO()
    Console(file=written, width=60).print(metrics.report([*costs, metrics.Cost("something slow", 0.0123, None)]))
    lines = written.getvalue().splitlines()
    assert lines[0].split() == ["COST", "OF", "TIME", "LIMIT"]
    assert any(line.startswith("an operation, in Python ") and line.endswith(" 1000 ns") for line in lines)
    assert lines[-1].split() == ["something", "slow", "12.30", "ms"]
