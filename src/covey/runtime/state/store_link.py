"""What stores say over one link: it waits for room, and what no frame holds travels in pieces.

A piece has at most 256 KiB, and is sent when the link has room for it, so that pings and all else pass between pieces.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from covey.base.errors import RemoteProtocolError
from covey.wire import messages
from covey.wire import store as wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.proto.replication import SendToReplica

UNSENT_LIMIT: Final = 1 << 16
"""Messages that wait for room on one link, besides the parts of copies: of these there may be more."""
WAITING_COPIES_LIMIT: Final = 4
"""Copies that wait for room on one link; a member that has a new link gets one or two."""


class Unsent:
    """What waits for room on the link with one process, in order. It is encoded when it is sent: copies are large."""

    def __init__(self, bodies: Iterator[int]) -> None:
        """Begin empty; `bodies` numbers the large bodies of this process, on all its links one after the other."""
        self._messages: deque[SendToReplica] = deque()
        self._copies = self._parts = 0
        """How many copies end among them, and how many of them are parts of copies."""
        self._bodies = bodies
        self._pieces: Iterator[bytes] = iter(())
        self._piece: messages.Posting | None = None
        """The next piece of the body that is being sent."""

    def __len__(self) -> int:
        return len(self._messages) + (self._piece is not None)

    @property
    def is_too_long(self) -> bool:
        """Whether more waits than a process that reads leaves waiting."""
        return len(self._messages) - self._parts > UNSENT_LIMIT or self._copies > WAITING_COPIES_LIMIT

    def add(self, message: SendToReplica) -> None:
        self._messages.append(message)
        self._count(message, 1)

    def take(self) -> messages.Posting:
        """Remove and return what is to be sent next: a message, or a piece of one."""
        if (posting := self._piece) is None:
            message = self._messages.popleft()
            self._count(message, -1)
            posting = messages.Posting(message.store, message.number, wire.encode_body(message.body))
            if len(posting.body) <= wire.BODY_LIMIT:
                return posting
            self._pieces = _pieces_of(posting.body, next(self._bodies))
            posting = messages.Posting(posting.store, posting.number, next(self._pieces))
        following = next(self._pieces, None)
        self._piece = None if following is None else messages.Posting(posting.store, posting.number, following)
        return posting

    def _count(self, message: SendToReplica, number: int) -> None:
        if isinstance(message.body, wire.Load | wire.LoadAnswer):
            self._parts += number
        elif isinstance(message.body, wire.Loaded):
            self._copies += number


def _pieces_of(body: bytes, number: int) -> Iterator[bytes]:
    for at in range(0, len(body), wire.BODY_PIECE_BYTES):
        yield wire.encode_body(wire.BodyPiece(number, at, len(body), body[at : at + wire.BODY_PIECE_BYTES]))


class PieceAssembly:
    """Puts the pieces that one process sends together again."""

    def __init__(self) -> None:
        self._body = -1
        self._data = bytearray()

    def add(self, piece: wire.BodyPiece) -> wire.Body | None:
        """Take a piece; return the body that it completes. One that came late, over a link that was replaced, is left.

        Raises:
            RemoteProtocolError: the pieces make no body.
        """
        if piece.body > self._body and not piece.at:
            self._body = piece.body
            self._data.clear()
        if piece.body != self._body or piece.at != len(self._data) or not piece.data:
            return None
        self._data += piece.data
        if len(self._data) < piece.size:
            return None
        data, self._data = bytes(self._data), bytearray()
        body = wire.decode_body(data)
        if len(data) != piece.size or isinstance(body, wire.BodyPiece):
            raise RemoteProtocolError("pieces of a message about a store make no message")
        return body
