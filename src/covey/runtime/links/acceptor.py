"""The listening sockets of a node: accepts connections, challenges them at the door, and limits how many there are."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import secrets
import socket
import time
from typing import TYPE_CHECKING, Final, TypeAlias

from covey.base.errors import AuthError, ConnectError, CoveyError
from covey.net.discovery.host_rendezvous import check_peer
from covey.net.host.descriptors import is_scarce, track
from covey.net.quic.line import QuicSocket
from covey.runtime.backoff import LimitedLog
from covey.runtime.links.handshake import no_delay, receive_exactly
from covey.runtime.links.limits import Arrival, SourceLimits, source_of
from covey.runtime.links.link import HANDSHAKE_SECONDS, plain_ip
from covey.runtime.links.sockets import RelayedSocket, accept_shortage, accepted
from covey.runtime.tasks import Tasks
from covey.wire import door

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

logger = logging.getLogger("covey")

NODE_STRANGERS_AT_ONCE: Final = 32
"""Connections that may be at the door at the same time; a member needs one round trip there. One too many closes the
oldest connection of the source that has most of them, among sources that no member has or that take more than half of
this number."""
GUESTS_AT_ONCE: Final = 256
"""Connections that have passed the door and are shaking hands: all of them have proved the key."""
NODE_STRANGER_SECONDS: Final = 3.0
TOLD_SECONDS: Final = 30.0
"""Shortest time between two log lines about refused connections, and between two about those without the key."""
NODE_ACCEPTS_AT_ONCE: Final = 16
"""Connections accepted before the loop turns to other events."""
PROBE_LIMIT: Final = 32 << 20
"""Bytes that a probe may send to measure throughput."""
PROBERS_LIMIT: Final = 256
"""Probers whose addresses are remembered."""
PROBER_IPS_LIMIT: Final = 16
PROBER_SECONDS: Final = 60.0
"""How long they are remembered."""


class TurnedAwayError(ConnectError):
    """This process closed a connection because of a limit or a setting. Other ConnectErrors are broken connections."""


LinkTaker: TypeAlias = "Callable[[socket.socket, bytes], Awaitable[None]]"
"""Gets a socket, which it owns from then on, and the challenge with its answer."""
LaneTaker: TypeAlias = "Callable[[socket.socket], Awaitable[None]]"
"""Gets a socket, which it owns from then on."""


class Acceptor:
    """Listens, checks connections at the door, and hands those that prove the key to `on_link` or `on_lane`."""

    def __init__(
        self,
        listeners: Iterable[socket.socket],
        door_key: bytes,
        name: str,
        *,
        allows: Callable[[str], bool] = lambda _ip: True,
        door_keys: Callable[[], tuple[bytes, ...]] | None = None,
        refused: Callable[[str, BaseException], None] = lambda _ip, _error: None,
    ) -> None:
        """Take ownership of `listeners`. `allows` tells whether connections to a local address are accepted.

        `door_keys` returns the keys that are valid at the door, if that changes: two for a while after a secret
        changed. `refused` is called for every refused connection with its address and the reason.
        """
        self._listeners = [track(listener) for listener in listeners]
        self._name, self._allows = name, allows
        self._door_keys = door_keys if door_keys is not None else lambda: (door_key,)
        self._refused = refused
        self._link_taker: LinkTaker | None = None
        self._lane_taker: LaneTaker | None = None
        self.member_ips: set[str] = set()
        """Addresses of members, which the limits favour."""
        self._strangers: dict[socket.socket, asyncio.Task[None]] = {}
        self._guests: dict[socket.socket, asyncio.Task[None]] = {}
        self._tasks = Tasks(f"the acceptor of {name}")
        self._is_closing = False
        self.shortage = accept_shortage(name)
        """Since when connections cannot be accepted for want of a descriptor; read on any thread."""
        self.turned_away = self._without_key = 0
        self.arrivals = SourceLimits()
        self._logs = {level: LimitedLog(TOLD_SECONDS) for level in (logging.WARNING, logging.INFO)}
        self._probers: dict[bytes, dict[str, float]] = {}
        """Probe token -> {source address: time of its last probe}."""

    def give_links(self, taker: LinkTaker) -> None:
        """Give connections for links to `taker` from now on: another one once this process has a seat."""
        self._link_taker = taker

    def give_lanes(self, taker: LaneTaker) -> None:
        """Give connections for lanes to `taker` from now on; before, they are closed."""
        self._lane_taker = taker

    def open(self) -> None:
        """Start to accept connections. On the control loop."""
        for listener in self._listeners:
            self._listen(listener)

    def _listen(self, listener: socket.socket) -> None:
        if not self._is_closing:
            asyncio.get_running_loop().add_reader(listener, self._take_connections, listener)

    def _take_connections(self, listener: socket.socket) -> None:
        for sock in accepted(listener, NODE_ACCEPTS_AT_ONCE, self._listen, self.shortage):
            ip = remote_ip(sock)
            is_member = ip in self.member_ips  # members may come back
            arrival = self._arrive(sock, ip, is_member=is_member)
            if arrival is None or (is_scarce(sock.fileno()) and not is_member):
                sock.close()
                scarce = "this process has few descriptors left"
                self._refuse(TurnedAwayError(scarce if arrival is not None else f"too many come from {ip}"), ip)
                continue
            sock.setblocking(False)
            self._admit(track(sock), arrival)

    def take(self, sock: RelayedSocket | QuicSocket, on_proved: Callable[[], None] = lambda: None) -> None:
        """Take a connection that came through a relay or by QUIC, as if it had been accepted; owns it.

        `on_proved` is called when it has passed the door. On the control loop.
        """
        if self._is_closing:
            sock.close()
        else:
            self._admit(sock, Arrival((), on_proved))  # the relay's registration and the pump have their own limits

    def _admit(self, sock: socket.socket, arrival: Arrival) -> None:
        self._strangers[sock] = self._tasks.spawn(self._at_the_door(sock, arrival))
        if len(self._strangers) > NODE_STRANGERS_AT_ONCE:
            self._close_one(self._strangers, f"more than {NODE_STRANGERS_AT_ONCE} were at the door")

    def _arrive(self, sock: socket.socket, ip: str, *, is_member: bool) -> Arrival | None:
        """Count a connection; None if its source has made too many. The kernel names the user of a unix socket."""
        if sock.family == socket.AF_UNIX:
            return Arrival(())
        return self.arrivals.come(ip, time.monotonic(), is_member=is_member)

    def _close_one(self, crowd: dict[socket.socket, asyncio.Task[None]], reason: str) -> None:
        ips = {sock: remote_ip(sock) for sock in crowd}
        sources = {sock: ip if ip in self.member_ips else source_of(ip) for sock, ip in ips.items()}
        counts = collections.Counter(sources.values())
        greedy = [each for each, count in counts.items() if each not in self.member_ips or 2 * count > len(crowd)]
        greediest = max(greedy or counts, key=lambda source: counts[source])
        oldest = next(sock for sock in crowd if sources[sock] == greediest)
        task = crowd.pop(oldest)
        if crowd is self._strangers:
            task.add_done_callback(
                lambda _: oldest.close()
            )  # a task that was cancelled before it began cannot close it
        task.cancel()
        self._refuse(TurnedAwayError(reason), ips[oldest])

    async def _at_the_door(self, sock: socket.socket, arrival: Arrival) -> None:
        ip = remote_ip(sock)
        try:
            async with asyncio.timeout(NODE_STRANGER_SECONDS):
                said, purpose = await self._hear(sock)
        except (OSError, TimeoutError, CoveyError) as error:
            sock.close()
            self._refuse(error, ip)
            return
        except BaseException:
            sock.close()
            raise
        finally:
            self._strangers.pop(sock, None)
        arrival.proved_key()
        task = asyncio.current_task()
        assert task is not None
        self._guests[sock] = task
        if len(self._guests) > GUESTS_AT_ONCE:
            self._close_one(self._guests, f"more than {GUESTS_AT_ONCE} were shaking hands")
        try:
            if purpose is door.Purpose.LINK and self._link_taker is not None:
                await self._link_taker(sock, said)
            elif purpose is door.Purpose.LANE and self._lane_taker is not None:
                await self._lane_taker(sock)
            elif purpose is door.Purpose.PROBE:
                if not isinstance(sock, RelayedSocket):  # the address is the relay's
                    self._remember_prober(door.bound(said), remote_ip(sock))
                await _serve_probe(sock)
            else:
                sock.close()
        except (OSError, TimeoutError, CoveyError) as error:
            self._refuse(error, ip)
        finally:
            self._guests.pop(sock, None)

    def allows(self, local_ip: str) -> bool:
        """Tell whether connections to a local address are accepted."""
        return self._allows(local_ip)

    async def _hear(self, sock: socket.socket) -> tuple[bytes, door.Purpose]:
        if isinstance(sock, QuicSocket):
            pass  # the pump has asked for the interface
        elif sock.family == socket.AF_UNIX:
            check_peer(sock)
        elif not self._allows(sock.getsockname()[0]):
            raise TurnedAwayError("it came over an interface that is excluded")
        no_delay(sock)
        challenge = secrets.token_bytes(door.CHALLENGE_BYTES)
        await asyncio.get_running_loop().sock_sendall(sock, challenge)
        answer = await receive_exactly(sock, door.DOOR_ANSWER_BYTES)
        *others, last = self._door_keys()
        for key in others:
            with contextlib.suppress(AuthError):
                return challenge + answer, door.check(key, challenge, answer)
        return challenge + answer, door.check(last, challenge, answer)

    def probed_from(self, token: bytes) -> set[str]:
        """Return the addresses from which probes bound to `token` came lately."""
        since = time.monotonic() - PROBER_SECONDS
        return {ip for ip, at in self._probers.get(door.bind(token), {}).items() if at > since}

    def _remember_prober(self, bound: bytes, ip: str) -> None:
        ips = self._probers.pop(bound, {})
        self._probers[bound] = ips
        if ip in ips or len(ips) < PROBER_IPS_LIMIT:
            ips[ip] = time.monotonic()
        if len(self._probers) > PROBERS_LIMIT:
            del self._probers[next(iter(self._probers))]

    def _refuse(self, error: BaseException, ip: str) -> None:
        self.turned_away += 1
        self._refused(ip, error)
        self._without_key += isinstance(error, AuthError)
        level = logging.WARNING if isinstance(error, AuthError) else logging.INFO
        count, last = self.turned_away, error or type(error).__name__
        many = "a connection" if count == 1 else f"{count} connections; the last one"
        self._logs[level].log(level, "%s has refused %s: %s", self._name or "this node", many, last)

    def about_strangers(self) -> str:
        """Return a clause about the connections that did not have the key, or ""."""
        if not self._without_key:
            return ""
        times = "connections were" if self._without_key > 1 else "connection was"
        return f"{self._without_key} {times} refused because they did not have the right key"

    async def close(self) -> None:
        """Stop listening and end every handshake. On the control loop; closing twice is fine."""
        if self._is_closing:
            return
        self._is_closing = True
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        strangers = list(self._strangers)
        await self._tasks.close()
        for sock in strangers:  # a task that was cancelled before it began could not close its own
            if sock not in self._guests:
                sock.close()


def remote_ip(sock: socket.socket) -> str:
    """Return the address that a connection comes from; "" for a unix socket, or if it is broken."""
    if isinstance(sock, QuicSocket):
        return sock.remote_ip
    with contextlib.suppress(OSError, IndexError, TypeError):
        return plain_ip(sock.getpeername()[0])
    return ""


async def _serve_probe(sock: socket.socket) -> None:
    """Send every word of 8 bytes back; after the word `sink` with a length, first receive that many bytes."""
    loop = asyncio.get_running_loop()
    with sock:
        async with asyncio.timeout(2 * HANDSHAKE_SECONDS):
            while True:
                try:
                    word = await receive_exactly(sock, 8)
                except ConnectionError:
                    return
                if word[:4] == b"sink":
                    remaining = min(int.from_bytes(word[4:], "little"), PROBE_LIMIT)
                    scratch = bytearray(1 << 18)
                    while remaining:
                        taken = await loop.sock_recv_into(sock, memoryview(scratch)[:remaining])
                        if not taken:
                            return
                        remaining -= taken
                await loop.sock_sendall(sock, word)
