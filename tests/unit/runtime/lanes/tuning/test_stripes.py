"""Which networks may carry a part of what goes to a peer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from covey.runtime.lanes.tuning.path_choice import Quality
from covey.runtime.lanes.tuning.stripes import MOST_NETWORKS, WIRELESS, networks_beside, worth_using
from covey.runtime.links.sockets import RelayedWay

if TYPE_CHECKING:
    from covey.runtime.links.handshake import Where

USED, OTHER, THIRD = ("10.0.0.2", 1), ("10.0.1.2", 1), ("10.0.2.2", 1)
CABLE = Quality(0, is_routed=False, round_trip=0.001, network="eth0")
SECOND = CABLE._replace(network="eth1")


def test_the_best_address_of_each_other_network_is_named() -> None:
    seen: dict[Where, Quality] = {
        USED: CABLE,
        ("fd00::2", 1): CABLE._replace(round_trip=0.0001),
        OTHER: SECOND._replace(medium=WIRELESS, network="wlan0"),
        ("fe80::2%3", 1): SECOND._replace(medium=WIRELESS, network="wlan0", round_trip=0.0005),
        THIRD: SECOND,
    }
    assert networks_beside(USED, seen) == [THIRD, ("fe80::2%3", 1)]


@pytest.mark.parametrize(
    "other",
    [
        CABLE,
        SECOND._replace(is_routed=True),
        SECOND._replace(medium=WIRELESS + 1),
        SECOND._replace(medium=WIRELESS + 2),
    ],
    ids=["the same interface", "behind a router", "a VPN", "loopback"],
)
def test_what_may_share_a_link_is_no_other_network(other: Quality) -> None:
    assert networks_beside(USED, {USED: CABLE, OTHER: other}) == []
    assert networks_beside(OTHER, {USED: CABLE, OTHER: other}) == []


def test_a_relay_is_no_other_network() -> None:
    relayed = RelayedWay("10.0.1.9", 1, None, b"token")  # type: ignore[arg-type]  # the key is not looked at
    assert networks_beside(USED, {USED: CABLE, relayed: SECOND}) == []


def test_an_address_that_does_not_answer_has_none_beside_it() -> None:
    assert networks_beside(None, {OTHER: SECOND}) == []
    assert networks_beside(USED, {OTHER: SECOND}) == []


def test_the_number_of_networks_is_bounded() -> None:
    many: dict[Where, Quality] = {(f"10.0.{n}.2", 1): CABLE._replace(network=f"eth{n}") for n in range(9)}
    assert len(networks_beside(("10.0.0.2", 1), many)) == MOST_NETWORKS - 1


def test_networks_that_carry_a_fifth_of_the_fastest_are_worth_it_and_a_lane_leaves_one_that_does_not() -> None:
    assert worth_using(USED, 100.0, {OTHER: 20.0, THIRD: 19.0}) == [USED, OTHER]
    assert worth_using(USED, 100.0, {OTHER: 300.0, THIRD: 90.0}) == [USED, OTHER, THIRD]
    assert worth_using(USED, 100.0, {OTHER: 200.0, THIRD: 501.0}) == [THIRD, OTHER]
    assert worth_using(USED, 100.0, {OTHER: 0.0}) == [USED]
