"""Inputs that differ by rank and position, and the exact result of each operation. Pure.

They are small whole numbers, so every dtype holds their sums exactly and the order of additions does not matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.lab.bench.engines import partner

if TYPE_CHECKING:
    from numpy.typing import NDArray

PIECE: Final = 1 << 18
"""Elements looked at together, so that checking a large result needs little memory."""


def pattern(rank: int, start: int, stop: int) -> NDArray[np.int64]:
    """Return elements start..stop of `rank`'s input: 0..7, hashed, so that shifted or swapped elements are noticed."""
    mixed = np.arange(start, stop, dtype=np.uint64) + np.uint64((rank + 1) << 40)
    for _ in range(2):
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(32)
    return (mixed & np.uint64(7)).astype(np.int64)


def fill(x: NDArray[Any], rank: int) -> None:
    """Write `rank`'s input into `x`."""
    for start in range(0, x.size, PIECE):
        stop = min(start + PIECE, x.size)
        x[start:stop] = pattern(rank, start, stop)


def expected(operation: str, rank: int, size: int, start: int, stop: int, part: int) -> NDArray[np.int64] | None:
    """Return elements start..stop of the result on `rank`; None if the operation does not define it.

    `part` is the length of one rank's share, for operations that cut or join buffers; a range never crosses a share.
    """
    match operation:
        case "all_reduce":
            return _summed(size, start, stop)
        case "reduce":
            return _summed(size, start, stop) if rank == 0 else None
        case "broadcast":
            return pattern(0, start, stop)
        case "all_gather":
            source, offset = divmod(start, part)
            return pattern(source, offset, offset + stop - start)
        case "reduce_scatter":
            return _summed(size, rank * part + start, rank * part + stop)
        case "all_to_all":
            source, offset = divmod(start, part)
            return pattern(source, rank * part + offset, rank * part + offset + stop - start)
        case "send_recv":
            peer = partner(rank, size)
            return None if peer == rank else pattern(peer, start, stop)
    return None


def first_wrong(operation: str, result: NDArray[Any], rank: int, size: int, part: int) -> str | None:
    """Describe the first element of `result` that is not what it must be; None if all are."""
    length = part * size if operation in ("all_gather", "all_to_all") else result.size
    if result.size != length:
        return f"{result.size} elements instead of {length}"
    for share in range(0, result.size, part):
        for start in range(share, min(share + part, result.size), PIECE):
            stop = min(start + PIECE, share + part, result.size)
            wanted = expected(operation, rank, size, start, stop, part)
            if wanted is None:
                continue
            wanted, got = wanted.astype(result.dtype), result[start:stop]
            if not np.array_equal(got, wanted):
                at = int(np.flatnonzero(got != wanted)[0])
                return f"element {start + at} of {result.size} is {got[at]}, not {wanted[at]}"
    return None


def _summed(size: int, start: int, stop: int) -> NDArray[np.int64]:
    total = pattern(0, start, stop)
    for rank in range(1, size):
        total += pattern(rank, start, stop)
    return total
