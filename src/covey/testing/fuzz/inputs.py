"""Inputs for a target, by chance but always the same for a seed: its valid ones first, then changed ones."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from covey.testing.fuzz.mutations import Mutator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.testing.fuzz.targets import Target

MOST_BYTES: Final = 1 << 14
"""Of a valid input that is changed: larger ones would take all the time."""


def inputs(target: Target, count: int, seed: int | str = 0) -> Iterator[bytes]:
    """Yield the valid inputs of a target, and `count` changed ones."""
    chance = random.Random(f"{target.name} {seed}")
    mutator, seeds = Mutator(chance), target.seeds()
    yield from seeds
    small = [each for each in seeds if len(each) <= MOST_BYTES]
    for _ in range(count):
        yield change(target, mutator, chance.choice(small), small)


def change(target: Target, mutator: Mutator, data: bytes, others: list[bytes]) -> bytes:
    """Return an input of a target with some changes."""
    return mutator.bytes(data, others) if target.prefix < 0 else mutator.packed(data, others, target.prefix)
