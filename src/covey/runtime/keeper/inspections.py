"""Questions of a keeper to its processes about their metrics, and the answers. On the control loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Mapping

    from covey.runtime.links.link import Link


class Inspections:
    """The questions that wait for answers. Answers that come too late are dropped."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, list[asyncio.Future[messages.Inspected]]] = {}
        """By life: several may ask the same question at the same time."""

    async def ask(
        self, links: Mapping[bytes, Link], question: messages.Inspect, within: float
    ) -> dict[bytes, messages.Inspected | None]:
        """Ask over all links, by life; return each answer, or None if there was none within so many seconds."""
        asked = {life: asyncio.get_running_loop().create_future() for life in links}
        for life, future in asked.items():
            self._waiting.setdefault(life, []).append(future)
            links[life].send(messages.encode(question))
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=within)
            return {life: future.result() if future.done() else None for life, future in asked.items()}
        finally:
            for life, future in asked.items():
                self._waiting[life].remove(future)
                if not self._waiting[life]:
                    del self._waiting[life]

    def answered(self, life: bytes, answer: messages.Inspected) -> None:
        """Take an answer, for all that wait for it."""
        for future in self._waiting.get(life, ()):
            if not future.done():
                future.set_result(answer)
