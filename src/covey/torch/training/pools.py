"""The samples that ranks were dealt: equal on all ranks, each sample with one rank, until it was trained on.

Each rank trains on its own pool from the front, and tells how far it has come in the exchanges of the training. What
was not told when a rank is lost, or when a generation ends, is dealt again.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.torch.training.sampler import ElasticSampler


class Pools:
    """What the ranks of one group were dealt from a sampler."""

    def __init__(self, sampler: ElasticSampler, size: int, rank: int) -> None:
        self._sampler, self._rank = sampler, rank
        self._by_rank: list[deque[int]] = [deque() for _ in range(size)]
        self._given = 0
        """How many of this rank's pool are being trained on, or were since it last told."""

    @property
    def is_empty(self) -> bool:
        """Whether no rank has samples that were not told."""
        return not any(self._by_rank)

    @property
    def total(self) -> int:
        """The samples in all pools."""
        return sum(map(len, self._by_rank))

    @property
    def untold(self) -> list[int]:
        """The samples in all pools: those that no exchange has told to be trained on."""
        return [sample for pool in self._by_rank for sample in pool]

    def take(self, count: int | None = None) -> list[int]:
        """Return this rank's next samples, up to `count`, or all."""
        mine = self._by_rank[self._rank]
        end = len(mine) if count is None else min(self._given + count, len(mine))
        share = [mine[place] for place in range(self._given, end)]
        self._given += len(share)
        return share

    def deal(self, ranks: Sequence[int], wanted: Sequence[int]) -> None:
        """Fill the pools of these ranks up to so many samples, as far as the epoch has some."""
        counts = [0] * len(self._by_rank)
        for rank, count in zip(ranks, wanted, strict=True):
            counts[rank] = max(0, count - len(self._by_rank[rank]))
        if self._sampler.remaining and any(counts):
            for pool, dealt in zip(self._by_rank, self._sampler.deal(counts), strict=True):
                pool.extend(dealt)

    def settle(self, contributors: Sequence[int], done: Sequence[int]) -> tuple[int, int]:
        """Take out what ranks have trained on, and take back what was dealt to lost ones; return how many of each."""
        trained = lost = 0
        for rank, pool in enumerate(self._by_rank):
            if rank not in contributors:
                lost += self._take_back(pool)
                continue
            count = min(done[rank], len(pool))
            for _ in range(count):
                pool.popleft()
            trained += count
            if rank == self._rank:
                self._given -= count
        return trained, lost

    def take_all_back(self) -> None:
        """Give everything back to the sampler, which deals it again; every rank does so after the same exchange."""
        for pool in self._by_rank:
            self._take_back(pool)
        self._given = 0

    def _take_back(self, pool: deque[int]) -> int:
        count = len(pool)
        self._sampler.give_back(list(pool))
        pool.clear()
        return count
