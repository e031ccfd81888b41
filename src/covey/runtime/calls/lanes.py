"""The network of calls: two messengers of the whole run, one for small messages and one for parts of large payloads.

They have connections of their own with each node, opened on first use, so a small message never waits for a payload.
The ranks of both are seats of the run: calls go on from generation to generation.
"""

from __future__ import annotations

import functools
import hashlib
import time
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from covey.base.errors import ClosedError, PeerLostError
from covey.base.numbers import Rank, Seat
from covey.net.host.machine import usable_cores
from covey.proto.calling.tags import CALL_TAG
from covey.runtime.bell import Bell
from covey.runtime.lanes.tuning.yielding import Urgency
from covey.runtime.messages.routing import MessageRouting

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from covey.base.config import GroupConfig
    from covey.base.errors import CoveyError
    from covey.runtime.fault import Fault
    from covey.runtime.lanes.groups import GroupMessage, GroupRegistry
    from covey.runtime.lanes.lanes import Lanes
    from covey.runtime.messages.listening import ListeningMessenger
    from covey.runtime.messages.messenger import Messenger
    from covey.runtime.peers.peer_table import PeerTable
    from covey.runtime.views.generation import Generation
    from covey.wire.versions import Agreement

ANSWERS_FLUSH_SECONDS: Final = 2.0
"""How long leaving a run may take to deliver the last answers."""


class CallingNode(Protocol):
    """What calls need of the node that makes and serves them (`joining.node`)."""

    @property
    def run(self) -> str: ...

    @property
    def config(self) -> GroupConfig: ...

    @property
    def peers(self) -> PeerTable: ...

    @property
    def groups(self) -> GroupRegistry: ...

    @property
    def lanes(self) -> Lanes: ...

    @property
    def generation(self) -> Generation | None: ...

    @property
    def speaks(self) -> Agreement: ...


class _Seats:
    """The seats of a run as the ranks of a group: each seat is its own rank, and new ones may come."""

    def __init__(self, peers: PeerTable) -> None:
        self._peers = peers

    def __contains__(self, seat: object) -> bool:
        return seat == self._peers.seat or seat in self._peers

    def __getitem__(self, seat: Any) -> Any:
        return seat

    def __iter__(self) -> Iterator[Seat]:
        return iter((self._peers.seat, *self._peers))

    def __len__(self) -> int:
        return 1 + len(self._peers)

    def describe(self, ranks: tuple[Rank, ...]) -> str:
        return " and ".join(self._peers.name_of(Seat(rank)) for rank in ranks)

    @property
    def rank_of(self) -> dict[Seat, Rank]:
        return cast("dict[Seat, Rank]", self)


class LaneListener(Protocol):
    """What the lanes of calls report; on any thread."""

    def received(self, messages: list[tuple[Seat, bytes]]) -> None: ...

    def parted(self, name: str, peer: Seat) -> None: ...

    def ended(self, fault: Fault) -> None: ...

    def close(self) -> None: ...

    def forked(self) -> None: ...


class _CallRouting(MessageRouting):
    """The sockets of one of the two messengers."""

    def __init__(self, owner: CallLanes, bell: Bell) -> None:
        super().__init__(cast("Any", owner), bell)
        self._listener, self._gives_way, self._name = owner.listener, owner.gives_way, owner.name

    def _kind(self) -> Callable[..., Messenger]:
        from covey.runtime.messages.listening import ListeningMessenger  # most programs make no calls

        return functools.partial(
            ListeningMessenger, tag=CALL_TAG, listener=self._listener.received, gives_way=self._gives_way
        )

    def _give_up(self, rank: int) -> None:
        super()._give_up(rank)
        self._listener.parted(self._name, Seat(rank))


