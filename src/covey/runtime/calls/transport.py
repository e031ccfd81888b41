"""What calls need of the network: small messages in order, and parts of payloads beside them."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from covey.base.errors import PeerLostError
from covey.runtime.pool import Bytes, pool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.base.errors import CoveyError
    from covey.base.numbers import Seat
    from covey.runtime.fault import Fault
    from covey.runtime.signals import HeldSignals
    from covey.runtime.work import Work


PartsTaker: TypeAlias = "Callable[[list[Any] | BaseException | None], None]"


class CallListener(Protocol):
    """What a transport reports; on any thread."""

    def heard(self, messages: list[tuple[Seat, bytes]]) -> None:
        """Take messages and their senders. One thread at a time reports those of a peer, in order."""

    def lost(self, peer: Seat) -> None:
        """Note that a peer is gone for good."""

    def broke_protocol(self, peer: Seat, error: CoveyError) -> None:
        """Note that a peer sent what no correct node sends."""

    def ended(self, fault: Fault) -> None:
        """Note that the other nodes have nothing to do with this one any more, and why."""

    def close(self) -> None:
        """Note that this node leaves its run."""

    def forked(self) -> None:
        """Note that this process is a fork of the one that joined, and cannot use its calls."""


class CallTransport(Protocol):
    """Connects one node with the others. No method waits for the network. Messages to a lost peer are dropped."""

    @property
    def seat(self) -> Seat:
        """This node."""

    def lists_handles(self) -> bool:
        """Tell whether all nodes of the run know lists of handles (`wire.versions.PASSED_HANDLES`)."""

    def is_member(self, seat: Seat) -> bool:
        """Tell whether messages can be sent to a seat: it is that of a node of the run, which may be lost."""

    def may_be_member(self, seat: int) -> bool:
        """Tell whether a seat is that of a node of the run, or may be that of a newcomer that others know already."""

    def send(self, messages: list[tuple[Seat, bytes]]) -> None:
        """Send messages of at most 64 KiB to peers, now. Messages to one peer arrive in order."""

    def note_small_call(self) -> None:
        """Let parts of payloads give way for a moment, because a call without parts begins."""

    def send_parts(self, peer: Seat, tag: int, parts: Sequence[Any], priority: int, share: float = 1.0) -> None:
        """Send the parts of a payload. Their memory is read until the peer has fetched or refused them.

        Those of a class above `priority` overtake them, and those with a larger `share` of what may wait at the peer
        have room beside them.
        """

    def fetch_parts(self, peer: Seat, tag: int, sizes: Sequence[int], then: PartsTaker) -> None:
        """Receive the parts of a payload; `then` gets their memory, None if there is none, or why they do not come.

        The second means that the peer is lost, or that this node leaves.
        """

    def refuse_parts(self, peer: Seat, tag: int, count: int) -> None:
        """Let the peer know that the parts of a payload are not wanted."""

    def drive(self, work: Work[Any], deadline: float | None) -> None:
        """Wait until a call has ended or the deadline has passed, and receive messages meanwhile."""

    def drive_once(self, work: Work[Any], held: HeldSignals) -> None:
        """Receive messages until a call has ended, unless another thread does so, or a signal comes; may do nothing."""

    def wake_poll(self) -> None:
        """End a wait of the calling thread in `drive_once`. Called by a signal handler."""

    def work_ended(self) -> None:
        """Wake the thread that waits for a call which has ended, if it receives messages meanwhile."""

    def attend(self) -> None:
        """Expect messages that no thread waits for."""

    def run_soon(self, job: Callable[[], None], elsewhere: Callable[[], None]) -> bool:
        """Run a short job on this thread, once what has arrived is handled and another thread may receive.

        If another job takes long before it, `elsewhere` is called instead. Return False if this thread cannot run jobs.
        """

    def lost_error(self, peer: Seat, rank: int, operation: str) -> CoveyError:
        """Return the error of a call to a lost peer."""

    def cut_off(self, peer: Seat, error: CoveyError) -> None:
        """Have nothing more to do with a peer that broke the protocol."""

    def deliver_answers(self) -> None:
        """Wait until all parts of answers are delivered: while they move, and for half a minute at most."""

    def shut(self) -> None:
        """Deliver what was sent, within a few seconds, and free everything."""


class BackgroundTransport:
    """What callers need of a transport whose messages other threads receive, and whose payloads take no time."""

    def lists_handles(self) -> bool:
        """Return False: a handle is for the two nodes that a connection has."""
        return False

    def is_member(self, seat: Seat) -> bool:
        """Return False: no other node is known."""
        return False

    def may_be_member(self, seat: int) -> bool:
        """Return False: there are no newcomers."""
        return False

    def note_small_call(self) -> None:
        """Do nothing: no parts are on their way."""

    def drive(self, work: Work[Any], deadline: float | None) -> None:
        """Wait for a call, whose answer another thread receives."""
        work.wait_until_done(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def drive_once(self, work: Work[Any], held: HeldSignals) -> None:
        """Do nothing: another thread receives."""

    def wake_poll(self) -> None:
        """Do nothing: no signal is held back for long."""

    def work_ended(self) -> None:
        """Do nothing: a call wakes the thread that waits for it."""

    def attend(self) -> None:
        """Do nothing: messages are received all the time."""

    def run_soon(self, job: Callable[[], None], elsewhere: Callable[[], None]) -> bool:
        """Return False: functions do not run on the threads that receive."""
        return False

    def deliver_answers(self) -> None:
        """Do nothing: no parts are on their way."""


class Loopback(BackgroundTransport):
    """The transport from a node to itself; of a node that is alone, the only one."""

    def __init__(self, listener: CallListener, seat: Seat) -> None:
        self._listener, self.seat = listener, seat
        self._parts: dict[int, deque[list[Any]]] = {}
        """By tag: parts that this node sent to itself, as copies: the function must not change its caller's arrays."""

    def send(self, messages: list[tuple[Seat, bytes]]) -> None:
        """Deliver messages here; those to other nodes, of a node that is alone, are dropped."""
        self._listener.heard([(peer, data) for peer, data in messages if peer == self.seat])

    def send_parts(self, peer: Seat, tag: int, parts: Sequence[Any], priority: int, share: float = 1.0) -> None:
        """Keep copies of the parts of a payload; before the message that they belong to."""
        self._parts.setdefault(tag, deque()).append([_copy_of(np.frombuffer(part, np.uint8)) for part in parts])

    def fetch_parts(self, peer: Seat, tag: int, sizes: Sequence[int], then: PartsTaker) -> None:
        """Take the parts of a payload."""
        then(self._take(tag))

    def refuse_parts(self, peer: Seat, tag: int, count: int) -> None:
        """Drop the parts of a payload."""
        self._take(tag)

    def _take(self, tag: int) -> list[Any]:
        waiting = self._parts[tag]
        parts = waiting.popleft()
        if not waiting:
            del self._parts[tag]
        return parts

    def lost_error(self, peer: Seat, rank: int, operation: str) -> CoveyError:
        """Return the error of a call to a node that is not there."""
        return PeerLostError(f"{operation}: this node is alone", rank=rank, operation=operation)

    def cut_off(self, peer: Seat, error: CoveyError) -> None:
        """Do nothing: a node does not part with itself."""

    def shut(self) -> None:
        """Do nothing: there is nothing to free."""


def _copy_of(part: Bytes) -> Bytes:
    copy = pool.take(part.nbytes)
    copy[:] = part
    return copy
