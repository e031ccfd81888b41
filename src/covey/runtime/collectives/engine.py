"""Runs the collectives of one group, in issue order, and turns every way they can end badly into one clear error.

A blocking operation runs on the thread that calls. `async_op=True` hands operations to one worker thread. The
control loop reports what other ranks say; it only ever notes a fault and wakes whoever sleeps, so lanes are touched
by one thread at a time.

With `on_loss="raise"` the first fault ends the group. With `on_loss="continue"` operations are all or nothing
(`runtime.pact`), and what would end the group has to be agreed on first.
"""

from __future__ import annotations

import contextvars
import hashlib
import logging
import os
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
    PeerLostError,
    Remedy,
    RemoteProtocolError,
)
from covey.net.descriptors import explained
from covey.runtime import loop as control
from covey.runtime.bell import Bell
from covey.runtime.collectives.attempt import Attempt, DisagreedError
from covey.runtime.collectives.backlog import Backlog
from covey.runtime.collectives.call_log import OPERATIONS, Call
from covey.runtime.collectives.evidence import COMPARE_SECONDS, Suspicion
from covey.runtime.collectives.stalls import ANSWER_SECONDS, StallDiagnosis
from covey.runtime.fault import Fault
from covey.runtime.messages.routing import MessageRouting
from covey.wire import messages
from covey.wire.header import unpack

if TYPE_CHECKING:
    import queue
    from collections.abc import Callable

    from covey.base.config import GroupConfig
    from covey.net.lanes.lane import LaneClosedError
    from covey.runtime.collectives.atomic import AtomicOperations
    from covey.runtime.collectives.stalls import Late
    from covey.runtime.members.generation import Generation
    from covey.runtime.members.group_registry import GroupMessage
    from covey.runtime.members.node import Node

logger = logging.getLogger("covey")

ANNOUNCE_SECONDS: Final = 0.2
"""A stall this long makes a rank ask the others where they are."""
WARN_SECONDS: Final = 30.0
"""A stall this long is told to the person who waits, with the names of the late."""
CAUSE_SECONDS: Final = 0.2
"""How long a broken lane waits for the news that tells why."""
LOOK_SECONDS: Final = 0.01
"""How often who waits for news looks whether there are any."""
FLUSH_SECONDS: Final = 5.0
"""How long closing a group may take to hand messages over that were sent already."""
END_SECONDS: Final = 5.0
"""How long closing a group waits for an operation that is told to end."""
CLOSE_SECONDS: Final = 30.0
"""How long who closes a group waits for another thread that is at it: longer than that can take."""
CARRIERS: Final = frozenset(OPERATIONS.index(name) for name in ("all_reduce", "barrier"))
"""Operations in which every rank hears from every other, so that all know of a waiting change after the same one."""
MESSAGES: Final = Call(0, 0, 0, "point-to-point")


