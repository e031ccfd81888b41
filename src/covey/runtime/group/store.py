"""The key-value store of a run, as `Node.store` offers it."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from covey.base.errors import ConfigError, DeadlineError
from covey.proto.store_copy import RUN_STORE
from covey.runtime.state.store import StoreClient, describe, encoded
from covey.wire import store as wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from covey.runtime.state.store import Stores

Until: TypeAlias = Literal["member"]
"""What an entry ends with."""


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
    1,000 characters, values are bytes of up to 16 MiB; text is encoded as UTF-8. There is room for 64 MiB, or what the
    setting `store_bytes` says. Any thread may use it. `timeout` is in seconds; by default it is that of the group.

    Calls may raise:
        DeadlineError: there was no answer in time. A change may still have been made.
        PeerLostError: with `on_loss="raise"`, the member that is longest in the run is lost, and the others have not
            agreed yet to go on without it.
        ConfigError: the store is full, or a key or value is too long, or cannot be encoded.
        GroupChangedError: the other members continue without this process; join again.
        QuorumLostError: with `on_loss="continue"`, too few members remain to continue.
        ClosedError: this process has left the run.
    """

    def __init__(self, stores: Stores, timeout: float) -> None:
        self._seconds = timeout
        self._client = StoreClient(stores, RUN_STORE)

    def set(
        self,
        key: str,
        value: bytes | str,
        *,
        until: Until | None = None,
        ttl: float | None = None,
        timeout: float | None = None,
    ) -> None:
        """Set an entry, which lasts until it is deleted.

        With `until="member"` it ends when this process leaves the run or is lost. With `ttl` it ends after so many
        seconds, on a clock that also runs while processes are stopped and machines sleep; never before, and later only
        if the member is lost meanwhile that orders the changes. Setting the entry again begins its time anew.
        """
        self.set_all({key: value}, until=until, ttl=ttl, timeout=timeout)

    def set_all(
        self,
        entries: Mapping[str, bytes | str],
        *,
        until: Until | None = None,
        ttl: float | None = None,
        timeout: float | None = None,
    ) -> None:
        """Set several entries at once: every reader sees all of them or none. See `set`."""
        pairs = tuple((key, encoded(value)) for key, value in entries.items())
        self._ask(wire.Put(pairs, *_lifetime(until, ttl)), timeout)

    def get(self, key: str, default: bytes | None = None, *, timeout: float | None = None) -> bytes | None:
        """Return the value of an entry now, or `default` if it does not exist; see `wait`."""
        found = _observed(self._ask(wire.Observe(key, -1), timeout)).value
        return default if found is None else found

    def get_all(self, *keys: str, timeout: float | None = None) -> dict[str, bytes]:
        """Return the values of those of these entries that exist, all as they were at one moment."""
        answer = self._ask(wire.Read(keys), timeout)
        found = [key for key, version in zip(keys, answer.versions, strict=False) if version]
        return dict(zip(found, answer.values, strict=False))

    def items(self, prefix: str = "", *, timeout: float | None = None) -> dict[str, bytes]:
        """Return all entries whose keys begin with `prefix`, sorted, as they were at one moment: up to 16 MiB."""
        return _entries_of(self._ask(wire.Scan(prefix), timeout))

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
        self,
        key: str,
        expected: bytes | str | None,
        desired: bytes | str,
        *,
        until: Until | None = None,
        ttl: float | None = None,
        timeout: float | None = None,
    ) -> Swapped:
        """Set an entry if it has the expected value; return whether it had, and the value now.

        `expected=None` sets an entry only if it does not exist. A missing entry also counts as empty, as in torch's
        stores. If the entry is set, it lasts as `set` says.
        """
        question = wire.Swap(key, encoded(expected or b""), encoded(desired), expected is None, *_lifetime(until, ttl))
        answer = self._ask(question, timeout)
        return Swapped(bool(answer.number), answer.values[0] if answer.values else None)

    def delete(self, key: str, *, timeout: float | None = None) -> bool:
        """Remove an entry; return whether it existed."""
        return bool(self._ask(wire.Delete(key), timeout).number)

    def keys(self, prefix: str = "", *, timeout: float | None = None) -> list[str]:
        """Return the keys of all entries that begin with `prefix`, sorted.

        More than 1 MiB of keys are read in parts: one that is set or deleted meanwhile may be among them or not.
        """
        seconds = self._seconds if timeout is None else timeout
        with _naming(wire.Names(), seconds):
            return self._client.names(seconds, prefix)

    def watch(self, key: str, *, timeout: float | None = None) -> Iterator[Observed]:
        """Yield the value of an entry now, and again whenever it has changed, as long as this process is in the run.

        A reader that is slower than the changes misses some of them, but never the last one.

        Raises:
            DeadlineError: nothing has changed for `timeout` seconds. Without a `timeout` there is no such limit; the
                store must then answer within the timeout of the group.
        """
        seen = wire.Observe(key, -1)
        while True:
            answer = self._changed(seen, timeout)
            yield _observed(answer)
            seen = wire.Observe(key, answer.number)

    def watch_prefix(self, prefix: str, *, timeout: float | None = None) -> Iterator[dict[str, bytes]]:
        """Yield all entries whose keys begin with `prefix` now, and again whenever one of them has changed.

        Each time they are what `items` returns. Otherwise it is like `watch`.
        """
        seen = wire.Scan(prefix)
        while True:
            answer = self._changed(seen, timeout)
            yield _entries_of(answer)
            seen = wire.Scan(prefix, len(answer.values) // 2, answer.number)

    def _changed(self, seen: wire.Observe | wire.Scan, timeout: float | None) -> wire.Done:
        """Return the answer to a question about a change, whenever there is one; DeadlineError after a `timeout`."""
        while True:
            try:
                return self._ask(seen, timeout)
            except DeadlineError:
                if timeout is not None:
                    raise
            self._ask(wire.HasKeys(()), None)  # answered at once, unless the store does not answer at all

    def _ask(self, question: wire.Question, timeout: float | None) -> wire.Done:
        seconds = self._seconds if timeout is None else timeout
        with _naming(question, seconds):
            return self._client.ask(question, seconds)


def _observed(answer: wire.Done) -> Observed:
    return Observed(answer.values[0] if answer.values else None, answer.number)


def _entries_of(answer: wire.Done) -> dict[str, bytes]:
    keys, values = answer.values[::2], answer.values[1::2]
    return {key.decode(errors="replace"): value for key, value in zip(keys, values, strict=False)}


def _lifetime(until: Until | None, ttl: float | None) -> tuple[bool, int]:
    """Return what a question says about the end of an entry: whether it is that of its member, and milliseconds."""
    if until not in (None, "member"):
        raise ConfigError(f"until={until!r} must be None or 'member'")
    if ttl is None:
        return until is not None, 0
    if not 0.001 <= ttl <= wire.MILLISECONDS_LIMIT / 1000:
        raise ConfigError(f"ttl={ttl!r} must be seconds, at least 0.001; leave it out for an entry that lasts")
    return until is not None, math.ceil(ttl * 1000)


@contextlib.contextmanager
def _naming(question: wire.Question, seconds: float) -> Iterator[None]:
    """Let a DeadlineError say what was asked for."""
    try:
        yield
    except DeadlineError:
        raise DeadlineError(f"{describe(question)}: no answer within the timeout of {seconds:g} s") from None
