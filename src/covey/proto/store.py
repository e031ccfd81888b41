"""A key-value store without I/O: entries, queues, and the questions that wait for them.

A question is known by the number of its asker and its own number. There are no timeouts here: an asker that does not
want to wait any longer withdraws its question. Entries that end do so by `expire`, which is ordered like any change;
the times when they are due (`due`) are those of this copy, and no part of what copies have in common.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from covey.wire import store as wire

if TYPE_CHECKING:
    from collections.abc import Collection

STORE_ENTRIES_LIMIT: Final = 1 << 16
STORE_BYTES: Final = 1 << 26
"""Of all keys and values together, unless the run says otherwise."""
WAITING_BYTES_LIMIT: Final = 1 << 20
"""Bytes of one asker's questions that wait for an answer."""
ENTRY_OVERHEAD_BYTES: Final = 128
"""The cost of an entry besides its key and value, and of a question for each of its keys."""
LARGE_ANSWER_BYTES: Final = wire.LARGE_BODY_LIMIT - (1 << 17)
"""Bytes of the values in one answer that must be whole."""
STORE_ANSWER_BYTES: Final = wire.BODY_LIMIT - (1 << 10)
"""Bytes of the values in one answer, with what each of them and each version takes beside its contents."""


class Reply(NamedTuple):
    """An answer, and the question that it answers."""

    asker: int
    number: int
    answer: wire.Answer


class Lifetime(NamedTuple):
    """When an entry ends by itself."""

    member: int = -1
    """With this process; -1: with none."""
    milliseconds: int = 0
    """After this time; 0: never."""


LASTING: Final = Lifetime()
Waiting: TypeAlias = wire.Get | wire.Await | wire.Pop | wire.Observe | wire.Scan
"""Questions that may have to wait."""


class QuestionRefusedError(Exception):
    """A question that cannot be answered; the text says why."""


