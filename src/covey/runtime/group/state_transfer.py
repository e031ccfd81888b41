"""Transfers the chunks of a state from donors to receivers, once all ranks know which ranks these are.

A receiver asks donors for the chunks it lacks, many at a time, and checks each as it arrives in its final memory.
Donors answer until every receiver is done or lost.
"""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.arithmetic import BYTE_CODE, DTYPES
from covey.base.errors import CoveyError, DeadlineError, MismatchError, RemoteProtocolError
from covey.proto.restore import WINDOW_CHUNKS, Fetch, Orders, StateChoice, differing, listed
from covey.runtime.buffers import as_array, readable
from covey.runtime.group.movements import PHYSICAL_BYTES
from covey.runtime.progress_bar import ProgressBar
from covey.wire import objects
from covey.wire.manifest import ManifestEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping

    from covey.proto.message import Received
    from covey.runtime.buffers import Operand
    from covey.runtime.group.exchange import Exchange
    from covey.wire.manifest import Bytes, Chunk, Manifest, Tagger


class StateMemory:
    """The memory of one state: arrays in place, and other values in encoded form."""

    def __init__(self, state: MutableMapping[str, Any]) -> None:
        self._state = state
        self._operands: dict[str, Operand] = {}
        """The arrays of the state."""
        self._contents: dict[str, Bytes] = {}
        """The memory of each name: an array's own, or a value's encoded form."""

    def survey(self, tagger: Tagger) -> Iterable[ManifestEntry]:
        """Yield an entry for each name of the state, in the order of names, with tags of its chunks.

        Raises:
            TypeError: a name or a value cannot be sent.
        """
        if not all(isinstance(name, str) for name in self._state):
            raise TypeError("a state whose names are not all strings")
        for name in sorted(self._state):
            value = self._state[name]
            is_writable = True
            try:
                if is_array := _is_array(value):
                    operand = self._operands[name] = readable(value)
                    is_writable = as_array(value).flags.writeable
                    code, shape, contents = operand.code, operand.shape, operand.load().view(np.uint8)
                else:
                    contents = np.frombuffer(objects.encode(value), np.uint8)
                    code, shape = BYTE_CODE, contents.shape
            except TypeError as error:
                raise TypeError(f"{name!r}: {error}") from error
            self._contents[name] = contents
            tags = tagger.tags(contents)
            yield ManifestEntry(
                name=name, is_array=is_array, dtype_code=code, shape=shape, tags=tags, is_writable=is_writable
            )

    def of(self, chunk: Chunk) -> Bytes:
        """Return the memory of a chunk."""
        return self._contents[chunk.name][chunk.start : chunk.stop]

    def make_room(self, mine: Manifest, winner: Manifest, deadline: float) -> list[str]:
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
            if time.monotonic() > deadline:
                raise DeadlineError("restore: the timeout ended while memory was being allocated")
            arrays[entry.name] = array = np.zeros(entry.shape, DTYPES[entry.dtype_code])
            contents[entry.name] = array.reshape(-1).view(np.uint8)
        for entry in replaced:
            contents[entry.name] = np.empty(entry.nbytes, np.uint8)
        for name, array in arrays.items():
            self._state[name] = array
        self._contents.update(contents)
        return [entry.name for entry in replaced]

    def store(self, names: Iterable[str]) -> None:
        """Copy what was received to arrays that are not contiguous in memory."""
        for name in names:
            if name in self._operands:
                self._operands[name].store()

    def replace(self, names: Iterable[str]) -> None:
        """Replace values by the ones that were received; RemoteProtocolError or TypeError if one cannot be decoded."""
        values = {name: objects.decode(self._contents[name].data) for name in names}
        for name, value in values.items():
            self._state[name] = value

    def remove(self, names: Iterable[str]) -> None:
        """Remove names from the state."""
        for name in names:
            del self._state[name]

    def has_overlaps(self) -> bool:
        """Tell whether arrays of the state share memory."""
        arrays = [as_array(value) for value in self._state.values() if _is_array(value)]
        spans = sorted(np.lib.array_utils.byte_bounds(array) for array in arrays if array.size)
        return any(start < end for (_, end), (start, _) in itertools.pairwise(spans))


def _is_array(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))


logger = logging.getLogger("covey")

REQUEST: Final = (1 << 32) - 1
"""The message number of requests. Messages with chunks have the numbers of the chunks."""


