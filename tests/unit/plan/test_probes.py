from itertools import product

import pytest
from tests.support.in_turn import in_turn
from tests.unit.plan.cases import SIZES

from covey.plan.measurement import rotation, swap_rounds, swaps
from covey.plan.moves import Plan


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


@in_turn(size=[size for size in SIZES if 1 < size <= 100])
def test_every_pair_swaps_once_and_each_rank_is_in_one_pair_at_a_time(size: int) -> None:
    met: list[tuple[int, int]] = []
    for number in swap_rounds(size, 100):
        pairs = {rank: rank ^ number for rank in range(size) if rank ^ number < size}
        assert all(pairs[partner] == rank for rank, partner in pairs.items())
        met += pairs.items()
        _finish([swaps(pairs[rank], 3) if rank in pairs else Plan((), ()) for rank in range(size)])
    assert sorted(met) == [(one, other) for one, other in product(range(size), repeat=2) if one != other]


@pytest.mark.parametrize("size", [17, 33, 128])
def test_many_ranks_swap_with_a_few(size: int) -> None:
    assert 1 <= len(swap_rounds(size, 15)) <= 8


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
