"""The store: which questions it answers at once, which answers a change releases, and how much a member can store."""

from __future__ import annotations

import pytest

from covey.proto import store as limits
from covey.proto.store import KeyValueStore
from covey.wire import store as wire


def ask(store: KeyValueStore, question: wire.Question, asker: int = 1, number: int = 0) -> wire.Answer:
    """Ask a question that is answered at once, and check that no other answer follows."""
    ((to, numbered, answer),) = store.ask(asker, number, question)
    assert (to, numbered) == (asker, number)
    return answer


def put(key: str, value: bytes = b"v") -> wire.Put:
    return wire.Put(((key, value),))


def refusal(answer: wire.Answer) -> str:
    assert isinstance(answer, wire.Refused), answer
    return answer.reason


def test_what_one_puts_another_gets() -> None:
    store = KeyValueStore()
    assert ask(store, wire.Put((("a", b"1"), ("b", b"2")))) == wire.Done()
    assert ask(store, wire.Get(("b", "a")), asker=2) == wire.Done((b"2", b"1"))
    assert ask(store, wire.HasKeys(("a", "c"))) == wire.Done(number=0)
    assert ask(store, wire.Count()) == wire.Done(number=2)
    assert ask(store, wire.Names()) == wire.Done((b"a", b"b"))
    assert [ask(store, wire.Delete("a")) for _ in range(2)] == [wire.Done(number=1), wire.Done(number=0)]


def test_numbers_are_added_and_anything_else_is_refused() -> None:
    store = KeyValueStore()
    assert [ask(store, wire.Add("n", amount)) for amount in (5, -7)] == [wire.Done(number=5), wire.Done(number=-2)]
    assert ask(store, wire.Get(("n",))) == wire.Done((b"-2",))
    ask(store, put("text", b"five"))
    assert "'text' is not a number" in refusal(ask(store, wire.Add("text", 1)))
    ask(store, put("n", b"9" * 30))
    assert "not a number" in refusal(ask(store, wire.Add("n", 1)))
    ask(store, put("n", b"%d" % (2**63 - 1)))
    assert "64 bits" in refusal(ask(store, wire.Add("n", 1)))


@pytest.mark.parametrize(
    ("before", "expected", "answer", "after"),
    [
        (None, b"", wire.Done((b"new",), 1), b"new"),
        (None, b"old", wire.Done(), None),
        (None, None, wire.Done((b"new",), 1), b"new"),
        (b"", None, wire.Done((b"",)), b""),
        (b"old", None, wire.Done((b"old",)), b"old"),
        (b"old", b"old", wire.Done((b"new",), 1), b"new"),
        (b"new", b"old", wire.Done((b"new",)), b"new"),
    ],
)
def test_a_value_is_swapped_if_it_is_as_expected_and_the_answer_says_so(
    before: bytes | None, expected: bytes | None, answer: wire.Done, after: bytes | None
) -> None:
    store = KeyValueStore()
    if before is not None:
        ask(store, put("k", before))
    assert ask(store, wire.Swap("k", expected or b"", b"new", expected is None)) == answer
    assert ask(store, wire.HasKeys(("k",))) == wire.Done(number=int(after is not None))
    if after is not None:
        assert ask(store, wire.Get(("k",))) == wire.Done((after,))


def test_who_waits_is_answered_when_the_last_of_its_keys_comes() -> None:
    store = KeyValueStore()
    assert store.ask(1, 7, wire.Get(("a", "b"))) == []
    assert store.ask(2, 7, wire.Await(("b",))) == []
    assert store.ask(3, 1, put("a", b"1")) == [(3, 1, wire.Done())]
    assert store.ask(3, 2, wire.Add("b", 4)) == [
        (3, 2, wire.Done(number=4)),
        (1, 7, wire.Done((b"1", b"4"))),
        (2, 7, wire.Done()),
    ]
    assert store.ask(3, 3, put("b")) == [(3, 3, wire.Done())]


