"""Random inputs for a target, reproducible by seed: its valid inputs first, then mutated ones."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from covey.lab.fuzz.mutations import Mutator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.lab.fuzz.targets import Target

MOST_BYTES: Final = 1 << 14
"""The largest valid input that is mutated: larger ones would take all the time."""


def inputs(target: Target, count: int, seed: int | str = 0) -> Iterator[bytes]:
    """Yield the valid inputs of a target, and `count` mutated ones."""
    chance = random.Random(f"{target.name} {seed}")
    mutator, seeds = Mutator(chance), target.seeds()
    yield from seeds
    small = [each for each in seeds if len(each) <= MOST_BYTES]
    for _ in range(count):
        yield change(target, mutator, chance.choice(small), small)


def change(target: Target, mutator: Mutator, data: bytes, others: list[bytes]) -> bytes:
    """Return a mutated input of a target."""
    return mutator.bytes(data, others) if target.prefix < 0 else mutator.packed(data, others, target.prefix)
