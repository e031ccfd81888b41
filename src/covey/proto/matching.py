"""Tagged messages between the ranks of a group, without sockets: matching, credit, and when bytes may move.

A receive takes the earliest announced message that fits its source and tag. Small messages are *eager*: they are sent
at once, as copies, while the peer holds less than CREDIT_BYTES of this rank's messages that no receive has taken; then
sends wait until the peer gives credit back. Of a large message only the header is sent; the payload moves when a
receive asks for it, straight into the receiver's memory.

The driver writes `outgoing(peer)` to the connection with that peer and calls `sent`; it reads from the connection into
`incoming(peer)` and calls `received`. Finished operations collect in `completed`; peers with bytes to send are in
`ready`. A connection that breaks is replaced (`lane_ended`, `lane_opened`): what did not arrive is sent again, and no
operation is affected. A large send is over when the receiver has acknowledged all of it.
"""

from __future__ import annotations

from collections import deque
from typing import Final, TypeAlias, TypeVar

from covey.base.errors import ConfigError, MismatchError, PeerLostError, RemoteProtocolError
from covey.proto.message import HEADER_COST, Arrival, Operation, Receive, Received, Send
from covey.proto.message_stream import EAGER_BYTES, Inlet, Landing, Outlet, Payload
from covey.wire import message_header as wire
from covey.wire.message_header import Header

ANY: Final = -1
"""As a source or a tag: any."""
MAX_TAG: Final = 2**63 - 1
RESERVED_TAGS: Final = 1 << 62
"""Tags from here on are covey's own; a receive with any tag does not match them."""
CREDIT_BYTES: Final = 4 * 1024 * 1024
"""Bytes that one rank may send to another before a receive takes them; exceeded by one eager message at most."""
CREDIT_BATCH: Final = CREDIT_BYTES // 16
"""Credit is returned in batches of this size, or at once when the sender may be out of it."""
ACK_BATCH: Final = 256 * 1024
"""Small frames are acknowledged in batches of this size: a sender keeps this much, and what is under way."""


class _Link:
    """The state of the streams with one peer."""

    def __init__(self, matcher: Matcher, peer: int) -> None:
        self.outlet = Outlet(matcher._payload_arrived)
        self.inlet = Inlet(
            lambda header: matcher._begin(peer, header), matcher._landed, lambda at: matcher._resumed(peer, at)
        )
        # Towards the peer.
        self.next_id = 0
        self.used = 0
        """Credit taken: bytes announced for which no credit came back."""
        self.waiting: deque[Send] = deque()
        """Not announced: no credit."""
        self.announced: dict[int, Send] = {}
        """By message id: large messages whose header was sent and whose payload has not arrived."""
        # From the peer.
        self.expected_id = 0
        self.held = 0
        """What the peer counts as `used`, as far as its frames have arrived."""
        self.owed = 0
        """The part of `held` that is matched: credit to give back."""
        self.incomplete: dict[int, Arrival] = {}
        """By message id: announced messages whose payload is not complete."""
        self.unacknowledged = 0
        """The cost of the frames received since the last acknowledgement."""
        self.is_over = False
        """Whether the peer has said that nothing follows."""