def test_a_key_that_was_deleted_in_between_is_waited_for_again() -> None:
    store = KeyValueStore()
    store.ask(1, 0, wire.Get(("a", "b")))
    store.ask(2, 0, put("a", b"first"))
    store.ask(2, 1, wire.Delete("a"))
    assert store.ask(2, 2, put("b", b"b")) == [(2, 2, wire.Done())]
    assert store.ask(2, 3, put("a", b"second"))[1:] == [(1, 0, wire.Done((b"second", b"b")))]


def test_who_has_withdrawn_or_is_gone_is_not_answered_and_who_asks_again_is_answered_once() -> None:
    store = KeyValueStore()
    for asker, number in ((1, 0), (1, 1), (2, 0), (1, 1)):
        store.ask(asker, number, wire.Get(("k",)))
    store.withdraw(1, 0)
    store.withdraw(5, 5)
    store.forget(2)
    assert store.ask(3, 0, put("k")) == [(3, 0, wire.Done()), (1, 1, wire.Done((b"v",)))]
    assert not store._waiting
    assert not store._missing
    assert not store._wanted
    assert not store._waits_of


def test_a_queue_serves_those_who_wait_in_turn() -> None:
    store = KeyValueStore()
    assert ask(store, wire.Pop("q", waits=False)) == wire.Done()
    assert store.ask(1, 0, wire.Pop("q", waits=True)) == []
    assert store.ask(2, 0, wire.Pop("q", waits=True)) == []
    assert store.ask(3, 0, wire.Push("q", b"x")) == [(3, 0, wire.Done()), (1, 0, wire.Done((b"x",)))]
    assert store.ask(3, 1, put("q")) == [(3, 1, wire.Done())]  # an entry of that name is none of the queue's
    assert store.ask(3, 2, wire.Push("q", b"y"))[1:] == [(2, 0, wire.Done((b"y",)))]
    ask(store, wire.Push("q", b"z"))
    assert ask(store, wire.Length("q")) == wire.Done(number=1)
    assert ask(store, wire.Pop("q", waits=True)) == wire.Done((b"z",))
    assert ask(store, wire.Length("q")) == wire.Done(number=0)


def test_a_store_that_is_full_refuses_and_has_room_again_when_something_is_deleted() -> None:
    store, value = KeyValueStore(), bytes(wire.VALUE_LIMIT)
    number = 0
    while isinstance(answer := ask(store, put(f"{number}", value)), wire.Done):
        number += 1
    assert "is full" in refusal(answer)
    assert number * wire.VALUE_LIMIT <= limits.STORE_BYTES < (number + 1) * (wire.VALUE_LIMIT + 1000)
    assert "is full" in refusal(ask(store, wire.Push("q", value)))
    assert ask(store, put("0", value)) == wire.Done()  # instead of what was there
    ask(store, wire.Delete("0"))
    assert ask(store, wire.Push("q", value)) == wire.Done()
    assert "is full" in refusal(ask(store, put("0", value)))
    assert ask(store, wire.Pop("q", waits=True)) == wire.Done((value,))
    for each in range(1, number):
        ask(store, wire.Delete(f"{each}"))
    assert store._bytes == 0


def test_entries_without_value_are_bounded_and_none_of_several_is_set_if_there_is_no_room_for_all() -> None:
    store = KeyValueStore()
    for first in range(0, limits.STORE_ENTRIES_LIMIT, 1 << 12):
        ask(store, wire.Put(tuple((f"{number}", b"") for number in range(first, first + (1 << 12)))))
    assert "is full" in refusal(ask(store, wire.Put((("0", b"changed"), ("one more", b"")))))
    assert ask(store, wire.Get(("0",))) == wire.Done((b"",))


