"""A store of torch.distributed over covey's control links; all members of the run hold copies of it."""

from __future__ import annotations

import collections
import contextlib
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from covey.base.errors import DeadlineError
from covey.proto.store_copy import STORES_LIMIT
from covey.runtime.group.internals import open_group_store
from covey.runtime.state.store import describe, encoded
from covey.wire import store as wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import timedelta

    from covey.runtime.group.group import Group
    from covey.runtime.state.store import StoreClient

_alive: Final[collections.deque[CoveyStore]] = collections.deque(maxlen=STORES_LIMIT)
"""Keeps the Python objects of stores alive: torch's C++ code holds only its own part of a store."""


class StoreTimeoutError(DeadlineError, dist.DistStoreError):  # type: ignore[misc]  # torch is not followed
    """A key was not set in time. A DeadlineError that is also what torch's own stores raise."""


def open_store(group: Group, timeout: timedelta, *, owns_run: bool = False) -> CoveyStore:
    """Return a new store that all ranks of the group share; every rank calls this.

    With `owns_run`, this process leaves the run when the process group that uses the store is destroyed.
    """
    store = CoveyStore(group, open_group_store(group, timeout.total_seconds()), owns_run=owns_run)
    store.set_timeout(timeout)
    _alive.append(store)
    return store


class CoveyStore(dist.Store):  # type: ignore[misc]  # torch is not followed by the type checker
    """A key-value store of a run. Any thread may use it; Ctrl-C ends a waiting call.

    C++ calls some methods by other names than Python does: see the pairs at the end.
    """

    def __init__(self, group: Group, client: StoreClient, *, owns_run: bool) -> None:
        super().__init__()
        self._client = client
        self.group, self.owns_run = group, owns_run
        self._worlds = 0

    def new_nonce(self) -> str:
        """Return a name that is equal on all ranks, and new for each process group of all ranks that uses the store."""
        self._worlds += 1
        return f"{self._client.store_id:016x}.{self._worlds}"

    def set(self, key: str, value: str | bytes) -> None:
        """Set an entry."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several entries at once."""
        self._ask(wire.Put(tuple((key, encoded(value)) for key, value in zip(keys, values, strict=True))))

    def get(self, key: str) -> bytes:
        """Wait for an entry, and return its value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several entries, and return their values."""
        with self._naming(wire.Get(tuple(keys)), self.timeout):
            return self._client.read(tuple(keys), self.timeout.total_seconds())

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for several entries."""
        self._ask(wire.Await(tuple(keys)), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all of these entries exist."""
        return bool(self._ask(wire.HasKeys(tuple(keys))).number)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first; return the sum."""
        return self._ask(wire.Add(key, amount)).number

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set an entry if it has the expected value, or does not exist and "" is expected; return its value.

        As in torch's own stores, the answer is what was expected if there is no entry.
        """
        answer = self._ask(wire.Swap(key, encoded(expected), encoded(desired)))
        return answer.values[0] if answer.values else encoded(expected)

    def append(self, key: str, value: str | bytes) -> None:
        """Add to the end of a value."""
        self._ask(wire.Append(key, encoded(value)))

    def delete_key(self, key: str) -> bool:
        """Remove an entry; return whether it existed."""
        return bool(self._ask(wire.Delete(key)).number)

    def num_keys(self) -> int:
        """Return how many entries there are."""
        return self._ask(wire.Count()).number

    def list_keys(self) -> list[str]:
        """Return the keys of all entries."""
        with self._naming(wire.Names(), self.timeout):
            return self._client.names(self.timeout.total_seconds())

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Add a value to the end of a queue."""
        self._ask(wire.Push(key, encoded(value)))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the first value of a queue; wait for one if `block`."""
        values = self._ask(wire.Pop(key, block)).values
        if not values:
            raise dist.QueueEmptyError(f"the queue {key!r} is empty")
        return values[0]

    def queue_len(self, key: str) -> int:
        """Return how many values are in a queue."""
        return self._ask(wire.Length(key)).number

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set exist."""
        return True

    def clone(self) -> CoveyStore:
        """Return itself: any thread may use it."""
        return self

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815
    hasExtendedApi = has_extended_api  # noqa: N815

    def _ask(self, question: wire.Question, timeout: timedelta | None = None) -> wire.Done:
        within = self.timeout if timeout is None else timeout
        with self._naming(question, within):
            return self._client.ask(question, within.total_seconds())

    @staticmethod
    @contextlib.contextmanager
    def _naming(question: wire.Question, timeout: timedelta) -> Iterator[None]:
        """Let an error about time say what was asked for, and be torch's own."""
        try:
            yield
        except DeadlineError:
            raise StoreTimeoutError(
                f"{describe(question)}: not set within {timeout.total_seconds():g} s; "
                "has every rank called this, or did one fail before?"
            ) from None
