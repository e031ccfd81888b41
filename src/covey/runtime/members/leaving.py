"""How a node leaves its run: it says goodbye, frees what it has, and lets its links send what they hold."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final, Protocol

from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from covey.runtime.members.node import Node
    from covey.runtime.tasks import Tasks

GOODBYE_SECONDS: Final = 1.0
"""How long goodbyes may take, and before them links to wake over which something is to be said."""
WAKE_CHECK_EVERY: Final = 0.01


class Closeable(Protocol):
    """Something that is closed with the node."""

    async def close(self) -> None: ...


async def _wake(node: Node) -> None:
    """Wait for links that are being woken: others may depend on what waits there, such as the last view."""
    until = asyncio.get_running_loop().time() + GOODBYE_SECONDS
    while any(peer.link is not None and peer.link.has_waiting for peer in node.peers.values()):
        if asyncio.get_running_loop().time() > until:
            return
        await asyncio.sleep(WAKE_CHECK_EVERY)


async def leave(node: Node, tasks: Tasks, closes: Sequence[Closeable]) -> None:
    """Say goodbye to all processes, and end the tasks of the node, its parts, and all links. On the control loop."""
    node.generation_table.note_end()
    if node.generation_table.keeper is not None:
        node.generation_table.keeper.send(messages.Goodbye())
    await _wake(node)
    links = [peer.link for peer in node.peers.values() if peer.link is not None]
    for link in links:
        link.send(messages.encode(messages.Goodbye()), wakes=False)
        link.close()
    await tasks.close()
    node.lanes.acceptor.stop_expecting()
    node.stores.close()
    node.checkpoints.close()
    node.generation_table.close()
    for each in closes:
        await each.close()
    came = [peer.link for peer in node.peers.values() if peer.link is not None and peer.link not in links]
    for link in came:  # while the acceptor was still open
        link.close()
    links += came
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GOODBYE_SECONDS):
            await asyncio.gather(*(link.ended.wait() for link in links))
    for link in links:
        link.abort()
