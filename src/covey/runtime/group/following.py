"""Follow the events of a run from an asyncio program."""

from __future__ import annotations

import asyncio
import difflib
from typing import TYPE_CHECKING

from covey.base.errors import ConfigError
from covey.runtime.events import KEPT, KINDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    from covey.runtime.events import Event, Events


def check_kinds(kinds: Collection[str]) -> None:
    """Raise ConfigError for a kind of event that does not exist."""
    for kind in (kinds,) if isinstance(kinds, str) else kinds:
        if kind not in KINDS or isinstance(kinds, str):
            near = difflib.get_close_matches(kind, KINDS, 1)
            hint = f"; did you mean {near[0]!r}?" if near and near[0] != kind else ""
            raise ConfigError(f"kinds={kinds!r} must be a list of kinds of events, of {', '.join(KINDS)}{hint}")


async def follow(events: Events, kinds: frozenset[str]) -> AsyncIterator[Event]:
    """Yield the events in memory and those that follow, until they are closed."""
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[Event | None] = asyncio.Queue()

    def put(event: Event | None) -> None:
        while arrived.qsize() >= KEPT:
            arrived.get_nowait()
        arrived.put_nowait(event)

    def tell(event: Event | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(put, event)

    seen = events.follow(tell, kinds)
    try:
        for known in seen:
            yield known
        while (event := await arrived.get()) is not None:
            yield event
    finally:
        events.ignore(tell)
