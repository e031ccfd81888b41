"""What the views of a run bring about: the effects of `proto.membership`, to be performed in order."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from covey.wire.membership import Membership as Message
    from covey.wire.membership import Record, View


class Quorum(enum.Enum):
    """What a minority does."""

    MAJORITY = "majority"
    """It waits, and gives up."""
    ANY = "any"
    """It goes on, as another run."""


@dataclass(frozen=True, slots=True)
class Send:
    """Give a message to the link with this node, if there is one."""

    peer: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class Persist:
    """Make this record durable before anything that follows is done."""

    record: Record


@dataclass(frozen=True, slots=True)
class Freeze:
    """Stop all executors, then call `frozen` with this number; until a view is installed nothing may go on.

    Void if `Installed`, `Excluded` or `QuorumLost` comes before the executors have stopped.
    """

    number: int


@dataclass(frozen=True, slots=True)
class Installed:
    """The next view; this node is in it. Do what its verdicts say, and thaw."""

    view: View
    lost: tuple[int, ...]
    """Ranks of the last view that are not in this one."""


@dataclass(frozen=True, slots=True)
class Excluded:
    """The run goes on without this node: it left, was lost, or was started anew. Everything pending ends.

    A view without ranks says that the run is over for all. Nodes that only vote also hear of a view with a successor:
    they go on voting there.
    """

    view: View


@dataclass(frozen=True, slots=True)
class Waiting:
    """The members that are heard are no quorum; without one, `QuorumLost` follows after so many seconds."""

    missing: tuple[int, ...]
    tie_breaker: int
    seconds: float


@dataclass(frozen=True, slots=True)
class QuorumLost:
    """Patience is over without a new view: everything pending ends. This node goes on voting, as a member of none."""

    missing: tuple[int, ...]
    """Ranks of the last view that are not heard."""
    here: tuple[int, ...]
    tie_breaker: int


Effect: TypeAlias = Send | Persist | Freeze | Installed | Excluded | Waiting | QuorumLost
