"""Tensors and handles in the arguments and results of calls with one node."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from covey.base.dtypes import BFLOAT16
from covey.runtime.buffers import as_array
from covey.runtime.calls.objects import Handle
from covey.wire.call_values import Reference

if TYPE_CHECKING:
    from covey.base.numbers import Seat
    from covey.runtime.calls.objects import ExportedObjects, HandleOwner
    from covey.wire.call_values import Array


class ValueConverter:
    """Converts what msgspec does not know, for calls with one peer."""

    def __init__(self, node: HandleOwner, seat: Seat, peer: Seat, exported: ExportedObjects) -> None:
        self._node, self._seat, self._peer, self._exported = node, seat, peer, exported

    def to_wire(self, value: Any) -> tuple[Array, bool] | Reference | None:
        """Return an array over a tensor's memory and True, or a reference; None if the value is neither."""
        if isinstance(value, Handle):
            if value._owner == self._seat:
                self._exported.hand_out(value._target, self._peer)
                return Reference(True, value._target, value._type_name)
            if value._owner == self._peer:
                return Reference(False, value._target, value._type_name)
            raise TypeError("a handle can be sent only by the node that exported the object, or back to that node")
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return as_array(value.detach()), True
        return None

    def tensor(self, array: Array) -> Any:
        """Return a tensor over the memory of an array; the array itself where torch is not loaded."""
        torch = sys.modules.get("torch")
        if torch is None:
            return array
        if array.dtype == BFLOAT16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def reference(self, reference: Reference) -> Any:
        """Return a handle of the peer's object, or the object of this node."""
        if reference.is_senders and self._peer != self._seat:
            return Handle(self._node, self._peer, reference.number, reference.type_name)
        value = self._exported.held(reference.number, self._peer)
        if reference.is_senders:  # this node called itself, and has counted a handle that does not come to be
            self._exported.drop(reference.number, self._seat)
        return value

    def as_type(self, wanted: Any, value: Any) -> Any:
        """Return a value as a type that msgspec does not know."""
        torch = sys.modules.get("torch")
        if wanted is np.ndarray and torch is not None and isinstance(value, torch.Tensor):
            return as_array(value)
        if torch is not None and wanted is torch.Tensor and isinstance(value, np.ndarray):
            return self.tensor(value)
        if isinstance(value, wanted if isinstance(wanted, type) else ()):
            return value
        raise NotImplementedError(f"expected {wanted}, got {type(value).__name__}")
