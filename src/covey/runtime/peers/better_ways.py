"""Better ways to nodes whose link goes through a relay: a direct one, or a nearer relay. On the control loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from covey.base.pace import Growing
from covey.base.text import printable
from covey.runtime.backoff import Backoff
from covey.runtime.links.address_race import attempt_seconds
from covey.runtime.peers.hints import Hint

if TYPE_CHECKING:
    from covey.runtime.peers.dialer import Dialer
    from covey.runtime.peers.listener import LinkListener
    from covey.runtime.peers.relays import Relays
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.tasks import Tasks
    from covey.wire import messages

logger = logging.getLogger("covey")

RELAY_CHECK_EVERY: Final = 2.0
"""How often the round trips through the relays that a pair of nodes has in common are compared..."""
RELAY_LOOKS: Final = 2
"""... and how often in a row another one must be clearly shorter before the link moves there."""
SEEK_SECONDS: Final = 60.0
"""Longest pause between attempts to find a direct way to a node that is linked through a relay."""


class BetterWays:
    """The nodes with a relayed link, and what they are told about relays."""

    def __init__(
        self,
        card: messages.Card,
        relays: Relays,
        dialer: Dialer,
        listener: LinkListener,
        tasks: Tasks,
        *,
        tells_log: bool,
    ) -> None:
        """`card` is that of this node; with `tells_log`, the log says which nodes are reached through a relay."""
        self._id, self._host, self._tells_log = card.id, card.contact.host, tells_log
        self._relays, self._dialer, self._listener, self._tasks = relays, dialer, listener, tasks
        self._seeking: set[tuple[RemoteProcess, bool]] = set()
        """The nodes to which a way is sought, and whether that is a direct one."""

    def seek(self, remote: RemoteProcess) -> None:
        """Look for a better way to a node, if its link goes through a relay, and tell it how far the relays are."""
        if remote.link is not None and remote.link.relay:
            self._relays.tell([remote])
            for is_direct in (True, False):  # each by itself: one may notice that the link has changed before the other
                if (remote, is_direct) not in self._seeking:
                    self._seeking.add((remote, is_direct))
                    self._tasks.spawn(self._seek(remote, is_direct=is_direct))

    async def _seek(self, remote: RemoteProcess, *, is_direct: bool) -> None:
        try:
            await (self.seek_direct(remote) if is_direct else self._seek_shorter_relay(remote))
        finally:
            self._seeking.discard((remote, is_direct))

    async def seek_direct(self, remote: RemoteProcess) -> None:
        """Dial a node at its own addresses, with growing pauses, while its link goes through a relay."""
        told, tries = "", Backoff("a direct link", Growing(1.0, SEEK_SECONDS), level=logging.DEBUG)
        while remote.link is not None and remote.link.relay and not self._tasks.is_closing:
            contact = remote.card.contact  # it may have moved
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(attempt_seconds(is_relayed=False)):
                    await self._dialer.dial(Hint(contact.addresses, contact.host == self._host))
            if remote.link is not None and remote.link.relay and not told and self._tells_log:
                told = remote.link.relay
                logger.warning("%s cannot be reached directly; the relay %s is used", printable(remote.card.name), told)
            tries.failed()
            await tries.rest()
        if told and remote.link is not None:
            logger.warning("%s is reached directly now, and not through a relay", printable(remote.card.name))

    async def _seek_shorter_relay(self, remote: RemoteProcess) -> None:
        """Link with a node anew through another relay when that is clearly nearer, while its link goes through a relay.

        The node with the smaller id does so: it is the one that decides which link is used. Between members of a run,
        links stay where they are, and lanes move.
        """
        looks = 0
        while remote.link is not None and remote.link.relay and not self._tasks.is_closing:
            way = self._relays.shorter(remote.card.contact.relay, remote.link.relay)
            looks = 0 if way is None else looks + 1
            is_due = looks >= RELAY_LOOKS and self._id < remote.card.id and self._listener.may_change_link(remote)
            if way is not None and is_due:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(attempt_seconds(is_relayed=True)):
                        await self._dialer.dial(Hint((), relay=way.token), is_best_relay=True)
            await asyncio.sleep(RELAY_CHECK_EVERY)
