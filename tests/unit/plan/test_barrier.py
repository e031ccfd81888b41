import pytest
from tests.support.in_turn import in_turn
from tests.unit.plan.cases import at_every_size, each_rank

from covey.plan import check, doubling
from covey.plan.moves import Plan


@at_every_size
def test_no_rank_leaves_before_every_rank_has_come(size: int) -> None:
    plans = each_rank(size, doubling.dissemination, size)
    check.barrier(plans)
    assert {len(plan.sends) for plan in plans} == {(size - 1).bit_length()}


@in_turn(size=range(2, 18))
def test_one_round_less_is_no_barrier(size: int) -> None:
    plans = each_rank(size, doubling.dissemination, size)
    shorter = [Plan(plan.sends[:-1], plan.recvs[:-1]) for plan in plans]
    with pytest.raises(check.PlanError, match="may finish before"):
        check.barrier(shorter)


def test_a_rank_must_wait_for_the_news_it_passes_on() -> None:
    plans = each_rank(4, doubling.dissemination, 4)
    hasty = [Plan(tuple(send._replace(after=0) for send in plan.sends), plan.recvs) for plan in plans]
    with pytest.raises(check.PlanError, match="may finish before"):
        check.barrier(hasty)
