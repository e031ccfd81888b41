"""The relays of a node: its registrations there, the calls it takes, and the ways to nodes that are registered. On the
control loop.

A relay is a stranger: what it says is a hint, and what it sends is dropped unless it is a message that it may send. A
node answers a bounded number of its calls, and each has to pass the door like any other connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import CoveyError
from covey.proto.relay_trips import ToldTrips, is_clearly_shorter, is_news, to_tell
from covey.runtime.links.link import HANDSHAKE_SECONDS, Link, plain_ip
from covey.runtime.links.sockets import RelayedWay
from covey.runtime.peers.relay_registration import RelayRegistration
from covey.wire.messages import RelayTrip, RelayTrips

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from covey.net.keys.clusters import Cluster
    from covey.runtime.links.acceptor import Acceptor
    from covey.runtime.links.handshake import Where
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.wire.relay import RelayKey
    from covey.wire.secret import ClusterSecret

logger = logging.getLogger("covey")

NEAR_WAIT_SECONDS: Final = 1.0
"""How long a node that a relay names is left to multicast, seeds and other nodes, which find direct ways. The node with
the larger token waits longer, so that one of two nodes dials."""
FAR_WAIT_SECONDS: Final = 3.0
OFFERS_LIMIT: Final = 4
"""Relays of other nodes that are used: the first ones."""


class Relays:
    """What a node does with its relays. Without relays, nothing."""

    def __init__(
        self,
        cluster: Cluster,
        token: bytes,
        acceptor: Acceptor,
        *,
        found: Callable[[bytes], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        is_listed: bool = True,
    ) -> None:
        """Prepare; `open` begins. `found` gets the tokens of other nodes. Without `is_listed`, they are not told of
        this node.
        """
        self._texts, self._token, self._acceptor = cluster.relays if token else (), token, acceptor
        self._cluster = cluster
        self._offers: dict[bytes, str] = {}
        """By node: the address of a relay that it offers."""
        self._found, self._spawn, self._is_listed = found, spawn, is_listed
        self._registrations: dict[tuple[str, bytes], RelayRegistration] = {}
        """By address as written, and key of the cluster."""
        self._by_secret: dict[ClusterSecret, RelayKey] = {}
        self._keys: dict[bytes, RelayKey] = {}
        """By their public half, those that are good now, the preferred first."""
        self._told = ToldTrips()
        self._told_on = weakref.WeakKeyDictionary[Link, tuple[RelayTrip, ...]]()
        """By link through a relay: what was told on it."""
        self._is_open = False
        self.follow(cluster)

    @property
    def problems(self) -> dict[str, str]:
        """Why relays of the settings do not work now, by address as written."""
        known = (each for each in self._registrations.values() if each.text in self._texts)
        return {each.text: each.problem for each in known if each.problem}

    def follow(self, cluster: Cluster) -> None:
        """Use the cluster's secret as it is now, and the one before while that is good."""
        self._cluster, texts = cluster, (*self._texts, *self._offers.values())
        if not texts:
            return
        from covey.wire.relay import RelayKey  # slow to load, and not needed without relays

        good = [secret for secret in (cluster.secret, cluster.earlier(time.time())) if secret is not None]
        self._by_secret = {secret: self._by_secret.get(secret) or RelayKey(secret) for secret in good}
        keys = list(self._by_secret.values())
        self._keys = {key.cluster: key for key in keys}
        for expired in [each for each in self._registrations if each[1] not in self._keys]:
            self._registrations.pop(expired).end()
        for text in texts:
            for key in keys:
                if (text, key.cluster) not in self._registrations:
                    self._registrations[text, key.cluster] = made = RelayRegistration(self, text, key)
                    if self._is_open:
                        self._spawn(made.keep())

    def offered(self, node: bytes, ip: str, port: int) -> None:
        """Use the relay that a linked node offers at the address its link leads to, if there are not enough yet."""
        if port and self._token and node not in self._offers and len(self._offers) < OFFERS_LIMIT:
            self._offers[node] = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
            self.follow(self._cluster)

    def withdrawn(self, node: bytes) -> None:
        """Use the relay of a node no more: the links with it have ended."""
        text = self._offers.pop(node, "")
        if text and not self.is_wanted(text):
            for key in [key for key in self._registrations if key[0] == text]:
                self._registrations.pop(key).end()

    def is_wanted(self, text: str) -> bool:
        """Tell whether a relay is one of the settings, or offered."""
        return text in self._texts or text in self._offers.values()

    def open(self) -> None:
        """Register, and keep the registrations."""
        self._is_open = True
        for each in self._registrations.values():
            self._spawn(each.keep())

    def ways(self, token: bytes) -> list[Where]:
        """Return the ways to the node that has registered `token`, through each relay that this node has reached.

        The shortest comes first: of both nodes together, if the other one has told its round trips. Relays with which
        this node is not registered now come last.
        """
        if not token or token == self._token:
            return []
        reached = [
            (*each.address, key, token)
            for cluster, key in self._keys.items()
            for (_, of_cluster), each in self._registrations.items()
            if each.address is not None and cluster == of_cluster
        ]
        ways = [RelayedWay(*each) for each in dict.fromkeys(reached)]
        own = self._own_trips()
        ordered = sorted(ways, key=lambda way: self._order(way, own))
        return [*ordered]

    def _order(self, way: RelayedWay, own: dict[bytes, float]) -> tuple[bool, float, float]:
        relay = self._relay_at(_text(way))
        here, there = own.get(relay), self._told.of(way.token, relay)
        both = here + there if here is not None and there is not None else float("inf")
        return not relay, both, float("inf") if here is None else here

    def round_trip(self, way: Where) -> float | None:
        """Return the seconds from this node through a relay to another and back; None if they are not known."""
        return self.trip_by(_text(way), way.token) if isinstance(way, RelayedWay) else None

    def trip_by(self, address: str, token: bytes) -> float | None:
        """Return the round trip to the node of a token through the relay at an address; None if it is not known."""
        relay = self._relay_at(address)
        here, there = self._own_trips().get(relay), self._told.of(token, relay)
        return here + there if here is not None and there is not None else None

    def is_shorter(self, token: bytes, address: str, used: str) -> bool | None:
        """Tell whether one relay leads to a node clearly sooner than another; None if that is not known."""
        one, other = self.trip_by(address, token), self.trip_by(used, token)
        return None if one is None or other is None else is_clearly_shorter(one, other)

    def shorter(self, token: bytes, used: str) -> RelayedWay | None:
        """Return the best way to a node, if it is clearly shorter than the one through the relay at `used`."""
        best = next(iter(self.ways(token)), None)
        if not isinstance(best, RelayedWay) or not self.is_shorter(token, _text(best), used):
            return None
        return best

    def trips(self) -> tuple[RelayTrip, ...]:
        """Return the relays with which this node is registered, and how far they are, to tell other nodes."""
        return to_tell(self._own_trips())

    def tell(self, linked: Iterable[RemoteProcess]) -> None:
        """Tell processes whose links go through relays how far the relays are, if that is news on the link."""
        trips = self.trips()
        for each in linked:
            if (link := each.link) is not None and link.relay:
                before = self._told_on.get(link)
                if before is None or is_news(before, trips):
                    self._told_on[link] = trips
                    each.send(RelayTrips(trips))

    def told(self, token: bytes, trips: tuple[RelayTrip, ...]) -> None:
        """Note how far the relays of another node are from there."""
        if token:
            self._told.told(token, trips)

    def forget(self, token: bytes) -> None:
        """Forget how far the relays of another node are from there."""
        self._told.forget(token)

    def _own_trips(self) -> dict[bytes, float]:
        """Return how far each relay is from here, by its id; one may have several addresses, and several keys."""
        own: dict[bytes, float] = {}
        now = time.monotonic()
        for each in self._registrations.values():
            taken = None if each.problem or not each.relay else each.samples.shortest(now)
            if taken is not None:
                own[each.relay] = min(taken, own.get(each.relay, taken))
        return own

    def _relay_at(self, address: str) -> bytes:
        """Return the id of the relay at an address; empty if this node is not registered there now."""
        at = (each for each in self._registrations.values() if not each.problem and each.address is not None)
        return next((each.relay for each in at if each.address is not None and _text(each.address) == address), b"")

    # What a registration reports

    @property
    def token(self) -> bytes:
        """This node's own token."""
        return self._token

    @property
    def is_listed(self) -> bool:
        """Whether other nodes are told of the token."""
        return self._is_listed

    def is_good(self, key: RelayKey) -> bool:
        """Tell whether a key is still one of the cluster's."""
        return key.cluster in self._keys

    def named(self, tokens: list[bytes]) -> None:
        """Note tokens of other nodes, and pass them on a little later."""
        near = [token for token in tokens if self._token < token]
        far = [token for token in tokens if self._token > token]
        self._spawn(self._pass_on(NEAR_WAIT_SECONDS, near))
        self._spawn(self._pass_on(FAR_WAIT_SECONDS, far))

    async def _pass_on(self, pause: float, tokens: list[bytes]) -> None:
        if tokens:
            await asyncio.sleep(pause)
            for token in tokens:
                self._found(token)

    def take(self, taking: Callable[[], Coroutine[Any, Any, Any]], done: Callable[[], None]) -> None:
        """Give the acceptor the connection of a call when it is joined; call `done` then, or if it is not."""
        self._spawn(self._take(taking, done))

    async def _take(self, taking: Callable[[], Coroutine[Any, Any, Any]], done: Callable[[], None]) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                sock = await taking()
            self._acceptor.take(sock)
        except (OSError, TimeoutError, CoveyError) as error:  # the caller has given up, most likely
            logger.info("a call through a relay was not taken: %s", error or "no answer in time")
        finally:
            done()


def _text(address: Where) -> str:
    """Return the address of a relay as links name it."""
    return f"{plain_ip(address[0])}:{address[1]}"
