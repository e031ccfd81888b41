from itertools import product

import pytest
from tests.support.in_turn import in_turn
from tests.unit.plan.cases import SIZES

from covey.plan.moves import Plan
from covey.plan.probes import partners, rotation, swaps


@in_turn(size=[size for size in SIZES if size > 1])
def test_rotations_send_over_every_link_once_and_pieces_match(size: int) -> None:
    seen = []
    for step in range(1, size):
        plans = [rotation(rank, size, step, 10 + rank, 10 + (rank - step) % size, 4) for rank in range(size)]
        for rank, plan in enumerate(plans):
            (target,) = {send.peer for send in plan.sends}
            seen.append((rank, target))
            incoming = [recv for recv in plans[target].recvs if recv.peer == rank]
            assert [recv.stop for recv in incoming] == [send.stop for send in plan.sends] == [10 + rank] * 4
    assert sorted(seen) == [(one, other) for one, other in product(range(size), repeat=2) if one != other]


@in_turn(size=[size for size in SIZES if size > 1])
def test_every_pair_swaps_and_no_pair_waits_for_a_third_rank_that_waits_for_it(size: int) -> None:
    met = [partners(rank, size, 100) for rank in range(size)]
    assert [sorted(each) for each in met] == [[other for other in range(size) if other != rank] for rank in range(size)]
    plans = [swaps(each, 3) for each in met]
    assert all(len(plan.sends) == 3 * (size - 1) for plan in plans)
    _finish(plans)


@pytest.mark.parametrize("size", [17, 33, 128])
def test_many_ranks_swap_with_a_few(size: int) -> None:
    met = [partners(rank, size, 15) for rank in range(size)]
    assert all(1 <= len(each) <= 8 for each in met)
    assert all(rank in met[other] for rank, each in enumerate(met) for other in each)
    _finish([swaps(each, 2) for each in met])


def _finish(plans: list[Plan]) -> None:
    """Run all plans as executors do, one send and one receive at a time; fail if none can go on."""
    sent, applied = [0] * len(plans), [0] * len(plans)
    on_the_way = dict.fromkeys(product(range(len(plans)), repeat=2), 0)
    moved = True
    while moved:
        moved = False
        for rank, plan in enumerate(plans):
            while sent[rank] < len(plan.sends) and plan.sends[sent[rank]].after <= applied[rank]:
                on_the_way[rank, plan.sends[sent[rank]].peer] += 1
                sent[rank] += 1
                moved = True
            while applied[rank] < len(plan.recvs) and on_the_way[plan.recvs[applied[rank]].peer, rank]:
                on_the_way[plan.recvs[applied[rank]].peer, rank] -= 1
                applied[rank] += 1
                moved = True
    assert applied == [len(plan.recvs) for plan in plans]
