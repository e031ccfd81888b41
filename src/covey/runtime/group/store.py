"""Key-value stores for all ranks of a group: that of the run, and further ones for torch's process groups."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.base.errors import ConfigError, DeadlineError, RemoteProtocolError
from covey.proto.store_copy import RUN_STORE
from covey.runtime.group.internals import node_of
from covey.runtime.members.store import StoreClient, Stores, describe
from covey.wire import store as wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.runtime.collectives.engine import Engine
    from covey.runtime.group.group import Group

OPEN_SECONDS: Final = 60.0
"""How long it may take to make a store; it takes far less, unless a machine is suspended."""


def open_group_store(group: Group, timeout: float | None = None) -> StoreClient:
    """Make a store, and return this rank's client of it. Every rank of the group calls this."""
    node = node_of(group)
    number = secrets.randbits(61) + 1
    if node is None:
        client = StoreClient(Stores(None), number)
        client.ask(wire.Open(), OPEN_SECONDS)
        return client
    if group.rank == 0:
        StoreClient(node.stores, number).ask(wire.Open(), OPEN_SECONDS if timeout is None else timeout)
    number = group.broadcast_object(number, type=int, timeout=timeout)
    if not 0 <= number < 1 << 62:
        raise RemoteProtocolError(f"rank 0 sent the store number {number}, which is not within 62 bits")
    return StoreClient(node.stores, number)


class Observed(NamedTuple):
    """A value of an entry that is watched."""

    value: bytes | None
    """None if the entry was deleted, or does not exist yet."""
    version: int
    """Higher for every change; 0 if there is no entry."""


class RunStore:
    """The key-value store of a run. All members hold a copy, so entries last as long as one of them does.

    Every member sees all changes in the same order, and a call returns when all have the change. Keys are text of up to
    1,000 characters, values are bytes of up to 256 KiB; text is encoded as UTF-8. There is room for 64 MiB. Any thread
    may use it. `timeout` is in seconds; by default it is that of the group.

    Calls may raise:
        DeadlineError: there was no answer in time. A change may still have been made.
        PeerLostError: with `on_loss="raise"`, the member that is longest in the run is lost, and the others have not
            agreed yet to go on without it.
        ConfigError: the store is full, or a key or value is too long.
        ClosedError: this process has left the run.
    """

    def __init__(self, engine: Engine) -> None:
        self._seconds = engine.config.timeout
        node = engine.node
        self._client = StoreClient(Stores(None) if node is None else node.stores, RUN_STORE)

    def set(self, key: str, value: bytes | str, *, timeout: float | None = None) -> None:
        """Set an entry."""
        self._ask(wire.Put(((key, _bytes(value)),)), timeout)

    def get(self, key: str, default: bytes | None = None, *, timeout: float | None = None) -> bytes | None:
        """Return the value of an entry now, or `default` if it does not exist; see `wait`."""
        found = self._watch(key, -1, timeout).value
        return default if found is None else found

    def wait(self, *keys: str, timeout: float | None = None) -> list[bytes]:
        """Wait until all of these entries exist, and return their values.

        Raises:
            DeadlineError: at least one of them does not exist after `timeout` seconds.
        """
        return list(self._ask(wire.Get(keys), timeout).values)

    def add(self, key: str, amount: int = 1, *, timeout: float | None = None) -> int:
        """Add to a number, which is 0 at first, and return the sum. No two calls get the same one."""
        return self._ask(wire.Add(key, amount), timeout).number

    def compare_set(
        self, key: str, expected: bytes | str, desired: bytes | str, *, timeout: float | None = None
    ) -> bytes:
        """Set an entry if it has the expected value; return its value now. A missing entry counts as empty."""
        return self._ask(wire.Swap(key, _bytes(expected), _bytes(desired)), timeout).values[0]

    def delete(self, key: str, *, timeout: float | None = None) -> bool:
        """Remove an entry; return whether it existed."""
        return bool(self._ask(wire.Delete(key), timeout).number)

    def keys(self, *, timeout: float | None = None) -> list[str]:
        """Return the keys of all entries, sorted."""
        return sorted(key.decode() for key in self._ask(wire.Names(), timeout).values)

    def watch(self, key: str, *, timeout: float | None = None) -> Iterator[Observed]:
        """Yield the value of an entry now, and again whenever it has changed, until no change comes for `timeout`.

        A reader that is slower than the changes misses some of them, but never the last one.
        """
        seen = self._watch(key, -1, timeout)
        while True:
            yield seen
            try:
                seen = self._watch(key, seen.version, timeout)
            except DeadlineError:
                return

    def _watch(self, key: str, version: int, timeout: float | None) -> Observed:
        answer = self._ask(wire.Observe(key, version), timeout)
        return Observed(answer.values[0] if answer.values else None, answer.number)

    def _ask(self, question: wire.Question, timeout: float | None) -> wire.Done:
        seconds = self._seconds if timeout is None else timeout
        try:
            return self._client.ask(question, seconds)
        except DeadlineError:
            raise DeadlineError(f"{describe(question)}: no answer within the timeout of {seconds:g} s") from None


def _bytes(value: bytes | str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise ConfigError(
        f"a store has bytes and text, not {type(value).__name__}; encode the value, with json for instance"
    )
