"""Transfers the chunks of a state from donors to receivers, once all ranks know which ranks these are.

A receiver asks donors for the chunks it lacks, many at a time, and checks each as it arrives in its final memory.
Donors answer until every receiver is done or lost.
"""

from __future__ import annotations

import functools
import itertools
import logging
from typing import TYPE_CHECKING, Final

import numpy as np

from covey.base.errors import CoveyError, MismatchError, RemoteProtocolError
from covey.proto.restore import WINDOW_CHUNKS, Election, Fetch, Orders, differing, listed
from covey.runtime.progress_bar import ProgressBar

if TYPE_CHECKING:
    from collections.abc import Iterable

    from covey.proto.message import Received
    from covey.runtime.group.exchange import Exchange
    from covey.runtime.group.state_memory import StateMemory
    from covey.wire.manifest import Bytes, Chunk, Manifest, Tagger

logger = logging.getLogger("covey")

REQUEST: Final = (1 << 32) - 1
"""The message number of requests. Messages with chunks have the numbers of the chunks."""


class StateTransfer:
    """The transfer of one restore, on one rank."""

    def __init__(
        self, rank: int, memory: StateMemory, tagger: Tagger, election: Election, exchange: Exchange, deadline: float
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
