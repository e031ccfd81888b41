"""Find parameters that differ between ranks and should not: digests that ranks compare every few steps.

A digest is sent in the background, or with figures that are sent anyway, and compared one step later. So a comparison
costs one pass over the parameters, and no step waits for it.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from covey.base.errors import MismatchError
from covey.base.settings import SETTINGS
from covey.net.host.settings_files import effective_environment
from covey.runtime.tracebacks import is_debugging
from covey.torch.backend.below import gather_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

DRIFT_DIGEST_BYTES: Final = 6
DIGEST_FIGURES: Final = 2 * DRIFT_DIGEST_BYTES
"""Floats that hold a digest: half a byte each, plus 1, so that 0 is no digest and a float of any width is exact."""
_SLICE: Final = 1 << 16
"""Elements that one factor stands for."""


def digest(tensors: Iterable[torch.Tensor]) -> bytes:
    """Return a digest of the bits of some tensors."""
    found = hashlib.blake2b(digest_size=DRIFT_DIGEST_BYTES)
    for tensor in tensors:
        row = tensor.detach().contiguous().view(-1).view(torch.uint8)
        bits = row.view(torch.int32) if row.numel() % 4 == 0 else row
        factors = _factors(bits.device)
        for part in bits.split(_SLICE):
            # Each element has its own odd factor: a change of one element always changes the sum, modulo 2**64.
            found.update(int((part.long() * factors[: part.numel()]).sum()).to_bytes(8, "little", signed=True))
    return found.digest()


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    drawn = torch.randint(1 << 62, (_SLICE,), generator=torch.Generator().manual_seed(1), dtype=torch.int64)
    return (drawn * 2 + 1).to(device)


def to_figures(value: bytes) -> list[float]:
    """Return a digest as DIGEST_FIGURES small whole numbers, which stay exact in a sum with zeros."""
    return [1.0 + half for byte in value for half in divmod(byte, 16)]


def from_figures(figures: Sequence[float]) -> bytes:
    """Return the digest that `to_figures` wrote; b"" if a rank has sent none."""
    if not all(1 <= figure <= 16 for figure in figures):
        return b""
    halves = [int(figure) - 1 for figure in figures]
    return bytes(16 * high + low for high, low in zip(halves[::2], halves[1::2], strict=True))


def compare(digests: Mapping[int, bytes], what: str) -> None:
    """Raise MismatchError if ranks sent different digests of `what`; those without one do not count."""
    by_digest: dict[bytes, list[int]] = {}
    for rank, value in digests.items():
        if value:
            by_digest.setdefault(value, []).append(rank)
    if len(by_digest) < 2:
        return
    said = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} {'have' if len(ranks) > 1 else 'has'} "
        f"digest {value.hex()}"
        for value, ranks in sorted(by_digest.items(), key=lambda item: (-len(item[1]), item[1]))
    )
    raise MismatchError(
        f"{what} differ between ranks that should hold the same: {said}. Start again from a checkpoint, and look for "
        "what a rank does alone: a random number, a buffer, other code. COVEY_CHECK_EVERY=0 switches this check off"
    )


class DriftCheck:
    """Compares tensors that all ranks of a process group should hold alike, every few steps."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._pending: dict[str, tuple[Any, torch.Tensor, str]] = {}
        """By name of the tensors: the exchange of digests that has begun, its rows, and what they are of."""

    def look(
        self, name: str, tensors: Sequence[torch.Tensor], group: Any, gradients: torch.Tensor | None = None
    ) -> None:
        """Note that all ranks hold these tensors after the same step; now and then compare what they hold.

        Every rank calls it equally often for each name. A difference is found in the next comparison. Tensors whose
        `gradients` are only zeros on this rank do not count.

        Raises:
            MismatchError: the tensors differed at the last comparison; names the ranks.
        """
        every = _agreed(group)
        if not every:
            return
        call = self._calls[name]
        self._calls[name] += 1
        if call % every:
            return
        self.finish(name)
        counts = gradients is None or bool(gradients.any())
        own = bytearray(digest(tensors) if counts else DRIFT_DIGEST_BYTES)
        row = torch.frombuffer(own, dtype=torch.uint8).to(tensors[0].device)
        rows, work = gather_rows(row, group)
        self._pending[name] = work, rows, f"{name} of step {call}"

    def finish(self, name: str) -> None:
        """Wait for the last comparison under a name, and raise what it found."""
        if (begun := self._pending.pop(name, None)) is not None:
            work, rows, what = begun
            work.wait()
            compare({rank: bytes(row.tolist()) if row.any() else b"" for rank, row in enumerate(rows.cpu())}, what)


def _agreed(group: Any) -> int:
    """Return every how many steps the ranks of a process group compare; what they agreed on, if it is covey's."""
    agreed: int | None = getattr(group or dist.group.WORLD, "check_every", None)
    return _of_environment() if agreed is None else agreed


@functools.cache
def _of_environment() -> int:
    setting = SETTINGS["check_every"]
    told = effective_environment().get(setting.variable)
    return int(is_debugging()) if told is None else int(setting.kind.read(setting.variable, told))
