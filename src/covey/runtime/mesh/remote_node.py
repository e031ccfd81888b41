"""Another node of the cluster, and the links with it. On the control loop."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import TYPE_CHECKING, Final

from covey.base.numbers import NO_RANK, NO_SEAT
from covey.net.discovery.interfaces import describe
from covey.runtime.early_messages import EarlyMessages
from covey.runtime.links.handshake import spell
from covey.wire import messages

if TYPE_CHECKING:
    from covey.base.numbers import Rank
    from covey.runtime.links.handshake import Where
    from covey.runtime.links.link import Link
    from covey.runtime.mesh.hints import Hint

ANSWERS_LIMIT: Final = 16
PINGS_LIMIT: Final = 100
LINK_SILENCE: Final = 1.2
"""A link in use that carries nothing for this long is replaced by another link with the same node."""


class RemoteNode:
    """Another node that this one is linked with.

    Two nodes that find each other at the same time may have two links. The node with the smaller id decides which one
    is used, and closes the other a little later; the node with the larger id answers on the link that it heard last.
    """

    def __init__(self, card: messages.Card, purpose: str) -> None:
        self.card, self.purpose = card, purpose
        self.links: dict[Link, Where | None] = {}
        """Each with the address that this node dialled, or None if the other side dialled."""
        self.link: Link | None = None
        """The link in use."""
        self.way: Where | None = None
        """The fastest address of those that work, if this node dials."""
        self.is_measuring = False
        """Whether the addresses are being compared."""
        self.round_trip = -1.0
        self.clock_offset = 0.0
        self.heard_at = time.monotonic()
        """When the last message arrived on the link in use."""
        self.used_at = time.monotonic()
        """When the last message arrived that was no ping, nor the answer to one."""
        self.is_reachable = False
        """Whether this node is known to be able to dial the other one."""
        self.try_again_at = 0.0
        """When to find out whether it can, if that failed before."""
        self.pings: dict[int, float] = {}
        """Pings without an answer, and when they were sent."""
        self.early = EarlyMessages[messages.Control]()
        """Messages about a run that this node has not finished forming."""
        self.is_probing = False
        """Whether this node is trying the addresses of the other one, which asked for it; one request at a time."""
        self.is_changing_secret = False
        """Whether a new secret that it sent is being checked and written to disk."""
        self.seat = NO_SEAT
        """Its seat in this node's run."""
        self.votes_for = NO_SEAT
        """The seat of an earlier life of the same node in this node's run."""
        self.answers: asyncio.Queue[messages.Answer] = asyncio.Queue(ANSWERS_LIMIT)
        """Answers to this node's questions."""

    @property
    def is_dialled(self) -> bool:
        """Whether this node dialled the link in use, and so is known to reach the other."""
        return self.link is not None and self.links[self.link] is not None

    @property
    def is_resting(self) -> bool:
        """Whether the link in use rests: there is no connection, until one of the two nodes has something to say."""
        return self.link is not None and self.link.is_resting

    def is_silent(self) -> bool:
        """Tell whether the link in use carries nothing: a reachable node answers a ping every half second."""
        return not self.is_resting and time.monotonic() - self.heard_at > LINK_SILENCE

    def listens_anywhere(self, host: str) -> set[tuple[str, int]]:
        """Return its addresses and ports, those on the loopback interface of `host` included if it runs there."""
        contact = self.card.contact
        ips = ("127.0.0.1",) if contact.host == host else ()
        return {(ip, address.port) for address in contact.addresses for ip in (address.ip, *ips)}

    def take_addresses(self, card: messages.Card) -> bool:
        """Take the addresses that a card of this node has, which it sent itself; tell whether they are new."""
        addresses, is_its_own = card.contact.addresses, messages.key_of(card) == messages.key_of(self.card)
        if not is_its_own or not addresses or addresses == self.card.contact.addresses:
            return False
        self.card = messages.moved(self.card, addresses)
        return True

    def is_at(self, hint: Hint, host: str) -> bool:
        """Tell whether it is the node of a hint; `host` is this one."""
        if hint.relay and hint.relay == self.card.contact.relay:
            return True
        contact = self.card.contact
        if hint.same_host and contact.host != host:
            return False
        return any(  # asked of every node for every hint, so without sets
            mine.port == address.port and ("127.0.0.1" if hint.same_host else mine.ip) == address.ip
            for mine in contact.addresses
            for address in hint.addresses
        )

    def report(self, lane: str = "", rank: Rank = NO_RANK) -> messages.PeerReport:
        """Return how it is reached; `lane` is the kind of lane to it, and `rank` its rank in this node's run."""
        link = self.link
        assert link is not None
        return messages.PeerReport(
            card=self.card,
            rank=rank,
            lane=lane,
            local=link.local_ip,
            remote=spell(self.way) if self.way is not None and not link.relay else link.address,
            interface=describe(link.local_ip),
            round_trip=self.round_trip,
            clock_offset=self.clock_offset,
            relay=link.relay,
        )

    def send(self, message: messages.Control, *, wakes: bool = True) -> None:
        """Send a message on the link in use, if there is one; one that rests gets it only if the message `wakes`."""
        if self.link is not None:
            self.link.send(messages.encode(message), wakes=wakes)

    def ping(self) -> None:
        """Send a ping, unless too many are unanswered or the link rests."""
        if len(self.pings) < PINGS_LIMIT and not self.is_resting:
            number = secrets.randbits(32)
            self.pings[number] = time.monotonic()
            self.send(messages.Ping(number))

    def wake(self) -> None:
        """Make sure that the link in use has a connection: one that rests gets another, or ends."""
        self.send(messages.Ping(0))

    def pong(self, number: int, clock: float) -> None:
        """Take the answer to a ping: it measures the round trip, and the offset of the other node's clock."""
        if number not in self.pings:
            return
        taken = time.monotonic() - self.pings[number]
        self.pings.clear()
        self.clock_offset = clock + taken / 2 - time.time()
        if self.round_trip < 0 or not self.is_dialled:
            self.round_trip = taken if self.round_trip < 0 else min(taken, self.round_trip)

    def unanswered_seconds(self) -> float:
        """Return for how long the oldest ping has had no answer; 0 if all were answered."""
        now = time.monotonic()
        return now - min(self.pings.values(), default=now)

    def keep_early(self, message: messages.Control) -> None:
        """Keep a message for later if the node has no seat here: it may have heard of its seat before this node did."""
        if self.seat < 0:
            self.early.keep(message, len(messages.encode(message)))

    async def ask(self, question: messages.Question, within: float) -> messages.Answer:
        """Send a question and return the next answer; one question at a time.

        Raises:
            TimeoutError: no answer arrived in time.
        """
        while not self.answers.empty():
            self.answers.get_nowait()
        self.send(question)
        async with asyncio.timeout(within):
            return await self.answers.get()

    def answered(self, answer: messages.Answer) -> None:
        """Keep an answer for `ask`; answers beyond the limit are dropped."""
        with contextlib.suppress(asyncio.QueueFull):
            self.answers.put_nowait(answer)
