"""Plans that take about log2(size) rounds by doubling the reach of every rank in each: for small buffers.

In each round a rank sends all of its buffer and then combines it with what arrives, so a receive waits for the
round's own send, and the next send for the receive.
"""

from __future__ import annotations

from covey.plan.moves import FINAL, LEFT, REDUCE, Plan, Recv, Send


def all_reduce(rank: int, size: int, count: int) -> Plan:
    """All-reduce buffer 0: blocks of ranks that double in each round swap what they have.

    Where `size` is no power of two, odd ranks from the low end first hand their share to the rank below, and get
    the result from it. Blocks stay contiguous and the lower one is the left operand on both sides, so every rank
    evaluates the same expression.
    """
    doubled = 1 << (size.bit_length() - 1)
    folded = 2 * (size - doubled)  # the ranks below this one work in pairs
    if rank < folded and rank % 2:
        return Plan((Send(rank - 1, 0, 0, count),), (Recv(rank - 1, 0, 0, count),))
    paired = rank < folded
    place = rank // 2 if paired else rank - folded // 2
    sends: list[Send] = []
    recvs = [Recv(rank + 1, 0, 0, count, REDUCE)] if paired else []
    distance = 1
    while distance < doubled:
        other = place ^ distance
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

    Nothing is marked FINAL: a rank's finished result is still a part of what higher ranks need.
    """
    sends: list[Send] = []
    recvs: list[Recv] = []
    _reach_back(rank, 0, size, 0, count, sends, recvs)
    return Plan(tuple(sends), tuple(recvs))


def exscan(rank: int, size: int, count: int) -> Plan:
    """Reduce buffer 0 of ranks 0..rank-1 into buffer 1 of `rank`; that of rank 0 is left alone.

    Everyone passes its input up by one rank; what remains is a scan among the ranks from 1.
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