class Matcher:
    """The messages of one rank: matches, credit and payloads with every peer."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.completed: list[Operation] = []
        """Operations that are over; the driver takes them out."""
        self.ready: set[int] = set()
        """Peers for which `outgoing` has bytes."""
        self.resuming: set[int] = set()
        """Peers with a new connection that have not said yet how much they have received."""
        self._links: dict[int, _Link] = {}
        self._failures: dict[int, BaseException] = {}
        """Peers that are gone, in order, and why."""
        self._untold: list[BaseException] = []
        """Failures of peers while no receive from any rank waited: the next such receive gets each once."""
        self._end_of_all: BaseException | None = None
        """Why all operations end, if they do."""
        self._posted: dict[tuple[int, int], deque[Receive]] = {}
        """Receives without a message, by the source and tag they ask for; each queue in the order they were posted."""
        self._unmatched: dict[tuple[int, int], deque[Arrival]] = {}
        """Messages without a receive, by source and tag; each queue in the order they were announced."""
        self._order = 0

    # Operations

    def send(
        self, view: memoryview, peer: int, tag: int, *, dtype_code: int, shape: tuple[int, ...], is_object: bool
    ) -> Send:
        """Begin to send a message to `peer`; `view` is read until the send is over.

        Raises:
            ConfigError: there is no such rank or tag.
        """
        self._check(peer, tag, may_be_any=False)
        if len(shape) > wire.MAX_NDIM:
            raise ConfigError(f"an array of {len(shape)} dimensions; covey sends up to {wire.MAX_NDIM}")
        send = Send(view, peer, tag, dtype_code, shape, is_object)
        if peer == self.rank:
            self._send_to_self(send)
        elif (failure := self._failures.get(peer)) is not None:
            self._end(send, failure)
        else:
            self._link(peer).waiting.append(send)
            self._announce(peer)
        return send

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
        self._check(source, tag, may_be_any=True)
        receive = Receive(source, tag, out, expect, self._next_order())
        arrival = self._earliest(source, tag)
        if arrival is not None:
            _remove(self._unmatched, (arrival.source, arrival.header.tag), arrival)
            self._match(arrival, receive)
        elif (failure := self._failure_of(source)) is not None:
            self._end(receive, failure)
        else:
            self._posted.setdefault((source, tag), deque()).append(receive)
        return receive

    def has_failed(self, peer: int) -> bool:
        """Tell whether `peer` is gone."""
        return peer in self._failures

    def has_match(self, source: int, tag: int) -> bool:
        """Tell whether a receive would get its message now."""
        return self._earliest(source, tag) is not None

    def withdraw(self, operation: Operation) -> bool:
        """Cancel an operation that is not over; False for a send that was announced already.

        A receive can always be cancelled: its memory is not written any more, and a message that was on its way to it
        goes to the next receive that fits.
        """
        if isinstance(operation, Send):
            waiting = self._link(operation.peer).waiting
            if operation not in waiting:
                return False
            waiting.remove(operation)
        elif (arrival := operation.arrival) is None:
            _remove(self._posted, (operation.source, operation.tag), operation)
        else:
            arrival.receive = operation.arrival = None
            if arrival.store is None:
                arrival.allocate()
            self._arrive(arrival)
        return True

    # Bytes

    def outgoing(self, peer: int) -> list[bytes | memoryview]:
        """Return the bytes to send to `peer` next."""
        return self._link(peer).outlet.buffers()

    def sent(self, peer: int, count: int) -> None:
        """Take note that the first `count` bytes of `outgoing(peer)` are sent."""
        link = self._link(peer)
        link.outlet.advance(count)
        if not link.outlet:
            self.ready.discard(peer)

    def incoming(self, peer: int) -> list[memoryview]:
        """Return where to write the bytes that come from `peer` next."""
        return self._link(peer).inlet.buffers()

    def received(self, peer: int, count: int) -> None:
        """Take note that `count` more bytes from `peer` were written to `incoming(peer)`.

        Raises:
            RemoteProtocolError: they break the protocol; call `fail(peer, ...)`.
        """
        try:
            self._link(peer).inlet.advance(count)
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"rank {peer} broke the protocol of messages: {error}") from None

    def lane_opened(self, peer: int) -> None:
        """Use a new connection with `peer`: continue where the last one broke."""
        link = self._link(peer)
        link.inlet.lane_opened()
        link.outlet.lane_opened(link.inlet.received)
        if link.outlet.is_in_doubt:
            self.resuming.add(peer)
        self.ready.add(peer)

    def lane_ended(self, peer: int) -> None:
        """Note that the connection with `peer` ended; what was under way is kept for the next one."""
        self._link(peer).outlet.lane_ended()
        self.ready.discard(peer)
        self.resuming.discard(peer)

    def has_parted(self, peer: int) -> bool:
        """Tell whether `peer` has said that nothing follows."""
        return peer in self._links and self._links[peer].is_over

    def progress(self, peer: int) -> int:
        """Return a number that grows with all bytes that arrive from or at `peer`."""
        return self._link(peer).inlet.received + self._link(peer).outlet.arrived

    def undelivered(self) -> bool:
        """Tell whether some accepted bytes were not sent yet, or may have to be sent again."""
        return any(
            link.outlet.has_unsent or link.outlet.is_in_doubt
            for peer, link in self._links.items()
            if peer not in self._failures and not link.is_over
        )

    def fail(self, peer: int, error: BaseException) -> None:
        """Fail every operation that needs `peer`, now and later; its complete messages can still be received."""
        if peer in self._failures:
            return
        self._failures[peer] = error
        self.ready.discard(peer)
        self.resuming.discard(peer)
        if link := self._links.get(peer):
            for send in [*link.announced.values(), *link.waiting]:
                self._end(send, error)
            for arrival in link.incomplete.values():
                if arrival.receive is not None:
                    self._end(arrival.receive, error)
                elif not arrival.is_dropped:
                    _remove(self._unmatched, (peer, arrival.header.tag), arrival)
            link.announced, link.waiting, link.incomplete = {}, deque(), {}
            link.outlet.clear()
        keys = [key for key in self._posted if key[0] in (peer, ANY)]
        if not any(key[0] == ANY for key in keys):
            self._untold.append(error)
        for key in keys:
            for receive in self._posted.pop(key):
                self._end(receive, error)

    def fail_all(self, error: BaseException) -> None:
        """Fail every operation with `error`, receives from this rank itself too; queued messages are dropped."""
        self._end_of_all = error
        for peer in range(self.size):
            self.fail(peer, error)
        self._unmatched.clear()

    def finish_lines(self) -> None:
        """Start no further piece of a payload, so that every stream can end after a whole frame."""
        for peer, link in self._links.items():
            link.outlet.finish_line()
            if not link.outlet:
                self.ready.discard(peer)

    def say_end(self) -> None:
        """Tell all peers that nothing follows."""
        for peer in self._links:
            if peer not in self._failures:
                self._push(peer, wire.encode(Header(wire.END)))

    # Towards a peer

    def _announce(self, peer: int) -> None:
        link = self._link(peer)
        while link.waiting and link.used < CREDIT_BYTES:
            send = link.waiting.popleft()
            send.message_id, link.next_id = link.next_id, link.next_id + 1
            link.used += HEADER_COST
            if len(send.view) <= EAGER_BYTES:
                link.used += len(send.view)
                self._push(peer, send.header(wire.EAGER) + send.view)
                self._end(send)
            else:
                link.announced[send.message_id] = send
                self._push(peer, send.header(wire.RTS))

    def _push(self, peer: int, frame: bytes) -> None:
        outlet = self._link(peer).outlet
        outlet.push(frame)
        if outlet:
            self.ready.add(peer)

    def _payload_arrived(self, payload: Payload) -> None:
        assert isinstance(payload, Send)
        del self._link(payload.peer).announced[payload.message_id]
        self._end(payload)

    def _send_to_self(self, send: Send) -> None:
        # Copied even if it is large: one thread may send to itself first and receive afterwards.
        header = Header(wire.EAGER, 0, len(send.view), send.tag, send.is_object, send.dtype_code, send.shape)
        arrival = Arrival(self.rank, header, self._next_order())
        arrival.allocate()
        arrival.target[:] = send.view
        arrival.filled, arrival.is_landed = len(send.view), True
        self._end(send)
        self._arrive(arrival)

    # From a peer

    def _resumed(self, peer: int, position: int) -> None:
        outlet = self._link(peer).outlet
        outlet.resume(position)
        self.resuming.discard(peer)
        if outlet:
            self.ready.add(peer)

    def _acknowledge(self, peer: int, link: _Link) -> None:
        link.unacknowledged = 0
        self._push(peer, wire.encode(Header(wire.ACK, payload_bytes=link.inlet.received)))

    def _begin(self, peer: int, header: Header) -> Landing | None:
        link = self._link(peer)
        if link.is_over:
            raise RemoteProtocolError(f"a frame after END: {header}")
        link.unacknowledged += HEADER_COST + (header.payload_bytes if header.kind == wire.EAGER else 0)
        if link.unacknowledged >= ACK_BATCH:
            self._acknowledge(peer, link)
        match header.kind:
            case wire.EAGER | wire.RTS:
                return self._announced(link, peer, header)
            case wire.DATA:
                arrival = link.incomplete.get(header.message_id)
                if arrival is None or not 0 < header.payload_bytes <= len(arrival.target) - arrival.filled:
                    raise RemoteProtocolError(f"data that was not asked for: {header}")
                return arrival
            case wire.CTS:
                send = link.announced.get(header.message_id)
                if send is None or send.is_cleared or header.payload_bytes not in (0, len(send.view)):
                    raise RemoteProtocolError(f"a request for data that was not offered: {header}")
                self._cleared(link, send, header.payload_bytes)
            case wire.ACK:
                link.outlet.acknowledged(header.payload_bytes)
            case wire.END:
                link.is_over = True
            case wire.RESUME:
                raise RemoteProtocolError("a connection began again in its middle")
            case _:
                if header.payload_bytes > link.used:
                    raise RemoteProtocolError(f"credit of {header.payload_bytes} bytes, of which {link.used} were used")
                link.used -= header.payload_bytes
                self._announce(peer)
        return None

    def _cleared(self, link: _Link, send: Send, wanted: int) -> None:
        if wanted:
            send.is_cleared = True
            link.outlet.move(send)
            if link.outlet:
                self.ready.add(send.peer)
        else:  # the receiver consumed the message without its payload
            del link.announced[send.message_id]
            self._end(send)

    def _announced(self, link: _Link, peer: int, header: Header) -> Arrival | None:
        is_eager = header.kind == wire.EAGER
        if header.message_id != link.expected_id or is_eager != (header.payload_bytes <= EAGER_BYTES):
            raise RemoteProtocolError(f"a message out of turn (expected {link.expected_id}): {header}")
        if link.held >= CREDIT_BYTES:
            raise RemoteProtocolError(f"a message without credit: {header}")
        arrival = Arrival(peer, header, self._next_order())
        link.expected_id += 1
        link.held += arrival.cost
        link.incomplete[header.message_id] = arrival
        self._arrive(arrival)
        self._give_credit(peer, link)  # it may have used up credit of which this rank still owes a part
        return arrival if is_eager else None

    def _arrive(self, arrival: Arrival) -> None:
        """Give the message to the first receive that fits, or queue it."""
        source, tag = arrival.source, arrival.header.tag
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
            arrival.allocate()
        queue = self._unmatched.setdefault((source, tag), deque())
        queue.append(arrival)
        if len(queue) > 1 and queue[-2].order > arrival.order:  # it comes back from a cancelled receive
            self._unmatched[source, tag] = deque(sorted(queue, key=lambda arrival: arrival.order))

    def _match(self, arrival: Arrival, receive: Receive) -> None:
        source, header = arrival.source, arrival.header
        error = receive.refusal(arrival) or _place(arrival, receive)
        if error is not None:
            self._end(receive, error)
            arrival.is_dropped = True
            if arrival.store is None and header.kind == wire.EAGER:
                arrival.allocate()  # its bytes follow, although they are dropped
        else:
            receive.arrival, arrival.receive = arrival, receive
        if header.kind == wire.RTS and not arrival.is_asked_for:
            arrival.is_asked_for = True
            if error is not None:
                del self._link(source).incomplete[header.message_id]
            self._push(source, wire.encode(Header(wire.CTS, header.message_id, 0 if error else header.payload_bytes)))
        if source != self.rank and not arrival.is_matched:
            self._link(source).owed += arrival.cost
            self._give_credit(source, self._link(source))
        arrival.is_matched = True
        if error is None and arrival.is_landed:
            self._deliver(arrival)

    def _give_credit(self, peer: int, link: _Link) -> None:
        # The sender is out of credit when `held`, with what is still under way, reaches CREDIT_BYTES. Once all of that
        # has arrived, the second test holds whenever credit is owed, so no sender waits for credit that is due.
        if peer not in self._failures and link.owed and (link.owed >= CREDIT_BATCH or link.held >= CREDIT_BYTES):
            self._push(peer, wire.encode(Header(wire.CREDIT, payload_bytes=link.owed)))
            link.held -= link.owed
            link.owed = 0

    def _landed(self, landing: Landing) -> None:
        assert isinstance(landing, Arrival)
        if landing.filled == landing.header.payload_bytes:
            landing.is_landed = True
            link = self._link(landing.source)
            link.incomplete.pop(landing.header.message_id)
            if landing.header.kind == wire.RTS:
                self._acknowledge(landing.source, link)  # the sender waits for it
            if landing.receive is not None:
                self._deliver(landing)

    def _deliver(self, arrival: Arrival) -> None:
        header, receive, store = arrival.header, arrival.receive, arrival.store
        assert receive is not None
        if receive.out is not None and store is not None:
            receive.out[:] = store.data
            store = None
        shape, is_object = header.shape, header.is_object
        receive.result = Received(arrival.source, header.tag, header.dtype_code, shape, is_object, store)
        self._end(receive)

    # Helpers

    def _link(self, peer: int) -> _Link:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = _Link(self, peer)
        return link

    def _end(self, operation: Operation, error: BaseException | None = None) -> None:
        operation.error = error
        self.completed.append(operation)

    def _next_order(self) -> int:
        self._order += 1
        return self._order

    def _earliest(self, source: int, tag: int) -> Arrival | None:
        if source != ANY and tag != ANY:
            queue = self._unmatched.get((source, tag))
            return queue[0] if queue else None
        heads = [
            queue[0]
            for (from_rank, with_tag), queue in self._unmatched.items()
            if source in (ANY, from_rank) and (tag == with_tag or (tag == ANY and with_tag < RESERVED_TAGS))
        ]
        return min(heads, key=lambda arrival: arrival.order, default=None)

    def _failure_of(self, source: int) -> BaseException | None:
        if source != ANY or self._end_of_all is not None:
            return self._failures.get(source, self._end_of_all)
        if self._untold:
            return self._untold.pop(0)
        if self.size > 1 and len(self._failures) == self.size - 1:
            text = f"no other rank of the group of {self.size} is left that could send a message"
            return PeerLostError(text, rank=-1, operation="recv from any rank")
        return None

    def _check(self, rank: int, tag: int, *, may_be_any: bool) -> None:
        if not 0 <= rank < self.size and not (may_be_any and rank == ANY):
            raise ConfigError(f"there is no rank {rank} in a group of {self.size}")
        if not 0 <= tag <= MAX_TAG and not (may_be_any and tag == ANY):
            raise ConfigError(f"a tag is a number from 0 to 2**63 - 1, not {tag}")


def _place(arrival: Arrival, receive: Receive) -> MismatchError | None:
    """Choose where the payload lands, unless that is known; return the error if there is no memory for it."""
    if arrival.store is None:
        if receive.out is not None:
            arrival.target = receive.out
        else:
            try:
                arrival.allocate()
            except MemoryError:
                return MismatchError(
                    f"the message from rank {arrival.source} with tag {arrival.header.tag} has "
                    f"{arrival.header.payload_bytes} bytes, and there is no memory for it; it is consumed"
                )
    return None


_Key: TypeAlias = tuple[int, int]
_Item = TypeVar("_Item", Receive, Arrival)


def _remove(queues: dict[_Key, deque[_Item]], key: _Key, item: _Item) -> None:
    queue = queues[key]
    if queue[0] is item:
        queue.popleft()
    else:
        queue.remove(item)
    if not queue:
        del queues[key]
