"""An array that an operation compresses and reduces; its parts have names, and residuals of their own.

Matrices may be reduced by two thin factors each (`reduce_by_factors`): PowerSGD.

    Vogels, Karimireddy, Jaggi, "PowerSGD: Practical low-rank gradient compression" (2019)

With M the mean of the ranks' matrices: P = M Q is summed at slot 0, made orthonormal there and sent to all; Q' = M^T P
is averaged by all; the result is P Q'^T. The ranks' own products with M may be rounded differently on different
processors; what must be equal on all ranks is made by slot 0 or element by element.
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from covey.base.arithmetic import reduction
from covey.base.numbers import Slot
from covey.compress.choice import Auto
from covey.compress.codec import Codec
from covey.compress.low_rank import PowerSGD
from covey.compress.sparse import Sparsifier
from covey.plan import choose
from covey.runtime.compressed import dense, sparse
from covey.runtime.compressed.automatic import Size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from covey.compress.feedback import ErrorFeedback, FeedbackStep
    from covey.compress.low_rank import LowRank
    from covey.compress.parsing import Compression
    from covey.runtime.buffers import Operand, Part
    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.compressed.automatic import Tuner

    Floats = NDArray[np.float32]


class Matrix(NamedTuple):
    """A matrix of a bucket."""

    x: Floats
    """Two-dimensional, a view of this rank's memory."""
    basis: Floats | None
    """Q' of the last operation, from which this one starts; None if there was none."""


def reduce_by_factors(attempt: Attempt, matrices: Sequence[Matrix], codec: PowerSGD, *, divides: bool) -> list[Floats]:
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


def plain_info(operand: Operand, size: int, reason: str = "") -> dict[str, Any]:
    """Return what `Work.info` says of an array that `size` ranks reduced as it is."""
    plain = operand.flat.nbytes * 2 * (size - 1) // size
    info: dict[str, Any] = {"codec": "none", "sent_bytes": plain, "plain_bytes": plain}
    return {**info, "reason": reason} if reason else info


def keep(attempt: Attempt, operand: Operand) -> None:
    """Save what an operand holds, so that another attempt starts with it."""
    if operand.is_own:
        attempt.keep(operand.flat)


class PlainSum:
    """An array that an operation of several reduces as it is; it has the methods of `CompressedSum`."""

    codec: Compression | None = None
    warmup: int | None = None
    is_compressed = False

    def __init__(self, operand: Operand, op: str) -> None:
        self.operand, self._op = operand, op
        self.work: NDArray[Any] = operand.flat
        self.info: dict[str, Any] = {}

    def load(self, attempt: Attempt) -> None:
        """Fill `work` with what the array contains now."""
        self.operand.load()
        keep(attempt, self.operand)

    def reduce(self, attempt: Attempt) -> None:
        """Replace `work` by the sum or mean over all ranks."""
        attempt.all_reduce(self.work, self._op)

    def deliver(self, result: Any) -> Any:
        """Write the sum to the array; return `result`, or a new array if the old one cannot be changed."""
        return self.operand.deliver(result)


