"""The memory of a state that is restored: what is read to send it, and where received chunks are written."""

from __future__ import annotations

import itertools
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.arithmetic import DTYPES, dtype_code
from covey.base.errors import DeadlineError
from covey.runtime.buffers import as_array, readable
from covey.runtime.group.movements import PHYSICAL_BYTES
from covey.wire import objects
from covey.wire.manifest import ManifestEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping

    from covey.runtime.buffers import Operand
    from covey.wire.manifest import Bytes, Chunk, Manifest, Tagger

_BYTE: Final = dtype_code(np.dtype(np.uint8))


class StateMemory:
    """The memory of one state: arrays in place, and other values in encoded form."""

    def __init__(self, state: MutableMapping[str, Any]) -> None:
        self._state = state
        self._operands: dict[str, Operand] = {}
        """The arrays of the state."""
        self._contents: dict[str, Bytes] = {}
        """The memory of each name: an array's own, or a value's encoded form."""

    def survey(self, tagger: Tagger) -> Iterable[ManifestEntry]:
        """Yield an entry for each name of the state, in the order of names, with tags of its chunks.

        Raises:
            TypeError: a name or a value cannot be sent.
        """
        if not all(isinstance(name, str) for name in self._state):
            raise TypeError("a state whose names are not all strings")
        for name in sorted(self._state):
            value = self._state[name]
            is_writable = True
            try:
                if is_array := _is_array(value):
                    operand = self._operands[name] = readable(value)
                    is_writable = as_array(value).flags.writeable
                    code, shape, contents = operand.code, operand.shape, operand.load().view(np.uint8)
                else:
                    contents = np.frombuffer(objects.encode(value), np.uint8)
                    code, shape = _BYTE, contents.shape
            except TypeError as error:
                raise TypeError(f"{name!r}: {error}") from error
            self._contents[name] = contents
            tags = tagger.tags(contents)
            yield ManifestEntry(
                name=name, is_array=is_array, dtype_code=code, shape=shape, tags=tags, is_writable=is_writable
            )

    def of(self, chunk: Chunk) -> Bytes:
        """Return the memory of a chunk."""
        return self._contents[chunk.name][chunk.start : chunk.stop]

    def make_room(self, mine: Manifest, winner: Manifest, deadline: float) -> list[str]:
        """Allocate what is missing, and add missing arrays to the mapping; return the names of the values to replace.

        Added arrays are zeroed: if the restore fails, they must not show old memory of this process.

        Raises:
            MemoryError: there is not enough memory; nothing was added.
            DeadlineError: the deadline has passed.
        """
        own = mine.by_name
        added = [entry for entry in winner.entries if entry.is_array and entry.name not in own]
        replaced = [
            entry
            for entry in winner.entries
            if not entry.is_array and not (entry.name in own and own[entry.name].is_same(entry))
        ]
        if sum(entry.nbytes for entry in added + replaced) > PHYSICAL_BYTES:
            raise MemoryError  # the kernel would grant it and fail later
        arrays, contents = {}, {}
        for entry in added:
            if time.monotonic() > deadline:
                raise DeadlineError("restore: the timeout ended while memory was being allocated")
            arrays[entry.name] = array = np.zeros(entry.shape, DTYPES[entry.dtype_code])
            contents[entry.name] = array.reshape(-1).view(np.uint8)
        for entry in replaced:
            contents[entry.name] = np.empty(entry.nbytes, np.uint8)
        for name, array in arrays.items():
            self._state[name] = array
        self._contents.update(contents)
        return [entry.name for entry in replaced]

    def store(self, names: Iterable[str]) -> None:
        """Copy what was received to arrays that are not contiguous in memory."""
        for name in names:
            if name in self._operands:
                self._operands[name].store()

    def replace(self, names: Iterable[str]) -> None:
        """Replace values by the ones that were received; RemoteProtocolError or TypeError if one cannot be decoded."""
        values = {name: objects.decode(self._contents[name].data) for name in names}
        for name, value in values.items():
            self._state[name] = value

    def remove(self, names: Iterable[str]) -> None:
        """Remove names from the state."""
        for name in names:
            del self._state[name]

    def has_overlaps(self) -> bool:
        """Tell whether arrays of the state share memory."""
        arrays = [as_array(value) for value in self._state.values() if _is_array(value)]
        spans = sorted(np.lib.array_utils.byte_bounds(array) for array in arrays if array.size)
        return any(start < end for (_, end), (start, _) in itertools.pairwise(spans))


def _is_array(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))
