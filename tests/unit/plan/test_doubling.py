import pytest
from tests.unit.plan.cases import SIZES, counts, everyone

from covey.plan import check, doubling
from covey.plan.moves import FINAL


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_gives_every_rank_the_same_expression(size: int) -> None:
    for count in counts(size):
        check.all_reduce(everyone(size, lambda rank, count=count: doubling.all_reduce(rank, size, count)), count)


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_takes_as_many_rounds_as_the_size_has_bits(size: int) -> None:
    folds = size & (size - 1) > 0
    most = max(len(doubling.all_reduce(rank, size, 1).recvs) for rank in range(size))
    assert most == size.bit_length() - 1 + folds


@pytest.mark.parametrize("size", SIZES)
def test_scan_reduces_all_ranks_up_to_the_own(size: int) -> None:
    for count in counts(size):
        check.scan(everyone(size, lambda rank, count=count: doubling.scan(rank, size, count)), count)


@pytest.mark.parametrize("size", SIZES)
def test_exscan_reduces_all_ranks_below_the_own_and_spares_the_input(size: int) -> None:
    for count in counts(size):
        check.exscan(everyone(size, lambda rank, count=count: doubling.exscan(rank, size, count)), count)


def test_scans_mark_nothing_final_since_prefixes_are_still_summed_by_others() -> None:
    plans = everyone(8, lambda rank: doubling.scan(rank, 8, 3)) + everyone(8, lambda rank: doubling.exscan(rank, 8, 3))
    assert not any(recv.action & FINAL for plan in plans for recv in plan.recvs)
