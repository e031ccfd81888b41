"""Runs the collectives of one group, in issue order, and turns every way they can end badly into one clear error.

A blocking operation runs on the thread that calls. `async_op=True` hands operations to one worker thread. The
control loop reports what other ranks say; it only ever notes a fault and wakes whoever sleeps, so lanes are touched
by one thread at a time.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
import queue
import select
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from covey.base.config import check_timeout
from covey.base.errors import (
    BusyError,
    ClosedError,
    ConnectError,
    CoveyError,
    DeadlineError,
    MismatchError,
    PeerLostError,
    RemoteProtocolError,
)
from covey.runtime import loop as control
from covey.runtime.execute import execute
from covey.runtime.fault import Fault
from covey.runtime.ledger import OPERATIONS, Call, Ledger
from covey.runtime.work import Work
from covey.wire import messages
from covey.wire.header import MAGIC, PREFIX, unpack

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from covey.base.arithmetic import Reduction
    from covey.base.config import GroupConfig
    from covey.net.lane import Lane, LaneClosedError
    from covey.plan.moves import Plan
    from covey.runtime.messenger import Messenger
    from covey.runtime.node import Node

logger = logging.getLogger("covey")

ANNOUNCE_SECONDS: Final = 0.2
"""A stall this long makes a rank ask the others where they are."""
WARN_SECONDS: Final = 30.0
"""A stall this long is told to the person who waits, with the names of the late."""
CAUSE_SECONDS: Final = 0.2
"""How long a broken lane waits for the news that tells why."""
ANSWER_SECONDS: Final = 0.15
"""How long a rank that found a contradiction collects what the others called."""
FLUSH_SECONDS: Final = 5.0
"""How long closing a group may take to hand messages over that were sent already."""
QUEUE_LIMIT: Final = 10_000
"""Asynchronous operations that may wait; the next one is an error, since something is running away."""
CACHED_PREFIXES: Final = 4096
MESSAGES: Final = Call(0, 0, 0, "a message")


class Engine:
    """The collectives of one group on this rank. A group of one has no node and runs nothing."""

    def __init__(
        self, node: Node | None, group_id: int, members: tuple[int, ...], name: str, config: GroupConfig
    ) -> None:
        """`members` are ranks of the run, in the order of the group's own ranks."""
        self.node = node
        self.id = group_id
        self.members = members
        self.name = name
        self.config = config
        self.size = len(members)
        self.rank = members.index(node.rank) if node is not None else 0
        self.ranks = range(self.size)
        self.contributors = self.size
        self.wake_fd = -1
        self.polls: dict[tuple[int, ...], select.poll] = {}
        self._wake_write_fd = -1
        self._ranks_by_member = {member: rank for rank, member in enumerate(members)}
        self._lanes: list[Lane | None] = [None] * self.size
        self._ledger = Ledger()
        self._sequence = 0
        self._call = Call(0, 0, 0, "")
        self._phase = 0
        self._timeout = self._deadline = 0.0
        self._announced = False
        self._warn_at = 0.0
        self._prefixes: dict[tuple[int, int], bytes] = {}
        self._quiet = contextvars.Context()
        """Where infinities and nans are numbers like others and not worth a warning; cheaper than np.errstate."""
        self._quiet.run(np.seterr, all="ignore")
        self._issuing = threading.Lock()
        self._fault: Fault | None = None
        self._first_error: BaseException | None = None
        self._fault_lock = threading.Lock()
        self._comparing = False
        self._closed = False
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Operations for the worker thread, each with its engine: the thread itself keeps none alive. None ends it."""
        self._counting = threading.Lock()
        self._unfinished = 0
        self._worker: threading.Thread | None = None
        self._running: Work[Any] | None = None
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        host = node.host if node is not None else ""
        same_host = 1 + sum(1 for peer in self._peers() if peer.contact is not None and peer.contact.host == host)
        self._spin = same_host <= cores
        self._messenger: Messenger | None = None
        self._messenger_lock = threading.Lock()
        self._descriptors: list[int] = []
        self._dropped = weakref.finalize(self, _drop, node, group_id, self._descriptors, self._queue)
        if node is not None:
            node.register(group_id, self)
            for peer in self._peers():  # who went before anyone could tell this group
                if peer.gone:
                    self.peer_gone(peer.rank, left=peer.left)

    def _peers(self) -> list[Any]:
        return [self.node.peers[member] for member in self.members if member != self.node.rank] if self.node else []

    @property
    def is_over(self) -> bool:
        """Whether the group was closed or has failed."""
        return self._closed or self._fault is not None

    @property
    def sequence(self) -> int:
        """The number of operations started."""
        return self._sequence

    def lane_kinds(self) -> dict[int, str]:
        """Return the kind of lane to each other rank: what it is if it is open, else what it will be."""
        return {
            rank: lane.kind if (lane := self._lanes[rank]) is not None else self.node.lanes.kind(member)
            for rank, member in enumerate(self.members)
            if self.node is not None and rank != self.rank
        }

    # Issuing

    def run(
        self,
        call: Call,
        body: Callable[[Engine], Any],
        *,
        timeout: float | None,
        async_op: bool,
        then: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Perform `body` as the next operation, or queue it and return a Work.

        `then` turns what `body` returns into the result; if it raises, only this call fails, not the group.
        """
        if not self._issuing.acquire(blocking=False):
            raise BusyError(
                f"another thread is in a collective of group {self.name!r}; {call.text} must wait for it, or use a "
                "group of its own: group.split(0)"
            )
        try:
            if self._fault is not None or self._closed:
                self._refuse(call)
            limit = self.config.timeout if timeout is None else check_timeout(timeout)
            if not async_op and not self._unfinished:
                return self._perform(call, body, then, limit)
            if not async_op and threading.current_thread() is self._worker:
                raise BusyError(f"{call.text} would wait for operations that wait for this callback; use async_op=True")
            work = self._enqueue(call, body, then, limit)
            return work if async_op else work.wait()
        finally:
            self._issuing.release()

    def _perform(
        self, call: Call, body: Callable[[Engine], Any], then: Callable[[Any], Any] | None, limit: float
    ) -> Any:
        self._sequence = sequence = self._sequence + 1
        self._ledger.enter(sequence, call)
        self._call = call
        self._phase = 0
        self._timeout = limit
        self._deadline = time.monotonic() + limit
        self._announced = False
        self._warn_at = 0.0
        try:
            result = body(self)
        except BaseException as error:
            self._gave_up(error)
            raise
        return result if then is None else then(result)

    def execute(self, plan: Plan, buffers: Sequence[np.ndarray[Any, Any]], reduction: Reduction | None = None) -> None:
        """Carry out one plan of the current operation."""
        call, phase = self._call, self._phase
        self._phase = phase + 1
        prefix = self._prefixes.get((call.fingerprint, phase))
        if prefix is None:
            if len(self._prefixes) > CACHED_PREFIXES:
                self._prefixes.clear()
            prefix = PREFIX.pack(MAGIC, call.operation, call.dtype, phase, 0, self.id, call.fingerprint)
            self._prefixes[call.fingerprint, phase] = prefix
        self._quiet.run(execute, plan, buffers, reduction, self.contributors, prefix, self._sequence, self, self._spin)

    def _gave_up(self, error: BaseException) -> None:
        """The current operation ended with `error`: the others must know, whatever it was."""
        if self._fault is None:
            text = f"rank {self.rank} gave up {self._what()}: {type(error).__name__}: {error}"
            self.fail(Fault("PeerLostError", text, (self.rank,)))
        if self._first_error is None:
            self._first_error = error

    def close_with(self, error: MismatchError) -> NoReturn:
        """Close the group with an error that every rank finds by itself, and raise it."""
        self.fail(Fault("MismatchError", str(error)), tell=False)
        self._gave_up(error)
        raise error

    def _refuse(self, call: Call) -> None:
        """Raise what keeps `call` from running."""
        if self._fault is None:
            raise ClosedError(f"{call.text}: group {self.name!r} is closed")
        if self._first_error is None:
            self._first_error = self._error(call.text, self._sequence + 1)
            raise self._first_error
        raise ClosedError(
            f"{call.text}: group {self.name!r} is closed since an earlier failure: {self._first_error}"
        ) from self._first_error

    def require_open(self) -> None:
        """Raise what keeps messages from being sent or received, if anything does."""
        if self._fault is not None or self._closed:
            self._refuse(MESSAGES)

    @functools.cached_property
    def lane_family(self) -> str:
        """ "ring" if by the host map all pairs of the group share memory, else "stream": the same on all ranks."""
        if self.node is None:
            return "ring"
        kinds = {self.node.lanes.kind(member) for member in self.members if member != self.node.rank}
        return "ring" if kinds <= {"shm", "memory"} else "stream"

    # The worker thread

    def _enqueue(self, call: Call, body: Any, then: Any, limit: float) -> Work[Any]:
        work: Work[Any] = Work(f"{call.text} of group {self.name!r}")
        with self._counting:
            if self._unfinished >= QUEUE_LIMIT:
                raise BusyError(f"{QUEUE_LIMIT} operations of group {self.name!r} wait already; wait for some of them")
            self._unfinished += 1
        self._queue.put((self, work, call, body, then, limit))
        if self._worker is None:
            self._worker = threading.Thread(target=_work, args=(self._queue,), name=f"covey-{self.name}", daemon=True)
            self._worker.start()
        return work

    def run_queued(self, work: Work[Any], call: Call, body: Any, then: Any, limit: float) -> None:
        """Perform an operation on the worker thread."""
        self._running = work
        result, error = None, None
        try:
            if self._fault is not None or self._closed:
                self._refuse(call)
            result = self._perform(call, body, then, limit)
        except BaseException as failure:
            error = failure
        self._running = None
        with self._counting:
            self._unfinished -= 1
        work.conclude(result, error)
        work.notify()

    # What an execution asks

    def check(self) -> None:
        if self._fault is not None:
            raise self._error(self._call.text, self._sequence)

    def lane(self, peer: int) -> Lane:
        lane = self._lanes[peer]
        return lane if lane is not None else self._open_lane(peer)

    def _open_lane(self, peer: int) -> Lane:
        assert self.node is not None
        self._open_wake()
        since = time.monotonic()
        while True:
            self.check()
            try:
                lane: Lane = self.node.lanes.open(self.id, self.members[peer], "collectives", ANNOUNCE_SECONDS)
            except DeadlineError:
                self.stalled(since, (peer,))
            except ConnectError as error:
                self.lane_closed(peer, error)
            except ClosedError:
                self.check()
                raise
            else:
                self._lanes[peer] = lane
                return lane

    def _open_wake(self) -> None:
        with self._fault_lock:
            if self.wake_fd < 0:
                self.wake_fd, self._wake_write_fd = _wake_descriptors()
                self._descriptors += {self.wake_fd, self._wake_write_fd}
        if self._fault is not None:
            self._wake()

    def stalled(self, since: float, waiting_for: tuple[int, ...]) -> float:
        now = time.monotonic()
        if now >= self._deadline:
            self._announce(self._sequence)  # once more: who could not answer before may do so now, and is not to blame
            self._await_fault(ANSWER_SECONDS)
            self.check()
            late = self._late(waiting_for)
            text = f"{self._what()} did not finish within {self._timeout:g} s; {self._name_ranks(late)} did not come"
            self.fail(Fault("DeadlineError", text, late))
            self.check()
        if not self._announced and now >= since + ANNOUNCE_SECONDS:
            self._announced = True
            self._announce(self._sequence)
        if not self._warn_at:
            self._warn_at = now + WARN_SECONDS
        elif now >= self._warn_at:
            self._warn_at = now + WARN_SECONDS
            waited = now - (self._deadline - self._timeout)
            logger.warning("rank %d waits in %s since %.0f s for %s", self.rank, self._what(), waited,
                           self._name_ranks(self._late(waiting_for)))  # fmt: skip
        moments = (self._deadline, self._warn_at, since + ANNOUNCE_SECONDS)
        return min(moments[:2] if self._announced else moments)

    def lane_closed(self, peer: int, error: LaneClosedError | ConnectError) -> None:
        text = self._why_closed(peer, str(error))
        self.fail(Fault("PeerLostError", text, (peer,)))
        self.check()

    def _why_closed(self, peer: int, symptom: str) -> str:
        """Wait a moment for the news why a lane ended; say what there is to say if the group has not failed by then."""
        assert self.node is not None
        other = self.node.peers[self.members[peer]]
        self._await_fault(CAUSE_SECONDS, lambda: other.left)
        why = "left the group" if other.left else f"closed the group, or the connection broke ({symptom})"
        return f"{self._name_ranks((peer,))} {why}"

    def _await_fault(self, seconds: float, or_else: Callable[[], bool] = lambda: False) -> None:
        poll = select.poll()
        if self.wake_fd >= 0:
            poll.register(self.wake_fd, select.POLLIN)
        until = time.monotonic() + seconds
        while self._fault is None and not or_else() and time.monotonic() < until:
            poll.poll(10)

    def wrong_header(self, peer: int, expected: bytes, header: bytes) -> None:
        try:
            theirs, ours = unpack(header), unpack(expected)
        except RemoteProtocolError as error:
            self.fail(Fault("RemoteProtocolError", f"rank {peer} sent {error}", (peer,)))
            self.check()
            raise
        self._announce(min(theirs.sequence, ours.sequence))
        self._await_fault(4 * ANSWER_SECONDS)
        operation = OPERATIONS[theirs.operation] if theirs.operation < len(OPERATIONS) else "something else"
        text = (
            f"in group {self.name!r}, rank {self.rank} is in {self._call.text} as its operation {ours.sequence}, but "
            f"rank {peer} sent {theirs.nbytes} bytes of {operation} as its operation {theirs.sequence}"
        )
        self.fail(Fault("MismatchError", text, (peer,)))
        self.check()

    # Faults

    def fail(self, fault: Fault, *, tell: bool = True) -> None:
        """Note the first thing that went wrong, wake whoever waits, and tell the other ranks."""
        with self._fault_lock:
            if self._fault is not None:
                return
            self._fault = fault
        self._wake()
        if self.node is not None:
            self.node.lanes.abandon(lambda key: key[0] == self.id, ClosedError(fault.text))
            if tell:
                others = (member for member in self.members if member != self.node.rank)
                self.node.tell(others, self._revocation(fault))

    def _revocation(self, fault: Fault) -> messages.Revoke:
        return messages.Revoke(self.id, fault.kind, fault.text[:8000], fault.ranks)

    def fault_error(self) -> CoveyError | None:
        """Return the error for a fault, for those who run beside the collectives."""
        if self._fault is None:
            return None
        error = self._error("point-to-point", self._sequence)
        self._first_error = self._first_error or error
        return error

    def lost_error(self, peer: int) -> CoveyError:
        """Return the error for a peer whose lane for messages ended; wait a moment for the news that tells why."""
        text = self._why_closed(peer, "end of stream")
        lost = PeerLostError(
            text, rank=peer, host=self._host(peer), operation="point-to-point", sequence=self._sequence
        )
        return self.fault_error() or lost

    def _error(self, what: str, sequence: int) -> CoveyError:
        fault = self._fault
        assert fault is not None
        host = self._host(fault.culprit)
        return fault.error(rank=self.rank, host=host, operation=what, sequence=sequence, group=self.name)

    def _what(self) -> str:
        return f"{self._call.text}, operation {self._sequence} of group {self.name!r}"

    def _host(self, rank: int) -> str:
        if self.node is None or rank not in self.ranks or rank == self.rank:
            return self.node.card.host_name if self.node is not None else ""
        return str(self.node.peers[self.members[rank]].host_name)

    def _name_ranks(self, ranks: tuple[int, ...]) -> str:
        if self.node is None:
            return ""
        names = []
        for rank in ranks:
            peer = self.node.peers.get(self.members[rank])
            names.append(f"rank {rank}" + (f" ({peer.host_name}, process {peer.pid})" if peer is not None else ""))
        return " and ".join(names)

    def _late(self, waiting_for: tuple[int, ...]) -> tuple[int, ...]:
        """Return who keeps this operation waiting: those who never came to it, or else those it waits for."""
        return self._ledger.late(self._sequence, self.ranks, self.rank) or tuple(sorted(set(waiting_for)))

    def _wake(self) -> None:
        with self._fault_lock:  # the number may mean another file once `close` has had its turn
            if self._wake_write_fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_write_fd, b"\1\0\0\0\0\0\0\0")

    # What the control loop reports

    def _announce(self, sequence: int) -> None:
        call = self._ledger.at(sequence)
        if self.node is None:
            return
        message = messages.Announce(
            self.id, sequence, call.fingerprint if call else 0, call.text[:2000] if call else ""
        )
        self.node.tell((member for member in self.members if member != self.node.rank), message)

    def heard(self, peer: int, message: messages.Announce | messages.Position | messages.Revoke) -> None:
        rank = self._ranks_by_member.get(peer)
        if rank is None or self.node is None:
            return
        if isinstance(message, messages.Revoke):
            ranks = tuple(rank for rank in message.ranks if rank in self.ranks)
            self.fail(Fault(message.kind, message.text, ranks or (rank,)), tell=False)
            return
        if isinstance(message, messages.Announce):
            if self._fault is not None:  # the news may have come before the asker knew of the group
                self.node.tell((peer,), self._revocation(self._fault))
            mine = self._ledger.at(message.sequence)
            answer = messages.Position(
                self.id,
                self._ledger.entered,
                message.sequence,
                mine.fingerprint if mine else 0,
                mine.text[:2000] if mine else "",
            )
            self.node.tell((peer,), answer)
        entered = message.entered if isinstance(message, messages.Position) else message.sequence
        differs = self._ledger.heard(rank, entered, message.sequence, message.fingerprint, message.call)
        if differs and not self._comparing:
            self._comparing = True
            self._announce(message.sequence)
            control.control_loop().call_later(ANSWER_SECONDS, self._compare, message.sequence)

    def _compare(self, sequence: int, *, is_last: bool = False) -> None:
        """Everyone had time to say what it called at `sequence`; at least one differs from us."""
        if not is_last and not self._ledger.heard_all(sequence, self.ranks, self.rank):
            self._announce(sequence)  # who had not come to it then may have come to it by now
            control.control_loop().call_later(ANSWER_SECONDS, functools.partial(self._compare, sequence, is_last=True))
            return
        story = self._ledger.story(sequence, self.ranks, self.rank)
        text = f"ranks of group {self.name!r} called different things as operation {sequence}: {story}"
        self.fail(Fault("MismatchError", text))

    def peer_gone(self, peer: int, *, left: bool) -> None:
        rank = self._ranks_by_member.get(peer)
        if rank is not None and not left:
            reason = self.node.peers[peer].reason if self.node is not None else ""
            why = f"is gone: {reason}" if reason else "is gone"
            self.fail(Fault("PeerLostError", f"{self._name_ranks((rank,))} {why}", (rank,)))

    def lane_arrived(self, peer: int, purpose: str) -> None:
        if purpose == "messages":
            with self._messenger_lock:
                messenger = self._messenger
            if messenger is not None:
                messenger.adopt(self._ranks_by_member[peer], self._message_socket(self._ranks_by_member[peer]))

    # Messages

    def messenger(self) -> Messenger:
        """Return what sends and receives this group's messages, opened on first use."""
        from covey.runtime.messenger import Messenger

        with self._messenger_lock:
            if self._messenger is None:
                if self._closed:
                    self._refuse(MESSAGES)
                self._open_wake()
                self._messenger = Messenger(
                    self.rank,
                    self.size,
                    open_lane=self._message_socket,
                    wake_fd=self.wake_fd,
                    fault=self.fault_error,
                    lost=self.lost_error,
                    name=self.name,
                )
                arrived = self.node.lanes.arrived(self.id, "messages") if self.node is not None else []
                for member in arrived:
                    rank = self._ranks_by_member[member]
                    self._messenger.adopt(rank, self._message_socket(rank))
            return self._messenger

    def _message_socket(self, rank: int, deadline: float | None = None) -> socket.socket:
        """Return the socket that carries messages to and from `rank`; the same one every time."""
        assert self.node is not None
        deadline = time.monotonic() + self.config.timeout if deadline is None else deadline
        while (left := deadline - time.monotonic()) > 0:
            try:
                sock = self.node.lanes.open(self.id, self.members[rank], "messages", min(1.0, left))
                return sock  # type: ignore[no-any-return]
            except DeadlineError:
                if (fault := self.fault_error()) is not None:
                    raise fault from None
            except (ConnectError, ClosedError) as error:
                raise self.lost_error(rank) from error
        raise DeadlineError(f"no lane for messages to {self._name_ranks((rank,))} opened in time", late=(rank,))

    def forked(self) -> None:
        self._issuing = threading.Lock()
        self._counting = threading.Lock()
        self._fault_lock = threading.Lock()
        self._messenger_lock = threading.Lock()
        self._worker = None
        self._dropped.detach()
        text = f"group {self.name!r} belongs to the process that joined; this one was forked from it and cannot use it"
        self._fault, self._first_error = Fault("ClosedError", text), None
        self.node = None
        works = [self._running]
        while not self._queue.empty():
            if (item := self._queue.get()) is not None:
                works.append(item[1])
        if self._messenger is not None:
            works += self._messenger.pending()
            self._messenger = None
        for work in works:
            if work is not None and not work.done():
                work.fail(ClosedError(text))

    # The end

    def close(self) -> None:
        """Free lanes, thread and descriptors. Closing twice is fine."""
        with self._messenger_lock:  # no messenger is made from here on
            if self._closed:
                return
            self._closed = True
        if self._messenger is not None:
            self._messenger.close(time.monotonic() + FLUSH_SECONDS)
        if self._unfinished or self._issuing.locked():
            text = f"group {self.name!r} was closed on rank {self.rank} with operations pending"
            self.fail(Fault("ClosedError", text, (self.rank,)))
        self._queue.put(None)
        if self._worker is not None and self._worker is not threading.current_thread():
            self._worker.join(5.0)
        if self._issuing.acquire(timeout=5.0):  # another thread's operation ends before its lanes do
            self._issuing.release()
        self._lanes = [None] * self.size
        self.polls.clear()
        self._dropped.detach()
        if self.node is not None:
            self.node.forget(self.id, self._sequence)
        with self._fault_lock:
            self.wake_fd = self._wake_write_fd = -1
            _close_all(self._descriptors)


def _work(work_queue: queue.SimpleQueue[Any]) -> None:
    """Perform queued operations, one after the other, until there comes a None."""
    while (item := work_queue.get()) is not None:
        engine, *operation = item
        engine.run_queued(*operation)
        del item, engine, operation  # they may hold large arrays; do not keep them while waiting for the next


def _drop(node: Node | None, group_id: int, descriptors: list[int], work_queue: queue.SimpleQueue[Any]) -> None:
    """Free what a group held that nobody closed. The garbage collector calls this, anywhere: it must not lock."""
    work_queue.put(None)
    if node is not None:
        control.soon(node.forget, group_id, 0)
    _close_all(descriptors)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()


def _wake_descriptors() -> tuple[int, int]:
    """Return the two ends of something that stays readable once it is written."""
    if hasattr(os, "eventfd"):
        descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        return descriptor, descriptor
    return os.pipe()
