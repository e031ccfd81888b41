"""The ranks of one group: the seat, host and process of each, how error messages name them, and the lanes to them."""

from __future__ import annotations

import os
import types
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

from covey.base.numbers import Rank
from covey.net.host.machine import usable_cores
from covey.runtime import loop as control

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from covey.base.config import GroupConfig
    from covey.base.errors import CoveyError
    from covey.base.numbers import Seat
    from covey.net.lanes.lane import Lane, LanePath
    from covey.plan.choose import PlanSizes
    from covey.runtime.counters import GroupCounters
    from covey.runtime.events import Events
    from covey.runtime.lanes.groups import GroupRegistry
    from covey.runtime.lanes.lanes import Lanes
    from covey.runtime.peers.peer_table import PeerTable
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.wire import messages
    from covey.wire.reports import MeasuredNetwork

LANE_SECONDS: Final = 0.2
"""How long to wait for a lane before checking whether the group has failed."""


class LaneKinds(dict[int, str]):
    """The kind of lane to each other rank, by rank."""

    executor = "Python"
    """What moves the data: "compiled", or "Python". `covey --version` says why."""
    paths: Mapping[int, tuple[LanePath, ...]] = types.MappingProxyType({})
    """By rank: the networks of a lane that goes over several, with the share of each; empty for other lanes."""
    streams: Mapping[int, int] = types.MappingProxyType({})
    """By rank: how many connections an open lane has; 0 if none is open, or if it shares memory."""


class GroupFacts(NamedTuple):
    """What is fixed when a group is made, and what all its parts may know."""

    id: int
    name: str
    config: GroupConfig
    sizes: PlanSizes
    """Which plans arrays of which sizes have."""
    generation: int
    """The number of the run's generation; 0 if there is none."""
    survives: bool
    """Whether operations continue among the remaining ranks after a loss."""
    is_sparse: bool
    """Whether links with most ranks may be idle."""
    is_native: bool
    """Whether the compiled executor runs the plans."""
    may_spin: bool
    has_idle_core: bool
    """Whether every rank on this host has a core for itself, and a second one."""
    priority: int
    """The class of its operations, and of its messages unless they say otherwise."""


class GroupNode(Protocol):
    """What the groups of a process use of its run (`joining.node`)."""

    card: messages.Card
    """The card of this process."""
    cluster: str
    """Differs between clusters; empty in a run without one."""
    since: float
    """When this process was about to be in the run, in seconds since 1970."""
    measured: tuple[float, MeasuredNetwork] | None
    """What a group has measured last of the links between its ranks, and when: since 1970."""

    @property
    def peers(self) -> PeerTable: ...

    @property
    def events(self) -> Events: ...

    @property
    def lanes(self) -> Lanes: ...

    @property
    def groups(self) -> GroupRegistry: ...

    @property
    def is_elastic(self) -> bool:
        """Whether the program goes from generation to generation."""

    @property
    def is_leaving(self) -> bool:
        """Whether this process was asked to leave at the end of this generation."""

    @property
    def knows_change(self) -> bool:
        """Whether the next generation should come soon."""

    def tell_keeper(self, message: messages.Control) -> None:
        """Send a message to the keeper, if there is one. Returns at once; on any thread."""


