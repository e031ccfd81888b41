"""What a rank encodes and decodes while a coded plan runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from covey.compress.codec import encode_with_residual

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from covey.compress.codec import Codec
    from covey.plan.coded import CodedPlan

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
