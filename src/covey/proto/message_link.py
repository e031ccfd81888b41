"""The messages between this rank and one peer: frames in both directions, credit, and acknowledgements.

A sender may announce messages while the peer holds less than `credit_bytes` of its messages that no receive has taken;
then sends wait until the peer gives credit back. A message that has a share of the credit is announced only while the
peer holds less than that, so it never uses up what those with larger shares need. What no correct peer sends raises
RemoteProtocolError.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from covey.base.errors import RemoteProtocolError
from covey.base.numbers import PRIORITIES
from covey.base.settings import SETTINGS
from covey.proto.message import HEADER_COST, ArrivingMessage, MessageSend, Operation, Receive
from covey.proto.message_stream import Inlet, Landing, Outlet, Payload
from covey.wire import message_header as wire
from covey.wire.message_header import MessageHeader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ACK_BATCH: Final = 256 * 1024
"""Small frames are acknowledged in batches of this size: a sender keeps this much, and what is under way."""


class MessageSizes(NamedTuple):
    """The limits of messages, equal on all ranks of a group."""

    eager_bytes: int = SETTINGS["eager_bytes"].default
    """Messages up to this size travel with their header."""
    credit_bytes: int = SETTINGS["credit_bytes"].default
    """Bytes that one rank may send to another before a receive takes them; exceeded by one eager message at most."""

    @property
    def credit_batch(self) -> int:
        """Credit is returned in batches of this size, or at once when the sender may be out of it."""
        return self.credit_bytes // 16


DEFAULT_MESSAGE_SIZES: Final = MessageSizes()


class LentStreams(NamedTuple):
    """The state of the streams with one peer between two frames, for code that continues them."""

    next_id: int
    used: int
    sent: int
    arrived: int
    """The bytes of this rank's stream that were sent, and that the peer is known to have."""
    expected_id: int
    held: int
    owed: int
    unacknowledged: int
    received: int
    """The bytes of the peer's stream that have arrived."""


class UnfinishedMessage(NamedTuple):
    """A large message that is under way when the streams are taken back."""

    view: memoryview
    """The bytes of its array."""
    tag: int
    dtype_code: int
    shape: tuple[int, ...]
    message_id: int
    is_send: bool
    moved: int
    """Bytes of DATA frames that a send has sent, with headers; bytes of payload that a receive has got."""
    is_cleared: bool
    """Whether the peer has asked for the payload of a send."""
    left: int
    """Bytes of the present DATA frame of a receive that are still to come."""


class _Copied(NamedTuple):
    """A small message whose frame waits for room in the line."""

    payload: bytes
    tag: int
    is_object: bool
    dtype_code: int
    shape: tuple[int, ...]


class MessageHost(Protocol):
    """What the links of one rank share."""

    sizes: MessageSizes

    ready: set[int]
    """Peers for which there are bytes to send."""
    resuming: set[int]
    """Peers with a new connection that have not said yet how much they have received."""
    order: Iterator[int]
    """Numbers receives and arrivals."""

    listened: set[int]
    """Tags of messages that need no receive."""
    heard: list[tuple[int, bytes]]
    """Sources and payloads of such messages."""

    def arrived(self, arrival: ArrivingMessage) -> None:
        """Give an announced message to the first receive that fits, or queue it."""

    def deliver(self, arrival: ArrivingMessage) -> None:
        """End the receive of a message whose payload is here."""

    def end(self, operation: Operation, error: BaseException | None = None) -> None:
        """End an operation."""


