"""The key-value store of a run, as `Node.store` offers it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from covey.base.errors import DeadlineError
from covey.proto.store_copy import RUN_STORE
from covey.runtime.state.store import StoreClient, Stores, describe, encoded
from covey.wire import store as wire

if TYPE_CHECKING:
    from collections.abc import Iterator


class Observed(NamedTuple):
    """A value of an entry that is watched."""

    value: bytes | None
    """None if the entry was deleted, or does not exist yet."""
    version: int
    """Higher for every change; 0 if there is no entry."""


class Swapped(NamedTuple):
    """What came of `compare_set`. It is true if the entry was set."""

    won: bool
    """Whether the entry had the expected value, and has the desired one now."""
    value: bytes | None
    """The value of the entry now; None if it does not exist."""

    def __bool__(self) -> bool:
        return self.won


class RunStore:
    """The key-value store of a run. All members hold a copy, so entries last as long as one of them does.

    Every member sees all changes in the same order, and a call returns when all have the change. Keys are text of up to
    1,000 characters, values are bytes of up to 256 KiB; text is encoded as UTF-8. There is room for 64 MiB. Any thread
    may use it. `timeout` is in seconds; by default it is that of the group.

    Calls may raise:
        DeadlineError: there was no answer in time. A change may still have been made.
        PeerLostError: with `on_loss="raise"`, the member that is longest in the run is lost, and the others have not
            agreed yet to go on without it.
        ConfigError: the store is full, or a key or value is too long, or cannot be encoded.
        GroupChangedError: the other members continue without this process; join again.
        QuorumLostError: with `on_loss="continue"`, too few members remain to continue.
        ClosedError: this process has left the run.
    """

    def __init__(self, stores: Stores | None, timeout: float) -> None:
        """A process that is alone has no `stores` of a run."""
        self._seconds = timeout
        self._client = StoreClient(Stores(None) if stores is None else stores, RUN_STORE)

    def set(self, key: str, value: bytes | str, *, timeout: float | None = None) -> None:
        """Set an entry."""
        self._ask(wire.Put(((key, encoded(value)),)), timeout)

    def get(self, key: str, default: bytes | None = None, *, timeout: float | None = None) -> bytes | None:
        """Return the value of an entry now, or `default` if it does not exist; see `wait`."""
        found = self._watch(key, -1, timeout).value
        return default if found is None else found

    def wait(self, *keys: str, timeout: float | None = None) -> list[bytes]:
        """Wait until all of these entries exist, and return their values, all as they were at one moment.

        Raises:
            DeadlineError: at least one of them does not exist after `timeout` seconds.
        """
        seconds = self._seconds if timeout is None else timeout
        with _naming(wire.Get(keys), seconds):
            return self._client.read(keys, seconds)

    def add(self, key: str, amount: int = 1, *, timeout: float | None = None) -> int:
        """Add to a number, which is 0 at first, and return the sum. No two calls get the same one."""
        return self._ask(wire.Add(key, amount), timeout).number

    def compare_set(
        self, key: str, expected: bytes | str | None, desired: bytes | str, *, timeout: float | None = None
    ) -> Swapped:
        """Set an entry if it has the expected value; return whether it had, and the value now.

        `expected=None` sets an entry only if it does not exist. A missing entry also counts as empty, as in torch's
        stores.
        """
        question = wire.Swap(key, encoded(expected or b""), encoded(desired), expected is None)
        answer = self._ask(question, timeout)
        return Swapped(bool(answer.number), answer.values[0] if answer.values else None)

    def delete(self, key: str, *, timeout: float | None = None) -> bool:
        """Remove an entry; return whether it existed."""
        return bool(self._ask(wire.Delete(key), timeout).number)

    def keys(self, *, timeout: float | None = None) -> list[str]:
        """Return the keys of all entries, sorted.

        More than 1 MiB of keys are read in parts: one that is set or deleted meanwhile may be among them or not.
        """
        seconds = self._seconds if timeout is None else timeout
        with _naming(wire.Names(), seconds):
            return self._client.names(seconds)

    def watch(self, key: str, *, timeout: float | None = None) -> Iterator[Observed]:
        """Yield the value of an entry now, and again whenever it has changed, as long as this process is in the run.

        A reader that is slower than the changes misses some of them, but never the last one.

        Raises:
            DeadlineError: nothing has changed for `timeout` seconds. Without a `timeout` there is no such limit; the
                store must then answer within the timeout of the group.
        """
        seen = self._watch(key, -1, timeout)
        while True:
            yield seen
            while (now := self._changed(key, seen.version, timeout)) is None:
                pass
            seen = now

    def _changed(self, key: str, version: int, timeout: float | None) -> Observed | None:
        """Return the entry once it has another version; None if it still has this one after the group's timeout."""
        try:
            return self._watch(key, version, timeout)
        except DeadlineError:
            if timeout is not None:
                raise
        now = self._watch(key, -1, timeout)  # answered at once, unless the store does not answer at all
        return None if now.version == version else now

    def _watch(self, key: str, version: int, timeout: float | None) -> Observed:
        answer = self._ask(wire.Observe(key, version), timeout)
        return Observed(answer.values[0] if answer.values else None, answer.number)

    def _ask(self, question: wire.Question, timeout: float | None) -> wire.Done:
        seconds = self._seconds if timeout is None else timeout
        with _naming(question, seconds):
            return self._client.ask(question, seconds)


@contextlib.contextmanager
def _naming(question: wire.Question, seconds: float) -> Iterator[None]:
    """Let a DeadlineError say what was asked for."""
    try:
        yield
    except DeadlineError:
        raise DeadlineError(f"{describe(question)}: no answer within the timeout of {seconds:g} s") from None
