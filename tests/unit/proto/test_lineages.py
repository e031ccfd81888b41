from __future__ import annotations

from covey.proto.lineages import TOLD, Lineages, merge
from covey.wire.formation import (
    MAX_ENDED,
    MAX_OPEN,
    Ending,
    KnownLineage,
    Remembered,
    decode_remembered,
    encode_remembered,
    founded_at,
    new_lineage,
)


def lineage(number: int) -> bytes:
    return new_lineage(float(number), b"r" * 10)


def test_an_id_tells_when_the_run_was_founded_and_the_older_one_is_smaller() -> None:
    assert founded_at(lineage(1_700_000_000)) == 1_700_000_000
    assert lineage(5) < lineage(6) < new_lineage(6.001, b"\0" * 10)
    assert new_lineage(-5.0, b"r" * 10)[:6] == bytes(6), "a clock before 1970"
    assert len(new_lineage(1e12, b"r" * 10)) == 16


def test_the_oldest_open_lineage_is_the_one_to_wait_for() -> None:
    known = Lineages()
    assert known.current == b""
    known.learn(lineage(7), ["a"])
    known.learn(lineage(5), ["b", "c"])
    assert known.current == lineage(5)
    assert known.names(lineage(5)) == ("b", "c")
    known.end(Ending(lineage(5), True))
    assert known.current == lineage(7)
    known.learn(lineage(5), ["b"])
    assert known.current == lineage(7), "what is over stays over"


def test_an_accepted_founding_counts_once_it_is_committed_or_after_a_crash() -> None:
    known = Lineages()
    known.accept(lineage(5), ["a", "b"])
    assert known.current == b""
    assert Lineages(known.remembered).current == lineage(5)
    known.commit(lineage(5))
    assert known.current == lineage(5)
    known.accept(lineage(6), ["a"])
    known.end(Ending(lineage(6), False))
    assert known.current == lineage(5)


def test_a_person_gives_up_what_may_be_going_on() -> None:
    known = Lineages(abandoned=[lineage(5)])
    known.learn(lineage(5), ["a"])
    assert known.current == b""
    assert known.is_abandoned(lineage(5))
    assert known.latest_endings() == (), "no other node is told that it is over"
    known.learn(lineage(6), ["a"])
    assert known.current == lineage(6)


def test_processes_of_one_machine_add_to_what_it_knows() -> None:
    one, other = Lineages(), Lineages()
    one.learn(lineage(5), ["a"])
    one.learn(lineage(6), ["b"])
    other.learn(lineage(7), ["c"])
    other.end(Ending(lineage(5), True))
    together = merge(one.remembered, other.remembered)
    assert {known.lineage for known in together.open} == {lineage(6), lineage(7)}
    assert together.ended == (Ending(lineage(5), True),)
    assert merge(other.remembered, one.remembered).ended == together.ended


def test_what_changed_is_to_be_written_down() -> None:
    known = Lineages()
    assert not known.is_changed
    for change in (
        lambda: known.learn(lineage(5), ["a"]),
        lambda: known.learn(lineage(5), ["a", "b"]),
        lambda: known.end(Ending(lineage(5), False)),
        lambda: known.end(Ending(lineage(5), True)),
    ):
        change()
        assert known.is_changed
        known.is_changed = False
        change()
        assert not known.is_changed


def test_foundings_that_came_to_nothing_do_not_displace_runs_that_were_finished() -> None:
    known = Lineages()
    known.end(Ending(lineage(1), True))
    for number in range(100, 100 + 3 * MAX_ENDED):
        known.end(Ending(lineage(number), False))
    assert known.ending(lineage(1)) == Ending(lineage(1), True)
    assert len(known.remembered.ended) <= MAX_ENDED
    told = known.latest_endings()
    assert Ending(lineage(1), True) in told
    assert len(told) == 1 + TOLD


def test_no_peer_can_fill_the_memory() -> None:
    known = Lineages()
    for number in range(1000):
        known.learn(lineage(number), ["x" * 1000] * 1000)
    remembered = known.remembered
    assert len(remembered.open) == MAX_OPEN
    assert decode_remembered(encode_remembered(remembered)) == remembered


def test_lineages_that_peers_make_up_do_not_displace_the_one_that_this_node_is_in() -> None:
    for numbers in (range(100, 200), range(200, 100, -1)):
        known = Lineages()
        for number in numbers:
            known.learn(lineage(number), ["a peer says so"])
        known.accept(lineage(1000), ["a", "b"])
        known.commit(lineage(1000))
        for number in (*numbers, *range(50)):
            known.learn(lineage(number), ["a peer says so"])
        assert known.is_open(lineage(1000))
        assert known.current == lineage(0), "the oldest are waited for first"
        assert len(known.remembered.open) == MAX_OPEN
        there = Lineages()
        for number in numbers:
            there.learn(lineage(number + 500), ["another process was told"])
        assert Lineages(merge(there.remembered, known.remembered)).is_open(lineage(1000))
        known.end(Ending(lineage(1000), True))
        assert not known.is_open(lineage(1000))


def test_what_a_person_gave_up_is_remembered_even_if_it_is_heard_of_again() -> None:
    known = Lineages()
    known.learn(lineage(5), ["a"], is_ours=True)
    known.give_up(lineage(5))
    assert known.current == b""
    again = Lineages(known.remembered)
    assert again.was_given_up(lineage(5))
    again.learn(lineage(5), ["a"])
    assert merge(known.remembered, again.remembered) == merge(again.remembered, known.remembered) == again.remembered
    assert (again.current, again.was_given_up(lineage(5))) == (lineage(5), True)
    for number in range(1000):
        again.give_up(lineage(number))
    assert decode_remembered(encode_remembered(again.remembered)) == again.remembered


def test_it_comes_back_from_disk_as_it_was() -> None:
    opened = (KnownLineage(lineage(5), ("a", "b")), KnownLineage(lineage(6), (), is_ours=True))
    remembered = Remembered(opened, (Ending(lineage(1), True), Ending(lineage(2), False)), (lineage(3),))
    assert decode_remembered(encode_remembered(remembered)) == remembered
    assert Lineages(remembered).remembered == remembered
