import pytest
from tests.unit.plan.cases import at_every_size, counts, each_rank, lengths, roots, segmented

from covey.plan import check, direct
from covey.plan.moves import Recv, Send, part


@pytest.mark.parametrize("count", [0, 1, 2, 7])
@pytest.mark.parametrize("size", [1, 2])
def test_exchange_reduces_between_two_ranks(size: int, count: int) -> None:
    check.all_reduce(each_rank(size, direct.exchange, size, count), count)


def test_exchange_is_not_for_three() -> None:
    with pytest.raises(ValueError, match="not 3"):
        direct.exchange(0, 3, 10)


@at_every_size
def test_owner_reduce_reduces_everything_on_every_rank(size: int) -> None:
    for count in counts(size):
        for plans in segmented(size, direct.owner_reduce, size, count):
            check.all_reduce(plans, count)


@at_every_size
def test_reduce_leaves_the_whole_sum_at_the_root_and_broadcast_brings_it_to_every_rank(size: int) -> None:
    for count in counts(size):
        for root in roots(size, count):
            for plans in segmented(size, direct.reduce, size, root, count):
                check.reduce(plans, root, count)
            for plans in segmented(size, direct.broadcast, size, root, count):
                check.broadcast(plans, root, count)


def test_owner_reduce_sends_a_finished_segment_right_after_the_next_ones_contribution() -> None:
    plan = direct.owner_reduce(0, 2, 12, 2)
    assert [(send.start, send.after) for send in plan.sends] == [(6, 0), (8, 0), (0, 1), (10, 0), (2, 2), (4, 4)]
    assert [recv.start for recv in plan.recvs] == [0, 2, 6, 4, 8, 10]


@at_every_size
def test_reduce_scatter_reduces_own_part_and_spares_the_input(size: int) -> None:
    for count in counts(size):
        even = [stop - start for start, stop in (part(count, size, rank) for rank in range(size))]
        for sizes in (even, lengths(size, count)):
            for plans in segmented(size, direct.reduce_scatter, sizes):
                check.reduce_scatter(plans, sizes)


@at_every_size
def test_all_gather_gives_every_block_to_every_rank(size: int) -> None:
    for count in counts(size):
        blocks = lengths(size, count)
        check.all_gather(each_rank(size, direct.all_gather, blocks), blocks)


@at_every_size
def test_all_to_all_gives_each_block_to_its_addressee(size: int) -> None:
    table = [[(3 * i + 5 * j) % 4 for j in range(size)] for i in range(size)]
    plans = each_rank(size, lambda rank: direct.all_to_all(rank, table[rank], [row[rank] for row in table]))
    check.all_to_all(plans, table)


@at_every_size
def test_gather_and_scatter_are_each_others_reverse(size: int) -> None:
    for count in counts(size):
        blocks = lengths(size, count)
        for root in roots(size, count):
            gathers = each_rank(size, direct.gather, root, blocks)
            scatters = each_rank(size, direct.scatter, root, blocks)
            check.gather(gathers, root, blocks)
            check.scatter(scatters, root, blocks)
            assert [Recv(*send[:4]) for send in scatters[root].sends] == list(gathers[root].recvs)


def test_empty_blocks_still_travel_so_that_a_mismatch_is_seen() -> None:
    assert direct.scatter(1, 1, [2, 1, 0]).sends == (Send(2, 2, 0, 0), Send(0, 0, 0, 2))
    assert len(direct.owner_reduce(0, 3, 0, 1).sends) == 4
