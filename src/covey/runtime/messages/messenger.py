"""Point-to-point messages of a group over stream sockets: the shell around `proto.matching`.

One thread at a time drives (`driving_thread`): it polls all lanes (`lane_poll`) and moves the messages of all threads.
One lock guards all state. It is held during socket calls, none of which blocks, but not while polling.

A lane that ends is replaced until its peer is lost (`lane_renewal`), and the matcher sends again what did not arrive.
Meanwhile the messages with that peer wait, each until its own deadline.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import CancelledError, ClosedError
from covey.base.numbers import ANY, BULK
from covey.proto.matching import Matcher
from covey.proto.message import MessageSend, Operation, Receive, describe_source
from covey.runtime.messages.driving_thread import DrivingThread
from covey.runtime.messages.lane_poll import LanePoll
from covey.runtime.messages.lane_renewal import LaneOpening, LaneRenewal
from covey.runtime.messages.lending import LendingLock, StreamLending
from covey.runtime.messages.pending_works import PendingWorks, end, late_error
from covey.runtime.pool import pool
from covey.runtime.work import Work

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from covey.proto.message import Received
    from covey.proto.message_link import MessageSizes
    from covey.runtime.counters import MessageTraffic

DELIVERY_CHECK_EVERY: Final = 0.003
"""How often `close` checks whether the kernel has delivered what it was given."""


class Messenger:
    """Sends and receives the messages of one group on this rank. Any thread may call any method."""

    _driving_kind: type[DrivingThread] = DrivingThread
    _lends = True
    """Whether its streams may be lent to the compiled executor."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        open_lane: Callable[[int, float | None], socket.socket],
        renew_lane: Callable[[int, Any, float], None],
        give_up: Callable[[int], None],
        wake_fd: int,
        fault: Callable[[], BaseException | None],
        lost: Callable[[int], BaseException | None],
        told: Callable[[BaseException], None] = lambda _: None,
        name: str,
        sizes: MessageSizes,
        may_spin: bool = False,
    ) -> None:
        """Nothing is opened until a message needs it.

        Args:
            open_lane: returns a connected, non-blocking stream socket to a rank, or raises once the deadline (on
                time.monotonic(), or None) has passed. Called once per rank, unless it raises.
            renew_lane: asks for a socket to a rank in place of one that ended, after a pause in seconds. Returns at
                once; `adopt` or `unreachable` is called with the outcome.
            give_up: refuses all further sockets to a rank.
            wake_fd: a descriptor that is readable once the group has failed; never read here.
            fault: returns why the group failed, or None.
            lost: returns why a rank whose lane ended is lost, or None if that is not known; may block for a moment.
            told: called with every error that ends an operation or keeps one from starting.
            name: the group's name, for error messages.
            sizes: which messages are sent at once, and how many.
            may_spin: whether there are enough cores for waiting threads to poll without sleeping.
        """
        self._rank, self._size, self._name = rank, size, name
        self._fault, self._told = fault, told
        self._matcher = Matcher(rank, size, sizes, pool.take)
        self._pending = PendingWorks(self._matcher)
        self._lending = StreamLending(self._matcher, self._pending, name)
        self._lock = LendingLock(self._lending) if self._lends else threading.Lock()
        self._driving = self._driving_kind(self._lock, name, may_spin=may_spin)
        self._lending.wake = self._driving.alarm()
        self._lanes = LanePoll(self._matcher, self._driving, wake_fd, spins=may_spin)
        self._opening = LaneOpening(self._lock, self._matcher, self._lanes, open_lane=open_lane)
        self._renewal = LaneRenewal(
            self._lock, self._matcher, self._lanes, name, renew_lane=renew_lane, give_up=give_up, fault=fault, lost=lost
        )
        self.short = self._lending.short
        """By rank: what sends and receives arrays without Python, while nothing else is under way with it."""
        self._is_closed = False
        """Whether no lane may be added any more. No operation may start once `_driving` is stopping."""

    def start_send(
        self,
        view: memoryview,
        dst: int,
        tag: int,
        dtype_code: int,
        shape: tuple[int, ...],
        is_object: bool,
        deadline: float | None = None,
        priority: int = BULK,
    ) -> Work[None]:
        """Start to send `view`, which holds an array of that dtype and shape, or an encoded object.

        The work is done when `view` may be reused: at once for up to 64 KiB, while the receiver holds less than 4 MiB
        from this rank that it has not received.

        Raises:
            ConfigError: there is no such rank or tag.
            CoveyError: the group has failed or is closed, or the lane cannot be opened.
        """
        self._raise_if_over()
        self._opening.open(self, dst, deadline)
        with self._lock:
            operation = self._matcher.send(
                view, dst, tag, dtype_code=dtype_code, shape=shape, is_object=is_object, priority=priority
            )
            self.traffic.began(view)
            self._hurry(dst, priority)
            work = self._start(operation, f"send of {len(view)} bytes to rank {dst} with tag {tag}")
        return self._started(work)

    def _hurry(self, dst: int, priority: int) -> None:
        """Have what is no bulk overtake what is. With the lock."""
        if priority < BULK and dst != self._rank and (lane := self._lanes.by_rank.get(dst)) is not None:
            lane.hurry()

    def start_receive(
        self,
        src: int,
        tag: int,
        out: memoryview | None,
        expect: tuple[int, tuple[int, ...]] | None,
        deadline: float | None = None,
        then: Callable[[Received], Any] | None = None,
    ) -> Work[Any]:
        """Start to receive the earliest message from `src` with `tag`; both may be ANY.

        The payload is written to `out`, if given; `expect` is the dtype code and shape of `out`, and a message of
        another dtype or size is dropped and fails the work with MismatchError. `then` makes the result from it.

        Raises:
            ConfigError: there is no such rank or tag.
            CoveyError: the group has failed or is closed, or a lane cannot be opened.
        """
        self._raise_if_over()
        self._opening.open_for(self, src, tag, deadline)
        with self._lock:
            operation = self._matcher.receive(src, tag, out, expect)
            work = self._start(operation, f"receive from {describe_source(src, tag)}", then, self._put_back)
        return self._started(work)

    def start_probe(self, src: int, tag: int, deadline: float | None = None) -> Work[Any]:
        """Start to wait for a message, which stays there; the result describes it. Raises what `start_receive` does."""
        self._raise_if_over()
        self._opening.open_for(self, src, tag, deadline)
        with self._lock:
            operation = self._matcher.probe(src, tag)
            work = self._start(operation, f"probe for {describe_source(src, tag)}", None, lambda _: None)
        return self._started(work)

    def look(self, src: int, tag: int) -> Any:
        """Return a description of the message from `src` with `tag` that is here, or None."""
        self._raise_if_over()
        with self._lock:
            found = self._matcher.waiting(src, tag)
        if found is None and self._driving.turn_once(self):  # it has read what has arrived
            with self._lock:
                found = self._matcher.waiting(src, tag)
        return found

    def cancel(self, work: Work[Any]) -> bool:
        """End a work with CancelledError, if nothing of it was sent; return whether it was."""
        with self._lock:
            operation = self._pending.operation_of(work)
            if operation is None or not self._matcher.withdraw(operation):
                return False
            self._pending.remove(operation)
            self._lanes.flush_ready()
        work.fail(CancelledError(f"{work.description} was cancelled"))
        self._settle()
        self._driving.works_ended()
        return True

    @property
    def traffic(self) -> MessageTraffic:
        """Counts the messages."""
        return self._lending.traffic

    @traffic.setter
    def traffic(self, traffic: MessageTraffic) -> None:
        self._lending.traffic = traffic

    def wait(self, work: Work[Any], deadline: float | None, peer: int | None = None) -> Any:
        """Drive until `work` is done and return its result; `deadline` is on time.monotonic().

        Afterwards, messages with `peer` may pass without Python for as long as nothing else is under way.

        Raises:
            DeadlineError: `work` was not done in time and has failed with this error; `late` has the ranks it needed. A
                receive is withdrawn, and its message goes to the next receive that matches. A send that was announced
                to the receiver cannot be withdrawn, so its lane is closed and later messages to that rank fail.
            Exception: the error that ended the work.
        """
        try:
            self._drive(work, deadline)
        except BaseException as error:  # such as Ctrl-C: the caller's memory must not be touched after this
            self.abandon(work, error)
            work.release()  # a message that has come goes to the next receive
            raise
        if not work.done():
            self.abandon(work, None)
        result = work.wait()
        if peer is not None and self._lanes.short_ring(peer) is not None:
            with self._lock:
                is_busy = self.has_more() or self._pending.next_deadline() < math.inf or self._renewal.is_needed
                if self._driving.is_idle and not is_busy:
                    self._lending.lend(peer, self._lanes.short_ring)
            if self._fault() is not None:
                self.stop_short()  # which may have been called a moment ago
        return result

    def go_on(self, short: Any, unfinished: tuple[int, float, BaseException | None], peer: int) -> Any:
        """Finish a long message that `short` has begun, and return its result, as `wait` does.

        `unfinished` has its turn and its deadline, and the exception of a signal handler that has ended the call.
        """
        turn, deadline, error = unfinished
        with self._lock:
            work = self._lending.take_unfinished(short, turn)
        if error is not None:
            self.abandon(work, error)
            raise error
        try:
            return self.wait(work, deadline, peer)
        finally:
            work.forget_error()

    def stop_short(self) -> None:
        """Let no further message pass without Python, because the group has failed. On any thread."""
        self.short.clear()
        self._lending.wake()

    def progress_in_background(self, work: Work[Any] | None = None, deadline: float = math.inf) -> None:
        """Have the background thread move messages that no thread waits for; `work` fails at `deadline`."""
        with self._lock:
            if work is not None and not work.done() and deadline < math.inf:
                self._pending.expire(work, deadline)
                self._driving.ring()
            self._driving.call_background(self)

    def adopt(self, peer: int, sock: socket.socket) -> None:
        """Use `sock`, a connected, non-blocking stream socket, as the lane to `peer`, in place of an earlier one."""
        with self._lock:
            lane = self._lanes.by_rank.get(peer)
            if lane is not None and lane.sock is sock:
                return
            if lane is not None:
                self._lanes.end(lane, None)  # it broke at the other end, unnoticed here
            self._add_lane(peer, sock)

    def unreachable(self, peer: int) -> None:
        """Fail the messages with a rank to which no lane can be opened any more."""
        with self._lock:
            self._renewal.depart(peer)
            self._driving.ring()
            self._driving.call_background(self)

    def peer_lost(self, peer: int) -> None:
        """Fail the messages with a lost rank, after delivering what it sent. The group continues."""
        with self._lock:
            if self._renewal.peer_lost(peer):
                self._driving.ring()
                self._driving.call_background(self)

    @property
    def is_driven_here(self) -> bool:
        """Whether the calling thread drives."""
        return self._driving.is_here

    def pending(self) -> list[Work[Any]]:
        """Return the works that have not ended."""
        return self._pending.all()

    def close(self, flush_deadline: float) -> None:
        """Deliver what was sent, until `flush_deadline` at the latest; then end all works (ClosedError) and lanes."""
        with self._lock:
            if self._driving.is_stopping:
                return
            self._driving.stop()
            self._matcher.finish_lines()
        # While the kernel holds bytes, the connection may break, and then they must be sent again.
        while self._fault() is None and (now := time.monotonic()) < flush_deadline:
            if not self._matcher.undelivered() and not self._lanes.has_undelivered():
                break
            self.turn(min(flush_deadline, now + DELIVERY_CHECK_EVERY))
        with self._lock:
            self._is_closed = True
            self._matcher.say_end()
            self._lanes.flush_ready()
            closed = ClosedError(f"{self._name}: the group was closed before the message was delivered")
            self._matcher.fail_all(self._fault() or closed)
        self._settle()
        self._driving.join_background()
        self._lanes.close(flush_deadline)
        with self._lock:
            self._lanes.take_ended()
            self._driving.close()

    # Operations.

    def _raise_if_over(self) -> None:
        if (fault := self._fault()) is not None:
            self._told(fault)
            raise fault
        if self._driving.is_stopping:
            raise ClosedError(f"{self._name}: the group is closed")

    def _start(
        self,
        operation: Operation,
        description: str,
        then: Callable[[Any], Any] | None = None,
        give_back: Callable[[Any], None] | None = None,
    ) -> Work[Any]:
        """Return the work of an operation; `give_back(operation)` undoes one that is done."""
        back = None if give_back is None else functools.partial(give_back, operation)
        work: Work[Any] = Work(
            f"{self._name}: {description}", drive=self._drive, cancel=self.cancel, then=then, give_back=back
        )
        self._pending.add(operation, work)
        self._lanes.flush_ready()
        return work

    def _put_back(self, receive: Receive) -> None:
        """Let another receive have a message that no caller took. On any thread, without the lock."""
        with self._lock:
            self._matcher.put_back(receive)
            self._lanes.flush_ready()
        self._settle()

    def _started(self, work: Work[Any]) -> Work[Any]:
        self._settle()
        if self._matcher.ready and work.done():  # no thread will wait, but the kernel has not taken all of it
            self.progress_in_background()
        return work

    def _settle(self) -> None:
        """End the works of completed operations, and handle lanes that ended. Without the lock: callbacks may run."""
        if self._lanes.ended or self._renewal.departed:
            self._renewal.settle()
        if not self._matcher.completed:
            return
        with self._lock:
            ended = self._pending.take_ended()
            self.traffic.ended(operation for operation, _ in ended if isinstance(operation, Receive))
        if end(ended, self._told):
            self._driving.works_ended()

    def part_with(self, peer: int, cause: BaseException | None) -> None:
        """Fail all messages with a rank for good, with `cause` or the rank's loss."""
        self._renewal.part_with(peer, cause)

    def abandon(self, work: Work[Any], reason: BaseException | None) -> None:
        """Fail a work that is not done with `reason` or a DeadlineError; its memory is not touched afterwards."""
        with self._lock:
            operation = self._pending.operation_of(work)
            if operation is not None:
                peer = operation.peer if isinstance(operation, MessageSend) else operation.source
                self._pending.remove(operation)
                late = [peer] if peer != ANY else [rank for rank in range(self._size) if rank != self._rank]
                error = reason or late_error(work, late, self._lanes.trouble_with(late))
                if not self._matcher.withdraw(operation):
                    closed = ClosedError(
                        f"{self._name}: the lane to rank {peer} is closed, because an earlier send to it was abandoned"
                    )
                    closed.__cause__ = error
                    self._renewal.end_for_good(peer, closed)
                self._lanes.flush_ready()
            else:
                error = None
        if error is not None:
            work.fail(error)
        self._settle()

    # Lanes.

    def opened(self, peer: int, sock: socket.socket) -> None:
        """Use a lane that was opened for a message, unless `adopt` was called meanwhile. With the lock."""
        if self._driving.is_stopping:
            self._raise_if_over()
        if peer not in self._lanes.by_rank:
            self._add_lane(peer, sock)

    def _add_lane(self, peer: int, sock: socket.socket) -> None:
        if self._is_closed or self._matcher.has_failed(peer):  # the lane arrived while the group was being closed
            sock.close()
            return
        self._lanes.add(peer, sock)
        self._driving.hand_over(self)

    # Driving.

    def _drive(self, work: Work[Any], deadline: float | None) -> None:
        self._driving.drive(self, work, deadline)

    def turn(self, deadline: float | None, *, spins: bool = False) -> None:
        """Wait for events until the deadline, and handle them; with `spins`, poll for a moment before sleeping."""
        until = math.inf if deadline is None else deadline
        if self._pending.deadlines:
            with self._lock:
                until = min(until, self._pending.next_deadline())
        events = self._lanes.poll(max(0.0, until - time.monotonic()), spins=spins)
        with self._lock:
            has_fault = self._lanes.handle(events)
        if has_fault and (fault := self._fault()) is not None:
            with self._lock:
                self._matcher.fail_all(fault)
        elif has_fault:
            time.sleep(0.001)  # the thread that made the descriptor readable is about to record the fault
        self._settle()
        while self._pending.deadlines:
            with self._lock:
                work = self._pending.take_due()
            if work is None:
                return
            self.abandon(work, None)

    def has_more(self) -> bool:
        """Tell whether a thread has to drive even if none waits."""
        return bool(self._pending or self._matcher.ready or self._matcher.resuming)

    def flush(self) -> None:
        """Give the kernel what it takes of what was sent; the rest follows when it has room."""
        with self._lock:
            if not self._driving.is_stopping:
                self._lanes.flush_ready()
        self._settle()

    def fail_all(self, error: BaseException) -> None:
        """Fail all messages."""
        with self._lock:
            self._matcher.fail_all(error)
        self._settle()
