"""PowerSGD: a matrix is sent as the product of two thin ones.

For a gradient M, all ranks start from the same Q. They sum P = M Q, orthogonalise the sum, sum Q = transpose(M) P, and
take P transpose(Q) as the sum of all M. The next step starts from this Q.

Each rank orthogonalises and multiplies for itself, and all must get the same bits, on whatever processors they run.
BLAS adds up in an order that depends on the processor. So these functions use only numpy's element-wise operations and
its pairwise sum, whose order is fixed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from covey.base.errors import ConfigError
from covey.compress.codec import CHUNK, call_text
from covey.compress.quantisers import check_seed

if TYPE_CHECKING:
    from covey.compress.codec import Floats

LARGEST_RANK: Final = 1024
_NEGLIGIBLE: Final = 1e-6
"""A column that keeps less than this part of its length is noise: float32 has seven digits."""


class LowRank(ABC):
    """A way to send a matrix as two thin factors, P (rows by rank) and Q (columns by rank)."""

    @abstractmethod
    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return rows and columns of an array as a matrix; None if the array is better sent as it is."""

    @abstractmethod
    def start(self, rows: int, columns: int, salt: int = 0) -> Floats:
        """Return the first Q of a matrix, the same on all ranks that pass the same salt, from 0 to 2**64 - 1."""

    @staticmethod
    def orthogonalise(p: Floats) -> None:
        """Make the columns of `p` orthonormal, in place (modified Gram-Schmidt in float64).

        A column that depends on those before it becomes 0, as does a column of zeros: it adds nothing to the product. A
        NaN or an infinity makes its column NaN, and all columns after it.
        """
        _orthogonalise(p)

    @staticmethod
    def rebuild(p: Floats, q: Floats, out: Floats) -> None:
        """Overwrite `out`, a contiguous matrix of rows by columns, with P transpose(Q)."""
        _rebuild(p, q, out)


@dataclass(frozen=True)
class PowerSGD(LowRank):
    """The best approximation of a matrix by one of rank `rank`, found by one step of power iteration for each call.

    Use it with error feedback. Arrays with fewer than two axes, and those too small to gain anything, are sent as they
    are.
    """

    rank: int
    """Columns of the two thin matrices. With 4, a matrix of 1000 x 1000 becomes 125 times smaller."""
    seed: int = 0
    """The seed of the first Q. It must be the same on all ranks."""

    name: ClassVar[str] = "powersgd"

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or not 0 < self.rank <= LARGEST_RANK:
            raise ConfigError(f"powersgd: rank is {self.rank!r}; give an integer from 1 to {LARGEST_RANK}, like 4")
        check_seed(self.name, self.seed)

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return rows and columns of an array as a matrix, first axis by the others; None if it would gain nothing."""
        if len(shape) < 2:
            return None
        rows, columns = shape[0], math.prod(shape[1:])
        return None if self.rank * (rows + columns) >= rows * columns else (rows, columns)

    def start(self, rows: int, columns: int, salt: int = 0) -> Floats:
        """Return the first Q: `columns` rows of `rank` numbers with mean 0 and variance 1.

        The numbers are sums of four uniform ones, which is close to normal. numpy promises the same stream in all of
        its versions for the words of a bit generator, but not for its normal numbers.
        """
        words = np.random.Philox(key=self.seed | salt << 64).random_raw(columns * self.rank)
        quarters = words.astype("<u8").view("<u2").reshape(columns, self.rank, 4).sum(axis=2, dtype=np.int64)
        numbers: Floats = ((quarters - 2 * 0xFFFF) / (0x10000 / math.sqrt(3))).astype(np.float32)
        return numbers

    def __str__(self) -> str:
        return call_text(self.name, self)


@np.errstate(all="ignore")
def _orthogonalise(p: Floats) -> None:
    columns = p.T.astype(np.float64)  # rows of this array: the pairwise sum needs them contiguous
    lengths = np.sqrt((columns * columns).sum(axis=1))
    for i, column in enumerate(columns):
        length = np.sqrt((column * column).sum())
        if length <= _NEGLIGIBLE * lengths[i]:
            column[:] = 0.0
        else:
            column /= length
        rest = columns[i + 1 :]
        rest -= (rest * column).sum(axis=1)[:, None] * column
    p[:] = columns.T


@np.errstate(all="ignore")
def _rebuild(p: Floats, q: Floats, out: Floats) -> None:
    factors = np.ascontiguousarray(q.T)
    step = max(1, CHUNK // max(1, factors.shape[1]))
    for start in range(0, len(p), step):
        part, target = p[start : start + step], out[start : start + step]
        np.multiply(part[:, :1], factors[0], out=target)
        for i in range(1, len(factors)):
            target += part[:, i : i + 1] * factors[i]
