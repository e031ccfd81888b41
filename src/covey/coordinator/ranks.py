"""Which workers are in a round, and with which ranks. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from covey.coordinator.records import WorkerRecord


def choose(waiting: Iterable[WorkerRecord], most: int) -> list[WorkerRecord]:
    """Return the workers of the next round: those of the latest rounds first, then by id."""
    return sorted(waiting, key=lambda worker: (-worker.round, natural(worker.id)))[:most]


def assign(workers: Sequence[WorkerRecord]) -> dict[str, int]:
    """Return a rank for each worker, by id: 0 to one less than their number.

    A worker keeps the rank that it had, unless that is too large, or another worker had it in a later round. The others
    get the free ranks in the order of their ids, so that ranks do not depend on which worker came first.
    """
    ranks: dict[str, int] = {}
    taken: set[int] = set()
    for worker in sorted(workers, key=lambda worker: (-worker.round, natural(worker.id))):
        if 0 <= worker.rank < len(workers) and worker.rank not in taken:
            ranks[worker.id] = worker.rank
            taken.add(worker.rank)
    free = (rank for rank in range(len(workers)) if rank not in taken)
    for worker in sorted(workers, key=lambda worker: natural(worker.id)):
        if worker.id not in ranks:
            ranks[worker.id] = next(free)
    return ranks


def natural(text: str) -> list[tuple[int, str]]:
    """Return a key by which texts are sorted with their numbers: w2 before w10."""
    return [(int(part), part) if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", text)]
