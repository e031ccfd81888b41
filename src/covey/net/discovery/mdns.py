"""Multicast DNS: nodes of one cluster on one network find each other without configured addresses.

Each usable interface has its own responder: so an interface that forbids multicast does not affect the others, only the
addresses of a network are announced on it, and `covey doctor` can report on each.

An announcement is a hint. It proves nothing, and silence proves nothing either. Its addresses are used only if a holder
of the cluster's secret made it, only once, and only those on the network of the interface where it was heard: multicast
reaches no further than that network.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError
from covey.net.discovery import interfaces as network
from covey.net.discovery.responder import InterfaceResponder, Observation
from covey.net.host.descriptors import explain
from covey.wire import beacon
from covey.wire.messages import Address

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.net.discovery.interfaces import Interface

__all__ = ["Beacon", "Observation"]

INTERFACES_CHECK_EVERY: Final = 2.0
"""Seconds between checks of the interfaces."""
MOST_KNOWN: Final = 4096
"""Tags of announcements that are kept. A node makes one a minute; replays of older ones are limited by `Hints`."""


class Beacon:
    """Announces a node by multicast DNS and listens for others of its cluster, on every usable interface."""

    def __init__(
        self,
        key: bytes,
        port: int,
        interfaces_pattern: str,
        found: Callable[[tuple[Address, ...], str], None],
        *,
        announce: bool = True,
    ) -> None:
        """Prepare a beacon; nothing is sent before `start`.

        `found` is called on the loop with the addresses of each announcement that a holder of `key` made, and the name
        of the interface where it was heard, by which they can be reached. A repeated announcement is ignored. Without
        `announce`, it only listens.

        Raises:
            ConfigError: `interfaces_pattern` is not a pattern.
        """
        network.parse_pattern(interfaces_pattern)
        self._keys: tuple[bytes, ...] = (key,)
        """Announcements are made with the first, and accepted with any."""
        self._port, self._found, self._announce = port, found, announce
        self._pattern = interfaces_pattern
        self._known: dict[bytes, None] = {}
        """The tags of announcements that were heard, and of own ones: repeated, they are ignored."""
        self._responders: dict[str, InterfaceResponder] = {}
        self._trouble = "not started"
        self._watch: asyncio.Task[None] | None = None
        self._closed = False

    def follow(self, keys: tuple[bytes, ...]) -> None:
        """Announce with the first of `keys` from now on, and accept announcements with any of them."""
        self._keys = keys

    async def start(self) -> None:
        """Announce and ask on every interface, also on those that appear later; `state` says where it fails."""
        await self._try_to_look()
        if not self._closed:
            self._watch = asyncio.create_task(self._keep_looking(), name="covey-mdns")

    async def close(self) -> None:
        """Send a goodbye and free everything. Closing twice, or without `start`, is fine."""
        self._closed, self._trouble = True, "closed"
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.wait([watch])
        responders, self._responders = list(self._responders.values()), {}
        await asyncio.gather(*(responder.close() for responder in responders))

    @property
    def state(self) -> str:
        """One line of text: where the node is announced, or why it is not."""
        doing = "announced on" if self._announce else "listening on"
        working = [name for name, responder in self._responders.items() if responder.works]
        parts = [f"{doing} {', '.join(working)}"] if working else []
        parts += [f"{name}: {error}" for name, responder in self._responders.items() for error in responder.errors]
        return "; ".join(parts + [self._trouble] * bool(self._trouble)) or "nothing is sent yet"

    def observed(self) -> list[Observation]:
        """Return the counters of each interface, best interface first."""
        return [responder.observation() for responder in self._responders.values()]

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(INTERFACES_CHECK_EVERY)
            await self._try_to_look()

    async def _try_to_look(self) -> None:
        try:
            await self._look()
        except OSError as error:  # most likely no free descriptor: the next check may work
            self._trouble = f"the interfaces cannot be looked at: {explain(error)}"

    async def _look(self) -> None:
        """Open and close responders, so that each usable interface has one."""
        present = {interface.name: interface for interface in self._usable()}
        for name, responder in list(self._responders.items()):
            if responder.interface != present.get(name) or not responder.works:
                await responder.close()  # closed before it is removed: if this is cancelled, `close` still finds it
                self._responders.pop(name, None)
        if self._closed:
            return
        for name, interface in present.items():
            if name not in self._responders:
                self._responders[name] = InterfaceResponder(interface, self._heard)
        self._responders = {name: self._responders[name] for name in present}
        for responder in list(self._responders.values()):
            responder.ask_if_silenced()
            if not responder.opened and not self._closed:
                await responder.open(self._txt if self._announce else None, self._port)

    def _usable(self) -> list[Interface]:
        try:
            usable = network.usable_interfaces(self._pattern)
        except ConfigError as error:
            self._trouble = str(error)
            return []
        if usable:
            self._trouble = ""
            return usable
        loopback = network.loopback_interfaces()
        self._trouble = "no network but loopback is up" if loopback else "no network is up"
        return loopback

    def _txt(self, interface: Interface) -> dict[bytes, bytes]:
        """Return an announcement of this node on one of its interfaces, with a fresh tag."""
        made = beacon.make(
            self._keys[0], secrets.token_bytes(beacon.BEACON_NONCE_BYTES), self._port, interface.addresses
        )
        self._is_news(bytes.fromhex(made[b"t"].decode()))
        return made

    def _heard(self, responder: InterfaceResponder, properties: dict[bytes, bytes | None]) -> None:
        read = [beacon.read(key, properties) for key in self._keys]
        said = next((each for each in read if each is not None and each.is_ours), read[0])
        if said is None or self._closed:
            return
        here = responder.interface
        addresses = tuple(Address(ip, said.port) for ip in said.ips if network.on_link(here, ip, here.index))
        if not said.is_ours:
            responder.heard_others(addresses, shows_code=_shows_code(properties))
        elif self._is_news(said.tag) and addresses:
            responder.matching += 1
            self._found(addresses, here.name)

    def _is_news(self, tag: bytes) -> bool:
        """Note the tag of an announcement; tell whether it is new."""
        if tag in self._known:
            return False
        self._known[tag] = None
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return True


def _shows_code(properties: dict[bytes, bytes | None]) -> bool:
    """Tell whether an announcement is of a machine that shows a code for pairing, which any machine may claim."""
    said = beacon.read(beacon.PAIRING_KEY, properties)
    return said is not None and said.is_ours
