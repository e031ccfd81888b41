"""Round trips to relays: the shortest of the last answers counts, and what differs materially is told again."""

from __future__ import annotations

from covey.proto import relay_trips
from covey.proto.relay_trips import ToldTrips, TripSamples, is_clearly_shorter, is_news, to_tell
from covey.wire.messages import RELAYS_LIMIT, RelayTrip

NEAR, FAR = b"n" * 16, b"f" * 16


def test_the_shortest_of_the_last_round_trips_counts_until_it_is_too_old() -> None:
    samples, now = TripSamples(), 0.0
    assert samples.shortest(now) is None
    for number, taken in enumerate((0.5, 0.02, 0.3)):
        samples.asked(number, now)
        samples.answered(number, now + taken)
        now += 1.0
    assert round(samples.shortest(now) or 0.0, 9) == 0.02
    for number in range(relay_trips.SAMPLES):  # it has become slower
        samples.asked(number, now)
        samples.answered(number, now + 0.2)
        now += 1.0
    assert round(samples.shortest(now) or 0.0, 9) == 0.2
    assert samples.shortest(now + relay_trips.STALE_SECONDS) is None
    samples.clear()
    assert samples.shortest(now) is None


def test_each_answer_counts_once_and_late_ones_do_not_count() -> None:
    samples = TripSamples()
    for number in range(relay_trips.SAMPLES + 1):
        samples.asked(number, float(number))
    samples.answered(0, 7.0)
    samples.answered(99, 7.0)
    assert samples.shortest(7.0) is None
    samples.answered(1, 7.0)
    assert samples.shortest(7.0) == 6.0
    samples.answered(2, 7.5)
    samples.answered(2, 2.1)
    assert samples.shortest(8.0) == 5.5


def test_what_a_node_tells_replaces_what_it_told_before_and_the_number_of_nodes_is_bounded() -> None:
    told = ToldTrips()
    told.told(b"a", (RelayTrip(NEAR, 0.01), RelayTrip(FAR, 0.2)))
    told.told(b"a", (RelayTrip(FAR, 0.3),))
    assert (told.of(b"a", NEAR), told.of(b"a", FAR), told.of(b"b", FAR)) == (None, 0.3, None)
    for number in range(relay_trips.TRIPS_LIMIT):
        told.told(number.to_bytes(16), (RelayTrip(NEAR, 1.0),))
    assert told.of(b"a", FAR) is None
    last = (relay_trips.TRIPS_LIMIT - 1).to_bytes(16)
    assert told.of(last, NEAR) == 1.0
    told.forget(last)
    assert told.of(last, NEAR) is None


def test_the_nearest_relays_are_told_and_no_more_than_a_message_holds() -> None:
    own = {number.to_bytes(16): 5000.0 - number for number in range(RELAYS_LIMIT + 3)}
    trips = to_tell(own)
    assert [each.relay for each in trips] == [number.to_bytes(16) for number in range(RELAYS_LIMIT + 2, 2, -1)]
    assert {each.seconds for each in trips} == {3600.0}


def test_a_change_is_news_if_a_relay_comes_or_goes_or_is_at_another_distance() -> None:
    before = (RelayTrip(NEAR, 0.010), RelayTrip(FAR, 0.200))
    assert not is_news(before, before[::-1])
    assert is_news(before, before[:1])
    assert is_news(before[:1], before)
    assert is_news(before, (RelayTrip(NEAR, 0.012), before[1]))
    assert is_news(before, (RelayTrip(NEAR, 0.008), before[1]))
    assert not is_news(before, (RelayTrip(NEAR, 0.0105), RelayTrip(FAR, 0.195)))
    assert not is_news((RelayTrip(NEAR, 0.0001),), (RelayTrip(NEAR, 0.0003),))  # on one host, that is nothing


def test_a_relay_is_left_for_one_that_is_clearly_nearer() -> None:
    assert is_clearly_shorter(0.010, 0.020)
    assert not is_clearly_shorter(0.018, 0.020)
    assert not is_clearly_shorter(0.0001, 0.0009)
