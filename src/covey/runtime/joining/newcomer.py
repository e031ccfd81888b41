"""A process that joins a launcher's run which is already running: it dials every member, and waits for a seat.

On the control loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from typing import TYPE_CHECKING, Final, TypeAlias

from covey.base.errors import (
    ClosedError,
    ConfigError,
    ConnectError,
    CoveyError,
    DeadlineError,
    QuorumLostError,
    RemoteProtocolError,
)
from covey.base.pace import Growing
from covey.base.text import printable
from covey.runtime.backoff import Backoff
from covey.runtime.joining.launcher_mesh import launched_node
from covey.runtime.links.acceptor import remote_ip
from covey.runtime.links.handshake import Greeter, RefusedError, admit, dial
from covey.runtime.links.keeper_link import KeeperLink
from covey.runtime.peers.remote_process import RemoteProcess
from covey.runtime.tasks import Tasks
from covey.wire import messages
from covey.wire.versions import fixed_by

if TYPE_CHECKING:
    import socket

    from covey.base.config import GroupConfig
    from covey.base.numbers import Seat
    from covey.runtime.environment import LaunchedRank
    from covey.runtime.joining.node import Node
    from covey.runtime.links.link import Link
    from covey.runtime.peers.endpoint import Endpoint

logger = logging.getLogger("covey")

Key: TypeAlias = tuple[bytes, bytes]
"""The id and life of a process."""

PAUSES: Final = Growing(0.02, 0.5, 1.5)
"""Between dials of a rank that does not answer."""
FIRST_REMINDER_SECONDS: Final = 5.0
REMINDER_SECONDS: Final = 30.0
FIRST_SECONDS: Final = 60.0
"""How long the first member may take to answer."""
OVER_SECONDS: Final = 3.0
"""A run is over when no member has been linked for this long."""


class Newcomer:
    """Dials the members of a run, waits for a generation with a seat, and returns its node."""

    def __init__(self, launched: LaunchedRank, config: GroupConfig, endpoint: Endpoint) -> None:
        self._launched, self._config, self._endpoint = launched, config, endpoint
        self._met: dict[Key, RemoteProcess] = {}
        """By id and life: members of the run, and other newcomers."""
        self._founded: asyncio.Future[messages.Founded] = asyncio.get_running_loop().create_future()

    async def become_a_node(self, within: float) -> Node:
        """Return the node of the first generation that has a seat for this process.

        Raises:
            DeadlineError: there was none in time.
            ClosedError: the run ended.
            QuorumLostError: the run lost all its members, and too few processes are left to begin again.
            ConfigError: a member refused this process for good.
        """
        self._endpoint.acceptor.give_links(self._accept)
        self._endpoint.acceptor.open()
        tasks = Tasks("a newcomer")
        for rank, contact in self._endpoint.contacts.items():
            tasks.spawn(self._keep_dialling(contact.socket, rank))
        tasks.spawn(self._log_waiting())
        if self._launched.keeper:
            tasks.spawn(self._listen_to_keeper(self._launched.keeper))
        else:
            tasks.spawn(self._notice_the_end())
        try:
            async with asyncio.timeout(within):
                founded = await self._founded
        except TimeoutError:
            raise DeadlineError(
                f"the run did not take this process in within the timeout of {within:g} s: {self._members} members "
                "know that it is here. They do so between two generations (covey.generations) only"
            ) from None
        finally:
            await tasks.close()
        return self._become_node(founded)

    async def close(self) -> None:
        """Stop listening, and end every link."""
        await self._endpoint.acceptor.close()
        for process in self._met.values():
            _end(process)

    async def _keep_dialling(self, path: str, rank: int) -> None:
        """Stay linked with the process that has this rank, until cancelled."""
        tries = Backoff(f"a link with rank {rank}", PAUSES, level=logging.DEBUG)  # `_log_waiting` tells
        while True:
            with contextlib.suppress(CoveyError, TimeoutError, OSError):
                try:
                    link, welcome, _ = await dial(path, self._endpoint.credentials, self._hello())
                except RefusedError as error:
                    if not error.retry and not self._founded.done():
                        text = f"the run does not take this process in: {printable(str(error))}"
                        self._founded.set_exception(ConfigError(text))
                    raise ConnectError(str(error)) from error
                if welcome.purpose == "newcomer" and rank > self._launched.rank:
                    link.close()  # it dials this process
                else:
                    self._hold(link, welcome.card, is_dialled=True, is_newcomer=welcome.purpose == "newcomer")
                    await link.ended.wait()
                    tries.worked()
            tries.failed()
            await tries.rest()

    async def _accept(self, sock: socket.socket, said: bytes) -> None:
        on_stranger = functools.partial(self._endpoint.audit.refused_key, remote_ip(sock))
        greeter = Greeter(self._endpoint.card, self._judge, on_stranger)
        admitted = await admit(sock, self._endpoint.credentials, said, greeter)
        if admitted is not None:
            self._hold(admitted[0], admitted[1].card, is_dialled=False, is_newcomer=True)

    def _judge(self, hello: messages.Hello, _id: bytes) -> messages.Welcome | messages.Refusal:
        if hello.purpose == "newcomer" and hello.run == self._launched.name:
            return messages.Welcome(-1, self._endpoint.card, "newcomer")
        return messages.Refusal("this process waits for a seat in the run", retry=True)

    def _hello(self) -> messages.Hello:
        return messages.Hello(
            messages.VERSION,
            secrets.token_bytes(32),
            "newcomer",
            self._launched.name,
            self._launched.rank,
            self._launched.size,
            self._config.lanes,
            self._endpoint.card,
            self._config.on_loss,
            settings=self._config.agreed(),
        )

    def _hold(self, link: Link, card: messages.Card, *, is_dialled: bool, is_newcomer: bool) -> None:
        key = messages.key_of(card)
        known = self._met.get(key)
        if known is not None and known.link is not None and known.link.is_open:
            link.close()
            return
        process = self._met.setdefault(key, RemoteProcess(card))
        process.purpose = "newcomer" if is_newcomer else "rank"
        process.is_dialled = is_dialled
        process.use(link)
        link.attach(functools.partial(self._heard, process), lambda: None)

    def _heard(self, process: RemoteProcess, body: bytes) -> None:
        message = messages.decode_control(body)
        if isinstance(message, messages.Founded):
            is_member = any(messages.key_of(member.card) == process.key for member in message.members)
            if is_member and process.purpose != "newcomer":
                self._take_seat(message)
        else:
            process.keep_early(message)

    def _take_seat(self, founded: messages.Founded) -> None:
        """Accept a generation, if it has a seat for this process."""
        mine = messages.key_of(self._endpoint.card)
        if any(messages.key_of(member.card) == mine for member in founded.members) and not self._founded.done():
            try:
                fixed_by(founded.versions)
            except ValueError as error:
                raise RemoteProtocolError(f"a seat for a process that cannot be in the run: {error}") from None
            self._founded.set_result(founded)

    @property
    def _members(self) -> int:
        """How many members are linked with this process."""
        links = (process.link for process in self._met.values() if process.purpose != "newcomer")
        return sum(link is not None and link.is_open for link in links)

    async def _notice_the_end(self) -> None:
        """Give up when no member of the run has been linked for a while."""
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

    async def _listen_to_keeper(self, path: str) -> None:
        """Take the keeper's word for the end of the run, or for a new first generation: it knows which members live."""

        def hear(message: messages.Control) -> None:
            if isinstance(message, messages.Founded):
                self._take_seat(message)
            elif isinstance(message, messages.Goodbye) and message.reason:
                if not self._founded.done():
                    self._founded.set_exception(QuorumLostError(message.reason))
            elif isinstance(message, messages.Goodbye):
                self._end()

        credentials, card, fewest = self._endpoint.credentials, self._endpoint.card, self._launched.fewest
        await KeeperLink(path, credentials, card, fewest=fewest, on_message=hear).keep()

    async def _log_waiting(self) -> None:
        began, pause = time.monotonic(), FIRST_REMINDER_SECONDS
        while True:
            await asyncio.sleep(pause)
            pause = REMINDER_SECONDS
            waited = time.monotonic() - began
            logger.warning("waiting for a seat in %s (%.0f s); %d members know of this process",
                           self._launched.name, waited, self._members)  # fmt: skip

    def _become_node(self, founded: messages.Founded) -> Node:
        mine = messages.key_of(self._endpoint.card)
        me = next(member for member in founded.members if messages.key_of(member.card) == mine)
        peers = {member.seat: self._seated(member, me.seat) for member in founded.members if member.seat != me.seat}
        node, mesh = launched_node(self._launched, self._config, self._endpoint, peers, seat=me.seat)
        for process in self._met.values():  # which got no seat
            _end(process)
        mesh.enter(founded)
        for seat, process in peers.items():
            for message in process.early.take():
                node.inbox.heard_early(seat, message)
        return node

    def _seated(self, member: messages.SeatedMember, own: Seat) -> RemoteProcess:
        """Return a member of the generation in its seat. Without a link, the process with the larger seat dials."""
        process = self._met.pop(messages.key_of(member.card), None)
        if process is None:
            process = RemoteProcess(member.card, "rank", is_dialled=member.seat < own)
        process.card, process.seat = member.card, member.seat
        return process


def _end(process: RemoteProcess) -> None:
    if process.link is not None:
        process.link.abort()
