"""Collectives with a `Codec`: every transfer is encoded, each hop of a reduction decodes, adds and encodes again.

`PlanCoder` is what the executor calls at the moves of a coded plan.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from covey.compress.codec import encode_with_residual
from covey.plan import choose, direct, ring
from covey.plan.coded import PLAIN_RING, CodedArray, CodedPlan, coded, coded_plan_of, fit_coded, predicted
from covey.plan.cost import CodecPace
from covey.plan.moves import elements_sent
from covey.runtime.collectives.planner import planner_of
from covey.runtime.collectives.size_class import size_class
from covey.runtime.compressed.automatic import codec_speed

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from covey.base.numbers import Slot
    from covey.compress.codec import Codec
    from covey.plan.coded import CodedPlan
    from covey.plan.fit import Candidate, Fitted
    from covey.plan.moves import Plan
    from covey.plan.network import Network
    from covey.runtime.collectives.attempt import Attempt

    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]

SALT_MASK: Final = (1 << 64) - 1


class PlanCoder:
    """Encodes and decodes the ranges of one coded plan; see `executor.Coder`."""

    def __init__(
        self,
        coded: CodedPlan,
        codec: Codec,
        arrays: Sequence[Floats],
        wires: Sequence[Bytes],
        *,
        salt: int,
        contributors: int | None = None,
        residual: Floats | None = None,
    ) -> None:
        """`arrays` and `wires` are by buffer of the plan; `contributors` is the divisor of a mean, None for a sum.

        What encoding loses is written to `residual`, which is as long as the first array, in the unit of the inputs.
        """
        self._encodes, self._decodes = coded.encodes, coded.decodes
        self.encodes = [task is not None for task in coded.encodes]
        self.decodes = [True] * len(coded.decodes)
        self._codec, self._arrays, self._wires = codec, arrays, wires
        self._salt, self._contributors, self._residual = salt, contributors, residual

    def encode(self, send: int) -> None:
        task = self._encodes[send]
        assert task is not None
        x, wire = self._arrays[task.buffer][task.start : task.stop], self._wires[task.buffer][task.begin : task.end]
        salt = (self._salt + task.start) & SALT_MASK
        if self._residual is None:
            self._codec.encode(x, wire, salt)
        else:
            lost = self._residual[task.start : task.stop]
            encode_with_residual(self._codec, x, wire, lost, salt)
            if task.settles and self._contributors is not None:
                lost *= np.float32(self._contributors)
        if task.settles:
            self._codec.decode(wire, x)

    def decode(self, recv: int) -> None:
        task = self._decodes[recv]
        x, wire = self._arrays[task.buffer][task.start : task.stop], self._wires[task.buffer][task.begin : task.end]
        if not task.adds:
            self._codec.decode(wire, x)
            return
        self._codec.decode_add(wire, x)
        if task.is_final and self._contributors is not None:
            with np.errstate(all="ignore"):
                np.divide(x, np.float32(self._contributors), out=x)


def salt_of(sequence: int, rank: int) -> int:
    """Return the salt of a rank's random rounding in one operation; `PlanCoder` adds the position of each range."""
    return (sequence * 0x9E3779B97F4A7C15 + rank * 0xD1B54A32D192ED03) & SALT_MASK


SEGMENT_BYTES: Final = 256 << 10
"""Encoded bytes of one transfer: while it travels, the next one is encoded."""
CACHED_PLANS: Final = 256
ALL_REDUCE: Final = ("direct", "ring")
UNKNOWN_SPEED: Final = 1e9
"""Bytes of float32 per second that are assumed if what a rank says is not a speed."""


