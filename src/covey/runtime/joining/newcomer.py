"""A process that joins a launcher's run which is already running: it dials every member, and waits for a seat.

On the control loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from covey.base.errors import (
    ClosedError,
    ConfigError,
    CoveyError,
    DeadlineError,
    QuorumLostError,
    RemoteProtocolError,
)
from covey.base.pace import Growing
from covey.base.text import printable
from covey.runtime.backoff import Backoff
from covey.runtime.joining.launched_links import launched_links
from covey.runtime.joining.situation import FIRST_REMINDER_SECONDS, REMINDER_SECONDS
from covey.runtime.links.handshake import RefusedError
from covey.runtime.links.keeper_link import KeeperLink
from covey.runtime.peers.launcher_mesh import LauncherMesh
from covey.runtime.peers.mesh import MeshListener
from covey.runtime.peers.remote_process import RemoteProcess
from covey.runtime.tasks import Tasks
from covey.wire import messages
from covey.wire.versions import fixed_by

if TYPE_CHECKING:
    from covey.base.config import GroupConfig
    from covey.base.numbers import Seat
    from covey.runtime.environment import LaunchedRank
    from covey.runtime.joining.node import NodeParts
    from covey.runtime.peers.endpoint import Endpoint

logger = logging.getLogger("covey")

RANK_PAUSES: Final = Growing(0.02, 0.5, 1.5)
"""Between dials of a rank that does not answer."""
FIRST_SECONDS: Final = 60.0
"""How long the first member may take to answer."""
OVER_SECONDS: Final = 3.0
"""A run is over when no member has been linked for this long."""


class Newcomer(MeshListener):
    """Dials the members of a run, waits for a generation with a seat, and returns its node."""

    def __init__(self, launched: LaunchedRank, config: GroupConfig, endpoint: Endpoint) -> None:
        self._launched, self._config, self._endpoint = launched, config, endpoint
        self._mesh = LauncherMesh(launched, config, endpoint, self)
        self._founded: asyncio.Future[messages.Founded] = asyncio.get_running_loop().create_future()

    async def become_a_node(self, within: float) -> NodeParts:
        """Return the node of the first generation that has a seat for this process.

        Raises:
            DeadlineError: there was none in time.
            ClosedError: the run ended.
            QuorumLostError: the run lost all its members, and too few processes are left to begin again.
            ConfigError: a member refused this process for good.
        """
        self._mesh.open()
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
        await self._mesh.close()

    async def _keep_dialling(self, path: str, rank: int) -> None:
        """Stay linked with the process that has this rank, until cancelled."""
        tries = Backoff(f"a link with rank {rank}", RANK_PAUSES, level=logging.DEBUG)  # `_log_waiting` tells
        while True:
            try:
                remote = await self._mesh.meet(path, rank)
                if remote is not None and remote.link is not None:
                    await remote.link.ended.wait()
                    tries.worked()
                tries.failed()
            except RefusedError as error:
                tries.failed(error)
                if not error.retry and not self._founded.done():
                    text = f"the run does not take this process in: {printable(str(error))}"
                    self._founded.set_exception(ConfigError(text))
            except (CoveyError, TimeoutError, OSError) as error:
                tries.failed(error)
            await tries.rest()

    def heard(self, remote: RemoteProcess, message: messages.Control) -> None:
        if isinstance(message, messages.Founded):
            is_member = any(messages.key_of(member.card) == remote.key for member in message.members)
            if is_member and remote.purpose != "newcomer":
                self._take_seat(message)
        else:
            remote.keep_early(message)

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
        links = (process.link for process in self._mesh.met.values() if process.purpose != "newcomer")
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

    def _become_node(self, founded: messages.Founded) -> NodeParts:
        mine = messages.key_of(self._endpoint.card)
        me = next(member for member in founded.members if messages.key_of(member.card) == mine)
        peers = {member.seat: self._seated(member, me.seat) for member in founded.members if member.seat != me.seat}
        for process in list(self._mesh.met.values()):  # which got no seat
            self._mesh.part(process)
        node, links = launched_links(self._launched, self._config, self._mesh, peers, seat=me.seat)
        links.enter(founded)
        return node

    def _seated(self, member: messages.SeatedMember, own: Seat) -> RemoteProcess:
        """Return a member of the generation in its seat. Without a link, the process with the larger seat dials."""
        process = self._mesh.met.pop(messages.key_of(member.card), None)
        if process is None:
            process = RemoteProcess(member.card, "rank", is_dialled=member.seat < own)
        process.card, process.seat, process.purpose = member.card, member.seat, "rank"
        return process
