"""`Mesh`: the ranks of a group as a grid, with a group along each axis."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

from covey.base.errors import ConfigError
from covey.runtime.group.issuer import whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from covey.runtime.group.group import Group


class Mesh:
    """The ranks of a group as a grid, in row-major order, with a group along each named axis.

    `mesh["rows"]` has the ranks whose other coordinates are those of this rank: with shape (2, 4) and names ("hosts",
    "devices"), `mesh["devices"]` has the four ranks of this rank's row. `close` it, or use it in `with`: that closes
    the groups of the axes, and leaves the whole group open.
    """

    def __init__(
        self, shape: Sequence[int], names: Sequence[str], group: Group, *, timeout: float | None = None
    ) -> None:
        """Split `group`, once for each axis. Every rank of it calls this. One length may be -1: as many as fit.

        Raises:
            ConfigError: the shape does not have as many places as the group has ranks, or a name is there twice.
        """
        self.group, self.names = group, tuple(names)
        """The whole group, and the axes in the order of `shape`."""
        self.shape = _fitted([whole_number("shape", each) for each in shape], self.names, group.size)
        self.coordinate = coordinate_of(group.rank, self.shape)
        """The place of this rank in the grid."""
        self._groups: dict[str, Group] = {}
        try:
            for axis, name in enumerate(self.names):
                others = [*self.coordinate[:axis], 0, *self.coordinate[axis + 1 :]]
                self._groups[name] = group.split(rank_of(others, self.shape), timeout=timeout)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={length}" for name, length in zip(self.names, self.shape, strict=True))
        return f"<Mesh {axes} of {self.group.name!r}: this rank at {self.coordinate}>"

    def __getitem__(self, name: str) -> Group:
        """Return the group along an axis that this rank is in."""
        try:
            return self._groups[name]
        except KeyError:
            raise ConfigError(f"this mesh has no axis {name!r}; it has {', '.join(map(repr, self.names))}") from None

    def rank_at(self, *coordinate: int) -> int:
        """Return the rank in the whole group at a place of the grid."""
        places = [whole_number("coordinate", each) for each in coordinate]
        if len(places) != len(self.shape) or not all(0 <= at < n for at, n in zip(places, self.shape, strict=True)):
            raise ConfigError(f"{tuple(places)} is no place in a mesh of shape {self.shape}")
        return rank_of(places, self.shape)

    def close(self) -> None:
        """Close the groups of the axes."""
        for each in self._groups.values():
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._groups.values():
            each.__exit__(kind, error, trace)


def coordinate_of(rank: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the place of a rank in a grid, in row-major order."""
    found = []
    for length in reversed(shape):
        rank, at = divmod(rank, length)
        found.append(at)
    return tuple(reversed(found))


def rank_of(coordinate: Sequence[int], shape: Sequence[int]) -> int:
    """Return the rank at a place of a grid."""
    rank = 0
    for at, length in zip(coordinate, shape, strict=True):
        rank = rank * length + at
    return rank


def _fitted(shape: list[int], names: tuple[Any, ...], size: int) -> tuple[int, ...]:
    """Return the shape with its one open length filled in."""
    if len(names) != len(shape) or len(set(names)) != len(names) or not shape:
        raise ConfigError(f"a mesh has one name for each axis, each once: {len(shape)} axes, names {names}")
    if shape.count(-1) == 1 and (known := -math.prod(shape)) > 0 and size % known == 0:
        shape[shape.index(-1)] = size // known
    if min(shape) < 1 or math.prod(shape) != size:
        text = f"a mesh of shape {tuple(shape)} does not have a place for each of the {size} ranks of the group"
        raise ConfigError(f"{text}; change the shape, or give -1 for one length")
    return tuple(shape)
