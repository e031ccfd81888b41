"""The last events of a run, for processes that were not there: newcomers, and commands that ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.runtime.events import Event
from covey.wire.reports import EVENTS_LIMIT, PastEvent, decode_past, encode_past

if TYPE_CHECKING:
    from covey.runtime.events import Events


def encode_last(events: Events) -> bytes:
    """Return the last events that this process knows, earlier ones included. On any thread."""
    last = events.all()[-EVENTS_LIMIT:]
    return encode_past(
        [
            PastEvent(
                event.kind,
                event.time,
                event.generation,
                event.view,
                event.ranks,
                event.names,
                dict(event.phases),
                event.text,
            )
            for event in last
        ]
    )


def decode_last(body: bytes) -> list[Event]:
    """Return the events that another process has told, oldest first; RemoteProtocolError for anything else."""
    return [
        Event(past.kind, past.time, past.generation, past.view, past.ranks, past.names, past.phases, past.text)
        for past in decode_past(body).events
    ]
