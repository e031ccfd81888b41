"""torch's tensors as operands: in place, staged in host memory, or cut into pieces that overlap copies and network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from covey.arrays.torch_devices import TENSORS, device_adapter_of, tensor_memory, writing_to
from covey.runtime.buffers import Operand, StagedOperand, writable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Array = Any

DEVICE_PIECE_BYTES: Final = 8 << 20
"""Larger tensors are cut into pieces of this size: while one is on the network, the next is copied from the device and
the last one back to it."""


class _LastOperand(Operand):
    """The last piece of a tensor that is not contiguous: storing it stores the whole tensor."""

    _piece: Operand
    _after: Callable[[], None]

    @classmethod
    def of(cls, piece: Operand, after: Callable[[], None]) -> _LastOperand:
        made = cls(piece.flat, piece.shape, piece.code)
        made._piece, made._after = piece, after
        return made

    @property
    def is_own(self) -> bool:
        return self._piece.is_own

    def load(self) -> Array:
        return self._piece.load()

    def store(self) -> None:
        self._piece.store()
        self._after()


def operand_of(tensor: torch.Tensor | Operand, *, is_read: bool = True) -> Array | Operand:
    """Return the operand for `tensor`: its own memory if that can be used in place."""
    if isinstance(tensor, Operand):
        return tensor
    if tensor.dtype in EIGHT_BITS:
        tensor = tensor.view(torch.uint8)
    if device_adapter_of(tensor) is None:
        return tensor_memory(tensor)
    return StagedOperand.of(tensor, TENSORS, is_read=is_read, is_ordered=False)  # `TorchWork` orders what follows


EIGHT_BITS: Final = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))
"""Dtypes that covey moves as bytes and cannot reduce."""


def blocks_of(whole: torch.Tensor, count: int) -> list[Operand]:
    """Return operands for equal shares of a contiguous tensor in host memory."""
    memory = writable(operand_of(whole))
    return [Operand(row, row.shape, memory.code) for row in memory.flat.reshape(count, memory.flat.size // count)]


def piece_length(tensors: Sequence[torch.Tensor]) -> int:
    """Return the number of elements in each piece of tensors of equal length; 0 if they are not cut.

    Ranks that call the same operation compute the same, whatever devices their tensors are on.
    """
    first = tensors[0]
    itemsize: int = first.element_size()
    if first.numel() * itemsize <= DEVICE_PIECE_BYTES or any(other.numel() != first.numel() for other in tensors):
        return 0
    return DEVICE_PIECE_BYTES // itemsize


def operands_of(
    tensor: torch.Tensor, length: int, *, is_read: bool = True, is_written: bool = True
) -> list[Array | Operand]:
    """Return the operands of the pieces of `length` elements that a tensor is cut into; 0 does not cut it."""
    if not length:
        return [operand_of(tensor, is_read=is_read)]
    whole = tensor.detach()
    if not tensor.is_contiguous():
        whole = whole.contiguous() if is_read else torch.empty_like(whole, memory_format=torch.contiguous_format)
    pieces = [operand_of(piece, is_read=is_read) for piece in whole.view(-1).split(length)]
    if is_written and not tensor.is_contiguous():
        last, target, writing = pieces[-1], tensor.detach(), writing_to(tensor)

        def deliver() -> None:
            with writing():
                target.copy_(whole)

        pieces[-1] = _LastOperand.of(last if isinstance(last, Operand) else writable(last), deliver)
    return pieces
