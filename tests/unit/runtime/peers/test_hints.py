"""Hints: tried a bounded number of times with growing pauses, whatever strangers repeat."""

from __future__ import annotations

import itertools

import pytest

from covey.runtime.peers.hints import (
    HINT_CHECK_EVERY,
    HINT_TRIES,
    HINT_WAIT_SECONDS,
    HINTS_LIMIT,
    NAP_SECONDS,
    NAPS,
    SELDOM_SECONDS,
    Hint,
    Hints,
    Origin,
)
from covey.wire.messages import Address


def hint(number: int = 1) -> Hint:
    return Hint((Address("10.0.0.1", number),))


def nobody_is_met(_hint: Hint) -> bool:
    return False


def play(hints: Hints, seconds: float, *, repeats: Origin | None = None, every: float = 0.25) -> list[float]:
    """Try whatever is due, in vain; return when that was. With `repeats`, the hint is added again all the time."""
    tried = []
    now = 0.0
    while now < seconds:
        for due in hints.due(now, 100, nobody_is_met):
            tried.append(now)
            hints.failed(due, now)
        if repeats is not None:
            hints.add(hint(), repeats, now)
        now += every
    return tried


def test_a_hint_that_leads_nowhere_is_tried_with_growing_pauses_and_then_no_more() -> None:
    hints = Hints()
    hints.add(hint(), Origin.MULTICAST, 0.0)
    tried = play(hints, 1000.0)
    pauses = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert len(tried) == HINT_TRIES
    assert pauses == sorted(pauses)
    assert pauses[0] >= 1.0
    assert pauses[-1] <= SELDOM_SECONDS


def test_fresh_evidence_is_good_for_one_more_try() -> None:
    hints = Hints()
    hints.add(hint(), Origin.MULTICAST, 0.0)
    play(hints, 100.0)
    hints.add(hint(), Origin.MULTICAST, 200.0)
    assert hints.due(200.0, 100, nobody_is_met) == [hint()]
    hints.failed(hint(), 200.0)
    assert hints.due(10_000.0, 100, nobody_is_met) == []


def test_fresh_evidence_brings_a_try_forward_and_shortens_no_pause_after_it() -> None:
    hints = Hints()
    hints.add(hint(), Origin.MULTICAST, 0.0)
    play(hints, 5.0)  # it failed at 0, 1 and 3, and is due in eight seconds
    hints.add(hint(), Origin.MULTICAST, 5.0)
    assert hints.due(5.0, 100, nobody_is_met) == [hint()]
    hints.failed(hint(), 5.0)
    assert hints.due(12.9, 100, nobody_is_met) == []
    assert hints.due(13.0, 100, nobody_is_met) == [hint()]


def test_what_this_host_says_again_and_again_is_no_news() -> None:
    hints, again = Hints(), Hints()
    for each in (hints, again):
        each.add(hint(), Origin.HOST, 0.0)
    assert play(hints, 100.0) == play(again, 100.0, repeats=Origin.HOST)


def test_what_a_member_told_of_is_tried_again_after_a_nap_a_bounded_number_of_times() -> None:
    hints = Hints()
    hints.add(hint(), Origin.MEMBER, 0.0)
    tried = play(hints, 2 * NAPS * NAP_SECONDS, every=5.0)
    assert len(tried) == HINT_TRIES + NAPS


def test_what_this_host_knows_is_never_given_up_and_seldom_tried() -> None:
    hints = Hints()
    hints.add(hint(), Origin.HOST, 0.0)
    tried = play(hints, 600.0, repeats=Origin.HOST)
    assert 600 / SELDOM_SECONDS <= len(tried) <= HINT_TRIES + 600 / SELDOM_SECONDS