def all_reduce(
    attempt: Attempt, x: Floats, codec: Codec, *, divides: bool, algorithm: str | None, residual: Floats | None
) -> int:
    """Sum `x` of all ranks, or average if it `divides`, in place; return how many bytes this rank has sent.

    What this rank's encoding loses is in `residual`.
    Added to this rank's next input, the residuals of all ranks make up for the whole error of this result.
    """
    wire = np.empty(codec.wire_bytes(x.size), np.uint8)
    contributors = attempt.size if divides else None
    sent = 0

    def perform(fitted: Fitted | None) -> None:
        nonlocal sent
        if fitted is None:
            plan = _all_reduce_plan(attempt.slot, attempt.size, x.size, codec, attempt.lane_family, algorithm)
        else:
            plan = _fitted_plan(fitted, attempt.slot, attempt.size, x.size, codec, attempt.sizes)
        coder = PlanCoder(plan, codec, [x], [wire], salt=_salt(attempt), contributors=contributors, residual=residual)
        attempt.execute(plan.plan, [wire], coder=coder)
        sent = elements_sent(plan.plan)  # which are bytes

    planner = planner_of(attempt) if wire.nbytes >= choose.PLANNED_BYTES and algorithm is None else None
    if planner is None:
        perform(None)
    else:
        planner.reduce(attempt, CodedSums(x.size, codec), perform)
    return sent


def reduce_scatter(attempt: Attempt, parts: list[Floats], codec: Codec, *, divides: bool) -> Floats:
    """Return the sum, or the mean, of this slot's part over all slots; `parts` are by slot and do not change."""
    result = parts[attempt.slot].copy()
    arrays = [*parts, result]
    lengths = tuple(part.size for part in parts)
    plan = _reduce_scatter_plan(attempt.slot, lengths, codec)
    wires = [np.empty(codec.wire_bytes(array.size), np.uint8) for array in arrays]
    contributors = attempt.size if divides else None
    coder = PlanCoder(plan, codec, arrays, wires, salt=_salt(attempt), contributors=contributors)
    attempt.execute(plan.plan, wires, coder=coder)
    return result


def broadcast(attempt: Attempt, x: Floats, root: Slot, codec: Codec, algorithm: str | None) -> None:
    """Overwrite `x` of every rank, the root's as well, with the decoded `x` of the slot `root`."""
    plan = _broadcast_plan(attempt.slot, attempt.size, root, x.size, codec, algorithm, attempt.sizes)
    wire = np.empty(codec.wire_bytes(x.size), np.uint8)
    attempt.execute(plan.plan, [wire], coder=PlanCoder(plan, codec, [x], [wire], salt=_salt(attempt)))


def all_gather(attempt: Attempt, blocks: list[Floats], codec: Codec, algorithm: str | None) -> None:
    """Overwrite each slot's block with what that slot had there, decoded; all slots get the same bits."""
    plan = _all_gather_plan(attempt.slot, tuple(block.size for block in blocks), codec, attempt.lane_family, algorithm)
    wires = [np.empty(codec.wire_bytes(block.size), np.uint8) for block in blocks]
    attempt.execute(plan.plan, wires, coder=PlanCoder(plan, codec, blocks, wires, salt=_salt(attempt)))


def check_algorithm(algorithm: str | None) -> None:
    """Raise ConfigError if a compressed all_reduce has no such algorithm."""
    if algorithm not in (None, *ALL_REDUCE):
        raise choose.unknown("a compressed all_reduce", algorithm, ALL_REDUCE)


