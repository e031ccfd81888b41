"""The redial loops: for a member of a run that is lost, and for a direct way to a relayed node. On the control loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from covey.base.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.mesh.mesh import Mesh
    from covey.runtime.mesh.remote_node import RemoteNode
    from covey.wire.messages import Contact

logger = logging.getLogger("covey")

FIRST_PAUSE: Final = 0.05
PAUSE_LIMIT: Final = 1.0
ATTEMPT_SECONDS: Final = 1.5
"""How long one attempt may take before the next: a new dial repeats a lost first packet sooner than TCP does."""
RELAY_SECONDS: Final = 2.5
"""How much longer an attempt may take that tries relays after the addresses: a relay needs more round trips."""
SEEK_SECONDS: Final = 60.0
"""Longest pause between attempts to find a direct way to a node that is linked through a relay."""


async def redial(mesh: Mesh, contact: Contact, is_wanted: Callable[[], bool]) -> None:
    """Dial a node by all its addresses, with growing pauses, while `is_wanted()`."""
    pause = FIRST_PAUSE
    while is_wanted():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ATTEMPT_SECONDS + (RELAY_SECONDS if mesh.relays.ways(contact.relay) else 0)):
                same_host = contact.host == mesh.card.contact.host
                await mesh.dial(contact.addresses, same_host=same_host, relay=contact.relay)
        await asyncio.sleep(pause)
        pause = min(PAUSE_LIMIT, 1.5 * pause)


async def seek_direct(mesh: Mesh, remote: RemoteNode) -> None:
    """Dial a node at its own addresses, with growing pauses, while its link goes through a relay."""
    pause, told = 1.0, ""
    while remote.link is not None and remote.link.relay and not mesh.is_closing:
        contact = remote.card.contact  # it may have moved
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ATTEMPT_SECONDS):
                await mesh.dial(contact.addresses, same_host=contact.host == mesh.card.contact.host)
        if remote.link is not None and remote.link.relay and not told and mesh.purpose == "candidate":
            told = remote.link.relay
            logger.warning("%s cannot be reached directly; the relay %s is used", printable(remote.card.name), told)
        await asyncio.sleep(pause)
        pause = min(SEEK_SECONDS, 2 * pause)
    if told and remote.link is not None:
        logger.warning("%s is reached directly now, and not through a relay", printable(remote.card.name))