def test_a_node_that_is_met_is_not_tried_and_one_that_is_lost_is_tried_like_a_new_one() -> None:
    hints = Hints()
    hints.add(hint(), Origin.MULTICAST, 0.0)
    assert hints.due(0.0, 100, lambda _: True) == []
    hints.worked(hint())
    assert hints.due(SELDOM_SECONDS, 100, nobody_is_met) == [hint()]
    hints.failed(hint(), SELDOM_SECONDS)
    assert len(hints.due(SELDOM_SECONDS + 2.0, 100, nobody_is_met)) == 1


def test_hints_without_failures_come_first_however_many_have_failed() -> None:
    hints = Hints()
    for number in range(1, 101):
        hints.add(hint(number), Origin.MULTICAST, 0.0)
    for each in hints.due(0.0, 100, nobody_is_met):
        hints.failed(each, 0.0)
    hints.add(hint(999), Origin.MULTICAST, 50.0)
    assert hints.due(50.0, 1, nobody_is_met) == [hint(999)]
    assert len(hints.due(50.0, 7, nobody_is_met)) == 7


def test_hints_are_bounded_and_those_that_failed_go_first() -> None:
    hints = Hints()
    hints.add(hint(1), Origin.HOST, 0.0)
    hints.add(hint(2), Origin.MULTICAST, 0.0)
    hints.add(hint(3), Origin.MULTICAST, 0.0)
    hints.failed(hint(3), 0.0)
    for number in range(4, HINTS_LIMIT + 2):
        hints.add(hint(number), Origin.MULTICAST, 1.0)
    assert len(hints) == HINTS_LIMIT
    left = hints.due(1.0, 2 * HINTS_LIMIT, nobody_is_met)
    assert hint(1) in left
    assert hint(2) in left
    assert hint(3) not in left


def test_on_another_network_everything_that_slept_is_tried_once() -> None:
    hints = Hints()
    hints.add(hint(), Origin.MULTICAST, 0.0)
    play(hints, 100.0)
    hints.wake(100.0)
    assert hints.due(100.0, 100, nobody_is_met) == [hint()]
    hints.failed(hint(), 100.0)
    assert hints.due(10_000.0, 100, nobody_is_met) == []


@pytest.mark.parametrize("addresses", [(), None])
def test_a_hint_without_addresses_is_none(addresses: tuple[Address, ...] | None) -> None:
    hints = Hints()
    hints.add(Hint(addresses or ()), Origin.MEMBER, 0.0)
    assert len(hints) == 0


def test_a_hint_that_leads_to_ourselves_is_forgotten() -> None:
    hints = Hints()
    hints.add(hint(), Origin.MULTICAST, 0.0)
    hints.forget(hint())
    assert hints.due(100.0, 100, nobody_is_met) == []


def test_a_hint_waits_for_a_while_if_another_one_of_the_same_node_is_dialled() -> None:
    near, far = Hint((Address("127.0.0.1", 7),), same_host=True), Hint((Address("10.0.0.1", 7), Address("::1", 8)))
    known = Hint((Address("10.0.0.1", 7),), same_host=True)
    stranger = Hint((Address("10.0.0.2", 7),))
    hints = Hints()
    for each in (near, known, far, stranger):
        hints.add(each, Origin.MULTICAST, 0.0)
    assert hints.due(0.0, 100, nobody_is_met) == [near, far, stranger]
    dialled = {near, far, stranger}
    assert hints.due(HINT_WAIT_SECONDS - 0.1, 100, nobody_is_met, dialled) == []
    assert hints.due(HINT_WAIT_SECONDS + HINT_CHECK_EVERY, 100, nobody_is_met, dialled) == [
        known
    ]  # though they are still dialled


def test_a_hint_is_not_dialled_twice_at_the_same_time() -> None:
    hints = Hints()
    hints.add(hint(), Origin.HOST, 0.0)
    assert hints.due(0.0, 100, nobody_is_met) == [hint()]
    assert hints.due(100.0, 100, nobody_is_met, {hint()}) == []
    assert hints.due(100.0, 100, nobody_is_met) == [hint()]
