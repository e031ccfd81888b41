"""Plans of about log2(size) rounds: each round doubles or halves a distance or a range.

`all_reduce`, `scan` and `exscan` double the distance that contributions travel, for small buffers. `halving_all_reduce`
takes 2 log2(size) rounds and moves few bytes, for large arrays between distant ranks. `dissemination` is a barrier:
transfers without elements, whose order alone matters.
"""

from __future__ import annotations

from functools import lru_cache

from covey.plan.moves import FINAL, LEFT_OPERAND, REDUCE, Plan, Recv, Send, part


@lru_cache(maxsize=256)
def dissemination(rank: int, size: int) -> Plan:
    """Let no rank finish before every rank has started, in ceil(log2(size)) rounds.

    In each round a rank signals a rank twice as far away as in the last one (Hensgen, Finkel and Manber, 1988).
    """
    distances = [1 << round_ for round_ in range((size - 1).bit_length())]
    return Plan(
        tuple(Send((rank + distance) % size, 0, 0, 0, heard) for heard, distance in enumerate(distances)),
        tuple(Recv((rank - distance) % size, 0, 0, 0) for distance in distances),
    )


def halving_all_reduce(rank: int, size: int, count: int) -> Plan:
    """All-reduce buffer 0.

    If `size` is not a power of two, some odd ranks first send their buffer to the rank below, and receive the result
    from it at the end, as in `doubling`. Each part is finished by one rank and copied, so the bits are equal. A part is
    sent on as soon as it has arrived.
    """
    doubled = 1 << (size.bit_length() - 1)
    folded = 2 * (size - doubled)  # the ranks below this one work in pairs
    parts = [part(count, doubled, index) for index in range(doubled)]
    if rank < folded and rank % 2:
        return Plan(
            tuple(Send(rank - 1, 0, *each) for each in parts), tuple(Recv(rank - 1, 0, *each) for each in parts)
        )
    paired = rank < folded
    position = rank // 2 if paired else rank - folded // 2
    sends: list[Send] = []
    recvs = [Recv(rank + 1, 0, *each, REDUCE) for each in parts] if paired else []
    came = [index + 1 if paired else 0 for index in range(doubled)]  # by part: receives until it is as it is now
    distances = [1 << bit for bit in range(doubled.bit_length() - 1)]
    for distance in reversed(distances):
        peer = _rank_at(position ^ distance, folded)
        action = REDUCE | (LEFT_OPERAND if peer < rank else 0) | (FINAL if distance == 1 else 0)
        first, other = (at // distance * distance for at in (position, position ^ distance))
        sends += [Send(peer, 0, *parts[at], came[at]) for at in range(other, other + distance)]
        for at in range(first, first + distance):
            recvs.append(Recv(peer, 0, *parts[at], action))
            came[at] = len(recvs)
    for distance in distances:
        peer = _rank_at(position ^ distance, folded)
        first, other = (at // distance * distance for at in (position, position ^ distance))
        sends += [Send(peer, 0, *parts[at], came[at]) for at in range(first, first + distance)]
        for at in range(other, other + distance):
            recvs.append(Recv(peer, 0, *parts[at]))
            came[at] = len(recvs)
    if paired:
        sends += [Send(rank + 1, 0, *each, max(came)) for each in parts]
    return Plan(tuple(sends), tuple(recvs))


def _rank_at(position: int, folded: int) -> int:
    return 2 * position if 2 * position < folded else position + folded // 2


def all_reduce(rank: int, size: int, count: int) -> Plan:
    """All-reduce buffer 0: blocks of ranks, twice as large in each round, swap their partial results.

    If `size` is not a power of two, some odd ranks first send their buffer to the rank below, and receive the result
    from it at the end. Blocks are contiguous and the lower one is the left operand on both sides, so every rank
    evaluates the same expression.
    """
    doubled = 1 << (size.bit_length() - 1)
    folded = 2 * (size - doubled)  # the ranks below this one work in pairs
    if rank < folded and rank % 2:
        return Plan((Send(rank - 1, 0, 0, count),), (Recv(rank - 1, 0, 0, count),))
    paired = rank < folded
    position = rank // 2 if paired else rank - folded // 2
    sends: list[Send] = []
    recvs = [Recv(rank + 1, 0, 0, count, REDUCE)] if paired else []
    distance = 1
    while distance < doubled:
        other = position ^ distance
        peer = 2 * other if 2 * other < folded else other + folded // 2
        action = REDUCE | (LEFT_OPERAND if peer < rank else 0) | (FINAL if 2 * distance == doubled else 0)
        sends.append(Send(peer, 0, 0, count, len(recvs)))
        recvs.append(Recv(peer, 0, 0, count, action, len(sends)))
        distance *= 2
    if paired:
        sends.append(Send(rank + 1, 0, 0, count, len(recvs)))
    return Plan(tuple(sends), tuple(recvs))


def scan(rank: int, size: int, count: int) -> Plan:
    """Reduce buffer 0 of ranks 0..rank into that of `rank`.

    Nothing is marked FINAL: a rank's result is a part of the results of higher ranks.
    """
    sends: list[Send] = []
    recvs: list[Recv] = []
    _reach_back(rank, 0, size, 0, count, sends, recvs)
    return Plan(tuple(sends), tuple(recvs))


def exscan(rank: int, size: int, count: int) -> Plan:
    """Reduce buffer 0 of ranks 0..rank-1 into buffer 1 of `rank`; that of rank 0 does not change.

    Each rank sends its input to the next one; the rest is a scan among the ranks from 1 on.
    """
    sends = [Send(rank + 1, 0, 0, count)] if rank + 1 < size else []
    recvs = [Recv(rank - 1, 1, 0, count)] if rank else []
    if rank:
        _reach_back(rank, 1, size, 1, count, sends, recvs)
    return Plan(tuple(sends), tuple(recvs))


def _reach_back(
    rank: int, first: int, size: int, buffer: int, count: int, sends: list[Send], recvs: list[Recv]
) -> None:
    """Append the rounds of an inclusive scan of `buffer` among the ranks from `first` (Hillis and Steele, 1986)."""
    distance = 1
    while first + distance < size:
        if rank + distance < size:
            sends.append(Send(rank + distance, buffer, 0, count, len(recvs)))
        if rank - distance >= first:
            recvs.append(Recv(rank - distance, buffer, 0, count, REDUCE | LEFT_OPERAND, len(sends)))
        distance *= 2