class StateTransfer:
    """The transfer of one restore, on one rank."""

    def __init__(
        self, rank: int, memory: StateMemory, tagger: Tagger, election: StateChoice, exchange: Exchange, deadline: float
    ) -> None:
        self._rank, self._memory, self._tagger = rank, memory, tagger
        self._election, self._exchange, self._deadline = election, exchange, deadline
        self.failure: CoveyError | None = None
        """Why this rank could not get what it lacks, or which receiver broke the protocol."""

    # Receiving

    def receive(self, mine: Manifest, progress: bool | None) -> int:
        """Fetch what this rank lacks; return the bytes received."""
        rank, election, winner = self._rank, self._election, self._election.winner
        if rank in election.drifted:
            logger.warning(
                "restore: rank %d has drifted from the state of rank %s in %s; its state is replaced",
                *(rank, ", ".join(map(str, election.donors)), listed(differing(mine, winner))),
            )
        try:
            replaced = self._memory.make_room(mine, winner, self._deadline)
        except MemoryError:
            named = ", ".join(map(str, election.donors))
            self.failure = MismatchError(
                f"there is no memory for the {winner.nbytes} bytes that rank {named} announced"
            )
            self._part_with()
            return 0
        chunks = winner.chunks()
        missing = {i: chunk.stop - chunk.start for i, chunk in enumerate(chunks) if mine.lacks(chunk, winner)}
        fetch = Fetch(missing, election.donors, election.receivers.index(rank))
        bar = ProgressBar("restoring", sum(missing.values()), progress)
        try:
            received = self._fetch(fetch, chunks, bar)
        finally:
            bar.close()
            self._memory.store({chunks[i].name for i in missing})
        self._part_with()
        if self.failure is None:
            self._settle(mine, winner, replaced)
        return received

    def _part_with(self) -> None:
        """Tell the donors that this rank is done, and wait until all pending messages end."""
        for donor in self._election.donors:
            self._exchange.send(_numbers(()), donor, REQUEST)
        while self._exchange.is_waiting:
            self._exchange.next(self._election.donors)

    def _fetch(self, fetch: Fetch, chunks: list[Chunk], bar: ProgressBar) -> int:
        received, exchange = 0, self._exchange
        while not fetch.is_complete and not fetch.is_stuck:
            requests = sorted(fetch.ask(), key=lambda request: request[0])
            for donor, group in itertools.groupby(requests, key=lambda request: request[0]):
                indices = [index for _, index in group]
                for index in indices:
                    memory = self._memory.of(chunks[index])
                    exchange.receive(donor, index, memory, then=functools.partial(self._tag_landed, memory))
                exchange.send(_numbers(indices), donor, REQUEST)
            done = exchange.next(fetch.waits_for())
            if done.number == REQUEST:
                continue  # a request was sent; if it failed, the receives of its chunks fail, too
            if done.error is not None:
                self.failure = done.error
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
            self.failure = MismatchError(f"rank {done.peer} sent {span} that differ from those it announced")
            logger.warning("restore: %s; they are fetched from another rank", self.failure)
        if fetch.is_complete:
            self.failure = None
        return received

    def _tag_landed(self, memory: Bytes, _: Received) -> bytes:
        return self._tagger.tag(memory)  # at once: much of it is still in the cache

    def _settle(self, mine: Manifest, winner: Manifest, replaced: list[str]) -> None:
        """Replace values, and remove names that the winner does not have."""
        try:
            self._memory.replace(replaced)
        except (RemoteProtocolError, TypeError) as error:  # the bytes are right: the donors have the same
            self.failure = MismatchError(f"a value that the others have cannot be decoded: {error}")
            return
        if extra := sorted(mine.by_name.keys() - winner.by_name.keys()):
            logger.warning("restore: rank %d removes names that the others do not have: %s", self._rank, listed(extra))
            self._memory.remove(extra)

    # Sending

    def serve(self) -> int:
        """Send every receiver the chunks it asks for, until it is done or lost; return the bytes sent."""
        exchange, election, chunks = self._exchange, self._election, self._election.winner.chunks()
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
                    # This receiver gets nothing more; the others do. All ranks learn of it at the end.
                    self.failure = RemoteProtocolError(
                        f"rank {done.peer} asked for chunks that do not exist, or for too many"
                    )
                    continue
                due = orders.asked(done.peer, asked)
                exchange.receive(done.peer, REQUEST)
            else:
                continue  # the receiver is done
            for index in due:
                exchange.send(self._memory.of(chunks[index]), done.peer, index)
        return sent


def _asked_for(request: Bytes, count: int) -> list[int] | None:
    """Return the numbers of the chunks that a receiver asks for; None if the request is invalid."""
    if request.dtype != np.uint8 or request.size % 4 or request.size > 4 * WINDOW_CHUNKS:
        return None
    numbers: list[int] = request.view(np.uint32).tolist()
    return numbers if max(numbers) < count else None


def _numbers(indices: Iterable[int]) -> Bytes:
    return np.fromiter(indices, np.uint32).view(np.uint8)
