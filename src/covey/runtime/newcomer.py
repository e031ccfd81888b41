"""A process that comes to a launcher's run which goes on: it knocks at every member's door, and waits for a seat."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from typing import TYPE_CHECKING, Final

from covey.base.errors import ClosedError, ConfigError, ConnectError, CoveyError, DeadlineError
from covey.base.text import printable
from covey.runtime.greet import RefusedError, admit, dial
from covey.runtime.keeper_link import KeeperLink
from covey.runtime.node import Node
from covey.wire import messages

if TYPE_CHECKING:
    import socket

    from covey.base.config import GroupConfig
    from covey.runtime.link import Link
    from covey.runtime.places import Place
    from covey.runtime.seat import Seat

logger = logging.getLogger("covey")

LONGEST_PAUSE: Final = 0.5
"""Seconds between knocks at a door that nobody opens."""
REMINDER_SECONDS: Final = 30.0
FIRST_SECONDS: Final = 60.0
"""How long the first member may take to open its door."""
OVER_SECONDS: Final = 3.0
"""A run none of whose members was there for so long is over."""
EARLY_LIMIT: Final = 4096
"""Messages about the generation that a newcomer is about to be in."""


class Newcomer:
    """Knocks, waits, and becomes a node."""

    def __init__(self, place: Place, config: GroupConfig, seat: Seat) -> None:
        self._place, self._config, self._seat = place, config, seat
        self._links: dict[bytes, tuple[Link, messages.Card, bool]] = {}
        """By life: the link, whose it is, and whether we dialled it."""
        self._fellows: set[bytes] = set()
        """The lives of those who wait, too."""
        self._founded: asyncio.Future[messages.Founded] = asyncio.get_running_loop().create_future()
        self._early: list[tuple[bytes, messages.Control]] = []

    async def become_a_node(self, within: float) -> Node:
        """Return the node of the generation that takes this process in.

        Raises:
            DeadlineError: there was none in time.
        """
        self._seat.entrance.on_link = self._greet
        self._seat.entrance.open()
        tasks = [
            asyncio.ensure_future(self._knock(contact.socket, slot)) for slot, contact in self._seat.contacts.items()
        ]
        tasks.append(asyncio.ensure_future(self._say_what_is_waited_for()))
        if self._place.keeper:
            tasks.append(asyncio.ensure_future(self._hear_the_keeper(self._place.keeper)))
        else:
            tasks.append(asyncio.ensure_future(self._notice_the_end()))
        try:
            async with asyncio.timeout(within):
                founded = await self._founded
        except TimeoutError:
            raise DeadlineError(
                f"the run did not take this process in within the timeout of {within:g} s: {self._members} members "
                "know that it is here. They do so between two generations (covey.generations) only"
            ) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self._sit_down(founded)

    async def close(self) -> None:
        """Go away."""
        await self._seat.entrance.close()
        for link, _, _ in self._links.values():
            link.abort()

    async def _knock(self, path: str, slot: int) -> None:
        """Be linked with whoever has this slot, for as long as we wait."""
        pause = 0.02
        while True:
            with contextlib.suppress(CoveyError, TimeoutError, OSError):
                try:
                    link, welcome, _ = await dial(path, self._seat.gate, self._hello())
                except RefusedError as error:
                    if not error.retry and not self._founded.done():
                        text = f"the run does not take this process in: {printable(str(error))}"
                        self._founded.set_exception(ConfigError(text))
                    raise ConnectError(str(error)) from error
                if welcome.purpose == "newcomer" and slot > self._place.rank:
                    link.close()  # it dials us
                else:
                    self._hold(link, welcome.card, is_dialled=True, is_fellow=welcome.purpose == "newcomer")
                    await link.ended.wait()
                    pause = 0.02
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, 1.5 * pause)

    async def _greet(self, sock: socket.socket, said: bytes) -> None:
        admitted = await admit(sock, self._seat.gate, said, self._judge)
        if admitted is not None:
            self._hold(admitted[0], admitted[1].card, is_dialled=False, is_fellow=True)

    def _judge(self, hello: messages.Hello, _id: bytes) -> messages.Welcome | messages.Refusal:
        if hello.purpose == "newcomer" and hello.run == self._place.name:
            return messages.Welcome(-1, self._seat.card, "newcomer")
        return messages.Refusal("this process waits for a place in the run", retry=True)

    def _hello(self) -> messages.Hello:
        return messages.Hello(
            messages.VERSION,
            secrets.token_bytes(32),
            "newcomer",
            self._place.name,
            self._place.rank,
            self._place.size,
            self._config.lanes,
            self._seat.card,
            self._config.on_loss,
        )

    def _hold(self, link: Link, card: messages.Card, *, is_dialled: bool, is_fellow: bool) -> None:
        if card.life in self._links and self._links[card.life][0].is_open:
            link.close()
            return
        if is_fellow:
            self._fellows.add(card.life)
        self._links[card.life] = link, card, is_dialled
        link.attach(lambda body: self._heard(card.life, messages.decode_control(body)), lambda: None)

    def _heard(self, life: bytes, message: messages.Control) -> None:
        if isinstance(message, messages.Founded):
            is_ours = any(member.card.life == self._seat.card.life for member in message.members)
            if is_ours and not self._founded.done():
                self._founded.set_result(message)
        elif len(self._early) < EARLY_LIMIT:
            self._early.append((life, message))

    @property
    def _members(self) -> int:
        """How many members know that this process is here."""
        links = ((life, link) for life, (link, _, _) in self._links.items())
        return sum(link.is_open and life not in self._fellows for life, link in links)

    async def _notice_the_end(self) -> None:
        """Give up when no member of the run has been there for a while."""
        seen_at = time.monotonic() + FIRST_SECONDS - OVER_SECONDS
        while not self._founded.done():
            if self._members:
                seen_at = time.monotonic()
            elif time.monotonic() > seen_at + OVER_SECONDS:
                self._end()
            await asyncio.sleep(0.1)

    def _end(self) -> None:
        if not self._founded.done():
            self._founded.set_exception(ClosedError("the run ended before it took this process in"))

    async def _hear_the_keeper(self, path: str) -> None:
        """The keeper knows whether a member is left; if none is, it ends the run, or founds it anew."""

        def hear(message: messages.Control) -> None:
            if isinstance(message, messages.Founded):
                self._heard(b"", message)
            elif isinstance(message, messages.Goodbye):
                self._end()

        await KeeperLink(path, self._seat.gate, self._seat.card, on_message=hear).keep()

    async def _say_what_is_waited_for(self) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(REMINDER_SECONDS)
            waited = time.monotonic() - began
            logger.warning("this process waits since %.0f s for a place in %s; %d members know of it", waited,
                           self._place.name, self._members)  # fmt: skip

    def _sit_down(self, founded: messages.Founded) -> Node:
        me = next(member for member in founded.members if member.card.life == self._seat.card.life)
        node = Node(
            rank=me.seat,
            size=len(founded.members),
            run=self._place.name,
            gate=self._seat.gate,
            card=self._seat.card,
            config=self._config,
            entrance=self._seat.entrance,
            contacts={member.seat: member.card.contact for member in founded.members},
            keeper=self._place.keeper,
            on_close=self._seat.on_close,
            seats=tuple(member.seat for member in founded.members),
        )
        for member in founded.members:
            if member.seat != me.seat:
                # Where there is no link yet, the later of the two dials.
                by_seat = (None, None, member.seat < me.seat)
                link, _, is_dialled = self._links.pop(member.card.life, by_seat)
                node.seat_member(member, link, is_dialled=is_dialled)
        for link, _, _ in self._links.values():
            link.abort()
        node.enter(founded)
        seats = {member.card.life: member.seat for member in founded.members}
        for life, message in self._early:
            if life in seats:
                node.heard(seats[life], message)
        return node
