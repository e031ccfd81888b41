"""Which kind of lane a pair of ranks uses, how large its rings are, and how many connections it has.

Both ends choose the kind from facts that both know, so that no peer can choose one that third parties can read. One
fact is known to one end only: whether it can have lanes of this kind itself. If it cannot, another kind takes its place
(`LaneKind.instead`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError
from covey.base.lane_kinds import LANE_KINDS, LaneReach
from covey.net.host.machine import usable_cores

if TYPE_CHECKING:
    from covey.base.config import GroupConfig
    from covey.base.lane_kinds import LaneKind
    from covey.base.numbers import Seat
    from covey.net.lanes.factory import LaneFactory
    from covey.runtime.lanes.opener import LaneOpener
    from covey.runtime.peers.peer_table import PeerTable

LARGE_RINGS_TOTAL_BYTES: Final = 64 << 20
"""Rings have `ring_bytes` until a process has this many bytes of them, then they are small: a program may have dozens
of groups. By default a ring stays in the cache: a larger one is not faster, and with eight ranks on a host half as
fast."""
STREAMS_BY_ROUND_TRIP: Final = ((0.02, 1), (0.06, 4))
"""Connections of a lane, by round trip in seconds: on each the kernel sends a few megabytes without acknowledgement."""
STREAMS_FAR: Final = 8
HELPED_STREAMS: Final = 2
"""Connections of a near lane whose ranks have HELPED_CORES each: a thread of the lane seals while the other one opens.
It can go on with one connection while the kernel is busy with the other."""
HELPED_CORES: Final = 2


class LaneRules:
    """Which lanes this process offers to its peers, and accepts from them."""

    def __init__(
        self,
        config: GroupConfig,
        peers: PeerTable,
        openers: dict[str, LaneOpener],
        factory: LaneFactory,
        *,
        is_clear: bool,
    ) -> None:
        """`openers` are by kind. `is_clear`: the run goes without encryption, which the user has allowed."""
        self._config, self._peers, self._openers, self._factory = config, peers, openers, factory
        self._is_clear = is_clear

    def is_demanded(self, kind: str) -> bool:
        """Tell whether the settings demand a kind of lanes, so that no other may take its place."""
        return self._config.lanes == kind

    @property
    def most_streams(self) -> int:
        """How many connections a lane of this process may have."""
        return self._factory.most_streams

    def kind_to(self, peer: Seat) -> LaneKind:
        """Return the kind of lane that this process and a peer use, if both can; equal on all ranks.

        Raises:
            ConfigError: the settings demand a kind that this pair cannot have.
        """
        here = self._peers.is_here(peer)
        in_clear = here or self._is_clear
        kind = LANE_KINDS.get(self._config.lanes)
        if kind is None:
            reach = LaneReach.HOST if here else LaneReach.NETWORK
            may_be = (each for each in LANE_KINDS.values() if each.is_automatic and each.reach is reach)
            return next(each for each in may_be if each.is_known_on(sys.platform) and (in_clear or each.is_sealed))
        name = self._peers.name_of(peer)
        if kind.reach is LaneReach.HOST and not here:
            raise ConfigError(f"lanes={kind.name!r} works on one host only, but {name} is on another")
        if kind.is_of_network and not (in_clear or kind.is_sealed):
            raise ConfigError(
                f"lanes={kind.name!r} is not encrypted, and {name} is on another host; use auto or secure"
            )
        return kind

    def offered_kind(self, peer: Seat, purpose: str) -> LaneKind:
        """Return the kind of lane to offer to a peer for this purpose; ConfigError as `kind_to`."""
        kind = self.kind_to(peer)
        opener = self._openers[kind.name]
        if not opener.carries(purpose):
            return LANE_KINDS[kind.instead]
        if obstacle := opener.obstacle():
            if self.is_demanded(kind.name):
                raise ConfigError(f"lanes={kind.name!r}: {obstacle}; use {kind.instead} or auto")
            return LANE_KINDS[kind.instead]
        return kind

    def objection(self, peer: Seat, offered: str, purpose: str) -> str:
        """Return why a lane that a peer offers may not be of this kind; empty if it may."""
        kind, usual = self.offered_kind(peer, purpose), self.kind_to(peer)
        if offered and offered in (kind.name, kind.instead):  # the second, if the peer cannot have the first
            return ""
        if offered == usual.name:
            return UNAVAILABLE
        return f"the lane to {self._peers.name_of(peer)} is {usual.name!r} here and {offered!r} there"

    def ring_capacity(self, kind: LaneKind, in_use: int) -> int:
        """Return the bytes of the next ring, if the open rings occupy `in_use` bytes."""
        large, *small = self._openers[kind.name].capacities(self._config)
        return large if in_use + 2 * large <= LARGE_RINGS_TOTAL_BYTES else min(small)

    def may_have_capacity(self, kind: str, purpose: str, capacity: int) -> bool:
        """Tell whether an offered lane of this kind may have rings of so many bytes."""
        sizes = self._openers[kind].capacities(self._config) if kind in self._openers else ()
        if not capacity:
            return not sizes or purpose == "messages"  # those of calls have no rings
        return capacity in sizes

    def stream_count(self, peer: Seat, kind: LaneKind, purpose: str) -> int:
        """Return how many connections a lane gets."""
        if purpose == "messages" or not kind.is_sealed or self.most_streams == 1:
            return 1
        wanted = self._config.streams
        if wanted != "auto":
            return int(wanted)
        return streams_for(self._peers[peer].round_trip, usable_cores(), 1 + len(self._peers.here))


UNAVAILABLE: Final = "this end has no rings in shared memory"
"""The refusal of an offer by an end that cannot have lanes of this kind. Another kind is offered instead."""


def streams_for(round_trip: float, cores: int, ranks_here: int) -> int:
    """Return the connections of a secure lane: more if one would wait for acknowledgements, or if cores are idle.

    `cores` are those of this host that the executor may use, and `ranks_here` the ranks on it.
    """
    near = HELPED_STREAMS if cores >= HELPED_CORES * ranks_here else 1
    return max(near, next((count for limit, count in STREAMS_BY_ROUND_TRIP if round_trip < limit), STREAMS_FAR))
