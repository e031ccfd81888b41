"""Messages of calls between nodes: a function of another node is called, and answers once, or item by item.

The caller counts its calls to each node; all messages about a call carry its number. Each call gets exactly one
`CallResult` or `CallFailure`, also if it was cancelled. Tags and fields are only added, at the end.

A payload is a list of parts: the msgpack body, and the memory of large arrays (`wire.call_values`). If all of them fit,
they are in the message; otherwise the message has their sizes, and they travel on a connection of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from covey.base.errors import RemoteProtocolError
from covey.base.numbers import PRIORITIES, REALTIME
from covey.wire.messages import SeatNumber, Story, Text, Worded

if TYPE_CHECKING:
    from collections.abc import Sequence

CALL_INLINE_BYTES: Final = 48 * 1024
"""A payload of up to this many bytes is in the message itself, which is below the 64 KiB of a message sent at once."""
CALL_PARTS_LIMIT: Final = 2048
"""Parts of one payload."""
PART_LIMIT: Final = 1 << 46
"""Bytes of one part, as far as the format is concerned; the receiver has a limit for their sum."""
FUNCTION_NAME_LIMIT: Final = 200
"""Characters of a function's name."""
HANDLES_LIMIT: Final = 256
"""Handles in one payload."""
CREDIT_LIMIT: Final = 1024
"""Items of a stream that may be under way."""
DEPTH_LIMIT: Final = 8
"""Depths of calls that are told apart: a function that is called calls a function, and so on."""
TRACE_LIMIT: Final = 64
"""Characters of a traceparent."""
TRACEBACK_LINES_LIMIT: Final = 60
"""Lines of a traceback."""

OBJECT_KEY_BYTES: Final = 16
"""The length of an object's key."""

CallNumber = Annotated[int, msgspec.Meta(ge=1, lt=1 << 60)]
ObjectNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
ExportedNumber = Annotated[int, msgspec.Meta(ge=1, lt=1 << 60)]
CallName = Annotated[str, msgspec.Meta(max_length=FUNCTION_NAME_LIMIT)]
Line = Annotated[str, msgspec.Meta(max_length=300)]
Remaining = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""Seconds that are left: clocks of different machines are never compared."""
PartSize = Annotated[int, msgspec.Meta(ge=0, le=PART_LIMIT)]
Inline = Annotated[
    tuple[Annotated[bytes, msgspec.Meta(max_length=CALL_INLINE_BYTES)], ...], msgspec.Meta(max_length=CALL_PARTS_LIMIT)
]
Sizes = Annotated[tuple[PartSize, ...], msgspec.Meta(max_length=CALL_PARTS_LIMIT)]

RAISED: Final = 1
"""The function raised."""
UNKNOWN_FUNCTION: Final = 2
"""No function has this name."""
ARGUMENTS: Final = 3
"""The arguments do not fit the function, or it is called as a stream and is none, or the other way round."""
TOO_LARGE: Final = 4
"""The payload exceeds the limit of the node that got or made it."""
DEADLINE_PASSED: Final = 5
"""The deadline passed."""
CANCELLED: Final = 6
CLOSING: Final = 7
"""The node that was called is leaving."""
NO_RESULT: Final = 8
"""The function returned something that cannot be sent."""


class PassedHandle(msgspec.Struct, frozen=True, array_like=True):
    """A handle of an exported object, on its way to another node."""

    owner: SeatNumber
    """The node that has exported the object."""
    target: ExportedNumber
    key: Annotated[bytes, msgspec.Meta(min_length=OBJECT_KEY_BYTES, max_length=OBJECT_KEY_BYTES)]
    """That of the object: only nodes that have a handle know it."""


class CallPayload(msgspec.Struct, frozen=True, array_like=True, weakref=True):
    """Parts, or their sizes; one of both is empty."""

    inline: Inline = ()
    sizes: Sizes = ()
    handles: Annotated[tuple[PassedHandle, ...], msgspec.Meta(max_length=HANDLES_LIMIT)] = ()
    """Those in the value, which refers to them by their position here; only under the feature `PASSED_HANDLES`."""

    @property
    def total_bytes(self) -> int:
        """The bytes of all parts."""
        return sum(self.sizes) if self.sizes else sum(map(len, self.inline))


class CallRequest(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Call a function. Numbers of calls from one node to another grow."""

    number: CallNumber
    name: CallName
    seconds: Remaining
    """Until the deadline."""
    payload: CallPayload
    target: ObjectNumber = 0
    """The exported object whose method `name` is; 0 for a registered function."""
    credit: Annotated[int, msgspec.Meta(ge=0, le=CREDIT_LIMIT)] = 0
    """How many items the caller takes at first; 0: it wants one result."""
    priority: Annotated[int, msgspec.Meta(ge=0, lt=len(PRIORITIES))] = REALTIME
    """Its class: those above it are served first."""
    trace: Annotated[str, msgspec.Meta(max_length=TRACE_LIMIT)] = ""
    """The W3C traceparent of the call, if its caller exports spans."""
    depth: Annotated[int, msgspec.Meta(ge=0, lt=DEPTH_LIMIT)] = 0
    """Calls that wait for this one: 0 if the program made it, 1 if a function made it that was called, and so on."""