class KeyValueStore:
    """Entries and queues of a run. Its size is bounded; a question that exceeds the bounds is refused."""

    def __init__(self, bytes_limit: int = STORE_BYTES) -> None:
        self._bytes_limit = bytes_limit
        self._entries: dict[str, bytes] = {}
        self._versions: dict[str, int] = {}
        """By key of an entry: the number of the change that made it what it is."""
        self._changes = 0
        self._lifetimes: dict[str, Lifetime] = {}
        """Of the entries that end."""
        self._ends: list[tuple[float, int, str]] = []
        """A heap of times, with the version and the key of an entry that ends then, if it still has that version."""
        self._queues: dict[str, deque[bytes]] = {}
        self._bytes = self._queued = 0
        self._waiting: dict[tuple[int, int], Waiting] = {}
        """In the order of arrival: the first question that waits for a queue is served first."""
        self._missing: dict[tuple[int, int], set[str]] = {}
        self._wanted: dict[str, dict[tuple[int, int], None]] = {}
        """By key, the questions that wait for it: `g` before entries, `q` before queues, `w` before watched entries,
        and `p` before watched prefixes."""
        self._scans = 0
        """How many of the questions that wait are about a prefix."""
        self._waits_of: Counter[int] = Counter()
        """By asker, the bytes of its questions that wait."""

    def ask(self, asker: int, number: int, question: wire.Question, now: float = 0.0) -> list[Reply]:
        """Take a question at a time; return the answers to it, and to questions that waited for what it changed.

        A question that waits already is replaced.
        """
        self.withdraw(asker, number)
        try:
            answer, changed = self._answer(asker, question, now)
            if answer is None:
                self._wait(asker, number, question)
        except QuestionRefusedError as refusal:
            answer, changed = wire.Refused(str(refusal)[:1000]), []
        replies = [] if answer is None else [Reply(asker, number, answer)]
        for key in changed:
            replies += self._arrived(key)
        return replies

    def look(self, question: wire.Change) -> wire.Answer:
        """Return the answer to a question that only reads (`wire.only_reads`)."""
        assert isinstance(question, wire.Question), question
        try:
            answer, _ = self._answer(-1, question, 0.0)
        except QuestionRefusedError as refusal:
            return wire.Refused(str(refusal)[:1000])
        assert answer is not None, "a question that only reads never waits"
        return answer

    def expire(self, entries: tuple[tuple[str, int], ...]) -> list[Reply]:
        """Remove each entry that still has this version; return the answers to questions that waited for that."""
        ended = [key for key, version in entries if self._versions.get(key) == version and self._remove(key)]
        return [reply for key in ended for mark in "wp" for reply in self._arrived(mark + key)]

    def due(self, now: float) -> list[tuple[str, int]]:
        """Return the entries whose time is over, with their versions; each is returned only once."""
        found = []
        while self._ends and self._ends[0][0] <= now:
            _, version, key = heapq.heappop(self._ends)
            if self._versions.get(key) == version:
                found.append((key, version))
        return found

    def without_member(self, members: Collection[int]) -> list[tuple[str, int]]:
        """Return the entries that end with a process which is not among these, with their versions."""
        bound = [key for key, lifetime in self._lifetimes.items() if lifetime.member not in (-1, *members)]
        return [(key, self._versions[key]) for key in bound]

    def next_end(self) -> float:
        """Return when `due` may return something; inf if no entry ends at a time."""
        return self._ends[0][0] if self._ends else math.inf

    def withdraw(self, asker: int, number: int) -> None:
        """Drop a question that waits."""
        self._settle((asker, number))

    def forget(self, asker: int) -> None:
        """Drop all questions of an asker that is gone."""
        for waiter in [waiter for waiter in self._waiting if waiter[0] == asker]:
            self._settle(waiter)

    def forget_all(self) -> None:
        """Drop all questions that wait."""
        for waiter in list(self._waiting):
            self._settle(waiter)

    def is_waiting(self, asker: int, number: int) -> bool:
        """Tell whether a question waits."""
        return (asker, number) in self._waiting

    def waiting(self) -> list[tuple[tuple[int, int], Waiting]]:
        """Return the questions that wait, each with its asker and number, in the order of their arrival."""
        return list(self._waiting.items())

    def entries(self) -> list[tuple[str, bytes, int, Lifetime]]:
        """Return all entries, with their versions and lifetimes, in the order of their versions."""
        items = (
            (key, value, self._versions[key], self._lifetimes.get(key, LASTING)) for key, value in self._entries.items()
        )
        return sorted(items, key=lambda item: item[2])

    @property
    def changes(self) -> int:
        """The number of changes to entries so far."""
        return self._changes

    @property
    def count(self) -> int:
        """The number of entries: without a further change, only fewer can be left."""
        return len(self._entries)

    def restore_entry(self, key: str, value: bytes, version: int, lifetime: Lifetime, now: float) -> None:
        """Set an entry as it is in another copy. Its time begins anew: entries may end late, but never early."""
        changes = self._changes
        self._changes = version - 1
        self._set(key, value, lifetime, now)
        self._changes = max(changes, version)

    def restore_changes(self, changes: int) -> None:
        """Set the number of changes as it is in another copy."""
        self._changes = max(self._changes, changes)

    def queued(self) -> list[tuple[str, bytes]]:
        """Return the values of all queues, in their order."""
        return [(key, value) for key, queue in self._queues.items() for value in queue]

    # Answers

    def _answer(self, asker: int, question: wire.Question, now: float) -> tuple[wire.Answer | None, list[str]]:
        """Return the answer, or None if there is none yet, and the keys that changed."""
        match question:
            case wire.Put(entries):
                self._afford({key: len(value) for key, value in entries})
                for key, value in entries:
                    self._set(key, value, _lifetime_of(asker, question), now)
                return wire.Done(), [mark + key for key, _ in entries for mark in "gwp"]
            case wire.Get(keys) | wire.Await(keys):
                if any(key not in self._entries for key in keys):
                    return None, []
                return self._found(question), []
            case wire.HasKeys(keys):
                return wire.Done(number=int(all(key in self._entries for key in keys))), []
            case wire.Add(key, amount):
                total = self._number(key) + amount
                if not -(1 << 63) <= total < 1 << 63:
                    raise QuestionRefusedError(f"{total} does not fit into 64 bits")
                lifetime = self._lifetimes.get(key, LASTING)
                return wire.Done(number=total), self._change(key, b"%d" % total, lifetime, now)
            case wire.Swap(key, expected, desired, if_missing):
                found = self._entries.get(key)
                if found is not None if if_missing else (found or b"") != expected:
                    return wire.Done(() if found is None else (found,)), []
                return wire.Done((desired,), 1), self._change(key, desired, _lifetime_of(asker, question), now)
            case wire.Append(key, more):
                if len(value := self._entries.get(key, b"") + more) > wire.VALUE_LIMIT:
                    raise QuestionRefusedError(
                        f"the value of {key!r} would have {len(value)} of {wire.VALUE_LIMIT} bytes"
                    )
                return wire.Done(), self._change(key, value, self._lifetimes.get(key, LASTING), now)
            case wire.Delete(key):
                was_there = self._remove(key)
                return wire.Done(number=int(was_there)), ["w" + key, "p" + key] if was_there else []
            case wire.Observe(key, version):
                return (None if self._versions.get(key, 0) == version else self._seen(key)), []
            case wire.Read(keys):
                versions = tuple(self._versions.get(key, 0) for key in keys)
                return wire.Done(_in_one([self._entries[key] for key in keys if key in self._entries]), 0, versions), []
            case wire.Scan(prefix, count, version):
                names = sorted(key for key in self._entries if key.startswith(prefix))
                highest = max((self._versions[key] for key in names), default=0)
                if (len(names), highest) == (count, version):
                    return None, []
                values = [each for key in names for each in (key.encode(), self._entries[key])]
                return wire.Done(_in_one(values), highest), []
            case wire.Names(after, prefix):
                following = sorted(
                    key for key in self._entries if key.startswith(prefix) and (after is None or key > after)
                )
                some = _fitting([key.encode() for key in following])
                return wire.Done(some, int(len(some) < len(following))), []
            case wire.Count():
                return wire.Done(number=len(self._entries)), []
            case wire.Push(key, value):
                if self._is_full(_cost(key, value), entries=1):
                    raise QuestionRefusedError(self._fullness())
                self._queues.setdefault(key, deque()).append(value)
                self._bytes += _cost(key, value)
                self._queued += 1
                return wire.Done(), ["q" + key]
            case wire.Pop(key, waits):
                if key in self._queues:
                    return wire.Done((self._pop(key),)), []
                return (None if waits else wire.Done()), []
            case wire.Length(key):
                return wire.Done(number=len(self._queues.get(key, ()))), []

    def _seen(self, key: str) -> wire.Done:
        value = self._entries.get(key)
        return wire.Done(() if value is None else (value,), self._versions.get(key, 0))

    def _found(self, question: wire.Get | wire.Await) -> wire.Done:
        """Return the answer to a question whose keys all exist: the values that its asker lacks, at most what fits."""
        if isinstance(question, wire.Await):
            return wire.Done()
        versions = tuple(self._versions[key] for key in question.keys)
        seen = itertools.chain(question.seen, itertools.repeat(0))
        lacking = [key for key, version, known in zip(question.keys, versions, seen, strict=False) if version != known]
        values = _fitting([self._entries[key] for key in lacking], len(versions))
        is_all = len(values) == len(question.keys)
        return wire.Done(values, versions=() if is_all else versions)

    def _number(self, key: str) -> int:
        text = self._entries.get(key, b"0")
        try:
            return int(text) if len(text) <= 20 else int("not a number")
        except ValueError:
            raise QuestionRefusedError(f"the value of {key!r} is not a number") from None

    # Entries

    def _change(self, key: str, value: bytes, lifetime: Lifetime, now: float) -> list[str]:
        self._afford({key: len(value)})
        self._set(key, value, lifetime, now)
        return [mark + key for mark in "gwp"]

    def _set(self, key: str, value: bytes, lifetime: Lifetime, now: float) -> None:
        self._remove(key)
        self._entries[key] = value
        self._changes += 1
        self._versions[key] = self._changes
        self._bytes += _cost(key, value)
        if lifetime != LASTING:
            self._lifetimes[key] = lifetime
        if lifetime.milliseconds:
            self._ends_at(now + lifetime.milliseconds / 1000, key)

    def _ends_at(self, time: float, key: str) -> None:
        """Note when an entry ends; entries that are set again and again leave times behind, which count for nothing."""
        heapq.heappush(self._ends, (time, self._versions[key], key))
        if len(self._ends) > 2 * len(self._lifetimes) + 16:
            self._ends = [end for end in self._ends if self._versions.get(end[2]) == end[1]]
            heapq.heapify(self._ends)

    def _remove(self, key: str) -> bool:
        value = self._entries.pop(key, None)
        if value is None:
            return False
        del self._versions[key]
        self._lifetimes.pop(key, None)
        self._bytes -= _cost(key, value)
        return True

    def _pop(self, key: str) -> bytes:
        queue = self._queues[key]
        value = queue.popleft()
        if not queue:
            del self._queues[key]
        self._bytes -= _cost(key, value)
        self._queued -= 1
        return value

    def _afford(self, sizes: dict[str, int]) -> None:
        """Raise QuestionRefusedError unless there is room for entries of all these sizes."""
        more, new = 0, 0
        for key, size in sizes.items():
            before = self._entries.get(key)
            more += size - len(before) if before is not None else _cost(key) + size
            new += before is None
        if self._is_full(more, entries=new):
            raise QuestionRefusedError(self._fullness())

    def _is_full(self, more: int, *, entries: int) -> bool:
        count = len(self._entries) + self._queued
        return (more > 0 and self._bytes + more > self._bytes_limit) or (
            entries > 0 and count + entries > STORE_ENTRIES_LIMIT
        )

    def _fullness(self) -> str:
        count = len(self._entries) + self._queued
        return (
            f"the store is full: it has {count} entries of {self._bytes} bytes, and may have {STORE_ENTRIES_LIMIT} "
            f"of {self._bytes_limit} (the setting store_bytes); delete what is not needed"
        )

    # Waiting

    def _wait(self, asker: int, number: int, question: wire.Question) -> None:
        waiter = asker, number
        assert isinstance(question, Waiting)
        cost = _waiting_cost(question)
        if self._waits_of[asker] + cost > WAITING_BYTES_LIMIT:
            raise QuestionRefusedError("too many questions of this process wait already; wait for fewer keys at a time")
        if isinstance(question, wire.Pop):
            wanted = {"q" + question.key}
        elif isinstance(question, wire.Observe):
            wanted = {"w" + question.key}
        elif isinstance(question, wire.Scan):
            wanted = {"p" + question.prefix}
        else:
            wanted = {"g" + key for key in question.keys if key not in self._entries}
        self._waiting[waiter], self._missing[waiter] = question, wanted
        self._waits_of[asker] += cost
        self._scans += isinstance(question, wire.Scan)
        for key in wanted:
            self._wanted.setdefault(key, {})[waiter] = None

    def _settle(self, waiter: tuple[int, int]) -> None:
        question = self._waiting.pop(waiter, None)
        if question is None:
            return
        self._waits_of[waiter[0]] -= _waiting_cost(question)
        self._scans -= isinstance(question, wire.Scan)
        if not self._waits_of[waiter[0]]:
            del self._waits_of[waiter[0]]
        for key in self._missing.pop(waiter):
            self._want_no_more(key, waiter)

    def _want_no_more(self, key: str, waiter: tuple[int, int]) -> None:
        del self._wanted[key][waiter]
        if not self._wanted[key]:
            del self._wanted[key]

    def _arrived(self, key: str) -> list[Reply]:
        """Return the answers to questions for which `key` was the last one missing."""
        if key[0] == "p":
            return self._prefixes_changed(key[1:])
        replies = []
        for waiter in list(self._wanted.get(key, ())):
            question = self._waiting[waiter]
            if isinstance(question, wire.Pop):
                if question.key not in self._queues:
                    break
                self._settle(waiter)
                replies.append(Reply(*waiter, wire.Done((self._pop(question.key),))))
                continue
            if isinstance(question, wire.Observe):
                self._settle(waiter)
                replies.append(Reply(*waiter, self._seen(question.key)))
                continue
            assert isinstance(question, wire.Get | wire.Await)
            self._missing[waiter].discard(key)
            self._want_no_more(key, waiter)
            if self._missing[waiter]:
                continue
            if gone := {"g" + each for each in question.keys if each not in self._entries}:
                self._missing[waiter] = gone  # an earlier one was deleted before the last one came
                for each in gone:
                    self._wanted.setdefault(each, {})[waiter] = None
                continue
            self._settle(waiter)
            replies.append(Reply(*waiter, self._found(question)))
        return replies

    def _prefixes_changed(self, key: str) -> list[Reply]:
        """Return the answers to questions that wait for a change of an entry whose key begins as this one."""
        replies: list[Reply] = []
        for end in range(len(key) + 1) if self._scans else ():
            for waiter in list(self._wanted.get("p" + key[:end], ())):
                question = self._waiting[waiter]
                try:
                    answer, _ = self._answer(waiter[0], question, 0.0)
                except QuestionRefusedError as refusal:
                    answer = wire.Refused(str(refusal)[:1000])
                if answer is not None:
                    self._settle(waiter)
                    replies.append(Reply(*waiter, answer))
        return replies


