"""Plans of about log2(size) rounds, for small buffers: each round doubles the distance that contributions travel.

In each round a rank sends all of its buffer and then combines it with what arrives. So a receive waits for the send of
its round, and the next send waits for the receive.
"""

from __future__ import annotations

from covey.plan.moves import FINAL, LEFT, REDUCE, Plan, Recv, Send


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
        action = REDUCE | (LEFT if peer < rank else 0) | (FINAL if 2 * distance == doubled else 0)
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
            recvs.append(Recv(rank - distance, buffer, 0, count, REDUCE | LEFT, len(sends)))
        distance *= 2
