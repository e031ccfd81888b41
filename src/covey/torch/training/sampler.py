"""Which samples each rank trains on: an order that does not depend on the number of ranks, and shares by speed."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from covey.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

NEW_SHARE: Final = 0.3
"""The weight of the newest measurement: seven steps after a change, nine tenths of the average reflect it."""
_LEVELS: Final = 1 << 20
"""Speeds are rounded to this many parts of the highest, so that all ranks compute equal shares with integers."""


class Pace:
    """The samples per second of this rank, smoothed over the last steps."""

    def __init__(self) -> None:
        self.speed = 0.0
        """0 before the first measurement."""

    def measure(self, samples: int, seconds: float) -> None:
        """Add the measurement of a step; a step without samples does not count."""
        if samples and seconds > 0:
            speed = samples / seconds
            self.speed = speed if not self.speed else NEW_SHARE * speed + (1 - NEW_SHARE) * self.speed


def even(batch: int, count: int) -> list[int]:
    """Return `count` shares of a batch that differ by at most one sample."""
    return [batch * (i + 1) // count - batch * i // count for i in range(count)]


def by_speed(batch: int, speeds: Sequence[float]) -> list[int]:
    """Return shares in proportion to speeds that add up to `batch`; each is at least 1 if there are enough samples.

    An unknown speed, one that is not a number above 0, counts as the average of the others.
    """
    weights = _whole(speeds)
    if batch < len(weights):
        first = sorted(range(len(weights)), key=lambda place: -weights[place])[:batch]
        return [int(place in first) for place in range(len(weights))]
    shares = [1] * len(weights)
    # A share below one sample becomes one. That leaves less for the others, so check them again.
    rest, sharing = batch, set(range(len(weights)))
    while slow := {place for place in sharing if weights[place] * rest < sum(weights[other] for other in sharing)}:
        sharing -= slow
        rest -= len(slow)
    total = sum(weights[place] for place in sharing)
    for place in sharing:
        shares[place] = weights[place] * rest // total
    left = batch - sum(shares)
    for place in sorted(sharing, key=lambda place: (-(weights[place] * rest % total), place))[:left]:
        shares[place] += 1
    return shares


def _whole(speeds: Sequence[float]) -> list[int]:
    known = [speed for speed in speeds if math.isfinite(speed) and speed > 0]
    if not known:
        return [1] * len(speeds)
    top, average = max(known), math.fsum(speed / len(known) for speed in known)
    used = [speed if math.isfinite(speed) and speed > 0 else average for speed in speeds]
    return [max(1, round(speed / top * _LEVELS)) for speed in used]


class ElasticSampler:
    """Yields the samples 0 to `length` - 1 of every epoch, each exactly once, also if the number of ranks changes.

    The order depends only on `seed` and `epoch`, and `position` counts the samples given to all ranks together. So a
    group of another size continues where the last one stopped, and no sample is lost or used twice. Every rank has a
    sampler and makes the same calls.

        while sampler.remaining:
            batch = dataset[sampler.take(32)]

    It is also a sampler for `torch.utils.data.DataLoader`: a loop over it yields this rank's samples up to the end of
    the epoch and then starts the next epoch. A loader with workers fetches samples ahead of the training: before you
    save the state, `seek()` to the number of samples that were trained on.

    With `drop_last`, samples at the end that do not fill a batch of all ranks are left out.

    `give_back` returns samples that were given to a rank which was lost before it trained on them. They are given out
    again before new ones.
    """

    def __init__(self, length: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> None:
        if length < 0:
            raise ConfigError(f"a data set cannot have {length} samples")
        self._length, self._shuffle, self._seed, self._drop_last = length, shuffle, seed, drop_last
        self._epoch, self._position = 0, 0
        self._owed: list[int] = []
        self._order: torch.Tensor | None = None  # of this epoch; made when first needed

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def position(self) -> int:
        """The position of all ranks together in the order of this epoch. Samples given back lie before it."""
        return self._position

    @property
    def remaining(self) -> int:
        """The number of samples of this epoch that were not given out yet, or were given back."""
        return self._length - self._position + len(self._owed)

    def take(self, counts: int | Sequence[int], *, rank: int | None = None, size: int | None = None) -> list[int]:
        """Return this rank's share of the next batch of all ranks: `counts` samples, or `counts[rank]` of a sequence.

        The last batch of an epoch may be short. Then it is divided in the same proportions, and a rank may get nothing;
        with `drop_last` all ranks get nothing. Rank and size default to those of torch's default group.

        Raises:
            ConfigError: a count is negative, all are 0, or there is not one for each rank.
        """
        rank, size = _rank_and_size(rank, size)
        shares = [counts] * size if isinstance(counts, int) else list(counts)
        if len(shares) != size:
            raise ConfigError(f"{len(shares)} counts for {size} ranks; give one for each rank, or a single number")
        return self.deal(shares)[rank]

    def deal(self, counts: Sequence[int]) -> list[list[int]]:
        """Return the shares of all ranks in the next batch, `counts[rank]` samples each; see `take`."""
        whole = sum(counts)
        if not counts or min(counts) < 0 or whole == 0:
            raise ConfigError(f"cannot take {counts} samples; give counts that are not negative, and one above 0")
        batch = self._draw(min(whole, self.remaining))
        if len(batch) < whole and self._drop_last:
            return [[] for _ in counts]
        ends = [len(batch) * end // whole for end in accumulate(counts, initial=0)]
        return [batch[start:end] for start, end in pairwise(ends)]

    def give_back(self, samples: Sequence[int]) -> None:
        """Return samples of this epoch that were not trained on; they come first in the next batches."""
        if len(self._owed) + len(samples) > self._position:
            raise ConfigError(f"{len(samples)} samples to give back, but only {self._position} of this epoch are given")
        self._owed += samples

    def _draw(self, count: int) -> list[int]:
        """Return the next samples: first those given back, then in the order of the epoch."""
        owed, self._owed = self._owed[:count], self._owed[count:]
        start, self._position = self._position, self._position + count - len(owed)
        return owed + self._indices(start, self._position)

    def next_epoch(self) -> None:
        """Start the next epoch, which has another order."""
        self._turn_to(self._epoch + 1, 0)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; if that is the current epoch, keep the position.

        So a training loop that calls this at the start of every epoch keeps a position that was loaded.
        """
        if epoch != self._epoch:
            self._turn_to(epoch, 0)

    def seek(self, position: int) -> None:
        """Go to `position` in this epoch: the number of samples given to all ranks. Forgets samples given back."""
        self._turn_to(self._epoch, position)

    def __iter__(self) -> Iterator[int]:
        while self.remaining:
            yield from self.take(1)
        self.next_epoch()

    def __len__(self) -> int:
        """Return how many samples a loop over this sampler yields on this rank."""
        rank, size = _rank_and_size(None, None)
        rounds, rest = divmod(self.remaining, size)
        return rounds + (0 if self._drop_last else rest * (rank + 1) // size - rest * rank // size)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "position": self._position,
            "owed": list(self._owed),
            "seed": self._seed,
            "length": self._length,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where the sampler was that gave this state; the seed becomes its seed.

        Raises:
            ConfigError: it was a sampler of another number of samples, so its positions mean nothing here.
        """
        if state["length"] != self._length:
            raise ConfigError(
                f"the state is of a data set with {state['length']} samples and this one has {self._length}; "
                "make a new sampler for new data"
            )
        if state["seed"] != self._seed:
            self._seed, self._order = state["seed"], None
        self._turn_to(state["epoch"], state["position"])
        self._owed = list(state.get("owed", ()))

    def _turn_to(self, epoch: int, position: int) -> None:
        if epoch < 0 or not 0 <= position <= self._length:
            raise ConfigError(f"no sample {position} in epoch {epoch} of a data set with {self._length} samples")
        if epoch != self._epoch:
            self._order = None
        self._epoch, self._position, self._owed = epoch, position, []

    def _indices(self, start: int, end: int) -> list[int]:
        if not self._shuffle:
            return list(range(start, end))
        if self._order is None:
            self._order = _permutation(self._length, self._seed, self._epoch)
        indices: list[int] = self._order[start:end].tolist()
        return indices


@dataclass(slots=True)
class DealtBatch:
    """A global batch that was given out, as one rank sees it. A replica is a rank, or the ranks of a sharded model."""

    by_replica: list[list[list[int]]]
    """Micro-batches of each replica, at least one."""
    own: int
    """The replica of this rank."""
    given_at: float
    part_of: Callable[[list[int]], list[int]]
    """Returns the samples of a micro-batch that this rank trains on."""
    begun: int = 0
    """How many of its own this replica has trained on."""
    is_held: bool = False
    """Whether the gradients of the last one were put aside, and `step()` was not called for it."""
    is_synced: bool = False
    left: int = 0
    trained: int = 0
    """The number of its samples that are in the average."""

    @property
    def parts(self) -> list[list[int]]:
        """The micro-batches of this replica."""
        return self.by_replica[self.own]

    @property
    def now(self) -> list[int]:
        """The micro-batch that this replica trains on now."""
        return self.parts[min(self.begun, len(self.parts) - 1)]

    @property
    def part(self) -> list[int]:
        """What this rank trains on now."""
        return self.part_of(self.now)

    @property
    def total(self) -> int:
        return sum(len(part) for parts in self.by_replica for part in parts)


def cut(share: list[int], most: int | None) -> list[list[int]]:
    """Return a share in parts of at most `most` samples; an empty one has one part."""
    if most is None or not share:
        return [share]
    return [share[start : start + most] for start in range(0, len(share), most)]


def _permutation(length: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of an epoch. The seed is a digest, so that (1, 2) and (2, 1) give unrelated orders."""
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
    return torch.randperm(length, generator=generator)


def _rank_and_size(rank: int | None, size: int | None) -> tuple[int, int]:
    """Return rank and size; missing ones are those of torch's default group, or 0 of 1 without one."""
    grouped = dist.is_available() and dist.is_initialized()
    if size is None:
        size = dist.get_world_size() if grouped else 1
    if rank is None:
        rank = dist.get_rank() if grouped else 0
    if not 0 <= rank < size:
        raise ConfigError(f"rank {rank} of {size} does not exist; ranks go from 0 to {size - 1}")
    return rank, size
