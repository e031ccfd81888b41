"""A node that was started anew goes on voting where its last life was a member: its disk knows what it is bound to.

It can be in no view, but without its vote the others might be no quorum. On the control loop.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from covey.runtime.council import Council

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.proto.changes import QuorumLost
    from covey.runtime.records import Records
    from covey.wire import messages
    from covey.wire.membership import Bound, View

logger = logging.getLogger("covey")


class Voter:
    """The votes of a node's last life."""

    def __init__(
        self, bound: Bound, id: bytes, life: bytes, records: Records, send: Callable[[bytes, messages.Control], None]
    ) -> None:
        """`send(id, message)` gives a message to the link with a node, if there is one."""
        self._records, self._send = records, send
        self._ids = [seat.id for seat in bound.record.members]
        self._places = {member: place for place, member in enumerate(self._ids)}
        self.generation = bound.generation
        self._council = Council(
            bound.generation,
            bound.record,
            self._places[id],
            life,
            self,
            store=lambda it: records.write(bound.generation, it),
        )

    def link_up(self, id: bytes, life: bytes) -> None:
        """There is a link with a node."""
        if id in self._places:
            self._council.link_up(self._places[id], life)

    def link_down(self, id: bytes) -> None:
        """The link with a node has ended."""
        if id in self._places:
            self._council.link_down(self._places[id])

    def received(self, id: bytes, message: messages.Agreeing) -> None:
        """A node said something about a generation."""
        if id in self._places and message.generation == self.generation:
            self._council.received(self._places[id], message.body)

    def close(self) -> None:
        """Vote no more."""
        self._council.close()

    # What the council decides

    def send(self, place: int, message: messages.Control) -> None:
        self._send(self._ids[place], message)

    def freeze(self, number: int) -> None:
        self._council.frozen(number, ())

    def installed(self, view: View, lost: tuple[int, ...]) -> None:
        """Others go on; this node waits for their next generation."""

    def excluded(self, view: View) -> None:
        self._records.forget()
        logger.info("the others went on in view %d without the last life of this node", view.number)

    def quorum_lost(self, effect: QuorumLost) -> None:
        """It is not this node's to despair."""

    def failed(self, error: Exception) -> None:
        logger.error("this node cannot vote: %s", error)
