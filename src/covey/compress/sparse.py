"""Sparsifiers: which elements of an array are sent. The others stay behind, and error feedback sends them later."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from covey.base.errors import ConfigError
from covey.compress import kernels
from covey.compress.codec import call_text
from covey.compress.kernels import random_key, random_words
from covey.compress.quantisers import check_seed

if TYPE_CHECKING:
    from covey.compress.codec import Floats
    from covey.compress.kernels import Indices


class Sparsifier(ABC):
    """A rule that selects elements of an array."""

    name: ClassVar[str]
    """What the sparsifier is called in settings."""
    is_shared: ClassVar[bool] = False
    """Whether all ranks select the same elements, so that no indices travel."""

    @abstractmethod
    def select(self, x: Floats, salt: int = 0) -> Indices:
        """Return the indices of the selected elements, ascending and each once; `x` is contiguous and 1-d.

        Ranks that share a selection pass the same salt, from 0 to 2**64 - 1.
        """

    def __str__(self) -> str:
        return call_text(self.name, self)


@dataclass(frozen=True)
class TopK(Sparsifier):
    """The elements with the greatest magnitudes, `ratio` of all; at least one.

    NaN counts as the greatest, then infinity. Among equals, the elements with the lowest indices are selected.
    """

    ratio: float
    """The part of all elements that is sent, above 0 and up to 1."""

    name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", _checked_ratio(self.name, self.ratio))

    def select(self, x: Floats, salt: int = 0) -> Indices:
        """Return the indices of the greatest magnitudes."""
        return kernels.top_indices(x, selected_count(self.ratio, x.size))


@dataclass(frozen=True)
class Threshold(Sparsifier):
    """The elements with a magnitude of at least `value`, and NaN. There may be none, or all."""

    value: float
    """The smallest magnitude that is sent."""

    name: ClassVar[str] = "threshold"

    def __post_init__(self) -> None:
        if not _is_number(self.value) or not 0 <= self.value < math.inf:
            raise ConfigError(f"threshold: value is {self.value!r}; give the smallest magnitude to send, like 0.001")
        object.__setattr__(self, "value", float(self.value))

    def select(self, x: Floats, salt: int = 0) -> Indices:
        """Return the indices of elements that are not below the threshold."""
        with np.errstate(invalid="ignore"):
            return np.flatnonzero(~(np.abs(x) < np.float32(self.value)))


@dataclass(frozen=True)
class RandomK(Sparsifier):
    """Random elements, `ratio` of all, at least one; the same ones on all ranks.

    The array is cut into as many parts as elements are selected, and one element of each part is selected. All elements
    of a part have the same chance.
    """

    ratio: float
    """The part of all elements that is sent, above 0 and up to 1."""
    seed: int = 0
    """The seed of the selection. It must be the same on all ranks."""

    name: ClassVar[str] = "randomk"
    is_shared: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", _checked_ratio(self.name, self.ratio))
        check_seed(self.name, self.seed)

    def select(self, x: Floats, salt: int = 0) -> Indices:
        """Return the indices that seed and salt select; the elements do not matter."""
        count = selected_count(self.ratio, x.size)
        if not count:
            return np.empty(0, np.int64)
        bounds = np.arange(count + 1, dtype=np.uint64) * np.uint64(x.size) // np.uint64(count)
        words = random_words(0, count, random_key(self.seed, salt)).astype(np.uint64)
        return (bounds[:-1] + (words * np.diff(bounds) >> np.uint64(32))).astype(np.int64)


def selected_count(ratio: float, count: int) -> int:
    """Return how many of `count` elements are `ratio` of them: at least one, unless there are none."""
    return min(count, max(1, round(ratio * count)))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _checked_ratio(name: str, ratio: float) -> float:
    """Return `ratio` as a float, so that equal sparsifiers have equal texts."""
    if not _is_number(ratio) or not 0 < ratio <= 1:
        raise ConfigError(f"{name}: ratio is {ratio!r}; give the part of all elements to send, like 0.01")
    return float(ratio)
