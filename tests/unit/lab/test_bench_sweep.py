import pytest

from covey.base.errors import ConfigError
from covey.lab.bench.sweep import (
    MEASURED_OPERATIONS,
    ROUND_ITERATIONS,
    Case,
    Sweep,
    format_bytes,
    iterations_for,
    parse_numbers,
    parse_operations,
    parse_sizes,
)


def test_sizes_are_read_with_binary_units_and_without_repeats() -> None:
    assert parse_sizes("4, 64K,1MiB,1m,2G,8 B") == (4, 64 << 10, 1 << 20, 2 << 30, 8)


@pytest.mark.parametrize("text", ["", "0", "-4", "4.5K", "1T", "K", "4,five"])
def test_a_size_that_cannot_be_read_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--sizes"):
        parse_sizes(text)


@pytest.mark.parametrize("text", ["", "two", "2,x", "-2"])
def test_rank_counts_that_are_not_numbers_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--ranks"):
        parse_numbers("--ranks", text)


def test_all_stands_for_every_operation() -> None:
    assert parse_operations("all") == tuple(MEASURED_OPERATIONS)
    assert parse_operations("barrier, reduce") == ("barrier", "reduce")


@pytest.mark.parametrize(
    ("count", "text"), [(4, "4 B"), (65536, "64 KiB"), (1572864, "1.5 MiB"), (3 << 40, "3072 GiB")]
)
def test_bytes_are_written_with_a_readable_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("name", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 4, 0.75),
        ("broadcast", 4, 1.0),
        ("reduce", 4, 1.0),
        ("send_recv", 4, 1.0),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(name: str, ranks: int, factor: float) -> None:
    assert MEASURED_OPERATIONS[name].bus_factor(ranks) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("name", "size", "dtype", "elements"),
    [
        ("all_reduce", 4, "float32", 1),
        ("all_reduce", 4, "float64", 1),
        ("all_reduce", 4099, "float32", 1024),
        ("all_gather", 4, "float32", 3),
        ("all_gather", 4096, "float32", 1023),
        ("barrier", 4096, "float32", 0),
    ],
)
def test_a_size_becomes_whole_elements_and_equal_parts(name: str, size: int, dtype: str, elements: int) -> None:
    case = Case(MEASURED_OPERATIONS[name], size, 3, dtype)
    assert case.elements == elements
    assert case.bytes == elements * (8 if dtype == "float64" else 4)


def test_a_round_fills_its_time_and_stays_bounded() -> None:
    assert iterations_for(0.001, 0.1) == 100
    assert iterations_for(5.0, 0.1) == 1
    assert iterations_for(1e-7, 0.1) == ROUND_ITERATIONS
    assert iterations_for(0.0, 0.1) == ROUND_ITERATIONS


def test_a_sweep_goes_through_operations_with_rising_sizes_and_one_barrier() -> None:
    sweep = Sweep(operations=("reduce", "barrier"), sizes=(1024, 4))
    assert [str(case) for case in sweep.cases(2)] == [
        "reduce 4 B, 2 ranks",
        "reduce 1 KiB, 2 ranks",
        "barrier, 2 ranks",
    ]


def test_covey_lanes_come_first_and_opponents_follow() -> None:
    sweep = Sweep(lanes=("tcp", "shm"), opponents=("mpi-tcp", "gloo"))
    assert [contender.name for contender in sweep.contenders()] == ["covey tcp", "covey shm", "mpi-tcp", "gloo"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"operations": ("all_reduec",)}, "unknown operation 'all_reduec'; choose from all_reduce"),
        ({"operations": ()}, "name an operation"),
        ({"lanes": ("rdma",)}, "unknown lane 'rdma'"),
        ({"opponents": ("nccl",)}, "unknown opponent 'nccl'; choose from gloo, mpi, mpi-tcp"),
        ({"dtype": "float8"}, "unknown dtype"),
        ({"lanes": ()}, "name a lane or an opponent"),
        ({"ranks": (1,)}, "2 to 32 ranks"),
        ({"ranks": (33,)}, "2 to 32 ranks"),
        ({"repetitions": 0}, "at least one repetition"),
        ({"dtype": "bfloat16", "opponents": ("mpi",)}, "Open MPI cannot add bfloat16"),
    ],
)
def test_a_sweep_that_cannot_work_says_what_to_write_instead(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Sweep(**settings)  # type: ignore[arg-type]
