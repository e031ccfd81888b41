"""Multicast DNS on one interface: announces a node, reads announcements of others, and counts packets.

zeroconf owns the sockets, announces, and answers questions. It sees no answers but those of this process: announcements
of others are read here, packet by packet, and not stored, so that a flood of forged ones fills no table.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import itertools
import os
import secrets
import socket
import struct
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from zeroconf import (  # type: ignore[attr-defined]  # all of them offered, not all of them in its __all__
    DNSIncoming,
    DNSOutgoing,
    DNSQuestion,
    DNSText,
    NotRunningException,
    Zeroconf,
)
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from covey.net.discovery.interfaces import on_link
from covey.net.discovery.sieve import Sieve, is_response
from covey.wire import beacon

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from covey.net.discovery.interfaces import Interface
    from covey.wire.messages import Address

QUERY_AT: Final = (0.0, 0.25, 1.0, 3.0, 10.0, 30.0)
"""Seconds after the start when all nodes on the network are asked to answer; then every QUERY_EVERY seconds."""
QUERY_EVERY: Final = 60.0
TTL: Final = 20
"""Seconds that others keep an announcement: a killed node sends no goodbye."""
RENEW_SECONDS: Final = 60.0
"""How often a node is announced again, under a fresh tag: nodes that could not reach it try again then."""
MOST_FOREIGN: Final = 16
"""Addresses of others that are remembered: the latest."""
MOST_READ: Final = 4
"""Announcements that are read from one packet: a node sends one at a time."""

_MDNS_PORT: Final = 5353
_GROUP4, _GROUP6 = "224.0.0.251", "ff02::fb"
_QUESTION: Final = (beacon.SERVICE, 12, 1)  # PTR, IN: answers are multicast


@dataclasses.dataclass(frozen=True)
class Observation:
    """Counters of multicast on one interface."""

    interface: str
    announced: bool
    """Whether the node is announced there now."""
    sent: int
    """Packets sent."""
    heard: int
    """Packets of other machines, about covey or not."""
    dropped: int
    """Packets about covey that were not read: too many, or of an unusual size."""
    matching: int
    """Announcements made with this cluster's key, each counted once."""
    foreign: tuple[Address, ...]
    """The addresses of nodes with another key."""
    errors: tuple[str, ...]
    pairing: tuple[Address, ...] = ()
    """The addresses of machines that show a code for pairing."""


