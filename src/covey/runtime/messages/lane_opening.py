"""Opens the lanes of a messenger, each when the first message needs it."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Protocol

from covey.base.errors import PeerLostError
from covey.base.numbers import ANY

if TYPE_CHECKING:
    import socket
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
