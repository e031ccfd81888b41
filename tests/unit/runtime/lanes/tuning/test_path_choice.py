"""When lanes move to another address of a peer: for good reasons, which last, and not to and fro."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from covey.runtime.lanes.tuning.path_choice import MoveReason, PathChoice, Quality
from covey.runtime.lanes.tuning.trials import FIRST_REST_SECONDS

if TYPE_CHECKING:
    from covey.runtime.links.handshake import Where

WIRED, WIRELESS = 0, 2
OLD, NEW, THIRD = ("10.0.0.2", 1), ("10.1.0.2", 1), ("10.2.0.2", 1)


def quality(
    medium: int = WIRED, milliseconds: float = 0.5, network: str = "eth0", *, is_routed: bool = False
) -> Quality:
    return Quality(medium, is_routed, milliseconds / 1000, network)


def looks(choice: PathChoice, count: int, seen: dict[Where, Quality], now: float = 0.0) -> list[MoveReason | None]:
    """Look so often while OLD is used; return the reasons."""
    found = [choice.look(OLD, seen, now + turn) for turn in range(count)]
    assert all(each is None or each[0] in (NEW, THIRD) for each in found)
    return [None if each is None else each[1] for each in found]


def settled(new: Quality | None = None) -> PathChoice:
    """Return a choice that knows the network of OLD, and that of `new`."""
    choice = PathChoice()
    seen: dict[Where, Quality] = {OLD: quality()} if new is None else {OLD: quality(), NEW: new}
    assert choice.look(OLD, seen, 0.0) is None
    return choice


@pytest.mark.parametrize(
    ("used", "other"),
    [
        (quality(WIRELESS, 2.0, "wlan0"), quality(WIRED, 0.5, "eth0")),
        (quality(WIRELESS, 2.0, "wlan0"), quality(WIRED, 2.9, "eth0")),
        (quality(WIRED, 5.0, "10.9.0.1", is_routed=True), quality(WIRED, 5.0, "eth1")),
    ],
)
def test_a_better_interface_is_used_after_two_looks(used: Quality, other: Quality) -> None:
    assert looks(PathChoice(), 2, {OLD: used, NEW: other}) == [None, MoveReason.MEDIUM]
    assert looks(PathChoice(), 5, {OLD: other, NEW: used}) == [None] * 5


def test_a_better_interface_that_is_much_farther_away_is_not_used() -> None:
    seen: dict[Where, Quality] = {OLD: quality(WIRELESS, 2.0, "wlan0"), NEW: quality(WIRED, 9.0, "eth0")}
    assert looks(PathChoice(), 5, seen) == [None] * 5


def test_an_answer_that_was_missed_once_is_no_reason_and_twice_is_one() -> None:
    choice, other = PathChoice(), quality(WIRELESS, 30.0, "wlan0")
    assert looks(choice, 1, {OLD: quality(), NEW: other}) == [None]
    assert looks(choice, 1, {NEW: other}) == [None]
    assert looks(choice, 1, {OLD: quality(), NEW: other}) == [None]
    assert not choice.is_undecided
    assert looks(choice, 1, {NEW: other}) == [None]
    assert choice.is_undecided
    assert looks(choice, 1, {NEW: other}) == [MoveReason.UNREACHABLE]


def test_a_network_that_appears_is_worth_one_trial() -> None:
    choice = settled()
    seen: dict[Where, Quality] = {OLD: quality(), NEW: quality(network="eth1")}
    assert looks(choice, 10, seen, now=100.0) == [None, MoveReason.APPEARED, *(None,) * 8]


def test_networks_that_come_and_go_are_tried_less_and_less_often() -> None:
    choice, trials = settled(), []
    for now in range(200):  # seconds
        is_there = now % 4 < 2
        seen: dict[Where, Quality] = {OLD: quality()}
        if is_there:
            seen[NEW] = quality(network="eth1")
        if choice.look(OLD, seen, float(now)) is not None:
            trials.append(now)
    gaps = [later - sooner for sooner, later in pairwise(trials)]
    assert 2 <= len(trials) <= 6
    assert gaps[0] >= FIRST_REST_SECONDS
    assert all(later >= 1.5 * sooner for sooner, later in pairwise(gaps)), trials


def test_another_address_in_the_same_network_is_no_other_path() -> None:
    choice = settled()
    assert looks(choice, 5, {OLD: quality(milliseconds=9.0), NEW: quality(milliseconds=0.1)}) == [None] * 5


def test_a_much_shorter_round_trip_is_worth_a_trial_if_it_lasts() -> None:
    slow, fast = quality(milliseconds=9.0), quality(milliseconds=1.0, network="eth1")
    choice = settled(new=fast)
    assert looks(choice, 2, {OLD: slow, NEW: fast}) == [None, None]
    assert looks(choice, 1, {OLD: fast._replace(network="eth0"), NEW: fast}) == [None], "queues come and go"
    assert looks(choice, 2, {OLD: slow, NEW: fast}) == [None, MoveReason.ROUND_TRIP]
    assert looks(choice, 5, {OLD: slow, NEW: fast}, now=4.0) == [None] * 5, "it rests"
    later = 4.0 + FIRST_REST_SECONDS
    assert looks(choice, 3, {OLD: slow, NEW: fast}, now=later) == [None, None, MoveReason.ROUND_TRIP]


@pytest.mark.parametrize(("here", "there"), [(0.9, 0.1), (9.0, 5.0), (1.0, 9.0)])
def test_round_trips_that_differ_little_are_no_reason(here: float, there: float) -> None:
    other = quality(milliseconds=there, network="eth1")
    assert looks(settled(new=other), 6, {OLD: quality(milliseconds=here), NEW: other}) == [None] * 6


def test_of_several_better_addresses_the_best_is_chosen() -> None:
    seen: dict[Where, Quality] = {
        OLD: quality(WIRELESS, 2.0, "wlan0"),
        NEW: quality(WIRED, 0.9, "eth0"),
        THIRD: quality(WIRED, 0.2, "eth1"),
    }
    choice = PathChoice()
    assert choice.look(OLD, seen, 0.0) is None
    assert choice.look(OLD, seen, 1.0) == (THIRD, MoveReason.MEDIUM)


def relay(milliseconds: float, network: str) -> Quality:
    return Quality(0, True, milliseconds / 1000, network, is_relayed=True)


def test_lanes_leave_a_relay_for_a_direct_way_whatever_its_round_trip() -> None:
    direct = quality(WIRELESS, 400, "wlan0", is_routed=True)
    assert looks(PathChoice(), 3, {OLD: relay(1, "r"), NEW: direct})[:2] == [None, MoveReason.DIRECT]


def test_lanes_do_not_leave_a_direct_way_for_a_relay() -> None:
    direct = quality(WIRELESS, 400, "wlan0", is_routed=True)
    assert looks(PathChoice(), 6, {OLD: direct, NEW: relay(1, "r")}) == [None] * 6


def test_lanes_move_to_a_relay_that_is_clearly_nearer_and_not_to_and_fro() -> None:
    assert looks(PathChoice(), 2, {OLD: relay(30, "r"), NEW: relay(20, "s")}) == [None, MoveReason.RELAY]
    assert looks(PathChoice(), 6, {OLD: relay(21, "r"), NEW: relay(20, "s")}) == [None] * 6


def test_without_the_relay_in_use_a_direct_way_is_preferred_to_another_relay() -> None:
    seen: dict[Where, Quality] = {NEW: relay(1, "s"), THIRD: quality(milliseconds=90, is_routed=True)}
    choice = PathChoice()
    choice.look(OLD, seen, 0.0)
    assert choice.look(OLD, seen, 1.0) == (THIRD, MoveReason.UNREACHABLE)