class InterfaceResponder:
    """The responder of one interface."""

    def __init__(
        self, interface: Interface, hear: Callable[[InterfaceResponder, dict[bytes, bytes | None]], None]
    ) -> None:
        """`hear` gets the properties of every announcement on this interface, of any cluster."""
        self.interface = interface
        self.opened = self.works = self.announced = False
        self.sent = self.heard = self.matching = 0
        self.foreign: tuple[Address, ...] = ()
        self.pairing: tuple[Address, ...] = ()
        self._hindrances: list[str] = []
        self._failures: list[str] = []
        self._ways = 0
        self._ask: Callable[[], None] | None = None
        self._hear = hear
        self._sieve = Sieve()
        self._echoes: deque[bytes] = deque(maxlen=32)
        self._responder: _Responder | None = None
        self._tasks: set[asyncio.Future[Any]] = set()
        self._closed = False
        _open_responders.add(self)

    async def open(self, make_txt: Callable[[Interface], dict[bytes, bytes]] | None, port: int) -> None:
        """Listen, ask, and announce the properties that `make_txt` returns, if given; problems are in `errors`."""
        self.opened = True
        ways = self._open_ways()
        if not ways:
            return
        try:
            self._responder = _Responder(ways, self)
            await self._responder.async_wait_for_start()
        except (OSError, RuntimeError, NotRunningException) as error:
            return self._hindrances.append(f"multicast DNS did not start: {error}")
        if self._closed:
            return
        if not self._responder.engine.senders:
            return self._hindrances.append("none of its addresses can be sent from yet")
        self._listen_in(self._responder)
        random = secrets.token_hex(8)  # the name of the service and of the host: random, to reveal nothing
        info = self._info(random, make_txt, port)
        self._ask = functools.partial(self._responder.ask_all_but, info)
        self._ways = len(self._responder.engine.senders)
        self._spawn(self._keep_asking(self._ask))
        if make_txt is not None:
            try:
                self._spawn(await self._responder.async_register_service(info, cooperating_responders=True))
            except NotRunningException:
                return  # closed in the meantime
            self._spawn(self._keep_announcing(self._responder, random, make_txt, port))
            self.announced = True
        self.works = True

    def _info(
        self, name: str, make_txt: Callable[[Interface], dict[bytes, bytes]] | None, port: int
    ) -> AsyncServiceInfo:
        return AsyncServiceInfo(
            beacon.SERVICE,
            f"{name}.{beacon.SERVICE}",
            port=port,
            properties=dict(make_txt(self.interface)) if make_txt is not None else {},
            server=f"{name}.local.",
            parsed_addresses=list(self.interface.addresses[: beacon.ANNOUNCED_ADDRESSES]),
            host_ttl=TTL,
            other_ttl=TTL,
        )

    async def _keep_announcing(
        self, responder: _Responder, name: str, make_txt: Callable[[Interface], dict[bytes, bytes]], port: int
    ) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            with contextlib.suppress(NotRunningException):
                await (await responder.async_update_service(self._info(name, make_txt, port)))

    async def close(self) -> None:
        """Send a goodbye and free everything; may be called again, also after it was cancelled."""
        self._closed, self._ask = True, None
        self.works = self.announced = False
        for task in list(self._tasks):
            await _cancelled(task)
        if self._responder is not None:
            goodbye = self._responder.generate_unregister_all_services()
            if goodbye is not None:  # once: zeroconf would send it three times, in a quarter of a second
                self._responder.async_send(goodbye)
            await AsyncZeroconf(zc=self._responder).async_close()

    def observation(self) -> Observation:
        """Return the counters as they are now."""
        return Observation(
            interface=self.interface.name,
            announced=self.announced,
            sent=self.sent,
            heard=self.heard,
            dropped=self._sieve.dropped,
            matching=self.matching,
            foreign=self.foreign,
            errors=self.errors,
            pairing=self.pairing,
        )

    def heard_others(self, addresses: tuple[Address, ...], *, shows_code: bool) -> None:
        """Note the addresses of an announcement that was not made with this cluster's key."""
        if shows_code:
            self.pairing = tuple(dict.fromkeys((*self.pairing, *addresses)))[-MOST_FOREIGN:]
        else:
            self.foreign = tuple(dict.fromkeys((*self.foreign, *addresses)))[-MOST_FOREIGN:]

    @property
    def errors(self) -> tuple[str, ...]:
        """Why it does not work, and how the last send failed, if it did."""
        return tuple(dict.fromkeys((*self._hindrances, *self._failures)))

    def ask_if_silenced(self) -> None:
        """Ask again, if nothing could be sent the last time."""
        if self._ask is not None and len(self._failures) >= self._ways:
            self._ask()

    def sending(self, packets: list[bytes], copies: int) -> None:
        self.sent += len(packets) * copies
        self._echoes.extend(packets)
        self._failures.clear()

    def failed(self, error: Exception) -> None:
        if len(self._failures) < self._ways:
            self._failures.append(f"sending failed: {error}")

    def receives(self, packet: bytes, source: tuple[Any, ...]) -> bool:
        """Read a packet; tell whether zeroconf has to see it: questions, and packets that it sent itself.

        On Linux, a socket receives packets of all groups that any process joined on any interface, so packets of other
        interfaces are ignored here. IP_MULTICAST_ALL=0 would prevent that, but since Linux 6.6 a packet then goes to
        only one of the sockets that share the port (SO_REUSEPORT).
        """
        ip = source[0].partition("%")[0]
        if not on_link(self.interface, ip, source[3] if len(source) == 4 else 0):
            return False
        if packet in self._echoes and ip.removeprefix("::ffff:") in self.interface.addresses:
            return True
        self.heard += 1
        if not self._sieve.passes(packet, ip, time.monotonic()):
            return False
        if is_response(packet):
            self._read(packet)
            return False
        return True

    def _read(self, packet: bytes) -> None:
        """Pass on the announcements in a packet."""
        texts = [record for record in DNSIncoming(packet).answers() if isinstance(record, DNSText) and record.ttl]
        for record in texts[:MOST_READ]:
            if record.name.lower().endswith(f".{beacon.SERVICE}"):
                self._hear(self, beacon.split_txt(record.text))

    def descriptors(self) -> list[int]:
        """Return the numbers of its open sockets."""
        readers = self._responder.engine.readers if self._responder is not None else []
        numbers = [reader.transport.get_extra_info("socket").fileno() for reader in readers]
        return [number for number in numbers if number >= 0]

    def _open_ways(self) -> list[str | int]:
        """Return the ways to send multicast here, as zeroconf names them: an IPv4 address, or an index for IPv6."""
        four = [str(net.ip) for net in self.interface.networks if net.version == 4][:1]
        six = [self.interface.index] if any(net.version == 6 for net in self.interface.networks) else []
        if self.interface.is_loopback and four:
            six = []  # the kernel does not send IPv6 multicast from ::1 to itself
        ways: list[str | int] = [*four, *six]
        refusals = {way: _refusal(way) for way in ways}
        for way, refusal in refusals.items():
            if refusal:
                self._hindrances.append(f"no multicast over {'IPv4' if isinstance(way, str) else 'IPv6'}: {refusal}")
        return [way for way in ways if not refusals[way]]

    def _listen_in(self, responder: _Responder) -> None:
        for reader in responder.engine.readers:
            reader.transport.set_protocol(_PacketFilter(reader.transport.get_protocol(), self))

    async def _keep_asking(self, ask: Callable[[], None]) -> None:
        clock = asyncio.get_running_loop().time
        started_at = clock()
        later = itertools.count(QUERY_AT[-1] + QUERY_EVERY, QUERY_EVERY)
        for after in itertools.chain(QUERY_AT, later):
            await asyncio.sleep(started_at + after - clock())
            ask()

    def _spawn(self, work: Coroutine[Any, Any, None] | Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Responder(Zeroconf):
    """A zeroconf that reports to its owner what it sends."""

    def __init__(self, ways: list[str | int], owner: InterfaceResponder) -> None:
        self._owner = owner
        super().__init__(interfaces=ways)

    def ask_all_but(self, known: AsyncServiceInfo) -> None:
        """Ask every node but `known` to answer: zeroconf drops questions that it heard within the last second."""
        query = DNSOutgoing(0)
        query.add_question(DNSQuestion(*_QUESTION))
        query.add_answer_at_time(known.dns_pointer(), 0)
        self.async_send(query)

    def async_send(self, out: DNSOutgoing, *args: Any, **kwargs: Any) -> None:
        to_one = len(args) == 4 or "transport" in kwargs  # a unicast answer
        if not self.done:
            self._owner.sending(out.packets(), 1 if to_one else len(self.engine.senders))
        super().async_send(out, *args, **kwargs)


class _PacketFilter(asyncio.DatagramProtocol):
    """A protocol in front of that of zeroconf: it gets every packet first."""

    def __init__(self, inner: Any, owner: InterfaceResponder) -> None:
        self._inner, self._owner = inner, owner

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        if self._owner.receives(data, addr):
            self._inner.datagram_received(data, addr)

    def error_received(self, exc: Exception) -> None:
        self._owner.failed(exc)


def _refusal(way: str | int) -> str:
    """Return why multicast cannot be used this way, or "": zeroconf would not say, and might leave sockets open."""
    try:
        with socket.socket(socket.AF_INET if isinstance(way, str) else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind(("", _MDNS_PORT))
            if isinstance(way, str):
                group = socket.inet_aton(_GROUP4) + socket.inet_aton(way)
                probe.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
            else:
                group = socket.inet_pton(socket.AF_INET6, _GROUP6) + struct.pack("@I", way)
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"another program keeps UDP port {_MDNS_PORT} to itself (for avahi, set disallow-other-stacks=no)"
        return error.strerror or str(error)
    return ""


async def _cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])


_open_responders: weakref.WeakSet[InterfaceResponder] = weakref.WeakSet()


def _forget_in_child() -> None:
    # Replaced, not closed: the child's objects own these numbers, and will close them.
    numbers = [number for each in list(_open_responders) for number in each.descriptors()]
    if numbers:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in numbers:
            os.dup2(nothing, number, inheritable=False)
        os.close(nothing)
    _open_responders.clear()


os.register_at_fork(after_in_child=_forget_in_child)
