"""The lanes of one node as a table: which are open, which are waited for, and which may not open any more.

A lane has one future, which any thread may wait for. Lanes for collectives are made anew in every view. A lane for
messages is replaced when it breaks; its connections are numbered (`Epochs`). No lane opens with a process that a view
has excluded.

Which connection for messages replaces which: the end that dials numbers the connections. An offer has a higher number
than all that the pair has seen, and both ends use the connection with the higher number. So they agree, whichever end
noticed first that the last one broke.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from covey.base.errors import ClosedError, ConnectError
from covey.base.lane_kinds import LANE_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.base.numbers import Seat
    from covey.net.lanes.lane import Lane
    from covey.runtime.lanes.groups import GroupRegistry
    from covey.runtime.peers.peer_table import PeerTable
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.tasks import Tasks

REPLACEMENT: Final = "replacement"
"""The purpose of a lane that is to replace one for collectives (`lanes.tuning.moves`)."""
PURPOSES: Final = ("collectives", "messages", REPLACEMENT)


class Epochs:
    """The numbers of one node's connections for messages, by lane."""

    def __init__(self) -> None:
        self._seen: dict[LaneKey, int] = {}
        """The highest number of an offer that this node made or accepted."""
        self._opened: dict[LaneKey, int] = {}
        """The number of the connection that opened last."""

    def next(self, key: LaneKey) -> int:
        """Return the number to offer, or to ask for: one above all that this node has seen."""
        return self._seen.get(key, -1) + 1

    def seen(self, key: LaneKey, epoch: int) -> None:
        """Note an accepted offer of this number."""
        self._seen[key] = max(epoch, self._seen.get(key, -1))

    def opened(self, key: LaneKey, epoch: int) -> None:
        """Note that a connection of this number has opened."""
        self._opened[key] = epoch
        self.seen(key, epoch)

    def is_past(self, key: LaneKey, epoch: int) -> bool:
        """Tell whether a connection of this number, or a later one, has opened already."""
        return epoch <= self._opened.get(key, -1)

    def forget(self, group: int) -> None:
        """Drop the numbers of a closed group."""
        for numbers in (self._seen, self._opened):
            for key in [key for key in numbers if key.group == group]:
                del numbers[key]


class LaneKey(NamedTuple):
    """The purpose of a lane."""

    group: int
    peer: Seat
    """Its seat in the run."""
    purpose: str
    attempt: int = 0
    """The view number, for collectives of groups that survive losses: no byte of one attempt reaches the next.

    0 for messages, whose lanes are replaced one by one.
    """


def lane_key(group: int, peer: Seat, purpose: str, attempt: int) -> LaneKey:
    """Return the key of a lane, from the fields of a message about it."""
    return LaneKey(group, peer, purpose, 0 if purpose == "messages" else attempt)


