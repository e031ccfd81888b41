"""Someone met: another node of the cluster, and the links with it. On the control loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final

from covey.wire import messages

if TYPE_CHECKING:
    from covey.runtime.links.handshake import Where
    from covey.runtime.links.link import Link

ANSWERS_LIMIT: Final = 16
SILENT_SECONDS: Final = 1.2
"""After so long without a word, another link with the same node is used instead."""


class RemoteNode:
    """Another node that we are linked with.

    Two nodes that find each other at the same time may end up with two links. The one with the smaller id decides
    which one to use, and closes the other a little later; the larger one answers on the link that it heard from last.
    """

    def __init__(self, card: messages.Card, purpose: str) -> None:
        self.card, self.purpose = card, purpose
        self.links: dict[Link, Where | None] = {}
        """Each with the address we dialled, or None if the other side did."""
        self.link: Link | None = None
        """The one in use."""
        self.way: Where | None = None
        """The shortest way to it, of those that work, if we dial."""
        self.is_measuring = False
        """Whether the ways to it are being compared."""
        self.round_trip = -1.0
        self.clock_offset = 0.0
        self.heard_at = time.monotonic()
        """When it last said anything on the link in use."""
        self.pings: dict[int, float] = {}
        """Those without an answer, and when they were sent."""
        self.early: list[messages.Control] = []
        """What it said about a run that is still being agreed on here."""
        self.early_bytes = 0
        self.is_probing = False
        """Whether we are trying its addresses for it; one request at a time."""
        self.is_changing_secret = False
        """Whether a new secret that it sent is being checked and written down."""
        self.rank = -1
        """Its seat in our run."""
        self.votes_for = -1
        """The seat of an earlier life of the same node in our run."""
        self.answers: asyncio.Queue[messages.Answer] = asyncio.Queue(ANSWERS_LIMIT)
        """What it said to our questions."""

    @property
    def is_dialled(self) -> bool:
        """Whether this end dialled the link in use, and so is known to reach the other."""
        return self.link is not None and self.links[self.link] is not None

    def is_silent(self) -> bool:
        """Tell whether the link in use carries nothing: a node that is heard answers a ping every half second."""
        return time.monotonic() - self.heard_at > SILENT_SECONDS

    def send(self, message: messages.Control) -> None:
        if self.link is not None:
            self.link.send(messages.encode(message))

    async def ask(self, question: messages.Question, within: float) -> messages.Answer:
        """Ask something, and return the answer; one question at a time.

        Raises:
            TimeoutError: there was none in time.
        """
        while not self.answers.empty():
            self.answers.get_nowait()
        self.send(question)
        async with asyncio.timeout(within):
            return await self.answers.get()

    def answered(self, answer: messages.Answer) -> None:
        """Note an answer; more than anybody asked for are dropped."""
        with contextlib.suppress(asyncio.QueueFull):
            self.answers.put_nowait(answer)
