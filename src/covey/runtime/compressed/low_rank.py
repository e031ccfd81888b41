"""An all_reduce of matrices by two thin factors each: PowerSGD.

    Vogels, Karimireddy, Jaggi, "PowerSGD: Practical low-rank gradient compression" (2019)

With M the mean of the ranks' matrices: P = M Q is summed at slot 0, made orthonormal there and sent to all; Q' = M^T P
is averaged by all; the result is P Q'^T. The ranks' own products with M may be rounded differently on different
processors; what must be equal on all ranks is made by slot 0 or element by element.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from covey.base.arithmetic import reduction
from covey.base.numbers import Slot
from covey.plan import choose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from covey.compress.low_rank import PowerSGD
    from covey.runtime.collectives.attempt import Attempt

    Floats = NDArray[np.float32]


class Matrix(NamedTuple):
    """A matrix of a bucket."""

    x: Floats
    """Two-dimensional, a view of this rank's memory."""
    basis: Floats | None
    """Q' of the last operation, from which this one starts; None if there was none."""


def all_reduce(attempt: Attempt, matrices: Sequence[Matrix], codec: PowerSGD, *, divides: bool) -> list[Floats]:
    """Replace each matrix by an approximation of the sum, or mean, over all ranks; return the new bases."""
    bases = _bases(attempt, matrices, codec)
    with np.errstate(all="ignore"):
        lefts = [matrix.x @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        _orthonormal_total(attempt, lefts, codec)
        rights = [matrix.x.T @ left for matrix, left in zip(matrices, lefts, strict=True)]
        packed = np.concatenate([right.reshape(-1) for right in rights])
        attempt.all_reduce(packed, "mean")
        _unpack(packed, rights)
        for matrix, left, right in zip(matrices, lefts, rights, strict=True):
            codec.rebuild(left, right, matrix.x)
            if not divides:
                np.multiply(matrix.x, np.float32(attempt.size), out=matrix.x)
    return rights


def _bases(attempt: Attempt, matrices: Sequence[Matrix], codec: PowerSGD) -> list[Floats]:
    """Return a start for each matrix that is the same on all ranks: a newcomer has no bases of earlier operations."""
    known = [matrix.basis for matrix in matrices]
    digest = hashlib.blake2b(digest_size=7)
    for basis in known:
        digest.update(b"" if basis is None else basis.tobytes())
    number = int.from_bytes(digest.digest(), "little")
    extremes = np.array([number, -number], np.int64)
    attempt.all_reduce(extremes, "max")
    is_agreed = extremes[0] == -extremes[1]
    salt = attempt.operation.sequence
    return [
        basis if basis is not None and is_agreed else codec.start(len(matrix.x), matrix.x.shape[1], salt + at)
        for at, (matrix, basis) in enumerate(zip(matrices, known, strict=True))
    ]


def _orthonormal_total(attempt: Attempt, lefts: list[Floats], codec: PowerSGD) -> None:
    """Replace each factor by its sum over all ranks, made orthonormal, with the same bits on all ranks."""
    packed = np.concatenate([left.reshape(-1) for left in lefts])
    root = Slot(0)
    count = packed.size
    plan = choose.reduce(attempt.slot, attempt.size, root, count, 4, None, attempt.sizes)
    attempt.execute(plan, [packed], reduction("sum", packed.dtype))
    if attempt.slot == root:
        _unpack(packed, lefts)
        for left in lefts:
            codec.orthogonalise(left)
        packed = np.concatenate([left.reshape(-1) for left in lefts])
    attempt.execute(choose.broadcast(attempt.slot, attempt.size, root, count, 4, None, attempt.sizes), [packed])
    _unpack(packed, lefts)


def _unpack(packed: Floats, factors: list[Floats]) -> None:
    at = 0
    for factor in factors:
        factor[...] = packed[at : at + factor.size].reshape(factor.shape)
        at += factor.size