class LaneTable:
    """The lanes of one node, by key. Any thread may call any method."""

    def __init__(
        self, peers: PeerTable, tasks: Tasks, groups: GroupRegistry, tell: Callable[[str, RemoteProcess, str], None]
    ) -> None:
        """`tell` adds an event about a peer; no lane opens once `tasks` are closing."""
        self._peers, self._tasks, self._groups, self._tell = peers, tasks, groups, tell
        self._lock = threading.Lock()
        self._lanes: dict[LaneKey, Future[Any]] = {}
        self._first_attempts: dict[int, int] = {}
        """By group: the attempt before which lanes are refused."""
        self._retired: list[tuple[LaneKey, Any]] = []
        """Lanes that were replaced and whose other end may still use them."""
        self._epochs = Epochs()
        self._given_up: set[LaneKey] = set()
        """Lanes for messages that are not replaced when they break."""

    def __len__(self) -> int:
        return len(self._lanes)

    def get(self, key: LaneKey) -> Future[Any] | None:
        """Return the future of a lane, if there is one."""
        return self._lanes.get(key)

    def want(self, key: LaneKey) -> Future[Any]:
        """Return the future of a lane; a new one that has failed already if the lane may not open."""
        with self._lock:
            future = self._lanes.get(key)
            if future is None:
                future = Future()
                if self._peers[key.peer].is_excluded:
                    future.set_exception(ConnectError(f"{self._peers.name_of(key.peer)} is gone"))
                elif self._tasks.is_closing or self.is_over(key):  # nothing would ever end the wait
                    future.set_exception(ClosedError("the group was closed"))
                else:
                    self._lanes[key] = future
            return future

    def is_over(self, key: LaneKey) -> bool:
        """Tell whether a lane may not open any more: its group, its attempt or its peer is gone."""
        if key.purpose != "messages" and key.attempt < self._first_attempts.get(key.group, 0):
            return True
        if self._groups.has_closed(key.group) or key in self._given_up or self._peers[key.peer].is_excluded:
            return True
        return not self._groups.has_member(key.group, key.peer)

    # Outcomes

    def opened(self, key: LaneKey, attempt: int, lane: Any) -> None:
        """Give an open lane to the threads that wait for it and to its group, or close it if it is not wanted."""
        with self._lock:
            future = self._lanes.get(key)
            replaced = future if future is not None and future.done() else None
            is_old = replaced is not None
            if key.purpose == "messages":
                is_old = self._epochs.is_past(key, attempt)
            is_wanted = not is_old and not self._tasks.is_closing and not self.is_over(key)
            if is_wanted:
                if key.purpose == "messages":
                    self._epochs.opened(key, attempt)
                if future is None or replaced is not None:
                    future = self._lanes[key] = Future()
                future.set_result(lane)
        if is_wanted and key.purpose == "collectives" and LANE_KINDS[lane.kind].is_of_network:
            self._tell("lane", self._peers[key.peer], lane.kind)
        if not is_wanted:
            lane.close()
        elif not self._groups.lane_arrived(key, lane) and replaced is not None:
            _close_future(replaced)  # the group has not used it

    def failed(self, key: LaneKey, error: BaseException) -> None:
        """Fail the wait for a lane, if it is still waited for."""
        with self._lock:
            future = self._lanes.get(key)
            if future is not None and not future.done():
                future.set_exception(error)

    def postponed(self, key: LaneKey, error: BaseException) -> None:
        """Fail the present wait for a lane that cannot open now; the next one that wants it causes another try."""
        with self._lock:
            future = self._lanes.get(key)
            if future is not None and not future.done():
                del self._lanes[key]
                future.set_exception(error)

    def abandon(self, unwanted: Callable[[LaneKey], bool], error: BaseException) -> None:
        """Fail the waits for lanes that will not open."""
        with self._lock:
            keys = [key for key, future in self._lanes.items() if unwanted(key) and not future.done()]
        for key in keys:
            self.failed(key, error)

    # Numbers of connections for messages

    def attempt_of_next(self, key: LaneKey) -> int:
        """Return the attempt to offer, or to ask for: for messages, one above all that this node has seen."""
        return self._epochs.next(key) if key.purpose == "messages" else key.attempt

    def offer_accepted(self, key: LaneKey, attempt: int) -> None:
        """Note the number of a connection for messages that was offered and accepted."""
        if key.purpose == "messages":
            with self._lock:
                self._epochs.seen(key, attempt)

    def is_open(self, key: LaneKey, attempt: int) -> bool:
        """Tell whether the lane is open; for messages, whether this connection or a later one has opened."""
        if key.purpose == "messages":
            return self._epochs.is_past(key, attempt)
        future = self._lanes.get(key)
        return future is not None and future.done()

    # Lookups

    def of_peer(self, peer: Seat) -> list[tuple[LaneKey, Future[Any]]]:
        """Return the lanes to a peer, open or waited for."""
        with self._lock:
            return [(key, future) for key, future in self._lanes.items() if key.peer == peer]

    def open_lanes(self, purpose: str) -> list[tuple[LaneKey, Any]]:
        """Return all open lanes for a purpose."""
        with self._lock:
            return [
                (key, future.result())
                for key, future in self._lanes.items()
                if key.purpose == purpose and _is_open(future)
            ]

    def of_group(self, group: int, purpose: str) -> dict[Seat, Any]:
        """Return the open lanes of a group, by peer."""
        with self._lock:
            return {
                key.peer: future.result()
                for key, future in self._lanes.items()
                if (key.group, key.purpose) == (group, purpose) and future.done() and future.exception() is None
            }

    def ring_bytes(self) -> int:
        """Return how many bytes the open rings occupy."""
        with self._lock:
            opened = [future.result() for future in self._lanes.values() if future.done() and not future.exception()]
        return sum(2 * getattr(lane, "capacity", 0) for lane in opened)

    # Lanes that replace others

    def switch(self, key: LaneKey) -> tuple[Any, Any] | None:
        """Use the replacement in place of the one for collectives; return both, old and new, or None if one is missing.

        The old one is closed with its group, unless `close_retired` closes it before.
        """
        replacement = key._replace(purpose=REPLACEMENT)
        with self._lock:
            old, new = self._lanes.get(key), self._lanes.get(replacement)
            if old is None or new is None or not (_is_open(old) and _is_open(new)):
                return None
            self._lanes[key] = self._lanes.pop(replacement)
            self._retired.append((key, old.result()))
            return old.result(), new.result()

    def close_retired(self, lane: Any) -> None:
        """Close a lane that was replaced."""
        with self._lock:
            self._retired = [(key, each) for key, each in self._retired if each is not lane]
        lane.close()

    def drop_replacement(self, key: LaneKey) -> None:
        """Close a replacement lane, or forget that it was to be opened."""
        self._close(lambda each: each == key and key.purpose == REPLACEMENT)

    # The end

    def discard(self, key: LaneKey, ended: Any) -> None:
        """Remove a lane that has ended, unless another has replaced it."""
        with self._lock:
            future = self._lanes.get(key)
            if future is not None and future.done() and future.exception() is None and future.result() is ended:
                del self._lanes[key]

    def give_up(self, key: LaneKey) -> None:
        """Refuse to replace a lane for messages from now on."""
        with self._lock:
            self._given_up.add(key)
        self.abandon(lambda each: each == key, ClosedError("no more messages are exchanged with this rank"))

    def forget(self, group: int) -> None:
        """Close the lanes of a group that was closed; it refuses later ones."""
        with self._lock:
            self._first_attempts.pop(group, None)
            self._epochs.forget(group)
            self._given_up = {key for key in self._given_up if key.group != group}
        self._close(lambda key: key.group == group)

    def retire(self, group: int, attempt: int) -> None:
        """Close the lanes of a group's attempts before this one. No thread may be using them."""
        with self._lock:
            self._first_attempts[group] = attempt
        self._close(lambda key: key.group == group and key.purpose != "messages" and key.attempt < attempt)

    def shut_down(self, peer: Seat, *, collectives: bool) -> None:
        """Shut down the open lanes for messages, and if asked for `collectives`, to a peer. Their users close them."""
        for key, future in self.of_peer(peer):
            if (collectives or key.purpose == "messages") and future.done() and future.exception() is None:
                with contextlib.suppress(OSError):  # it has ended already
                    future.result().shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all lanes."""
        self._close(lambda _: True)

    def _close(self, unwanted: Callable[[LaneKey], bool]) -> None:
        with self._lock:
            futures = [self._lanes.pop(key) for key in [key for key in self._lanes if unwanted(key)]]
            retired = [lane for key, lane in self._retired if unwanted(key)]
            self._retired = [(key, lane) for key, lane in self._retired if not unwanted(key)]
        for future in futures:
            _close_future(future)
        for lane in retired:
            lane.close()


def _is_open(future: Future[Any]) -> bool:
    return future.done() and future.exception() is None


def _close_future(future: Future[Lane | socket.socket]) -> None:
    """Close the lane that a future holds, or fail the wait for it."""
    if not future.done():
        future.set_exception(ClosedError("the group was closed"))
    elif future.exception() is None:
        future.result().close()
