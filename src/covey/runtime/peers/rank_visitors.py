"""Commands of the same user that ask a rank of a launcher's run, and leave. On the control loop."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from covey.wire import messages

if TYPE_CHECKING:
    from covey.runtime.links.link import Link
    from covey.runtime.metrics.inspection import PacedAnswers
    from covey.runtime.state.checkpoints import Checkpoints

VISITORS_LIMIT: Final = 8


class RankVisitors:
    """The links of commands with this rank. One too many ends the oldest."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._links: list[Link] = []
        self._answers: PacedAnswers | None = None

    def add(self, link: Link) -> None:
        """Answer what comes over this link."""
        for before in self._links[: len(self._links) + 1 - VISITORS_LIMIT]:
            before.abort()
        self._links.append(link)
        link.attach(functools.partial(self._heard, link), functools.partial(self._ended, link))

    def close(self) -> None:
        """End all links."""
        for link in list(self._links):
            link.abort()

    def _heard(self, link: Link, body: bytes) -> None:
        from covey.runtime.metrics.inspection import PacedAnswers  # most ranks are not asked

        message = messages.decode_control(body)
        if isinstance(message, messages.Inspect):
            self._answers = self._answers or PacedAnswers()
            self._answers.answer(message, b"", lambda answer: link.send(messages.encode(answer)))
        elif isinstance(message, messages.RequestCheckpoint):
            self._checkpoints.asked(message, lambda progress: link.send(messages.encode(progress)))

    def _ended(self, link: Link) -> None:
        if link in self._links:
            self._links.remove(link)
