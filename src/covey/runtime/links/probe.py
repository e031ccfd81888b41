"""Measures addresses of other nodes: round trip, throughput, and packet size."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import secrets
import socket
import struct
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConnectError
from covey.net.discovery.interfaces import to_dial
from covey.runtime.links.handshake import NO_ANSWER, connect, receive_exactly
from covey.runtime.links.sockets import RelayedWay
from covey.wire import door

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from covey.net.discovery.interfaces import Interface
    from covey.runtime.links.handshake import LinkCredentials, Where
    from covey.runtime.links.limits import DialLimits
    from covey.wire.messages import Address

WORDS: Final = 5
PROBE_SECONDS: Final = 1.0
CLEARLY_BETTER: Final = 0.8
"""An address replaces one that is known to work only if its round trip is at most this share of the other's."""
FIRST_PIECE: Final = 1 << 14
LAST_PIECE: Final = 1 << 20
PROBE_PIECE_SECONDS: Final = 0.01
"""Throughput is measured with pieces of about this duration, so that slow paths confirm some and fast ones few."""
LARGEST_FRAME: Final = 16384
"""More bytes than any network between machines puts into one packet."""

_IP_MTU, _IPV6_MTU = 14, 24  # of Linux; Python's socket does not name them
_TIMESTAMPS: Final = 1  # of the options in Linux's struct tcp_info


@dataclass(frozen=True)
class Sounding:
    """The result of probing one address."""

    round_trip: float = -1.0
    """Seconds of the fastest of several; negative if the address cannot be reached."""
    problem: str = ""
    """Why it cannot be reached."""
    local: str = ""
    """The local address of the connection."""
    path_mtu: int = 0
    """Bytes of the largest packet that both ends know to get through; 0 if the system does not tell."""
    way: Where | None = None
    """The address, if it works."""


async def sound(
    way: Where, credentials: LinkCredentials, allowance: DialLimits | None = None, *, token: bytes = b""
) -> Sounding:
    """Connect to a node and send it some words, which it sends back; with an `allowance`, wait for a turn first.

    A link that later names `token` to that node proves that it comes from the same process.
    """
    if allowance is not None:
        async with allowance.turn(way):
            return await _sound(way, credentials, token, spares=True)
    return await _sound(way, credentials, token, spares=False)


async def _sound(way: Where, credentials: LinkCredentials, token: bytes, *, spares: bool) -> Sounding:
    """Probe an address with each secret that is valid now: the node may not know the new one."""
    for each in credentials.good():
        found = await _sound_with(way, each, token, spares=spares)
        if found.round_trip >= 0:
            break
    return found


async def _sound_with(way: Where, credentials: LinkCredentials, token: bytes, *, spares: bool) -> Sounding:
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            sock, _ = await connect(way, credentials, door.Purpose.PROBE, token=token, spares=spares)
            with sock:
                loop = asyncio.get_running_loop()
                quickest = float("inf")
                for _ in range(WORDS):
                    word, began = b"ping" + secrets.token_bytes(4), time.perf_counter()
                    await loop.sock_sendall(sock, word)
                    if await receive_exactly(sock, len(word)) != word:
                        return Sounding(problem="a different word came back")
                    quickest = min(quickest, time.perf_counter() - began)
                local = "" if sock.family == socket.AF_UNIX else str(sock.getsockname()[0]).partition("%")[0]
                return Sounding(quickest, local=local, path_mtu=_path_mtu(sock), way=way)
    except TimeoutError:
        return Sounding(problem=NO_ANSWER)
    except (OSError, ConnectError) as error:
        return Sounding(problem=str(error))


async def sound_each(
    addresses: Iterable[Address],
    own: Sequence[Interface],
    credentials: LinkCredentials,
    allowance: DialLimits | None = None,
    *,
    same_host: bool = False,
    token: bytes = b"",
) -> list[Sounding]:
    """Probe all addresses of a node at once, over every interface that leads there; return the best result of each."""

    async def try_one(address: Address) -> Sounding:
        is_loopback = same_host and address.ip in ("127.0.0.1", "::1")
        ways = [(address.ip, address.port)] if is_loopback else to_dial(own, (address,), same_host=False)
        results = await asyncio.gather(*(sound(way, credentials, allowance, token=token) for way in ways))
        working = [result for result in results if result.round_trip >= 0]
        if working:
            return min(working, key=lambda result: result.round_trip)
        return results[0] if results else Sounding(problem="no interface leads there")

    return list(await asyncio.gather(*map(try_one, addresses)))


