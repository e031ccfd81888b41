"""A visit to a run of this host: link with its ranks, ask them, and leave. For commands, on their own thread.

A visitor proves that it may ask by the token in the run's folder, which only the user of the run can read. Every call
has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

from covey.base.errors import CoveyError
from covey.net.discovery.host_rendezvous import check_folder, socket_path
from covey.runtime import loop as control
from covey.runtime.links.handshake import LinkCredentials, RefusedError, dial
from covey.wire import messages
from covey.wire.formation import LIFE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from covey.net.host.runs import LocalRunFound
    from covey.runtime.links.link import Link

LINK_SECONDS: Final = 2.0
"""How long ranks may take to accept a link."""


@contextlib.contextmanager
def visiting_ranks(run: LocalRunFound) -> Iterator[LocalVisit]:
    """Visit the ranks of a run until the end of `with`. Ranks that have not joined yet, or are stopped, are left out.

    Raises:
        ConfigError: the run is over, or its folder is not private.
    """
    credentials = LinkCredentials.of_token(run.token())
    check_folder(Path(run.folder))
    visit = LocalVisit(run)
    control.run(visit.open(credentials), LINK_SECONDS + control.LOOP_SECONDS)
    try:
        yield visit
    finally:
        control.run(visit.close(), control.LOOP_SECONDS)


class LocalVisit:
    """The ranks of a run that a visitor is linked with."""

    def __init__(self, run: LocalRunFound) -> None:
        self._run = run
        self._links: dict[int, Link] = {}
        """By rank. Lives on the control loop."""

    @property
    def ranks(self) -> list[int]:
        """The ranks that have accepted a link."""
        return sorted(self._links)

    async def open(self, credentials: LinkCredentials) -> None:
        """Link with all ranks that accept it within LINK_SECONDS."""
        contact = messages.Contact("", (), "")
        card = messages.Card(b"", secrets.token_bytes(LIFE_BYTES), "visitor", "", os.getpid(), contact)

        async def link_with(rank: int) -> None:
            hello = messages.Hello(messages.VERSION, secrets.token_bytes(32), "visitor", "", -1, 0, "", card)
            with contextlib.suppress(CoveyError, RefusedError, OSError):  # TimeoutError, too
                path = str(socket_path(Path(self._run.folder), rank))
                self._links[rank], _, _ = await dial(path, credentials, hello, within=LINK_SECONDS)

        await asyncio.gather(*map(link_with, range(self._run.size)))

    def ask(self, question: messages.Inspect, within: float) -> dict[int, messages.Inspected | None]:
        """Ask all ranks at once; return the answers by rank, None for those that did not come in time."""

        async def ask(link: Link) -> messages.Inspected | None:
            link.send(messages.encode(question))
            with contextlib.suppress(CoveyError, TimeoutError):
                async with asyncio.timeout(within):
                    while True:
                        answer = await link.receive_message()
                        if isinstance(answer, messages.Inspected) and answer.page == question.page:
                            return answer
            return None

        async def ask_all() -> dict[int, messages.Inspected | None]:
            answers = await asyncio.gather(*map(ask, self._links.values()))
            return dict(zip(self._links, answers, strict=True))

        return control.run(ask_all(), within + control.LOOP_SECONDS)

    def ask_one(self, question: messages.RequestCheckpoint, within: float) -> messages.CheckpointProgress | None:
        """Ask the first rank that has accepted a link; return its answer, None if none came in time."""
        if not self._links:
            return None
        link = self._links[min(self._links)]

        async def ask() -> messages.CheckpointProgress | None:
            link.send(messages.encode(question))
            with contextlib.suppress(CoveyError, TimeoutError):
                async with asyncio.timeout(within):
                    while True:
                        answer = await link.receive_message()
                        if isinstance(answer, messages.CheckpointProgress):
                            return answer
            return None

        return control.run(ask(), within + control.LOOP_SECONDS)

    async def close(self) -> None:
        """End all links."""
        for link in self._links.values():
            link.abort()
