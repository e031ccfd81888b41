"""The link of a process with the keeper that started it. On the control loop."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING, Final

from covey.base.errors import AuthError, ConnectError, CoveyError
from covey.base.pace import Growing
from covey.base.text import printable
from covey.runtime.backoff import Backoff
from covey.runtime.links.handshake import NO_ANSWER, RefusedError, dial
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.links.handshake import LinkCredentials
    from covey.runtime.links.link import Link

logger = logging.getLogger("covey")

KEEPER_PAUSES: Final = Growing(0.01, 1.0, 1.5)
"""Between attempts to reach a keeper that does not answer, or ends each link at once."""
LINK_LASTS_SECONDS: Final = 1.0
"""A link that ends sooner counts as an attempt that failed."""


class KeeperLink:
    """Dials the keeper until it answers, and again when the link ends."""

    def __init__(
        self,
        path: str,
        credentials: LinkCredentials,
        card: messages.Card,
        *,
        fewest: int = 0,
        on_message: Callable[[messages.Control], None],
        on_up: Callable[[], None] = lambda: None,
        on_down: Callable[[], None] = lambda: None,
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        """`fewest` is the number of processes with which this one may begin a run without members; 0 for all."""
        self._path, self._credentials, self._card, self._fewest = path, credentials, card, fewest
        self._on_up, self._on_down, self._on_message, self._on_room = on_up, on_down, on_message, on_room
        self.link: Link | None = None
        """None while there is no link."""
        self._ended = asyncio.Event()
        self.is_up = asyncio.Event()

    def send(self, message: messages.Control) -> None:
        """Send a message to the keeper, if there is a link."""
        if self.link is not None:
            self.link.send(messages.encode(message))

    async def keep(self) -> None:
        """Link, and link again when the link ends, until cancelled."""
        tries = Backoff("the keeper of this run (covey run)", KEEPER_PAUSES)
        while True:
            try:
                with tries.telling():
                    link, _, _ = await dial(self._path, self._credentials, self._hello())
            except (ConnectError, AuthError, RefusedError, TimeoutError) as error:
                tries.failed(str(error) or NO_ANSWER)
                await tries.rest()  # the keeper may be starting, or ending with all its processes
                continue
            self.link, up_at = link, time.monotonic()
            self._ended.clear()
            try:
                link.attach(
                    lambda body: self._on_message(messages.decode_control(body)), self._ended.set, self._on_room
                )
                self._on_up()
                self.is_up.set()
                await self._ended.wait()
            finally:
                self.link = None
                self.is_up.clear()
                link.abort()
            if isinstance(link.error, CoveyError):
                logger.warning("the link with the keeper was ended: %s", printable(str(link.error)))
            self._on_down()
            if time.monotonic() - up_at >= LINK_LASTS_SECONDS:
                tries.worked()
            else:
                tries.failed("it ended the link at once")
                await tries.rest()

    def _hello(self) -> messages.Hello:
        return messages.Hello(messages.VERSION, secrets.token_bytes(32), "kept", "", -1, self._fewest, "", self._card)
