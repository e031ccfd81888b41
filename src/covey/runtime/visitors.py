"""Who is linked with a node and takes part in nothing: visitors, and keepers of other hosts. On the control loop.

Every holder of the secret may come, with as many keys as it makes itself. So there is room for a few links of each key,
and for so many in all; when one too many comes, the one that has not asked anything for longest has to go. Keepers that
a node has named on its card are not counted and do not go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.runtime.acquaintance import Acquaintance

LINKS_PER_KEY: Final = 4
VISITORS_LIMIT: Final = 64


class Visitors:
    """The visitors of one node, the last one to ask something last."""

    def __init__(self, is_needed: Callable[[Acquaintance], bool]) -> None:
        """`is_needed` tells of a keeper whether one of those we met named it."""
        self._is_needed = is_needed
        self._there: dict[Acquaintance, None] = {}

    def __len__(self) -> int:
        return len(self._there)

    def __iter__(self) -> Iterator[Acquaintance]:
        return iter(tuple(self._there))

    def add(self, someone: Acquaintance) -> list[Acquaintance]:
        """Take someone in; return those who have to go for it."""
        self._there[someone] = None
        of_key = [each for each in self._there if each.card.id == someone.card.id]
        leaving = of_key[: max(0, len(of_key) - LINKS_PER_KEY)]
        counted = [each for each in self._there if each not in leaving and not self._is_needed(each)]
        return leaving + counted[: max(0, len(counted) - VISITORS_LIMIT)]

    def asked(self, someone: Acquaintance) -> None:
        """Note that someone asked something just now."""
        if someone in self._there:
            del self._there[someone]
            self._there[someone] = None

    def discard(self, someone: Acquaintance) -> None:
        self._there.pop(someone, None)
