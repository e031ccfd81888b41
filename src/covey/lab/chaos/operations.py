"""The operations of the workload: the input of each rank, and the exact result. Pure.

Rank r contributes a pattern times 4**r, so a sum shows exactly which ranks contributed, and how often. All numbers are
whole and far below what their type can hold exactly, so the right result is the same bit by bit in any order of
additions.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

    Array = NDArray[Any]

OPERATIONS_PERIOD: Final = 89
EXACT_RANKS: Final = 16
"""Most ranks for which the sums of 8-byte numbers are exact."""
MOST_RANKS_OF_SHORT: Final = 8
"""Most ranks for which the sums of 4-byte numbers are exact."""
ROOTED_OPERATIONS: Final = ("reduce", "broadcast", "gather", "scatter")
"""Operations that fail without their root."""
ALIKE: Final = ("all_reduce", "mean", "broadcast", "all_gather", "objects", "barrier", "split", "vote")
"""Operations that return the same on all ranks."""


class CheckedOperation(msgspec.Struct, frozen=True):
    """One collective, as all ranks call it."""

    kind: str
    count: int = 0
    """Elements of a rank's array; some kinds give each rank a few more than the one before."""
    dtype: str = "f8"
    root: int = -1
    salt: int = 0
    """Makes the numbers of one operation differ from those of another."""


def contribution(operation: CheckedOperation, rank: int, *, more: int = 0) -> Array:
    """Return the input of a rank, with `more` elements added."""
    return _times(operation, 4**rank, more)


def inputs(operation: CheckedOperation, rank: int, size: int) -> Any:
    """Return the argument of a rank's call."""
    match operation.kind:
        case "all_gather":
            return contribution(operation, rank, more=rank)
        case "all_to_all":
            return [contribution(operation, rank, more=to) for to in range(size)]
        case "scatter":
            return [contribution(operation, to) for to in range(size)] if rank == operation.root else None
        case "mean":
            return contribution(operation, rank) * _divisible()
        case "objects":
            return {"rank": rank, "salt": operation.salt, "list": [None, 1.5, "x"]}
        case "barrier":
            return None
    return contribution(operation, rank)


def expected(operation: CheckedOperation, rank: int, contributors: Collection[int], size: int) -> Any:
    """Return the result on a rank, given the contributors; only for kinds that `is_foreseen`."""
    kind, root = operation.kind, operation.root
    if kind in _BY_KIND:
        return _BY_KIND[kind](operation, rank, contributors, size)
    if kind == "broadcast":
        return contribution(operation, root)
    if kind == "reduce":
        return _sum(operation, contributors) if rank == root else contribution(operation, rank)
    if kind == "gather" and rank != root:
        return None
    if kind == "scatter":
        return contribution(operation, rank)
    if kind == "barrier":
        return None
    return _by_rank(size, contributors, lambda other: inputs(operation, other, size))


def is_foreseen(operation: CheckedOperation) -> bool:
    """Tell whether `expected` knows the result. Votes and splits depend on more than their arguments."""
    return operation.kind not in ("vote", "split")


def digest(value: Any) -> str:
    """Return a text that is the same for equal values, bit by bit."""
    hashed = hashlib.blake2b(digest_size=8)
    _feed(hashed, value)
    return hashed.hexdigest()


def dtypes_for(size: int) -> tuple[str, ...]:
    """Return the types whose sums over `size` ranks are exact."""
    return ("f8", "i8", "f4", "i4") if size <= MOST_RANKS_OF_SHORT else ("f8", "i8")


def _times(operation: CheckedOperation, factor: int, more: int = 0) -> Array:
    pattern = 1 + (np.arange(operation.count + more) + operation.salt) % OPERATIONS_PERIOD
    return (pattern * factor).astype(operation.dtype)


def _sum(operation: CheckedOperation, ranks: Collection[int]) -> Array:
    return _times(operation, sum(4**rank for rank in ranks))


def _mean(operation: CheckedOperation, _rank: int, contributors: Collection[int], _size: int) -> Array:
    return _sum(operation, contributors) * _divisible() / len(contributors)


def _divisible() -> int:
    return 840  # by each number of contributors up to 8


def _part(operation: CheckedOperation, rank: int, contributors: Collection[int], size: int) -> Array:
    return np.array_split(_sum(operation, contributors), size)[rank]


def _given(operation: CheckedOperation, rank: int, contributors: Collection[int], size: int) -> list[Array | None]:
    return _by_rank(size, contributors, lambda other: contribution(operation, other, more=rank))


def _by_rank(size: int, contributors: Collection[int], value: Callable[[int], Any]) -> list[Any]:
    """Return a list with None where a rank is lost."""
    return [value(other) if other in contributors else None for other in range(size)]


_BY_KIND: Final[dict[str, Callable[[CheckedOperation, int, Collection[int], int], Any]]] = {
    "all_reduce": lambda operation, _rank, ranks, _size: _sum(operation, ranks),
    "mean": _mean,
    "reduce_scatter": _part,
    "all_to_all": _given,
    "scan": lambda operation, rank, ranks, _size: _sum(operation, [other for other in ranks if other <= rank]),
    "exscan": lambda operation, rank, ranks, _size: _sum(operation, [other for other in ranks if other < rank]),
}


def _feed(hashed: Any, value: Any) -> None:
    if isinstance(value, np.ndarray):
        hashed.update(f"{value.dtype.str}{value.shape}".encode())
        hashed.update(np.ascontiguousarray(value).view(np.uint8).data)
    elif isinstance(value, list | tuple):
        hashed.update(f"list{len(value)}".encode())
        for each in value:
            _feed(hashed, each)
    else:
        hashed.update(repr(value).encode())


def names_of(ranks: Sequence[int], members: Sequence[str]) -> tuple[str, ...]:
    """Return the processes that have these ranks."""
    return tuple(members[rank] for rank in ranks)
