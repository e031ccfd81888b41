"""Tensors on devices, staged in host memory. Copies run beside the device's own work and do not wait for it."""

from __future__ import annotations

import functools
import threading
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from covey.runtime.buffers import Operand, tensor_memory, writable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    Array = Any

DEVICE_PIECE_BYTES: Final = 8 << 20
"""Larger tensors are cut into pieces of this size: while one is on the network, the next is copied from the device and
the last one back to it."""


class DeviceAdapter(Protocol):
    """Copies tensors between one kind of device and host memory."""

    def room(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return host memory for the elements of `tensor`, flat."""

    def fetch(self, tensor: torch.Tensor, room: torch.Tensor) -> Callable[[], None]:
        """Start to copy `tensor` after the work queued on the caller's stream; return a function that waits for it."""

    def mark(self, device: torch.device) -> Any:
        """Return a mark after the work queued on the caller's stream so far."""

    def writing(self, device: torch.device, mark: Any) -> AbstractContextManager[None]:
        """Return a context whose device work runs as that of `put`, after the mark: memory is in use until then."""

    def put(self, room: torch.Tensor, tensor: torch.Tensor, mark: Any) -> None:
        """Start to copy `room` back into `tensor`, after the mark."""

    def order(self, device: torch.device) -> None:
        """Make the caller's stream wait for everything that was put so far. The calling thread does not wait."""

    def settle(self, device: torch.device) -> None:
        """Wait until everything that was put so far has arrived."""


class _Streams(NamedTuple):
    """The two streams of one device: for copies from it, and for copies to it."""

    leaving: Any
    coming: Any


class StreamAdapter:
    """An adapter for devices with streams: copies use two streams of their own, and pinned memory from torch's pool."""

    def __init__(self, kind: str) -> None:
        """`kind` is the type of the device: "cuda" (also AMD's), "xpu"."""
        self._module: Any = torch.get_device_module(kind)
        self._lock = threading.Lock()
        self._streams: dict[int, _Streams] = {}

    def room(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu", pin_memory=True)

    def fetch(self, tensor: torch.Tensor, room: torch.Tensor) -> Callable[[], None]:
        leaving = self._of(tensor.device).leaving
        leaving.wait_stream(self._module.current_stream(tensor.device))
        with self._module.stream(leaving):
            room.view(tensor.shape).copy_(tensor, non_blocking=True)
            copied = leaving.record_event()
        tensor.record_stream(leaving)
        wait: Callable[[], None] = copied.synchronize
        return wait

    def mark(self, device: torch.device) -> Any:
        return self._module.current_stream(device).record_event()

    @contextmanager
    def writing(self, device: torch.device, mark: Any) -> Iterator[None]:
        coming = self._of(device).coming
        coming.wait_event(mark)
        with self._module.stream(coming):
            yield

    def put(self, room: torch.Tensor, tensor: torch.Tensor, mark: Any) -> None:
        with self.writing(tensor.device, mark):
            tensor.copy_(room.view(tensor.shape), non_blocking=True)
        tensor.record_stream(self._of(tensor.device).coming)

    def order(self, device: torch.device) -> None:
        self._module.current_stream(device).wait_stream(self._of(device).coming)

    def settle(self, device: torch.device) -> None:
        self._of(device).coming.record_event().synchronize()

    def _of(self, device: torch.device) -> _Streams:
        index = self._module.current_device() if device.index is None else device.index
        with self._lock:
            if index not in self._streams:
                self._streams[index] = _Streams(self._module.Stream(index), self._module.Stream(index))
            return self._streams[index]


class BlockingAdapter:
    """An adapter for devices without streams, such as Apple's GPUs: a copy waits for the work queued before it."""

    def room(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")

    def fetch(self, tensor: torch.Tensor, room: torch.Tensor) -> Callable[[], None]:
        room.view(tensor.shape).copy_(tensor)
        return lambda: None

    def mark(self, device: torch.device) -> Any:
        return None

    def writing(self, device: torch.device, mark: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def put(self, room: torch.Tensor, tensor: torch.Tensor, mark: Any) -> None:
        tensor.copy_(room.view(tensor.shape))

    def order(self, device: torch.device) -> None:
        """Do nothing: no copy is pending."""

    def settle(self, device: torch.device) -> None:
        """Do nothing: no copy is pending."""


STREAMED: Final = ("cuda", "xpu")
BLOCKING: Final = ("mps",)
DEVICE_KINDS: Final = ("cpu", *STREAMED, *BLOCKING)
"""The types of devices whose tensors covey accepts."""

_adapters: dict[str, DeviceAdapter | None] = {"cpu": None}


def adapter_of(tensor: torch.Tensor) -> DeviceAdapter | None:
    """Return the adapter of the tensor's device; None for host memory, which is used in place.

    Raises:
        TypeError: covey does not support this type of device.
    """
    if tensor.is_cpu:
        return _adapters["cpu"]
    kind = tensor.device.type
    try:
        return _adapters[kind]
    except KeyError:
        if kind not in DEVICE_KINDS:
            raise TypeError(
                f"covey does not support tensors on {tensor.device}, only on {', '.join(DEVICE_KINDS)}; "
                "move it there first"
            ) from None
    adapter = StreamAdapter(kind) if kind in STREAMED else BlockingAdapter()
    return _adapters.setdefault(kind, adapter)


def writing_to(tensor: torch.Tensor) -> Callable[[], AbstractContextManager[None]]:
    """Return what makes the context in which `tensor` may be written, after the work queued on the caller's stream."""
    adapter = adapter_of(tensor)
    if adapter is None:
        return nullcontext
    return functools.partial(adapter.writing, tensor.device, adapter.mark(tensor.device))


def any_here() -> bool:
    """Tell whether this process has a device with memory of its own."""
    if _adapters["cpu"] is not None:
        return True
    return any(torch.get_device_module(kind).is_available() for kind in DEVICE_KINDS if kind != "cpu")


class StagedOperand(Operand):
    """A tensor on a device as an operand: `flat` is host memory that holds a copy of it."""

    _tensor: torch.Tensor
    _room: torch.Tensor
    _adapter: DeviceAdapter
    _mark: Any
    _is_read: bool
    _arrival: Callable[[], None] | None

    @classmethod
    def of(cls, tensor: torch.Tensor, adapter: DeviceAdapter, *, is_read: bool) -> StagedOperand:
        """Return an operand for `tensor`; if it `is_read`, start to copy it to host memory."""
        source = tensor.detach()
        room = adapter.room(source)
        memory = writable(room)
        made = cls(memory.flat, tuple(source.shape), memory.code)
        made._tensor, made._room, made._adapter, made._is_read = source, room, adapter, is_read
        made._mark = adapter.mark(source.device)
        made._arrival = adapter.fetch(source, room) if is_read else None
        return made

    @property
    def is_own(self) -> bool:
        return False

    def load(self) -> Array:
        """Wait for the copy of the tensor, and return `flat`; a later call copies the tensor again."""
        if self._is_read:
            arrival, self._arrival = self._arrival, None
            if arrival is None:
                arrival = self._adapter.fetch(self._tensor, self._room)
            arrival()
        return self.flat

    def store(self) -> None:
        """Start to copy `flat` back to the tensor."""
        self._adapter.put(self._room, self._tensor, self._mark)


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
    adapter = adapter_of(tensor)
    return tensor_memory(tensor) if adapter is None else StagedOperand.of(tensor, adapter, is_read=is_read)


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


def tensor_over(array: Array) -> torch.Tensor:
    """Return a tensor that shares the memory of an array. numpy's bfloat16 needs a cast to become torch's."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def order(tensors: Sequence[torch.Tensor]) -> None:
    """Make the caller's streams wait until the tensors are filled. The calling thread does not wait."""
    for tensor, adapter in _one_per_device(tensors):
        adapter.order(tensor.device)


def settle(tensors: Sequence[torch.Tensor]) -> None:
    """Return once the tensors are filled."""
    for tensor, adapter in _one_per_device(tensors):
        adapter.settle(tensor.device)


def _one_per_device(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, DeviceAdapter]]:
    found = {}
    for tensor in tensors:
        if tensor.is_cpu and _adapters["cpu"] is None:
            continue
        if (adapter := adapter_of(tensor)) is not None:
            found[tensor.device] = tensor, adapter
    return list(found.values())
