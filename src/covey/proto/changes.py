"""The effects of `proto.membership`, to be performed in order."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from covey.wire.membership import Membership as Message
    from covey.wire.membership import Record, View


class Quorum(enum.Enum):
    """What members do that are not a quorum."""

    MAJORITY = "majority"
    """They wait, then give up."""
    ANY = "any"
    """They go on as another run."""


@dataclass(frozen=True, slots=True)
class SendToNode:
    """Send a message to this node, if there is a link."""

    peer: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class Persist:
    """Make this record durable before performing any later effect."""

    record: Record


@dataclass(frozen=True, slots=True)
class Freeze:
    """Stop all executors, then call `frozen` with this number; nothing may go on until a view is installed.

    Void if `Installed`, `Excluded` or `QuorumLost` comes before the executors have stopped.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Installed:
    """The next view; this node is in it. Do what its verdicts say, and resume."""

    view: View
    lost: tuple[int, ...]
    """Ranks of the last view that are not in this one."""


@dataclass(frozen=True, slots=True)
class Excluded:
    """The run goes on without this node: it left, was lost, or was started anew. Everything pending ends.

    A view without ranks means that the run is over for all. Nodes that only vote also get a view with a successor, and
    go on voting there.
    """

    view: View


@dataclass(frozen=True, slots=True)
class QuorumAwaited:
    """The members that are heard are not a quorum; `QuorumLost` follows after so many seconds without one."""

    missing: tuple[int, ...]
    tie_breaker: int
    seconds: float


@dataclass(frozen=True, slots=True)
class QuorumLost:
    """There was no new view within the patience. Everything pending ends; this node goes on as a voter."""

    missing: tuple[int, ...]
    """Ranks of the last view that are not heard."""
    here: tuple[int, ...]
    tie_breaker: int


Effect: TypeAlias = SendToNode | Persist | Freeze | Installed | Excluded | QuorumAwaited | QuorumLost
