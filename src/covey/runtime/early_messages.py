"""Words that came before their time: kept until they can be heard, within bounds. On the control loop."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

T = TypeVar("T")

LIMIT_BYTES: Final = 1 << 20
"""Of one sender."""
WORD_BYTES: Final = 500
"""What a message takes in memory besides its contents."""


class EarlyMessages(Generic[T]):
    """What one sender said too early. What is beyond the limit is dropped: senders repeat what matters."""

    def __init__(self) -> None:
        self._words: list[T] = []
        self._bytes = 0

    def keep(self, word: T, nbytes: int) -> None:
        """Keep a word that came in so many bytes, if there is room."""
        if self._bytes + nbytes + WORD_BYTES <= LIMIT_BYTES:
            self._bytes += nbytes + WORD_BYTES
            self._words.append(word)

    def take(self) -> list[T]:
        """Return what was kept, in order, and forget it."""
        words, self._words, self._bytes = self._words, [], 0
        return words
