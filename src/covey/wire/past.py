"""Events of a run, as one process tells them to another: to a newcomer, or to a command that asks."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from covey.wire.decoding import read_from_peer
from covey.wire.messages import MAX_MEMBERS, RANKS_LIMIT, Name, Seconds, Text, Worded

EVENTS_LIMIT: Final = 100
"""Events in one message: the latest ones."""
BYTES_LIMIT: Final = 1 << 16
"""What a sender tells at most. Every member tells a newcomer, so that a long history would cost much."""
PHASES_LIMIT: Final = 16

Whole = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class PastEvent(Worded, frozen=True, array_like=True):
    """An event; the fields are those of `covey.Event`."""

    kind: Name
    time: Seconds
    generation: Whole
    view: Whole
    ranks: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, lt=RANKS_LIMIT)], ...], msgspec.Meta(max_length=MAX_MEMBERS)
    ]
    names: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    phases: Annotated[dict[Name, Seconds], msgspec.Meta(max_length=PHASES_LIMIT)]
    text: Text


class PastEvents(msgspec.Struct, frozen=True, array_like=True):
    """Events of a run, oldest first."""

    events: Annotated[tuple[PastEvent, ...], msgspec.Meta(max_length=EVENTS_LIMIT)]


_past: msgspec.msgpack.Decoder[PastEvents] = msgspec.msgpack.Decoder(PastEvents)
_encode = msgspec.msgpack.Encoder().encode


def encode_past(events: list[PastEvent]) -> bytes:
    """Encode the latest of these events, as many as the limits allow."""
    kept: list[PastEvent] = []
    size = 0
    for event in reversed(events[-EVENTS_LIMIT:]):
        size += len(_encode(event))
        if size > BYTES_LIMIT:
            break
        kept.append(event)
    return _encode(PastEvents(tuple(reversed(kept))))


def decode_past(data: bytes) -> PastEvents:
    """Decode events of a run; raise RemoteProtocolError for anything else."""
    return read_from_peer(_past, data, "events of a run")