class CompressedSum:
    """An array of floats that is reduced in place, in float32.

    `reduce` may run several times, if ranks are lost. Until `deliver`, nothing but the array changes, and the undo
    buffer restores that.
    """

    is_compressed = True

    def __init__(
        self,
        operand: Operand,
        parts: Sequence[Part],
        codec: Compression,
        tuner: Tuner,
        *,
        divides: bool,
        is_weighted: bool = False,
        feedback: ErrorFeedback | None = None,
        algorithm: str | None = None,
        why_plain: str = "",
    ) -> None:
        """`divides` for a mean; `is_weighted` if the caller scales `work`.

        `feedback` adds what earlier operations lost, and keeps what this one loses. `why_plain` says why all ranks send
        the array as it is, although there is a codec.
        """
        self.operand, self._parts = operand, parts
        self.codec = None if why_plain else codec
        """What it is sent with; None sends it as it is."""
        self._divides, self._algorithm, self._why_plain = divides, algorithm, why_plain
        self._feedback, self._tuner = feedback, tuner
        self.warmup = feedback.warmup or None if feedback is not None and not why_plain else None
        """How many steps are sent as they are at first; None for no warm-up."""
        self._is_in_place = operand.flat.dtype == np.float32
        self._is_weighted = is_weighted
        self._is_stored = self._is_in_place
        """Whether the result is in the array already."""
        self.work: Floats = operand.flat if self._is_in_place else np.empty(operand.flat.size, np.float32)
        """What is reduced: the array, or a copy of it in float32."""
        self.info: dict[str, Any] = {}
        """How the operation was done; see `Work.info`."""
        self._steps: list[FeedbackStep] = []
        self._residual: Floats | None = None
        self._selected: list[NDArray[Any]] = []
        """By part: the positions that a sparsifier chose."""
        self._bases: list[Floats] = []
        self._note_success: Callable[[], None] | None = None

    def load(self, attempt: Attempt) -> None:
        """Fill `work` with what the array contains now."""
        flat = self.operand.load()
        if not self._is_in_place:
            with np.errstate(over="ignore"):
                self.work[...] = flat
        else:
            keep(attempt, self.operand)

    def reduce(self, attempt: Attempt) -> None:
        """Replace `work` by the sum or mean over all ranks, compressed on the way."""
        self._residual, self._note_success, self._selected, self._bases = None, None, [], []
        self._is_stored = self._is_in_place
        if self._feedback is not None:
            is_sparse = isinstance(self.codec, Sparsifier)
            self._steps = [
                self._feedback.begin(part.name, self._of(self.work, part).reshape(part.shape), is_sparse=is_sparse)
                for part in self._parts
            ]
            for step, part in zip(self._steps, self._parts, strict=True):
                step.add_to(self._of(self.work, part))
        if attempt.size == 1:
            self._note(attempt, None, 0)
        elif self.codec is None or self._is_warming_up(attempt):
            self._reduce_with(attempt, None)
        elif isinstance(self.codec, Auto):
            perform = functools.partial(self._reduce_with, attempt)
            size = Size(self.work.size, self.operand.flat.itemsize)
            choice, self._note_success = self._tuner.reduce(attempt, self.codec, size, perform)
            self.info["reason"] = choice.reason
        else:
            self._reduce_with(attempt, self.codec)

    def deliver(self, result: Any) -> Any:
        """Do as `PlainSum.deliver`, and commit the residuals: the operation has succeeded."""
        if self._note_success is not None:
            self._note_success()
        if not self._is_stored:
            with np.errstate(over="ignore"):
                self.operand.flat[...] = self.work
        delivered = self.operand.deliver(result)
        if self._why_plain:
            self.info["reason"] = self._why_plain
        for number, (step, part) in enumerate(zip(self._steps, self._parts, strict=False)):
            step.commit(
                None if self._residual is None else self._of(self._residual, part),
                self._selected[number] if self._selected else None,
                self._bases[number] if self._bases else None,
            )
        return delivered

    def _is_warming_up(self, attempt: Attempt) -> bool:
        """Tell whether this step is sent uncompressed; ranks that joined later follow the others."""
        if self._feedback is None or not self._feedback.warmup:
            return False
        warmup = self._feedback.warmup
        counts = np.array([min(step.step, warmup) for step in self._steps], np.int64)
        attempt.all_reduce(counts, "max")
        for step, count in zip(self._steps, counts, strict=True):
            step.step = max(step.step, min(int(count), warmup))  # whatever a peer says, it stays a number of steps
        return bool(counts.min() < warmup)

    def _reduce_with(self, attempt: Attempt, codec: Codec | Sparsifier | LowRank | None) -> None:
        if codec is None:
            self._reduce_plain(attempt)
            sent = 0
        elif isinstance(codec, Codec):
            self._residual = np.zeros(self.work.size, np.float32) if self._steps and codec.is_lossy else None
            sent = dense.all_reduce(
                attempt, self.work, codec, divides=self._divides, algorithm=self._algorithm, residual=self._residual
            )
        elif isinstance(codec, Sparsifier):
            sent = self._reduce_selected(attempt, codec)
        else:
            assert isinstance(codec, PowerSGD)
            sent = self._reduce_matrices(attempt, codec)
        self._note(attempt, codec, sent)

    def _note(self, attempt: Attempt, codec: Compression | None, sent: int) -> None:
        self.info = plain_info(self.operand, attempt.size)
        if codec is not None:
            self.info |= {"codec": str(codec), "sent_bytes": sent}

    def _reduce_plain(self, attempt: Attempt) -> None:
        """Reduce the array in its own dtype, as without `compress`."""
        flat = self.operand.flat
        if not self._is_in_place:
            keep(attempt, self.operand)
            if self._steps or self._is_weighted:
                with np.errstate(all="ignore"):
                    flat[...] = self.work
                    self._residual = self.work - flat if self._steps else None
                self._selected = [np.empty(0, np.int64)] * len(self._steps)  # no element loses its momentum
            self._is_stored = True
        attempt.all_reduce(flat, "mean" if self._divides else "sum")

    def _reduce_selected(self, attempt: Attempt, codec: Sparsifier) -> int:
        salt = attempt.operation.sequence
        self._selected = [
            codec.select(self._of(self.work, part), salt + (number << 40)) for number, part in enumerate(self._parts)
        ]
        selected = np.concatenate(
            [chosen + np.int64(part.start) for chosen, part in zip(self._selected, self._parts, strict=True)]
        )
        if self._steps:
            self._residual = self.work.copy()
            self._residual[selected] = 0
        reduce = sparse.all_reduce_shared if codec.is_shared else sparse.all_reduce
        return reduce(attempt, self.work, selected, divides=self._divides)

    def _reduce_matrices(self, attempt: Attempt, codec: PowerSGD) -> int:
        matrices = []
        for number, part in enumerate(self._parts):
            shape = codec.shape_of(part.shape)
            assert shape is not None, "vectors and small matrices are not compressed"
            basis = self._steps[number].basis if self._steps else None
            matrices.append(Matrix(self._of(self.work, part).reshape(shape), basis))
        given = self.work.copy() if self._steps else None
        self._bases = reduce_by_factors(attempt, matrices, codec, divides=self._divides)
        if given is not None:
            with np.errstate(all="ignore"):
                given -= self.work if self._divides else self.work / np.float32(attempt.size)
            self._residual = given
        factors = sum(codec.rank * sum(matrix.x.shape) for matrix in matrices)
        return 4 * factors * 2 * (attempt.size - 1) // attempt.size

    @staticmethod
    def _of(row: Floats, part: Part) -> Floats:
        return row[part.start : part.stop]
