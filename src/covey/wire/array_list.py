"""Several arrays in one message: a list of dtypes and shapes, then the elements of each array.

    4 u8, 0 u24, count u32, count x (dtype code u8, ndim u8, 0 u48, ndim x u64), then each array on a multiple of 16

All little-endian; gaps are zero. The first byte tells it from an encoded object (`wire.objects`). Arrays that are read
are views of the memory of the message.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from covey.base.arithmetic import DTYPES, dtype_code
from covey.base.errors import ConfigError, RemoteProtocolError
from covey.wire.message_header import MAX_NDIM, array_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray[Any, np.dtype[Any]]

FORM: Final = 4
"""The first byte."""
MAX_ARRAYS: Final = 1 << 16
_HEAD: Final = struct.Struct("<B3xI")
_ENTRY: Final = struct.Struct("<BB6x")
_ALIGN: Final = 16
"""No element of a dtype needs more."""


def pack(arrays: Sequence[Array]) -> Array:
    """Return the bytes of a message with these arrays.

    Raises:
        ConfigError: there are too many arrays, or one has too many dimensions.
    """
    if len(arrays) > MAX_ARRAYS:
        raise ConfigError(f"a message of {len(arrays)} arrays; it may have up to {MAX_ARRAYS}")
    parts = [_HEAD.pack(FORM, len(arrays))]
    for array in arrays:
        if array.ndim > MAX_NDIM:
            raise ConfigError(f"an array of {array.ndim} dimensions; covey sends up to {MAX_NDIM}")
        parts += [_ENTRY.pack(dtype_code(array.dtype), array.ndim), struct.pack(f"<{array.ndim}Q", *array.shape)]
    head = b"".join(parts)
    starts, end = [], len(head)
    for array in arrays:
        starts.append(_aligned(end))
        end = starts[-1] + array.nbytes
    message = np.zeros(end, np.uint8)
    message[: len(head)] = np.frombuffer(head, np.uint8)
    for start, array in zip(starts, arrays, strict=True):
        message[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    return message


def is_packed(data: Array) -> bool:
    """Tell whether the payload of an object message begins like a list of arrays."""
    return data.size > 0 and int(data[0]) == FORM


def unpack(data: Array) -> list[Array]:
    """Return the arrays of a message, as views of `data`.

    Raises:
        RemoteProtocolError: `pack` never made these bytes.
    """
    view = memoryview(data)
    if data.size < _HEAD.size:
        raise RemoteProtocolError(f"a list of arrays in {data.size} bytes")
    form, count = _HEAD.unpack_from(view)
    if form != FORM or count > min(MAX_ARRAYS, (data.size - _HEAD.size) // _ENTRY.size):
        raise RemoteProtocolError(f"a list of {count} arrays in {data.size} bytes")
    shapes, at = [], _HEAD.size
    for _ in range(count):
        if at + _ENTRY.size > data.size:
            raise RemoteProtocolError("a list of arrays that is cut off")
        code, ndim = _ENTRY.unpack_from(view, at)
        at += _ENTRY.size
        if code >= len(DTYPES) or ndim > MAX_NDIM or at + 8 * ndim > data.size:
            raise RemoteProtocolError(f"no array has dtype {code} and {ndim} dimensions")
        shapes.append((code, struct.unpack_from(f"<{ndim}Q", view, at)))
        at += 8 * ndim
    arrays = []
    for code, shape in shapes:
        start, nbytes = _aligned(at), array_bytes(code, shape)
        at = start + nbytes
        if at > data.size:
            raise RemoteProtocolError(f"{data.size} bytes cannot hold an array of shape {shape}")
        arrays.append(data[start:at].view(DTYPES[code]).reshape(shape))
    if at != data.size:
        raise RemoteProtocolError(f"{data.size - at} bytes follow the last array")
    return arrays


def _aligned(position: int) -> int:
    return position + -position % _ALIGN
