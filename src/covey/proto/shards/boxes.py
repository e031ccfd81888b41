"""Boxes of elements of an array: where they overlap, whether they make up the whole, where one lies inside another."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

BOXES_LIMIT: Final = 1 << 14
"""The most parts of an array that are not slices along one axis."""

Shape = tuple[int, ...]


class Box(NamedTuple):
    """Elements of an array: so many from an offset on, in each dimension."""

    offset: Shape
    shape: Shape

    @property
    def volume(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def key(self) -> tuple[Any, ...]:
        """What selects it in the array; without dimensions, too, as an array and not as a number."""
        return (*(slice(start, start + count) for start, count in zip(self.offset, self.shape, strict=True)), ...)

    def within(self, outer: Box) -> Box:
        """Return this box by its place in another one, which contains it."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.shape)


def whole(shape: Shape) -> Box:
    """Return the box of all elements."""
    return Box((0,) * len(shape), shape)


def split(shape: Shape, axis: int, index: int, count: int) -> Box:
    """Return the part of one of `count` ranks: sizes differ by at most one, the first ones are larger."""
    size = shape[axis]
    each, more = divmod(size, count)
    start = index * each + min(index, more)
    length = each + (index < more)
    offset = tuple(start if number == axis else 0 for number in range(len(shape)))
    return Box(offset, tuple(length if number == axis else each for number, each in enumerate(shape)))


def overlap(one: Box, other: Box) -> Box | None:
    """Return the elements that two boxes of an array share; None if there are none."""
    offset = tuple(map(max, one.offset, other.offset))
    ends = (min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
    return Box(offset, shape) if min(shape, default=1) > 0 else None


def fits(box: Box, shape: Shape) -> bool:
    """Tell whether a box lies in an array of this shape."""
    return len(box.offset) == len(box.shape) == len(shape) and all(
        start >= 0 and count >= 0 and start + count <= size for start, count, size in zip(*box, shape, strict=True)
    )


def gap(shape: Shape, boxes: Sequence[Box]) -> str:
    """Return why boxes that lie in an array do not make it up, each element once; empty if they do."""
    boxes = sorted(box for box in boxes if box.volume)
    held, wanted = sum(box.volume for box in boxes), math.prod(shape)
    for one, other in itertools.pairwise(boxes):
        if overlap(one, other) is not None:
            return f"{list(one)} and {list(other)} overlap"
    if held < wanted:
        return f"its parts have {held} of {wanted} elements"
    return "" if len(boxes) < 2 or _is_row(boxes, shape) else _overlaps(boxes)


def _overlaps(boxes: Sequence[Box]) -> str:
    """Return which of many boxes overlap; empty if none do. Those that do not begin where others are, are skipped."""
    if len(boxes) > BOXES_LIMIT:
        return f"it has {len(boxes)} parts, and at most {BOXES_LIMIT} can be checked"
    axis = max(range(len(boxes[0].shape)), key=lambda axis: len({box.offset[axis] for box in boxes}))
    open_: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offset[axis]):
        open_ = [each for each in open_ if each.offset[axis] + each.shape[axis] > box.offset[axis]]
        for each in open_:
            if overlap(each, box) is not None:
                return f"{list(each)} and {list(box)} overlap"
        open_.append(box)
    return ""


def _is_row(boxes: Sequence[Box], shape: Shape) -> bool:
    """Tell whether sorted boxes follow each other along one axis, and are whole along the others."""
    for axis in range(len(shape)):
        ends = itertools.accumulate((box.shape[axis] for box in boxes), initial=0)
        if all(
            box == Box(*_slab(shape, axis, start, box.shape[axis])) for box, start in zip(boxes, ends, strict=False)
        ):
            return True
    return False


def _slab(shape: Shape, axis: int, start: int, count: int) -> tuple[Shape, Shape]:
    offset = tuple(start if number == axis else 0 for number in range(len(shape)))
    return offset, tuple(count if number == axis else size for number, size in enumerate(shape))


def elements(inner: Box, outer: Box) -> tuple[int, int]:
    """Return from which element of `outer` on, in C order, up to which one the elements of `inner` are in it."""
    place = inner.within(outer)
    steps = [math.prod(outer.shape[number + 1 :]) for number in range(len(outer.shape))]
    first = sum(start * step for start, step in zip(place.offset, steps, strict=True))
    last = sum((start + n - 1) * step for (start, n), step in zip(zip(*place, strict=True), steps, strict=True))
    return first, last + 1
