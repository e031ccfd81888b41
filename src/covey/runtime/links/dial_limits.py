"""Limits on connections to addresses that other nodes named: how many at a time, and how many per second.

Seeds, and members of a run whose links have ended, are dialled without these limits: the user named the seeds, the
members were linked before, and there are few of either.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from typing import TYPE_CHECKING, Final

from covey.base.pace import Bucket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from covey.runtime.links.handshake import Where

SOCKETS: Final = 32
"""Connections that are being opened at the same time."""
DIALS_RATE, DIALS_BURST = 32.0, 128.0
"""Connections to other machines, per second and at once. A cluster of the largest size is dialled at once."""


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