class CodedSums(NamedTuple):
    """Sums of arrays that travel encoded; see `collectives.size_class`."""

    elements: int
    codec: Codec

    @property
    def key(self) -> Hashable:
        return size_class(self.nbytes), self.codec

    @property
    def nbytes(self) -> int:
        return self.codec.wire_bytes(self.elements)

    def ranked(self, attempt: Attempt, network: Network) -> tuple[Candidate, ...]:
        return fit_coded(network, self._array(), self._pace(attempt), attempt.sizes)

    def is_plain(self, attempt: Attempt, fitted: Fitted) -> bool:
        return fitted[:3] == PLAIN_RING[:3] and attempt.size > 2

    def predicted(self, attempt: Attempt, fitted: Fitted, network: Network) -> float:
        return predicted(fitted, network, self._array(), attempt.prepared[self.codec, "pace"], attempt.sizes)

    def plan(self, attempt: Attempt, fitted: Fitted | None, slot: int) -> Plan:
        return coded_plan_of(fitted or PLAIN_RING, slot, attempt.size, self._array(), attempt.sizes)

    def _array(self) -> CodedArray:
        return coded_array(self.elements, self.codec)

    def _pace(self, attempt: Attempt) -> CodecPace:
        """Return the pace of the slowest rank; all ranks exchange theirs, once an attempt."""
        known: CodecPace | None = attempt.prepared.get((self.codec, "pace"))
        if known is None:
            figures = np.array(codec_speed(self.codec), np.float64)
            attempt.all_reduce(figures, "min")
            slowest = [float(each) if np.isfinite(each) and each > 0 else UNKNOWN_SPEED for each in figures]
            known = CodecPace(*(4 * self.codec.unit / speed for speed in slowest))
            attempt.prepared[self.codec, "pace"] = known
        return known


def coded_array(count: int, codec: Codec) -> CodedArray:
    """Return an array of so many elements as plans for a codec see it."""
    return CodedArray(_units(count, codec), max(1, codec.wire_bytes(codec.unit)), _segment(codec))


@lru_cache(CACHED_PLANS)
def _fitted_plan(fitted: Fitted, rank: int, size: int, count: int, codec: Codec, sizes: choose.PlanSizes) -> CodedPlan:
    plan = coded_plan_of(fitted, rank, size, coded_array(count, codec), sizes)
    return coded(plan, (count,), codec.unit, codec.wire_bytes, is_copy=False)


@lru_cache(CACHED_PLANS)
def _all_reduce_plan(rank: int, size: int, count: int, codec: Codec, lanes: str, algorithm: str | None) -> CodedPlan:
    check_algorithm(algorithm)
    algorithm = algorithm or ("direct" if size == 2 or lanes == "ring" else "ring")
    build = direct.owner_reduce if algorithm == "direct" else ring.all_reduce
    plan = build(rank, size, _units(count, codec), _segment(codec))
    return coded(plan, (count,), codec.unit, codec.wire_bytes, is_copy=False)


@lru_cache(CACHED_PLANS)
def _reduce_scatter_plan(rank: int, counts: tuple[int, ...], codec: Codec) -> CodedPlan:
    plan = direct.reduce_scatter(rank, [_units(count, codec) for count in counts], _segment(codec))
    return coded(plan, (*counts, counts[rank]), codec.unit, codec.wire_bytes, is_copy=False)


@lru_cache(CACHED_PLANS)
def _broadcast_plan(
    rank: int, size: int, root: int, count: int, codec: Codec, algorithm: str | None, sizes: choose.PlanSizes
) -> CodedPlan:
    # The size of a unit as it travels, so that the choice of a plan knows how many bytes there are.
    plan = choose.broadcast(rank, size, root, _units(count, codec), codec.wire_bytes(codec.unit), algorithm, sizes)
    return coded(plan, (count,), codec.unit, codec.wire_bytes, is_copy=True)


@lru_cache(CACHED_PLANS)
def _all_gather_plan(rank: int, lengths: tuple[int, ...], codec: Codec, lanes: str, algorithm: str | None) -> CodedPlan:
    plan = choose.all_gather(rank, tuple(_units(length, codec) for length in lengths), lanes, algorithm)
    return coded(plan, lengths, codec.unit, codec.wire_bytes, is_copy=True)


def _units(count: int, codec: Codec) -> int:
    return -(-count // codec.unit)


def _segment(codec: Codec) -> int:
    """Return how many units one transfer has."""
    return max(1, SEGMENT_BYTES // max(1, codec.wire_bytes(codec.unit)))


def _salt(attempt: Attempt) -> int:
    return salt_of(attempt.operation.sequence, attempt.roster.rank)