def test_a_value_does_not_grow_beyond_its_bound() -> None:
    store, half = KeyValueStore(), bytes(wire.VALUE_LIMIT // 2 + 1)
    ask(store, wire.Append("k", half))
    assert "bytes" in refusal(ask(store, wire.Append("k", half)))


def answered(store: KeyValueStore, question: wire.Question) -> wire.Done:
    answer = ask(store, question)
    assert isinstance(answer, wire.Done)
    assert len(wire.encode_body(answer)) <= wire.BODY_LIMIT
    return answer


def test_values_that_do_not_fit_into_one_message_come_in_several_which_tell_what_has_changed() -> None:
    store, size = KeyValueStore(), wire.PLAIN_VALUE_LIMIT
    keys = tuple(f"{number}" for number in range(9))
    for number, key in enumerate(keys):
        ask(store, put(key, bytes([number]) * size))
    first = answered(store, wire.Get(keys))
    assert (len(first.values), first.versions) == (3, tuple(range(1, 10)))
    ask(store, put("1", b"changed"))
    seen = first.versions[:3]
    second = answered(store, wire.Get(keys, seen))
    assert second.versions == (1, 10, *range(3, 10))
    assert [value[:1] for value in second.values] == [b"c", b"\3", b"\4", b"\5"]
    third = answered(store, wire.Get(keys, second.versions[:6]))
    last = answered(store, wire.Get(keys, third.versions))
    assert ([value[:1] for value in third.values], last.values) == ([b"\6", b"\7", b"\10"], ())
    assert last.versions == third.versions


def test_a_part_of_the_values_waits_if_one_of_the_keys_was_deleted_meanwhile() -> None:
    store = KeyValueStore()
    ask(store, wire.Put((("a", b"1"), ("b", b"2"))))
    ask(store, wire.Delete("a"))
    assert store.ask(1, 7, wire.Get(("a", "b"), (1, 2))) == []
    assert store.ask(2, 1, put("a", b"new"))[1:] == [(1, 7, wire.Done((b"new",), versions=(3, 2)))]


def test_keys_that_do_not_fit_into_one_message_come_in_several() -> None:
    store = KeyValueStore()
    keys = ["", *(f"{number:05}{'k' * 900}" for number in range(3000))]
    for first in range(0, len(keys), 500):
        ask(store, wire.Put(tuple((key, b"") for key in reversed(keys[first : first + 500]))))
    found: list[str] = []
    answer = answered(store, wire.Names())
    while answer.number:
        found += [key.decode() for key in answer.values]
        answer = answered(store, wire.Names(found[-1]))
    assert found + [key.decode() for key in answer.values] == keys


def test_a_copy_of_an_entry_has_its_version_and_so_has_the_next_change() -> None:
    store, other = KeyValueStore(), KeyValueStore()
    for key in ("a", "b", "a"):
        ask(store, put(key))
    other.restore_changes(store.changes)
    for entry in store.entries():
        other.restore_entry(*entry, now=0.0)
    for each in (store, other):
        ask(each, put("c"))
        assert [entry[:3] for entry in each.entries()] == [("b", b"v", 2), ("a", b"v", 3), ("c", b"v", 4)]


def test_an_entry_ends_at_its_time_unless_it_was_set_again() -> None:
    store = KeyValueStore()
    store.ask(1, 0, wire.Put((("a", b"1"), ("b", b"1")), milliseconds=1500), 10.0)
    store.ask(1, 1, wire.Put((("b", b"2"),), milliseconds=1500), 11.0)
    assert store.next_end() == 11.5
    assert store.due(11.4) == []
    assert store.due(12.0) == [("a", 1)]
    assert store.due(12.0) == []
    assert store.expire((("a", 1), ("b", 2))) == []  # b has version 3
    assert ask(store, wire.Names()) == wire.Done((b"b",))
    store.ask(1, 2, put("b"), 12.0)
    assert store.due(100.0) == []
    assert ask(store, wire.HasKeys(("b",))) == wire.Done(number=1)
    for number in range(1000):  # a lease that is renewed leaves nothing behind
        store.ask(1, number, wire.Swap("lease", b"me", b"me", number == 0, milliseconds=5000), float(number))
    assert len(store._ends) < 50
    assert store.due(1003.9) == []
    assert [key for key, _ in store.due(1004.0)] == ["lease"]


def test_entries_end_with_the_member_that_set_them_and_keep_their_lifetime_when_they_grow() -> None:
    store = KeyValueStore()
    store.ask(1, 0, wire.Put((("mine", b"1"),), ends_with_member=True))
    store.ask(2, 0, wire.Swap("yours", b"", b"2", ends_with_member=True))
    store.ask(2, 1, wire.Append("mine", b"more"))
    assert store.without_member((1, 2)) == []
    assert store.without_member((2, 3)) == [("mine", 3)]
    store.ask(2, 2, wire.Put((("mine", b"theirs"),)))
    assert store.without_member((3,)) == [("yours", 2)]
    copy = KeyValueStore()
    for entry in store.entries():
        copy.restore_entry(*entry, now=0.0)
    assert copy.entries() == store.entries()
    assert copy.without_member((3,)) == [("yours", 2)]


def test_a_prefix_is_read_whole_and_whoever_watches_it_learns_of_each_kind_of_change() -> None:
    store = KeyValueStore()
    ask(store, wire.Put((("a/2", b"2"), ("a/1", b"1"), ("b", b"3"))))
    seen = ask(store, wire.Scan("a/"))
    assert seen == wire.Done((b"a/1", b"1", b"a/2", b"2"), 2)
    assert ask(store, wire.Names(None, "a/")) == wire.Done((b"a/1", b"a/2"))
    assert ask(store, wire.Read(("b", "no", "a/1"))) == wire.Done((b"3", b"1"), versions=(3, 0, 2))
    changes: tuple[wire.Question, ...] = (
        wire.Put((("a/1", b"1"),)), wire.Delete("a/1"), wire.Add("a/3", 1), wire.Append("a/", b"x")
    )  # fmt: skip
    for number, change in enumerate(changes):
        assert isinstance(seen, wire.Done)
        waits = wire.Scan("a/", len(seen.values) // 2, seen.number)
        assert store.ask(1, number, waits) == []
        assert len(store.ask(2, 0, put("b"))) == 1
        _, told = store.ask(2, 0, change)
        assert told[:2] == (1, number)
        assert told.answer == ask(store, wire.Scan("a/"))
        seen = told.answer
    assert (store._scans, store._wanted) == (0, {})
    large = bytes(wire.VALUE_LIMIT)
    for key in ("a/4", "a/5"):
        ask(store, put(key, large))
    assert "read fewer at a time" in refusal(ask(store, wire.Scan("a/")))
    assert "read fewer at a time" in refusal(ask(store, wire.Read(("a/4", "a/5"))))


def test_what_one_member_waits_for_is_bounded_and_the_others_may_still_wait() -> None:
    store, keys = KeyValueStore(), tuple(f"{number}{'k' * 900}" for number in range(100))
    number = 0
    while not (replies := store.ask(1, number, wire.Await(keys))):
        number += 1
    assert "wait" in refusal(replies[0].answer)
    assert number == limits.WAITING_BYTES_LIMIT // sum(limits.ENTRY_OVERHEAD_BYTES + 4 * len(key) for key in keys)
    assert store.ask(2, 0, wire.Await(keys)) == []
    store.withdraw(1, 0)
    assert store.ask(1, number, wire.Await(keys)) == []


def test_a_refusal_is_short_whatever_the_key() -> None:
    store, key = KeyValueStore(), "\0" * wire.KEY_LIMIT
    ask(store, put(key, b"no number"))
    answer = ask(store, wire.Add(key, 1))
    assert wire.decode_body(wire.encode_body(answer)) == answer
