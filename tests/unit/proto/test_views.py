from __future__ import annotations

import pytest

from covey.base.errors import BusyError
from covey.base.numbers import MAX_MEMBERS
from covey.proto import views
from covey.proto.views import DISMISSED, DISMISSED_RANKS, OPEN_GROUPS, OPEN_RANKS
from covey.wire.membership import MAX_GROUPS, MAX_STATE_RANKS, State


def closed(count: int, size: int) -> dict[int, State]:
    return {key: State(key, tuple(range(size)), key) for key in range(count)}


def test_as_many_groups_may_be_open_as_an_answer_can_hold_beside_closed_ones() -> None:
    assert (OPEN_GROUPS + DISMISSED, OPEN_RANKS + DISMISSED_RANKS) == (MAX_GROUPS, MAX_STATE_RANKS)
    views.check_room([128] * (OPEN_GROUPS - 1), 128)
    with pytest.raises(BusyError, match="768 groups that survive losses are open; close some"):
        views.check_room([2] * OPEN_GROUPS, 2)


def test_of_the_largest_groups_fewer_may_be_open() -> None:
    views.check_room([MAX_MEMBERS] * 95, MAX_MEMBERS)
    with pytest.raises(
        BusyError, match=r"96 groups .* with 98304 ranks in all; with one of 3 these would be more than"
    ):
        views.check_room([MAX_MEMBERS] * 96, 3)


def test_the_groups_that_were_closed_first_are_forgotten() -> None:
    many, large = closed(DISMISSED + 3, 2), closed(40, MAX_MEMBERS)
    for dismissed in (many, large):
        views.forget_oldest(dismissed)
    assert list(many) == list(range(3, DISMISSED + 3))
    assert list(large) == list(range(8, 40))
    assert sum(len(state.ranks) for state in large.values()) == DISMISSED_RANKS
