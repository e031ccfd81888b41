"""Moves chunks of files between ranks: all ranks know which, so that nothing is asked for.

Each pair of ranks has a few chunks under way at a time in each direction, whatever the other pairs do: no pair waits
for another one, and memory is bounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from covey.proto.message import Received
    from covey.runtime.group.exchange import Exchange
    from covey.wire.manifest import Bytes

WINDOW: Final = 2
"""Chunks under way between two ranks, in each direction."""


class ChunksOut(NamedTuple):
    """The chunks for one rank."""

    chunks: int
    chunk: Callable[[int], Bytes]
    """Returns a chunk; it must have the size that the receiver expects."""


class ChunksIn(NamedTuple):
    """The chunks from one rank."""

    sizes: Sequence[int]
    take: Callable[[int, Bytes], None]
    """Is called with each chunk, in no particular order; the memory is used again."""


def transfer(
    exchange: Exchange, outgoing: Mapping[int, ChunksOut], incoming: Mapping[int, ChunksIn]
) -> dict[int, Exception]:
    """Send and receive chunks, by rank; return the ranks with which that failed, and why.

    Raises:
        DeadlineError: nothing came in time.
        CoveyError: the group has ended.
    """
    failed: dict[int, Exception] = {}
    sent, posted = dict.fromkeys(outgoing, 0), dict.fromkeys(incoming, 0)

    def send(rank: int) -> None:
        if rank not in failed and sent[rank] < outgoing[rank].chunks:
            number = sent[rank]
            sent[rank] += 1
            exchange.send(outgoing[rank].chunk(number), rank, number)

    def receive(rank: int) -> None:
        if rank not in failed and posted[rank] < len(incoming[rank].sizes):
            number = posted[rank]
            posted[rank] += 1
            memory = np.empty(incoming[rank].sizes[number], np.uint8)

            def landed(_: Received) -> Bytes:
                return memory

            exchange.receive(rank, number, memory, then=landed)

    for _ in range(WINDOW):
        for rank in incoming:
            receive(rank)
        for rank in outgoing:
            send(rank)
    others = sorted({*outgoing, *incoming})
    while exchange.is_waiting:
        done = exchange.next(others)
        if done.error is not None:
            failed.setdefault(done.peer, done.error)
        elif done.result is None:
            send(done.peer)
        else:
            if done.peer not in failed:
                incoming[done.peer].take(done.number, done.result)
            receive(done.peer)
    return failed
