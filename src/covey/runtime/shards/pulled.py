"""What folders of this machine have of checkpoints: lists, checks, and one file with the whole of one.

The file is one of safetensors with whole arrays; its metadata have the rest of the state, so that `covey.load_state`
returns the state of it.

`WantedArrays` are the parts of arrays that are wanted, while the chunks of the files come, in any order.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from covey.base.errors import CheckpointError, ConfigError, RemoteProtocolError
from covey.proto.shards.boxes import Box, elements, overlap, whole
from covey.proto.shards.choice import complete, found_checkpoints, needed
from covey.proto.shards.layout import CheckpointLayout
from covey.proto.shards.safetensors import FORMAT_DTYPES, FileTensor, decode_tensors, header_bytes, in_order, lay_out
from covey.runtime.shards.folder import ShardFolder, digest_of, shard_name, sync_folder
from covey.runtime.shards.tree import put_together
from covey.wire import objects
from covey.wire.shards import CHUNK_DIGEST_BYTES, SHARD_CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from covey.proto.shards.choice import FoundCheckpoint, Need
    from covey.wire.manifest import Bytes
    from covey.wire.shards import SavedArray, SavedCheckpoint

    Array = np.ndarray[Any, np.dtype[Any]]
    Target = Callable[[SavedArray, Box], Array]

TREE: Final = "covey.tree"
"""The key of the metadata with all of a state but its arrays."""
ARRAYS_NAME: Final = "covey.arrays"
"""That with the names of the arrays, by number."""


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


class HeldCheckpoint(NamedTuple):
    """A checkpoint of which some folders have parts."""

    saved: SavedCheckpoint
    found: FoundCheckpoint
    folders: dict[bytes, ShardFolder]


def held_checkpoints(folders: Sequence[ShardFolder]) -> list[HeldCheckpoint]:
    """Return the checkpoints of which these folders have a manifest, the newest first."""
    parts = {folder.identity: folder.parts() for folder in folders}
    by_place = {folder.identity: folder for folder in folders}
    manifests = {each.part.digest: each.saved for listed in parts.values() for each in listed if each.saved is not None}
    found = found_checkpoints({place: [each.part for each in listed] for place, listed in parts.items()})
    return [HeldCheckpoint(manifests[each.digest], each, by_place) for each in found]


def damaged_files(held: HeldCheckpoint, count: Callable[[int], None]) -> list[str]:
    """Return the files of a checkpoint here that are not what was written; `count` is told the bytes that were read."""
    saved, found = held.saved, held.found
    layout = CheckpointLayout(saved)
    wrong = []
    for number, holders in enumerate(found.holders):
        for place in holders:
            folder = held.folders[place]
            for chunk in range(layout.shards[number].chunks):
                size = layout.chunk_bytes(number, chunk)
                if not _is_right(saved, number, chunk, _chunk(folder, saved, (number, chunk), size)):
                    name = shard_name(number, len(saved.shards))
                    wrong.append(str(folder.shard_path(saved.step, saved.id, name)))
                    break
                count(size)
    return wrong


def pull(folders: Sequence[ShardFolder], step: int | None, path: Path, bar: Callable[[int], Any]) -> HeldCheckpoint:
    """Write the newest complete checkpoint, or that of `step`, to a file; return which it is.

    `bar` is called with the bytes of all arrays, and returns what counts them.

    Raises:
        CheckpointError: no checkpoint is complete in these folders, or files are damaged in all of them.
        ConfigError: the file cannot be written.
    """
    held = held_checkpoints(folders)
    whole_ones = {each.id for each in complete([each.found for each in held])}
    chosen = next((each for each in held if each.found.id in whole_ones and step in (None, each.saved.step)), None)
    if chosen is None:
        raise CheckpointError(_incomplete(held, step))
    saved = chosen.saved
    tensors = [FileTensor(array.name, array.dtype, array.shape) for array in saved.arrays]
    order = in_order(tensors)
    tree = base64.b64encode(saved.tree).decode()
    names = json.dumps([array.name for array in saved.arrays])
    layout = lay_out([tensors[each] for each in order], {TREE: tree, ARRAYS_NAME: names, "step": str(saved.step)})
    with _writing(path) as write, bar(layout.nbytes) as counter:
        write(layout.header)
        for number in order:
            data = _array(chosen, number)
            write(data)
            counter.show(data.nbytes)
    return chosen


def load_pulled(path: str | os.PathLike[str]) -> Any:
    """Return the state of a file that `pull` wrote; of another one of safetensors, its arrays by name.

    Raises:
        ConfigError: it is no such file.
    """
    with open(path, "rb") as file:
        length = header_bytes(file.read(8))
        header = file.read(length)
        if len(header) != length:
            raise ConfigError(f"{path} is too short for its header")
        size = os.fstat(file.fileno()).st_size - 8 - length
        arrays = {}
        for name, (dtype, shape, start) in decode_tensors(header, size).items():
            arrays[name] = array = np.empty(shape, dtype)
            file.seek(8 + length + start)
            if file.readinto(array.reshape(-1).view(np.uint8).data) != array.nbytes:
                raise ConfigError(f"{path} is too short for {name!r}")
    metadata = json.loads(header).get("__metadata__", {})
    if TREE not in metadata:
        return arrays
    try:
        tree = objects.decode(base64.b64decode(metadata[TREE]))
        return put_together(tree, [arrays[name] for name in json.loads(metadata[ARRAYS_NAME])])
    except (RemoteProtocolError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error


def _incomplete(held: Sequence[HeldCheckpoint], step: int | None) -> str:
    wanted = [each for each in held if step in (None, each.saved.step)]
    if not wanted:
        return f"no checkpoint{'' if step is None else f' of step {step}'} is here"
    each = wanted[0]
    hosts = sorted({host for number in each.found.missing for host in each.saved.shards[number].hosts})
    return (
        f"the checkpoint of step {each.saved.step} is not complete here: {len(each.found.missing)} of "
        f"{len(each.found.holders)} shards are on other machines ({', '.join(hosts) or 'unknown'}); copy their folders "
        "here and name them with --folder, or load it with group.checkpoint.load in a run with these machines"
    )


def _array(held: HeldCheckpoint, number: int) -> Any:
    """Return the bytes of a whole array."""
    saved, layout = held.saved, CheckpointLayout(held.saved)
    array = saved.arrays[number]
    wanted = {number: whole(array.shape)}
    needs = needed(layout, wanted)
    reading = WantedArrays(
        saved, layout, wanted, needs, lambda array, box: np.empty(box.shape, FORMAT_DTYPES[array.dtype])
    )
    for need in needs:
        size = layout.chunk_bytes(*need)
        copies = (_chunk(held.folders[place], saved, need, size) for place in held.found.holders[need[0]])
        if not any(reading.take(need, copy) for copy in copies):
            name = shard_name(need[0], len(saved.shards))
            raise CheckpointError(f"{name} of step {saved.step} is damaged in all folders here", files=(name,))
    return reading.targets[number].reshape(-1).view(np.uint8)


def _chunk(folder: ShardFolder, saved: SavedCheckpoint, need: tuple[int, int], size: int) -> bytes:
    with contextlib.suppress(OSError):
        return folder.read_chunk(saved.step, saved.id, (need[0], len(saved.shards)), need[1], size)
    return b""


def _is_right(saved: SavedCheckpoint, number: int, chunk: int, data: bytes) -> bool:
    start = chunk * CHUNK_DIGEST_BYTES
    return digest_of(data) == saved.shards[number].digests[start : start + CHUNK_DIGEST_BYTES]


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[Callable[[Any], None]]:
    """Yield what writes to a new file, which is at `path` when the block has ended well."""
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(hidden, "xb") as file:
            yield file.write  # type: ignore[misc]
            file.flush()
            os.fsync(file.fileno())
        os.replace(hidden, path)
        sync_folder(path.absolute().parent)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {os.strerror(error.errno or 0)}") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(hidden)
