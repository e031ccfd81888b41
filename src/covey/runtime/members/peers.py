"""The other processes of a run: members, and those who wait outside."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, Protocol

from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.runtime.links.handshake import Where
    from covey.runtime.links.link import Link

KNOCK_SECONDS: Final = 0.3
"""A newcomer is reason enough for a generation after so long: by then it should have knocked at every door."""
PUT_OFF_SECONDS: Final = 10.0
"""One that was not known to all when a generation was founded is reason for another after so long."""


class Peer:
    """What is known of another rank of the run."""

    def __init__(self, rank: int, contact: messages.Contact | None, *, is_dialled: bool) -> None:
        self.rank = rank
        self.contact = contact
        self.is_dialled = is_dialled
        """Whether this end of the pair does the dialling."""
        self.vote: Callable[[messages.Control], None] | None = None
        """Reaches a later life of the same node, which still votes for this one."""
        self.way: Where | None = None
        """The address that was found best, if any was."""
        self.id = self.life = self.keeper = b""
        self.name = self.host_name = ""
        self.pid = 0
        self.link: Link | None = None
        self.told: Link | None = None
        """The link on which it heard that this rank is ready."""
        self.ready = False
        self.left = False
        self.gone = False
        self.excluded = False
        """The members have agreed to go on without it."""
        self.is_denied = False
        """Its node may not be in the cluster any more."""
        self.reason = ""
        """Why it was given up, if it was."""
        self.failure = ""
        """The error that ended its program, as it said itself."""
        self.round_trip = -1.0
        self.measured = asyncio.Event()
        """Set unless `way` and `round_trip` are being found out."""
        self.measured.set()

    def introduce(self, card: messages.Card) -> None:
        """Note who it is."""
        self.id, self.life, self.keeper = card.id, card.life, card.keeper
        self.name, self.host_name, self.pid = card.name, card.host_name, card.pid
        self.contact = card.contact

    def how_it_went(self) -> str:
        """Say what became of a process that is not a member any more."""
        if self.failure:
            return f"failed with {self.failure}"
        return "has left" if self.left else f"is lost: {self.reason}" if self.reason else "is lost"

    def card(self) -> messages.Card:
        """Return who it is, as others are told."""
        contact = self.contact or messages.Contact("", (), "")
        return messages.Card(self.id, self.life, self.name, self.host_name, self.pid, contact, "", self.keeper)


class Newcomer(Protocol):
    """A process that waits for the next generation."""

    @property
    def card(self) -> messages.Card: ...

    def send(self, message: messages.Control) -> None: ...

    def sit_down(self, peer: Peer) -> None:
        """Hand the link with it to the peer that it is now."""

    def speak(self, peer: Peer) -> None:
        """Hand over what it said before it sat down: it may have heard of its seat from another first."""

    def turn_away(self) -> None:
        """This node leaves: end the link, if it is this node's."""


class Lobby:
    """Who waits for the next generation. Changed on the control loop, read on any thread."""

    def __init__(self) -> None:
        self._newcomers: dict[tuple[bytes, bytes], Newcomer] = {}
        """By id and life."""
        self._counts_from: dict[tuple[bytes, bytes], float] = {}
        """From when on a newcomer is a reason for another generation."""

    def __iter__(self) -> Iterator[Newcomer]:
        return iter(list(self._newcomers.values()))

    def __contains__(self, card: messages.Card) -> bool:
        return messages.key_of(card) in self._newcomers

    def knock(self, newcomer: Newcomer) -> None:
        """Note that a process waits."""
        key = messages.key_of(newcomer.card)
        self._newcomers[key] = newcomer
        self._counts_from.setdefault(key, time.monotonic() + KNOCK_SECONDS)

    def go_away(self, newcomer: Newcomer) -> None:
        """Note that a process does not wait any more."""
        if self._newcomers.get(messages.key_of(newcomer.card)) is newcomer:
            self.admit(newcomer.card)

    def admit(self, card: messages.Card) -> Newcomer | None:
        """Return the process that waited and is a member now; None if it does not wait here."""
        key = messages.key_of(card)
        self._counts_from.pop(key, None)
        return self._newcomers.pop(key, None)

    def put_off(self) -> None:
        """A generation was founded without those who wait still: not all members know of them."""
        self._counts_from = dict.fromkeys(list(self._newcomers), time.monotonic() + PUT_OFF_SECONDS)

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits who is reason enough for another generation."""
        now = time.monotonic()
        return any(now > since for since in list(self._counts_from.values()))
