"""Exported objects, whose methods other nodes may call through handles, and the values that calls convert.

An object is exported until its owner has dropped its own handle, and every node that got one has dropped it or left
(`proto.references` counts them).
"""

from __future__ import annotations

import inspect
import secrets
import sys
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from covey.base.arithmetic import BFLOAT16
from covey.base.errors import CallRefusedError
from covey.base.numbers import Seat
from covey.proto.references import ReferenceCounts
from covey.runtime import loop as control
from covey.runtime.buffers import as_array
from covey.runtime.calls.functions import CallableFunction, callable_function
from covey.runtime.pool import Bytes, pool
from covey.wire.call_values import Reference
from covey.wire.calls import OBJECT_KEY_BYTES, PassedHandle, ReferenceClaim, ReferenceMessage, ReferenceRelease

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.runtime.calls.work import CallWork
    from covey.wire.call_values import Array


class HandleOwner(Protocol):
    """What handles need of the calls of their node."""

    def call_object(
        self, owner: Seat, target: int, method: str, args: tuple[Any, ...], named: dict[str, Any], timeout: float | None
    ) -> CallWork[Any]:
        """Call a method of an exported object."""

    def drop_handle(self, owner: Seat, target: int, key: bytes) -> None:
        """Note that a handle is gone. On the control loop."""


class Handle:
    """Stands for an object that some node has exported with `node.export`; its methods run on that node.

    `handle.method(1, 2)` calls a method and returns its result; `handle.call("method", 1, 2, timeout=5)` does so with a
    timeout, and `handle.call_async` returns at once. Names with a leading underscore cannot be called, except that
    `handle(...)` calls the object itself. A handle may be an argument or a result of calls between any nodes; on its
    owner it becomes the object. It is given back when it is no longer used.
    """

    def __init__(self, node: HandleOwner, owner: Seat, target: int, type_name: str, key: bytes = b"") -> None:
        """`key` is that of the object; without it, the handle cannot be passed to third nodes."""
        self._node, self._owner, self._target, self._type_name, self._key = node, owner, target, type_name, key
        self._dropped = weakref.finalize(self, control.soon, node.drop_handle, owner, target, key)
        self._dropped.atexit = False

    def call(self, method: str, /, *args: Any, timeout: float | None = None, **named: Any) -> Any:
        """Call a method and return its result; see `Node.call` for the errors."""
        return self.call_async(method, *args, timeout=timeout, **named).wait_or_cancel()

    def call_async(self, method: str, /, *args: Any, timeout: float | None = None, **named: Any) -> CallWork[Any]:
        """Start to call a method; the result can be awaited."""
        if not self._dropped.alive:
            raise CallRefusedError("this handle was released; its object cannot be called through it any more")
        return self._node.call_object(self._owner, self._target, method, args, named, timeout)

    def release(self) -> None:
        """Give the object back now. The handle cannot be used any more."""
        self._dropped()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **named: self.call(name, *args, **named)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Call the object itself."""
        return self.call("__call__", *args, **named)

    def __repr__(self) -> str:
        return f"<Handle of {self._type_name} {self._target}>"


_MISSING: Final = object()


class _Exported:
    """An object, and its methods that were called."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.methods: dict[str, CallableFunction] = {}


