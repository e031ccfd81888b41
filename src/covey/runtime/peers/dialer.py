"""Dialling a node of the cluster, from an address to an admitted link, and again while it is lost.

While a link goes through a relay, `BetterWays` looks for a direct one, or a nearer relay. On the control loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Final

from covey.base.errors import AuthError, ConnectError, CoveyError
from covey.base.pace import Growing
from covey.base.text import printable
from covey.net.discovery.interfaces import is_loopback, recent_interfaces, to_dial
from covey.net.host.descriptors import ScarceError, is_exhausted
from covey.runtime.backoff import Backoff
from covey.runtime.links.address_race import attempt_seconds, first_of, keep_dialling
from covey.runtime.links.handshake import HungUpError, RefusedError, dial, spell
from covey.runtime.links.link import HANDSHAKE_SECONDS
from covey.runtime.peers.hints import DialOutcome, Hint

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.links.handshake import Where
    from covey.runtime.links.limits import DialLimits
    from covey.runtime.links.link import Link
    from covey.runtime.peers.admission import Admission
    from covey.runtime.peers.endpoint import Endpoint
    from covey.runtime.peers.mesh import LinkListener
    from covey.runtime.peers.problems import Problems
    from covey.runtime.peers.relays import Relays
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.tasks import Tasks
    from covey.wire import messages
    from covey.wire.messages import Address, Card, Contact

logger = logging.getLogger("covey")

NEAR_ANSWER_SECONDS: Final = 2.0
"""How soon a node that was announced on an interface has to answer there; TCP repeats a lost first packet after 1 s."""
NODE_DIAL_PAUSES: Final = Growing(0.05, 1.0, 1.5)
ATTEMPTS_AT_ONCE: Final = 4
"""Attempts to dial one lost node at a time."""
RELAY_CHECK_EVERY: Final = 2.0
"""How often the round trips through the relays that a pair of nodes has in common are compared..."""
RELAY_LOOKS: Final = 2
"""... and how often in a row another one must be clearly shorter before the link moves there."""
SEEK_SECONDS: Final = 60.0
"""Longest pause between attempts to find a direct way to a node that is linked through a relay."""


class Dialer:
    """Dials addresses, checks the node that answers, and passes on the link."""

    def __init__(
        self,
        endpoint: Endpoint,
        interfaces: str,
        admission: Admission,
        problems: Problems,
        linked: Callable[[Card, str, Link, Where | None], None],
        relayed: Callable[[bytes], list[Where]] = lambda _token: [],
    ) -> None:
        """`linked` gets the card and the purpose of the node, the link, and the address that worked.

        `relayed` returns the ways through relays to the node with a token.
        """
        self._relayed = relayed
        self._endpoint, self._interfaces = endpoint, interfaces
        self._admission, self._problems, self._linked = admission, problems, linked

    async def dial(
        self,
        hint: Hint,
        *,
        seed: str = "",
        is_best_relay: bool = False,
        limits: DialLimits | None = None,
    ) -> DialOutcome:
        """Try to make a link with the node that may be at these addresses.

        If the hint has a token, relays are tried after the addresses, the nearest first; with `is_best_relay`, only
        that.
        """
        addresses, interface, relay = hint.addresses, hint.interface, hint.relay
        where = seed or ", ".join(spell((address.ip, address.port)) for address in addresses)
        where = where or f"node {relay.hex()[:8]} of a relay"
        problems, audit = self._problems, self._endpoint.audit
        try:
            is_here = hint.same_host or any(has_loopback_ip(address) for address in addresses)
            ways, within = (
                self.ways(addresses, is_here, interface),
                NEAR_ANSWER_SECONDS if interface else HANDSHAKE_SECONDS,
            )
            relayed = self._relayed(relay) if relay and not is_here else []
            ways += relayed[:1] if is_best_relay else relayed
            hello = self._admission.hello()
            (link, welcome, _), way = await first_of(
                ways,
                lambda way: dial(way, self._endpoint.credentials, hello, limits=limits, within=within),
                lambda opened: opened[0].abort(),
            )
        except HungUpError as error:
            problems.fail(where, str(error), addresses)
            audit.note_paced("rejected", where, address=where, reason=f"secret: {error}")
            if seed:
                problems.hang_up(seed)
            return DialOutcome.NO_NODE
        except (RefusedError, CoveyError, OSError) as error:
            problems.answer(seed)
            said = "says" if isinstance(error, RefusedError) else "cannot be reached"
            text = str(error) if isinstance(error, AuthError) else f"{said}: {error}"
            if addresses or not isinstance(error, ConnectError):  # a relay may name nodes that have left
                problems.fail(where, printable(text), addresses)
            if isinstance(error, RefusedError | AuthError):
                audit.note_paced("rejected", where, address=where, reason=text)
            return DialOutcome.SCARCE if isinstance(error, ScarceError) or is_exhausted(error) else DialOutcome.NO_NODE
        problems.answer(seed)
        problems.reach(where)
        if self._admission.is_this_process(welcome.card):
            link.abort()
            return DialOutcome.OURSELVES
        if not self._admission.welcomed(welcome, link.remote_ip):
            link.abort()
            return DialOutcome.NO_NODE
        self._linked(welcome.card, welcome.purpose, link, way)
        return DialOutcome.LINKED

    def ways(self, addresses: tuple[Address, ...], same_host: bool, interface: str = "") -> list[Where]:
        """Return what to dial; addresses that were heard on one interface are dialled by that one only."""
        if interface and is_loopback(interface):
            return [(address.ip, address.port) for address in addresses]
        if not addresses:
            return []
        own = recent_interfaces(self._interfaces)
        return list(to_dial([each for each in own if interface in ("", each.name)], addresses, same_host))

    # A node that is lost

    async def redial(self, contact: Contact, is_wanted: Callable[[], bool]) -> None:
        """Dial a node by all its addresses, with growing pauses, while `is_wanted()`."""
        addresses = ", ".join(f"{each.ip}:{each.port}" for each in contact.addresses)
        tries = Backoff(
            f"a link with the node at {addresses}", NODE_DIAL_PAUSES, level=logging.INFO
        )  # its health is in `status`
        await keep_dialling(functools.partial(self._attempt, contact), is_wanted, tries, at_once=ATTEMPTS_AT_ONCE)

    async def _attempt(self, contact: Contact) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(attempt_seconds(is_relayed=bool(self._relayed(contact.relay)))):
                same_host = contact.host == self._endpoint.card.contact.host
                await self.dial(Hint(contact.addresses, same_host, relay=contact.relay))
        return "no node of the cluster answers there"


def has_loopback_ip(address: Address) -> bool:
    """Tell whether an address is one of the loopback interface."""
    return address.ip.startswith("127.") or address.ip == "::1"


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
