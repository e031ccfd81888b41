"""The members of a group, their hosts, links and health, as this node knows them.

Everything here is a snapshot. It is read without asking other nodes: facts came with the links, states are those that
this node acts on.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from covey.base.version import __version__
from covey.net.discovery.interfaces import all_interfaces
from covey.net.host import tcp
from covey.net.host.machine import hardware
from covey.net.lanes.stream import SocketLane
from covey.runtime.links.sockets import relay_of

if TYPE_CHECKING:
    from covey.base.numbers import Rank
    from covey.net.discovery.interfaces import Interface
    from covey.net.lanes.lane import LanePath
    from covey.runtime.collectives.attempt import Attempt
    from covey.runtime.collectives.roster import GroupFacts, GroupRoster, LaneKinds
    from covey.runtime.collectives.stalls import StallDiagnosis
    from covey.runtime.counters import GroupCounters
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.views.generation import Generation
    from covey.wire.messages import Hardware


class DescribedEngine(Protocol):
    """What a group can say about itself (`collectives.engine`)."""

    facts: GroupFacts
    roster: GroupRoster
    counters: GroupCounters
    stalls: StallDiagnosis
    generation: Generation | None

    @property
    def attempt(self) -> Attempt: ...

    @property
    def live(self) -> tuple[Rank, ...]: ...

    @property
    def since(self) -> float:
        """When this process came into its run, in seconds since 1970."""

    def lane_kinds(self) -> LaneKinds: ...


@dataclass(frozen=True)
class Member:
    """A member of a group."""

    rank: int
    name: str
    id: str
    """Its public key, in hexadecimal; empty in a run that uses a launcher's token."""
    host: str
    """The name of its machine."""
    pid: int
    addresses: tuple[str, ...]
    """Where it listens, as "address:port"."""
    cores: int
    """Cores that the process may use; 0 if it did not say, as old versions of covey do not."""
    memory_bytes: int
    accelerators: tuple[str, ...]
    platform: str
    version: str
    """Release of covey."""


@dataclass(frozen=True)
class MemberHealth:
    """The state of a member, as this node knows it."""

    rank: int
    state: str
    """`active`; `suspected`: it is not heard; `leaving`, `left`; `lost`; `excluded`: the group continues without it."""
    since: float
    """When the state began, in seconds since 1970."""
    why: str
    """The reason, if the state is a bad one."""


@dataclass(frozen=True)
class PeerLink:
    """How this node reaches another member."""

    rank: int
    lane: str
    """The kind of lane: shm, unix, tcp, secure, quic or memory."""
    interface: str
    """The network interface of this machine; empty for a member on this machine."""
    medium: str
    """`wired`, `wireless`, `virtual`, `unknown`; `local` for a member on this machine."""
    round_trip: float | None
    """Seconds; None before it was measured."""
    bytes_per_second: float | None
    """How fast the lane has sent while it had something to send; None if it has sent nothing, or shares memory."""
    relay: str = ""
    """The address of the relay that the lane goes through, or the link before there is a lane; empty if none."""
    paths: tuple[LanePath, ...] = ()
    """The networks that the lane goes over, if it goes over several."""
    streams: int = 0
    """How many connections the lane has; 0 if it is not open, or shares memory."""
    is_resting: bool = False
    """Whether the control link has no connection until there is something to say, as most have in large runs."""


def members(engine: DescribedEngine) -> tuple[Member, ...]:
    """Return all members of a group, lost ones included, by rank."""
    return tuple(_member(engine, rank) for rank in engine.roster.ranks)


def _member(engine: DescribedEngine, rank: Rank) -> Member:
    node, peer = engine.roster.node, engine.roster.peer(rank)
    if node is None or peer is None:
        card = None if node is None else node.card
        name, host = ("", os.uname().nodename) if card is None else (card.name, card.host_name)
        identity = b"" if card is None else card.id
        pid, version, contact = os.getpid(), __version__, None if card is None else card.contact
        facts: Hardware | None = hardware()
    else:
        card = peer.card
        name, host, identity, pid = card.name, card.host_name, card.id, card.pid
        facts, version, contact = card.hardware, card.version, peer.contact
    addresses = () if contact is None else contact.addresses
    return Member(
        rank,
        name,
        identity.hex(),
        host,
        pid,
        tuple(f"[{each.ip}]:{each.port}" if ":" in each.ip else f"{each.ip}:{each.port}" for each in addresses),
        0 if facts is None else facts.cores,
        0 if facts is None else facts.memory,
        () if facts is None else facts.accelerators,
        "" if facts is None else facts.platform,
        version,
    )


def hosts(engine: DescribedEngine, ranks: tuple[Rank, ...] | None = None) -> dict[str, tuple[int, ...]]:
    """Return the live ranks of each machine, or those of `ranks`, in the order of their first ranks.

    Two machines of one name are told apart by a number after the name.
    """
    by_host: dict[str, list[Rank]] = {}
    for rank in engine.live if ranks is None else ranks:
        by_host.setdefault(engine.roster.host(rank), []).append(rank)
    named: dict[str, tuple[int, ...]] = {}
    for here in by_host.values():
        name = engine.roster.host_name(here[0]) or os.uname().nodename
        same = sum(1 for other in named if other == name or other.startswith(f"{name}#"))
        named[f"{name}#{same + 1}" if same else name] = tuple(here)
    return named


def health(engine: DescribedEngine) -> tuple[MemberHealth, ...]:
    """Return the state of every member, by rank; this node itself is active."""
    return tuple(_health(engine.roster.peer(rank), rank, engine.since) for rank in engine.roster.ranks)


def _health(peer: RemoteProcess | None, rank: Rank, own_since: float) -> MemberHealth:
    if peer is None:
        return MemberHealth(rank, "active", own_since, "")
    state = "left" if peer.state.value == "released" else peer.state.value
    why = "" if state == "active" else peer.failure or peer.reason
    if not why and peer.is_suspected:
        why = "it is not heard"
    return MemberHealth(rank, state, peer.since, why)


def links(engine: DescribedEngine) -> tuple[PeerLink, ...]:
    """Return how this node reaches the other live members."""
    interfaces = all_interfaces()
    return tuple(_link(engine, rank, interfaces) for rank in engine.live if rank != engine.roster.rank)


def _link(engine: DescribedEngine, rank: Rank, interfaces: list[Interface]) -> PeerLink:
    peer, lane = engine.roster.peer(rank), engine.attempt.lanes.of(rank)
    assert peer is not None
    kind = engine.attempt.lanes.kind_of(rank) if lane is None else lane.kind
    link = peer.link
    own = "" if link is None else link.local_ip
    is_here = engine.roster.node is not None and engine.roster.host(rank) == engine.roster.node.peers.host
    found = None if is_here else next((each for each in interfaces if own and own in each.addresses), None)
    medium = "local" if is_here else "unknown" if found is None else found.kind
    rate = None
    if isinstance(lane, SocketLane):
        speeds = [speed for sock in lane.sockets() if (speed := tcp.sending_speed(sock)) is not None]
        rate = sum(speeds) if speeds else None
    round_trip = next((taken for taken in (peer.last_ping, peer.round_trip) if taken >= 0), None)
    relay = "" if link is None else link.relay
    if isinstance(lane, SocketLane):
        relay = relay_of(lane.sockets()[0])
    return PeerLink(
        rank,
        kind,
        "" if found is None else found.name,
        medium,
        round_trip,
        rate,
        relay,
        engine.attempt.lanes.paths_of(rank),
        engine.attempt.lanes.streams_of(rank),
        is_resting=link is not None and link.is_resting,
    )
