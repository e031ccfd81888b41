"""The redial loop of a member of a run: dials a node while a condition holds. On the control loop."""

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


async def redial(mesh: Mesh, contact: Contact, is_wanted: Callable[[], bool]) -> None:
    """Dial a node by all its addresses, with growing pauses, while `is_wanted()`."""
    pause = FIRST_PAUSE
    while is_wanted():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ATTEMPT_SECONDS):
                await mesh.dial(contact.addresses, same_host=contact.host == mesh.card.contact.host)
        await asyncio.sleep(pause)
        pause = min(PAUSE_LIMIT, 1.5 * pause)
