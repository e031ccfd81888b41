"""Multicast DNS: nodes of one cluster on one network hear of each other without an address being typed.

Each usable interface has a responder of its own, so that one which forbids multicast harms no other, what is announced
on a network are the addresses there, and what was sent and heard can be told apart for `doctor`.

What is heard is a hint where a node may be. It proves nothing, and silence proves nothing either. An address is taken
only from an announcement that a holder of the cluster's secret made, only once, and only if it is on the network of the
interface where it was heard: multicast leads no further than the next machine.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError
from covey.net.descriptors import explain
from covey.net.discovery import interfaces as network
from covey.net.discovery.responder import InterfaceResponder, Observation
from covey.wire import beacon
from covey.wire.messages import Address

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.net.discovery.interfaces import Interface

__all__ = ["Beacon", "Observation"]

LOOK_EVERY: Final = 2.0
"""Seconds between looks at the interfaces."""
MOST_FOREIGN: Final = 16
MOST_KNOWN: Final = 4096
"""Announcements remembered. A node makes one a minute; who repeats older ones than these is bounded where it is led."""


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
        """Prepare it; nothing is sent before `start`.

        `found` is called on the loop with the addresses of each announcement that a holder of `key` made, and the name
        of the interface where it was heard: all of them can be reached by that one. An announcement that is repeated
        is passed over. Without `announce` it only listens.

        Raises:
            ConfigError: `interfaces_pattern` is not a pattern.
        """
        network.parse_pattern(interfaces_pattern)
        self._keys: tuple[bytes, ...] = (key,)
        """Announcements are made under the first, and taken under any."""
        self._port, self._found, self._announce = port, found, announce
        self._pattern = interfaces_pattern
        self._known: dict[bytes, None] = {}
        """The tags of announcements heard, and of our own: repeated, they are no news."""
        self._stations: dict[str, InterfaceResponder] = {}
        self._trouble = "not started"
        self._watch: asyncio.Task[None] | None = None
        self._closed = False

    def follow(self, keys: tuple[bytes, ...]) -> None:
        """Announce under the first of `keys` from now on, and take announcements under any of them."""
        self._keys = keys

    async def start(self) -> None:
        """Announce and ask, now and whenever an interface comes; see `state` where that is not possible."""
        await self._try_to_look()
        if not self._closed:
            self._watch = asyncio.create_task(self._keep_looking(), name="covey-mdns")

    async def close(self) -> None:
        """Say goodbye and free everything. Closing twice, or what was never started, is fine."""
        self._closed, self._trouble = True, "closed"
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.wait([watch])
        stations, self._stations = list(self._stations.values()), {}
        await asyncio.gather(*(station.close() for station in stations))

    @property
    def state(self) -> str:
        """One line for people: where the node is announced, or why it is not."""
        doing = "announced on" if self._announce else "listening on"
        working = [name for name, station in self._stations.items() if station.works]
        parts = [f"{doing} {', '.join(working)}"] if working else []
        parts += [f"{name}: {error}" for name, station in self._stations.items() for error in station.errors]
        return "; ".join(parts + [self._trouble] * bool(self._trouble)) or "nothing is sent yet"

    def observed(self) -> list[Observation]:
        """Return what was sent and heard, interface by interface, best first."""
        return [station.observation() for station in self._stations.values()]

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            await self._try_to_look()

    async def _try_to_look(self) -> None:
        try:
            await self._look()
        except OSError as error:  # out of descriptors, most likely: the next look may work
            self._trouble = f"the interfaces cannot be looked at: {explain(error)}"

    async def _look(self) -> None:
        """Have a station on each interface as it is now."""
        present = {interface.name: interface for interface in self._usable()}
        for name, station in list(self._stations.items()):
            if station.interface != present.get(name) or not station.works:
                await station.close()  # before it is forgotten: if this is cancelled, `close` finds it
                self._stations.pop(name, None)
        if self._closed:
            return
        for name, interface in present.items():
            if name not in self._stations:
                self._stations[name] = InterfaceResponder(interface, self._heard)
        self._stations = {name: self._stations[name] for name in present}
        for station in list(self._stations.values()):
            station.ask_if_silenced()
            if not station.opened and not self._closed:
                await station.open(self._txt if self._announce else None, self._port)

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
        made = beacon.make(self._keys[0], secrets.token_bytes(beacon.NONCE_BYTES), self._port, interface.addresses)
        self._is_news(bytes.fromhex(made[b"t"].decode()))
        return made

    def _heard(self, station: InterfaceResponder, properties: dict[bytes, bytes | None]) -> None:
        read = [beacon.read(key, properties) for key in self._keys]
        said = next((each for each in read if each is not None and each.is_ours), read[0])
        if said is None or self._closed:
            return
        here = station.interface
        places = tuple(Address(ip, said.port) for ip in said.ips if network.on_link(here, ip, here.index))
        if not said.is_ours:
            station.foreign = tuple(dict.fromkeys((*station.foreign, *places)))[-MOST_FOREIGN:]
        elif self._is_news(said.tag) and places:
            station.matching += 1
            self._found(places, here.name)

    def _is_news(self, tag: bytes) -> bool:
        """Note an announcement; tell whether it was not heard before."""
        if tag in self._known:
            return False
        self._known[tag] = None
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return True