async def best_way(
    ways: Sequence[Where], credentials: LinkCredentials, known: Where | None, allowance: DialLimits | None = None
) -> tuple[Where | None, float]:
    """Probe all addresses at once; return the fastest, or `known` unless one is clearly faster, and its round trip.

    A way through a relay is returned only if no other one works.
    """
    results = await asyncio.gather(*(sound(way, credentials, allowance) for way in ways))
    times = {way: result.round_trip for way, result in zip(ways, results, strict=True) if result.round_trip >= 0}
    direct = {way: taken for way, taken in times.items() if not isinstance(way, RelayedWay)}
    times = direct or times
    if not times:
        return known, -1.0
    best = min(times, key=lambda way: times[way])
    if known in times and times[best] > CLEARLY_BETTER * times[known]:
        best = known
    return best, times[best]


async def throughput(way: Where, credentials: LinkCredentials, nbytes: int, seconds: float) -> float:
    """Return the bytes per second that reach an address, sending `nbytes` for at most `seconds`; 0 if none do.

    Pieces are sent without waiting for confirmations, and only the second half of the time counts, so that a long path
    does not look like a narrow one.
    """
    with contextlib.suppress(OSError, ConnectError, TimeoutError):
        async with asyncio.timeout(PROBE_SECONDS):
            sock, _ = await connect(way, credentials, door.Purpose.PROBE)
        with sock:
            flow = _Flow(sock)
            sending = asyncio.ensure_future(flow.send(nbytes))
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await flow.hear()
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)  # if the connection broke, `hear` has raised
            if not flow.is_over:  # what is still buffered could keep a slow path busy for long
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return flow.rate
    return 0.0


class _Flow:
    """The pieces that were sent, and when each was confirmed."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._began = time.perf_counter()
        self._sent: list[int] = []
        self._confirmed_at: list[float] = []
        self._confirmed_bytes = 0
        self._is_all_sent = False

    @property
    def is_over(self) -> bool:
        return self._is_all_sent and len(self._confirmed_at) == len(self._sent)

    @property
    def rate(self) -> float:
        """Bytes per second that were confirmed in the second half of the time: in the first, TCP speeds up."""
        at = self._confirmed_at
        if len(at) < 2:
            return self._sent[0] / (at[0] - self._began) if at else 0.0
        half = (self._began + at[-1]) / 2  # not the first piece after it: several at once would seem to take no time
        return sum(self._sent[bisect.bisect(at, half) : len(at)]) / (at[-1] - half)

    async def send(self, nbytes: int) -> None:
        loop, scratch = asyncio.get_running_loop(), memoryview(secrets.token_bytes(LAST_PIECE))
        remaining = nbytes
        while remaining > 0:
            rate = self._confirmed_bytes / (time.perf_counter() - self._began)
            size = min(max(FIRST_PIECE, int(rate * PROBE_PIECE_SECONDS)), LAST_PIECE, remaining)
            self._sent.append(size)
            await loop.sock_sendall(self._sock, b"sink" + size.to_bytes(4, "little"))
            await loop.sock_sendall(self._sock, scratch[:size])
            remaining -= size
        self._is_all_sent = True

    async def hear(self) -> None:
        while not self.is_over:
            await receive_exactly(self._sock, 8)
            self._confirmed_bytes += self._sent[len(self._confirmed_at)]
            self._confirmed_at.append(time.perf_counter())


def _path_mtu(sock: socket.socket) -> int:
    """Return the smaller of what the route and the other side's segments allow."""
    if sys.platform != "linux" or sock.family == socket.AF_UNIX:
        return 0
    is_six = sock.family == socket.AF_INET6
    with contextlib.suppress(OSError):
        route = (
            sock.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU) if is_six else sock.getsockopt(socket.IPPROTO_IP, _IP_MTU)
        )
        if route > LARGEST_FRAME:  # loopback, where segments grow as the connection ages
            return route
        options = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[5]
        headers = (40 if is_six else 20) + 20 + (12 if options & _TIMESTAMPS else 0)
        return min(route, sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) + headers)
    return 0
