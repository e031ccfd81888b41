"""Random numbers that are a function of seed, salt and index: all ranks, and compiled loops, compute the same ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from covey.compress.codec import Floats

    Words = NDArray[np.uint32]


def mix(words: Words) -> Words:
    """Return a 32-bit hash of each word: the finaliser of murmur3."""
    h = words ^ (words >> np.uint32(16))
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return h


def random_key(seed: int, salt: int) -> int:
    """Return 32 bits that depend on all bits of `seed` (32) and `salt` (64)."""
    words = np.array([seed & 0xFFFFFFFF, ((salt >> 32) + 0x165667B1) & 0xFFFFFFFF], np.uint32)
    hashed_seed, high = mix(words)
    (low,) = mix(np.array([hashed_seed ^ np.uint32(salt & 0xFFFFFFFF)], np.uint32))
    return int(low ^ high)


def random_words(start: int, count: int, key: int) -> Words:
    """Return 32 random bits for each index from `start` on."""
    indices = np.arange(start, start + count, dtype=np.uint64).astype(np.uint32)
    indices *= np.uint32(0x9E3779B1)
    indices += np.uint32(key)
    return mix(indices)


def uniform(start: int, count: int, key: int) -> Floats:
    """Return a random number in [0, 1) for each index from `start` on."""
    return (random_words(start, count, key) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
