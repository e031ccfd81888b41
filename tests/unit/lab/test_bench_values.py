import numpy as np
import pytest

from covey.lab.bench.sweep import MEASURED_DTYPES
from covey.lab.bench.worker import PIECE, fill, first_wrong, pattern

RANKS = 3
PART = PIECE + 5


def inputs(length: int) -> list[np.ndarray]:
    arrays = [np.empty(length, np.float32) for _ in range(RANKS)]
    for rank, array in enumerate(arrays):
        fill(array, rank)
    return arrays


def outcomes(operation: str) -> list[np.ndarray]:
    """What the operation gives on every rank, the slow and obvious way."""
    whole = inputs(RANKS * PART)
    match operation:
        case "all_reduce":
            return [np.sum(whole, axis=0)] * RANKS
        case "broadcast":
            return [whole[0]] * RANKS
        case "all_gather":
            return [np.concatenate([x[:PART] for x in whole])] * RANKS
        case "reduce_scatter":
            return np.split(np.sum(whole, axis=0), RANKS)
        case "all_to_all":
            return [np.concatenate([np.split(x, RANKS)[rank] for x in whole]) for rank in range(RANKS)]
    raise AssertionError(operation)


def test_inputs_differ_by_rank_and_by_position() -> None:
    one, other = pattern(0, 0, 10_000), pattern(1, 0, 10_000)
    assert set(one) == set(range(8))
    assert np.mean(one == other) < 0.2
    for shift in (1, 2, 8, 64, 1024, 4096):
        assert np.mean(one[shift:] == one[:-shift]) < 0.2


def test_a_piece_of_the_pattern_is_the_pattern_of_the_piece() -> None:
    assert np.array_equal(pattern(2, 100, 200), pattern(2, 0, 300)[100:200])


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"])
def test_right_results_pass_and_one_changed_element_anywhere_does_not(operation: str) -> None:
    part = PART if operation in ("all_gather", "reduce_scatter", "all_to_all") else RANKS * PART
    for rank, result in enumerate(outcomes(operation)):
        assert first_wrong(operation, result, rank, RANKS, part) is None
        for at in (0, PIECE, result.size - 1):
            broken = result.copy()
            broken[at] += 1
            assert f"element {at} of {result.size}" in str(first_wrong(operation, broken, rank, RANKS, part))


def test_another_ranks_chunk_is_not_mistaken_for_ones_own() -> None:
    chunks = outcomes("reduce_scatter")
    assert first_wrong("reduce_scatter", chunks[1], 0, RANKS, PART) is not None


def test_a_result_of_the_wrong_length_is_wrong() -> None:
    assert first_wrong("all_gather", np.zeros(PART), 0, RANKS, PART) == f"{PART} elements instead of {RANKS * PART}"


def test_only_the_root_of_a_reduce_is_checked() -> None:
    garbage = np.full(10, 99.0)
    assert first_wrong("reduce", garbage, 1, RANKS, 10) is None
    assert first_wrong("reduce", garbage, 0, RANKS, 10) is not None


def test_a_message_is_checked_against_the_partners_input_and_a_rank_alone_has_none() -> None:
    x = inputs(10)
    assert first_wrong("send_recv", x[1], 0, RANKS, 10) is None
    assert first_wrong("send_recv", x[0], 0, RANKS, 10) is not None
    assert first_wrong("send_recv", np.zeros(10), 2, RANKS, 10) is None


@pytest.mark.parametrize("name", sorted(MEASURED_DTYPES))
def test_the_sum_over_the_most_ranks_is_exact_in_every_dtype(name: str) -> None:
    total = np.zeros(100, MEASURED_DTYPES[name])
    for rank in range(32):
        total += pattern(rank, 0, 100).astype(MEASURED_DTYPES[name])
    assert first_wrong("all_reduce", total, 0, 32, 100) is None
