"""Tagged messages between the ranks of a group, without sockets: matching, credit, and when bytes may move.

A receive takes the earliest announced message that fits its source and tag. Small messages are *eager*: they are sent
at once, as copies, while the peer holds less than `credit_bytes` of this rank's messages that no receive has taken;
then sends wait until the peer gives credit back. Messages that the peer may leave for long use up no more than a share
of it, so those that it waits for have the rest. Of a large message only the header is sent; the payload moves when a
receive asks for it, straight into the receiver's memory.

The driver moves the bytes of `link(peer)` over the connection with that peer: it sends `outlet.buffers()` and calls
`outlet.advance`, and receives into `inlet.buffers()` and calls `inlet.advance`. Finished operations collect in
`completed`; peers with bytes to send are in `ready`. A connection that breaks is replaced (`lane_ended`,
`lane_opened`): what did not arrive is sent again, and no operation is affected. A large send is over when the receiver
has acknowledged all of it.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import numpy as np

from covey.base.errors import ConfigError, CoveyError, MismatchError, RemoteProtocolError
from covey.base.numbers import ANY, BULK, REALTIME
from covey.proto.message import (
    Allocator,
    ArrivingMessage,
    MessageInfo,
    MessageSend,
    Operation,
    PeerFailures,
    Probe,
    Receive,
    Received,
    new_bytes,
)
from covey.proto.message_link import DEFAULT_MESSAGE_SIZES, MessageLink, MessageSizes
from covey.wire import message_header as wire
from covey.wire.message_header import MessageHeader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.proto.message_link import LentStreams, UnfinishedMessage

__all__ = ["MAX_TAG", "RESERVED_TAGS", "Matcher"]

MAX_TAG: Final = 2**63 - 1
RESERVED_TAGS: Final = 1 << 62
"""Tags from here on are covey's own; a receive with any tag does not match them."""


