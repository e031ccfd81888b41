"""The facts of an examination: the JSON of `covey doctor`, from which findings are derived. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from covey.base.config import EffectiveSetting  # noqa: TC001 - a dataclass field, which msgspec reads

FACTS_FORMAT: Final = 1
"""Version of the JSON layout; keys are only ever added."""


@dataclass(frozen=True, kw_only=True)
class PrivatePath:
    """A file or folder that must be private to this user."""

    path: str
    mode: str
    """As chmod writes it: `0600`."""
    owner: str
    is_folder: bool
    is_ours: bool
    is_loose: bool
    """Whether others may read or enter it."""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder in which covey has to write."""

    role: str
    """`configuration` or `temporary`."""
    path: str
    variable: str
    """The variable that selects another folder."""
    problem: str = ""
    """Why nothing can be written there, in the system's words."""
    free_bytes: int = -1
    """Free space for this user; negative if unknown."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """This machine and user."""

    host_name: str
    system: str
    versions: dict[str, str]
    home: str
    paths: tuple[PrivatePath, ...] = ()
    identities: tuple[str, ...] = ()
    """The names of this user's node identities on this machine."""
    clusters: tuple[str, ...] = ()
    default_cluster: str = ""
    settings: tuple[EffectiveSetting, ...] = ()
    unknown_variables: dict[str, str] = field(default_factory=dict)
    """Unknown COVEY_ variables, each with the known one that is most like it."""
    folders: tuple[Folder, ...] = ()
    clock: float = 0.0
    """Seconds since 1970, by this machine's clock; 0 if it was not read."""


@dataclass(frozen=True, kw_only=True)
class NetworkFacts:
    """One interface of this machine, and what multicast did there."""

    name: str
    kind: str
    is_up: bool
    """Switched on, and connected by cable or Wi-Fi."""
    is_on: bool = True
    """Switched on."""
    addresses: tuple[str, ...]
    networks: tuple[str, ...]
    """The addresses with their prefixes."""
    mtu: int
    has_multicast: bool
    is_used: bool
    reason: str = ""
    """Why it is not used."""
    sent: int = 0
    """Packets that covey sent by multicast."""
    came_back: int = 0
    """This machine's own packets that came back. If above 0, multicast works on this machine."""
    heard: int = 0
    """Packets of other machines, about covey or not."""
    dropped: int = 0
    """Packets about covey that were not read: too many, or of an unusual size."""
    heard_from: tuple[str, ...] = ()
    """The machines that sent packets about covey."""
    foreign: tuple[str, ...] = ()
    """The addresses of nodes with another secret."""
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ConnectionTry:
    """An attempt to connect."""

    address: str
    """The address of the side that was dialled."""
    interface: str
    """The name of its interface there."""
    local: str = ""
    """The address of the side that dialled, and its interface; empty if unknown."""
    local_interface: str = ""
    round_trip: float = -1.0
    """Seconds; negative if it failed."""
    path_mtu: int = 0
    problem: str = ""

    @property
    def works(self) -> bool:
        return self.round_trip >= 0


@dataclass(frozen=True, kw_only=True)
class WaitFacts:
    """What a node waits for, by its own report, with its settings and its problems."""

    cause: str
    """As in `wire.messages.Wait`."""
    text: str
    program: str = ""
    size: int | None = None
    min_size: int = 0
    max_size: int | None = None
    version: str = ""
    lanes: str = ""
    on_loss: str = ""
    here: tuple[str, ...] = ()
    """Nodes that could be in the run, the reporting node included."""
    missing: tuple[str, ...] = ()
    """Members that are waited for, if they are known."""
    seeds: dict[str, str] = field(default_factory=dict)
    """Its seeds at which no node was found, and why."""
    refused: dict[str, str] = field(default_factory=dict)
    """Nodes that cannot be in its run, and why."""
    problems: dict[str, str] = field(default_factory=dict)
    """Other problems of its search."""


@dataclass(frozen=True, kw_only=True)
class PastWait:
    """A run for which a process of this machine waited until it gave up."""

    run: str
    node: str
    ago: float
    """Seconds since then."""
    seconds: float
    """How long it had waited."""
    wait: WaitFacts


