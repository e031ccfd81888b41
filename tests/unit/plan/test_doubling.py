from tests.unit.plan.cases import at_every_size, counts, each_rank

from covey.plan import check, doubling
from covey.plan.moves import FINAL


@at_every_size
def test_all_reduce_gives_every_rank_the_same_expression(size: int) -> None:
    for count in counts(size):
        check.all_reduce(each_rank(size, doubling.all_reduce, size, count), count)


@at_every_size
def test_all_reduce_takes_as_many_rounds_as_the_size_has_bits(size: int) -> None:
    folds = size & (size - 1) > 0
    most = max(len(doubling.all_reduce(rank, size, 1).recvs) for rank in range(size))
    assert most == size.bit_length() - 1 + folds


@at_every_size
def test_scan_reduces_all_ranks_up_to_the_own(size: int) -> None:
    for count in counts(size):
        check.scan(each_rank(size, doubling.scan, size, count), count)


@at_every_size
def test_exscan_reduces_all_ranks_below_the_own_and_spares_the_input(size: int) -> None:
    for count in counts(size):
        check.exscan(each_rank(size, doubling.exscan, size, count), count)


def test_scans_mark_nothing_final_since_prefixes_are_still_summed_by_others() -> None:
    plans = each_rank(8, doubling.scan, 8, 3) + each_rank(8, doubling.exscan, 8, 3)
    assert not any(recv.action & FINAL for plan in plans for recv in plan.recvs)
