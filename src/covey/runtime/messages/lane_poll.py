"""The lanes of one messenger, polled together: reads, writes, and notices lanes that end.

A lane ends at the end of its stream, with an error, or if the other end does not acknowledge what is sent: its kernel,
or, on lanes that both ends attend to all the time (`doubts`), the process itself. The
messenger takes the ended lanes from here and has them replaced. Callers hold the messenger's lock, except for `poll`.
"""

from __future__ import annotations

import math
import os
import select
import socket
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from covey.base.errors import RemoteProtocolError
from covey.base.pace import Growing
from covey.net.host import tcp
from covey.net.lanes.message_sockets import RingSocket
from covey.runtime.messages.lending import short_sizes
from covey.runtime.messages.message_lane import MessageLane
from covey.runtime.pool import pool

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.proto.matching import Matcher
    from covey.runtime.messages.driving_thread import DrivingThread

SPIN_SECONDS: Final = 200e-6
"""How long a thread that waits for a message polls without sleeping: a short call takes about as long."""
VAIN_SPINS_LIMIT: Final = 6
"""The most doublings of the number of waits without a spin."""
LANE_PAUSES: Final = Growing(0.02, 2.0)
"""Before asking for a lane, when lanes break one after the other and carry nothing."""

IDLE_LANE_SECONDS: Final = 1.0
"""On a lane on which nothing has moved for so long, each end says how much has arrived."""
DOUBTS: Final = Growing(4.0, 60.0)
"""A lane on which nothing has moved for so long, and whose other end has not said that it has what was sent, is
replaced. Each time longer: the other process may only be busy."""
SWALLOWED: Final = "what was sent did not arrive, though a machine on the way has acknowledged it"