@dataclass(frozen=True, kw_only=True)
class MetNode:
    """A node that was found."""

    name: str
    id: str
    host_name: str
    pid: int
    version: str
    """Its release of covey."""
    protocol: int = 0
    """The version of the protocol that it and this machine speak."""
    purpose: str
    """`candidate` (in a run, or waits for one) or `visitor` (another doctor, for example)."""
    run: str = ""
    state: str = ""
    since: float = 0.0
    """Seconds in this state."""
    wait: WaitFacts | None = None
    """What it waits for, if it waits."""
    is_here: bool
    """Whether it is on this machine."""
    found_by: tuple[str, ...]
    """`same host`, `multicast`, `seed`, `relay`, or `others`: another node named it."""
    addresses: tuple[str, ...]
    ways_there: tuple[ConnectionTry, ...] = ()
    """Attempts from here to each of its addresses."""
    ways_back: tuple[ConnectionTry, ...] = ()
    """Attempts from there to each address of this machine, by its own report."""
    ways_back_problem: str = ""
    """Why it reported no attempts."""
    chosen_way: str = ""
    """The address that lanes would use, and this machine's interface to it."""
    chosen_interface: str = ""
    round_trip: float = -1.0
    bytes_per_second: float = 0.0
    """The throughput; 0 if it was not measured."""
    path_mtu: int = 0
    clock_offset: float = 0.0
    """Seconds that its clock is ahead of this machine's."""
    turned_away: int = 0
    """Connections that its acceptor refused, by its own report."""
    too_many: int = 0
    """Refused connections that came too often from one source."""
    relay: str = ""
    """The address of the relay that the link with it goes through; empty if it goes through none."""


@dataclass(frozen=True, kw_only=True)
class SeedFacts:
    """An address from the settings."""

    text: str
    answered: bool
    """Whether a node was found there."""
    hung_up: bool = False
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class LimitingLink:
    """The machine whose own link makes large sums of a run slow."""

    run: str
    host_name: str
    medium: str
    """`wired`, `wireless`, `virtual` or `unknown`."""
    direction: str
    """`sends` or `receives`: the slower one."""
    bytes_per_second: float
    next_bytes_per_second: float
    """Speed of the next slowest machine."""
    nbytes: int
    """The size of the sum whose times are predicted."""
    seconds: float
    """Predicted for the best plan with the links as they are."""
    seconds_then: float
    """The same, if this machine were as fast as the next slowest one."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All facts of an examination."""

    machine: Machine
    cluster: str = ""
    cluster_problem: str = ""
    """Why there is no cluster to examine."""
    interfaces: tuple[NetworkFacts, ...] = ()
    interfaces_problem: str = ""
    """Why no interface can be used."""
    multicast_problem: str = ""
    host_problem: str = ""
    """Why nodes on this machine do not find each other."""
    search_problem: str = ""
    """Why no search for other nodes was possible."""
    is_owner: bool = False
    """Whether this machine has the owner key of the cluster."""
    knows_others: bool = False
    """Whether this machine has met other machines of the cluster, now or before."""
    last_wait: PastWait | None = None
    """The latest wait in the cluster that failed on this machine, if that is not long ago."""
    looked: bool = False
    """Whether other nodes were searched for."""
    nodes: tuple[MetNode, ...] = ()
    other_processes: tuple[int, ...] = ()
    """Processes of this user on this machine that are nodes of other clusters."""
    unreachable: dict[str, str] = field(default_factory=dict)
    """Addresses from multicast or other nodes that cannot be reached, and why."""
    seeds: tuple[SeedFacts, ...] = ()
    relays: dict[str, str] = field(default_factory=dict)
    """The relays of the settings, each with the reason why it does not work; empty if it does."""
    router: str = ""
    """The protocol with which the router maps ports, if `map_port` is set and it does."""
    router_ip: str = ""
    """Its address outside, if that is private: it is behind another router."""
    router_problem: str = ""
    """Why it does not, if `map_port` is set."""
    refusals: dict[str, str] = field(default_factory=dict)
    """Nodes that were refused, and why."""
    limits: tuple[LimitingLink, ...] = ()
    """The links that limit runs, where their ranks have measured them."""
    seconds: float = 0.0
