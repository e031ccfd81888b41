"""What a machine keeps on its disk of the links that end at it: what ranks have measured there, for the next run."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from covey.base.numbers import FASTEST, SLOWEST
from covey.wire.decoding import check_packed
from covey.wire.messages import Bytes, Ip, Name, NodeId  # noqa: TC001 - msgspec reads the annotations

FIGURES_FORMAT: Final = 1
"""The format of the file of figures."""
MAX_FIGURES: Final = 2048
"""Figures that a machine keeps, of all its clusters together: the latest."""
LONGEST_TRIP: Final = 10.0
"""Seconds: no round trip is longer."""

Ordinal = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
"""Number of a rank among those of a group that are on its machine."""


class SavedFigure(msgspec.Struct, frozen=True, array_like=True):
    """What a rank of this machine has received from a rank of another one, or of this one."""

    cluster: Bytes
    """Differs between clusters."""
    machine: NodeId
    """The key of the sender's machine."""
    sender: Ordinal
    receiver: Ordinal
    interface: Name
    """Interface of this machine; empty if the ranks were on one machine."""
    here: Ip
    """The addresses of both ends of the link."""
    there: Ip
    bytes_per_second: Annotated[float, msgspec.Meta(ge=SLOWEST, le=FASTEST)]
    round_trip: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_TRIP)]
    """Seconds."""
    at: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    """When it was measured, in seconds since 1970."""


class SavedFigures(msgspec.Struct, frozen=True, array_like=True):
    """All that a machine keeps."""

    machine: NodeId
    """The key of this machine: a file that was copied from another one says nothing about this one."""
    figures: Annotated[tuple[SavedFigure, ...], msgspec.Meta(max_length=MAX_FIGURES)] = ()
    format: Annotated[int, msgspec.Meta(ge=1)] = 1


_saved: msgspec.msgpack.Decoder[SavedFigures] = msgspec.msgpack.Decoder(SavedFigures)
_encode = msgspec.msgpack.Encoder().encode


def encode_saved_figures(saved: SavedFigures) -> bytes:
    """Encode what a machine writes to its disk."""
    return _encode(saved)


def decode_saved_figures(data: bytes) -> SavedFigures:
    """Decode what a machine wrote to its disk; raise ValueError for anything else."""
    check_packed(data, 2, FIGURES_FORMAT)
    try:
        return _saved.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not the figures of links: {error}") from error
