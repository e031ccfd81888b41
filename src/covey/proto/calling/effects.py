"""What the core of calls wants done. `peer` is the seat of the other node, `number` the caller's number of the call."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from covey.base.numbers import REALTIME

if TYPE_CHECKING:
    from covey.wire.calls import CallFailure, CallMessage, CallPayload, CallRequest, CallResult, ReferenceMessage


class CallEnding(enum.Enum):
    """Why a call ended without an answer of the other node."""

    LATE = "late"
    CANCELLED = "cancelled"
    LOST = "lost"
    """The other node is gone."""
    CLOSED = "closed"
    """This node leaves."""


class SendMessage(NamedTuple):
    """Send a message, and the parts that belong to it."""

    peer: int
    message: CallMessage
    parts: Any = None
    """What the driver gave with the payload, if the parts are not in the message."""
    priority: int = REALTIME
    """The class of the parts."""


class FetchParts(NamedTuple):
    """Receive the parts of a payload, and report them to `fetched`."""

    peer: int
    number: int
    sizes: tuple[int, ...]
    is_answer: bool


class RefuseParts(NamedTuple):
    """Let the sender of parts know that they are not wanted."""

    peer: int
    number: int
    sizes: tuple[int, ...]
    is_answer: bool


class Conclude(NamedTuple):
    """Give the caller of this node its outcome. Comes once for each call."""

    peer: int
    number: int
    outcome: CallResult | CallFailure | CallEnding
    parts: Any = None
    """Those of a result that were fetched."""


class DeliverItem(NamedTuple):
    """Give the caller of this node the next item of its stream."""

    peer: int
    number: int
    payload: CallPayload


class RunHandler(NamedTuple):
    """Call the function. Report its end to `finished`."""

    peer: int
    number: int
    request: CallRequest
    deadline: float
    parts: Any = None
    """Those of its arguments that were fetched."""


class StepStream(NamedTuple):
    """Get the next item of a stream, and report it to `yielded`, or its end to `finished`."""

    peer: int
    number: int


class StopHandler(NamedTuple):
    """Cancel a function that runs: its caller is gone or does not wait any more. `finished` is called all the same."""

    peer: int
    number: int


class CloseStream(NamedTuple):
    """Close the generator of a stream that is between two items, and report that to `finished`."""

    peer: int
    number: int


class CountReference(NamedTuple):
    """Count what the peer says of handles of an exported object (`proto.references`)."""

    peer: int
    message: ReferenceMessage


class TakeHandles(NamedTuple):
    """Claim the handles that a payload of the peer lists, before anything is done with its value."""

    peer: int
    payload: CallPayload


class GiveUpHandles(NamedTuple):
    """Withdraw the handles of a payload that is never sent to the peer."""

    peer: int
    payload: CallPayload


CallEffect: TypeAlias = (
    SendMessage
    | FetchParts
    | RefuseParts
    | Conclude
    | DeliverItem
    | RunHandler
    | StepStream
    | StopHandler
    | CloseStream
    | CountReference
    | TakeHandles
    | GiveUpHandles
)
