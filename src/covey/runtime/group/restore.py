"""Give newcomers and drifted ranks the state of the others, over the group's point-to-point lanes.

All ranks tag the chunks of their states and exchange manifests. From these each rank computes which ranks are donors
and which are receivers. A receiver asks donors for the chunks it lacks, many at a time, and checks each as it arrives
in its final memory. Donors answer until every receiver is done or lost. If a restore fails, received chunks stay, and
the next restore does not transfer them again.
"""

from __future__ import annotations

import functools
import itertools
import logging
import secrets
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.config import check_timeout
from covey.base.dtypes import DTYPES, dtype_code
from covey.base.errors import (
    ConfigError,
    CoveyError,
    DeadlineError,
    MismatchError,
    PeerLostError,
    RemoteProtocolError,
)
from covey.base.text import printable
from covey.proto.transferring import WINDOW_CHUNKS, Election, Fetch, Orders, differing, elect, listed, objection
from covey.runtime.buffers import as_array, readable
from covey.runtime.group.exchange import Exchange
from covey.runtime.group.internals import engine_of
from covey.runtime.group.movements import PHYSICAL_BYTES
from covey.wire import objects
from covey.wire.manifest import MANIFEST_BYTES, Entry, Manifest, Tagger

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, MutableMapping

    from covey.proto.message import Received
    from covey.runtime.buffers import Operand
    from covey.runtime.group.group import Group
    from covey.wire.manifest import Bytes, Chunk

logger = logging.getLogger("covey")

REQUEST: Final = (1 << 32) - 1
"""The message number of requests. Messages with chunks have the numbers of the chunks."""
ON_DRIFT: Final = ("repair", "raise")
NONCE_BYTES: Final = 16
TEXT_LIMIT: Final = 1000
PROGRESS_SECONDS: Final = 1.0
"""A restore that takes longer shows a progress bar."""
_BYTE: Final = dtype_code(np.dtype(np.uint8))


@dataclass(frozen=True, kw_only=True)
class RestoreReport:
    """What a restore did. Ranks are in ascending order, and the same on every rank."""

    bytes_received: int = 0
    """Bytes of the state that this rank received."""
    bytes_sent: int = 0
    """Bytes of the state that this rank sent."""
    seconds: float = 0.0
    donors: tuple[int, ...]
    """The ranks that already had the state which all ranks have now."""
    receivers: tuple[int, ...] = ()
    """The ranks whose state was changed."""
    drifted: tuple[int, ...] = ()
    """The receivers that were not newcomers: their state should have been the same and was not."""
    first: bool
    """Whether all ranks were newcomers, so that the lowest rank's state was taken."""


@dataclass(frozen=True)
class _Terms:
    """What each rank sends first: a random part of the tags' key, and its `on_drift`."""

    nonce: bytes
    on_drift: str


@dataclass(frozen=True)
class _Outcome:
    """How a restore ended on one rank."""

    digest: bytes
    """Of its state."""
    lost: int
    """The lost rank because of which it failed, or -1."""
    text: str
    """Why it failed; empty if it did not."""
    is_broken: bool
    """A rank broke the protocol."""


