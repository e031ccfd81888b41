"""Records of the processes of a checked run: one JSON object a line, one file per process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from covey.lab.chaos.operations import CheckedOperation  # noqa: TC001 (msgspec looks at it)

if TYPE_CHECKING:
    from collections.abc import Iterable


class Began(msgspec.Struct, frozen=True, tag="began"):
    """A process has begun."""

    name: str
    pid: int
    host: int
    at: float
    """By the monotonic clock, which all processes of one machine share, like all times here."""


class Entered(msgspec.Struct, frozen=True, tag="entered"):
    """The process is in a generation."""

    generation: int
    rank: int
    size: int
    at: float


class Restored(msgspec.Struct, frozen=True, tag="restored"):
    """The process has the state of the generation."""

    generation: int
    story: str
    """Names the series of states; a new one begins after all members were lost."""
    step: int
    state: str
    """A digest."""
    donors: tuple[int, ...]
    drifted: tuple[int, ...]
    members: tuple[str | None, ...]
    """The live processes of the generation, by rank."""
    at: float


class OperationDone(msgspec.Struct, frozen=True, tag="done"):
    """An operation has returned."""

    story: str
    generation: int
    group: str
    """`main`, or the path of splits that led to the group."""
    number: int
    """The operation's, in its group."""
    operation: CheckedOperation
    rank: int
    size: int
    ranks: tuple[int, ...]
    """The contributors."""
    names: tuple[str, ...]
    """The contributors, as process names."""
    result: str
    """A digest."""
    began: float
    at: float


class OperationRaised(msgspec.Struct, frozen=True, tag="raised"):
    """An operation has raised PeerLostError, and the group continues."""

    story: str
    generation: int
    group: str
    number: int
    operation: CheckedOperation
    is_root_live: bool
    is_unchanged: bool
    """Whether the arguments are unchanged."""
    at: float


class MessageHeard(msgspec.Struct, frozen=True, tag="heard"):
    """A message to or from another process has an outcome."""

    story: str
    generation: int
    peer: str
    outcome: str
    """`sent`, `right`, `lost`, or what was wrong."""
    at: float


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """The state has changed."""

    story: str
    generation: int
    step: int
    state: str
    is_pending: bool
    """Whether a change of the generation is pending."""
    at: float


class Left(msgspec.Struct, frozen=True, tag="left"):
    """The loop of a generation is over, on this process as on all others."""

    story: str
    generation: int
    number: int
    step: int
    is_over: bool
    at: float


class Exclusion(msgspec.Struct, frozen=True, tag="excluded"):
    """The other members continue without this process."""

    generation: int
    has_stepped: bool
    """Whether it had finished a step in that generation."""
    text: str
    at: float


class ProcessEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The process is about to exit by itself."""

    how: str
    """`over`, `left`, `quorum`, `failed`."""
    story: str
    step: int
    state: str
    text: str
    at: float


class Obeyed(msgspec.Struct, frozen=True, tag="obeyed"):
    """The process took an order that waited for this moment."""

    moment: str
    signal: int
    delay: float
    seconds: float
    rank: int
    at: float


Record: TypeAlias = (
    Began
    | Entered
    | Restored
    | OperationDone
    | OperationRaised
    | MessageHeard
    | Stepped
    | Left
    | Exclusion
    | ProcessEnded
    | Obeyed
)
_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(Record)


def to_line(record: Record) -> bytes:
    return _encoder.encode(record) + b"\n"


def from_lines(lines: Iterable[bytes]) -> list[Record]:
    """Decode complete lines; a line that a killed process did not finish is left out."""
    return [_decoder.decode(line) for line in lines if line]
