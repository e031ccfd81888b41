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
def swaps(partners: tuple[int, ...], times: int) -> Plan:
    """Return this rank's plan to swap one element with each partner, so many times in a row.

    Elements go from buffer 0 to buffer 1. The next one is sent when that of the partner has arrived, so two swaps take
    one round trip.
    """
    in_order = [partner for partner in partners for _ in range(times)]
    sends = tuple(Send(partner, 0, 0, 1, after) for after, partner in enumerate(in_order))
    return Plan(sends, tuple(Recv(partner, 1, 0, 1) for partner in in_order))


def partners(rank: int, size: int, most: int) -> tuple[int, ...]:
    """Return the ranks with which a rank swaps, in an order in which pairs meet; at most about `most` of them.

    Rank i meets rank i xor k in round k, so each rank is in one pair at a time.
    """
    rounds = range(1, 1 << (size - 1).bit_length())
    chosen = rounds if size - 1 <= most else [1 << bit for bit in range((size - 1).bit_length())]
    return tuple(rank ^ number for number in chosen if rank ^ number < size)
