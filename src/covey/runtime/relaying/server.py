"""A relay: accepts connections, keeps the registrations of nodes, and joins the two sides of each call.

Any program may use a relay, so every resource is bounded: connections in all and for each source, those that have not
said yet what they want, how often a source may come, the bytes that wait in a pipe, and the bytes a second in all.

`covey relay` is a process of its own; `covey run --relay-limit` has a relay on a thread (`RelayThread`).
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import secrets
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConfigError, CoveyError, RemoteProtocolError
from covey.base.pace import Bucket
from covey.base.version import __version__
from covey.net.host.descriptors import raise_limit
from covey.proto.relay_table import CloseConnection, JoinConnections, RelayEffect, RelayTable, SendTo
from covey.runtime.backoff import LimitedLog
from covey.runtime.links.acceptor import remote_ip
from covey.runtime.links.limits import SourceLimits, source_of
from covey.runtime.links.relayed import keep_alive, receive_message
from covey.runtime.links.sockets import accept_shortage, accepted, no_delay
from covey.runtime.relaying.pipe import Pipe, Throttle
from covey.runtime.tasks import CoreDriver, Tasks
from covey.wire.decoding import frame
from covey.wire.relay import (
    CALL_ID_BYTES,
    RELAY_CHALLENGE_BYTES,
    RELAY_ID_BYTES,
    RELAY_SPEAKS,
    CallToken,
    RegisterToken,
    RelayChallenge,
    RelayEcho,
    RelayMismatch,
    RelayRefusal,
    StillThere,
    TakeCall,
    encode_relay,
    is_proved,
    relay_objection,
)
from covey.wire.versions import RELEASE_LIMIT, only

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Collection, Iterable

    from covey.wire.relay import RelayMessage


logger = logging.getLogger("covey")

RELAY_STRANGER_SECONDS: Final = 5.0
"""How long a connection may take to say what it wants."""
RELAY_STRANGERS_AT_ONCE: Final = 256
STRANGERS_OF_SOURCE: Final = 64
"""Connections that have not said what they want, in all and from one source."""
RELAY_ACCEPTS_AT_ONCE: Final = 32
SPARE_DESCRIPTORS: Final = 32
SWEEP_SECONDS: Final = 2.0
"""How often pipes are checked for dead paths, and for having been idle for too long."""
ECHO_RATE, ECHO_BURST = 2.0, 16.0
"""Echoes for one registration, per second and at once; others are not answered."""
RELAY_LOG_SECONDS: Final = 10.0
"""Shortest time between two log lines about refused connections."""
NOT_PROVED: Final = "the signature is not that of the cluster's key"
NOT_SERVED: Final = "this relay is for another cluster"


@dataclass(frozen=True)
class RelayLimits:
    """What a relay gives."""

    connections: int = 4096
    """In all."""
    of_source: int = 1024
    """From one address, or one network of 64 bits with IPv6."""
    bytes_per_second: float = float("inf")
    """That all pipes copy together, in both directions."""
    idle_seconds: float = 86400.0
    """How long a pipe may carry nothing."""


@dataclass(frozen=True)
class RelayCounts:
    """What a relay does now, and has done."""

    clusters: int
    registrations: int
    pipes: int
    joined: int
    """Pipes since the start."""
    copied: int
    """Bytes since the start."""
    refused: int
    """Connections since the start."""


class RelayServer:
    """A relay on some listening sockets. On the loop on which it is opened."""

    def __init__(
        self,
        listeners: Iterable[socket.socket],
        limits: RelayLimits,
        clusters: Callable[[], Collection[bytes]] | None = None,
    ) -> None:
        """Take ownership of `listeners`; `clusters` returns the public keys of clusters that it serves, if not all."""
        self._listeners, self._limits, self._clusters = list(listeners), limits, clusters
        self._most = min(limits.connections, raise_limit() - SPARE_DESCRIPTORS - len(self._listeners))
        self._id = secrets.token_bytes(RELAY_ID_BYTES)
        self._table = RelayTable(lambda: secrets.token_bytes(CALL_ID_BYTES))
        self._driver = CoreDriver[RelayEffect](self._table, self)
        self._tasks = Tasks("the relay")
        self._throttle = Throttle(limits.bytes_per_second)
        self._arrivals = SourceLimits()
        self._socks: dict[int, socket.socket] = {}
        """By number: connections that are in no pipe."""
        self._attending: dict[int, asyncio.Task[None]] = {}
        """The tasks that read from them."""
        self._sources: dict[socket.socket, str] = {}
        """Source of every connection."""
        self._counts: collections.Counter[str] = collections.Counter()
        """Connections by source."""
        self._strangers: collections.Counter[str] = collections.Counter()
        self._tenants: collections.Counter[str] = collections.Counter()
        """Registrations by source."""
        self._pipes: set[Pipe] = set()
        self._number = self._joined = self._copied = self._refused = 0
        self._log = LimitedLog(RELAY_LOG_SECONDS)
        self._shortage = accept_shortage("the relay")
        self._is_closing = False

    def open(self) -> None:
        """Start to accept connections."""
        for listener in self._listeners:
            listener.setblocking(False)
            self._listen(listener)
        self._tasks.spawn(self._sweep())

    def counts(self) -> RelayCounts:
        """Return what the relay does now, and has done."""
        copied = self._copied + sum(pipe.copied for pipe in self._pipes)
        table = self._table
        return RelayCounts(table.clusters, table.registrations, len(self._pipes), self._joined, copied, self._refused)

    async def close(self) -> None:
        """Stop listening, and close every connection."""
        self._is_closing = True
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        self._driver.close()
        await self._tasks.close()
        for number in list(self._socks):
            self._drop(number)
        for pipe in list(self._pipes):
            pipe.close()
        self._throttle.close()

    # Accepting

    def _listen(self, listener: socket.socket) -> None:
        if not self._is_closing:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for sock in accepted(listener, RELAY_ACCEPTS_AT_ONCE, self._listen, self._shortage):
            source = source_of(remote_ip(sock))
            if problem := self._objection(source):
                self._refuse(sock, source, problem)
                continue
            sock.setblocking(False)
            no_delay(sock)
            keep_alive(sock)
            self._sources[sock] = source
            self._counts[source] += 1
            self._strangers[source] += 1
            self._number += 1
            self._socks[self._number] = sock
            self._attending[self._number] = self._tasks.spawn(self._attend(self._number, sock, source))

    def _objection(self, source: str) -> str:
        """Return why a connection from a source is one too many, or ""."""
        if len(self._sources) >= self._most:
            return f"there are {self._most} connections"
        if self._counts[source] >= self._limits.of_source:
            return f"there are {self._limits.of_source} connections from there"
        if self._strangers[source] >= STRANGERS_OF_SOURCE or self._strangers.total() >= RELAY_STRANGERS_AT_ONCE:
            return "too many have not said what they want"
        if self._arrivals.come(source, time.monotonic(), is_member=self._tenants[source] > 0) is None:
            return "too many come from there"
        return ""

    def _refuse(self, sock: socket.socket, source: str, problem: str) -> None:
        self._refused += 1
        with contextlib.suppress(OSError):
            sock.setblocking(False)
            sock.send(frame(encode_relay(RelayRefusal(problem))))
        sock.close()
        self._log.log(
            logging.WARNING, "refused %d connections; the last one from %s: %s", self._refused, source, problem
        )

    # One connection

    async def _attend(self, number: int, sock: socket.socket, source: str) -> None:
        """Hear what a connection wants; for a registration, until it ends."""
        is_stranger, is_tenant = True, False
        try:
            async with asyncio.timeout(RELAY_STRANGER_SECONDS):
                challenge = secrets.token_bytes(RELAY_CHALLENGE_BYTES)
                release = __version__[:RELEASE_LIMIT]
                said = RelayChallenge(RELAY_SPEAKS.oldest, challenge, self._id, RELAY_SPEAKS, release)
                first = frame(encode_relay(said))
                await asyncio.get_running_loop().sock_sendall(sock, first)
                wanted = await receive_message(sock)
            is_stranger = False
            _forget_one(self._strangers, source)
            if isinstance(wanted, RegisterToken | CallToken) and (problem := self._unproved(wanted, challenge)):
                self._refused += 1
                self._send(number, RelayRefusal(problem))
                raise RemoteProtocolError(problem)
            now = time.monotonic()
            match wanted:
                case TakeCall(call):
                    self._table.taken(number, call)
                    self._driver.settle()
                    return
                case CallToken(cluster, token):
                    self._table.called(number, cluster, token, now)
                    self._driver.settle()
                    return
                case RegisterToken(cluster, token, is_listed):
                    is_tenant = True
                    self._tenants[source] += 1
                    self._table.registered(number, cluster, token, is_listed=is_listed, now=now)
                    self._driver.settle()
                case RelayMismatch(versions, release):
                    raise RemoteProtocolError(relay_objection(RELAY_SPEAKS, __version__, versions, release))
                case _:
                    raise RemoteProtocolError(f"a client began with {type(wanted).__name__}")
            await self._hear_registration(number, sock)
        except (OSError, TimeoutError, CoveyError) as error:
            self._drop(number)
            if not is_tenant:
                self._log.log(
                    logging.INFO, "a connection from %s ended: %s", source, error or "nothing was said in time"
                )
        except BaseException:
            self._drop(number)
            raise
        finally:
            del self._attending[number]
            if is_stranger:
                _forget_one(self._strangers, source)
            if is_tenant:
                _forget_one(self._tenants, source)

    async def _hear_registration(self, number: int, sock: socket.socket) -> None:
        """Note that a registration is there, and answer its echoes, until it ends."""
        echoes = Bucket(ECHO_RATE, ECHO_BURST)
        while number in self._socks:
            said, now = await receive_message(sock), time.monotonic()
            if isinstance(said, RelayEcho):
                if echoes.take(now):
                    self._send(number, said)
            elif not isinstance(said, StillThere):
                raise RemoteProtocolError("a registration said something else than that it is there")
            self._table.heard(number, now)

    def _unproved(self, wanted: RegisterToken | CallToken, challenge: bytes) -> str:
        """Return why a registration or a call is refused, or ""."""
        spoken = wanted.versions if wanted.versions is not None else only(1)
        if reason := relay_objection(RELAY_SPEAKS, __version__, spoken, "of unknown release"):
            return reason[:100]
        if self._clusters is not None and wanted.cluster not in self._clusters():
            return NOT_SERVED
        return "" if is_proved(wanted, challenge) else NOT_PROVED

    def _send(self, number: int, message: RelayMessage) -> None:
        """Send a message; a connection that does not take all of it at once has not read for long, and is closed."""
        sock, data = self._socks.get(number), frame(encode_relay(message))
        if sock is None:
            return
        try:
            is_sent = sock.send(data) == len(data)
        except OSError:
            is_sent = False
        if not is_sent:
            self._drop(number)

    def _drop(self, number: int) -> None:
        """Close a connection that is in no pipe, and forget it. Dropping twice is fine."""
        sock = self._socks.pop(number, None)
        if sock is None:
            return
        self._closed(sock)
        task = self._attending.get(number)
        if task is None or task is asyncio.current_task():
            sock.close()
        else:  # not while the task reads: its descriptor would be free for another connection
            task.add_done_callback(lambda _: sock.close())
            task.cancel()
        self._table.closed(number)
        self._driver.settle()

    def _closed(self, sock: socket.socket) -> None:
        _forget_one(self._counts, self._sources.pop(sock))

    # What the table decides

    def perform(self, effect: RelayEffect) -> None:
        """Perform an effect of the table."""
        match effect:
            case SendTo(number, message):
                self._send(number, message)
            case CloseConnection(number):
                self._drop(number)
            case JoinConnections(caller, taker):
                self._join(caller, taker)

    def settled(self) -> None:
        """All effects are performed."""

    def failed(self, error: ConfigError) -> None:
        """Raise: no effect of this core writes to disk."""
        raise error

    def _join(self, caller: int, taker: int) -> None:
        if caller not in self._socks or taker not in self._socks:  # one of them ended in the meantime
            self._drop(caller)
            self._drop(taker)
            return
        self._joined += 1
        self._pipes.add(Pipe(self._socks.pop(caller), self._socks.pop(taker), self._throttle, self._pipe_ended))

    def _pipe_ended(self, pipe: Pipe) -> None:
        self._pipes.discard(pipe)
        self._copied += pipe.copied
        for sock in pipe.socks:
            self._closed(sock)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            oldest = asyncio.get_running_loop().time() - self._limits.idle_seconds
            for pipe in list(self._pipes):
                if pipe.active_at < oldest or pipe.is_stuck():
                    pipe.close()


def _forget_one(counter: collections.Counter[str], source: str) -> None:
    counter[source] -= 1
    if counter[source] <= 0:
        del counter[source]


RELAY_CLOSE_SECONDS: Final = 5.0
"""How long the relay may take to close its connections."""


class RelayThread:
    """A relay that serves some clusters only. Its loop is not the control loop, which has other work."""

    def __init__(self, listener: socket.socket, limits: RelayLimits, clusters: Callable[[], Collection[bytes]]) -> None:
        """Take ownership of `listener`, and begin; `clusters` returns the public keys of the clusters it serves."""
        self.port: int = listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._server = RelayServer([listener], limits, clusters)
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="covey-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close every connection, and end the thread. Closing twice is fine."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(RELAY_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._server.open()
        try:
            await self._ending.wait()
        finally:
            await self._server.close()
