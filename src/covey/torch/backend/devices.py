"""Tensors on devices, seen through host memory: copies run beside the device's own work, which nobody waits for."""

from __future__ import annotations

import functools
import threading
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from covey.runtime.buffers import Operand, as_array, writable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    Array = Any

PIECE_BYTES: Final = 8 << 20
"""Larger tensors travel in pieces of this size: while one is on the network, the next one comes from the device and the
last one goes back."""


class DeviceAdapter(Protocol):
    """How tensors of one kind of device come to host memory and go back."""

    def room(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return host memory for the elements of `tensor`, flat."""

    def fetch(self, tensor: torch.Tensor, room: torch.Tensor) -> Callable[[], None]:
        """Start to copy `tensor`, after what the caller's stream was given so far; return what waits for the end."""

    def mark(self, device: torch.device) -> Any:
        """Return a mark behind what the caller's stream was given so far."""

    def writing(self, device: torch.device, mark: Any) -> AbstractContextManager[None]:
        """Make what happens inside part of what is put, after the mark: the memory may be in use until then."""

    def put(self, room: torch.Tensor, tensor: torch.Tensor, mark: Any) -> None:
        """Start to copy `room` back into `tensor`, after the mark."""

    def order(self, device: torch.device) -> None:
        """Let the caller's stream go on only after everything that was put so far; nobody waits here."""

    def settle(self, device: torch.device) -> None:
        """Return once everything that was put so far is there."""


class _Streams(NamedTuple):
    """Of one device: what leaves it, and what comes back."""

    leaving: Any
    coming: Any


class StreamAdapter:
    """For devices with streams: copies have two of their own, and go through pinned memory from torch's pool."""

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
    """For devices without streams, as Apple's GPUs: a copy waits for what the device was given before it."""

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
        """Nothing is under way."""

    def settle(self, device: torch.device) -> None:
        """Nothing is under way."""


STREAMED: Final = ("cuda", "xpu")
BLOCKING: Final = ("mps",)
KINDS: Final = ("cpu", *STREAMED, *BLOCKING)
"""The types of device whose tensors covey takes."""

_adapters: dict[str, DeviceAdapter | None] = {"cpu": None}


def adapter_of(tensor: torch.Tensor) -> DeviceAdapter | None:
    """Return how to reach the tensor's device; None for host memory, which is used in place.

    Raises:
        TypeError: covey takes no tensors of such devices.
    """
    if tensor.is_cpu:
        return _adapters["cpu"]
    kind = tensor.device.type
    try:
        return _adapters[kind]
    except KeyError:
        if kind not in KINDS:
            raise TypeError(
                f"covey takes no tensors on {tensor.device}; it takes {', '.join(KINDS)}; move it there first"
            ) from None
    adapter = StreamAdapter(kind) if kind in STREAMED else BlockingAdapter()
    return _adapters.setdefault(kind, adapter)


def writing_to(tensor: torch.Tensor) -> Callable[[], AbstractContextManager[None]]:
    """Return in what `tensor` may be written later, when the caller's stream is done with what it was given so far."""
    adapter = adapter_of(tensor)
    if adapter is None:
        return nullcontext
    return functools.partial(adapter.writing, tensor.device, adapter.mark(tensor.device))


def any_here() -> bool:
    """Tell whether this process has a device whose tensors are not in host memory."""
    if _adapters["cpu"] is not None:
        return True
    return any(torch.get_device_module(kind).is_available() for kind in KINDS if kind != "cpu")


class StagedOperand(Operand):
    """A tensor on a device as an operand: `flat` is host memory that stands in for it."""

    _tensor: torch.Tensor
    _room: torch.Tensor
    _adapter: DeviceAdapter
    _mark: Any
    _is_read: bool
    _arrival: Callable[[], None] | None

    @classmethod
    def of(cls, tensor: torch.Tensor, adapter: DeviceAdapter, *, is_read: bool) -> StagedOperand:
        """See `tensor` through host memory; what it holds now starts to come there, if anybody reads it."""
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
        """Return `flat` with what the tensor holds; a second time, what was written over it comes again."""
        if self._is_read:
            arrival, self._arrival = self._arrival, None
            if arrival is None:
                arrival = self._adapter.fetch(self._tensor, self._room)
            arrival()
        return self.flat

    def store(self) -> None:
        """Start to bring `flat` to the tensor."""
        self._adapter.put(self._room, self._tensor, self._mark)


class _LastOperand(Operand):
    """The last piece of a tensor that is not contiguous: when it is stored, all of the tensor is."""

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
    """Return what covey's operations take for `tensor`: its memory, where that can be used in place."""
    if isinstance(tensor, Operand):
        return tensor
    if tensor.dtype in EIGHT_BITS:
        tensor = tensor.view(torch.uint8)
    adapter = adapter_of(tensor)
    return as_array(tensor) if adapter is None else StagedOperand.of(tensor, adapter, is_read=is_read)


EIGHT_BITS: Final = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))
"""Dtypes that covey does not reckon with, and moves as bytes."""


def blocks_of(whole: torch.Tensor, count: int) -> list[Operand]:
    """Return operands for equal shares of a contiguous tensor in host memory."""
    memory = writable(operand_of(whole))
    return [Operand(row, row.shape, memory.code) for row in memory.flat.reshape(count, memory.flat.size // count)]


def piece_length(tensors: Sequence[torch.Tensor]) -> int:
    """Return how many elements of tensors of equal length travel at once; 0 if all of them do.

    Ranks that call the same operation find the same, whatever devices their tensors are on.
    """
    first = tensors[0]
    itemsize: int = first.element_size()
    if first.numel() * itemsize <= PIECE_BYTES or any(other.numel() != first.numel() for other in tensors):
        return 0
    return PIECE_BYTES // itemsize


def operands_of(
    tensor: torch.Tensor, length: int, *, is_read: bool = True, is_written: bool = True
) -> list[Array | Operand]:
    """Return the operands of the pieces that a tensor is cut into, of `length` elements; 0 leaves it whole."""
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
    """Return a tensor over the memory of an array; numpy's bfloat16 is another than torch's."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def order(tensors: Sequence[torch.Tensor]) -> None:
    """Let the caller's streams use the tensors only after they were filled; nobody waits here."""
    for tensor, adapter in _one_per_device(tensors):
        adapter.order(tensor.device)


def settle(tensors: Sequence[torch.Tensor]) -> None:
    """Return once the tensors are filled."""
    for tensor, adapter in _one_per_device(tensors):
        adapter.settle(tensor.device)


def _one_per_device(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, DeviceAdapter]]:
    found = {}
    for tensor in tensors:
        if (adapter := adapter_of(tensor)) is not None:
            found[tensor.device] = tensor, adapter
    return list(found.values())