class Engine:
    """The collectives of one group on this rank. A group of one has no node and runs nothing."""

    def __init__(
        self,
        node: Node | None,
        group_id: int,
        members: tuple[int, ...],
        name: str,
        config: GroupConfig,
        *,
        generation: Generation | None = None,
    ) -> None:
        """`members` are seats of the run, in the order of the group's own ranks."""
        self.node = node
        self.id = group_id
        self.members = members
        self.name = name
        self.config = config
        self.generation = generation
        self.size = len(members)
        self.rank = members.index(node.rank) if node is not None else 0
        self.ranks = range(self.size)
        self.contributors = tuple(self.ranks)
        """The ranks whose input is in the result of the last operation that returned."""
        self.nothing = np.empty(0, np.uint8)
        self.call = Call(0, 0, 0, "")
        self.sequence = 0
        """The number of operations started."""
        self.quiet = contextvars.Context()
        """Where infinities and nans are numbers like others and not worth a warning; cheaper than np.errstate."""
        self.quiet.run(np.seterr, all="ignore")
        self.ranks_by_member = {member: rank for rank, member in enumerate(members)}
        self.stalls = StallDiagnosis(self)
        self._call_log = self.stalls.call_log
        self._suspicion = Suspicion(self)
        self._is_performing = False
        self._timeout = self._deadline = 0.0
        self._announced = False
        self._warn_at = 0.0
        self._is_pending = False
        self._returned = 0
        # Reentrant, so that a thread that was interrupted (Ctrl-C) just as it had taken it can close the group.
        self._issuing, self._is_issuing = threading.RLock(), False
        self._fault: Fault | None = None
        self._first_error: BaseException | None = None
        self._fault_lock = threading.Lock()
        self._closed = False
        self._freed = threading.Event()
        self._closer = 0
        """The thread that closes the group."""
        self._backlog = Backlog(name)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        host = node.host if node is not None else ""
        same_host = 1 + sum(1 for peer in self._peers() if peer.contact is not None and peer.contact.host == host)
        self.may_spin = same_host <= cores
        self._descriptors: list[int] = []
        self._bell = Bell(self._descriptors)
        self.routing = MessageRouting(self, self._bell)
        """What sends and receives this group's messages."""
        self._atomic: AtomicOperations | None = None
        self._dropped = weakref.finalize(
            self, _drop, node, generation, group_id, members, self._descriptors, self._backlog.queue
        )
        if generation is not None and config.on_loss == "continue":
            from covey.runtime.collectives.atomic import (
                AtomicOperations,  # of no use to groups that end with their first loss
            )

            self._atomic = AtomicOperations(self, generation, self._descriptors)
            generation.enroll(self._atomic)
            if generation.fault is not None:
                self.end(generation.fault)
        else:
            self._attempt = Attempt(self, 0, tuple(self.ranks), self._bell, None)
        if node is not None:
            node.groups.register(group_id, self)
            for peer in self._peers():  # who went before anyone could tell this group
                if peer.is_gone:
                    self.peer_gone(peer.rank, left=peer.has_left)

    def beside(self, key: str, members: tuple[int, ...], name: str, config: GroupConfig | None = None) -> Engine:
        """Return a group of some of the members, each of whom makes it by the same `key`. Nothing is sent."""
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        node = self.node if len(members) > 1 else None
        return Engine(
            node,
            int.from_bytes(digest, "little"),
            members if node is not None else (0,),
            name,
            self.config if config is None else config,
            generation=self.generation if node is not None else None,
        )

    @property
    def attempt(self) -> Attempt:
        """Those who carry out operations now."""
        return self._attempt if self._atomic is None else self._atomic.attempt

    @property
    def survives(self) -> bool:
        """Whether operations go on among those who are left."""
        return self._atomic is not None

    @property
    def live(self) -> tuple[int, ...]:
        """The ranks that have not been lost."""
        if self._atomic is not None:
            return self._atomic.attempt.ranks
        peers = self.node.peers if self.node is not None else {}
        return tuple(rank for rank, seat in enumerate(self.members) if seat not in peers or not peers[seat].is_gone)

    @property
    def change_pending(self) -> bool:
        """Whether all ranks know of a waiting change, as of the last operation that carried the news."""
        return self._is_pending if self._atomic is None else self._atomic.is_pending

    @property
    def last_returned(self) -> int:
        """The last operation that returned here."""
        return self._returned if self._atomic is None else self._atomic.returned

    @property
    def knows_change(self) -> bool:
        """Whether this rank knows of a waiting change."""
        return self.node is not None and self.node.knows_change

    def _peers(self) -> list[Any]:
        return [self.node.peers[member] for member in self.members if member != self.node.rank] if self.node else []

    @property
    def is_over(self) -> bool:
        """Whether the group was closed or has failed."""
        return self._closed or self._fault is not None

    @property
    def has_failed(self) -> bool:
        """Whether something has ended the group."""
        return self._fault is not None

    @property
    def is_closed(self) -> bool:
        """Whether the group was closed."""
        return self._closed

    @property
    def is_freed(self) -> bool:
        """Whether closing is over, too."""
        return self._freed.is_set()

    def lane_kind(self, rank: int) -> str:
        """Return the kind of lane to a rank, from facts that both ends know."""
        assert self.node is not None
        return self.node.lanes.kind(self.members[rank])

    def lane_kinds(self) -> dict[int, str]:
        """Return the kind of lane to each other rank: what it is if it is open, else what it will be."""
        opened = self.attempt.open_kinds()
        return {rank: opened.get(rank) or self.lane_kind(rank) for rank in self.attempt.ranks if rank != self.rank}

    # Issuing

    def run(
        self,
        call: Call,
        body: Callable[[Attempt], Any],
        *,
        timeout: float | None,
        async_op: bool,
        then: Callable[[Any], Any] | None = None,
        root: int = -1,
    ) -> Any:
        """Perform `body` as the next operation, or queue it and return a Work.

        `body` may be called again, if others are lost in the middle; without `root` it would mean nothing. `then` turns
        what it returns into the result, once; if it raises, only this call fails, not the group.
        """
        if self._is_issuing or not self._issuing.acquire(blocking=False):
            raise BusyError(
                f"another thread is in a collective of group {self.name!r}; {call.text} must wait for it, or use a "
                "group of its own: group.split(0)"
            )
        try:
            self._is_issuing = True
            if self._fault is not None or self._closed:
                self.refuse(call)
            limit = self.config.timeout if timeout is None else check_timeout(timeout)
            if not async_op and not self._backlog.unfinished:
                return self.perform(call, body, then, limit, root)
            if not async_op and self._backlog.is_on_this_thread:
                raise BusyError(f"{call.text} would wait for operations that wait for this callback; use async_op=True")
            work = self._backlog.add(self, call, body, then, limit, root)
            return work if async_op else work.wait()
        finally:
            self._is_issuing = False
            self._issuing.release()

    def perform(
        self,
        call: Call,
        body: Callable[[Attempt], Any],
        then: Callable[[Any], Any] | None,
        limit: float,
        root: int,
    ) -> Any:
        """Do an operation now, on this thread; see `run`. One thread at a time may."""
        self.sequence = sequence = self.sequence + 1
        self._call_log.enter(sequence, call)
        self.call = call
        self._timeout = limit
        self._deadline = time.monotonic() + limit
        self._announced = False
        self._warn_at = 0.0
        self._is_performing = True
        try:
            if self._atomic is not None:
                result = self._atomic.perform(body, root)
            else:
                attempt, carries = self._attempt, call.operation in CARRIERS
                attempt.begin(knows_change=carries and self.knows_change)
                result = body(attempt)
                self._is_pending |= carries and attempt.knows_change
                self._returned = sequence
        except DisagreedError as disagreement:
            self.end(Fault("MismatchError", str(disagreement)))
            self._first_error = disagreement.error
            raise disagreement.error from None
        except BaseException as error:
            with explained(f"{self._what()} cannot go on"):
                self._gave_up(error)
                raise
        finally:
            self._is_performing = False
            if self._suspicion.is_open:  # it came too late for this operation
                self._suspicion.settle()
        return result if then is None else then(result)

    def returned(self, contributors: tuple[int, ...]) -> None:
        """An operation that is all or nothing has returned what these ranks contributed to."""
        self.contributors = contributors
        assert self.node is not None
        if self.node.events.is_recovering:
            self.node.events.phase("redo")

    def lane_opened(self) -> None:
        """A lane of this group is open."""
        if self.node is not None and self.node.events.is_recovering:
            self.node.events.phase("reconnect")

    def check_deadline(self, trouble: str) -> None:
        """Give up if the time of the current operation is over; `trouble` is what keeps it from going on."""
        if time.monotonic() >= self._deadline:
            late = self.stalls.late(())
            names = f"{self.name_ranks(late)} {self.stalls.excuse(late)}; " if late else ""
            text = (
                f"{self._what()} did not finish within the timeout of {self._timeout:g} s; "
                f"{names}the last trouble was: {trouble}"
            )
            self.fail(Fault("DeadlineError", text, late))

    def root_lost(self, root: int) -> PeerLostError:
        """Return what to raise for an operation whose root is lost; the group goes on."""
        return self._missed(root, f"{self._what()} means nothing without it")

    def part_lost(self, rank: int) -> PeerLostError:
        """Return what to raise where a lost rank's part of the result is missed; the group goes on."""
        return self._missed(rank, f"its part of {self._what()} with it")

    def _missed(self, rank: int, what: str) -> PeerLostError:
        peer = self.node.peers.get(self.members[rank]) if self.node is not None else None
        how = peer.how_it_went() if peer is not None and peer.failure else "is lost"
        text = f"{self.name_ranks((rank,))} {how}, and {what}"
        return PeerLostError(text, rank=rank, host=self._host(rank), operation=self.call.text, sequence=self.sequence)

    def _gave_up(self, error: BaseException) -> None:
        """The current operation ended with `error`: the others must know, whatever it was."""
        if self._atomic is not None and self._fault is None and isinstance(error, PeerLostError):
            return  # the root was lost, and all of the others know
        if self._fault is None:
            text = f"rank {self.rank} gave up {self._what()}: {type(error).__name__}: {error}"
            fault = Fault("PeerLostError", text, (self.rank,))
            if self._atomic is not None and self.generation is not None:
                # Only this rank has failed, in the middle of what is all or nothing: the others go on without it.
                self.end(fault)
                control.soon(self.generation.withdraw)
            else:
                self.fail(fault)
        if self._first_error is None:
            self._first_error = error

    def refuse(self, call: Call) -> None:
        """Raise what keeps `call` from running; `base.errors` has the rule."""
        if self._fault is None:
            raise ClosedError(f"{call.text}: group {self.name!r} is closed")
        if self._first_error is None:
            if self._atomic is None and self._fault.kind == "PeerLostError" and call is not MESSAGES:
                self._suspicion.search(call)
                self.await_news(COMPARE_SECONDS if self.stalls.is_comparing else 0.0, lambda: self.is_mismatched)
            self._first_error = error = self._error(call.text, self.sequence + 1)
            raise error
        error = self._error(call.text, self.sequence + 1)
        is_own = isinstance(error, PeerLostError) and self._fault.culprit == self.rank
        if error.remedy is Remedy.REGROUP and not isinstance(error, ClosedError) and not is_own:
            raise error
        raise ClosedError(
            f"{call.text}: group {self.name!r} is closed since an earlier failure: {self._first_error}"
        ) from self._first_error

    def require_open(self) -> None:
        """Raise what keeps messages from being sent or received, if anything does."""
        if self._fault is not None or self._closed:
            self.refuse(MESSAGES)

    # What an execution asks

    def check(self) -> None:
        """Raise if the group has failed."""
        if self._suspicion.is_open:
            self._suspicion.weigh()
        if self._fault is not None:
            raise self._error(self.call.text, self.sequence)

    def stalled(self, attempt: Attempt, since: float, waiting_for: tuple[int, ...]) -> float:
        """Nothing moved since `since`; say so where it helps, raise if time is up, return when to call again."""
        now = time.monotonic()
        if now >= self._deadline:
            self.stalls.call(self.sequence)  # once more: who could not answer before may do so now, and is not to blame
            self.await_news(ANSWER_SECONDS, lambda: self.has_failed)
            attempt.check()
            late = self.stalls.late(waiting_for)
            text = (
                f"{self._what()} did not finish within the timeout of {self._timeout:g} s; "
                f"{self.name_ranks(late)} {self.stalls.excuse(late)}"
            )
            self.fail(Fault("DeadlineError", text, late))
            attempt.check()
        if not self._announced and now >= since + ANNOUNCE_SECONDS:
            self._announced = True
            self.stalls.call(self.sequence)
            if self._warn_at:  # after a standstill of this process: others must have time to say that they are here
                self._warn_at = max(self._warn_at, now + ANSWER_SECONDS)
        if not self._warn_at:
            self._warn_at = now + WARN_SECONDS
        elif now >= self._warn_at:
            self._warn_at = now + WARN_SECONDS
            waited = now - (self._deadline - self._timeout)
            late = self.stalls.late(waiting_for)
            logger.warning("rank %d has waited %.0f s in %s: %s %s", self.rank, waited, self._what(),
                           self.name_ranks(late), self.stalls.excuse(late))  # fmt: skip
        moments = (self._deadline, self._warn_at, since + ANNOUNCE_SECONDS)
        return min(moments[:2] if self._announced else moments)

    def lane_closed(self, attempt: Attempt, peer: int, error: LaneClosedError | ConnectError) -> None:
        """The lane to a rank ended; raise what ended it."""
        if self._atomic is not None:
            self._atomic.disturbed(attempt, f"the lane to {self.name_ranks((peer,))}: {error}")
        self._suspicion.note(Fault("PeerLostError", self._why_closed(peer, str(error)), (peer,)))
        self.check()

    def _why_closed(self, peer: int, symptom: str) -> str:
        """Wait a moment for the news why a lane ended; say what there is to say if the group has not failed by then."""
        assert self.node is not None
        other = self.node.peers[self.members[peer]]
        self.await_news(
            CAUSE_SECONDS,
            lambda: (
                self.has_failed
                or bool(other.failure)
                or other.has_left
                or other.is_excluded
                or self.stalls.has_parted(peer)
            ),
        )
        why = f"closed the group, or the connection broke ({symptom})"
        if other.failure or other.is_excluded:
            why = other.how_it_went()
        elif other.has_left:
            why = "left the group"
        return f"{self.name_ranks((peer,))} {why}"

    def await_news(self, seconds: float, has_come: Callable[[], bool]) -> None:
        """Return once `has_come`, or after some time."""
        poll = select.poll()
        if self._bell.fd >= 0:
            poll.register(self._bell.fd, select.POLLIN)
        until, looks = time.monotonic() + seconds, seconds / LOOK_SECONDS
        # If this process stands still meanwhile, the control loop has to hear the news first when it goes on.
        while not has_come() and (time.monotonic() < until or looks > 0):
            poll.poll(1e3 * LOOK_SECONDS)
            looks -= 1

    def wrong_header(self, attempt: Attempt, peer: int, expected: bytes, header: bytes) -> None:
        """A rank sent another transfer than the plan says; raise what went wrong."""
        try:
            theirs, ours = unpack(header), unpack(expected)
        except RemoteProtocolError as error:
            self.fail(Fault("RemoteProtocolError", f"rank {peer} sent {error}", (peer,)))
            attempt.check()
            raise
        self.stalls.call(min(theirs.sequence, ours.sequence))
        self.await_news(COMPARE_SECONDS, lambda: self.has_failed or attempt.is_stopped)
        self.stalls.recognise(peer, theirs, None, is_here=False)  # it may be gone, or slow to answer
        if self.stalls.compare_known():
            self.await_news(COMPARE_SECONDS, lambda: self.has_failed or (self.survives and attempt.is_stopped))
        attempt.check()
        operation = OPERATIONS[theirs.operation] if theirs.operation < len(OPERATIONS) else "something else"
        text = (
            f"in group {self.name!r}, rank {self.rank} is in {self.call.text} as its operation {ours.sequence}, but "
            f"rank {peer} sent {theirs.nbytes} bytes of {operation} as its operation {theirs.sequence}"
        )
        is_same = theirs.sequence == ours.sequence
        self.fail(Fault("MismatchError", text, (peer,)), differs_at=ours.sequence if is_same else 0)
        attempt.check()

    def reject(self, attempt: Attempt, kind: str, rank: int, what: str) -> NoReturn:
        """End the group because of what a rank sent, with an error of this kind; raise it."""
        fault = Fault(kind, f"{self.name_ranks((rank,))} sent {what} (in {self._what()})", (rank,))
        self.fail(fault)
        attempt.check()
        raise RemoteProtocolError(fault.text)  # if the group ended otherwise

    # Faults

    def fail(self, fault: Fault, *, differs_at: int = 0) -> None:
        """Note the first thing that went wrong, wake whoever waits, and tell the other ranks.

        A group that is all or nothing only ends once its members have agreed on it; `differs_at` is the operation that
        they are known to have called differently, if any.
        """
        if (self._fault is not None and not self._yields_to(fault)) or self.node is None:
            self.end(fault)
            return
        if fault.kind == "PeerLostError" and self.stalls.is_comparing:
            return  # that ends the group, too, and tells more
        others = [seat for seat in self.members if seat != self.node.rank]
        if self._atomic is not None:
            self.node.tell(others, self._revocation(fault))  # the reason, before the view that it brings about
            self._atomic.give_up(fault, differs_at)
        else:
            self.end(fault)
            if fault.culprit == self.rank:
                self.stalls.part()
            self.node.tell(others, self._revocation(fault))

    def end(self, fault: Fault) -> None:
        """End the group here, and wake whoever waits."""
        with self._fault_lock:
            if self._fault is not None and not self._yields_to(fault):
                return
            if fault.kind == "PeerLostError" and self.stalls.is_comparing:
                return  # that ends the group, too, and tells more
            self._fault = fault
        self.attempt.is_stopped = True
        self._bell.ring()
        if self._atomic is not None:
            self._atomic.wake()
        if self.node is not None:
            self.node.lanes.abandon(lambda key: key.group == self.id, ClosedError(fault.text))

    def _yields_to(self, fault: Fault) -> bool:
        """Tell whether the group ended with a loss that no program has heard of, and calls are known to differ."""
        is_loss = self._fault is not None and self._fault.kind == "PeerLostError"
        return is_loss and fault.kind == "MismatchError" and self._first_error is None

    @property
    def is_mismatched(self) -> bool:
        """Whether ranks called different things."""
        return self._fault is not None and self._fault.kind == "MismatchError"

    def _revocation(self, fault: Fault) -> messages.Revoke:
        return messages.Revoke(self.id, fault.kind, fault.text[:8000], fault.ranks)

    def fault_error(self) -> CoveyError | None:
        """Return the error for a fault, for those who run beside the collectives; who passes it on calls `told`."""
        return None if self._fault is None else self._error("point-to-point", self.sequence)

    def told(self, error: BaseException) -> None:
        """The program hears of `error`: if that ended the group, later calls are told that it is closed."""
        if self._fault is not None and self._first_error is None:
            self._first_error = error

    def lost_error(self, peer: int) -> CoveyError:
        """Return the error for a peer whose lane for messages ended; wait a moment for the news that tells why."""
        text = self._why_closed(peer, "end of stream")
        lost = PeerLostError(text, rank=peer, host=self._host(peer), operation="point-to-point", sequence=self.sequence)
        return self.fault_error() or lost

    def _error(self, what: str, sequence: int) -> CoveyError:
        fault = self._fault
        assert fault is not None
        host = self._host(fault.culprit)
        return fault.error(rank=self.rank, host=host, operation=what, sequence=sequence, group=self.name)

    def _what(self) -> str:
        return f"{self.call.text}, operation {self.sequence} of group {self.name!r}"

    def _host(self, rank: int) -> str:
        if self.node is None or rank not in self.ranks or rank == self.rank:
            return self.node.card.host_name if self.node is not None else ""
        return str(self.node.peers[self.members[rank]].host_name)

    def whereabouts(self, rank: int) -> tuple[str, int]:
        """Return the name of a rank's host, and the number of its process there."""
        peer = self.node.peers.get(self.members[rank]) if self.node is not None else None
        return self._host(rank), os.getpid() if peer is None else peer.pid

    def who_is_late(self, seconds: float) -> list[Late]:
        """Return the ranks that are behind the others, or do not answer."""
        return self.stalls.who_is_late(seconds)

    def name_ranks(self, ranks: tuple[int, ...]) -> str:
        """Say who these are."""
        if self.node is None:
            return ""
        names = []
        for rank in ranks:
            peer = self.node.peers.get(self.members[rank])
            names.append(f"rank {rank}" + (f" ({peer.host_name}, process {peer.pid})" if peer is not None else ""))
        return " and ".join(names)

    # What the control loop reports

    def heard(self, peer: int, message: GroupMessage) -> None:
        rank = self.ranks_by_member.get(peer)
        if rank is None or self.node is None:
            return
        if isinstance(message, messages.Revoke):
            ranks = tuple(rank for rank in message.ranks if rank in self.ranks)
            fault = Fault(message.kind, message.text, ranks or (rank,))
            if self._atomic is not None:
                self._atomic.note_reason(fault)
            elif fault.kind == "PeerLostError":
                self._suspicion.spoke(rank)
                self._suspect(fault)
            else:
                self.end(fault)
            return
        if isinstance(message, messages.Calls):
            if self._atomic is None:
                self.stalls.recall(rank, message)
            return
        if isinstance(message, messages.Announce) and self._fault is not None:
            # The news may have come before the asker knew of the group.
            self.node.tell((peer,), self._revocation(self._fault))
        self.stalls.heard(rank, message)

    def peer_gone(self, peer: int, *, left: bool) -> None:
        rank = self.ranks_by_member.get(peer)
        if rank is not None and self._atomic is not None:
            self.routing.peer_lost(rank)
        elif rank is not None and not left:
            other = self.node.peers[peer] if self.node is not None else None
            why = f"is gone: {other.reason}" if other is not None and other.reason else "is gone"
            if other is not None and other.failure:
                why = other.how_it_went()
            self._suspect(Fault("PeerLostError", f"{self.name_ranks((rank,))} {why}", (rank,)))

    def _suspect(self, fault: Fault) -> None:
        """A rank is lost, and the group ends with its first loss: have the thread that runs an operation decide."""
        self._suspicion.note(fault)
        if not self._is_performing:
            self._suspicion.settle()
            return
        self.attempt.is_stopped = True
        self._bell.ring()
        if self.node is not None:
            self.node.lanes.abandon(lambda key: key.group == self.id, ClosedError(fault.text))

    def lane_arrived(self, peer: int, purpose: str, lane: Any) -> bool:
        return purpose == "messages" and self.routing.lane_arrived(self.ranks_by_member[peer], lane)

    def forked(self) -> None:
        self._issuing, self._is_issuing = threading.RLock(), False
        self._fault_lock = threading.Lock()
        self._bell.forked()
        if self._atomic is not None:
            self._atomic.forked()
        self._dropped.detach()
        text = f"group {self.name!r} belongs to the process that joined; this one was forked from it and cannot use it"
        self._fault, self._first_error = Fault("ClosedError", text), None
        self.node = None
        self._freed = threading.Event()
        if self._closed:  # by a thread that this process does not have
            self._freed.set()
        for work in self._backlog.forked() + self.routing.forked():
            if not work.done():
                work.forked(ClosedError(text))

    # The end

    def close(self) -> None:
        """Free lanes, thread and descriptors. Closing twice is fine: the second waits for the first, if it can."""
        with self.routing.lock:  # no messenger is made from here on
            is_first, self._closed = not self._closed, True
            if is_first:
                self._closer = threading.get_ident()
        if is_first:
            try:
                self._close()
            finally:
                self._freed.set()
        elif not (
            self._closer == threading.get_ident() or self._backlog.is_on_this_thread or self.routing.is_driven_here
        ):  # these are in a callback that the other thread waits for
            self._freed.wait(CLOSE_SECONDS)

    def _close(self) -> None:
        self.routing.close(time.monotonic() + FLUSH_SECONDS)
        if self._backlog.unfinished or self._is_issuing:
            text = f"group {self.name!r} was closed on rank {self.rank} with operations pending"
            fault = Fault("ClosedError", text, (self.rank,))
            if self._atomic is not None:
                self.end(fault)
            else:
                self.fail(fault)
        self._backlog.end(END_SECONDS)
        if self._issuing.acquire(timeout=END_SECONDS):  # another thread's operation ends before its lanes do
            self._issuing.release()
        if self._atomic is not None:
            self._atomic.close()
        self.attempt.close()
        self._dropped.detach()
        if self.node is not None:
            if self._atomic is None:
                self.stalls.part()
            if self._fault is not None or self.sequence:
                self._let_the_reason_go_first()
            self.node.groups.forget(self.id, self.sequence)
        self._bell.close()
        _close_all(self._descriptors)

    def _let_the_reason_go_first(self) -> None:
        """What the control loop was given to say is said before our lanes end; others would wonder why they did."""
        is_said = threading.Event()
        control.soon(is_said.set)
        is_said.wait(CAUSE_SECONDS)


def _drop(
    node: Node | None,
    generation: Generation | None,
    group_id: int,
    members: tuple[int, ...],
    descriptors: list[int],
    work_queue: queue.SimpleQueue[Any],
) -> None:
    """Free what a group held that nobody closed. The garbage collector calls this, anywhere: it must not lock."""
    work_queue.put(None)
    if node is not None:
        control.soon(node.groups.forget, group_id, 0)
    if generation is not None:
        control.soon(generation.drop, group_id, generation.ranks_of(members))
    _close_all(descriptors)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()