def fits(entries: Collection[tuple[str, bytes]], bytes_limit: int) -> bool:
    """Tell whether a store has room for all of these entries."""
    return len(entries) <= STORE_ENTRIES_LIMIT and sum(_cost(*entry) for entry in entries) <= bytes_limit


def _lifetime_of(asker: int, question: wire.Put | wire.Swap) -> Lifetime:
    return Lifetime(asker if question.ends_with_member else -1, question.milliseconds)


def _in_one(values: list[bytes]) -> tuple[bytes, ...]:
    """Return what all has to be in one answer."""
    size = sum(len(value) + 5 for value in values)
    if size > LARGE_ANSWER_BYTES:
        raise QuestionRefusedError(
            f"these entries have {size} bytes, and one answer may have {LARGE_ANSWER_BYTES}; read fewer at a time"
        )
    return tuple(values)


def _cost(key: str, value: bytes = b"") -> int:
    return ENTRY_OVERHEAD_BYTES + 4 * len(key) + len(value)


def _waiting_cost(question: Waiting) -> int:
    match question:
        case wire.Pop(key) | wire.Observe(key) | wire.Scan(key):
            return _cost(key)
    return sum(map(_cost, question.keys))


def _fitting(values: list[bytes], versions: int = 0) -> tuple[bytes, ...]:
    """Return the first of these values, as many as fit into one message beside so many versions."""
    room = STORE_ANSWER_BYTES - 9 * versions
    for count, value in enumerate(values):
        room -= len(value) + 5
        if room < 0 and count:
            return tuple(values[:count])
    return tuple(values)
