"""The kinds of lanes. A kind is one row here, and one module that opens its lanes: nothing else names it.

The setting `lanes`, its help, what a pair of ranks may choose from, what benchmarks compare and what tests go through
are made from the rows.
"""

from __future__ import annotations

import enum
from typing import Final, Literal, NamedTuple, TypeAlias

LaneName: TypeAlias = Literal["shm", "unix", "tcp", "secure", "quic"]
"""The kinds that a program may name, for type checkers."""


class LaneReach(enum.Enum):
    """Which ranks a lane can join."""

    THREADS = "threads of one process"
    HOST = "processes of one host"
    NETWORK = "processes of any two hosts"


class LaneKind(NamedTuple):
    """One row."""

    name: str
    """In the setting `lanes`, in offers of lanes, and as `group.lanes()` shows it."""
    reach: LaneReach
    opener: str
    """The module and the class that opens its lanes (`runtime.lanes.opener`): "module:class"."""
    is_sealed: bool = False
    """Whether the lane encrypts what it carries. Others go between hosts only in a run without encryption."""
    has_rings: bool = False
    """Whether it is made of rings in memory that both ends see. Plans are chosen by it."""
    is_resumable: bool = False
    """Whether a lane between hosts can go on over another connection when its own dies."""
    can_spread: bool = False
    """Whether a lane may have several connections, whose number and networks are chosen by what is measured."""
    is_automatic: bool = False
    """Whether `auto` may choose it: the first such kind that a pair can have."""
    systems: tuple[str, ...] = ()
    """Where it exists, as `sys.platform` names them; empty: everywhere."""
    instead: str = ""
    """The kind that takes its place if one of the two ends cannot have it."""
    extra: str = ""
    """The extra of covey that has to be installed for it."""

    @property
    def is_of_network(self) -> bool:
        """Whether its lanes may go between hosts."""
        return self.reach is LaneReach.NETWORK

    def is_known_on(self, system: str) -> bool:
        """Tell whether it exists on a system, as `sys.platform` names it."""
        return not self.systems or system in self.systems


LANE_KINDS: Final[dict[str, LaneKind]] = {}
"""All kinds by name, the preferred ones first."""


def register(kind: LaneKind) -> None:
    """Let ranks use a kind of lane from now on. All ranks of a run need it."""
    LANE_KINDS[kind.name] = kind


for _kind in (
    LaneKind(
        "shm", LaneReach.HOST, "covey.runtime.lanes.rings:SharedRings", has_rings=True, is_automatic=True,
        systems=("linux", "darwin"), instead="unix",
    ),
    LaneKind("unix", LaneReach.HOST, "covey.runtime.lanes.opener:StreamOpener", is_automatic=True),
    LaneKind(
        "tcp", LaneReach.NETWORK, "covey.runtime.lanes.opener:StreamOpener", is_resumable=True, is_automatic=True,
    ),
    LaneKind(
        "secure", LaneReach.NETWORK, "covey.runtime.lanes.opener:SealedOpener", is_sealed=True, is_resumable=True,
        can_spread=True, is_automatic=True,
    ),
    LaneKind(
        "quic", LaneReach.NETWORK, "covey.runtime.lanes.quic:QuicOpener", is_sealed=True, is_resumable=True,
        extra="quic",
    ),
    LaneKind("memory", LaneReach.THREADS, "covey.runtime.lanes.rings:ThreadRings", has_rings=True),
):  # fmt: skip
    register(_kind)


def named_kinds() -> tuple[str, ...]:
    """Return the kinds that a program may name; those for threads of one process are for tests."""
    return tuple(kind.name for kind in LANE_KINDS.values() if kind.reach is not LaneReach.THREADS)
