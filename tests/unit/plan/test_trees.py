from __future__ import annotations

import random

import pytest
from tests.unit.plan.cases import at_every_size, counts

from covey.plan import check, ring, trees
from covey.plan.coded import coded
from covey.plan.moves import Plan, elements_sent, first_writes
from covey.plan.trees import ROOT_PARENT


def nested(rng: random.Random, slots: list[int]) -> list[tuple[int, ...]]:
    """Return groups of groups of `slots`, of unequal sizes; some slots are in none."""
    if len(slots) < 3:
        return []
    rng.shuffle(slots)
    cut = rng.randint(1, len(slots) - 1)
    parts = [part for part in (slots[:cut], slots[cut:]) if len(part) > 1 and rng.random() < 0.8]
    return [group for part in parts for group in [*nested(rng, list(part)), tuple(part)]]


def planned(size: int, groups: trees.Groups, shares: tuple[int, ...], count: int, segment: int) -> list[Plan]:
    cells = trees.cells(size, groups, shares, count)
    return [trees.all_reduce(rank, size, cells, segment) for rank in range(size)]


@at_every_size
def test_any_groups_and_shares_reduce_everything_on_every_rank(size: int) -> None:
    rng = random.Random(size)
    for count in counts(size) if size <= 8 else [2 * size + 3]:
        groups = tuple(nested(rng, list(range(size))))
        shares = tuple(rng.choice([0, 0, 1, 5]) for _ in range(size)) if count % 2 else ()
        plans = planned(size, groups, shares, count, segment=1 + count % 3)
        check.all_reduce(plans, count)
        for plan in plans:
            first_writes(plan)


@at_every_size
def test_a_ring_with_unequal_parts_reduces_everything_on_every_rank(size: int) -> None:
    rng = random.Random(size)
    for count in counts(size) if size <= 8 else [2 * size + 3]:
        shares = [rng.choice([0, 0, 1, 5]) for _ in range(size)]
        plans = [ring.all_reduce(rank, size, count, 2, shares) for rank in range(size)]
        check.all_reduce(plans, count)
        for plan in plans:
            first_writes(plan)


def test_groups_combine_inside_before_anything_crosses() -> None:
    groups = ((0, 1, 2), (3, 4, 5))
    plans = planned(6, groups, (), 600, 10)
    crossing = sum(
        send.stop - send.start
        for rank, plan in enumerate(plans)
        for send in plan.sends
        if (rank < 3) != (send.peer < 3)
    )
    assert crossing == 2 * 600  # all elements once each way, instead of three times
    inside = 2 * (3 - 1) * 600  # in each group: to the owners of the group, and back
    assert sum(map(elements_sent, plans)) == crossing + 2 * inside


def test_a_share_of_nothing_makes_a_rank_move_the_array_once() -> None:
    cells = trees.cells(4, (), (1, 1, 1, 0), 300)
    plans = [trees.all_reduce(rank, 4, cells, 50) for rank in range(4)]
    assert [elements_sent(plan) for plan in plans] == [500, 500, 500, 300]


def test_many_parts_of_a_group_form_chains() -> None:
    size = trees.MOST_IN_STAR + 1
    (cell, *_) = trees.cells(size, (), (), size)
    assert len({parent for parent in cell.parents if parent != ROOT_PARENT}) == size - 1
    (cell, *_) = trees.cells(size - 1, (), (), size)
    assert len({parent for parent in cell.parents if parent != ROOT_PARENT}) == 1


def test_three_levels_have_an_owner_in_each_group() -> None:
    groups = ((0, 1), (2, 3), (4, 5), (6, 7), (0, 1, 2, 3), (4, 5, 6, 7))
    for cell in trees.cells(8, groups, (), 800):
        crossing = [
            (slot, parent)
            for slot, parent in enumerate(cell.parents)
            if parent != ROOT_PARENT and slot // 4 != parent // 4
        ]
        between_hosts = [(s, p) for s, p in enumerate(cell.parents) if p != ROOT_PARENT and s // 2 != p // 2]
        assert len(crossing) == 1
        assert len(between_hosts) == 3
    assert trees.divisions(8, groups)[0] == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize("groups", [(), ((0, 1, 2), (3, 4)), ((0, 1), (2, 3), (0, 1, 2, 3))])
def test_each_rank_encodes_what_it_contributes_once(groups: trees.Groups) -> None:
    shares = (3, 1, 0, 1, 1)
    rings = [ring.all_reduce(rank, 5, 23, 3, shares) for rank in range(5)]
    for plan in [*planned(5, groups, shares, 23, 3), *rings]:
        found = coded(plan, (92,), 4, lambda elements: elements // 2, is_copy=False)
        ranges = [(task.start, task.stop) for task in found.encodes if task is not None]
        assert len(ranges) == len(set(ranges))
        assert sum(stop - start for start, stop in ranges) == 92
        owned = {recv[1:4] for recv in plan.recvs if recv.action & 4}
        assert sum(task is not None and task.settles for task in found.encodes) == len(owned)