class ExportedObjects:
    """The objects that this node has exported. Any thread may call any method."""

    def __init__(self, seat: Seat, may_be_node: Callable[[int], bool]) -> None:
        """`may_be_node` tells whether a seat is that of a node of the run, also of one that is not known here yet."""
        self._seat = seat
        self._lock = threading.Lock()
        self._counts = ReferenceCounts(seat, may_be_node)
        self._objects: dict[int, _Exported] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def export(self, value: Any) -> tuple[int, bytes]:
        """Keep an object for the handle that this node makes; return its number and its key."""
        key = secrets.token_bytes(OBJECT_KEY_BYTES)
        with self._lock:
            number = self._counts.export(key)
            self._objects[number] = _Exported(value)
            return number, key

    def hand_out(self, target: int, peer: Seat) -> None:
        """Note that a node gets one more handle; CallRefusedError if the object was released."""
        with self._lock:
            if not self._counts.give(target, peer):
                raise CallRefusedError("the object of this handle was released; export it again")

    def take_back(self, target: int, peer: Seat) -> list[Any]:
        """Note that a node does not get a handle that was handed out; return the object if that is free now."""
        with self._lock:
            return self._freed(self._counts.dropped(target, peer) if self._counts.holds(target, peer) else [])

    def took_back(self, target: int, giver: Seat, key: bytes) -> bool:
        """Note that a node gave this one a handle of its own object; False if that was released, or not held."""
        with self._lock:
            return self._counts.key(target) == key and self._counts.returned(target, giver)

    def held(self, target: int, peer: Seat) -> Any:
        """Return an object that a node holds a handle of; CallRefusedError if it holds none."""
        with self._lock:
            return self._exported(target, peer).value

    def known_method(self, target: int, name: str, peer: Seat) -> CallableFunction | None:
        """Return a method that `find_method` has found before, for a node that holds a handle; runs no other code.

        Raises:
            CallRefusedError: it holds none.
        """
        with self._lock:
            return self._exported(target, peer).methods.get(name)

    def find_method(self, target: int, name: str, peer: Seat) -> CallableFunction:
        """Return the method of an object, for a node that holds a handle of it.

        A property is no method, and is not asked for its value. What else binds a name, such as `__getattr__` or a
        descriptor, and the annotations of the method, are code of the program: call this on a handler thread only.

        Raises:
            CallRefusedError: it holds none, or there is no such public method.
            ConfigError: its annotations cannot be used.
        """
        with self._lock:
            exported = self._exported(target, peer)
        value, method, is_attribute = exported.value, None, False
        if name == "__call__" or not name.startswith("_"):
            bound = inspect.getattr_static(value, name, _MISSING)
            is_attribute = bound is not _MISSING
            if isinstance(bound, types.MemberDescriptorType) or not inspect.isdatadescriptor(bound):
                method = getattr(value, name, None)
        if not callable(method):
            raise CallRefusedError(f"a {type(value).__qualname__} has no public method {name!r}")
        found = callable_function(name, method)
        if is_attribute:  # names that `__getattr__` answers are without end
            exported.methods[name] = found
        return found

    def _exported(self, target: int, peer: Seat) -> _Exported:
        if not self._counts.holds(target, peer):
            raise CallRefusedError(
                f"object {target} is not exported to this node, or was released (also if a lost node passed it on)"
            )
        return self._objects[target]

    def count(self, peer: Seat, message: ReferenceMessage) -> list[Any]:
        """Count what a node says of handles, and return the objects that no handle is left of.

        The caller lets go of them where their destructors may run.

        Raises:
            RemoteProtocolError: no correct node says so.
        """
        with self._lock:
            if isinstance(message, ReferenceRelease):
                return self._freed(self._counts.dropped(message.target, peer, message.references, message.key))
            if isinstance(message, ReferenceClaim):
                self._counts.claimed(message.target, message.giver, peer, message.key)
            elif message.is_withdrawn:
                return self._freed(self._counts.withdrawn(message.target, peer, message.taker))
            else:
                self._counts.shared(message.target, peer, message.taker)
            return []

    def drop(self, target: int, peer: Seat) -> list[Any]:
        """Note that a node has dropped a handle; as `count`."""
        with self._lock:
            return self._freed(self._counts.dropped(target, peer))

    def lost(self, peer: Seat) -> list[Any]:
        """Drop all handles of a node that is gone; return the objects that have no handle any more, as `count` does."""
        with self._lock:
            return self._freed(self._counts.lost(peer))

    def clear(self) -> list[Any]:
        """Drop all objects, and return them, as `count` does."""
        with self._lock:
            objects, self._objects = self._objects, {}
            self._counts.clear()
        return list(objects.values())

    def _freed(self, targets: list[int]) -> list[Any]:
        return [self._objects.pop(target) for target in targets]