class CallResult(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """What the function returned; for a stream, its end."""

    number: CallNumber
    payload: CallPayload


class CallFailure(Worded, frozen=True, array_like=True, tag=3):
    """Why there is no result."""

    number: CallNumber
    kind: Annotated[int, msgspec.Meta(ge=RAISED, le=NO_RESULT)]
    error: Text
    """The class of the exception, if the function raised."""
    text: Story
    traceback: Annotated[tuple[Line, ...], msgspec.Meta(max_length=TRACEBACK_LINES_LIMIT)] = ()
    """The remote traceback, line by line."""


class CallCancel(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The caller does not wait any more. The answer comes all the same."""

    number: CallNumber


class StreamItem(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The next item of a stream; takes one credit."""

    number: CallNumber
    payload: CallPayload


class StreamCredit(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The caller takes this many more items."""

    number: CallNumber
    items: Annotated[int, msgspec.Meta(ge=1, le=CREDIT_LIMIT)]


class ReferenceRelease(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The sender drops references to an exported object: as many as it received."""

    target: ExportedNumber
    references: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
    key: Annotated[bytes, msgspec.Meta(max_length=OBJECT_KEY_BYTES)] = b""
    """That of the handles, if they have one."""


class ReferenceShare(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The sender, which holds a handle of the receiver's object, passes it on to another node."""

    target: ExportedNumber
    taker: SeatNumber
    is_withdrawn: bool = False
    """Whether it does not do so after all: the call was never sent."""


class ReferenceClaim(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The sender was passed a handle of the receiver's object, and holds it from now on."""

    target: ExportedNumber
    giver: SeatNumber
    key: Annotated[bytes, msgspec.Meta(min_length=OBJECT_KEY_BYTES, max_length=OBJECT_KEY_BYTES)]


ReferenceMessage = ReferenceRelease | ReferenceShare | ReferenceClaim
CallMessage = (
    CallRequest
    | CallResult
    | CallFailure
    | CallCancel
    | StreamItem
    | StreamCredit
    | ReferenceRelease
    | ReferenceShare
    | ReferenceClaim
)

_call_messages: msgspec.msgpack.Decoder[CallMessage] = msgspec.msgpack.Decoder(CallMessage)
encode_call_message = msgspec.msgpack.Encoder().encode


def decode_call_message(data: bytes) -> CallMessage:
    """Decode a message about a call; RemoteProtocolError for anything else."""
    try:
        return _call_messages.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not a message about a call: {error}") from error


def payload_of(parts: list[bytes], handles: Sequence[PassedHandle] = ()) -> CallPayload:
    """Return the payload of a message: the parts themselves if they are small, else their sizes."""
    sizes = tuple(map(len, parts))
    if sum(sizes) > CALL_INLINE_BYTES:
        return CallPayload(sizes=sizes, handles=tuple(handles))
    return CallPayload(inline=tuple(map(bytes, parts)), handles=tuple(handles))
