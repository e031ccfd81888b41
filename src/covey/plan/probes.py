"""Transfers with which ranks measure the links between them."""

from __future__ import annotations

from functools import lru_cache

from covey.plan.moves import Plan, Recv, Send


@lru_cache(maxsize=512)
def rotation(rank: int, size: int, step: int, sent: int, received: int, pieces: int) -> Plan:
    """Return this rank's plan to send `pieces` times `sent` elements to rank + step, and to receive from rank - step.

    `received` is what rank - step sends each time. All pieces are of the beginning of buffer 0, and arrive in the
    beginning of buffer 1. Every rank sends to one other rank, and receives from one.
    """
    target, source = (rank + step) % size, (rank - step) % size
    return Plan((Send(target, 0, 0, sent),) * pieces, (Recv(source, 1, 0, received),) * pieces)


@lru_cache(maxsize=64)
def swaps(partner: int, times: int) -> Plan:
    """Return a plan to swap one element with a partner, so many times in a row.

    Elements go from buffer 0 to buffer 1. The next one is sent when that of the partner has arrived, so two swaps take
    one round trip.
    """
    return Plan(
        tuple(Send(partner, 0, 0, 1, after) for after in range(times)),
        tuple(Recv(partner, 1, 0, 1) for _ in range(times)),
    )


def swap_rounds(size: int, most: int) -> list[int]:
    """Return the rounds in which pairs swap, about `most` of them: in round k, rank i meets rank i xor k.

    So each rank is in one pair at a time; a rank whose partner does not exist rests.
    """
    rounds = range(1, 1 << (size - 1).bit_length())
    return list(rounds) if size - 1 <= most else [1 << bit for bit in range((size - 1).bit_length())]