class TensorConverter:
    """Converts what msgspec does not know, where there are no handles: tensors."""

    def to_wire(self, value: Any) -> tuple[Array, bool] | Reference | None:
        """Return an array over a tensor's memory and True; None if the value is no tensor."""
        if isinstance(value, Handle):
            raise TypeError("a handle can be sent only in calls between its owner and its holder")
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return as_array(value.detach()), True
        return None

    def memory(self, nbytes: int) -> Bytes:
        """Return memory for a copy that is sent."""
        return pool.take(nbytes)

    def tensor(self, array: Array) -> Any:
        """Return a tensor over the memory of an array; the array itself where torch is not loaded."""
        torch = sys.modules.get("torch")
        if torch is None:
            return array
        if array.dtype == BFLOAT16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def reference(self, reference: Reference) -> Any:
        """Raise CallRefusedError."""
        raise CallRefusedError("a handle is of no use here")

    def listed(self, position: int, type_name: str) -> Any:
        """Raise CallRefusedError."""
        raise CallRefusedError("a handle is of no use here")

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


class ValueConverter(TensorConverter):
    """Converts tensors and handles, for calls with one peer."""

    def __init__(
        self,
        node: HandleOwner,
        seat: Seat,
        peer: Seat,
        exported: ExportedObjects,
        lists_handles: Callable[[], bool],
        handles: Sequence[Handle | None] = (),
    ) -> None:
        """`lists_handles` tells whether all nodes of the run know lists of handles; `handles` are those of a payload.

        None among them is a handle of an object that was released.
        """
        self._node, self._seat, self._peer, self._exported = node, seat, peer, exported
        self._lists_handles, self._handles = lists_handles, handles

    def over(self, handles: Sequence[Handle | None]) -> ValueConverter:
        """Return a converter for the value of a payload that lists these handles."""
        return ValueConverter(self._node, self._seat, self._peer, self._exported, self._lists_handles, handles)

    def to_wire(self, value: Any) -> tuple[Array, bool] | Reference | None:
        """Return an array over a tensor's memory and True, or a reference; None if the value is neither."""
        if not isinstance(value, Handle):
            return super().to_wire(value)
        if not value._dropped.alive:
            raise CallRefusedError("this handle was released; its object cannot be called through it any more")
        if value._key and self._lists_handles():
            listed = PassedHandle(value._owner, value._target, value._key)
            return Reference(False, value._target, value._type_name, listed)
        if value._owner == self._seat:
            self._exported.hand_out(value._target, self._peer)
            return Reference(True, value._target, value._type_name)
        if value._owner == self._peer:
            return Reference(False, value._target, value._type_name)
        raise TypeError(
            "a handle can be sent only by the node that exported the object, or back to that node, while a node of "
            "this run does not know more: update covey on all machines"
        )

    def reference(self, reference: Reference) -> Any:
        """Return a handle of the peer's object, or the object of this node."""
        if reference.is_senders and self._peer != self._seat:
            return Handle(self._node, self._peer, reference.number, reference.type_name)
        value = self._exported.held(reference.number, self._peer)
        if reference.is_senders:  # this node called itself, and has counted a handle that does not come to be
            self._exported.drop(reference.number, self._seat)
        return value

    def listed(self, position: int, type_name: str) -> Any:
        """Return a handle that was passed on, or the object of this node."""
        handle = self._handles[position]
        if handle is None:
            raise CallRefusedError("the object of a handle was released, or its node is not in this run any more")
        if handle._owner == self._seat:
            return self._exported.held(handle._target, self._seat)
        handle._type_name = type_name
        return handle


class Converters(dict[Seat, ValueConverter]):
    """By peer: what converts values of calls with it, made on first use."""

    def __init__(
        self, owner: HandleOwner, seat: Seat, exported: ExportedObjects, lists_handles: Callable[[], bool]
    ) -> None:
        self._owner, self._seat, self._exported, self._lists_handles = owner, seat, exported, lists_handles

    def __missing__(self, peer: Seat) -> ValueConverter:
        converter = ValueConverter(self._owner, self._seat, peer, self._exported, self._lists_handles)
        self[peer] = converter
        return converter
