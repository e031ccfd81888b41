"""What the processes of a checked run write down, a JSON object a line, each process to a file of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from covey.cli.chaos.checked.operations import Operation  # noqa: TC001 (msgspec looks at it)

if TYPE_CHECKING:
    from collections.abc import Iterable


class Began(msgspec.Struct, frozen=True, tag="began"):
    """A process has begun."""

    name: str
    pid: int
    host: int
    at: float
    """Of the monotonic clock, which all processes of one machine share; so are all times here."""


class Entered(msgspec.Struct, frozen=True, tag="entered"):
    """It is in a generation."""

    generation: int
    rank: int
    size: int
    at: float


class Restored(msgspec.Struct, frozen=True, tag="restored"):
    """It has the state of the others."""

    generation: int
    story: str
    """Which history the state belongs to: another one after all members were lost."""
    step: int
    state: str
    """A digest."""
    donors: tuple[int, ...]
    drifted: tuple[int, ...]
    members: tuple[str | None, ...]
    """All processes of the generation, by rank, as far as they are live."""
    at: float


class Done(msgspec.Struct, frozen=True, tag="done"):
    """An operation has returned."""

    story: str
    generation: int
    group: str
    """`main`, or the way by which it was split off."""
    number: int
    """The operation's, in its group."""
    operation: Operation
    rank: int
    size: int
    ranks: tuple[int, ...]
    """The contributors."""
    names: tuple[str, ...]
    """The same, as processes."""
    result: str
    """A digest."""
    began: float
    at: float


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """An operation has raised PeerLostError, and the group goes on."""

    story: str
    generation: int
    group: str
    number: int
    operation: Operation
    is_root_live: bool
    is_unchanged: bool
    """The arguments are what they were."""
    at: float


class Heard(msgspec.Struct, frozen=True, tag="heard"):
    """A message to or from another process came to something."""

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
    """Whether a change of the generation waits."""
    at: float


class Left(msgspec.Struct, frozen=True, tag="left"):
    """The loop of a generation is over, here as on all others."""

    story: str
    generation: int
    number: int
    step: int
    is_over: bool
    at: float


class Evicted(msgspec.Struct, frozen=True, tag="evicted"):
    """The others go on without it."""

    generation: int
    has_stepped: bool
    """Whether it had done anything in that generation."""
    text: str
    at: float


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """It has come to an end by itself."""

    how: str
    """`over`, `left`, `quorum`, `failed`."""
    story: str
    step: int
    state: str
    text: str
    at: float


class Obeyed(msgspec.Struct, frozen=True, tag="obeyed"):
    """It met with a fault that waited for this moment."""

    moment: str
    signal: int
    delay: float
    seconds: float
    rank: int
    at: float


Record: TypeAlias = Began | Entered | Restored | Done | Raised | Heard | Stepped | Left | Evicted | Ended | Obeyed
_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(Record)


def to_line(record: Record) -> bytes:
    return _encoder.encode(record) + b"\n"


def from_lines(lines: Iterable[bytes]) -> list[Record]:
    """Return what whole lines say; what a process was killed in the middle of writing is no line."""
    return [_decoder.decode(line) for line in lines if line]
