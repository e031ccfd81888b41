"""Which of several links with one node is in use. On the control loop.

Invariant: nothing changes while a run is decided on, because messages on two links could overtake each other. The
exception is a silent link: it is replaced at once, since its path may be dead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError
from covey.runtime.links.probe import best_way

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.links.handshake import Where
    from covey.runtime.links.limits import DialLimits
    from covey.runtime.links.link import Link
    from covey.runtime.peers.endpoint import Endpoint
    from covey.runtime.peers.mesh import LinkListener
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.tasks import Tasks
    from covey.wire import messages

logger = logging.getLogger("covey")

RETIRE_SECONDS: Final = 2.0
"""How long a link that is no longer used stays open: messages may still arrive on it."""
LINKS_LIMIT: Final = 4
"""Links with one node at a time; further ones are closed at once."""


class NodeLinks:
    """Attaches links to remote nodes, chooses the one in use, and closes the others."""

    def __init__(
        self,
        endpoint: Endpoint,
        listener: LinkListener,
        tasks: Tasks,
        limits: DialLimits,
        *,
        ways: Callable[[messages.Card], list[Where]],
        attach: Callable[[RemoteProcess, Link], None],
        is_shorter: Callable[[bytes, str, str], bool | None],
    ) -> None:
        """`ways` returns the addresses of a node to dial; `attach` has taken what comes over a link.

        `is_shorter` tells whether one relay leads to the node of a token clearly sooner than another, if it is known.
        """
        self._endpoint, self._listener, self._tasks, self._limits = endpoint, listener, tasks, limits
        self._ways, self._attach, self._is_shorter = ways, attach, is_shorter

    def use(self, remote: RemoteProcess, link: Link, way: Where | None) -> None:
        """Use a link from now on; `way` is the address that this node dialled, if it did."""
        remote.links[link] = way
        remote.use(link)
        self._listen_to(remote, link, way)

    def add(self, remote: RemoteProcess, link: Link, way: Where | None) -> None:
        """Take a second link with a node: use it instead of the first, hold it in reserve, or close it."""
        own_id = self._endpoint.card.id
        if remote.is_resting:
            self._wake(remote, link, way)
        elif remote.is_silent():
            self._replace(remote, link, way)
        elif own_id > remote.card.id:
            self._listen_to(remote, link, way)  # and answer there when the node speaks there
        elif self._is_better(remote, link, way) and self._listener.may_change_link(remote):
            old = list(remote.links)
            self.use(remote, link, way)
            remote.ping()  # makes the node answer on this link
            for each in old:
                _retire(remote, each)
        elif len(remote.links) < LINKS_LIMIT:
            remote.links = {link: way, **remote.links}
            self._attach(remote, link)
            _retire(remote, link)
        else:
            link.close()

    def heard(self, remote: RemoteProcess, link: Link) -> None:
        """Note that a frame arrived; the node with the larger id follows the other one to this link."""
        if link is remote.link:
            remote.heard_at = time.monotonic()
        elif link in remote.links and self._endpoint.card.id > remote.card.id:
            remote.use(link)
            self._listener.link_changed(remote)

    def remove(self, remote: RemoteProcess, link: Link) -> bool:
        """Forget a link that ended, and use another; False if there is none left."""
        del remote.links[link]
        if remote.links and remote.link is link:
            remote.use(max(remote.links, key=lambda each: each.heard_at))
            self._listener.link_changed(remote)
        return bool(remote.links)

    def close(self, remote: RemoteProcess, *, at_once: bool) -> None:
        """Close every link with a node; unless `at_once`, messages that wait to be sent are sent first."""
        for link in remote.unlink():
            if at_once:
                link.abort()
            else:
                link.close()
                asyncio.get_running_loop().call_later(RETIRE_SECONDS, link.abort)

    def hand_over(self, before: RemoteProcess, remote: RemoteProcess) -> None:
        """Let another object stand for a process, with all its links."""
        remote.links, in_use = dict(before.links), before.link
        before.unlink()
        if in_use is not None:
            remote.use(in_use)
        remote.way, remote.round_trip, remote.clock_offset = before.way, before.round_trip, before.clock_offset
        remote.heard_at, remote.used_at = before.heard_at, before.used_at
        for link in remote.links:
            self._attach(remote, link)

    def _is_better(self, remote: RemoteProcess, link: Link, way: Where | None) -> bool:
        """Tell whether to use a second link instead of the first.

        One without a relay is better, then one through a relay that is clearly nearer, then one that this node dialled.
        """
        assert remote.link is not None
        if bool(link.relay) != bool(remote.link.relay):
            return not link.relay
        if link.relay != remote.link.relay:
            is_shorter = self._is_shorter(remote.card.contact.relay, link.relay, remote.link.relay)
            if is_shorter is not None:
                return is_shorter
        return way is not None and not remote.is_dialled

    def _replace(self, remote: RemoteProcess, link: Link, way: Where | None) -> None:
        """Use another link instead of a silent one. Messages on the silent one may be lost."""
        silent = list(remote.links)
        remote.heard_at = time.monotonic()
        self.use(remote, link, way)
        remote.ping()
        for each in silent:
            _retire(remote, each, at_once=True)
        self._listener.link_replaced(remote)

    def swap(self, remote: RemoteProcess) -> bool:
        """Use another link than the one in use, on which the other node sends no more; False if there is none."""
        others = [each for each in remote.links if each is not remote.link]
        if not others or remote.link is None:
            return False
        unused = remote.link
        remote.use(others[0])
        unused.close()
        self._listener.link_changed(remote)
        return True

    def _wake(self, remote: RemoteProcess, link: Link, way: Where | None) -> None:
        """Use another link instead of one that rests. What waits to be sent there goes over it, in order."""
        rested, remote.links = list(remote.links), {}
        remote.heard_at = remote.used_at = time.monotonic()
        waiting = [body for each in rested for body in each.replaced()]
        remote.links[link] = way
        remote.use(link)
        remote.pings.clear()
        for body in waiting:
            link.send(body)
        self._listener.link_woke(remote)
        self._attach(remote, link)

    def _listen_to(self, remote: RemoteProcess, link: Link, way: Where | None) -> None:
        # The node with the smaller id may use any of them; it closes the others after a while, and sends on this one.
        idle = sorted((each for each in remote.links if each is not remote.link), key=lambda each: each.heard_at)
        for each in idle[: max(0, len(remote.links) + 1 - LINKS_LIMIT)]:
            del remote.links[each]
            each.abort()
        remote.links[link] = way
        if way is not None:
            remote.measured.clear()
        self._listener.link_changed(remote)
        self._attach(remote, link)
        if way is not None:
            self._tasks.spawn(self._find_best_way(remote, way))

    async def _find_best_way(self, remote: RemoteProcess, known: Where) -> None:
        """Measure every address of a node that this one dials, and take the fastest for lanes."""
        try:
            ways = self._ways(remote.card)
            way, round_trip = await best_way(ways, self._endpoint.credentials, known, self._limits)
            if way is not None:
                remote.way, remote.round_trip = way, round_trip
        except (ConfigError, OSError) as error:  # the address that is known works
            logger.info("the addresses of %s could not be compared: %s", remote.card.name, error)
        finally:
            remote.measured.set()
        self._listener.link_changed(remote)


def _retire(remote: RemoteProcess, link: Link, *, at_once: bool = False) -> None:
    """Close a link once nothing can be under way on it: messages on the link in use tell the other side to switch.

    Until then it is kept: the node that dialled the link in use may have chosen another of its addresses, and the other
    node may not have noticed that this link was silent. With `at_once`, what it holds is not sent before it is closed.
    """

    def close() -> None:
        if remote.link is not link:
            (link.abort if at_once else link.close)()

    asyncio.get_running_loop().call_later(RETIRE_SECONDS, close)
