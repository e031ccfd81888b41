"""Limits on connections: how many are dialled to addresses that other nodes named, and how often others may come.

Seeds, and members of a run whose links have ended, are dialled without `DialLimits`: the user named the seeds, the
members were linked before, and there are few of either.

`SourceLimits` count what comes to the door from one source, without I/O. A source is an IPv4 address, or the 64 bits of
an IPv6 address that name its network: a machine may use all addresses behind those. The address of a member is a source
of its own and is allowed more, so that a flood does not keep members out, even on a network where all addresses share a
prefix. A connection that proves the key does not count any more: counted are connections without the key, and those
still at the door.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
from typing import TYPE_CHECKING, Final

from covey.base.pace import Bucket, Buckets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from covey.runtime.links.handshake import Where

SOCKETS: Final = 32
"""Connections that are being opened at the same time."""
DIALS_RATE, DIALS_BURST = 32.0, 128.0
"""Connections to other machines, per second and at once. A cluster of the largest size is dialled at once."""
SOURCE_CONNECTIONS_RATE: Final = 64.0
SOURCE_CONNECTIONS_BURST: Final = 256.0
"""All processes of a large machine may connect at once."""
MEMBER_RATE: Final = 512.0
MEMBER_BURST: Final = 1024.0
UNPROVEN_RATE: Final = 256.0
UNPROVEN_BURST: Final = 1024.0
"""For all sources together that no member has."""


class DialLimits:
    """Lets dials proceed one by one. On the control loop."""

    def __init__(self) -> None:
        self._sockets = asyncio.Semaphore(SOCKETS)
        self._dials = Bucket(DIALS_RATE, DIALS_BURST)

    @contextlib.asynccontextmanager
    async def turn(self, where: Where) -> AsyncIterator[None]:
        """Wait until `where` may be dialled. Open or give up the connection inside the block."""
        clock = asyncio.get_running_loop().time
        while _is_remote(where) and not self._dials.take(clock()):  # noqa: ASYNC110  # only time frees the next turn
            await asyncio.sleep(self._dials.wait(clock()))
        async with self._sockets:
            yield


def _is_remote(where: Where) -> bool:
    return not isinstance(where, str) and not ipaddress.ip_address(where[0].partition("%")[0]).is_loopback


class SourceLimits:
    """Counts the connections that come to one acceptor."""

    def __init__(self) -> None:
        self._strangers = Buckets(SOURCE_CONNECTIONS_RATE, SOURCE_CONNECTIONS_BURST)
        self._members = Buckets(MEMBER_RATE, MEMBER_BURST)
        self._all = Bucket(UNPROVEN_RATE, UNPROVEN_BURST)
        self.refused = 0
        """Connections that were too many."""

    def come(self, ip: str, now: float, *, is_member: bool) -> Arrival | None:
        """Count a connection from this address; return None if it is one too many."""
        taken = list[Bucket]()
        wanted = (self._members.of(ip),) if is_member else (self._strangers.of(source_of(ip)), self._all)
        for bucket in wanted:
            if not bucket.take(now):
                self.refused += 1
                return None
            taken.append(bucket)
        return Arrival(tuple(taken))


class Arrival:
    """A connection that was counted."""

    __slots__ = ("_on_proved", "_taken")

    def __init__(self, taken: tuple[Bucket, ...], on_proved: Callable[[], None] = lambda: None) -> None:
        """`on_proved` is called when the connection has proved the key."""
        self._taken, self._on_proved = taken, on_proved

    def proved_key(self) -> None:
        """Uncount the connection: it has proved the key."""
        for bucket in self._taken:
            bucket.give_back()
        self._taken = ()
        self._on_proved()


@functools.lru_cache(maxsize=1024)
def source_of(ip: str) -> str:
    """Return what connections from an address are counted under."""
    if ":" not in ip:
        return ip
    try:
        return str(ipaddress.IPv6Network((ip.partition("%")[0], 64), strict=False).network_address)
    except ValueError:
        return ip
