"""Finds addresses of nodes: by multicast, in the host registry, and from seeds. On the control loop."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from covey.base.config import parse_seed
from covey.base.errors import CoveyError
from covey.base.pace import Growing
from covey.net.discovery.host_registry import HostRegistry
from covey.net.discovery.mdns import Beacon
from covey.runtime.backoff import Backoff
from covey.runtime.loop import aside
from covey.runtime.peers.endpoint import local_tag, numeric
from covey.runtime.peers.hints import Hint, Origin
from covey.wire.messages import Address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from covey.net.keys.clusters import Cluster
    from covey.wire.messages import Card

REGISTRY_SECONDS: Final = 0.2
"""How often the host registry is read while a node waits for others."""
RUNNING_REGISTRY_SECONDS: Final = 2.0
"""How often it is read once the run has formed."""
SEED_PAUSES: Final = Growing(0.1, 1.0)
"""Before a seed that did not answer is tried again."""


class Search:
    """Announces this node, and finds addresses of others. All of them are hints: only a handshake proves a node."""

    def __init__(
        self,
        cluster: Cluster,
        card: Card,
        interfaces: str,
        host_registry: HostRegistry,
        *,
        found: Callable[[Hint, Origin], None],
        try_seed: Callable[[str, tuple[Address, ...]], Awaitable[None]],
        needs_seeds: Callable[[], bool] = lambda: True,
        announce: bool = True,
    ) -> None:
        """Call `found` with each hint, and `try_seed` to dial a seed while `needs_seeds()`.

        Without `announce`, this node is not announced.
        """
        self._port, self._socket = card.contact.addresses[0].port, card.contact.socket
        self._seeds = cluster.seeds
        self._found, self._try_seed, self._announces = found, try_seed, announce
        self._needs_seeds = needs_seeds
        self.beacon = Beacon(cluster.secret.derive("mdns"), self._port, interfaces, self._heard, announce=announce)
        self._host_registries = {local_tag(cluster.secret): host_registry}
        """By tag, which is derived from the secret: a new secret adds a registry."""
        self.follow(cluster)
        self._registry_seconds = REGISTRY_SECONDS
        self.problems: dict[str, str] = {}
        """What failed, by seed, or under `multicast` or `this host`."""

    def follow(self, cluster: Cluster) -> None:
        """Search by the cluster's secret as it is now, and by the one before while that is good.

        Raises:
            ConfigError: the folder of a host registry cannot be made.
        """
        earlier = cluster.earlier(time.time())
        known = (cluster.secret,) if earlier is None else (cluster.secret, earlier)
        self.beacon.follow(tuple(secret.derive("mdns") for secret in known))
        for tag in map(local_tag, known):
            if tag not in self._host_registries:
                self._host_registries[tag] = HostRegistry(tag)

    def foreign_ips(self) -> tuple[str, ...]:
        """Return where nodes announce themselves that have another secret, each machine's addresses as it gave them."""
        return tuple(dict.fromkeys(each.ip for seen in self.beacon.observed() for each in seen.foreign))

    def slow_down(self) -> None:
        """Read the host registry less often from now on: the run has formed."""
        self._registry_seconds = RUNNING_REGISTRY_SECONDS

    async def run(self) -> None:
        """Search until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read_host_registries())
                group.create_task(self._announce())
                for seed in self._seeds:
                    group.create_task(self._keep_trying(seed))
        finally:
            for host_registry in self._host_registries.values():
                host_registry.close()
            await self.beacon.close()

    def _heard(self, addresses: tuple[Address, ...], interface: str) -> None:
        self._found(Hint(addresses, interface=interface), Origin.MULTICAST)

    async def _announce(self) -> None:
        try:
            await self.beacon.start()
        except (OSError, CoveyError) as error:  # the rest of the search works, and `covey doctor` explains
            self.problems["multicast"] = str(error)

    async def _read_host_registries(self) -> None:
        announced: set[str] = set()
        while True:
            try:
                for tag, host_registry in list(self._host_registries.items()):
                    if self._announces and tag not in announced:
                        host_registry.announce(self._port, self._socket)
                        announced.add(tag)
                    for other in host_registry.others():
                        here = Hint((Address("127.0.0.1", other.port, "lo"),), same_host=True)
                        self._found(here, Origin.HOST)
                self.problems.pop("this host", None)
            except (OSError, CoveyError) as error:  # such as a full disk: the next try may work
                self.problems["this host"] = str(error)
            await asyncio.sleep(self._registry_seconds)

    async def _keep_trying(self, seed: str) -> None:
        tries = Backoff(f"the seed {seed}", SEED_PAUSES, level=logging.DEBUG)  # `problems` tells
        while True:
            try:
                if self._needs_seeds():
                    addresses = await aside(seed_addresses, seed)
                    self.problems.pop(seed, None)
                    await self._try_seed(seed, addresses)
            except (OSError, CoveyError) as error:  # the next try may work, and the rest of the search goes on
                self.problems[seed] = str(error).removeprefix(f"{seed.partition(':')[0]}: ")
            tries.failed(self.problems.get(seed, ""))
            await tries.rest()


def seed_addresses(seed: str) -> tuple[Address, ...]:
    """Return the addresses of a seed.

    Raises:
        ConfigError: the text is no seed.
        ConnectError: there is no such host.
    """
    return numeric(*parse_seed(seed))
