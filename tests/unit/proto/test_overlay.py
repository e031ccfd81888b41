"""The overlay of large runs: for every size, and whichever members are lost, few links connect all by few steps."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, get_args

import pytest
from tests.support.seeds import TIMES

from covey.proto.overlay import FULL_UP_TO, SPARSE, Overlay, Topology, topology_of

if TYPE_CHECKING:
    from collections.abc import Collection


def links_of(topology: Topology, size: int, living: Collection[int]) -> dict[int, frozenset[int]]:
    overlay = Overlay(topology, size, living)
    return {place: overlay.neighbours(place) for place in living}


def steps_from(place: int, links: dict[int, frozenset[int]]) -> list[int]:
    """Return how many places can be reached by no step, by one, by two ..."""
    reached, front, counts = {place}, {place}, [1]
    while front := {other for one in front for other in links[one]} - reached:
        reached |= front
        counts.append(len(front))
    return counts


def check(topology: Topology, size: int, living: Collection[int], chance: random.Random) -> None:
    links, digits = links_of(topology, size, living), (size - 1).bit_length()
    ring = sorted(living)
    for index, place in enumerate(ring):
        neighbours, after = links[place], ring[(index + 1) % len(ring)]
        assert neighbours <= set(living) - {place}
        assert all(place in links[other] for other in neighbours), "neighbours are so mutually"
        assert after in neighbours or after == place
        # Without a loss, twice the digits and half of that; stand-ins come by chance, but none has to stand for many.
        most = (2 if topology == "kregular" else 1) * digits + 1 if len(living) == size else 3 * digits + 6
        assert len(neighbours) <= most, (topology, size, len(living), place)
    for place in chance.sample(ring, min(8, len(ring))):
        counts = steps_from(place, links)
        assert sum(counts) == len(living), "all are connected"
        assert len(counts) - 1 <= max(1, digits), (topology, size, len(living), counts)


def losses(size: int, chance: random.Random) -> list[list[int]]:
    """Return sets of living places: all, those that random losses leave, and those that a lost stretch leaves."""
    places = list(range(size))
    first, length = chance.randrange(size), chance.randrange(size)
    lost = {(first + offset) % size for offset in range(length)}
    some = chance.sample(places, chance.randint(1, size))
    most = chance.sample(places, max(1, size - chance.randint(1, 4)))
    every = places[:: chance.randint(2, 5)]
    return [places, some, most, every, [place for place in places if place not in lost]]


@pytest.mark.parametrize("topology", SPARSE)
def test_few_links_connect_all_living_members_by_few_steps(topology: Topology) -> None:
    for size in range(1, 71):
        for number in range(TIMES):
            chance = random.Random(size * 1000 + number)
            for living in losses(size, chance):
                check(topology, size, living, chance)


@pytest.mark.parametrize("topology", SPARSE)
def test_few_links_connect_hundreds_of_members(topology: Topology) -> None:
    chance = random.Random(5)
    check(topology, 1024, range(1024), chance)
    check(topology, 1000, range(1000), chance)
    for number in range(TIMES):
        chance = random.Random(number)
        for living in losses(chance.randint(150, 300 if number == 0 else 1024), chance):
            check(topology, max(living) + 1, living, chance)


@pytest.mark.parametrize("topology", SPARSE)
def test_a_machine_with_many_ranks_is_lost_and_no_member_stands_in_for_all_of_them(topology: Topology) -> None:
    links = links_of(topology, 1024, [*range(256), *range(320, 1024)])
    assert max(map(len, links.values())) <= 30
    assert max(len(steps_from(place, links)) - 1 for place in (0, 255, 320, 700)) <= 10


@pytest.mark.parametrize("topology", SPARSE)
def test_a_loss_changes_only_links_of_the_neighbours_of_the_lost_member(topology: Topology) -> None:
    for size in range(2, 71, 3):
        chance = random.Random(size)
        living = chance.sample(range(size), chance.randint(2, size))
        lost = chance.choice(living)
        before = links_of(topology, size, living)
        after = links_of(topology, size, [place for place in living if place != lost])
        near = before[lost]
        for place, links in after.items():
            changed = (before[place] - {lost}) ^ links
            assert place in near or changed <= near, (size, living, lost, place)


@pytest.mark.parametrize("topology", SPARSE)
def test_all_members_compute_the_same_links_whatever_the_order_in_which_they_know_the_living(
    topology: Topology,
) -> None:
    living = random.Random(1).sample(range(90), 50)
    assert links_of(topology, 90, living) == links_of(topology, 90, frozenset(living))
    # A node with another version of covey must compute the same ones: here 12, 18 and 30 stand in for 3, 5 and 9.
    assert (
        sorted(Overlay(topology, 40, set(range(40)) - {3, 4, 5, 9}).neighbours(1))
        == {
            "kregular": [0, 2, 12, 17, 18, 25, 30, 33, 37, 39],
            "hypercube": [0, 2, 12, 17, 18, 30, 33],
        }[topology]
    )


def test_a_full_overlay_links_all_with_all() -> None:
    assert links_of("full", 5, [0, 2, 4]) == {0: {2, 4}, 2: {0, 4}, 4: {0, 2}}


@pytest.mark.parametrize("topology", get_args(Topology))
def test_a_member_alone_has_no_neighbours_and_one_of_two_has_the_other(topology: Topology) -> None:
    assert links_of(topology, 1, [0]) == {0: frozenset()}
    assert links_of(topology, 9, [7]) == {7: frozenset()}
    assert links_of(topology, 9, [7, 2]) == {7: {2}, 2: {7}}


def test_a_setting_is_taken_as_it_is_and_auto_is_sparse_only_for_many() -> None:
    assert [topology_of(setting, 1024) for setting in get_args(Topology)] == list(get_args(Topology))
    assert topology_of("auto", FULL_UP_TO) == "full"
    assert topology_of("auto", FULL_UP_TO + 1) == "kregular"
