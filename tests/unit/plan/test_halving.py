import pytest
from tests.unit.plan.cases import at_every_size, counts, each_rank

from covey.plan import check, doubling
from covey.plan.moves import elements_sent, first_writes


@at_every_size
def test_all_reduce_gives_every_rank_the_same_expression(size: int) -> None:
    for count in counts(size) if size <= 8 else [size - 1, size + 3]:
        plans = each_rank(size, doubling.halving_all_reduce, size, count)
        check.all_reduce(plans, count)
        for plan in plans:
            first_writes(plan)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32])
def test_a_power_of_two_moves_as_few_bytes_as_any_plan_can(size: int) -> None:
    for plan in each_rank(size, doubling.halving_all_reduce, size, 5 * size):
        assert elements_sent(plan) == 2 * (size - 1) * 5