def restore(
    group: Group,
    state: MutableMapping[str, Any],
    *,
    fresh: bool = False,
    on_drift: str = "repair",
    timeout: float | None = None,
    progress: bool | None = None,
) -> RestoreReport:
    """Make `state` equal on all ranks: the state of most ranks that are not `fresh`, in a tie that of the lowest rank.

    Every live rank calls it, and no rank may change the state until it returns. Numpy arrays and torch CPU tensors are
    filled in place; other values (see `broadcast_object`) are replaced in the mapping. Names that a receiver lacks are
    added, arrays as numpy arrays. Names that only a receiver has are removed from its mapping, with a warning. Chunks
    that a receiver already has are not sent. If all ranks are fresh, all get the lowest rank's state. No receive with
    `tag=ANY` may be pending on this group.

    Args:
        fresh: this rank is a newcomer; its state does not count.
        on_drift: what to do with a rank that is not fresh and differs: "repair" or "raise". Equal on all ranks.
        progress: show a bar on receivers: always, never, or (None) on a terminal after one second.

    Raises:
        MismatchError: dtypes or shapes differ on a receiver, a state cannot be sent, or ranks have drifted and
            `on_drift` is "raise". All ranks raise it; the group is still usable.
        PeerLostError: no donor is left, or any rank is lost in a group that does not survive losses.
        DeadlineError: `timeout` passed.
    """
    began_at = time.monotonic()
    if on_drift not in ON_DRIFT:
        raise ConfigError(f"on_drift={on_drift!r} must be 'repair' or 'raise'")
    limit = engine_of(group).config.timeout if timeout is None else check_timeout(timeout)
    if group.size == 1:
        return RestoreReport(donors=(group.rank,), first=fresh)
    call = _Restore(group, state, began_at + limit)
    manifests = call.compare(fresh, on_drift)
    election = elect(manifests)
    _check(manifests, election, on_drift)
    received = sent = 0
    if election.receivers:
        with Exchange(group, call.tagger.number, call.deadline) as exchange:
            if group.rank in election.receivers:
                received = call.receive(exchange, manifests[group.rank], election, progress)
            else:
                sent = call.serve(exchange, election)
        call.conclude(election)
    return RestoreReport(
        bytes_received=received,
        bytes_sent=sent,
        seconds=time.monotonic() - began_at,
        donors=election.donors,
        receivers=election.receivers,
        drifted=election.drifted,
        first=election.is_first,
    )


def _check(manifests: Mapping[int, Manifest], election: Election, on_drift: str) -> None:
    """Raise if the winner's state cannot be given to the others. All ranks raise the same error."""
    if election.drifted and on_drift == "raise":
        said = (f"rank {rank} in {listed(differing(manifests[rank], election.winner))}" for rank in election.drifted)
        others = ", ".join(map(str, election.donors))
        raise MismatchError(
            f"restore: the state has drifted from that of rank{'s' * (len(election.donors) > 1)} {others}: "
            f"{'; '.join(said)}. Nothing was changed; on_drift='repair' makes them equal."
        )
    if (text := objection(manifests, election)) is not None:
        raise MismatchError(f"restore: {text}. Nothing was changed.")


