"""The relays of a node: its registrations there, the calls it takes, and the ways to nodes that are registered. On the
control loop.

A relay is a stranger: what it says is a hint, and what it sends is dropped unless it is a message that it may send. A
node answers a bounded number of its calls, and each has to pass the door like any other connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import ConnectError, CoveyError
from covey.base.pace import Bucket
from covey.base.seeds import parse_relay
from covey.net.descriptors import explain
from covey.runtime.links.handshake import SILENCE
from covey.runtime.links.link import HANDSHAKE_SECONDS
from covey.runtime.links.sockets import RelayedWay
from covey.runtime.loop import aside
from covey.runtime.mesh.endpoint import numeric

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine

    from covey.net.keys.clusters import Cluster
    from covey.runtime.links.acceptor import Acceptor
    from covey.runtime.links.handshake import Where
    from covey.wire.relay import RelayKey
    from covey.wire.secret import ClusterSecret

logger = logging.getLogger("covey")

SILENT_SECONDS: Final = 45.0
"""A relay that says nothing for so long is connected to again: it asks every 15 s whether the node is there."""
FIRST_PAUSE: Final = 0.2
PAUSE_LIMIT: Final = 3.0
"""Longest pause between attempts to reach a relay."""
CALLS_AT_ONCE: Final = 64
CALLS_RATE, CALLS_BURST = 64.0, 256.0
"""Calls of one relay that are taken: at the same time, per second, and at once."""
NEAR_SECONDS: Final = 1.0
"""How long a node that a relay names is left to multicast, seeds and other nodes, which find direct ways. The node with
the larger token waits longer, so that one of two nodes dials."""
FAR_SECONDS: Final = 3.0
TOKENS_KNOWN: Final = 512
"""Tokens that a relay has named and that are remembered: it names each once."""
TOKENS_RATE, TOKENS_BURST = 4.0, 256.0
"""New tokens of one relay that are passed on, per second and at once; others are dropped."""
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
        """Return the ways to the node that has registered `token`, through each relay that this node has reached."""
        if not token or token == self._token:
            return []
        reached = [
            (*each.address, key, token)
            for cluster, key in self._keys.items()
            for (_, of_cluster), each in self._registrations.items()
            if each.address is not None and cluster == of_cluster
        ]
        return [RelayedWay(*each) for each in dict.fromkeys(reached)]

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
        self._spawn(self._pass_on(NEAR_SECONDS, near))
        self._spawn(self._pass_on(FAR_SECONDS, far))

    async def _pass_on(self, pause: float, tokens: list[bytes]) -> None:
        if tokens:
            await asyncio.sleep(pause)
            for token in tokens:
                self._found(token)

    def take(self, taking: Coroutine[Any, Any, socket.socket], done: Callable[[], None]) -> None:
        """Give the acceptor the connection of a call when it is joined; call `done` then, or if it is not."""
        self._spawn(self._take(taking, done))

    async def _take(self, taking: Coroutine[Any, Any, Any], done: Callable[[], None]) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                sock = await taking
            self._acceptor.take(sock)
        except (OSError, TimeoutError, CoveyError) as error:  # the caller has given up, most likely
            logger.info("a call through a relay was not taken: %s", error or "no answer in time")
        finally:
            done()


class RelayRegistration:
    """The registration of a node with one relay, under one key of its cluster."""

    def __init__(self, relays: Relays, text: str, key: RelayKey) -> None:
        self.text = text
        self.address: tuple[str, int] | None = None
        """Where the relay was last reached; None before that."""
        self.problem = "not tried yet"
        """Why the node is not registered; empty if it is."""
        self._relays, self._key = relays, key
        self._known: dict[bytes, None] = {}
        self._calls, self._pace = 0, Bucket(CALLS_RATE, CALLS_BURST)
        self._naming = Bucket(TOKENS_RATE, TOKENS_BURST)
        self._task: asyncio.Task[None] | None = None

    def end(self) -> None:
        """Register no more."""
        if self._task is not None:
            self._task.cancel()

    async def keep(self) -> None:
        """Register, again whenever the connection ends, while the key is good and the relay wanted."""
        self._task, pause = asyncio.current_task(), FIRST_PAUSE
        while self._relays.is_good(self._key) and self._relays.is_wanted(self.text):
            began = time.monotonic()
            try:
                await self._register()
            except (OSError, TimeoutError, CoveyError) as error:
                words = explain(error) if isinstance(error, OSError) else str(error)
                is_news, self.problem = not self.problem, words or SILENCE
                if is_news:
                    logger.warning("the relay %s is lost: %s", self.text, self.problem)
            if time.monotonic() - began > SILENT_SECONDS:
                pause = FIRST_PAUSE
            await asyncio.sleep(pause)
            pause = min(PAUSE_LIMIT, 2 * pause)

    async def _register(self) -> None:
        """Connect to the first address of the relay that works, register, and attend to it until it ends."""
        addresses = await aside(numeric, *parse_relay(self.text))
        problem: Exception = ConnectError("it has no address")
        for each in addresses:
            try:
                sock = await self._registered((each.ip, each.port))
            except (OSError, TimeoutError, CoveyError) as error:
                problem = error
                continue
            with sock:
                self.address, self.problem = (each.ip, each.port), ""
                self._known.clear()
                await self._attend(sock)
        raise problem

    async def _registered(self, address: tuple[str, int]) -> socket.socket:
        from covey.runtime.links.relayed import answer_of, challenged, connect_relay, send_message
        from covey.wire.relay import TokenRegistered

        async with asyncio.timeout(HANDSHAKE_SECONDS):
            sock = await connect_relay(address)
            try:
                challenge = await challenged(sock)
                token, is_listed = self._relays.token, self._relays.is_listed
                await send_message(sock, self._key.register(challenge, token, is_listed=is_listed))
                if not isinstance(await answer_of(sock), TokenRegistered):
                    raise ConnectError("it did not register this node")
            except BaseException:
                sock.close()
                raise
            return sock

    async def _attend(self, sock: socket.socket) -> None:
        """Answer the relay until the connection ends, which raises."""
        from covey.runtime.links.relayed import answer_of, send_message, take_call
        from covey.wire.relay import IncomingCall, ListedTokens, StillThere

        assert self.address is not None
        while True:
            async with asyncio.timeout(SILENT_SECONDS):
                try:
                    message = await answer_of(sock)
                except ConnectionError as error:
                    raise ConnectError("it closed the connection") from error
                match message:
                    case StillThere():
                        await send_message(sock, message)
                    case ListedTokens(tokens):
                        self._named(tokens)
                    case IncomingCall(call):
                        if self._calls < CALLS_AT_ONCE and self._pace.take(time.monotonic()):
                            self._calls += 1
                            self._relays.take(take_call(self.address, call), self._call_done)
                    case _:
                        raise ConnectError(f"it sent {type(message).__name__} to a registered node")

    def _call_done(self) -> None:
        self._calls -= 1

    def _named(self, tokens: tuple[bytes, ...]) -> None:
        now = time.monotonic()
        news = [token for token in tokens if token not in self._known and self._naming.take(now)]
        self._known.update(dict.fromkeys(news))
        for oldest in list(self._known)[:-TOKENS_KNOWN]:
            del self._known[oldest]
        self._relays.named(news)
