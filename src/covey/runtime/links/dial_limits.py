"""How many connections a node opens because others said where to: so many at a time, and so many a second.

Seeds, and members of a run whose links have ended, are dialled without asking here: a person wrote the seeds down, the
members have been met, and there are few of either.
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
"""Connections to other machines, a second and at once. A cluster of the largest size is dialled in one go."""


class DialLimits:
    """Gives out turns to dial. On the control loop."""

    def __init__(self) -> None:
        self._sockets = asyncio.Semaphore(SOCKETS)
        self._dials = Bucket(DIALS_RATE, DIALS_BURST)

    @contextlib.asynccontextmanager
    async def turn(self, where: Where) -> AsyncIterator[None]:
        """Wait until `where` may be dialled. The connection is to be opened, or given up, inside the block."""
        clock = asyncio.get_running_loop().time
        while _is_remote(where) and not self._dials.take(clock()):  # noqa: ASYNC110  # only time brings the next one
            await asyncio.sleep(self._dials.wait(clock()))
        async with self._sockets:
            yield


def _is_remote(where: Where) -> bool:
    return not isinstance(where, str) and not ipaddress.ip_address(where[0].partition("%")[0]).is_loopback
