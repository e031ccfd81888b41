"""Lineages: the ids of runs from their founding to their end, and what a machine records about them.

Lineages tell runs of the same name apart. An id starts with the time of the founding, by the founder's clock, so of two
ids the smaller one is the older, and all nodes compare the same bytes.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from covey.wire.decoding import check_packed

REMEMBERED_FORMAT: Final = 1
"""The format of the file of lineages."""
LINEAGE_BYTES: Final = 16
_TIME_BYTES: Final = 6
RANDOM_BYTES: Final = LINEAGE_BYTES - _TIME_BYTES
MAX_OPEN: Final = 16
"""Lineages of one run that a machine waits for at the same time."""
MAX_ENDED: Final = 64
"""Lineages of one run whose end a machine remembers, to tell the machines that missed it."""
MAX_GIVEN_UP: Final = 64
"""Lineages of one run that a user gave up, as far as a machine remembers them."""
MAX_NAMES: Final = 128

Lineage = Annotated[bytes, msgspec.Meta(min_length=LINEAGE_BYTES, max_length=LINEAGE_BYTES)]
Name = Annotated[str, msgspec.Meta(max_length=80)]


class Ending(msgspec.Struct, frozen=True, array_like=True):
    """The end of a lineage: a quorum of its last view decided it, or its founding was given up."""

    lineage: Lineage
    is_finished: bool
    """Whether a member left because its program had ended. False: all processes were lost, or it never started."""


class KnownLineage(msgspec.Struct, frozen=True, array_like=True):
    """A lineage whose run may still exist."""

    lineage: Lineage
    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_NAMES)]
    """Its members, as far as this machine knows them."""
    is_ours: bool = False
    """Whether a node of this machine was in it, or accepted its founding. Other nodes reported the rest."""


class Remembered(msgspec.Struct, frozen=True, array_like=True):
    """What a machine knows about the lineages of one run."""

    open: Annotated[tuple[KnownLineage, ...], msgspec.Meta(max_length=MAX_OPEN)] = ()
    ended: Annotated[tuple[Ending, ...], msgspec.Meta(max_length=MAX_ENDED)] = ()
    """In the order in which this machine learned of them."""
    given_up: Annotated[tuple[Lineage, ...], msgspec.Meta(max_length=MAX_GIVEN_UP)] = ()
    """Lineages that a user gave up here: promises of nodes of this machine in them are forgotten. Oldest first."""
    format: Annotated[int, msgspec.Meta(ge=1)] = 1


_remembered: msgspec.msgpack.Decoder[Remembered] = msgspec.msgpack.Decoder(Remembered)
_encode = msgspec.msgpack.Encoder().encode


def new_lineage(seconds: float, random: bytes) -> bytes:
    """Return an id for a run founded at `seconds` since 1970; `random` has RANDOM_BYTES bytes."""
    milliseconds = min(max(0, int(seconds * 1000)), (1 << 8 * _TIME_BYTES) - 1)
    return milliseconds.to_bytes(_TIME_BYTES, "big") + random


def founded_at(lineage: bytes) -> float:
    """Return when a lineage was founded, in seconds since 1970 by its founder's clock."""
    return int.from_bytes(lineage[:_TIME_BYTES], "big") / 1000


def encode_remembered(remembered: Remembered) -> bytes:
    """Encode what a machine writes to its disk."""
    return _encode(remembered)


def decode_remembered(data: bytes) -> Remembered:
    """Decode what a machine wrote to its disk; raise ValueError for anything else."""
    check_packed(data, 3, REMEMBERED_FORMAT)
    try:
        return _remembered.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a record of lineages: {error}") from error
