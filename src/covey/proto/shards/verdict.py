"""What all ranks conclude from what each of them told: the arrays of a state, and whether its shards are on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from covey.base.errors import MismatchError
from covey.proto.shards.boxes import Box, fits, split, whole
from covey.proto.shards.safetensors import FORMAT_DTYPES
from covey.wire.shards import CHUNK_DIGEST_BYTES, SHARD_CHUNK_BYTES, SavedArray

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from covey.proto.shards.boxes import Shape
    from covey.wire.shards import StateArray, Written


def whole_arrays(
    told: Mapping[int, Sequence[StateArray]],
) -> tuple[tuple[SavedArray, ...], dict[int, list[tuple[int, Box]]]]:
    """Return the arrays of a state, and which boxes of sharded ones each rank has, from what the ranks told.

    Raises:
        MismatchError: they told of different arrays.
    """
    ranks = sorted(told)
    first = told[ranks[0]]
    for rank in ranks[1:]:
        if len(told[rank]) != len(first):
            raise MismatchError(f"rank {ranks[0]} has {len(first)} arrays, and rank {rank} has {len(told[rank])}")
    arrays = []
    owned: dict[int, list[tuple[int, Box]]] = {rank: [] for rank in ranks}
    for number, array in enumerate(first):
        parts = {rank: told[rank][number] for rank in ranks}
        for rank, part in parts.items():
            if (part.name, part.dtype, part.axis) != (
                array.name,
                array.dtype,
                array.axis,
            ) or part.dtype not in FORMAT_DTYPES:
                raise MismatchError(
                    f"rank {ranks[0]} has {_said(array)}, and rank {rank} has {_said(part)} in its place"
                )
        if array.axis < 0:
            if odd := [rank for rank, part in parts.items() if part.part != array.part]:
                raise MismatchError(
                    f"{array.name!r} has the shape {list(array.part)} on rank {ranks[0]}, and "
                    f"{list(parts[odd[0]].part)} on rank {odd[0]}; if each rank has a part of it, pass covey.Shard"
                )
            arrays.append(SavedArray(array.name, array.dtype, array.part))
            continue
        shape, boxes = _boxes(array, parts)
        arrays.append(SavedArray(array.name, array.dtype, shape, array.axis))
        for rank, box in boxes.items():
            owned[rank].append((number, box))
    return tuple(arrays), owned


def _boxes(array: StateArray, parts: Mapping[int, StateArray]) -> tuple[Shape, dict[int, Box]]:
    """Return the shape of a sharded array, and the box of each rank."""
    axis = array.axis
    if array.shape:
        boxes = {rank: Box(part.offset, part.part) for rank, part in parts.items()}
        wrong = [rank for rank, part in parts.items() if part.shape != array.shape or not fits(boxes[rank], part.shape)]
        if wrong:
            raise MismatchError(f"the part of {array.name!r} on rank {wrong[0]} does not fit that of the other ranks")
        return array.shape, boxes
    boxes, start = {}, 0
    for rank, part in sorted(parts.items()):
        sides = [each for number, each in enumerate(part.part) if number != axis]
        if part.shape or axis >= len(part.part) or sides != [n for i, n in enumerate(array.part) if i != axis]:
            raise MismatchError(
                f"the part of {array.name!r} on rank {rank} has the shape {list(part.part)}, which cannot be joined "
                f"with {list(array.part)} along axis {axis}"
            )
        boxes[rank] = Box(tuple(start if n == axis else 0 for n in range(len(part.part))), part.part)
        start += part.part[axis]
    return tuple(start if number == axis else size for number, size in enumerate(array.part)), boxes


def _said(array: StateArray) -> str:
    how = "" if array.axis < 0 else f", sharded along axis {array.axis}"
    return f"{array.name!r} ({array.dtype}{how})"


def wanted_boxes(
    arrays: Sequence[SavedArray], wanted: Mapping[int, Sequence[StateArray] | None]
) -> dict[int, dict[int, Box]]:
    """Return for each rank the box of each array that it gets, by number, from what the ranks want.

    A rank that wants nothing in particular gets all of it, and an even part of arrays that are sharded.

    Raises:
        MismatchError: a rank wants what is not in the checkpoint.
    """
    numbers = {array.name: number for number, array in enumerate(arrays)}
    ends: dict[tuple[str, int], int] = {}
    boxes: dict[int, dict[int, Box]] = {}
    for index, (rank, parts) in enumerate(sorted(wanted.items())):
        if parts is None:
            boxes[rank] = {
                number: whole(array.shape) if array.axis < 0 else split(array.shape, array.axis, index, len(wanted))
                for number, array in enumerate(arrays)
            }
            continue
        boxes[rank] = {}
        for part in parts:
            number = numbers.get(part.name)
            if number is None:
                raise MismatchError(f"the checkpoint has no array {part.name!r}, which rank {rank} wants")
            array, box = arrays[number], _wanted_box(part, ends)
            is_joined = part.axis >= 0 and not part.offset
            is_like = (
                _across(part.part, part.axis) == _across(array.shape, part.axis) if is_joined else bool(part.offset)
            )
            if part.dtype != array.dtype or not fits(box, array.shape) or not (is_like or part.part == array.shape):
                raise MismatchError(
                    f"rank {rank} wants {part.dtype}{list(part.part)} of {part.name!r}, and the checkpoint has "
                    f"{array.dtype}{list(array.shape)}; parts of arrays are passed as covey.Shard"
                )
            boxes[rank][number] = box
    for (name, axis), end in ends.items():
        if end != arrays[numbers[name]].shape[axis]:
            raise MismatchError(
                f"the parts of {name!r} that all ranks want add up to {end} along axis {axis}, and the checkpoint has "
                f"{arrays[numbers[name]].shape[axis]}"
            )
    return boxes


def _wanted_box(part: StateArray, ends: dict[tuple[str, int], int]) -> Box:
    """Return the box of a part; one that is to be joined with those of other ranks begins where the last one ended."""
    if part.offset:
        return Box(part.offset, part.part)
    if part.axis < 0 or part.axis >= len(part.part):
        return whole(part.part)
    start = ends.get((part.name, part.axis), 0)
    ends[part.name, part.axis] = start + part.part[part.axis]
    return Box(tuple(start if number == part.axis else 0 for number in range(len(part.part))), part.part)


def _across(shape: Shape, axis: int) -> Shape:
    return tuple(size for number, size in enumerate(shape) if number != axis)


class ShardVerdict(NamedTuple):
    """How the writing of shards ended."""

    digests: tuple[bytes, ...]
    """Digest of each shard; empty for one that is lost."""
    holders: tuple[tuple[int, ...], ...]
    """The ranks on whose machines each shard is: its writer first."""
    failed: dict[int, str]
    """The ranks that could not write, and why."""

    @property
    def is_whole(self) -> bool:
        """Whether every shard is on the disk of a remaining rank."""
        return not self.failed and all(self.holders)


def judge(ranks: Sequence[int], sizes: Sequence[int], written: Mapping[int, Written]) -> ShardVerdict:
    """Return whether the shards of `ranks`, in their order, with these sizes, are on disk, as remaining ranks told."""
    failed = {rank: told.failure for rank, told in sorted(written.items()) if told.failure}
    digests, holders = [], []
    for number, (writer, nbytes) in enumerate(zip(ranks, sizes, strict=True)):
        length = -(-nbytes // SHARD_CHUNK_BYTES) * CHUNK_DIGEST_BYTES
        found = {
            rank: copy
            for rank, told in sorted(written.items())
            for which, copy in told.copies
            if which == number and not told.failure
        }
        own = written.get(writer)
        if own is not None and not own.failure:
            found = {writer: own.digests} | found
        right = next((each for each in found.values() if len(each) == length), b"")
        for rank, each in found.items():
            if each != right and len(each) == length:
                failed.setdefault(rank, f"its copy of shard {number} differs from what rank {writer} wrote")
        having = tuple(rank for rank, each in found.items() if right and each == right)
        if own is not None and not own.failure and writer not in having:
            failed.setdefault(writer, "it told digests that do not fit its shard")
        digests.append(right if having else b"")
        holders.append(having)
    return ShardVerdict(tuple(digests), tuple(holders), failed)
