"""The other processes of a run: its members (`Peer`), and processes that wait for the next generation (`Newcomer`).

The state of a peer is one `PeerState`. It changes by `PeerEvent`s only, as `TRANSITIONS` says.
"""

from __future__ import annotations

import asyncio
import enum
import time
from typing import TYPE_CHECKING, Final, Protocol

from covey.wire import messages
from covey.wire.versions import OURS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.base.numbers import Seat
    from covey.runtime.links.handshake import Where
    from covey.runtime.links.link import Link

SETTLE_SECONDS: Final = 0.3
"""A newcomer is a reason for another generation after this time: by then it should have dialled every member."""
DEFER_SECONDS: Final = 10.0
"""A newcomer that some members did not know when a generation was founded is a reason for another after this time."""


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
    """What changes the state of a peer."""

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


class Peer:
    """Another process of the run. Changed on the control loop, read on any thread."""

    def __init__(self, seat: Seat, contact: messages.Contact | None, *, is_dialled: bool) -> None:
        self.seat = seat
        self.contact = contact
        self.is_dialled = is_dialled
        """Whether this end of the pair dials."""
        self.vote: Callable[[messages.Control], None] | None = None
        """Sends to a later life of the same node, which still votes for this one."""
        self.way: Where | None = None
        """The best address that was found, if any."""
        self.id = self.life = self.keeper = b""
        self.machine = self.endorsement = b""
        """As on its card; `wire.machine` checks them."""
        self.name = self.host_name = ""
        self.pid = 0
        self.link: Link | None = None
        self.told: Link | None = None
        """The link on which it was told that this rank is ready."""
        self.version = ""
        """Its release of covey."""
        self.versions = OURS
        """What it speaks, as its last greeting said."""
        self.hardware: messages.Hardware | None = None
        self.state = PeerState.EXPECTED
        self.since = time.time()
        """When its state changed last, in seconds since 1970."""
        self.is_denied = False
        """Whether its node may not be in the cluster any more."""
        self.reason = ""
        """Why it was given up, if it was."""
        self.failure = ""
        """The error that ended its program, as it reported."""
        self.round_trip = -1.0
        """Of a probe when the way was chosen; -1 if there was none."""
        self.last_ping = -1.0
        """Of the last ping on its link; -1 before the first answer."""
        self.packet_limit = 0
        """The longest packets of lanes with it, in bytes, if longer ones seem to be swallowed on the way; else 0."""
        self.measured = asyncio.Event()
        """Clear while `way` and `round_trip` are being measured."""
        self.measured.set()

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

    def introduce(self, card: messages.Card) -> None:
        """Take its identity from its card."""
        self.id, self.life, self.keeper = card.id, card.life, card.keeper
        self.name, self.host_name, self.pid = card.name, card.host_name, card.pid
        self.machine, self.endorsement = card.machine, card.endorsement
        self.contact = card.contact
        self.version, self.hardware = card.version, card.hardware

    def how_it_went(self) -> str:
        """Describe the end of a process that is not a member any more, as a predicate for error messages."""
        if self.failure:
            return f"failed with {self.failure}"
        return "has left" if self.has_left else f"is lost: {self.reason}" if self.reason else "is lost"

    def card(self) -> messages.Card:
        """Return its identity, as other nodes are told."""
        contact = self.contact or messages.Contact("", (), "")
        return messages.Card(
            self.id,
            self.life,
            self.name,
            self.host_name,
            self.pid,
            contact,
            self.version,
            self.keeper,
            hardware=self.hardware,
        )


class Newcomer(Protocol):
    """A process that waits for the next generation."""

    @property
    def card(self) -> messages.Card: ...

    def send(self, message: messages.Control) -> None: ...

    def take_seat(self, peer: Peer) -> None:
        """Hand its link to `peer`, which it is from now on."""

    def deliver_early(self, peer: Peer) -> None:
        """Hand over what it said before it took its seat: another member may have told it of the seat first."""

    def turn_away(self) -> None:
        """End its link, if the link belongs to this node, because this node leaves."""


class Newcomers:
    """The processes that wait for the next generation. Changed on the control loop, read on any thread."""

    def __init__(self, added: Callable[[messages.Card], None] = lambda _card: None) -> None:
        """`added` is called for each process that begins to wait."""
        self._added = added
        self._waiting: dict[tuple[bytes, bytes], Newcomer] = {}
        """By id and life."""
        self._counts_from: dict[tuple[bytes, bytes], float] = {}
        """The time from which a newcomer is a reason for another generation."""

    def __iter__(self) -> Iterator[Newcomer]:
        return iter(list(self._waiting.values()))

    def __contains__(self, card: messages.Card) -> bool:
        return messages.key_of(card) in self._waiting

    def add(self, newcomer: Newcomer) -> None:
        """Note that a process waits."""
        key = messages.key_of(newcomer.card)
        if key not in self._waiting:
            self._added(newcomer.card)
        self._waiting[key] = newcomer
        self._counts_from.setdefault(key, time.monotonic() + SETTLE_SECONDS)

    def remove(self, newcomer: Newcomer) -> None:
        """Note that a process does not wait any more."""
        if self._waiting.get(messages.key_of(newcomer.card)) is newcomer:
            self.admit(newcomer.card)

    def admit(self, card: messages.Card) -> Newcomer | None:
        """Remove and return the process that is a member now; None if it does not wait here."""
        key = messages.key_of(card)
        self._counts_from.pop(key, None)
        return self._waiting.pop(key, None)

    def defer(self) -> None:
        """Note that a generation was founded without the remaining newcomers: not all members know them."""
        self._counts_from = dict.fromkeys(list(self._waiting), time.monotonic() + DEFER_SECONDS)

    @property
    def want_generation(self) -> bool:
        """Whether some newcomer is a reason for another generation now."""
        now = time.monotonic()
        return any(now > since for since in list(self._counts_from.values()))
