"""A process that comes to a launcher's run which goes on: it knocks at every member's door, and waits for a seat."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from typing import TYPE_CHECKING, Final, TypeAlias

from covey.base.errors import ClosedError, ConfigError, ConnectError, CoveyError, DeadlineError
from covey.base.text import printable
from covey.runtime.early_messages import EarlyMessages
from covey.runtime.links.handshake import RefusedError, admit, dial
from covey.runtime.links.keeper_link import KeeperLink
from covey.runtime.members.node import Node
from covey.wire import messages

if TYPE_CHECKING:
    import socket

    from covey.base.config import GroupConfig
    from covey.runtime.environment import Place
    from covey.runtime.links.link import Link
    from covey.runtime.mesh.endpoint import Endpoint

logger = logging.getLogger("covey")

Key: TypeAlias = tuple[bytes, bytes]
"""The id and life of a process."""

LONGEST_PAUSE: Final = 0.5
"""Seconds between knocks at a door that nobody opens."""
REMINDER_SECONDS: Final = 30.0
FIRST_SECONDS: Final = 60.0
"""How long the first member may take to open its door."""
OVER_SECONDS: Final = 3.0
"""A run none of whose members was there for so long is over."""


class Newcomer:
    """Knocks, waits, and becomes a node."""

    def __init__(self, place: Place, config: GroupConfig, endpoint: Endpoint) -> None:
        self._place, self._config, self._endpoint = place, config, endpoint
        self._links: dict[Key, tuple[Link, messages.Card, bool]] = {}
        """By id and life: the link, whose it is, and whether we dialled it."""
        self._fellows: set[Key] = set()
        """Those that wait, too."""
        self._founded: asyncio.Future[messages.Founded] = asyncio.get_running_loop().create_future()
        self._early: dict[Key, EarlyMessages[messages.Control]] = {}
        """What others said about the generation that this process is about to be in."""

    async def become_a_node(self, within: float) -> Node:
        """Return the node of the generation that takes this process in.

        Raises:
            DeadlineError: there was none in time.
        """
        self._endpoint.acceptor.on_link = self._greet
        self._endpoint.acceptor.open()
        tasks = [
            asyncio.ensure_future(self._knock(contact.socket, slot))
            for slot, contact in self._endpoint.contacts.items()
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
        await self._endpoint.acceptor.close()
        for link, _, _ in self._links.values():
            link.abort()

    async def _knock(self, path: str, slot: int) -> None:
        """Be linked with whoever has this slot, for as long as we wait."""
        pause = 0.02
        while True:
            with contextlib.suppress(CoveyError, TimeoutError, OSError):
                try:
                    link, welcome, _ = await dial(path, self._endpoint.credentials, self._hello())
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
        admitted = await admit(sock, self._endpoint.credentials, said, self._judge)
        if admitted is not None:
            self._hold(admitted[0], admitted[1].card, is_dialled=False, is_fellow=True)

    def _judge(self, hello: messages.Hello, _id: bytes) -> messages.Welcome | messages.Refusal:
        if hello.purpose == "newcomer" and hello.run == self._place.name:
            return messages.Welcome(-1, self._endpoint.card, "newcomer")
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
            self._endpoint.card,
            self._config.on_loss,
        )

    def _hold(self, link: Link, card: messages.Card, *, is_dialled: bool, is_fellow: bool) -> None:
        key = messages.key_of(card)
        if key in self._links and self._links[key][0].is_open:
            link.close()
            return
        if is_fellow:
            self._fellows.add(key)
        self._links[key] = link, card, is_dialled
        link.attach(functools.partial(self._heard, key), lambda: None)

    def _heard(self, key: Key, body: bytes) -> None:
        message = messages.decode_control(body)
        if isinstance(message, messages.Founded):
            is_member = any(messages.key_of(member.card) == key for member in message.members)
            if is_member and key not in self._fellows:
                self._take_seat(message)
        else:
            self._early.setdefault(key, EarlyMessages()).keep(message, len(body))

    def _take_seat(self, founded: messages.Founded) -> None:
        """Be in a generation, if it has a seat for this process."""
        mine = messages.key_of(self._endpoint.card)
        if any(messages.key_of(member.card) == mine for member in founded.members) and not self._founded.done():
            self._founded.set_result(founded)

    @property
    def _members(self) -> int:
        """How many members know that this process is here."""
        links = ((key, link) for key, (link, _, _) in self._links.items())
        return sum(link.is_open and key not in self._fellows for key, link in links)

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
                self._take_seat(message)
            elif isinstance(message, messages.Goodbye):
                self._end()

        await KeeperLink(path, self._endpoint.credentials, self._endpoint.card, on_message=hear).keep()

    async def _say_what_is_waited_for(self) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(REMINDER_SECONDS)
            waited = time.monotonic() - began
            logger.warning("waiting for a place in %s (%.0f s); %d members know of this process",
                           self._place.name, waited, self._members)  # fmt: skip

    def _sit_down(self, founded: messages.Founded) -> Node:
        mine = messages.key_of(self._endpoint.card)
        me = next(member for member in founded.members if messages.key_of(member.card) == mine)
        node = Node(
            rank=me.seat,
            size=len(founded.members),
            run=self._place.name,
            credentials=self._endpoint.credentials,
            card=self._endpoint.card,
            config=self._config,
            acceptor=self._endpoint.acceptor,
            audit=self._endpoint.audit,
            contacts={member.seat: member.card.contact for member in founded.members},
            keeper=self._place.keeper,
            on_close=self._endpoint.on_close,
            seats=tuple(member.seat for member in founded.members),
        )
        for member in founded.members:
            if member.seat != me.seat:
                # Where there is no link yet, the later of the two dials.
                by_seat = (None, None, member.seat < me.seat)
                link, _, is_dialled = self._links.pop(messages.key_of(member.card), by_seat)
                node.seat_member(member, link, is_dialled=is_dialled)
        for link, _, _ in self._links.values():
            link.abort()
        node.enter(founded)
        for member in founded.members:
            if (early := self._early.get(messages.key_of(member.card))) is not None:
                for message in early.take():
                    node.heard(member.seat, message)
        return node
