"""One message: the send, the receive, and the arrival at the receiver; and which peers are gone that could send one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from covey.base.arithmetic import DTYPES
from covey.base.errors import MismatchError, PeerLostError
from covey.base.numbers import ANY, BULK
from covey.proto.message_stream import Landing, Payload
from covey.wire import message_header as wire
from covey.wire.message_header import MessageHeader

if TYPE_CHECKING:
    from collections.abc import Callable

HEADER_COST: Final = 256
"""The credit that a message takes besides its payload, so that empty messages are bounded too."""
Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Allocator: TypeAlias = "Callable[[int], Bytes]"
"""Returns an array of so many bytes, of any content; MemoryError if there is no memory for it."""
_NOWHERE: Final = memoryview(b"")


def new_bytes(nbytes: int) -> Bytes:
    """Return an array of so many bytes from numpy."""
    return np.empty(nbytes, np.uint8)


class Received(NamedTuple):
    """A message that a receive was given."""

    source: int
    tag: int
    dtype_code: int
    shape: tuple[int, ...]
    is_object: bool
    data: Bytes | None
    """The payload; None if it was written to the receive's `out`."""


class MessageInfo(NamedTuple):
    """A message that waits for a receive, as `probe` describes it."""

    source: int
    """The rank that sent it."""
    tag: int
    nbytes: int
    is_object: bool
    """Whether it is a value or several arrays; then it has neither dtype nor shape."""
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]


class MessageSend(Payload):
    """A message to `peer`; over when its memory may be reused."""

    __slots__ = ("dtype_code", "error", "is_cleared", "is_object", "peer", "shape", "share", "tag")

    def __init__(
        self,
        view: memoryview,
        peer: int,
        tag: int,
        dtype_code: int,
        shape: tuple[int, ...],
        is_object: bool,
        priority: int = BULK,
        share: float = 1.0,
    ) -> None:
        super().__init__(view, priority)
        self.share = share
        """How much of the credit it may use up."""
        self.peer, self.tag = peer, tag
        self.dtype_code, self.shape, self.is_object = (0, (), True) if is_object else (dtype_code, shape, False)
        self.is_cleared = False
        """Whether the receiver has asked for the payload."""
        self.error: BaseException | None = None

    def header(self, kind: int) -> bytes:
        """Return the frame that announces this message."""
        return wire.encode(
            MessageHeader(kind, self.message_id, len(self.view), self.tag, self.is_object, self.dtype_code, self.shape)
        )


class Receive:
    """A request for a message; over when `result` or `error` is there."""

    __slots__ = ("arrival", "error", "expect", "order", "out", "result", "source", "tag")

    def __init__(
        self, source: int, tag: int, out: memoryview | None, expect: tuple[int, tuple[int, ...]] | None, order: int
    ) -> None:
        self.source, self.tag, self.out, self.expect, self.order = source, tag, out, expect, order
        self.arrival: ArrivingMessage | None = None
        self.result: Received | None = None
        self.error: BaseException | None = None

    def refusal(self, arrival: ArrivingMessage) -> MismatchError | None:
        """Return the error if the message cannot be written to `out`."""
        header = arrival.header
        fits = self.out is None or len(self.out) == header.payload_bytes
        if self.expect is not None:
            code, shape = self.expect
            same_kind = not header.is_object and header.dtype_code == code
            fits = fits and same_kind and wire.array_bytes(code, shape) == header.payload_bytes
        if fits:
            return None
        has = "an object" if header.is_object else f"{DTYPES[header.dtype_code]} of shape {header.shape}"
        wants = (
            f"{DTYPES[self.expect[0]]} of shape {self.expect[1]}" if self.expect else f"{len(self.out or b'')} bytes"
        )
        return MismatchError(
            f"recv wants {wants}, but the message from rank {arrival.source} with tag {header.tag} is {has} "
            f"({header.payload_bytes} bytes). The message is consumed; the group is still usable."
        )


class Probe:
    """A question for a message that no receive has taken; over when `result` or `error` is there."""

    __slots__ = ("error", "result", "source", "tag")

    def __init__(self, source: int, tag: int) -> None:
        self.source, self.tag = source, tag
        self.result: MessageInfo | None = None
        self.error: BaseException | None = None


Operation: TypeAlias = MessageSend | Receive | Probe


class ArrivingMessage(Landing):
    """A message announced to this rank; `order` counts arrivals."""

    __slots__ = (
        "cost",
        "header",
        "is_asked_for",
        "is_dropped",
        "is_landed",
        "is_matched",
        "order",
        "receive",
        "source",
        "store",
    )

    def __init__(self, source: int, header: MessageHeader, order: int) -> None:
        super().__init__(_NOWHERE)
        self.source, self.header, self.order = source, header, order
        self.cost = HEADER_COST + (header.payload_bytes if header.kind == wire.EAGER else 0)
        """The credit it took."""
        self.is_asked_for = False
        """Whether the sender of a large payload was told to send it, or not to."""
        self.is_dropped = False
        """Whether a receive refused it: its further bytes are dropped."""
        self.is_landed = False
        """Whether the whole payload is here."""
        self.is_matched = False
        """Whether a receive has taken it at least once, so that its credit is settled."""
        self.receive: Receive | None = None
        self.store: Bytes | None = None
        """Memory for the payload; None if the payload goes to the receive's `out`, or nothing is allocated yet."""

    def info(self) -> MessageInfo:
        """Describe the message to the program."""
        header = self.header
        dtype = None if header.is_object else DTYPES[header.dtype_code]
        return MessageInfo(self.source, header.tag, header.payload_bytes, header.is_object, dtype, header.shape)

    def allocate(self, take: Allocator) -> None:
        """Give the payload memory of its own; what has landed moves there."""
        self.store = take(self.header.payload_bytes)
        store = self.store.data
        store[: self.filled] = self.target[: self.filled]
        self.target = store


def describe_source(source: int, tag: int) -> str:
    """Return the source and the tag that an operation asks for, as error messages name them."""
    return f"{'any rank' if source == ANY else f'rank {source}'} with {'any tag' if tag == ANY else f'tag {tag}'}"


class PeerFailures:
    """The peers of one rank that are gone, and which receives learn of it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.errors: dict[int, BaseException] = {}
        """By peer, in order."""
        self.end_of_all: BaseException | None = None
        """Why all operations end, if they do."""
        self._untold: list[BaseException] = []
        """Failures of peers while no receive from any rank waited: the next such receive gets each once."""

    def note(self, peer: int, error: BaseException, *, is_told: bool) -> None:
        """Note that a peer is gone; `is_told` if receives from any rank learn of it now."""
        self.errors[peer] = error
        if not is_told:
            self._untold.append(error)

    def of(self, source: int) -> BaseException | None:
        """Return the error of a receive from `source` that no message fits, if it cannot wait for one."""
        if source != ANY or self.end_of_all is not None:
            return self.errors.get(source, self.end_of_all)
        if self._untold:
            return self._untold.pop(0)
        if self._size > 1 and len(self.errors) == self._size - 1:
            text = f"no other rank of the group of {self._size} is left that could send a message"
            return PeerLostError(text, rank=-1, operation="recv from any rank")
        return None
