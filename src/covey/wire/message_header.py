"""The header that opens every frame of a point-to-point lane.

    magic u16, version u8, kind u8, content u8, dtype u8, ndim u8, 0 u8, tag i64, id u64, bytes u64, ndim x u64

All little-endian. EAGER and RTS announce a message and carry its dtype and shape; in other kinds, fields that are not
needed are zero. What `bytes` counts:

    EAGER   the payload, which follows at once
    RTS     the payload, which is sent when the receiver asks for it ("ready to send")
    CTS     the bytes of message `id` that the receiver asks for: all, or 0 to drop it ("clear to send")
    DATA    the piece of message `id` that follows
    CREDIT  the buffer space that the receiver has freed
    ACK     how many bytes of the stream of frames have arrived
    RESUME  the same, as the first frame on a connection; it is not part of the stream of frames itself
    END     0: nothing follows

The payload of one kind of message is a list of arrays: their dtypes and shapes, then the elements of each. Arrays that
are read are views of the memory of the message.

    4 u8, 0 u24, count u32, count x (dtype code u8, ndim u8, 0 u48, ndim x u64), then each array on a multiple of 16

All little-endian; gaps are zero.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from covey.base.arithmetic import DTYPES, dtype_code
from covey.base.errors import ConfigError, RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray[Any, np.dtype[Any]]

EAGER: Final = 1
RTS: Final = 2
CTS: Final = 3
DATA: Final = 4
CREDIT: Final = 5
ACK: Final = 6
RESUME: Final = 7
END: Final = 8

MAX_MESSAGE_NDIM: Final = 32
MAX_BYTES: Final = 2**63 - 1
"""The size of the largest possible array, and the limit of lengths on the wire."""

_MAGIC: Final = 0xC0FE
_VERSION: Final = 1
_FIXED_PART: Final = struct.Struct("<HBBBBBxqQQ")
FIXED_BYTES: Final = _FIXED_PART.size
"""The length of a header without a shape."""
_DIMS: Final = tuple(struct.Struct(f"<{ndim}Q") for ndim in range(MAX_MESSAGE_NDIM + 1))


pack_small: Final = functools.partial(_FIXED_PART.pack, _MAGIC, _VERSION, EAGER, True, 0, 0)
"""`pack_small(tag, message_id, payload_bytes)` is what `encode` returns for a small message that is an object."""


class MessageHeader(NamedTuple):
    """The header of one frame; the docstring of this module says which fields each kind uses."""

    kind: int
    message_id: int = 0
    payload_bytes: int = 0
    tag: int = 0
    is_object: bool = False
    """The payload is an encoded object; then dtype and shape are left out."""
    dtype_code: int = 0
    shape: tuple[int, ...] = ()


def encode(header: MessageHeader) -> bytes:
    """Return the header's bytes."""
    kind, message_id, payload_bytes, tag, is_object, dtype_code, shape = header
    ndim = len(shape)
    fixed = _FIXED_PART.pack(_MAGIC, _VERSION, kind, is_object, dtype_code, ndim, tag, message_id, payload_bytes)
    return fixed + _DIMS[ndim].pack(*shape) if ndim else fixed