class Matcher:
    """The messages of one rank: matches, credit and payloads with every peer."""

    def __init__(
        self, rank: int, size: int, sizes: MessageSizes = DEFAULT_MESSAGE_SIZES, allocate: Allocator = new_bytes
    ) -> None:
        """`allocate` returns the memory of payloads that are received without `out`."""
        self.rank, self.size, self.sizes = rank, size, sizes
        self._allocate = allocate
        self.completed: list[Operation] = []
        """Operations that are over; the driver takes them out."""
        self.ready: set[int] = set()
        """Peers for which `outgoing` has bytes."""
        self.resuming: set[int] = set()
        """Peers with a new connection that have not said yet how much they have received."""
        self._links: dict[int, MessageLink] = {}
        self._failures = PeerFailures(size)
        self._posted: dict[tuple[int, int], deque[Receive]] = {}
        """Receives without a message, by the source and tag they ask for; each queue in the order they were posted."""
        self._unmatched: dict[tuple[int, int], deque[ArrivingMessage]] = {}
        """Messages without a receive, by source and tag; each queue in the order they were announced."""
        self._probes: list[Probe] = []
        """Probes that no message has answered."""
        self.order: Iterator[int] = itertools.count(1)
        """Numbers receives and arrivals."""
        self.listened: set[int] = set()
        """Tags whose messages need no receive: they are collected in `heard`."""
        self.heard: list[tuple[int, bytes]] = []
        """Sources and payloads of messages with such tags, in the order of their arrival; the driver takes them out."""

    # Operations

    def send(
        self,
        view: memoryview,
        peer: int,
        tag: int,
        *,
        dtype_code: int,
        shape: tuple[int, ...],
        is_object: bool,
        priority: int = BULK,
        share: float = 1.0,
    ) -> MessageSend:
        """Begin to send a message to `peer`; `view` is read until the send is over.

        It overtakes messages of lower classes that wait, also those with its tag. One that the peer may leave for long
        gets a `share` of the credit only, at least half, and those with a larger one do not wait for it.

        Raises:
            ConfigError: there is no such rank or tag.
        """
        _check(peer, tag, self.size, may_be_any=False)
        if len(shape) > wire.MAX_MESSAGE_NDIM:
            raise ConfigError(f"an array of {len(shape)} dimensions; covey sends up to {wire.MAX_MESSAGE_NDIM}")
        send = MessageSend(view, peer, tag, dtype_code, shape, is_object, priority, share)
        if peer == self.rank:
            self._send_to_self(send)
        elif (failure := self._failures.errors.get(peer)) is not None:
            self.end(send, failure)
        else:
            self.link(peer).send(send)
        return send

    def tell(self, data: bytes, peer: int, tag: int, priority: int = REALTIME) -> None:
        """Send a message for which the driver needs no operation. Raises what `send` does."""
        link = self._links.get(peer)
        if link is None or not link.tell(data, tag, priority):
            self.send(memoryview(data), peer, tag, dtype_code=0, shape=(), is_object=True, priority=priority)

    def receive(
        self,
        source: int,
        tag: int,
        out: memoryview | None = None,
        expect: tuple[int, tuple[int, ...]] | None = None,
    ) -> Receive:
        """Ask for the earliest message of `source` with `tag`, each of which may be ANY; written to `out` if given.

        `expect` is the dtype code and shape of `out`. A message of another dtype or size is consumed and ends the
        receive with MismatchError.

        Raises:
            ConfigError: there is no such rank or tag.
        """
        _check(source, tag, self.size, may_be_any=True)
        receive = Receive(source, tag, out, expect, next(self.order))
        arrival = _earliest(self._unmatched, source, tag)
        if arrival is not None:
            _remove(self._unmatched, (arrival.source, arrival.header.tag), arrival)
            self._match(arrival, receive)
        elif (failure := self._failures.of(source)) is not None:
            self.end(receive, failure)
        else:
            self._posted.setdefault((source, tag), deque()).append(receive)
        return receive

    def probe(self, source: int, tag: int) -> Probe:
        """Ask for a description of the message that a receive would get; the message stays where it is.

        Raises:
            ConfigError: there is no such rank or tag.
        """
        probe = Probe(source, tag)
        if (found := self.waiting(source, tag)) is not None:
            probe.result = found
            self.end(probe)
        elif (failure := self._failures.of(source)) is not None:
            self.end(probe, failure)
        else:
            self._probes.append(probe)
        return probe

    def waiting(self, source: int, tag: int) -> MessageInfo | None:
        """Describe the message that a receive would get now, if there is one.

        Raises:
            ConfigError: there is no such rank or tag.
        """
        _check(source, tag, self.size, may_be_any=True)
        arrival = _earliest(self._unmatched, source, tag)
        return None if arrival is None else arrival.info()

    def has_failed(self, peer: int) -> bool:
        """Tell whether `peer` is gone."""
        return peer in self._failures.errors

    def has_match(self, source: int, tag: int) -> bool:
        """Tell whether a receive would get its message now."""
        return _earliest(self._unmatched, source, tag) is not None

    def withdraw(self, operation: Operation) -> bool:
        """Cancel an operation that is not over; False for a send that was announced already.

        A receive can always be cancelled: its memory is not written any more, and a message that was on its way to it
        goes to the next receive that fits.
        """
        if isinstance(operation, MessageSend):
            return self.link(operation.peer).withdraw(operation)
        if isinstance(operation, Probe):
            self._probes.remove(operation)
            return True
        if (arrival := operation.arrival) is None:
            _remove(self._posted, (operation.source, operation.tag), operation)
        else:
            arrival.receive = operation.arrival = None
            if arrival.store is None:
                arrival.allocate(self._allocate)
            self.arrived(arrival)
        return True

    def put_back(self, receive: Receive) -> None:
        """Let the next receive that fits have the message of a receive that is over: no caller took its result.

        The message keeps its place in the order of arrivals. Nothing happens after `fail_all`.
        """
        message, arrival = receive.result, receive.arrival
        if message is None or self._failures.end_of_all is not None:
            return
        if arrival is None:  # it came while the streams were lent
            data = message.data if receive.out is None else np.frombuffer(receive.out, np.uint8)
            assert data is not None
            header = MessageHeader(
                wire.EAGER, 0, data.nbytes, message.tag, message.is_object, message.dtype_code, message.shape
            )
            arrival = ArrivingMessage(message.source, header, receive.order)
            arrival.target, arrival.filled, arrival.is_landed, arrival.is_matched = data.data, data.nbytes, True, True
        arrival.receive = receive.arrival = receive.result = None
        if arrival.store is None:
            arrival.allocate(self._allocate)
        self.arrived(arrival)

    # Bytes

    def link(self, peer: int) -> MessageLink:
        """Return the streams with `peer`: the same object for as long as this matcher is used."""
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = MessageLink(peer, self)
            link.is_failed = peer in self._failures.errors
        return link

    def lane_opened(self, peer: int) -> None:
        """Use a new connection with `peer`: continue where the last one broke."""
        self.link(peer).lane_opened()

    def lane_ended(self, peer: int) -> None:
        """Note that the connection with `peer` ended; what was under way is kept for the next one."""
        self.link(peer).lane_ended()

    def fell_quiet(self, peer: int) -> None:
        """Note that nothing moves on the connection with `peer` for a moment: see `MessageLink.fell_quiet`."""
        self.link(peer).fell_quiet()

    def is_unheard(self, peer: int) -> bool:
        """Tell whether `peer` does not say that it has what was sent, though it says so when nothing moves."""
        return self.link(peer).is_unheard

    def lend(self, peer: int) -> LentStreams | None:
        """Return the state of the streams with `peer` if nothing waits for a message, and no message of `peer` waits.

        See `MessageLink.lend`.
        """
        is_quiet = not (self._posted or self._probes or self.ready or self.resuming or self.completed)
        if not is_quiet or any(source == peer for source, _ in self._unmatched):
            return None
        return self.link(peer).lend()

    def take_back(
        self, peer: int, streams: LentStreams, kept: bytes, unfinished: UnfinishedMessage | None = None
    ) -> MessageSend | Receive | None:
        """Go on with the streams that were lent; return the operation of the message that is under way.

        See `MessageLink.take_back`.
        """
        return self.link(peer).take_back(streams, kept, unfinished)

    def has_parted(self, peer: int) -> bool:
        """Tell whether `peer` has said that nothing follows."""
        return peer in self._links and self._links[peer].is_over

    def progress(self, peer: int) -> int:
        """Return a number that grows with all bytes that arrive from or at `peer`."""
        return self.link(peer).inlet.received + self.link(peer).outlet.arrived

    def undelivered(self) -> bool:
        """Tell whether some accepted bytes were not sent yet, or may have to be sent again."""
        return any(
            link.outlet.has_unsent or link.outlet.is_in_doubt
            for peer, link in self._links.items()
            if peer not in self._failures.errors and not link.is_over
        )

    def fail(self, peer: int, error: BaseException) -> None:
        """Fail every operation that needs `peer`, now and later; its complete messages can still be received."""
        if peer in self._failures.errors:
            return
        self.ready.discard(peer)
        self.resuming.discard(peer)
        keys = [key for key in self._posted if key[0] in (peer, ANY)]
        probes = [probe for probe in self._probes if probe.source in (peer, ANY)]
        is_told = any(key[0] == ANY for key in keys) or any(probe.source == ANY for probe in probes)
        self._failures.note(peer, error, is_told=is_told)
        if link := self._links.get(peer):
            for arrival in link.fail(error):
                if arrival.receive is not None:
                    self.end(arrival.receive, error)
                elif not arrival.is_dropped:
                    _remove(self._unmatched, (peer, arrival.header.tag), arrival)
        for key in keys:
            for receive in self._posted.pop(key):
                self.end(receive, error)
        for probe in probes:
            self._probes.remove(probe)
            self.end(probe, error)

    def fail_all(self, error: BaseException) -> None:
        """Fail every operation with `error`, receives from this rank itself too; queued messages are dropped."""
        self._failures.end_of_all = error
        for peer in range(self.size):
            self.fail(peer, error)
        self._unmatched.clear()

    def finish_lines(self) -> None:
        """Start no further piece of a payload, so that every stream can end after a whole frame."""
        for link in self._links.values():
            link.outlet.finish_line()

    def say_end(self) -> None:
        """Tell all peers that nothing follows."""
        for peer, link in self._links.items():
            if peer not in self._failures.errors:
                link.say_end()

    # Matching

    def _send_to_self(self, send: MessageSend) -> None:
        # Copied even if it is large: one thread may send to itself first and receive afterwards.
        header = MessageHeader(wire.EAGER, 0, len(send.view), send.tag, send.is_object, send.dtype_code, send.shape)
        arrival = ArrivingMessage(self.rank, header, next(self.order))
        arrival.allocate(self._allocate)
        arrival.target[:] = send.view
        arrival.filled, arrival.is_landed = len(send.view), True
        self.end(send)
        self.arrived(arrival)

    def arrived(self, arrival: ArrivingMessage) -> None:
        """Give the message to the first receive that fits, or queue it."""
        source, tag = arrival.source, arrival.header.tag
        if tag in self.listened:
            if arrival.header.kind != wire.EAGER:
                arrival.is_dropped = True
                raise RemoteProtocolError(f"a message of {arrival.header.payload_bytes} bytes with tag {tag}")
            self._match(arrival, Receive(source, tag, None, None, next(self.order)))
            return
        keys = [(source, tag), (ANY, tag)]
        if tag < RESERVED_TAGS:
            keys += [(source, ANY), (ANY, ANY)]
        receives = [self._posted[key][0] for key in keys if key in self._posted]
        if receives:
            receive = min(receives, key=lambda receive: receive.order)
            _remove(self._posted, (receive.source, receive.tag), receive)
            self._match(arrival, receive)
            return
        if arrival.header.kind == wire.EAGER and arrival.store is None:
            arrival.allocate(self._allocate)
        queue = self._unmatched.setdefault((source, tag), deque())
        queue.append(arrival)
        if len(queue) > 1 and queue[-2].order > arrival.order:  # it comes back from a cancelled receive
            self._unmatched[source, tag] = deque(sorted(queue, key=lambda arrival: arrival.order))
        for probe in list(self._probes):
            if (found := self.waiting(probe.source, probe.tag)) is not None:
                self._probes.remove(probe)
                probe.result = found
                self.end(probe)

    def _match(self, arrival: ArrivingMessage, receive: Receive) -> None:
        error = receive.refusal(arrival) or self._place(arrival, receive)
        if error is not None:
            self.end(receive, error)
            arrival.is_dropped = True
            if arrival.store is None and arrival.header.kind == wire.EAGER:
                arrival.allocate(self._allocate)  # its bytes follow, although they are dropped
        else:
            receive.arrival, arrival.receive = arrival, receive
        if arrival.source != self.rank:
            self.link(arrival.source).matched(arrival, is_wanted=error is None)
        arrival.is_matched = True
        if error is None and arrival.is_landed:
            self.deliver(arrival)

    def _place(self, arrival: ArrivingMessage, receive: Receive) -> MismatchError | None:
        """Choose where the payload lands, unless that is known; return the error if there is no memory for it."""
        if arrival.store is None:
            if receive.out is not None:
                arrival.target = receive.out
            else:
                try:
                    arrival.allocate(self._allocate)
                except MemoryError:
                    return MismatchError(
                        f"the message from rank {arrival.source} with tag {arrival.header.tag} has "
                        f"{arrival.header.payload_bytes} bytes, and there is no memory for it; it is consumed"
                    )
        return None

    def deliver(self, arrival: ArrivingMessage) -> None:
        """End the receive of a message whose payload is here."""
        header, receive, store = arrival.header, arrival.receive, arrival.store
        assert receive is not None
        if receive.out is not None and store is not None:
            receive.out[:] = store.data
            store = None
        if header.tag in self.listened and store is not None:
            arrival.receive = None
            self.heard.append((arrival.source, store.tobytes()))
            return
        shape, is_object = header.shape, header.is_object
        receive.result = Received(arrival.source, header.tag, header.dtype_code, shape, is_object, store)
        self.end(receive)

    def end(self, operation: Operation, error: BaseException | None = None) -> None:
        """End an operation. A receive keeps its arrival for `put_back`, and no arrival keeps a receive that is over."""
        operation.error = error.again() if isinstance(error, CoveyError) else error
        if isinstance(operation, Receive) and operation.arrival is not None:
            operation.arrival.receive = None  # or else both, and the payload, would wait for the cyclic collector
        self.completed.append(operation)


