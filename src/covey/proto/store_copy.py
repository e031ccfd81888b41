"""A copy of the stores of a run: the same on all members after the same changes (`proto.replication`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from covey.proto.store import STORE_BYTES, KeyValueStore, Lifetime
from covey.wire import store as wire

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN_STORE: Final = 0
"""The number of the store that always exists: that of the run."""
STORES_LIMIT: Final = 8
"""Stores at a time; one more drops the oldest."""
UNACKNOWLEDGED_LIMIT: Final = 4096
"""Answers that one asker has not acknowledged."""
UNACKNOWLEDGED_ANSWERS_BYTES: Final = 1 << 28
"""Of those answers of one asker that do not fit into a frame: the others are bounded by their number."""
TOO_MANY_QUESTIONS: Final = (
    "too many questions of this process wait for their answers; ask from fewer threads at a time"
)
STORE_CLOSED: Final = "this store is closed; the process group was made anew"
LOAD_BYTES: Final = 1 << 18
"""Of one part of a copy."""


class LogEntry(NamedTuple):
    """A change in its place in the order."""

    store: int
    asker: int
    number: int
    settled: int
    change: wire.Change
    received: tuple[int, ...] = ()


class StoreCopy:
    """The stores, and the answers that may not have arrived. The same on all members after the same changes."""

    def __init__(self, bytes_limit: int = STORE_BYTES) -> None:
        """Begin empty; each store may have so many bytes, the same on all members."""
        self._bytes_limit = bytes_limit
        self.stores: dict[int, KeyValueStore] = {RUN_STORE: KeyValueStore(bytes_limit)}
        self.answers: dict[int, dict[int, wire.Answer]] = {}
        """By asker and number: what the asker may not have received."""

    def apply(self, entry: LogEntry, now: float = 0.0) -> list[tuple[int, int, int, wire.Answer]]:
        """Apply a change at a time; return the answers that it gives: store, asker, number, answer."""
        store, asker, number, settled, change, received = entry
        self._settle(asker, settled, received)
        match change:
            case wire.Open():
                self.open(store)
                replies: list[tuple[int, int, int, wire.Answer]] = [(store, asker, number, wire.Done())]
            case wire.Forget(members):
                self._forget(members)
                return []
            case wire.Withdraw():
                if store in self.stores:
                    self.stores[store].withdraw(asker, number)
                replies = [(store, asker, number, wire.Done())]
            case wire.Expire(entries):
                ended = self.stores[store].expire(entries) if store in self.stores else []
                replies = [(store, *reply) for reply in ended]
            case _ if self._keeps_too_much(asker):
                # It is not kept, and was not performed: the number is as if it were never asked.
                return [(store, asker, number, wire.Refused(TOO_MANY_QUESTIONS))]
            case _:
                replies = self._ask(store, asker, number, change, now)
        for _, of, at, given in replies:
            self.answers.setdefault(of, {})[at] = given
        return replies

    def open(self, store: int) -> None:
        self.stores[store] = KeyValueStore(self._bytes_limit)
        while len(self.stores) > STORES_LIMIT:
            del self.stores[next(number for number in self.stores if number != RUN_STORE)]

    def look(self, store: int, question: wire.Change) -> wire.Answer:
        """Return the answer to a question that only reads; nothing is changed or kept."""
        if store not in self.stores:
            return wire.Refused(STORE_CLOSED)
        return self.stores[store].look(question)

    def answer_to(self, asker: int, number: int) -> wire.Answer | None:
        """Return the answer that was given, if its asker may not have it."""
        return self.answers.get(asker, {}).get(number)

    def _settle(self, asker: int, settled: int, received: tuple[int, ...]) -> None:
        """Drop answers that their asker has."""
        known = self.answers.get(asker)
        if known is None:
            return
        for number in [number for number in known if number < settled or number in received]:
            del known[number]
        if not known:
            del self.answers[asker]

    def _forget(self, members: tuple[int, ...]) -> None:
        """Drop all questions that wait, and the answers for processes that are not members any more."""
        for store in self.stores.values():
            store.forget_all()
        for asker in [asker for asker in self.answers if members and asker not in members]:
            del self.answers[asker]

    def _ask(
        self, store: int, asker: int, number: int, question: wire.Question, now: float
    ) -> list[tuple[int, int, int, wire.Answer]]:
        if store not in self.stores:
            return [(store, asker, number, wire.Refused(STORE_CLOSED))]
        replies = self.stores[store].ask(asker, number, question, now)
        return [(store, reply.asker, reply.number, reply.answer) for reply in replies]

    def _keeps_too_much(self, asker: int) -> bool:
        """Tell whether an asker has not acknowledged too many answers, or too many bytes of large ones."""
        known = self.answers.get(asker, {})
        if len(known) >= UNACKNOWLEDGED_LIMIT or len(known) * wire.LARGE_BODY_LIMIT < UNACKNOWLEDGED_ANSWERS_BYTES:
            return len(known) >= UNACKNOWLEDGED_LIMIT
        large = (size for size in map(_size_of, known.values()) if size > wire.BODY_LIMIT)
        return sum(large) >= UNACKNOWLEDGED_ANSWERS_BYTES

    def parts(self) -> Iterator[tuple[int, wire.Load | wire.LoadAnswer, int]]:
        """Yield all that another member needs for an equal copy, as (store, part, number)."""
        for number, store in self.stores.items():
            yield number, wire.Load(-1, wire.Open(), versions=(store.changes,)), 0
            batch: list[tuple[str, bytes, int, Lifetime]] = []
            size = 0
            for entry in store.entries():
                is_full = size + len(entry[1]) + 4 * len(entry[0]) > LOAD_BYTES or len(batch) >= wire.KEYS_LIMIT
                if batch and (is_full or batch[0][3] != entry[3]):
                    yield number, _load_of(batch), 0
                    batch, size = [], 0
                batch.append(entry)
                size += len(entry[1]) + 4 * len(entry[0])
            if batch:
                yield number, _load_of(batch), 0
            for key, value in store.queued():
                yield number, wire.Load(-1, wire.Push(key, value)), 0
            for (asker, at), question in store.waiting():
                yield number, wire.Load(-1, question, asker), at
        for asker, answers in self.answers.items():
            for at, answer in answers.items():
                yield 0, wire.LoadAnswer(-1, asker, answer), at


def _load_of(batch: list[tuple[str, bytes, int, Lifetime]]) -> wire.Load:
    entries = tuple((key, value) for key, value, _, _ in batch)
    lifetime = batch[0][3]
    put = wire.Put(entries, lifetime.member >= 0, lifetime.milliseconds)
    return wire.Load(-1, put, lifetime.member, versions=tuple(version for _, _, version, _ in batch))


def _size_of(answer: wire.Answer) -> int:
    return sum(map(len, answer.values)) if isinstance(answer, wire.Done) else 0