class _Restore:
    """One call of `restore` on one rank of several."""

    def __init__(self, group: Group, state: MutableMapping[str, Any], deadline: float) -> None:
        self.group, self.state, self.deadline = group, state, deadline
        self.tagger: Tagger
        self._operands: dict[str, Operand] = {}
        """The arrays of the state."""
        self._contents: dict[str, Bytes] = {}
        """The memory of each name: an array's own, or a value's encoded form."""
        self._failure: CoveyError | None = None
        """Why this rank could not get what it lacks."""

    def compare(self, fresh: bool, on_drift: str) -> dict[int, Manifest]:
        """Exchange manifests with all ranks and return them by rank."""
        terms: dict[int, _Terms] = self._gather(_Terms(secrets.token_bytes(NONCE_BYTES), on_drift), _Terms)
        for rank, said in terms.items():
            if len(said.nonce) != NONCE_BYTES or said.on_drift not in ON_DRIFT:
                raise RemoteProtocolError(f"restore: rank {rank} sent invalid terms")
        if len({said.on_drift for said in terms.values()}) > 1:
            passed = "; ".join(f"rank {rank} passed {said.on_drift!r}" for rank, said in terms.items())
            raise MismatchError(f"restore: on_drift must be the same on all ranks: {passed}")
        self.tagger = Tagger(said.nonce for said in terms.values())
        failure: Exception | None = None
        try:
            manifest = Manifest(is_fresh=fresh, entries=tuple(self._survey()))
            manifest.check()
        except (TypeError, RemoteProtocolError) as error:  # the other ranks must learn of it before this one raises
            failure, manifest = error, Manifest(is_fresh=fresh, failure=_shown(str(error)))
        manifests: dict[int, Manifest] = self._gather(manifest, Manifest)
        for rank, each in manifests.items():
            try:
                each.check()
            except RemoteProtocolError as error:
                raise RemoteProtocolError(f"restore: rank {rank} sent an invalid manifest: {error}") from error
        if isinstance(failure, RemoteProtocolError):
            raise ConfigError(f"restore: this state is too large or its names are too long: {failure}") from failure
        if failure is not None:
            raise failure
        if failed := [f"rank {rank} has {each.failure}" for rank, each in manifests.items() if each.failure]:
            raise MismatchError(f"restore: a state cannot be sent: {'; '.join(failed)}")
        return manifests

    def _survey(self) -> Iterable[Entry]:
        """Yield an entry for each name of the state, in the order of names."""
        if not all(isinstance(name, str) for name in self.state):
            raise TypeError("a state whose names are not all strings")
        for name in sorted(self.state):
            value = self.state[name]
            is_writable = True
            try:
                if is_array := _is_array(value):
                    operand = self._operands[name] = readable(value)
                    is_writable = as_array(value).flags.writeable
                    code, shape, contents = operand.code, operand.shape, operand.load().view(np.uint8)
                else:
                    contents = np.frombuffer(objects.encode(value), np.uint8)
                    code, shape = _BYTE, contents.shape
            except TypeError as error:
                raise TypeError(f"{name!r}: {error}") from error
            self._contents[name] = contents
            tags = self.tagger.tags(contents)
            yield Entry(name=name, is_array=is_array, dtype_code=code, shape=shape, tags=tags, is_writable=is_writable)

    # Receiving

    def receive(self, exchange: Exchange, mine: Manifest, election: Election, progress: bool | None) -> int:
        """Fetch what this rank lacks; return the bytes received. `conclude` raises what goes wrong."""
        rank, winner = self.group.rank, election.winner
        if rank in election.drifted:
            logger.warning(
                "restore: rank %d has drifted from the state of rank %s in %s; its state is replaced",
                *(rank, ", ".join(map(str, election.donors)), listed(differing(mine, winner))),
            )
        try:
            replaced = self._make_room(mine, winner)
        except MemoryError:
            named = ", ".join(map(str, election.donors))
            self._failure = MismatchError(
                f"there is no memory for the {winner.nbytes} bytes that rank {named} announced"
            )
            self._part_with(exchange, election)
            return 0
        chunks = winner.chunks()
        missing = {i: chunk.stop - chunk.start for i, chunk in enumerate(chunks) if mine.lacks(chunk, winner)}
        fetch = Fetch(missing, election.donors, election.receivers.index(rank))
        bar = _Bar(sum(missing.values()), progress)
        try:
            received = self._fetch(exchange, fetch, chunks, bar)
        finally:
            bar.close()
            for name in {chunks[i].name for i in missing} & self._operands.keys():
                self._operands[name].store()
        self._part_with(exchange, election)
        if self._failure is None:
            self._settle(mine, winner, replaced)
        return received

    def _part_with(self, exchange: Exchange, election: Election) -> None:
        """Tell the donors that this rank is done, and wait until all pending messages end."""
        for donor in election.donors:
            exchange.send(_numbers(()), donor, REQUEST)
        while exchange.is_waiting:
            exchange.next(election.donors)

    def _make_room(self, mine: Manifest, winner: Manifest) -> list[str]:
        """Allocate what is missing, and add missing arrays to the mapping; return the names of the values to replace.

        Added arrays are zeroed: if the restore fails, they must not show old memory of this process.

        Raises:
            MemoryError: there is not enough memory; nothing was added.
            DeadlineError: the deadline has passed.
        """
        own = mine.by_name
        added = [entry for entry in winner.entries if entry.is_array and entry.name not in own]
        replaced = [
            entry
            for entry in winner.entries
            if not entry.is_array and not (entry.name in own and own[entry.name].is_same(entry))
        ]
        if sum(entry.nbytes for entry in added + replaced) > PHYSICAL_BYTES:
            raise MemoryError  # the kernel would grant it and fail later
        arrays, contents = {}, {}
        for entry in added:
            if time.monotonic() > self.deadline:
                raise DeadlineError("restore: the timeout ended while memory was being allocated")
            arrays[entry.name] = array = np.zeros(entry.shape, DTYPES[entry.dtype_code])
            contents[entry.name] = array.reshape(-1).view(np.uint8)
        for entry in replaced:
            contents[entry.name] = np.empty(entry.nbytes, np.uint8)
        for name, array in arrays.items():
            self.state[name] = array
        self._contents.update(contents)
        return [entry.name for entry in replaced]

    def _fetch(self, exchange: Exchange, fetch: Fetch, chunks: list[Chunk], bar: _Bar) -> int:
        received = 0
        while not fetch.is_complete and not fetch.is_stuck:
            requests = sorted(fetch.ask(), key=lambda request: request[0])
            for donor, group in itertools.groupby(requests, key=lambda request: request[0]):
                indices = [index for _, index in group]
                for index in indices:
                    memory = self._memory(chunks[index])
                    exchange.receive(donor, index, memory, then=functools.partial(self._tag_landed, memory))
                exchange.send(_numbers(indices), donor, REQUEST)
            done = exchange.next(fetch.waits_for())
            if done.number == REQUEST:
                continue  # a request was sent; if it failed, the receives of its chunks fail, too
            if done.error is not None:
                self._failure = done.error
                fetch.failed(done.peer, done.number)
                continue
            chunk = chunks[done.number]
            is_right = done.result == chunk.tag
            fetch.arrived(done.peer, done.number, is_right=is_right)
            received += chunk.stop - chunk.start
            if is_right:
                bar.show(chunk.stop - chunk.start)
                continue
            span = f"bytes {chunk.start} to {chunk.stop} of {chunk.name!r}"
            self._failure = MismatchError(f"rank {done.peer} sent {span} that differ from those it announced")
            logger.warning("restore: %s; they are fetched from another rank", self._failure)
        if fetch.is_complete:
            self._failure = None
        return received

    def _tag_landed(self, memory: Bytes, _: Received) -> bytes:
        return self.tagger.tag(memory)  # at once: much of it is still in the cache

    def _settle(self, mine: Manifest, winner: Manifest, replaced: list[str]) -> None:
        """Replace values, and remove names that the winner does not have."""
        try:
            values = {name: objects.decode(self._contents[name].data) for name in replaced}
        except (RemoteProtocolError, TypeError) as error:  # the bytes are right: the donors have the same
            self._failure = MismatchError(f"a value that the others have cannot be decoded: {error}")
            return
        for name, value in values.items():
            self.state[name] = value
        if extra := sorted(mine.by_name.keys() - winner.by_name.keys()):
            logger.warning(
                "restore: rank %d removes names that the others do not have: %s", self.group.rank, listed(extra)
            )
            for name in extra:
                del self.state[name]

    # Sending

    def serve(self, exchange: Exchange, election: Election) -> int:
        """Send every receiver the chunks it asks for, until it is done or lost; return the bytes sent."""
        chunks = election.winner.chunks()
        orders, asked_before = Orders(election.receivers), dict.fromkeys(election.receivers, 0)
        sent = 0
        for receiver in election.receivers:
            exchange.receive(receiver, REQUEST)
        while exchange.is_waiting:
            done = exchange.next(election.receivers)
            if done.error is not None:
                continue  # this receiver is lost; the group reports it
            if done.number != REQUEST:
                sent += chunks[done.number].stop - chunks[done.number].start
                due = orders.sent(done.peer)
            elif done.result.size:
                asked = _asked_for(done.result, len(chunks))
                asked_before[done.peer] += 0 if asked is None else len(asked)
                if asked is None or asked_before[done.peer] > len(chunks):
                    # This receiver gets nothing more; the others do, and `conclude` tells all ranks.
                    self._failure = RemoteProtocolError(
                        f"rank {done.peer} asked for chunks that do not exist, or for too many"
                    )
                    continue
                due = orders.asked(done.peer, asked)
                exchange.receive(done.peer, REQUEST)
            else:
                continue  # the receiver is done
            for index in due:
                exchange.send(self._memory(chunks[index]), done.peer, index)
        return sent

    # The end

    def conclude(self, election: Election) -> None:
        """Raise the same error on all ranks unless all have the winner's state."""
        failure, digest = self._failure, election.winner.digest
        if failure is None and self.group.rank in election.receivers and self._shares_memory():
            # A chunk that arrived later may have overwritten one that was checked before.
            digest = Manifest(is_fresh=False, entries=tuple(self._survey())).digest
        lost = failure.rank if isinstance(failure, PeerLostError) else -1
        is_broken = isinstance(failure, RemoteProtocolError)
        mine = _Outcome(digest, lost, "" if failure is None else _shown(str(failure)), is_broken)
        outcomes: dict[int, _Outcome] = self._gather(mine, _Outcome)
        for rank, outcome in outcomes.items():
            text = _shown(outcome.text)
            if outcome.lost in range(self.group.size):
                text = f"restore: no rank is left that has what rank {rank} lacks: {text}"
                raise PeerLostError(text, rank=outcome.lost, operation="restore()")
            if outcome.is_broken:
                raise RemoteProtocolError(f"restore: rank {rank} reports: {text}")
            if text:
                raise MismatchError(f"rank {rank} could not be restored: {text}")
        if wrong := [rank for rank, outcome in outcomes.items() if outcome.digest != election.winner.digest]:
            raise MismatchError(
                f"restore: the states of ranks {wrong} differ from the others' afterwards. Did the program change "
                "them meanwhile, or do arrays share memory on some ranks only?"
            )

    def _shares_memory(self) -> bool:
        arrays = [as_array(value) for value in self.state.values() if _is_array(value)]
        spans = sorted(np.lib.array_utils.byte_bounds(array) for array in arrays if array.size)
        return any(start < end for (_, end), (start, _) in itertools.pairwise(spans))

    # Helpers

    def _memory(self, chunk: Chunk) -> Bytes:
        return self._contents[chunk.name][chunk.start : chunk.stop]

    def _gather(self, value: Any, type: Any) -> dict[int, Any]:
        """Return what every live rank passed, by rank. A value larger than a manifest may be ends the group."""
        left = max(self.deadline - time.monotonic(), 0.001)
        values = self.group._gather_all_objects(value, type, False, left, False, most_bytes=MANIFEST_BYTES)
        return {rank: each for rank, each in enumerate(values) if each is not None}