def _check(rank: int, tag: int, size: int, *, may_be_any: bool) -> None:
    if not 0 <= rank < size and not (may_be_any and rank == ANY):
        raise ConfigError(f"there is no rank {rank} in a group of {size}")
    if not 0 <= tag <= MAX_TAG and not (may_be_any and tag == ANY):
        raise ConfigError(f"a tag is a number from 0 to 2**62 - 1, not {tag}")


def _earliest(unmatched: dict[_Key, deque[ArrivingMessage]], source: int, tag: int) -> ArrivingMessage | None:
    """Return the earliest message without a receive that fits a source and a tag, each of which may be ANY."""
    if source != ANY and tag != ANY:
        queue = unmatched.get((source, tag))
        return queue[0] if queue else None
    heads = [
        queue[0]
        for (from_rank, with_tag), queue in unmatched.items()
        if source in (ANY, from_rank) and (tag == with_tag or (tag == ANY and with_tag < RESERVED_TAGS))
    ]
    return min(heads, key=lambda arrival: arrival.order, default=None)


_Key: TypeAlias = tuple[int, int]
_Item = TypeVar("_Item", Receive, ArrivingMessage)


def _remove(queues: dict[_Key, deque[_Item]], key: _Key, item: _Item) -> None:
    queue = queues[key]
    if queue[0] is item:
        queue.popleft()
    else:
        queue.remove(item)
    if not queue:
        del queues[key]