def decode(data: bytes | bytearray | memoryview, start: int, stop: int) -> tuple[MessageHeader, int] | None:
    """Return the header at `data[start:stop]` and where it ends, or None while bytes are missing.

    Raises:
        RemoteProtocolError: the bytes are not a header; raised as soon as the fixed part has arrived.
    """
    if stop - start < _FIXED_PART.size:
        return None
    magic, version, kind, content, dtype_code, ndim, tag, message_id, payload_bytes = _FIXED_PART.unpack_from(
        data, start
    )
    if magic != _MAGIC or version != _VERSION:
        raise RemoteProtocolError(f"not a message header: magic {magic:#06x}, version {version}")
    if not EAGER <= kind <= END or content > 1 or dtype_code >= len(DTYPES) or ndim > MAX_MESSAGE_NDIM:
        raise RemoteProtocolError(f"invalid message header: {kind=} {content=} {dtype_code=} {ndim=}")
    announces = kind <= RTS
    if payload_bytes > MAX_BYTES or tag < 0 or (not announces and (tag or content or dtype_code or ndim)):
        raise RemoteProtocolError(f"invalid message header: {kind=} {tag=} {content=} {ndim=} {payload_bytes=}")
    end = start + _FIXED_PART.size + 8 * ndim
    if stop < end:
        return None
    shape = _DIMS[ndim].unpack_from(data, start + _FIXED_PART.size) if ndim else ()
    if content:
        if ndim or dtype_code:
            raise RemoteProtocolError("an object message that claims a dtype or a shape")
    elif announces and array_bytes(dtype_code, shape) != payload_bytes:
        raise RemoteProtocolError(f"{payload_bytes} bytes cannot be {DTYPES[dtype_code]} of shape {shape}")
    return MessageHeader(kind, message_id, payload_bytes, tag, bool(content), dtype_code, shape), end


def array_bytes(dtype_code: int, shape: tuple[int, ...]) -> int:
    """Return the size of an array in bytes; raise RemoteProtocolError if numpy could not make it."""
    itemsize = DTYPES[dtype_code].itemsize
    # numpy ignores zeros when it checks for overflow, so a shape like (2**62, 0) is refused, too.
    if math.prod(filter(None, shape)) * itemsize > MAX_BYTES:
        raise RemoteProtocolError(f"no array has shape {shape}")
    return math.prod(shape) * itemsize


# Several arrays in one message

ARRAYS_FORM: Final = 4
"""The first byte, which tells a list of arrays from an encoded object (`wire.objects`)."""
MAX_ARRAYS: Final = 1 << 16
_LIST_HEAD: Final = struct.Struct("<B3xI")
_ENTRY: Final = struct.Struct("<BB6x")
_ALIGN: Final = 16
"""No element of a dtype needs more."""


def pack_arrays(arrays: Sequence[Array]) -> Array:
    """Return the bytes of a message with these arrays.

    Raises:
        ConfigError: there are too many arrays, or one has too many dimensions.
    """
    if len(arrays) > MAX_ARRAYS:
        raise ConfigError(f"a message of {len(arrays)} arrays; it may have up to {MAX_ARRAYS}")
    parts = [_LIST_HEAD.pack(ARRAYS_FORM, len(arrays))]
    for array in arrays:
        if array.ndim > MAX_MESSAGE_NDIM:
            raise ConfigError(f"an array of {array.ndim} dimensions; covey sends up to {MAX_MESSAGE_NDIM}")
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


def holds_arrays(data: Array) -> bool:
    """Tell whether the payload of an object message begins like a list of arrays."""
    return data.size > 0 and int(data[0]) == ARRAYS_FORM


def unpack_arrays(data: Array) -> list[Array]:
    """Return the arrays of a message, as views of `data`.

    Raises:
        RemoteProtocolError: `pack_arrays` never made these bytes.
    """
    view = memoryview(data)
    if data.size < _LIST_HEAD.size:
        raise RemoteProtocolError(f"a list of arrays in {data.size} bytes")
    form, count = _LIST_HEAD.unpack_from(view)
    if form != ARRAYS_FORM or count > min(MAX_ARRAYS, (data.size - _LIST_HEAD.size) // _ENTRY.size):
        raise RemoteProtocolError(f"a list of {count} arrays in {data.size} bytes")
    shapes, at = [], _LIST_HEAD.size
    for _ in range(count):
        if at + _ENTRY.size > data.size:
            raise RemoteProtocolError("a list of arrays that is cut off")
        code, ndim = _ENTRY.unpack_from(view, at)
        at += _ENTRY.size
        if code >= len(DTYPES) or ndim > MAX_MESSAGE_NDIM or at + 8 * ndim > data.size:
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
