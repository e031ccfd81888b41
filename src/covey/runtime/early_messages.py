"""Messages that arrive before the receiver can use them: kept until then, within a limit. On the control loop."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

T = TypeVar("T")

LIMIT_BYTES: Final = 1 << 20
"""For the messages of one sender."""
MESSAGE_BYTES: Final = 500
"""What a message takes in memory besides its contents."""


class EarlyMessages(Generic[T]):
    """Early messages of one sender. Messages beyond the limit are dropped: senders repeat what matters."""

    def __init__(self) -> None:
        self._messages: list[T] = []
        self._bytes = 0

    def keep(self, message: T, nbytes: int) -> None:
        """Keep a message of `nbytes`, if there is room."""
        if self._bytes + nbytes + MESSAGE_BYTES <= LIMIT_BYTES:
            self._bytes += nbytes + MESSAGE_BYTES
            self._messages.append(message)

    def take(self) -> list[T]:
        """Return the messages in their order, and forget them."""
        kept, self._messages, self._bytes = self._messages, [], 0
        return kept
