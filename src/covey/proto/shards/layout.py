"""Which rank writes which pieces of a state, which other machines get copies, and how the files look.

Arrays that all ranks have are cut, or dealt out whole if they are small, so that each rank writes about as many bytes.
Pieces of an array that is sharded are written by a rank that has them; of ranks with the same piece by one.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Final, NamedTuple

from covey.base.errors import MismatchError, RemoteProtocolError
from covey.proto.shards.boxes import Box, fits, gap, whole
from covey.proto.shards.safetensors import FORMAT_DTYPES, FileLayout, FileTensor, in_order, lay_out
from covey.wire.shards import SHARD_CHUNK_BYTES, SavedArray, SavedCheckpoint, SavedPiece

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CUT_BYTES: Final = 1 << 20
"""Arrays that all ranks have are cut between them from this size on."""


class ShardPiece(NamedTuple):
    """A box of an array, which is a tensor of a shard."""

    array: int
    box: Box


def array_bytes(array: SavedArray) -> int:
    """Return the bytes of a whole array."""
    return math.prod(array.shape) * FORMAT_DTYPES[array.dtype].itemsize


def share_out(
    arrays: Sequence[SavedArray], ranks: Sequence[int], owned: Mapping[int, Sequence[tuple[int, Box]]]
) -> dict[int, tuple[ShardPiece, ...]]:
    """Return the pieces that each of `ranks` writes, in the order of its file.

    `owned` has the boxes that each rank has of sharded arrays; all others are replicated.

    Raises:
        MismatchError: the boxes of an array do not make it up.
    """
    load = dict.fromkeys(ranks, 0)
    given: dict[int, list[ShardPiece]] = {rank: [] for rank in ranks}

    def give(rank: int, array: int, box: Box) -> None:
        if box.volume:
            given[rank].append(ShardPiece(array, box))
            load[rank] += box.volume * FORMAT_DTYPES[arrays[array].dtype].itemsize

    holders: dict[tuple[int, Box], list[int]] = {}
    for rank in ranks:
        for which, box in owned.get(rank, ()):
            holders.setdefault((which, box), []).append(rank)
    for (which, box), having in sorted(holders.items()):
        give(min(having, key=lambda rank: (load[rank], rank)), which, box)
    _check_whole(arrays, holders)
    small = []
    for number, array in enumerate(arrays):
        if array.axis >= 0:
            continue
        axis = next((axis for axis, size in enumerate(array.shape) if size >= len(ranks)), None)
        if array_bytes(array) < CUT_BYTES or axis is None:
            small.append(number)
            continue
        size = array.shape[axis]
        for place, rank in enumerate(ranks):
            start, end = place * size // len(ranks), (place + 1) * size // len(ranks)
            offset = tuple(start if each == axis else 0 for each in range(len(array.shape)))
            shape = tuple(end - start if each == axis else full for each, full in enumerate(array.shape))
            give(rank, number, Box(offset, shape))
    for number in sorted(small, key=lambda number: (-array_bytes(arrays[number]), number)):
        give(min(ranks, key=lambda rank: (load[rank], rank)), number, whole(arrays[number].shape))
    return {rank: _ordered(arrays, pieces) for rank, pieces in given.items()}


def _check_whole(arrays: Sequence[SavedArray], holders: Mapping[tuple[int, Box], list[int]]) -> None:
    boxes: dict[int, list[Box]] = {number: [] for number, array in enumerate(arrays) if array.axis >= 0}
    for number, box in holders:
        boxes[number].append(box)
    for number, parts in boxes.items():
        if problem := gap(arrays[number].shape, parts):
            raise MismatchError(
                f"the shards of {arrays[number].name!r} do not make up the array of shape "
                f"{list(arrays[number].shape)}: {problem}"
            )


def _ordered(arrays: Sequence[SavedArray], pieces: Sequence[ShardPiece]) -> tuple[ShardPiece, ...]:
    pieces = sorted(pieces)
    tensors = [FileTensor("", arrays[piece.array].dtype, piece.box.shape) for piece in pieces]
    return tuple(pieces[number] for number in in_order(tensors))


def file_layout(arrays: Sequence[SavedArray], pieces: Sequence[ShardPiece]) -> FileLayout:
    """Return where pieces are in the file of a shard. A piece that is not the whole array has its box in its name."""
    return lay_out([_tensor(arrays[piece.array], piece.box) for piece in pieces])


def _tensor(array: SavedArray, box: Box) -> FileTensor:
    if box.shape == array.shape:
        return FileTensor(array.name, array.dtype, box.shape)
    spans = ", ".join(f"{start}:{start + count}" for start, count in zip(*box, strict=True))
    return FileTensor(f"{array.name}[{spans}]", array.dtype, box.shape)


class ShardLayout(NamedTuple):
    """One shard of a checkpoint that is read."""

    pieces: tuple[ShardPiece, ...]
    starts: tuple[int, ...]
    """Where each piece begins in the file."""
    nbytes: int

    @property
    def chunks(self) -> int:
        return -(-self.nbytes // SHARD_CHUNK_BYTES)


class CheckpointLayout:
    """Where everything is in a checkpoint. Its manifest may come from a peer: it is checked as a whole."""

    def __init__(self, saved: SavedCheckpoint) -> None:
        """Check the manifest; RemoteProtocolError if it contradicts itself."""
        self.arrays = saved.arrays
        boxes: list[list[Box]] = [[] for _ in saved.arrays]
        names = {array.name for array in saved.arrays}
        if len(names) < len(saved.arrays):
            raise RemoteProtocolError("the manifest has several arrays of one name")
        for array in saved.arrays:
            if (
                array.dtype not in FORMAT_DTYPES
                or not array.name.isprintable()
                or array.axis >= max(len(array.shape), 1)
            ):
                raise RemoteProtocolError(f"the manifest has an impossible array {array.name[:50]!r}")
        for shard in saved.shards:
            for piece in shard.pieces:
                if piece.array >= len(saved.arrays) or not fits(_box(piece), saved.arrays[piece.array].shape):
                    raise RemoteProtocolError("the manifest has a piece outside of its array")
                boxes[piece.array].append(_box(piece))
        for array, parts in zip(saved.arrays, boxes, strict=True):
            if problem := gap(array.shape, parts):
                raise RemoteProtocolError(f"the manifest lacks a part of {array.name!r}: {problem}")
        self.shards = tuple(self._shard(shard.pieces, shard.nbytes) for shard in saved.shards)

    def _shard(self, saved: Sequence[SavedPiece], nbytes: int) -> ShardLayout:
        pieces = tuple(ShardPiece(piece.array, _box(piece)) for piece in saved)
        layout = file_layout(self.arrays, pieces)
        if layout.nbytes != nbytes:
            raise RemoteProtocolError(f"the manifest has a shard of {nbytes} bytes whose pieces take {layout.nbytes}")
        return ShardLayout(pieces, layout.starts, nbytes)

    @functools.cached_property
    def by_array(self) -> dict[int, list[tuple[int, int]]]:
        """By array: the shard and the number in it of each of its pieces."""
        found: dict[int, list[tuple[int, int]]] = {}
        for number, shard in enumerate(self.shards):
            for place, piece in enumerate(shard.pieces):
                found.setdefault(piece.array, []).append((number, place))
        return found

    def chunk_bytes(self, shard: int, chunk: int) -> int:
        return min(SHARD_CHUNK_BYTES, self.shards[shard].nbytes - chunk * SHARD_CHUNK_BYTES)

    def itemsize(self, array: int) -> int:
        return FORMAT_DTYPES[self.arrays[array].dtype].itemsize


def _box(piece: SavedPiece) -> Box:
    return Box(piece.offset, piece.shape)


class RanksFolder(NamedTuple):
    """A folder for checkpoints: that of one machine, which several ranks may share."""

    id: bytes
    host: str
    ranks: tuple[int, ...]


def folders_of(reports: Mapping[int, tuple[bytes, str]]) -> tuple[RanksFolder, ...]:
    """Return the folders in the order of their first ranks, from what each rank told: its folder and its machine."""
    ranks: dict[bytes, list[int]] = {}
    for rank, (place, _) in sorted(reports.items()):
        ranks.setdefault(place, []).append(rank)
    return tuple(RanksFolder(place, reports[having[0]][1], tuple(having)) for place, having in ranks.items())


def copy_targets(places: Sequence[RanksFolder], copies: int) -> dict[int, tuple[int, ...]]:
    """Return for each rank the ranks that get a copy of its shard: on other machines first, then in other folders.

    Each folder has neighbours in a ring of machines. With one folder for all there are no copies.
    """
    by_host: dict[str, list[RanksFolder]] = {}
    for place in places:
        by_host.setdefault(place.host, []).append(place)
    hosts = list(by_host.values())
    targets: dict[int, tuple[int, ...]] = {}
    for number, here in enumerate(hosts):
        for index, place in enumerate(here):
            away = [hosts[(number + step) % len(hosts)] for step in range(1, len(hosts))]
            order = [others[index % len(others)] for others in away]
            order += [here[(index + step) % len(here)] for step in range(1, len(here))]
            order += [each for each in places if each not in order and each is not place]
            for turn, rank in enumerate(place.ranks):
                targets[rank] = tuple(each.ranks[turn % len(each.ranks)] for each in order[:copies])
    return targets
