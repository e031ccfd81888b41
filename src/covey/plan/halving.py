"""An all-reduce of 2 log2(size) rounds that moves few bytes: for large arrays between distant ranks.

Rabenseifner, "Optimization of collective reduction operations" (2004). In the first half of the rounds, pairs of ranks
divide what they hold, each sends the other its half, and adds up the rest; the distance between the ranks of a pair
halves each time. Then each rank has finished one part, and the rounds run backwards to bring all parts to all ranks.
"""

from __future__ import annotations

from covey.plan.moves import FINAL, LEFT, REDUCE, Plan, Recv, Send, part


def all_reduce(rank: int, size: int, count: int) -> Plan:
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
        action = REDUCE | (LEFT if peer < rank else 0) | (FINAL if distance == 1 else 0)
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
