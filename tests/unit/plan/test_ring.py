from tests.unit.plan.cases import at_every_size, counts, each_rank, lengths, roots, segmented

from covey.plan import check, ring


@at_every_size
def test_all_reduce_reduces_everything_on_every_rank(size: int) -> None:
    for count in counts(size):
        for plans in segmented(size, ring.all_reduce, size, count):
            check.all_reduce(plans, count)


def test_a_segment_goes_on_as_soon_as_it_has_come_in() -> None:
    plan = ring.all_reduce(1, 3, 12, 2)
    assert [send.after for send in plan.sends] == [0, 0, 1, 2, 3, 4, 5, 6]
    assert [send.start for send in plan.sends] == [4, 6, 0, 2, 8, 10, 4, 6]


def test_all_reduce_moves_no_more_than_twice_the_buffer() -> None:
    for rank in range(5):
        assert sum(send.stop - send.start for send in ring.all_reduce(rank, 5, 1000, 64).sends) == 2 * 1000 * 4 // 5


@at_every_size
def test_all_gather_gives_every_block_to_every_rank(size: int) -> None:
    for count in counts(size):
        blocks = lengths(size, count)
        check.all_gather(each_rank(size, ring.all_gather, blocks), blocks)


@at_every_size
def test_broadcast_brings_the_roots_buffer_to_every_rank(size: int) -> None:
    for count in counts(size):
        for root in roots(size, count):
            for plans in segmented(size, ring.broadcast, size, root, count):
                check.broadcast(plans, root, count)


@at_every_size
def test_reduce_leaves_the_whole_sum_at_the_root(size: int) -> None:
    for count in counts(size):
        for root in roots(size, count):
            for plans in segmented(size, ring.reduce, size, root, count):
                check.reduce(plans, root, count)