class CallLanes:
    """One messenger of the run, as its node and its routing see it: a group whose ranks are all seats of the run."""

    is_closed = False
    has_rings = False
    """Its threads sleep between messages, and a socket wakes them with fewer system calls."""
    has_happened = False

    def __init__(
        self,
        node: CallingNode,
        name: str,
        listener: LaneListener,
        *,
        spins: bool = False,
        gives_way: Callable[[], bool] | None = None,
    ) -> None:
        """`spins` says whether fast answers are worth some processor time.

        `gives_way` tells whether something more urgent moves elsewhere.
        """
        self._spins, self.gives_way = spins, gives_way
        self.urgency = Urgency.CALLS if gives_way is None else Urgency.PARTS
        self.name, self.listener = name, listener
        self.id = int.from_bytes(hashlib.blake2b(f"covey/{name}".encode(), digest_size=8).digest(), "little")
        self.node: CallingNode | None = node
        self.config, self.rank = node.config, Rank(node.peers.seat)
        self.members = self.roster = _Seats(node.peers)
        self._bell = Bell()
        self.routing = _CallRouting(self, self._bell)
        self.used_messenger: ListeningMessenger | None = None
        """The messenger, if it is used already."""
        node.groups.register(self.id, cast("Any", self))

    def messenger(self) -> ListeningMessenger:
        """Return the messenger; ClosedError once it is closed."""
        if self.used_messenger is None or self.is_closed:
            self.used_messenger = cast("ListeningMessenger", self.routing.messenger())
        return self.used_messenger

    def shut(self) -> None:
        """Deliver what was sent, and close all connections."""
        with self.routing.lock:
            is_first, self.is_closed = not self.is_closed, True
        if is_first and self.node is not None:
            self.routing.close(time.monotonic() + ANSWERS_FLUSH_SECONDS)
            self.node.lanes.forget(self.id, 0)
            self._bell.close()

    # As the owner of its messages (`messages.routing.MessageOwner` and `MessageFailure`)

    @property
    def may_spin(self) -> bool:
        """Whether threads may poll for a moment before they sleep: each process of this host can have a core."""
        if not self._spins or self.node is None:
            return False
        return 1 + len(self.node.peers.here) <= usable_cores()

    @property
    def lanes(self) -> Lanes | None:
        """The lanes of this process; None once it was forked."""
        return None if self.node is None else self.node.lanes

    @property
    def size(self) -> int:
        """One more than the highest seat."""
        return 1 + max(self.members)

    @property
    def is_freed(self) -> bool:
        """Whether the lanes are closed."""
        return self.is_closed

    @property
    def failure(self) -> CallLanes:
        """What tells whether messages have failed as a whole; they never do."""
        return self

    def require_open(self) -> None:
        """Raise ClosedError once the lanes are closed."""
        if self.is_closed:
            raise ClosedError("this node has left its run; join again")

    def message_error(self) -> CoveyError | None:
        """Return why all messages fail: they never do."""
        return None

    def lost_error(self, rank: Rank) -> CoveyError:
        """Return the error of messages with a lost node."""
        return PeerLostError(f"{self.roster.describe((rank,))} is gone", rank=rank, operation=self.name)

    def note_raised(self, error: BaseException) -> None:
        """Do nothing: no error of a message ends the others."""

    # As a group of its node, on the control loop (`lanes.groups.RegisteredGroup`)

    @property
    def generation(self) -> Generation | None:
        """The last one of the node: calls go on from generation to generation."""
        return None if self.node is None else self.node.generation

    @property
    def survives(self) -> bool:
        """Whether the calls need views to go on: the process is in the run only as long as views say so."""
        return self.config.on_loss == "continue"

    def heard(self, peer: Seat, message: GroupMessage) -> None:
        """Do nothing: no control message is about calls."""

    def peer_gone(self, peer: Seat, *, left: bool) -> None:
        """Report a lost node, once all that has arrived from it is read."""
        if self.used_messenger is not None:
            self.routing.peer_lost(Rank(peer))
        else:
            self.listener.parted(self.name, peer)

    def lane_arrived(self, peer: Seat, purpose: str, lane: socket.socket) -> bool:
        """Use a lane that has opened."""
        if purpose != "messages" or self.is_closed:
            return False
        self.messenger()
        return self.routing.lane_arrived(Rank(peer), lane)

    def lane_to(self, peer: Seat) -> None:
        """Return None: calls have no lanes for collectives."""

    def end(self, fault: Fault) -> None:
        """Report that this node is in no generation any more: the others have nothing to do with it."""
        self.listener.ended(fault)

    def fail(self, fault: Fault) -> None:
        """Do nothing: calls do not end with the operations of the groups."""

    def forked(self) -> None:
        """Forget everything: this process is a fork of the one that joined."""
        self.is_closed, self.node = True, None
        self.routing.forked()
        self.listener.forked()

    def confirm(self) -> None:
        """Compare nothing: calls are no operations of a group."""

    def close(self) -> None:
        """Close with the node."""
        self.listener.close()
