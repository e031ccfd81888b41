from tests.unit.plan.cases import at_every_size, counts, each_rank, roots, segmented

from covey.plan import check, trees


@at_every_size
def test_broadcast_brings_the_roots_buffer_to_every_rank(size: int) -> None:
    for count in counts(size):
        for root in roots(size, count):
            plans = each_rank(size, trees.broadcast, size, root, count)
            check.broadcast(plans, root, count)


@at_every_size
def test_reduce_leaves_the_whole_sum_at_the_root(size: int) -> None:
    for count in counts(size):
        for root in roots(size, count):
            check.reduce(each_rank(size, trees.reduce, size, root, count), root, count)


@at_every_size
def test_a_star_reduces_at_its_root_and_copies_from_it(size: int) -> None:
    for count in counts(size):
        for root in roots(size, count):
            for plans in segmented(size, trees.star_reduce, size, root, count):
                check.reduce(plans, root, count)
            for plans in segmented(size, trees.star_broadcast, size, root, count):
                check.broadcast(plans, root, count)


@at_every_size
def test_one_tree_or_star_reduces_everything_on_every_rank(size: int) -> None:
    for count in counts(size):
        for is_star in (False, True):
            cells = trees.whole(size, count, is_star=is_star)
            for plans in segmented(size, trees.all_reduce, size, cells):
                check.all_reduce(plans, count)


@at_every_size
def test_the_root_has_a_child_for_each_round(size: int) -> None:
    assert len(trees.broadcast(size - 1, size, size - 1, 4).sends) == (size - 1).bit_length()
