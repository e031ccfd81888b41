"""The groups of a process: which one a lane or a message belongs to, and which are closed.

Called on any thread, unless it says not.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from covey.runtime import loop as control
from covey.runtime.lanes.tuning.yielding import Urgency
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from covey.base.errors import CoveyError
    from covey.base.numbers import Seat
    from covey.runtime.fault import Fault
    from covey.runtime.lanes.table import LaneKey
    from covey.runtime.peers.peer_table import PeerTable
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.views.generation import Generation

CLOSED_GROUPS_REMEMBERED: Final = 10_000
EARLY_CALLS: Final = 1000
"""Messages that are kept for groups that do not exist here yet."""
GroupMessage: TypeAlias = "messages.Announce | messages.Position | messages.Revoke | messages.Calls"


class RegisteredGroup(Protocol):
    """A group, as its node sees it. Called on the control loop; `peer` is a seat of the run."""

    def heard(self, peer: Seat, message: GroupMessage) -> None: ...

    def peer_gone(self, peer: Seat, *, left: bool) -> None: ...

    def end(self, fault: Fault) -> None: ...

    def fail(self, fault: Fault) -> None: ...

    @property
    def generation(self) -> Generation | None: ...

    @property
    def survives(self) -> bool: ...

    @property
    def members(self) -> Collection[Seat]: ...

    @property
    def has_rings(self) -> bool:
        """Whether its messages may travel through shared memory."""

    @property
    def urgency(self) -> Urgency:
        """How its lanes share the limit of this machine with others."""

    def lane_arrived(self, peer: Seat, purpose: str, lane: Any) -> bool: ...

    def sent_to(self, seat: Seat) -> tuple[int, int]:
        """Return the bytes that were sent to a member, and in how many transfers."""

    def lane_to(self, seat: Seat) -> Any:
        """Return the open lane for collectives to a member; None if there is none."""

    def lane_stuck(self, seat: Seat, attempt: int) -> None: ...

    def propose_switch(self, seat: Seat, attempt: int, lane: Any, least: int) -> int | None: ...

    def accept_switch(self, seat: Seat, attempt: int, lane: Any, sequence: int) -> int | None: ...

    def settle_switch(self, seat: Seat, attempt: int, sequence: int | None) -> None: ...

    def forked(self) -> None: ...

    def confirm(self) -> None:
        """Compare the last calls of the group with those of the other ranks, before it is closed. Not on the loop."""

    def close(self) -> CoveyError | None:
        """Close the group; return a mismatch of which the program was not told. Not on the loop."""


class GroupRegistry:
    """The groups of one process, by id. It does not keep a group alive that the program has dropped."""

    def __init__(self, peers: PeerTable) -> None:
        self._peers = peers
        self._lock = threading.Lock()
        self._groups: weakref.WeakValueDictionary[int, RegisteredGroup] = weakref.WeakValueDictionary()
        self._closed: dict[int, int] = {}
        """By closed group: its last operation."""
        self._early_calls: dict[tuple[int, Seat], messages.Calls] = {}
        """By group and seat: the last calls of ranks that have closed a group before it exists here."""

    def __iter__(self) -> Iterator[RegisteredGroup]:
        with self._lock:
            return iter(list(self._groups.values()))

    def __getitem__(self, group_id: int) -> RegisteredGroup:
        return self._groups[group_id]

    def get(self, group_id: int) -> RegisteredGroup | None:
        """Return a group, if it exists here."""
        return self._groups.get(group_id)

    def register(self, group_id: int, group: RegisteredGroup) -> None:
        """Pass on messages about a group to it from now on."""
        with self._lock:
            self._groups[group_id] = group
            early = [(key[1], self._early_calls.pop(key)) for key in list(self._early_calls) if key[0] == group_id]
        for seat, calls in early:
            control.soon(group.heard, seat, calls)

    def forget(self, group_id: int, sequence: int) -> None:
        """Pass nothing more on to a group that is closed, and whose last operation was `sequence`."""
        with self._lock:
            self._groups.pop(group_id, None)
            self._closed[group_id] = sequence
            while len(self._closed) > CLOSED_GROUPS_REMEMBERED:
                del self._closed[next(iter(self._closed))]

    def has_closed(self, group_id: int) -> bool:
        """Tell whether a group was closed here."""
        return group_id in self._closed

    def has_member(self, group_id: int, seat: Seat) -> bool:
        """Tell whether a process is in a group; True for a group that does not exist here yet."""
        group = self._groups.get(group_id)
        return group is None or seat in group.members

    def has_rings(self, group_id: int) -> bool:
        """Tell whether the messages of a group may travel through shared memory; True if it does not exist here yet."""
        group = self._groups.get(group_id)
        return group is None or group.has_rings

    def urgency(self, group_id: int) -> Urgency:
        """Tell how the lanes of a group share the limit of this machine; as those of tensors if it is not here yet."""
        group = self._groups.get(group_id)
        return Urgency.TENSORS if group is None else group.urgency

    def lane_arrived(self, key: LaneKey, lane: Any) -> bool:
        """Give an open lane to its group; return whether the group exists and uses it from now on."""
        group = self._groups.get(key.group)
        return group is not None and group.lane_arrived(key.peer, key.purpose, lane)

    def heard(self, seat: Seat, message: GroupMessage) -> None:
        """Pass on a message about a group. On the control loop."""
        group = self._groups.get(message.group)
        if group is not None:
            group.heard(seat, message)
        elif isinstance(message, messages.Calls):
            if self.has_closed(message.group):  # nothing here compares them any more
                return
            with self._lock:
                self._early_calls[message.group, seat] = message
                while len(self._early_calls) > EARLY_CALLS:
                    del self._early_calls[next(iter(self._early_calls))]
        elif (
            isinstance(message, messages.Announce)
            and self._closed.get(message.group, message.sequence) < message.sequence
        ):
            text = f"{self._peers.name_of(self._peers.seat)} of the run has closed the group"
            self._peers.send(seat, messages.Revoke(message.group, "PeerLostError", text, ()))

    def peer_gone(self, peer: RemoteProcess) -> None:
        """Tell every group that it need not wait for a peer. On the control loop."""
        for group in self:
            group.peer_gone(peer.seat, left=peer.has_left)

    def end(self, generation: Generation, fault: Fault, *, only_surviving: bool) -> None:
        """End the groups of a generation that this node is not in any more. On the control loop.

        With `only_surviving`, end only the groups that need its views to go on.
        """
        for group in self:
            if group.generation is generation and (group.survives or not only_surviving):
                group.end(fault)

    def forked(self) -> None:
        """Make the groups unusable: this process is a fork of the one that joined."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        for group in self:
            group.forked()
