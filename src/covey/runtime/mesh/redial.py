"""The redial loop for a member of a run that is lost. On the control loop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.mesh.mesh import Mesh
    from covey.wire.messages import Contact

FIRST_PAUSE: Final = 0.05
PAUSE_LIMIT: Final = 1.0
ATTEMPT_SECONDS: Final = 1.5
"""How long one attempt may take before the next: a new dial repeats a lost first packet sooner than TCP does."""
RELAY_SECONDS: Final = 2.5
"""How much longer an attempt may take that tries relays after the addresses: a relay needs more round trips."""


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
