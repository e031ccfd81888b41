"""The effects of a membership, in the order in which they are to be performed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.proto.changes import Effect, Persist, Send

if TYPE_CHECKING:
    from covey.proto.membership.position import ViewPosition
    from covey.wire.membership import Membership as Message


class Outbox:
    """Collects effects until the driver takes them."""

    def __init__(self, position: ViewPosition) -> None:
        self._position = position
        self._effects: list[Effect] = []

    def add(self, effect: Effect) -> None:
        """Perform an effect after those that are here already."""
        self._effects.append(effect)

    def send(self, rank: int, message: Message) -> None:
        """Send a message to a rank, if there is a link."""
        if self._position.presence.is_linked(rank):
            self._effects.append(Send(self._position.ids[rank], message))

    def persist(self) -> None:
        """Make what this node is bound to durable before any later effect."""
        self._effects.append(Persist(self._position.acceptor.record))

    def take(self) -> list[Effect]:
        """Return the effects, and clear them."""
        effects, self._effects = self._effects, []
        return effects
