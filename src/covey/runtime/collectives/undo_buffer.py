"""The undo buffer: saves what an operation overwrites, so that another attempt starts from the same input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = np.ndarray[Any, np.dtype[Any]]

LINE_BYTES: Final = 64
"""Saved ranges start at multiples of this: aligned copies are faster."""


class UndoBuffer:
    """The saved ranges of one operation, in memory that the next one uses again."""

    def __init__(self) -> None:
        self._pool: Array = np.empty(0, np.uint8)
        self._used = 0
        self._saved: list[tuple[Array, Array]] = []

    def make_room(self, buffers: Sequence[Array]) -> None:
        """Allocate memory for all of `buffers` before a transfer starts."""
        if not self._saved:
            nbytes = buffers[0].nbytes if len(buffers) == 1 else sum(buffer.nbytes for buffer in buffers)
            if self._pool.size < nbytes:
                self._pool = np.empty(nbytes, np.uint8)

    def save(self, target: Array) -> None:
        """Save a contiguous range before it is overwritten."""
        nbytes = target.nbytes
        start = self._used
        stop = start + nbytes
        if stop <= self._pool.size:
            copy = self._pool[start:stop].view(target.dtype)
            copy[...] = target
            self._used = -(-stop // LINE_BYTES) * LINE_BYTES
        else:
            copy = target.copy()
        self._saved.append((target, copy))

    def restore(self) -> None:
        """Write all saved ranges back, and forget them."""
        for target, copy in reversed(self._saved):
            target[...] = copy
        self.forget()

    def forget(self) -> None:
        """Forget the saved ranges: the operation has returned."""
        self._saved.clear()
        self._used = 0