class _Bar:
    """The progress bar of a receiver. It costs nothing where it is not shown."""

    def __init__(self, total: int, wanted: bool | None) -> None:
        self._total, self._done = total, 0
        self._is_wanted = sys.stderr.isatty() if wanted is None else wanted
        self._show_at = time.monotonic() + (0.0 if wanted else PROGRESS_SECONDS)
        self._progress: Any = None

    def show(self, nbytes: int) -> None:
        """Count `nbytes` more."""
        self._done += nbytes
        if not self._is_wanted or time.monotonic() < self._show_at:
            return
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

            columns = ("restoring", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=Console(stderr=True))
            self._progress.add_task("restoring", total=self._total)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=self._done)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def _is_array(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))


def _asked_for(request: Bytes, count: int) -> list[int] | None:
    """Return the numbers of the chunks that a receiver asks for; None if the request is invalid."""
    if request.dtype != np.uint8 or request.size % 4 or request.size > 4 * WINDOW_CHUNKS:
        return None
    numbers: list[int] = request.view(np.uint32).tolist()
    return numbers if max(numbers) < count else None


def _shown(text: str) -> str:
    """Return a text for other ranks or from them, shortened and without control characters."""
    return printable(text)[:TEXT_LIMIT]


def _numbers(indices: Iterable[int]) -> Bytes:
    return np.fromiter(indices, np.uint32).view(np.uint8)
