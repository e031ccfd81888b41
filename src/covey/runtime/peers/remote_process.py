"""Another process, from the moment it is met until it is gone: its card, the links with it, and its seat in the run.

A mesh links with a process, a generation gives it a seat, views judge it: all of them hold the same `RemoteProcess`.
What has become of it in the run is one `PeerState`, which changes by `PeerEvent`s only, as `TRANSITIONS` says.

Messages that arrive before it has a seat are kept until then, within a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import secrets
import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from covey.base.numbers import NO_RANK, NO_SEAT
from covey.net.discovery.interfaces import describe
from covey.runtime.links.handshake import spell
from covey.wire import messages
from covey.wire.versions import OURS

if TYPE_CHECKING:
    from covey.base.numbers import Rank, Seat
    from covey.runtime.links.handshake import Where
    from covey.runtime.links.link import Link

T = TypeVar("T")

LIMIT_BYTES: Final = 1 << 20
"""For the messages of one sender."""
MESSAGE_BYTES: Final = 500
"""What a message takes in memory besides its contents."""
ANSWERS_LIMIT: Final = 16
PINGS_LIMIT: Final = 100
LINK_SILENCE: Final = 1.2
"""A link in use that carries nothing for this long is replaced by another link with the same process."""
NOWHERE: Final = messages.Contact("", (), "")
"""Where a rank listens that this process has not heard of yet."""


class EarlyMessages(Generic[T]):
    """Early messages of one sender. Messages beyond the limit are dropped: senders repeat what matters."""

    def __init__(self) -> None:
        self._messages: list[T] = []
        self._bytes = 0

    def keep(self, message: T, nbytes: int) -> None:
        """Keep a message of `nbytes`, if there is room."""
        if self._bytes + nbytes + MESSAGE_BYTES <= LIMIT_BYTES:
            self._bytes += nbytes + MESSAGE_BYTES
            self._messages.append(message)

    def take(self) -> list[T]:
        """Return the messages in their order, and forget them."""
        kept, self._messages, self._bytes = self._messages, [], 0
        return kept


class PeerState(enum.Enum):
    """What has become of another process of the run, as this node knows it."""

    EXPECTED = "expected"
    """It has not said yet that it is linked with every rank."""
    ACTIVE = "active"
    """It is in the run, and health trusts it."""
    SUSPECTED = "suspected"
    """It is in the run, but its link ended or nothing is heard of it. The members have not agreed that it is lost."""
    LEAVING = "leaving"
    """It has said that it leaves. What it sent before still counts."""
    LEFT = "left"
    """It said that it leaves, and then its link ended."""
    LOST = "lost"
    """Its link ended, or health gave it up. It can come back until a view excludes it."""
    EXCLUDED = "excluded"
    """A view goes on without it. The process may still run."""
    RELEASED = "released"
    """It said that it leaves, and a view goes on without it."""


class PeerEvent(enum.Enum):
    """What changes the state of a process."""

    READY = "ready"
    """It is linked with every rank, or a generation has a seat for it."""
    SUSPECTED = "suspected"
    TRUSTED = "trusted"
    SAID_GOODBYE = "said goodbye"
    GIVEN_UP = "given up"
    """This node does not wait for it any more."""
    RELINKED = "relinked"
    EXCLUDED = "excluded"
    """A view goes on without it."""


TRANSITIONS: Final[dict[PeerState, dict[PeerEvent, PeerState]]] = {
    PeerState.EXPECTED: {
        PeerEvent.READY: PeerState.ACTIVE,
        PeerEvent.EXCLUDED: PeerState.EXCLUDED,
    },
    PeerState.ACTIVE: {
        PeerEvent.SUSPECTED: PeerState.SUSPECTED,
        PeerEvent.SAID_GOODBYE: PeerState.LEAVING,
        PeerEvent.GIVEN_UP: PeerState.LOST,
        PeerEvent.EXCLUDED: PeerState.EXCLUDED,
    },
    PeerState.SUSPECTED: {
        PeerEvent.TRUSTED: PeerState.ACTIVE,
        PeerEvent.SAID_GOODBYE: PeerState.LEAVING,
        PeerEvent.GIVEN_UP: PeerState.LOST,
        PeerEvent.EXCLUDED: PeerState.EXCLUDED,
    },
    PeerState.LEAVING: {
        PeerEvent.GIVEN_UP: PeerState.LEFT,
        PeerEvent.EXCLUDED: PeerState.RELEASED,
    },
    PeerState.LEFT: {
        PeerEvent.RELINKED: PeerState.LEAVING,
        PeerEvent.EXCLUDED: PeerState.RELEASED,
    },
    PeerState.LOST: {
        PeerEvent.RELINKED: PeerState.ACTIVE,
        PeerEvent.SAID_GOODBYE: PeerState.LEFT,
        PeerEvent.EXCLUDED: PeerState.EXCLUDED,
    },
    PeerState.EXCLUDED: {PeerEvent.SAID_GOODBYE: PeerState.RELEASED},
    PeerState.RELEASED: {},
}
"""The state that follows. An event that a state does not list changes nothing in it: links, health, views and messages
report independently, and in any order."""

_LEFT: Final = frozenset({PeerState.LEAVING, PeerState.LEFT, PeerState.RELEASED})
_GONE: Final = frozenset({PeerState.LEFT, PeerState.LOST, PeerState.EXCLUDED, PeerState.RELEASED})
_EXCLUDED: Final = frozenset({PeerState.EXCLUDED, PeerState.RELEASED})


class RemoteProcess:
    """Another process. Changed on the control loop, read on any thread.

    Two nodes of a cluster that find each other at the same time may have two links. The node with the smaller id
    decides which one is used, and closes the other a little later; the node with the larger id answers on the link that
    it heard last. Ranks of a launcher have one link: the higher rank of a pair dials.
    """

    def __init__(
        self, card: messages.Card, purpose: str = "", *, seat: Seat = NO_SEAT, is_dialled: bool = False
    ) -> None:
        """`is_dialled`: this end dials the process, until a link says otherwise."""
        self.card, self.purpose, self.seat = card, purpose, seat
        # Links
        self.links: dict[Link, Where | None] = {}
        """Each with the address that this node dialled, or None if the other side dialled."""
        self.link: Link | None = None
        """The link in use."""
        self.is_dialled = is_dialled
        """Whether this end dialled the link in use, or the last one, and so is known to reach the other."""
        self.ended_link: Link | None = None
        """The last link in use, while there is none: how it ended tells of the path, or of the process."""
        self.told: Link | None = None
        """The link on which it was told what a process with a new link has to be told."""
        self.versions = OURS
        """What it speaks, as its last greeting said."""
        self.way: Where | None = None
        """The fastest address of those that work, if this end dials."""
        self.measured = asyncio.Event()
        """Clear while its addresses are being compared."""
        self.measured.set()
        self.round_trip = -1.0
        """Seconds of a probe when the way was chosen, or of the first pings; -1 if there was none."""
        self.last_ping = -1.0
        """Seconds of the last ping between members; -1 before the first answer."""
        self.clock_offset = 0.0
        self.packet_limit = 0
        """The longest packets of lanes with it, in bytes, if longer ones seem to be swallowed on the way; else 0."""
        self.heard_at = time.monotonic()
        """When the last message arrived on the link in use."""
        self.used_at = time.monotonic()
        """When the last message arrived that was no ping, nor the answer to one."""
        self.pings: dict[int, float] = {}
        """Pings without an answer, and when they were sent."""
        self.answers: asyncio.Queue[messages.Answer] = asyncio.Queue(ANSWERS_LIMIT)
        """Answers to this node's questions."""
        self.early = EarlyMessages[messages.Control]()
        """Messages about a run in which this process has no seat yet, as far as this node knows."""
        self.is_reachable = False
        """Whether this node is known to be able to dial the other one."""
        self.try_again_at = 0.0
        """When to find out whether it can, if that failed before."""
        self.is_probing = False
        """Whether this node is trying the addresses of the other one, which asked for it; one request at a time."""
        self.is_changing_secret = False
        """Whether a new secret that it sent is being checked and written to disk."""
        # The run
        self.votes_for = NO_SEAT
        """The seat of an earlier life of the same node in this node's run."""
        self.voter: RemoteProcess | None = None
        """A later life of the same node, which still votes for this one."""
        self.state = PeerState.EXPECTED
        self.since = time.time()
        """When its state changed last, in seconds since 1970."""
        self.is_denied = False
        """Whether its node may not be in the cluster any more."""
        self.reason = ""
        """Why it was given up, if it was."""
        self.failure = ""
        """The error that ended its program, as it reported."""

    # Identity

    @property
    def id(self) -> bytes:
        return self.card.id

    @property
    def life(self) -> bytes:
        return self.card.life

    @property
    def contact(self) -> messages.Contact | None:
        """Where it listens; None if that is not known yet."""
        return None if self.card.contact is NOWHERE else self.card.contact

    def is_on(self, host: str) -> bool:
        """Tell whether it runs on a host, as far as is known."""
        contact = self.contact
        return contact is not None and contact.host == host

    @property
    def key(self) -> tuple[bytes, bytes]:
        """Its public key and its life."""
        return messages.key_of(self.card)

    def listens_at(self, contact: messages.Contact) -> None:
        """Note where it listens."""
        self.card = messages.reached_at(self.card, contact)

    def take_addresses(self, card: messages.Card) -> bool:
        """Take the addresses that a card of this node has, which it sent itself; tell whether they are new."""
        addresses, is_its_own = card.contact.addresses, messages.key_of(card) == self.key
        if not is_its_own or not addresses or addresses == self.card.contact.addresses:
            return False
        self.card = messages.moved(self.card, addresses)
        return True

    # Links

    def use(self, link: Link) -> None:
        """Use a link from now on."""
        self.link, self.ended_link = link, None
        if link in self.links:
            self.is_dialled = self.links[link] is not None

    def unlink(self) -> list[Link]:
        """Forget all links, and return them."""
        self.ended_link = self.link or self.ended_link
        links, self.links, self.link, self.told = list(self.links), {}, None, None
        return links

    def meet_again(self, card: messages.Card) -> None:
        """Begin anew with a process whose links have ended; `card` is its card now."""
        self.card, self.heard_at, self.used_at = card, time.monotonic(), time.monotonic()
        self.pings.clear()

    @property
    def is_resting(self) -> bool:
        """Whether the link in use rests: there is no connection, until one of the two nodes has something to say."""
        return self.link is not None and self.link.is_resting

    def is_silent(self) -> bool:
        """Tell whether the link in use carries nothing: a reachable node answers a ping every half second."""
        return not self.is_resting and time.monotonic() - self.heard_at > LINK_SILENCE

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

    # The run

    def note(self, event: PeerEvent) -> None:
        """Move to the state that follows `event`, if this state lists one."""
        following = TRANSITIONS[self.state].get(event, self.state)
        if following is not self.state:
            self.state, self.since = following, time.time()

    @property
    def is_ready(self) -> bool:
        """Whether it is, or was, in the run."""
        return self.state is not PeerState.EXPECTED

    @property
    def is_suspected(self) -> bool:
        """Whether health does not trust it and nothing follows from that yet."""
        return self.state is PeerState.SUSPECTED

    @property
    def has_left(self) -> bool:
        """Whether it has said that it leaves."""
        return self.state in _LEFT

    @property
    def is_gone(self) -> bool:
        """Whether operations do not wait for it any more."""
        return self.state in _GONE

    @property
    def is_excluded(self) -> bool:
        """Whether a view goes on without it. This is final."""
        return self.state in _EXCLUDED

    def how_it_went(self) -> str:
        """Describe the end of a process that is not a member any more, as a predicate for error messages."""
        if self.failure:
            return f"failed with {self.failure}"
        return "has left" if self.has_left else f"is lost: {self.reason}" if self.reason else "is lost"
