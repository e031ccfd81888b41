"""A barrier as a plan: transfers without elements, whose order alone matters."""

from __future__ import annotations

from functools import lru_cache

from covey.plan.moves import Plan, Recv, Send


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
