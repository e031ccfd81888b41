"""The registration of a node with one relay, and how far the relay is. On the control loop."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

from covey.base.config import parse_relay
from covey.base.errors import ConnectError, CoveyError
from covey.base.pace import Bucket, Growing
from covey.net.host.descriptors import explain
from covey.proto.relay_trips import TripSamples
from covey.runtime.backoff import Backoff
from covey.runtime.links.handshake import NO_ANSWER
from covey.runtime.links.link import HANDSHAKE_SECONDS
from covey.runtime.loop import aside
from covey.runtime.peers.endpoint import numeric

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine

    from covey.wire.relay import RelayChallenge, RelayKey, RelayMessage

logger = logging.getLogger("covey")

RELAY_SILENCE: Final = 45.0
"""A relay that says nothing for so long is connected to again: it asks every 15 s whether the node is there."""
RELAY_PAUSES: Final = Growing(0.2, 0.5)
"""Between attempts to reach a relay. They are short: a relay that returns may have to carry a link at once, because
members whose links have ended are lost after `host_silence`."""
GREETING_SECONDS: Final = 1.5
"""How long a relay that was reached before may take to greet this node. A new attempt repeats a lost first packet
sooner than TCP does."""
CALLS_AT_ONCE: Final = 64
CALLS_RATE, CALLS_BURST = 64.0, 256.0
"""Calls of one relay that are taken: at the same time, per second, and at once."""
TOKENS_KNOWN: Final = 512
"""Tokens that a relay has named and that are remembered: it names each once."""
TOKENS_RATE, TOKENS_BURST = 4.0, 256.0
"""New tokens of one relay that are passed on, per second and at once; others are dropped."""
FIRST_ECHOES: Final = 4
FIRST_ECHO_SECONDS: Final = 0.2
ECHO_SECONDS: Final = 2.0
"""How often the round trip to a relay is measured: at first, so that one late answer does not count, and later."""
ECHO_ANSWER_SECONDS: Final = 1.5
"""A relay that has not answered an echo so long after the next one was due is connected to again: its machine may have
lost its network, or this one. TCP would repeat the echo less and less often, and a call that the relay passes on would
wait with it."""


class RegistrationOwner(Protocol):
    """The node that a registration is for."""

    @property
    def token(self) -> bytes: ...
    @property
    def is_listed(self) -> bool: ...
    def is_good(self, key: RelayKey) -> bool: ...
    def is_wanted(self, text: str) -> bool: ...
    def named(self, tokens: list[bytes]) -> None: ...
    def take(self, taking: Callable[[], Coroutine[Any, Any, Any]], done: Callable[[], None]) -> None: ...


class RelayRegistration:
    """The registration of a node with one relay, under one key of its cluster."""

    def __init__(self, node: RegistrationOwner, text: str, key: RelayKey) -> None:
        self.text = text
        self.address: tuple[str, int] | None = None
        """Where the relay was last reached; None before that."""
        self.problem = "not tried yet"
        """Why the node is not registered; empty if it is."""
        self.relay = b""
        """The id that the relay gave itself."""
        self.samples = TripSamples()
        self._node, self._key = node, key
        self._sending = asyncio.Lock()
        self._echoed = asyncio.Event()
        """Set when the relay has answered an echo since the last one was sent."""
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
        self._task = asyncio.current_task()
        tries = Backoff(
            f"the relay {self.text}", RELAY_PAUSES, level=logging.DEBUG
        )  # a line says at once that it is lost
        while self._node.is_good(self._key) and self._node.is_wanted(self.text):
            began = time.monotonic()
            try:
                await self._register()
            except (OSError, TimeoutError, CoveyError) as error:
                words = explain(error) if isinstance(error, OSError) else str(error)
                is_news, self.problem = not self.problem, words or NO_ANSWER
                if is_news:
                    logger.warning("the relay %s is lost: %s", self.text, self.problem)
            if time.monotonic() - began > RELAY_SILENCE:
                tries.worked()
            tries.failed(self.problem)
            await tries.rest()

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
                self.samples.clear()
                await self._attend_and_measure(sock)
        raise problem

    async def _attend_and_measure(self, sock: socket.socket) -> None:
        """Attend to the relay, and measure the round trip, until the connection ends or echoes stay unanswered."""
        both = [asyncio.ensure_future(each) for each in (self._attend(sock), self._measure(sock))]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
            for each in both:
                if each.done():
                    each.result()  # which raises
        finally:
            for each in both:
                each.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _registered(self, address: tuple[str, int]) -> socket.socket:
        from covey.runtime.links.relayed import answer_of, send_message
        from covey.wire.relay import TokenRegistered

        async with asyncio.timeout(HANDSHAKE_SECONDS):
            sock, first = await self._greeted(address)
            try:
                token, is_listed = self._node.token, self._node.is_listed
                heard = first.speaks
                await send_message(sock, self._key.register(first.challenge, token, is_listed=is_listed, heard=heard))
                if not isinstance(await answer_of(sock), TokenRegistered):
                    raise ConnectError("it did not register this node")
                self.relay = first.relay
            except BaseException:
                sock.close()
                raise
            return sock

    async def _greeted(self, address: tuple[str, int]) -> tuple[socket.socket, RelayChallenge]:
        """Connect to the relay; return the connection, and the message with which the relay begins."""
        from covey.runtime.links.relayed import challenged, connect_relay

        async with asyncio.timeout(HANDSHAKE_SECONDS if self.address is None else GREETING_SECONDS):
            sock = await connect_relay(address)
            try:
                return sock, await challenged(sock)
            except BaseException:
                sock.close()
                raise

    async def _measure(self, sock: socket.socket) -> None:
        """Measure the round trip to the relay, again and again; ConnectError once it answers no more."""
        from covey.wire.relay import RelayEcho

        for count in itertools.count():
            number = secrets.randbits(32)
            self._echoed.clear()
            self.samples.asked(number, time.monotonic())
            await self._send(sock, RelayEcho(number))
            await asyncio.sleep(FIRST_ECHO_SECONDS if count < FIRST_ECHOES else ECHO_SECONDS)
            try:
                async with asyncio.timeout(ECHO_ANSWER_SECONDS):  # also after a time in which this process did not run
                    await self._echoed.wait()
            except TimeoutError:
                raise ConnectError("it does not answer") from None

    async def _send(self, sock: socket.socket, message: RelayMessage) -> None:
        from covey.runtime.links.relayed import send_message

        async with self._sending:  # a frame that does not fit into the kernel's buffer is sent in pieces
            await send_message(sock, message)

    async def _attend(self, sock: socket.socket) -> None:
        """Answer the relay until the connection ends, which raises."""
        from covey.runtime.links.relayed import answer_of, take_call
        from covey.wire.relay import IncomingCall, ListedTokens, RelayEcho, StillThere

        assert self.address is not None
        while True:
            async with asyncio.timeout(RELAY_SILENCE):
                try:
                    message = await answer_of(sock)
                except ConnectionError as error:
                    raise ConnectError("it closed the connection") from error
                match message:
                    case StillThere():
                        await self._send(sock, message)
                    case RelayEcho(number):
                        self.samples.answered(number, time.monotonic())
                        self._echoed.set()
                    case ListedTokens(tokens):
                        self._named(tokens)
                    case IncomingCall(call):
                        if self._calls < CALLS_AT_ONCE and self._pace.take(time.monotonic()):
                            self._calls += 1
                            self._node.take(functools.partial(take_call, self.address, call), self._call_done)
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
        self._node.named(news)
