"""Point-to-point messages of a group over stream sockets: the shell around `proto.matching`.

One thread at a time drives: it polls all lanes and moves the messages of all threads. A thread that waits for a message
drives, and hands over when its own message is done. If no thread waits and messages are pending, a background thread
drives; it steps aside for waiting threads. One lock guards all state. It is held during socket calls, none of which
blocks, but not while polling.

A lane that ends is replaced until its peer is lost, and the matcher sends again what did not arrive. Meanwhile the
messages with that peer wait, each until its own deadline.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import select
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ClosedError, DeadlineError, PeerLostError, RemoteProtocolError
from covey.net import tcp
from covey.net.descriptors import track
from covey.proto.matching import ANY, Matcher
from covey.proto.message import Operation, Received, Send
from covey.runtime.messages.message_lane import MessageLane
from covey.runtime.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable

STEP_ASIDE_SECONDS: Final = 5.0
"""How long `close` waits for the driving thread to stop."""
IDLE_SECONDS: Final = 10.0
"""How long the idle background thread stays. While it does, a group that was dropped is not freed."""
SPIN_SECONDS: Final = 100e-6
"""How long a thread that waits for a message polls without sleeping."""
FIRST_PAUSE_SECONDS: Final = 0.01
MOST_PAUSE_SECONDS: Final = 2.0
"""The longest pause before asking for a lane, when lanes break one after the other and carry nothing."""
LOOK_SECONDS: Final = 0.003
"""How often `close` checks whether the kernel has delivered what it was given."""


def _as_it_is(received: Received) -> Received:
    return received


class Messenger:
    """Sends and receives the messages of one group on this rank. Any thread may call any method."""

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
            may_spin: whether there are enough cores for waiting threads to poll without sleeping.
        """
        self._may_spin = may_spin
        self._rank, self._size, self._name = rank, size, name
        self._open_lane, self._renew_lane, self._give_up = open_lane, renew_lane, give_up
        self._wake_fd, self._fault, self._lost, self._told = wake_fd, fault, lost, told
        self._matcher = Matcher(rank, size)
        self._lanes: dict[int, MessageLane] = {}
        self._lanes_by_fd: dict[int, MessageLane] = {}
        self._opening = [threading.Lock() for _ in range(size)]
        self._pending: dict[Operation, Work[Any]] = {}
        self._expiring: list[tuple[float, int, Work[Any]]] = []
        """A heap of works that no thread waits for, by deadline. Only the driving thread removes from it."""
        self._order = itertools.count()
        self._ended: list[tuple[MessageLane, BaseException | None]] = []
        """Lanes that ended and are not handled yet, with the error if this rank ended them."""
        self._departed: list[int] = []
        """Lost ranks without a lane that are not handled yet."""
        self._lost_ranks: set[int] = set()
        """Ranks whose lanes are no longer replaced."""
        self._strikes, self._trouble = [0] * size, [""] * size
        """By rank: how many lanes in a row broke without carrying anything, and how the last one broke."""
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        """Notified for waiting threads: a work ended, or no thread drives."""
        self._needed = threading.Condition(self._lock)
        """Notified for the background thread: it may have to drive."""
        self._driver: int | None = None
        """The thread that drives, if one does."""
        self._waiters = 0
        """The number of threads that wait to drive, or for their work to end."""
        self._thread: threading.Thread | None = None
        self._is_closing = self._is_closed = False
        """No operation may start any more; no lane may be added either."""
        self._bell, self._bell_rope = (track(end) for end in socket.socketpair())
        self._close_bell = weakref.finalize(self, _close_sockets, self._bell, self._bell_rope)
        self._poll = select.poll()
        for end in (self._bell, self._bell_rope):
            end.setblocking(False)
        for descriptor in (self._bell.fileno(), wake_fd):
            self._poll.register(descriptor, select.POLLIN)

    def post_send(
        self,
        view: memoryview,
        dst: int,
        tag: int,
        dtype_code: int,
        shape: tuple[int, ...],
        is_object: bool,
        deadline: float | None = None,
    ) -> Work[None]:
        """Start to send `view`, which holds an array of that dtype and shape, or an encoded object.

        The work is done when `view` may be reused: at once for up to 64 KiB, while the receiver holds less than 4 MiB
        from this rank that it has not received.

        Raises:
            ConfigError: there is no such rank or tag.
            CoveyError: the group has failed or is closed, or the lane cannot be opened.
        """
        self._raise_if_over()
        if dst != self._rank and 0 <= dst < self._size:
            self._open(dst, deadline)
        with self._lock:
            operation = self._matcher.send(view, dst, tag, dtype_code=dtype_code, shape=shape, is_object=is_object)
            work = self._start(operation, f"send of {len(view)} bytes to rank {dst} with tag {tag}")
        return self._started(work)

    def post_recv(
        self,
        src: int,
        tag: int,
        out: memoryview | None,
        expect: tuple[int, tuple[int, ...]] | None,
        deadline: float | None = None,
        then: Callable[[Received], Any] = _as_it_is,
    ) -> Work[Any]:
        """Start to receive the earliest message from `src` with `tag`; both may be ANY.

        The payload is written to `out`, if given; `expect` is the dtype code and shape of `out`, and a message of
        another dtype or size is dropped and fails the work with MismatchError. `then` makes the result from it.

        Raises:
            ConfigError: there is no such rank or tag.
            CoveyError: the group has failed or is closed, or a lane cannot be opened.
        """
        self._raise_if_over()
        with self._lock:
            is_here = self._matcher.has_match(src, tag)
        if not is_here:
            for peer in range(self._size) if src == ANY else (src,):
                if peer != self._rank and 0 <= peer < self._size and not self._matcher.has_failed(peer):
                    self._open_to_receive(peer, deadline)
        with self._lock:
            operation = self._matcher.receive(src, tag, out, expect)
            names = ("any rank" if src == ANY else f"rank {src}", "any tag" if tag == ANY else f"tag {tag}")
            work = self._start(operation, f"receive from {names[0]} with {names[1]}", then)
        return self._started(work)

    def wait(self, work: Work[Any], deadline: float | None) -> Any:
        """Drive until `work` is done and return its result; `deadline` is on time.monotonic().

        Raises:
            DeadlineError: `work` was not done in time and has failed with this error; `late` has the ranks it needed. A
                receive is withdrawn, and its message goes to the next receive that matches. A send that was announced
                to the receiver cannot be withdrawn, so its lane is closed and later messages to that rank fail.
            Exception: the error that ended the work.
        """
        try:
            self._drive(work, deadline)
        except BaseException as error:  # such as Ctrl-C: the caller's memory must not be touched after this
            self._abandon(work, error)
            raise
        if not work.done():
            self._abandon(work, None)
        return work.wait()

    def progress_in_background(self, work: Work[Any] | None = None, deadline: float = math.inf) -> None:
        """Have the background thread move messages that no thread waits for; `work` fails at `deadline`."""
        with self._lock:
            if work is not None and not work.done() and deadline < math.inf:
                heapq.heappush(self._expiring, (deadline, next(self._order), work))
                self._ring()
            self._call_background()

    def adopt(self, peer: int, sock: socket.socket) -> None:
        """Use `sock`, a connected, non-blocking stream socket, as the lane to `peer`, in place of an earlier one."""
        with self._lock:
            lane = self._lanes.get(peer)
            if lane is not None and lane.sock is sock:
                return
            if lane is not None and not lane.is_ended:  # it broke at the other end, unnoticed here
                self._end_lane(lane, None)
            self._add_lane(peer, sock)

    def unreachable(self, peer: int) -> None:
        """Fail the messages with a rank to which no lane can be opened any more."""
        with self._lock:
            self._depart(peer)

    def peer_lost(self, peer: int) -> None:
        """Fail the messages with a lost rank, after delivering what it sent. The group continues."""
        with self._lock:
            lane = self._lanes.get(peer)
            self._lost_ranks.add(peer)
            if lane is None or lane.is_ended:
                self._depart(peer)
            else:
                with contextlib.suppress(OSError):  # the driving thread reads to the end, and then handles the loss
                    lane.sock.shutdown(socket.SHUT_RDWR)

    def _depart(self, peer: int) -> None:
        self._departed.append(peer)
        self._ring()
        self._call_background()

    @property
    def is_driven_here(self) -> bool:
        """Whether the calling thread drives."""
        return self._driver == threading.get_ident()

    def pending(self) -> list[Work[Any]]:
        """Return the works that have not ended."""
        return list(self._pending.values())

    def close(self, flush_deadline: float) -> None:
        """Deliver what was sent, until `flush_deadline` at the latest; then end all works (ClosedError) and lanes."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._needed.notify_all()
            self._ring()
            while self._driver not in (None, threading.get_ident()):
                # The driving thread was woken and checks `is_closing` after each poll. If it takes longer, it is in a
                # callback that does not return; when it does, it finds everything closed.
                if not self._freed.wait(STEP_ASIDE_SECONDS):
                    break
            self._driver = threading.get_ident()
            self._matcher.finish_lines()
        # While the kernel holds bytes, the connection may break, and then they must be sent again.
        while self._is_undelivered() and self._fault() is None and (now := time.monotonic()) < flush_deadline:
            self._turn(min(flush_deadline, now + LOOK_SECONDS))
        with self._lock:
            self._is_closed = True
            self._matcher.say_end()
            self._flush_ready()
            closed = ClosedError(f"{self._name}: the group was closed before the message was delivered")
            self._matcher.fail_all(self._fault() or closed)
        self._settle()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(STEP_ASIDE_SECONDS)
        for lane in list(self._lanes.values()):
            if not lane.is_ended:
                lane.close(flush_deadline)
        with self._lock:
            self._close_ended()
            self._close_bell()
            self._driver = None
            self._freed.notify_all()

    def _is_undelivered(self) -> bool:
        if self._matcher.undelivered():
            return True
        lanes = (lane for lane in self._lanes.values() if not lane.is_ended)
        return any(lane.undelivered_bytes() for lane in lanes if not self._matcher.has_parted(lane.peer))

    # Operations.

    def _raise_if_over(self) -> None:
        if (fault := self._fault()) is not None:
            self._told(fault)
            raise fault
        if self._is_closing:
            raise ClosedError(f"{self._name}: the group is closed")

    def _start(self, operation: Operation, description: str, then: Callable[[Any], Any] | None = None) -> Work[Any]:
        work: Work[Any] = Work(f"{self._name}: {description}", drive=self._drive, then=then)
        self._pending[operation] = work
        self._flush_ready()
        return work

    def _started(self, work: Work[Any]) -> Work[Any]:
        self._settle()
        if self._matcher.ready and work.done():  # no thread will wait, but the kernel has not taken all of it
            self.progress_in_background()
        return work

    def _settle(self) -> None:
        """End the works of completed operations, and handle lanes that ended. Without the lock: callbacks may run."""
        while self._ended:
            with self._lock:
                ended = self._close_ended()
            for lane, cause in ended:
                peer = lane.peer
                if cause is not None or peer in self._lost_ranks or self._matcher.has_parted(peer):
                    self._part_with(peer, cause)
                elif self._lanes[peer] is lane and self._fault() is None:  # else it was replaced already
                    self._renew(lane)
        while self._departed:
            with self._lock:
                departed, self._departed = self._departed, []
            for peer in departed:
                self._part_with(peer, None)
        if not self._matcher.completed:
            return
        with self._lock:
            over = [(operation, self._pending.pop(operation, None)) for operation in self._matcher.completed]
            self._matcher.completed.clear()
        works = []
        for operation, work in over:
            if work is not None:
                if operation.error is not None:
                    self._told(operation.error)
                work.conclude(None if isinstance(operation, Send) else operation.result, operation.error)
                works.append(work)
        for work in works:  # after all have ended: a callback may wait for another of them
            work.notify()
        if self._waiters or self._driver not in (None, threading.get_ident()):
            with self._lock:
                self._freed.notify_all()
                self._ring()  # the driving thread's own work may be among them

    def _close_ended(self) -> list[tuple[MessageLane, BaseException | None]]:
        ended, self._ended = self._ended, []
        for lane, _ in ended:
            lane.sock.close()
        return ended

    def _part_with(self, peer: int, cause: BaseException | None) -> None:
        """Fail all messages with a rank for good, with `cause` or the rank's loss."""
        if self._matcher.has_failed(peer):
            return
        self._give_up(peer)
        error = cause or self._fault() or self._lost(peer) or self._peer_lost(peer)
        with self._lock:
            self._lost_ranks.add(peer)
            if (lane := self._lanes.get(peer)) is not None:  # it was added just now
                self._end_lane(lane, None)
                self._close_ended()
            self._matcher.fail(peer, error)

    def _renew(self, lane: MessageLane) -> None:
        """Ask for a lane in place of one that ended; after a pause if that one carried nothing."""
        strikes = 0 if lane.has_moved else self._strikes[lane.peer]
        self._strikes[lane.peer] = strikes + 1
        pause = 0.0 if not strikes else min(MOST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(strikes, 20))
        self._renew_lane(lane.peer, lane.sock, pause)

    def _abandon(self, work: Work[Any], reason: BaseException | None) -> None:
        """Fail a work that is not done with `reason` or a DeadlineError; its memory is not touched afterwards."""
        with self._lock:
            operation = next((operation for operation, pending in self._pending.items() if pending is work), None)
            if operation is not None and operation not in self._matcher.completed:
                peer = operation.peer if isinstance(operation, Send) else operation.source
                del self._pending[operation]
                late = [peer] if peer != ANY else [rank for rank in range(self._size) if rank != self._rank]
                named = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
                trouble = "".join(
                    f". The connection with rank {rank} broke: {self._trouble[rank]}"
                    for rank in late
                    if self._trouble[rank] and (self._lanes[rank].is_ended or not self._lanes[rank].has_moved)
                )
                error = reason or DeadlineError(
                    f"{work.description} was not done before its timeout ended; it waited for {named}{trouble}",
                    late=tuple(late),
                )
                if not self._matcher.withdraw(operation):
                    closed = ClosedError(
                        f"{self._name}: the lane to {named} is closed, because an earlier send to it was abandoned"
                    )
                    closed.__cause__ = error
                    if not self._lanes[peer].is_ended:
                        self._end_lane(self._lanes[peer], None)
                    self._lost_ranks.add(peer)
                    self._matcher.fail(peer, closed)
                    self._give_up(peer)
                self._flush_ready()
            else:
                error = None
        if error is not None:
            work.fail(error)
        self._settle()

    def _peer_lost(self, peer: int) -> PeerLostError:
        return PeerLostError(
            f"{self._name}: rank {peer} closed its connection for messages", rank=peer, operation="send/recv"
        )

    # Lanes.

    def _open(self, peer: int, deadline: float | None) -> None:
        if peer in self._lanes:
            return
        with self._opening[peer]:
            if peer not in self._lanes:
                sock = self._open_lane(peer, deadline)
                with self._lock:
                    if self._is_closing:
                        self._raise_if_over()
                    if peer not in self._lanes:  # else `adopt` was called meanwhile
                        self._add_lane(peer, sock)

    def _open_to_receive(self, peer: int, deadline: float | None) -> None:
        """Open the lane to a rank before receiving from it; if the rank is lost, receives fail as after any loss."""
        try:
            self._open(peer, deadline)
        except PeerLostError as error:
            with self._lock:
                self._matcher.fail(peer, error)

    def _add_lane(self, peer: int, sock: socket.socket) -> None:
        if self._is_closed or self._matcher.has_failed(peer):  # the lane arrived while the group was being closed
            sock.close()
            return
        self._matcher.lane_opened(peer)
        lane = self._lanes[peer] = self._lanes_by_fd[sock.fileno()] = MessageLane(peer, sock, self._matcher)
        self._poll.register(sock, select.POLLIN)
        self._flush(lane)  # the other end waits to hear how much has arrived, and no thread may be driving
        self._ring()
        self._hand_over()

    def _end_lane(self, lane: MessageLane, cause: BaseException | None) -> None:
        if not lane.is_ended:
            lane.is_ended = True
            self._matcher.lane_ended(lane.peer)
            self._poll.unregister(lane.descriptor)
            del self._lanes_by_fd[lane.descriptor]
            self._ended.append((lane, cause))

    def _end_stuck(self) -> None:
        """End lanes whose network path is dead. The peer may be alive, and the next lane may use another path."""
        for lane in list(self._lanes_by_fd.values()):
            if tcp.is_stuck(lane.sock):
                self._trouble[lane.peer] = "the other end does not acknowledge what is sent"
                self._end_lane(lane, None)

    def _flush_ready(self) -> None:
        for peer in sorted(self._matcher.ready):
            lane = self._lanes[peer]
            if not lane.is_ended and not lane.is_blocked:
                self._flush(lane)

    def _flush(self, lane: MessageLane) -> None:
        was_blocked = lane.is_blocked
        try:
            lane.flush()
        except OSError as error:
            self._trouble[lane.peer] = str(error)
            self._read(lane, to_the_end=True)
            self._end_lane(lane, None)
            return
        if lane.is_blocked != was_blocked:
            self._poll.modify(lane.sock, select.POLLIN | (select.POLLOUT if lane.is_blocked else 0))
            self._ring()

    def _read(self, lane: MessageLane, *, to_the_end: bool = False) -> None:
        try:
            if to_the_end:
                lane.read_rest()
            elif not lane.read():
                self._trouble[lane.peer] = "end of stream"
                self._end_lane(lane, None)
        except OSError as error:
            self._trouble[lane.peer] = str(error)
            self._end_lane(lane, None)
        except RemoteProtocolError as error:
            self._end_lane(lane, error)

    # Driving.

    def _drive(self, work: Work[Any], deadline: float | None) -> None:
        """Make progress on this thread until `work` is done or the deadline has passed."""
        this_thread = threading.get_ident()
        while not work.done():
            with self._lock:
                self._waiters += 1
                try:
                    while not self._may_drive(this_thread) and not work.done():
                        self._ring()  # so that the background thread steps aside
                        if not self._freed.wait(_left(deadline)):
                            break
                finally:
                    self._waiters -= 1
                may_drive = self._may_drive(this_thread)
                was_driving = self._driver == this_thread  # this is a callback that waits for another work
                if may_drive:
                    self._driver = this_thread
            try:
                while may_drive and not work.done() and not self._is_closing:
                    self._turn(deadline, spins=self._may_spin)
                    if _left(deadline) == 0:
                        break
            finally:
                with self._lock:
                    if may_drive and not was_driving:
                        self._driver = None
                    self._hand_over()
            if _left(deadline) == 0:
                return

    def _may_drive(self, thread: int) -> bool:
        return self._driver in (None, thread) and not self._is_closing

    def _hand_over(self) -> None:
        if self._driver is None:
            if self._waiters or self._is_closing:
                self._freed.notify_all()
            elif self._has_more():
                self._call_background()

    def _turn(self, deadline: float | None, *, spins: bool = False) -> None:
        """Wait for events until the deadline, and handle them; with `spins`, poll for a moment before sleeping."""
        with self._lock:
            while self._expiring and self._expiring[0][2].done():
                heapq.heappop(self._expiring)
            expiry = self._expiring[0][0] if self._expiring else math.inf
        left = max(0.0, min(math.inf if deadline is None else deadline, expiry) - time.monotonic())
        events = self._look(min(left, SPIN_SECONDS)) if spins else []
        if not events:
            events = self._poll.poll(math.ceil(1000 * min(left, tcp.PATH_CHECK_SECONDS)))
        has_fault = False
        with self._lock:
            if not events:
                self._end_stuck()
            for descriptor, event in events:
                if lane := self._lanes_by_fd.get(descriptor):
                    if event & ~select.POLLOUT:
                        self._read(lane)
                    if event & select.POLLOUT and not lane.is_ended:
                        self._flush(lane)
                elif descriptor == self._wake_fd:
                    has_fault = True
                elif descriptor == self._bell.fileno():  # else a lane that another thread ended meanwhile
                    self._bell.recv(4096)
            self._flush_ready()
        if has_fault:
            self._fail_all()
        self._settle()
        while True:
            with self._lock:
                if not self._expiring or self._expiring[0][0] > time.monotonic():
                    return
                work = heapq.heappop(self._expiring)[2]
            self._abandon(work, None)

    def _look(self, seconds: float) -> list[tuple[int, int]]:
        """Poll without sleeping, and return the events: waking from a sleep takes as long as a short message does."""
        until = time.perf_counter() + seconds
        while not (events := self._poll.poll(0)) and time.perf_counter() < until:
            pass
        return events

    def _fail_all(self) -> None:
        if (fault := self._fault()) is None:
            time.sleep(0.001)  # the thread that made the descriptor readable is about to record the fault
            return
        with self._lock:
            self._matcher.fail_all(fault)

    def _call_background(self) -> None:
        if self._thread is None and not self._is_closing:
            self._thread = threading.Thread(target=self._run_background, name=f"{self._name} messages", daemon=True)
            self._thread.start()
        self._needed.notify()

    def _run_background(self) -> None:
        while True:
            with self._lock:
                while not self._is_closing and (self._driver is not None or self._waiters or not self._has_more()):
                    if not self._needed.wait(IDLE_SECONDS) and not self._has_more():
                        self._thread = None  # `_call_background` starts another
                        return
                if self._is_closing:
                    return
                self._driver = threading.get_ident()
            try:
                while self._has_more() and not self._waiters and not self._is_closing:
                    self._turn(None)
            except BaseException as error:  # no other thread would report it
                with self._lock:
                    self._matcher.fail_all(error)
                self._settle()
            finally:
                with self._lock:
                    self._driver = None
                    self._freed.notify_all()

    def _has_more(self) -> bool:
        return bool(self._pending or self._matcher.ready or self._matcher.resuming)

    def _ring(self) -> None:
        """Wake the driving thread from its poll, unless it is the caller."""
        if self._driver not in (None, threading.get_ident()):
            with contextlib.suppress(BlockingIOError):  # it has been woken already
                self._bell_rope.send(b"!")


def _close_sockets(*sockets: socket.socket) -> None:
    for sock in sockets:
        sock.close()


def _left(deadline: float | None) -> float | None:
    """Return the seconds until the deadline, not below 0; None if there is none."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
