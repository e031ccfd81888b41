"""A relay of a cluster beside something else in one process: `covey run --relay-limit` has one, on its own thread."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Final

from covey.runtime.relaying.server import RelayServer

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Collection

    from covey.runtime.relaying.server import RelayLimits

RELAY_CLOSE_SECONDS: Final = 5.0
"""How long the relay may take to close its connections."""


class RelayThread:
    """A relay that serves some clusters only. Its loop is not the control loop, which has other work."""

    def __init__(self, listener: socket.socket, limits: RelayLimits, clusters: Callable[[], Collection[bytes]]) -> None:
        """Take ownership of `listener`, and begin; `clusters` returns the public keys of the clusters it serves."""
        self.port: int = listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._server = RelayServer([listener], limits, clusters)
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="covey-relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close every connection, and end the thread. Closing twice is fine."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(RELAY_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._server.open()
        try:
            await self._ending.wait()
        finally:
            await self._server.close()