class GroupRoster:
    """The ranks of one group. It is fixed when the group is made; lost ranks stay in it."""

    def __init__(self, node: GroupNode | None, seats: tuple[Seat, ...]) -> None:
        """`seats` are positions in the run, in the order of the group's ranks. A run of one has no node."""
        self.node = node
        """None in a run of one, and in a process that was forked from a member."""
        self.seats = seats
        self.size = len(seats)
        self.ranks = cast("Sequence[Rank]", range(self.size))
        self.rank = Rank(seats.index(node.peers.seat) if node is not None else 0)
        """The rank of this process."""
        self.rank_of = dict(zip(seats, self.ranks, strict=True))

    def others(self) -> list[Seat]:
        """Return the seats of the other ranks."""
        return [] if self.node is None else [seat for seat in self.seats if seat != self.node.peers.seat]

    def peers(self) -> list[RemoteProcess]:
        """Return the peers that are the other ranks."""
        return [] if self.node is None else [self.node.peers[seat] for seat in self.others()]

    def peer(self, rank: Rank) -> RemoteProcess | None:
        """Return the peer that is a rank; None for this process itself."""
        return None if self.node is None else self.node.peers.get(self.seats[rank])

    def present(self) -> tuple[Rank, ...]:
        """Return the ranks whose processes have neither left nor been lost."""
        return tuple(rank for rank in self.ranks if (peer := self.peer(rank)) is None or not peer.is_gone)

    def tell_others(self, message: messages.Control, *, wakes: bool = True) -> None:
        """Send a control message to all other ranks. Returns at once.

        Unless it `wakes` all links that rest, of those it is sent only over the ones with the rank before and the rank
        after this one: so what each rank hears still connects all ranks of the group.
        """
        if self.node is None:
            return
        beside: set[Seat] = set()
        if not wakes:
            present = self.present()
            index = present.index(self.rank)
            beside = {self.seats[present[(index + step) % len(present)]] for step in (1, -1)} - {self.node.peers.seat}
            self.node.peers.tell(beside, message)
        self.node.peers.tell([seat for seat in self.others() if seat not in beside], message, wakes=wakes)

    def tell(self, ranks: Iterable[Rank], message: messages.Control) -> None:
        """Send a control message to some other ranks. Returns at once."""
        if self.node is not None:
            self.node.peers.tell([self.seats[rank] for rank in ranks], message)

    def tell_keeper(self, reason: str, cause: bytes) -> None:
        """Tell the keeper why this program fails, and which process is the cause: this one if it is empty."""
        if self.node is not None:
            from covey.wire import messages  # slow to load; a program that joins a run has it already

            self.node.tell_keeper(messages.Failing(reason[: messages.REASON_LIMIT], cause))

    def describe(self, ranks: tuple[Rank, ...]) -> str:
        """Return the ranks with their hosts and process ids, as error messages name them."""
        if self.node is None:
            return ""
        names = []
        for rank in ranks:
            peer = self.peer(rank)
            names.append(
                f"rank {rank}" + (f" ({peer.card.host_name}, process {peer.card.pid})" if peer is not None else "")
            )
        return " and ".join(names)

    def card(self, rank: Rank) -> messages.Card:
        """Return the card of a rank's process, which may be this one."""
        assert self.node is not None
        peer = self.peer(rank)
        return self.node.card if peer is None else peer.card

    def host_name(self, rank: Rank) -> str:
        """Return the name of a rank's host; that of this host for a number that is no other rank's."""
        if self.node is None or rank not in self.ranks or rank == self.rank:
            return self.node.card.host_name if self.node is not None else ""
        return str(self.node.peers[self.seats[rank]].card.host_name)

    def host(self, rank: Rank) -> str:
        """Return what is equal for ranks that can share memory."""
        if self.node is None:
            return ""
        peer = self.peer(rank)
        contact = self.node.card.contact if peer is None else peer.contact
        return "" if contact is None else contact.host

    def pid(self, rank: Rank) -> int:
        """Return the process id of a rank."""
        peer = self.peer(rank)
        return os.getpid() if peer is None else peer.card.pid

    @property
    def knows_change(self) -> bool:
        """Whether this rank knows of a waiting change of the members."""
        return self.node is not None and self.node.knows_change

    def has_cores(self, each: int) -> bool:
        """Tell whether every rank on this host can have so many cores for itself.

        With one, waiting ranks may spin; with two, a helper thread may encrypt.
        """
        return self.ranks_here() * each <= usable_cores()

    def ranks_here(self) -> int:
        """Return how many ranks are on this host."""
        return 1 + sum(self.node is not None and peer.is_on(self.node.peers.host) for peer in self.peers())


class CollectiveLanes:
    """The lanes of one group's collectives, among those of the node. On any thread."""

    def __init__(
        self,
        lanes: Lanes | None,
        seats: tuple[Seat, ...],
        facts: GroupFacts,
        counters: GroupCounters,
        events: Events | None,
    ) -> None:
        """A run of one has no lanes and no events."""
        self._lanes, self._events = lanes, events
        self._group, self._seats, self._counters = facts.id, seats, counters

    def open(self, rank: Rank, attempt: int) -> Lane:
        """Return the lane to a rank in an attempt, opened if need be; wait for `LANE_SECONDS` at most."""
        assert self._lanes is not None
        opened: Lane = self._lanes.open(self._group, self._seats[rank], "collectives", LANE_SECONDS, attempt)
        return opened

    def opened(self, rank: Rank, kind: str) -> None:
        """Count a lane that is used from now on, and note it in the timeline of a recovery."""
        self._counters.lane_opened(rank, kind)
        if self._events is not None and self._events.is_recovering:
            self._events.phase("reconnect")

    def switched(self, rank: Rank, attempt: int) -> None:
        """End the lane to a rank that was used so far: another one is used now."""
        from covey.runtime.lanes.table import LaneKey  # slow to load, and few lanes are replaced

        assert self._lanes is not None
        self._lanes.moves.switched(LaneKey(self._group, self._seats[rank], "collectives", attempt))

    def stuck(self, rank: Rank) -> None:
        """Let the node leave the path to a rank, over which bytes of a lane do not arrive. Returns at once."""
        if self._lanes is not None:
            control.soon(self._lanes.paths.stuck, self._seats[rank])

    def arrived(self) -> dict[Seat, Any]:
        """Return the open lanes, by seat."""
        return {} if self._lanes is None else self._lanes.arrived(self._group, "collectives")

    def abandon(self, error: CoveyError, *, only: str = "") -> None:
        """Fail the waits for lanes of the group: those for one purpose, or all."""
        if self._lanes is not None:
            self._lanes.abandon(lambda key: key.group == self._group and only in ("", key.purpose), error)

    def retire(self, attempt: int) -> None:
        """Close the lanes of the attempts before this one. No thread may be using them."""
        if self._lanes is not None:
            self._lanes.retire(self._group, attempt)

    def kind(self, rank: Rank) -> str:
        """Return the kind of lane that this end offers to a rank."""
        assert self._lanes is not None
        return self._lanes.kind(self._seats[rank])

    def shares_memory(self, rank: Rank) -> bool:
        """Tell whether a rank shares memory with this one; equal on all ranks, as plans need it."""
        assert self._lanes is not None
        return self._lanes.shares_memory(self._seats[rank])

    def forked(self) -> None:
        """Forget the lanes, in a forked child: they are the parent's."""
        self._lanes = None
