"""Whether what a store answered can be explained by one order of all questions: a search through all orders.

A question takes effect at one moment between its asking and its answer. One without an answer, because its asker was
lost or does not wait any more, takes effect at any moment after its asking, or never.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from covey.wire import store as wire

Entries = tuple[tuple[str, tuple[bytes, int]], ...]
Queues = tuple[tuple[str, tuple[bytes, ...]], ...]


@dataclass(frozen=True)
class Ended:
    """That an entry has ended: from a moment on the store may remove it, if it still has this value."""

    key: str
    value: bytes


@dataclass(frozen=True)
class Operation:
    """A question, when it was asked and answered, and the answer; `answered` is None without one."""

    question: wire.Question | Ended
    asked: int
    answered: int | None = None
    answer: wire.Answer | None = None


class State(NamedTuple):
    """A store, as simple as can be: written from the documentation, beside `proto.store`."""

    entries: Entries = ()
    """By key: value and version."""
    changes: int = 0
    queues: Queues = ()

    def after(self, question: wire.Question | Ended) -> tuple[State, wire.Answer] | None:
        """Return the store after a question, and the answer; None if the question waits."""
        entries, queues = dict(self.entries), dict(self.queues)
        match question:
            case Ended(key, value):
                rest = {other: entry for other, entry in entries.items() if (other, entry[0]) != (key, value)}
                return self._replace(entries=tuple(sorted(rest.items()))), wire.Done()
            case wire.Put(pairs):
                state = self
                for key, value in pairs:
                    state = state._with(key, value)
                return state, wire.Done()
            case wire.Read(keys):
                found = [entries[key][0] for key in keys if key in entries]
                return self, wire.Done(tuple(found), 0, tuple(entries[key][1] if key in entries else 0 for key in keys))
            case wire.Scan(prefix, count, version):
                names = sorted(key for key in entries if key.startswith(prefix))
                highest = max((entries[key][1] for key in names), default=0)
                if (len(names), highest) == (count, version):
                    return None
                return self, wire.Done(
                    tuple(each for key in names for each in (key.encode(), entries[key][0])), highest
                )
            case wire.Add(key, amount):
                total = int(entries[key][0] if key in entries else 0) + amount
                return self._with(key, b"%d" % total), wire.Done(number=total)
            case wire.Swap(key, expected, desired, if_missing):
                now = entries[key][0] if key in entries else None
                if now is None if if_missing else (now or b"") == expected:
                    return self._with(key, desired), wire.Done((desired,), 1)
                return self, wire.Done(() if now is None else (now,))
            case wire.Delete(key):
                rest = {other: entry for other, entry in entries.items() if other != key}
                return self._replace(entries=tuple(sorted(rest.items()))), wire.Done(number=int(key in entries))
            case wire.Get(keys):
                found = [entries[key][0] for key in keys if key in entries]
                return (self, wire.Done(tuple(found))) if len(found) == len(keys) else None
            case wire.Observe(key, version):
                found_at = entries[key][1] if key in entries else 0
                if found_at == version:
                    return None
                return self, wire.Done((entries[key][0],) if key in entries else (), found_at)
            case wire.Push(key, value):
                queues[key] = (*queues.get(key, ()), value)
                return self._replace(queues=tuple(sorted(queues.items()))), wire.Done()
            case wire.Pop(key, True):
                if not queues.get(key):
                    return None
                (first, *others), queues[key] = queues[key], ()
                queues[key] = tuple(others)
                return self._replace(queues=tuple(sorted(queues.items()))), wire.Done((first,))
        raise AssertionError(f"no model of {question}")

    def _with(self, key: str, value: bytes) -> State:
        entries = {**dict(self.entries), key: (value, self.changes + 1)}
        return self._replace(entries=tuple(sorted(entries.items())), changes=self.changes + 1)


def is_linearizable(operations: list[Operation]) -> bool:
    """Tell whether one order of the operations explains all answers."""
    order = sorted(operations, key=lambda each: (each.answered is None, each.answered or each.asked))
    answered = sum(1 << at for at, each in enumerate(order) if each.answered is not None)
    seen: set[tuple[int, State]] = set()
    stack = [(0, State())]
    while stack:
        done, state = stack.pop()
        if done & answered == answered:
            return True
        if (done, state) in seen:
            continue
        seen.add((done, state))
        first_end = min(each.answered for at, each in enumerate(order) if each.answered and not done >> at & 1)
        following = []
        for at, operation in enumerate(order):
            if done >> at & 1 or operation.asked > first_end:
                continue
            result = state.after(operation.question)
            if result is None or (operation.answered is not None and result[1] != operation.answer):
                continue
            if result[0] != state:
                following.append((done | 1 << at, result[0]))
            elif operation.answered is not None:  # it only reads, so it is in the way of none of the others
                following = [(done | 1 << at, state)]
                break
        stack += reversed(following)
    return False