class MessageLink:
    """The state of the streams with one peer."""

    def __init__(self, peer: int, host: MessageHost) -> None:
        self._peer, self._host = peer, host
        self._sizes = host.sizes
        self._credit_batch = host.sizes.credit_batch
        self.outlet = Outlet(self._payload_arrived, self._next_frame, peer, host.ready)
        self.inlet = Inlet(
            self._begin, self._landed, self._resumed, self._heard, host.sizes.eager_bytes, listened=host.listened
        )
        self.is_over = False
        """Whether the peer has said that nothing follows."""
        self.is_failed = False
        """Whether the peer is gone."""
        self._has_lane = False
        # Towards the peer.
        self._next_id = 0
        self._used = 0
        """Credit taken: bytes announced for which no credit came back."""
        self._waiting: tuple[deque[MessageSend], ...] = tuple(deque() for _ in PRIORITIES)
        """By class: not announced, because there is no credit."""
        self._with_share: dict[float, deque[MessageSend]] = {}
        """By share, where that is less than 1: the same. No queue is empty."""
        self._frames: tuple[deque[MessageSend | _Copied], ...] = tuple(deque() for _ in PRIORITIES)
        """By class: what has credit, and no number yet, because the line has no room."""
        self._announced: dict[int, MessageSend] = {}
        """By message id: large messages whose header was sent and whose payload has not arrived."""
        # From the peer.
        self._expected_id = 0
        self._held = 0
        """What the peer counts as used, as far as its frames have arrived."""
        self._owed = 0
        """The part of `held` that is matched: credit to give back."""
        self._gives_at = host.sizes.credit_bytes // (2 if host.listened else 1)
        """What the peer holds when it may be out of credit: calls have messages with shares, of at least half."""
        self._incomplete: dict[int, ArrivingMessage] = {}
        """By message id: announced messages whose payload is not complete."""
        self._unacknowledged = 0
        """The cost of the frames received since the last acknowledgement."""
        self._last_acks = (0, 0)
        """Where the last acknowledgements to the peer that follow each other begin and end in the stream."""
        self._awaits_start = False
        """Whether the peer had not said where its stream continues, when the connection was last quiet."""
        self._said_until = 0
        """Where the last other frame to the peer ended, when the connection was last quiet."""
        self._acks_in = self._heard_bytes = 0
        """The bytes of acknowledgements from the peer, and those of its other frames when it was last quiet."""

    # Connections

    def lane_opened(self) -> None:
        """Use a new connection: continue where the last one broke."""
        self._awaits_start, self._has_lane = False, True
        self.inlet.lane_opened()
        self.outlet.lane_opened(self.inlet.received)
        if self.outlet.is_in_doubt:
            self._host.resuming.add(self._peer)

    def lane_ended(self) -> None:
        """Note that the connection ended; what was under way is kept for the next one."""
        self._has_lane = False
        self.outlet.lane_ended()
        self._host.resuming.discard(self._peer)
        if self.is_failed:
            self.inlet.clear()

    def fell_quiet(self) -> None:
        """Note that nothing moves on the connection for a moment, and say how much has arrived, if that was not said.

        Both ends do so, so an end that hears nothing of what it said (`is_unheard`) knows that it is lost: a machine on
        the way has taken it, acknowledged it, and not passed it on. An acknowledgement is no reason for another one.
        """
        self._awaits_start = not self.inlet.has_begun  # with which every connection begins, in both directions
        if self.is_over or self.is_failed or self._awaits_start or self.outlet.has_unsent:
            return
        start, end = self._last_acks
        self._said_until = start if self.outlet.sent == end else self.outlet.sent
        if (heard := self.inlet.received - self._acks_in) > self._heard_bytes:
            self._heard_bytes = heard
            self._acknowledge()

    @property
    def is_unheard(self) -> bool:
        """Whether the peer has not said yet that it has what was said until the connection was last quiet."""
        return (self._awaits_start or self.outlet.arrived < self._said_until) and not (self.is_over or self.is_failed)

    def lend(self) -> LentStreams | None:
        """Return the state of the streams, if no frame and no message is under way: then `take_back` must follow.

        The code that gets the state may send and receive messages, ACK and CREDIT frames, and must treat them as this
        class does. Nothing else may be called here until `take_back`.
        """
        outlet, inlet = self.outlet, self.inlet
        is_quiet = outlet.is_idle and inlet.is_between_frames and not (self.is_over or self.is_failed)
        if not is_quiet or any(self._waiting) or self._with_share or self._announced or self._incomplete:
            return None
        return LentStreams(
            self._next_id,
            self._used,
            outlet.sent,
            outlet.arrived,
            self._expected_id,
            self._held,
            self._owed,
            self._unacknowledged,
            inlet.received,
        )

    def take_back(
        self, streams: LentStreams, kept: bytes, unfinished: UnfinishedMessage | None = None
    ) -> MessageSend | Receive | None:
        """Go on from where the streams are now, and return the operation of the unfinished message.

        `kept` are the last bytes that were sent, before the payload of an unfinished message; see `Outlet.passed`.
        """
        self._next_id, self._used, self._expected_id = streams.next_id, streams.used, streams.expected_id
        self._held, self._owed, self._unacknowledged = streams.held, streams.owed, streams.unacknowledged
        self.inlet.received = streams.received
        if unfinished is not None and unfinished.is_send:
            return self._go_on_sending(streams, kept, unfinished)
        self.outlet.passed(streams.sent, streams.arrived, kept)
        return None if unfinished is None else self._go_on_receiving(unfinished)

    def _go_on_sending(self, streams: LentStreams, kept: bytes, message: UnfinishedMessage) -> MessageSend:
        send = MessageSend(message.view, self._peer, message.tag, message.dtype_code, message.shape, is_object=False)
        send.message_id, send.is_cleared = message.message_id, message.is_cleared
        self._announced[send.message_id] = send
        self.outlet.passed(streams.sent - message.moved, streams.arrived, kept)
        if send.is_cleared:
            self.outlet.go_on(send, message.moved)
        return send

    def _go_on_receiving(self, message: UnfinishedMessage) -> Receive:
        header = MessageHeader(
            wire.RTS, message.message_id, len(message.view), message.tag, False, message.dtype_code, message.shape
        )
        expect = message.dtype_code, message.shape
        receive = Receive(self._peer, message.tag, message.view, expect, next(self._host.order))
        arrival = ArrivingMessage(self._peer, header, next(self._host.order))
        arrival.is_asked_for = arrival.is_matched = True
        arrival.target, arrival.filled = message.view, message.moved
        receive.arrival, arrival.receive = arrival, receive
        self._incomplete[header.message_id] = arrival
        if message.left:
            self.inlet.go_on(arrival, message.left)
        elif message.moved == header.payload_bytes:
            self._landed(arrival)
        return receive

    def fail(self, error: BaseException) -> Iterable[ArrivingMessage]:
        """Give the peer up and end all sends to it; return the messages whose payload will not come."""
        self.is_failed = True
        queued = [each for queue in self._frames for each in queue if isinstance(each, MessageSend)]
        waiting_sends = itertools.chain(*self._waiting, *self._with_share.values())
        for send in [*self._announced.values(), *queued, *waiting_sends]:
            self._host.end(send, error)
        arrivals = self._incomplete.values()
        self._announced, self._incomplete = {}, {}
        for waiting in self._waiting:
            waiting.clear()
        self._with_share.clear()
        for frames in self._frames:
            frames.clear()
        self.outlet.clear()
        if self._has_lane:  # what is on its way has to be read to its end
            self.inlet.drop()
        else:
            self.inlet.clear()
        return arrivals

    # Towards the peer

    def send(self, send: MessageSend) -> None:
        """Announce a message, as soon as there is credit."""
        if send.share < 1:
            self._with_share.setdefault(send.share, deque()).append(send)
        else:
            self._waiting[send.priority].append(send)
        self._announce()

    def tell(self, data: bytes, tag: int, priority: int) -> bool:
        """Send a small message, if that needs no operation: there is credit, and the peer is not gone."""
        size = len(data)
        if self.is_failed or self._used >= self._sizes.credit_bytes or size > self._sizes.eager_bytes:
            return False  # while sends wait, there is no credit, so it overtakes none of them
        self._used += HEADER_COST + size
        if self.outlet.push_if_clear(wire.pack_small(tag, self._next_id, size) + data):
            self._next_id += 1
        else:
            self._frames[priority].append(_Copied(data, tag, True, 0, ()))
            self.outlet.queue_frame()
        return True

    def withdraw(self, send: MessageSend) -> bool:
        """Cancel a send; False if it was announced already."""
        waiting = self._waiting[send.priority] if send.share == 1 else self._with_share.get(send.share)
        if not waiting or send not in waiting:
            return False
        waiting.remove(send)
        if not waiting:
            self._with_share.pop(send.share, None)
        return True

    def say_end(self) -> None:
        """Tell the peer that nothing follows."""
        self.outlet.push_frames()
        self.push(MessageHeader(wire.END))

    def push(self, header: MessageHeader) -> None:
        """Send a frame without a payload."""
        self.outlet.push(wire.encode(header))

    def _announce(self) -> None:
        credit = self._sizes.credit_bytes
        for waiting in self._waiting:
            while waiting and self._used < credit:
                self._announce_one(waiting.popleft())
        for share in sorted(self._with_share, reverse=True):
            waiting = self._with_share[share]
            while waiting and self._used < share * credit:
                self._announce_one(waiting.popleft())
            if not waiting:
                del self._with_share[share]

    def _announce_one(self, send: MessageSend) -> None:
        is_small = len(send.view) <= self._sizes.eager_bytes
        self._used += HEADER_COST + (len(send.view) if is_small else 0)
        if self.outlet.is_clear:
            self.outlet.push(self._numbered(send))
        else:
            frame: MessageSend | _Copied = send
            if is_small:
                frame = _Copied(bytes(send.view), send.tag, send.is_object, send.dtype_code, send.shape)
            self._frames[send.priority].append(frame)
            self.outlet.queue_frame()
        if is_small:
            self._host.end(send)

    def _next_frame(self, least: int) -> bytes | None:
        """Return the frame of the next message of a class, or of one above it."""
        for queue in self._frames[: least + 1]:
            if queue:
                return self._numbered(queue.popleft())
        return None

    def _numbered(self, message: MessageSend | _Copied) -> bytes:
        """Return the frame of a message, with the next number: messages have them in the order of their frames."""
        message_id, self._next_id = self._next_id, self._next_id + 1
        if isinstance(message, _Copied):
            payload, tag, is_object, code, shape = message
            header = MessageHeader(wire.EAGER, message_id, len(payload), tag, is_object, code, shape)
            return wire.encode(header) + payload
        message.message_id = message_id
        if len(message.view) <= self._sizes.eager_bytes:
            return message.header(wire.EAGER) + message.view
        self._announced[message_id] = message
        return message.header(wire.RTS)

    def _payload_arrived(self, payload: Payload) -> None:
        assert isinstance(payload, MessageSend)
        del self._announced[payload.message_id]
        self._host.end(payload)

    def _cleared(self, send: MessageSend, wanted: int) -> None:
        if wanted:
            send.is_cleared = True
            self.outlet.move(send)
        else:  # the receiver consumed the message without its payload
            del self._announced[send.message_id]
            self._host.end(send)

    # From the peer

    def matched(self, arrival: ArrivingMessage, *, is_wanted: bool) -> None:
        """Ask for the payload of a large message that a receive took, or refuse it; give back the message's credit."""
        header = arrival.header
        if header.kind == wire.RTS and not arrival.is_asked_for:
            arrival.is_asked_for = True
            if not is_wanted:
                del self._incomplete[header.message_id]
            self.push(MessageHeader(wire.CTS, header.message_id, header.payload_bytes if is_wanted else 0))
        if not arrival.is_matched:
            self._owed += arrival.cost
            self._give_credit()

    def _resumed(self, position: int) -> None:
        self.outlet.resume(position)
        self._host.resuming.discard(self._peer)

    def _acknowledge(self) -> None:
        self._unacknowledged = 0
        begins_at, (start, end) = self.outlet.end, self._last_acks
        self.push(MessageHeader(wire.ACK, payload_bytes=self.inlet.received))
        self._last_acks = start if end == begins_at else begins_at, self.outlet.end

    def _note_frame(self, header: MessageHeader) -> None:
        """Count a frame, and check one that announces a message: it is the next one, and there is credit for it."""
        if self.is_over:
            raise RemoteProtocolError(f"a frame after END: {header}")
        self._acks_in += wire.FIXED_BYTES if header.kind == wire.ACK else 0
        self._unacknowledged += HEADER_COST + (header.payload_bytes if header.kind == wire.EAGER else 0)
        if self._unacknowledged >= ACK_BATCH:
            self._acknowledge()
        if header.kind <= wire.RTS:
            is_small = header.payload_bytes <= self._sizes.eager_bytes
            if header.message_id != self._expected_id or is_small != (header.kind == wire.EAGER):
                raise RemoteProtocolError(f"a message out of turn (expected {self._expected_id}): {header}")
            if self._held >= self._sizes.credit_bytes:
                raise RemoteProtocolError(f"a message without credit: {header}")
            self._expected_id += 1

    def _heard(self, header: MessageHeader, data: bytes) -> None:
        """Take a whole message that needs no receive."""
        self._note_frame(header)
        cost = HEADER_COST + len(data)
        self._held += cost
        self._owed += cost
        self._host.heard.append((self._peer, data))
        if self._owed >= self._credit_batch or self._held >= self._gives_at:
            self._give_credit()

    def _begin(self, header: MessageHeader) -> Landing | None:
        self._note_frame(header)
        match header.kind:
            case wire.EAGER | wire.RTS:
                return self._received_announcement(header)
            case wire.DATA:
                arrival = self._incomplete.get(header.message_id)
                if arrival is None or not 0 < header.payload_bytes <= len(arrival.target) - arrival.filled:
                    raise RemoteProtocolError(f"data that was not asked for: {header}")
                return arrival
            case wire.CTS:
                send = self._announced.get(header.message_id)
                if send is None or send.is_cleared or header.payload_bytes not in (0, len(send.view)):
                    raise RemoteProtocolError(f"a request for data that was not offered: {header}")
                self._cleared(send, header.payload_bytes)
            case wire.ACK:
                self.outlet.acknowledged(header.payload_bytes)
            case wire.END:
                self.is_over = True
            case wire.RESUME:
                raise RemoteProtocolError("a connection began again in its middle")
            case _:
                given, used = header.payload_bytes, self._used
                if given > used:
                    raise RemoteProtocolError(f"credit of {given} bytes, of which {used} were used")
                self._used -= given
                self._announce()
        return None

    def _received_announcement(self, header: MessageHeader) -> ArrivingMessage | None:
        is_eager = header.kind == wire.EAGER
        arrival = ArrivingMessage(self._peer, header, next(self._host.order))
        self._held += arrival.cost
        self._incomplete[header.message_id] = arrival
        self._host.arrived(arrival)
        self._give_credit()  # it may have used up credit of which this rank still owes a part
        return arrival if is_eager else None

    def _give_credit(self) -> None:
        # The sender is out of credit when `held`, with what is still under way, reaches `credit_bytes`, or the share of
        # its next message. Once all of it has arrived, the second test holds whenever credit is owed, so no sender
        # waits for credit that is due.
        is_due = self._owed >= self._credit_batch or self._held >= self._gives_at
        if not self.is_failed and self._owed and is_due:
            self.push(MessageHeader(wire.CREDIT, payload_bytes=self._owed))
            self._held -= self._owed
            self._owed = 0

    def _landed(self, landing: Landing) -> None:
        if not isinstance(landing, ArrivingMessage):
            return  # of an operation that has failed meanwhile
        if landing.filled == landing.header.payload_bytes:
            landing.is_landed = True
            self._incomplete.pop(landing.header.message_id)
            if landing.header.kind == wire.RTS:
                self._acknowledge()  # the sender waits for it
            if landing.receive is not None:
                self._host.deliver(landing)
