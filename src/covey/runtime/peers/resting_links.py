"""Links that rest: in a run of many nodes, most pairs have nothing to say to each other. On the control loop.

The node with the smaller id asks (`Rest`) whether a link that was idle for a while may rest; the other one agrees if it
has no use for the link either, and sends nothing more on it. Then the first one closes the connection. For all parts
above, the link is still there: the first message that either node sends over it makes that node dial, and waits for the
new connection. Only if that fails, the link has ended.

Both nodes must be able to dial, or one could not wake the link; so each tries it before it asks or agrees. Links
through relays do not rest.
"""

from __future__ import annotations

import asyncio
import functools
import time
from typing import TYPE_CHECKING, Final

from covey.runtime.links.probe import best_way
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from covey.runtime.links.handshake import Where
    from covey.runtime.links.limits import DialLimits
    from covey.runtime.links.link import Link
    from covey.runtime.peers.dialer import Dialer
    from covey.runtime.peers.endpoint import Endpoint
    from covey.runtime.peers.mesh import LinkListener
    from covey.runtime.peers.node_links import NodeLinks
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.tasks import Tasks

IDLE_CHECK_EVERY: Final = 2.0
"""How often links are checked for whether they may rest."""
LINK_IDLE_SECONDS: Final = 5.0
"""How long nothing but pings has arrived when a link may rest: waking it costs a handshake."""
TRY_AGAIN_SECONDS: Final = 30.0
"""How long a link stays awake after this node could not reach the other one, which may only have been busy."""
WAKE_LINK_SECONDS: Final = 3.0
"""How long dialling may fail until a link that should wake counts as ended."""


class RestingLinks:
    """Lets links of one mesh rest, and wakes them."""

    def __init__(
        self,
        met: Mapping[bytes, RemoteProcess],
        links: NodeLinks,
        dialer: Dialer,
        listener: LinkListener,
        endpoint: Endpoint,
        tasks: Tasks,
        limits: DialLimits,
        *,
        ways: Callable[[messages.Card], list[Where]],
    ) -> None:
        """`met` are the nodes whose links may rest, by id; `ways` returns the addresses of a node to dial."""
        self._met, self._links, self._dialer, self._listener = met, links, dialer, listener
        self._id, self._credentials = endpoint.card.id, endpoint.credentials
        self._tasks, self._limits, self._ways = tasks, limits, ways
        self._trying: set[RemoteProcess] = set()
        """Nodes that are being dialled to find out whether that works."""

    async def keep(self) -> None:
        """Ask for links to rest that are idle, and wake those that are to be awake, until cancelled."""
        while True:
            await asyncio.sleep(IDLE_CHECK_EVERY)
            for remote in list(self._met.values()):
                if remote.is_resting:
                    if self._listener.wants_awake(remote):
                        remote.wake()
                elif self._id < remote.card.id and self._may_rest(remote):
                    remote.send(messages.Rest(is_agreed=False))

    def heard(self, remote: RemoteProcess, link: Link, *, is_agreed: bool) -> None:
        """Take the question whether a link may rest, or the agreement of the node that was asked."""
        if link is not remote.link or link.is_resting:
            return
        is_first = self._id < remote.card.id
        if is_agreed and is_first:
            # Also if there is a use for it now: the other node sends nothing more on it. If that node has dialled
            # meanwhile, it uses the new link.
            if self._links.swap(remote):
                return
            link.rest(functools.partial(self._woken, remote), closes=True)
        elif not is_agreed and not is_first and self._may_rest(remote):
            remote.send(messages.Rest(is_agreed=True))
            link.rest(functools.partial(self._woken, remote), closes=False)
        else:
            return
        self._listener.link_rests(remote)

    def _may_rest(self, remote: RemoteProcess) -> bool:
        link = remote.link
        is_plain = link is not None and not link.relay and len(remote.links) == 1 and remote.measured.is_set()
        is_idle = time.monotonic() - remote.used_at > LINK_IDLE_SECONDS and not remote.is_silent()
        if not is_plain or not is_idle or not self._listener.may_rest(remote):
            return False
        if remote.is_dialled or remote.is_reachable:
            return True
        if time.monotonic() >= remote.try_again_at and remote not in self._trying:
            self._trying.add(remote)
            self._tasks.spawn(self._try_to_reach(remote))
        return False

    async def _try_to_reach(self, remote: RemoteProcess) -> None:
        try:
            _, round_trip = await best_way(self._ways(remote.card), self._credentials, None, self._limits)
            remote.is_reachable = round_trip >= 0
            remote.try_again_at = time.monotonic() + TRY_AGAIN_SECONDS
        finally:
            self._trying.discard(remote)

    def _woken(self, remote: RemoteProcess) -> None:
        self._tasks.spawn(self._wake(remote))

    async def _wake(self, remote: RemoteProcess) -> None:
        """Dial a node whose link rests; end the link if that does not work."""
        until = time.monotonic() + WAKE_LINK_SECONDS

        def is_wanted() -> bool:
            return remote.is_resting and not self._tasks.is_closing and time.monotonic() < until

        await self._dialer.redial(remote.card.contact, is_wanted)
        if remote.is_resting and not self._tasks.is_closing and remote.link is not None:
            remote.link.give_up()
