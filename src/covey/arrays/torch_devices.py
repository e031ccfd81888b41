"""torch's tensors: the memory of those on the host, and copies of those on devices, beside the device's own work."""

from __future__ import annotations

import functools
import threading
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import torch

from covey.base.arithmetic import BFLOAT16, DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    Array = np.ndarray[Any, np.dtype[Any]]


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


def device_adapter_of(tensor: torch.Tensor) -> DeviceAdapter | None:
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
    adapter = device_adapter_of(tensor)
    if adapter is None:
        return nullcontext
    return functools.partial(adapter.writing, tensor.device, adapter.mark(tensor.device))


def any_here() -> bool:
    """Tell whether this process has a device with memory of its own."""
    if _adapters["cpu"] is not None:
        return True
    return any(torch.get_device_module(kind).is_available() for kind in DEVICE_KINDS if kind != "cpu")


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
        if (adapter := device_adapter_of(tensor)) is not None:
            found[tensor.device] = tensor, adapter
    return list(found.values())


class StagedTensor:
    """A tensor on a device, on its way through host memory."""

    def __init__(self, tensor: torch.Tensor, device: DeviceAdapter, given: Any) -> None:
        """`given` is what the operation was called with, and returns: the tensor, or what it shows the memory of."""
        if tensor.layout is not torch.strided:
            raise TypeError(f"the tensor is {tensor.layout}; make it a plain one: x.to_dense()")
        self._given, self._source, self._device = given, tensor.detach(), device
        self._room = device.room(self._source)
        self.host = tensor_memory(self._room).reshape(tuple(tensor.shape))
        self._mark = device.mark(self._source.device)

    def stage_in(self) -> Callable[[], None]:
        return self._device.fetch(self._source, self._room)

    def stage_out(self) -> Any:
        self._device.put(self._room, self._source, self._mark)
        return self._given

    def order(self) -> None:
        self._device.order(self._source.device)

    def synchronise(self) -> None:
        self._device.settle(self._source.device)


class TensorAdapter:
    """The `ArrayAdapter` of tensors. Arrays that operations make are numpy arrays if the tensor is on the host."""

    def view(self, x: torch.Tensor) -> Array | None:
        return tensor_memory(x) if device_adapter_of(x) is None else None

    def stage(self, x: torch.Tensor, *, given: Any = None) -> StagedTensor:
        device = device_adapter_of(x)
        assert device is not None, "host memory is used in place"
        return StagedTensor(x, device, x if given is None else given)

    def new(self, values: Array, like: torch.Tensor) -> Any:
        return values if like.is_cpu else tensor_over(values).to(like.device)


TENSORS: Final = TensorAdapter()


def adapter_for(_kind: type) -> TensorAdapter:
    """Return the adapter of tensors."""
    return TENSORS


def tensor_over(array: Array) -> torch.Tensor:
    """Return a tensor that shares the memory of an array. numpy's bfloat16 needs a cast to become torch's."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


class _TensorMemory:
    """A tensor's memory for numpy. After `Tensor.numpy()`, torch could never resize the storage again."""

    __slots__ = ("__array_interface__", "owner")
    __array_interface__: dict[str, Any]
    owner: Any


_formats: dict[Any, tuple[np.dtype[Any], str]] = {}
"""By torch dtype, filled on first use: the numpy dtype, and its text in an array interface."""


def tensor_memory(tensor: Any) -> Array:
    """Return an array over the memory of a CPU tensor, which it keeps alive; for bfloat16 and requires_grad, too."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise TypeError(f"the tensor is {tensor.layout} on {tensor.device}; make it a plain one: x.to_dense().cpu()")
    dtype, text = _formats.get(tensor.dtype) or _format(tensor.dtype)
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), dtype)
    if tensor.is_conj() or tensor.is_neg():
        raise TypeError("the tensor is a lazy conjugate or negative view; call x.resolve_conj().resolve_neg() first")
    memory = _TensorMemory()
    memory.owner = tensor
    memory.__array_interface__ = interface = {
        "version": 3,
        "shape": tensor.shape,
        "typestr": text,
        "data": (tensor.data_ptr(), False),
    }
    if not tensor.is_contiguous():
        interface["strides"] = tuple(step * dtype.itemsize for step in tensor.stride())
    array = np.asarray(memory)
    return array.view(BFLOAT16) if dtype is BFLOAT16 else array


def _format(torch_dtype: Any) -> tuple[np.dtype[Any], str]:
    name = str(torch_dtype).removeprefix("torch.")
    dtype = next((dtype for dtype in DTYPES if dtype.name == name), None)
    if dtype is None:
        raise TypeError(f"covey cannot move tensors of {torch_dtype}")
    return _formats.setdefault(torch_dtype, (dtype, "<i2" if dtype is BFLOAT16 else dtype.str))