class LanePoll:
    """The lanes of one messenger."""

    def __init__(self, matcher: Matcher, driving: DrivingThread, wake_fd: int, *, spins: bool) -> None:
        """`wake_fd` is readable once the group has failed; it is polled and never read."""
        self._matcher, self._driving, self._wake_fd, self._spins = matcher, driving, wake_fd, spins
        self.gives_way: Callable[[], bool] | None = None
        """Tells whether something more urgent moves elsewhere; for lanes that are added from now on."""
        self.doubts = False
        """Whether lanes are replaced whose other end does not say that it has what was sent."""
        self._look_at = 0.0
        self._doubted: defaultdict[int, int] = defaultdict(int)
        """By rank: how many lanes were replaced for that reason."""
        self.by_rank: dict[int, MessageLane] = {}
        """The last lane to each rank."""
        self._by_fd: dict[int, MessageLane] = {}
        self._rings: dict[MessageLane, RingSocket] = {}
        """The lanes through shared memory, of whose bytes a poll says nothing."""
        self.ended: list[tuple[MessageLane, BaseException | None]] = []
        """Lanes that ended and are not handled yet, with the error if this rank ended them."""
        self._strikes: defaultdict[int, int] = defaultdict(int)
        self._trouble: defaultdict[int, str] = defaultdict(str)
        """By rank: how many lanes in a row broke without carrying anything, and how the last one broke."""
        self._vain_spins = self._sleeps = 0
        """How many spins in a row saw nothing, and how many waits sleep at once before the next spin."""
        self._poll = select.poll()
        for descriptor in (driving.bell_fd, wake_fd):
            self._poll.register(descriptor, select.POLLIN)

    def add(self, peer: int, sock: socket.socket) -> None:
        """Use `sock` as the lane to a rank; an earlier lane has ended."""
        self._matcher.lane_opened(peer)
        lane = self.by_rank[peer] = self._by_fd[sock.fileno()] = MessageLane(peer, sock, self._matcher, self.gives_way)
        self._poll.register(sock, select.POLLIN)
        if isinstance(sock, RingSocket):
            self._rings[lane] = sock
            sizes = short_sizes(self._matcher.sizes)
            sock.prepare_short(self._driving.bell_fd, self._wake_fd, sizes, spins=self._spins, empty=pool.array)
        self._flush(lane)  # the other end waits to hear how much has arrived, and no thread may be driving
        self._driving.ring()

    def end(self, lane: MessageLane, cause: BaseException | None) -> None:
        """End a lane, if it has not ended; `cause` is the error if this rank ends it because of its peer."""
        if not lane.is_ended:
            lane.is_ended = True
            self._matcher.lane_ended(lane.peer)
            self._poll.unregister(lane.descriptor)
            del self._by_fd[lane.descriptor]
            self._rings.pop(lane, None)
            self.ended.append((lane, cause))

    def take_ended(self) -> list[tuple[MessageLane, BaseException | None]]:
        """Return the lanes that ended since the last call, with their sockets closed."""
        ended, self.ended = self.ended, []
        for lane, _ in ended:
            lane.sock.close()
        return ended

    def short_ring(self, peer: int) -> RingSocket | None:
        """Return the ring through which short messages with a rank may pass without Python, if there is one."""
        lane = self.by_rank.get(peer)
        ring = None if lane is None else self._rings.get(lane)
        return None if ring is None or ring.short is None else ring

    def pause_after(self, lane: MessageLane) -> float:
        """Return the seconds to wait before a lane that ended is replaced: longer if lanes carry nothing."""
        strikes = 0 if lane.has_moved else self._strikes[lane.peer]
        self._strikes[lane.peer] = strikes + 1
        return LANE_PAUSES.after(strikes)

    def trouble_with(self, ranks: list[int]) -> str:
        """Return sentences about the connections with these ranks that broke and carry nothing, for an error."""
        return "".join(
            f". The connection with rank {rank} broke: {self._trouble[rank]}"
            for rank in ranks
            if self._trouble[rank] and (self.by_rank[rank].is_ended or not self.by_rank[rank].has_moved)
        )

    def has_undelivered(self) -> bool:
        """Tell whether the kernel holds bytes for a rank that still reads."""
        lanes = (lane for lane in self.by_rank.values() if not lane.is_ended)
        return any(lane.undelivered_bytes() for lane in lanes if not self._matcher.has_parted(lane.peer))

    def delivered_bytes(self) -> int:
        """Return how much the present lanes have sent that the kernel does not hold any more."""
        lanes = (lane for lane in self.by_rank.values() if not lane.is_ended)
        return sum(lane.sent_bytes - lane.undelivered_bytes() for lane in lanes)

    def close(self, deadline: float) -> None:
        """Close all lanes, without discarding what their peers have not read yet; see `MessageLane.close`."""
        for lane in list(self.by_rank.values()):
            if not lane.is_ended:
                lane.close(deadline)

    # Moving bytes

    def poll(self, seconds: float, *, spins: bool) -> list[tuple[int, int]]:
        """Wait for events for at most `seconds`, without the lock, and return them for `handle`.

        With `spins`, poll for a moment before sleeping: waking from a sleep takes as long as a short message does. If
        nothing comes in that moment, the next waits sleep at once: twice as many each time.
        """
        if spins and self._sleeps:
            self._sleeps -= 1
        elif spins:
            until = time.perf_counter() + min(seconds, SPIN_SECONDS)
            while True:
                events = self._poll.poll(0)
                if self._rings:
                    events = self._with_rings(events)
                if events:
                    self._vain_spins = 0
                    return events
                if time.perf_counter() >= until:
                    break
                os.sched_yield()  # the process that sends may need this core
            self._vain_spins = min(self._vain_spins + 1, VAIN_SPINS_LIMIT)
            self._sleeps = 2**self._vain_spins - 1
        milliseconds = math.ceil(1000 * min(seconds, tcp.PATH_CHECK_SECONDS))
        if not self._rings:
            return self._poll.poll(milliseconds)
        for lane, ring in list(self._rings.items()):  # another thread may add one, or end one
            if not ring.park(sending=lane.is_blocked):
                milliseconds = 0
        return self._with_rings(self._poll.poll(milliseconds))

    def _with_rings(self, events: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return events with those of lanes through shared memory in place of the events of their doorbells."""
        rings = list(self._rings.items())
        rung = {descriptor for descriptor, _ in events}
        for lane, ring in rings:
            ring.unpark(is_rung=lane.descriptor in rung)
        doorbells = {lane.descriptor for lane, _ in rings}
        return [event for event in events if event[0] not in doorbells] + [
            (lane.descriptor, select.POLLIN | (select.POLLOUT if lane.is_blocked else 0))
            for lane, ring in rings
            if ring.is_ready(sending=lane.is_blocked)
        ]

    def handle(self, events: list[tuple[int, int]]) -> bool:
        """Read and write where `poll` says so; return whether the group has failed."""
        has_fault = False
        if not events:
            self._end_stuck()
        if self.doubts and (now := time.monotonic()) >= self._look_at:
            self._look_at = now + tcp.PATH_CHECK_SECONDS
            self._look_at_quiet_lanes(now)
        for descriptor, event in events:
            if lane := self._by_fd.get(descriptor):
                if event & ~select.POLLOUT:
                    try:
                        if not lane.read():
                            self._broke(lane, "end of stream")
                    except OSError as error:
                        self._broke(lane, str(error))
                    except RemoteProtocolError as error:
                        self.end(lane, error)
                if event & select.POLLOUT and not lane.is_ended:
                    self._flush(lane)
            elif descriptor == self._wake_fd:
                has_fault = True
            else:
                self._driving.hush(descriptor)  # or a lane that another thread ended meanwhile
        if self._matcher.ready:
            self.flush_ready()
        return has_fault

    def flush_ready(self) -> None:
        """Write what the matcher has for the ranks whose lanes take it."""
        for peer in sorted(self._matcher.ready):
            lane = self.by_rank[peer]
            if not lane.is_ended and not lane.is_blocked:
                self._flush(lane)

    def _flush(self, lane: MessageLane) -> None:
        was_blocked = lane.is_blocked
        try:
            lane.flush()
        except OSError as error:
            try:
                lane.read_rest()
            except RemoteProtocolError as breach:
                self.end(lane, breach)
            self._broke(lane, str(error))
            return
        if lane.is_blocked != was_blocked:
            if lane not in self._rings:
                self._poll.modify(lane.sock, select.POLLIN | (select.POLLOUT if lane.is_blocked else 0))
            self._driving.ring()

    def _broke(self, lane: MessageLane, trouble: str) -> None:
        """End a lane that broke; another one replaces it."""
        self._trouble[lane.peer] = trouble
        self.end(lane, None)

    def _look_at_quiet_lanes(self, now: float) -> None:
        """Acknowledge what arrived on lanes that are quiet, and end those on which what was sent is lost.

        A machine on the way may take bytes, acknowledge them, and not pass them on; the kernel does not notice it.
        """
        for lane in list(self._by_fd.values()):
            quiet = now - lane.moved_at
            if lane.sock.family == socket.AF_UNIX or quiet < IDLE_LANE_SECONDS:  # in memory nothing is lost
                continue
            peer = lane.peer
            self._matcher.fell_quiet(peer)
            patience = DOUBTS.after(self._doubted[peer] + 1)
            if quiet >= patience and self._matcher.is_unheard(peer) and not lane.undelivered_bytes():
                self._doubted[peer] += 1
                self._trouble[peer] = SWALLOWED
                self.end(lane, None)

    def _end_stuck(self) -> None:
        """End lanes whose network path is dead. The peer may be alive, and the next lane may use another path."""
        for lane in list(self._by_fd.values()):
            if tcp.is_stuck(lane.sock):
                self._trouble[lane.peer] = f"the other end {tcp.STUCK}"
                self.end(lane, None)
