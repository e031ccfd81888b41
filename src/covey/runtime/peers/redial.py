"""The redial loop for a member of a run that is lost. On the control loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from covey.base.pace import Growing
from covey.runtime.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.peers.mesh import Mesh
    from covey.wire.messages import Contact

PAUSES: Final = Growing(0.05, 1.0, 1.5)
ATTEMPT_SECONDS: Final = 1.5
"""How long one attempt may take before the next: a new dial repeats a lost first packet sooner than TCP does."""
RELAY_SECONDS: Final = 2.5
"""How much longer an attempt may take that tries relays after the addresses: a relay needs more round trips."""
NEXT_SECONDS: Final = 1.0
"""How long the next attempt waits for one that has neither worked nor failed..."""
ATTEMPTS_AT_ONCE: Final = 4
"""... and how many of them there may be."""


async def redial(mesh: Mesh, contact: Contact, is_wanted: Callable[[], bool]) -> None:
    """Dial a node by all its addresses, with growing pauses, while `is_wanted()`.

    An attempt tries each way once, and lasts as long as one of them neither works nor fails. Meanwhile another way may
    begin to work: a relay may have returned to which the node is not registered yet. So the next attempt does not wait
    for the end of the one before.
    """
    addresses = ", ".join(f"{each.ip}:{each.port}" for each in contact.addresses)
    tries = Backoff(f"a link with the node at {addresses}", PAUSES, level=logging.INFO)  # its health is in `status`
    attempts = set[asyncio.Future[None]]()
    try:
        while is_wanted():
            tries.begin()
            if len(attempts) < ATTEMPTS_AT_ONCE:
                attempts.add(asyncio.ensure_future(_attempt(mesh, contact)))
            _, attempts = await asyncio.wait(attempts, timeout=NEXT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if is_wanted():
                tries.failed("no node of the cluster answers there")
                await tries.rest()
    finally:
        for each in attempts:
            each.cancel()


async def _attempt(mesh: Mesh, contact: Contact) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ATTEMPT_SECONDS + (RELAY_SECONDS if mesh.relays.ways(contact.relay) else 0)):
            same_host = contact.host == mesh.card.contact.host
            await mesh.dial(contact.addresses, same_host=same_host, relay=contact.relay)
