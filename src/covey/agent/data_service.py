"""What an agent does about data sets: the functions that terminals call, which may start programs here, too."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator  # noqa: TC003 - calls read the annotations
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from covey.agent.data_fetch import DataFetch
from covey.agent.data_sets import (
    DATA_SOURCES_LIMIT,
    DataManifest,
    DataName,
    DataReport,
    Digest,
    FetchProgress,
    FetchRequest,
    NodeId,
)
from covey.agent.data_store import DataStore, data_limit
from covey.base.errors import ConfigError, ConnectError, CoveyError
from covey.base.numbers import Seat
from covey.net.keys.identity import node_name, short_id
from covey.runtime.calls.handlers import current_caller
from covey.wire.signed import machine_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.agent.data_line import DataLine, DataSource, Grants
    from covey.agent.data_store import PartialData, StoredData
    from covey.runtime.calls.functions import FunctionRegistry
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.wire.messages import Card

PROGRESS_EVERY: Final = 0.5
"""How often a terminal hears how far an agent is."""
FETCHES_LIMIT: Final = 4
"""Data sets that an agent gets at a time."""
_REPORTS: Final = 16
"""Data sets in one page of a list."""


class DataService:
    """The functions of one agent that are about data sets."""

    def __init__(
        self,
        grants: Grants,
        remote_of: Callable[[Seat], RemoteProcess],
        peer: Callable[[bytes], RemoteProcess | None],
        note: Callable[[str, Card | None, str, str], None],
    ) -> None:
        """`remote_of` returns the node that calls, and `peer`, on the control loop, a linked agent by its id.

        `note` writes to the audit log: event, node, data set and reason.
        """
        self._grants, self._remote_of, self._peer, self._note = grants, remote_of, peer, note
        self.line: DataLine
        """How this machine gives data to others, and takes it. The owner sets it."""
        self._store = DataStore()
        self._lock = threading.Lock()
        self._fetches: dict[str, tuple[Seat, DataFetch | None]] = {}
        """By name of the data set: those that are under way, and for whom."""
        self._partials: dict[bytes, PartialData] = {}
        self._complete: dict[bytes, StoredData] = {}
        """By digest: what others read here now."""
        self._is_closed = False

    def register(self, functions: FunctionRegistry) -> None:
        """Let terminals call the functions."""
        for function in (self.fetch_data, self.data_sets, self.remove_data, self.grant_data):
            functions.register(function.__name__, function)

    def find(self, digest: bytes) -> StoredData | None:
        """Return a data set that is here, whole or in part."""
        with self._lock:
            found = self._partials.get(digest) or self._complete.get(digest)
            if found is not None and not found.folder.exists():  # it was removed by a command
                self._complete.pop(digest, None)
                found.close()
                found = None
            if found is None and (found := self._store.find(digest)) is not None:
                self._complete[digest] = found
            return found

    def lost(self, seat: Seat) -> None:
        """Stop what a terminal has begun, because it has gone. Returns at once."""
        self._grants.lost(seat)
        with self._lock:
            fetches = [fetch for owner, fetch in self._fetches.values() if owner == seat and fetch is not None]
        for fetch in fetches:
            fetch.cancel()

    def close(self) -> None:
        """Stop everything that is under way."""
        with self._lock:
            self._is_closed = True
            fetches = [fetch for _, fetch in self._fetches.values() if fetch is not None]
        for fetch in fetches:
            fetch.stop()
        self.line.close()
        with self._lock:
            for stored in self._complete.values():
                stored.close()
            self._complete.clear()

    # What terminals call

    def grant_data(
        self, digest: Digest, machines: Annotated[tuple[NodeId, ...], msgspec.Meta(max_length=DATA_SOURCES_LIMIT)]
    ) -> None:
        """Let machines read a data set here, as long as the caller is linked."""
        self._grants.give(_caller(), digest, machines)

    def data_sets(self) -> Iterator[list[DataReport]]:
        """Yield the data sets of this machine, page by page."""
        reports = self._store.reports()
        for start in range(0, len(reports), _REPORTS):
            yield reports[start : start + _REPORTS]

    def remove_data(self, name: DataName) -> int:
        """Remove a data set; return how many bytes that frees."""
        card = self._remote_of(_caller()).card
        with self._lock:
            if name in self._fetches:
                raise ConfigError(f"the data set {name!r} is being sent here; wait for its end")
            for stored in self._complete.values():
                stored.close()
            self._complete.clear()
        freed = self._store.remove(name)
        self._note("data-removed", card, name, f"{freed} bytes")
        return freed

    def fetch_data(self, request: FetchRequest) -> Iterator[FetchProgress]:
        """Get a data set from the caller and from other agents; yield how far it is, until programs find it.

        What has come stays if the caller goes, or this machine: the same request gets the rest.
        """
        seat = _caller()
        card = self._remote_of(seat).card
        with self._only_one(request.name, seat):
            if self._store.has(request.name, request.digest):
                size = next(each.size for each in self._store.reports() if each.digest == request.digest)
                yield FetchProgress(size, size, 0, 0, is_published=True, was_there=True)
                return
            yield from self._fetch(request, seat, card)

    def _fetch(self, request: FetchRequest, seat: Seat, card: Card) -> Iterator[FetchProgress]:
        came_from = node_name(card.host_name, machine_of(card))
        terminal = self.line.source(lambda: self._remote_of(seat), came_from) if request.is_here else None
        peers = self._sources(request.peers)
        sources = [*([terminal] if terminal is not None else []), *peers]
        manifest = _list_from(sources, request)
        partial, earlier = self._store.begin(request.name, manifest, data_limit())
        if (whole := self._store.find(request.digest)) is not None:
            earlier.append(whole)  # it is here under another name, or was the current version before
        fetch = DataFetch(partial, earlier, terminal, peers)
        with self._lock:
            self._fetches[request.name] = seat, fetch
            self._partials[request.digest] = partial
        self._note("data-began", card, request.name, f"{manifest.size} bytes, {request.digest.hex()}")
        is_published = False
        try:
            fetch.start()
            while not (is_whole := fetch.wait(PROGRESS_EVERY)):
                yield self._progress(partial, fetch)
                if fetch.is_stopped:
                    raise ConnectError("the machine that pushes has gone")
            assert is_whole
            with self._lock:
                self._partials.pop(request.digest, None)
            self._store.publish(request.name, partial, came_from)
            is_published = True
            self._note("data-received", card, request.name, f"{manifest.size} bytes, {request.digest.hex()}")
        finally:
            fetch.stop()
            with self._lock:
                self._partials.pop(request.digest, None)
            partial.close()
        yield self._progress(partial, fetch, is_published=is_published)

    @staticmethod
    def _progress(partial: PartialData, fetch: DataFetch, *, is_published: bool = False) -> FetchProgress:
        return FetchProgress(
            partial.bytes_there,
            partial.manifest.size,
            fetch.received(from_terminal=True),
            fetch.received(from_terminal=False),
            is_published=is_published,
        )

    def _sources(self, nodes: tuple[bytes, ...]) -> list[DataSource]:
        """Return the agents that are linked now, of those that have the data set."""
        found = []
        for node in nodes:
            with contextlib.suppress(ConnectError):
                found.append(self.line.source(functools.partial(self._peer, node), short_id(node)))
        return found

    @contextlib.contextmanager
    def _only_one(self, name: str, seat: Seat) -> Iterator[None]:
        with self._lock:
            if self._is_closed:
                raise ConfigError("the agent is being stopped")
            if name in self._fetches:
                raise ConfigError(f"the data set {name!r} is being sent here by another command; wait for its end")
            if len(self._fetches) >= FETCHES_LIMIT:
                raise ConfigError(f"{FETCHES_LIMIT} data sets are being sent here already; try again later")
            self._fetches[name] = seat, None
        try:
            yield
        finally:
            with self._lock:
                del self._fetches[name]


def _list_from(sources: list[DataSource], request: FetchRequest) -> DataManifest:
    """Return the list of a data set from the first machine that gives it."""
    problems = list[str]()
    for source in sources:
        try:
            return DataManifest.decode(source.list_bytes(request.digest, request.size), request.digest)
        except CoveyError as error:
            problems.append(f"{source.name}: {error}")
    raise ConfigError("; ".join(problems) or "no machine that has the data set is linked with this one")


def _caller() -> Seat:
    caller = current_caller.get()
    assert caller is not None
    return Seat(caller.seat)
