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

VISIT_LINK_SECONDS: Final = 2.0
"""How long ranks may take to accept a link."""


@contextlib.contextmanager
def visiting_ranks(run: LocalRunFound) -> Iterator[LocalVisit]:
    """Visit the ranks of a run until the end of `with`. Ranks that have not joined yet, or are stopped, are left out.

    Raises:
        ConfigError: the run is over, or its folder is not private.
    """
    visit = LocalVisit(run, run.token())
    visit.link(VISIT_LINK_SECONDS)
    try:
        yield visit
    finally:
        visit.leave()


class LocalVisit:
    """The ranks of a run that a visitor is linked with."""

    def __init__(self, run: LocalRunFound, token: bytes) -> None:
        """`token` is what proves that the visitor may ask; ConfigError if the folder of the run is not private."""
        self._run = run
        self._credentials = LinkCredentials.of_token(token)
        check_folder(Path(run.folder))
        self._links: dict[int, Link] = {}
        """By the number of the process in the run. Lives on the control loop."""

    @property
    def ranks(self) -> list[int]:
        """The ranks that have accepted a link."""
        return sorted(self._links)

    def link(self, within: float) -> None:
        """Link with all ranks that have no link, and accept one within so many seconds."""
        control.run(self._open(within), within + control.LOOP_SECONDS)

    async def _open(self, within: float) -> None:
        contact = messages.Contact("", (), "")
        card = messages.Card(b"", secrets.token_bytes(LIFE_BYTES), "visitor", "", os.getpid(), contact)

        async def link_with(rank: int) -> None:
            hello = messages.Hello(messages.VERSION, secrets.token_bytes(32), "visitor", "", -1, 0, "", card)
            with contextlib.suppress(CoveyError, RefusedError, OSError):  # TimeoutError, too
                path = str(socket_path(Path(self._run.folder), rank))
                self._links[rank], _, _ = await dial(path, self._credentials, hello, within=within)

        self._links = {rank: link for rank, link in self._links.items() if link.is_open}
        await asyncio.gather(*(link_with(rank) for rank in range(self._run.size) if rank not in self._links))

    def ask(self, question: messages.Inspect, within: float) -> dict[int, messages.Inspected | None]:
        """Ask all ranks at once; return the answers by rank, None for those that did not come in time."""
        return self.ask_each(dict.fromkeys(self._links, question), within)

    def ask_each(self, questions: dict[int, messages.Inspect], within: float) -> dict[int, messages.Inspected | None]:
        """Ask linked ranks at once, each its own question; return the answers by rank, None for late ones.

        The link with a rank that does not answer in time is ended: a late answer is none to the next question.
        """

        async def ask(link: Link, question: messages.Inspect) -> messages.Inspected | None:
            link.send(messages.encode(question))
            with contextlib.suppress(CoveyError, TimeoutError):
                async with asyncio.timeout(within):
                    while True:
                        answer = await link.receive_message()
                        if isinstance(answer, messages.Inspected) and answer.page == question.page:
                            return answer
            link.abort()
            return None

        async def ask_all() -> dict[int, messages.Inspected | None]:
            asked = {rank: question for rank, question in questions.items() if rank in self._links}
            answers = await asyncio.gather(*(ask(self._links[rank], question) for rank, question in asked.items()))
            return dict(zip(asked, answers, strict=True))

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

    def leave(self) -> None:
        """End all links."""
        control.run(self._close(), control.LOOP_SECONDS)

    async def _close(self) -> None:
        for link in self._links.values():
            link.abort()
