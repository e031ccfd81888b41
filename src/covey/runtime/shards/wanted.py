"""The parts of arrays that are wanted, while the chunks of the files come, in any order, from wherever they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from covey.proto.shards.boxes import Box, elements, overlap
from covey.runtime.shards.folder import digest_of
from covey.wire.shards import CHUNK_DIGEST_BYTES, SHARD_CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from covey.proto.shards.choice import Need
    from covey.proto.shards.layout import CheckpointLayout
    from covey.wire.manifest import Bytes
    from covey.wire.shards import SavedArray, SavedCheckpoint

    Array = np.ndarray[Any, np.dtype[Any]]
    Target = Callable[[SavedArray, Box], Array]


class WantedPiece:
    """The memory of one piece until all of it that is wanted has come: the program's own if possible, else apart."""

    def __init__(self, target: Array, wanted: Box, held: Box, inner: Box, itemsize: int) -> None:
        self._place = target[inner.within(wanted).key]
        self._inner, self._held, self._bytes = inner, held, held.volume * itemsize
        self.chunks = 0
        """Those that have not come."""
        self._memory: Bytes | None = None
        self._is_apart = inner != held or not self._place.flags.c_contiguous

    @property
    def memory(self) -> Bytes:
        if self._memory is None:
            own = None if self._is_apart else self._place.reshape(-1).view(np.uint8)
            self._memory = np.empty(self._bytes, np.uint8) if own is None else own
        return self._memory

    def came(self) -> None:
        """Count a chunk; after the last one, put what is wanted in its place."""
        self.chunks -= 1
        if not self.chunks:
            if self._is_apart:
                content = self.memory.view(self._place.dtype).reshape(self._held.shape)
                self._place[...] = content[self._inner.within(self._held).key]
            self._memory = None


class WantedArrays:
    """The arrays of one rank while their chunks come."""

    def __init__(
        self,
        saved: SavedCheckpoint,
        layout: CheckpointLayout,
        wanted: Mapping[int, Box],
        needs: Sequence[Need],
        target: Target,
    ) -> None:
        self._saved, self._layout = saved, layout
        self._missing = set(needs)
        self.targets = {number: target(saved.arrays[number], box) for number, box in wanted.items()}
        self._pieces: dict[Need, list[tuple[int, WantedPiece]]] = {}
        """By chunk: where each of its pieces begins in the file, and how its memory is made."""
        for array, box in wanted.items():
            for shard, place in layout.by_array.get(array, ()):
                held, start = layout.shards[shard].pieces[place].box, layout.shards[shard].starts[place]
                inner = overlap(held, box)
                if inner is not None:
                    size = layout.itemsize(array)
                    piece = WantedPiece(self.targets[array], box, held, inner, size)
                    first, end = elements(inner, held)
                    for chunk in range(
                        (start + first * size) // SHARD_CHUNK_BYTES, (start + end * size - 1) // SHARD_CHUNK_BYTES + 1
                    ):
                        self._pieces.setdefault((shard, chunk), []).append((start, piece))
                        piece.chunks += 1

    @property
    def missing(self) -> tuple[Need, ...]:
        return tuple(sorted(self._missing))

    def take(self, need: Need, data: Any) -> bool:
        """Take a chunk, and return whether it is what was written."""
        shard, chunk = need
        digests = self._saved.shards[shard].digests
        if digest_of(data) != digests[chunk * CHUNK_DIGEST_BYTES : (chunk + 1) * CHUNK_DIGEST_BYTES]:
            return False
        if need in self._missing:
            self._missing.discard(need)
            content, begin = np.frombuffer(data, np.uint8), chunk * SHARD_CHUNK_BYTES
            for start, piece in self._pieces.pop(need):
                memory = piece.memory
                low, high = max(start, begin), min(start + memory.size, begin + content.size)
                memory[low - start : high - start] = content[low - begin : high - begin]
                piece.came()
        return True
