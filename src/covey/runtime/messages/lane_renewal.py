"""Opens the lanes of a messenger when the first message needs them, and replaces those that end.

A lane that ends is replaced until its peer is lost; then the messages with that peer fail.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Protocol

from covey.base.errors import PeerLostError
from covey.base.numbers import ANY

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.proto.matching import Matcher
    from covey.runtime.messages.lane_poll import LanePoll
    from covey.runtime.messages.lending import MessengerLock


class LaneUser(Protocol):
    """The messages that lanes are opened for."""

    def opened(self, peer: int, sock: socket.socket) -> None:
        """Use a new lane; with the lock."""


class LaneOpening:
    """Opens one lane to a rank at a time, whichever threads ask for it. Its methods are called without the lock.

    They get the user of the lanes as an argument: an attribute would be a reference cycle (see `DrivingThread`).
    """

    def __init__(
        self,
        lock: MessengerLock,
        matcher: Matcher,
        lanes: LanePoll,
        *,
        open_lane: Callable[[int, float | None], socket.socket],
    ) -> None:
        """`open_lane` is that of the messenger."""
        self._lock, self._matcher, self._lanes = lock, matcher, lanes
        self._open_lane = open_lane
        self._busy: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)

    def open(self, user: LaneUser, peer: int, deadline: float | None) -> None:
        """Return once there is a lane to a rank; do nothing for this rank itself, and for ranks that do not exist."""
        if not self._is_other(peer) or peer in self._lanes.by_rank:
            return
        with self._busy[peer]:
            if peer not in self._lanes.by_rank:
                sock = self._open_lane(peer, deadline)
                with self._lock:
                    user.opened(peer, sock)

    def open_for(self, user: LaneUser, src: int, tag: int, deadline: float | None) -> None:
        """Open the lanes on which a message from `src` could come, unless one is here."""
        with self._lock:
            is_here = self._matcher.has_match(src, tag)
        if not is_here:
            for peer in range(self._matcher.size) if src == ANY else (src,):
                if not self._matcher.has_failed(peer):
                    self._open_to_receive(user, peer, deadline)

    def _is_other(self, peer: int) -> bool:
        return peer != self._matcher.rank and 0 <= peer < self._matcher.size

    def _open_to_receive(self, user: LaneUser, peer: int, deadline: float | None) -> None:
        """Open the lane to a rank before receiving from it; if the rank is lost, receives fail as after any loss."""
        try:
            self.open(user, peer, deadline)
        except PeerLostError as error:
            with self._lock:
                self._matcher.fail(peer, error)


class LaneRenewal:
    """The ranks whose lanes are replaced, and those that are lost. Methods take the lock unless they say otherwise."""

    def __init__(
        self,
        lock: MessengerLock,
        matcher: Matcher,
        lanes: LanePoll,
        name: str,
        *,
        renew_lane: Callable[[int, Any, float], None],
        give_up: Callable[[int], None],
        fault: Callable[[], BaseException | None],
        lost: Callable[[int], BaseException | None],
    ) -> None:
        """See `Messenger` for the functions."""
        self._lock, self._matcher, self._lanes, self._name = lock, matcher, lanes, name
        self._renew_lane, self._give_up, self._fault, self._lost = renew_lane, give_up, fault, lost
        self.departed: list[int] = []
        """Lost ranks without a lane that are not handled yet."""
        self._lost_ranks: set[int] = set()
        """Ranks whose lanes are no longer replaced."""

    @property
    def is_needed(self) -> bool:
        """Whether `settle` has something to do."""
        return bool(self._lanes.ended or self.departed)

    def ask(self, peer: int) -> None:
        """Ask for a first lane to a rank. Without the lock."""
        self._renew_lane(peer, None, 0.0)

    def end_for_good(self, peer: int, error: BaseException) -> None:
        """End the lane to a rank, replace it no more, and fail the messages. With the lock."""
        self._lanes.end(self._lanes.by_rank[peer], None)
        self._lost_ranks.add(peer)
        self._matcher.fail(peer, error)
        self._give_up(peer)

    def depart(self, peer: int) -> None:
        """Note that a rank without a lane is lost; the next `settle` fails its messages. With the lock."""
        self.departed.append(peer)

    def peer_lost(self, peer: int) -> bool:
        """Note that a rank is lost; return whether `settle` has to be called. With the lock."""
        lane = self._lanes.by_rank.get(peer)
        self._lost_ranks.add(peer)
        if lane is None or lane.is_ended:
            self.depart(peer)
            return True
        with contextlib.suppress(OSError):  # the driving thread reads to the end, and then handles the loss
            lane.sock.shutdown(socket.SHUT_RDWR)
        return False

    def settle(self) -> None:
        """Have the lanes that ended replaced, and fail the messages of lost ranks."""
        while self._lanes.ended:
            with self._lock:
                ended = self._lanes.take_ended()
            for lane, cause in ended:
                peer = lane.peer
                if cause is not None or peer in self._lost_ranks or self._matcher.has_parted(peer):
                    self.part_with(peer, cause)
                elif self._lanes.by_rank[peer] is lane and self._fault() is None:  # else it was replaced already
                    self._renew_lane(peer, lane.sock, self._lanes.pause_after(lane))
        while self.departed:
            with self._lock:
                departed, self.departed = self.departed, []
            for peer in departed:
                self.part_with(peer, None)

    def part_with(self, peer: int, cause: BaseException | None) -> None:
        """Fail all messages with a rank for good, with `cause` or the rank's loss."""
        if self._matcher.has_failed(peer):
            return
        self._give_up(peer)
        text = f"{self._name}: rank {peer} closed its connection for messages"
        error = cause or self._fault() or self._lost(peer) or PeerLostError(text, rank=peer, operation="send/recv")
        with self._lock:
            self._lost_ranks.add(peer)
            if (lane := self._lanes.by_rank.get(peer)) is not None:  # it was added just now
                self._lanes.end(lane, None)
                self._lanes.take_ended()
            self._matcher.fail(peer, error)
