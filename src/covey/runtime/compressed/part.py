"""The named parts of an array that is compressed as a whole."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """A named range of the array: elements start:stop, which are an array of `shape`."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
