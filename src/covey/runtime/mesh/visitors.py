"""Who is linked with a node and takes part in nothing: visitors, and keepers of other hosts. On the control loop.

Every holder of the secret may come, with as many keys as it makes itself. So there is room for a few links of each key,
and for so many in all; when one too many comes, the one that has not asked anything for longest has to go. Keepers that
a node has named on its card are not counted and do not go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.runtime.mesh.remote_node import RemoteNode

LINKS_PER_KEY: Final = 4
VISITORS_LIMIT: Final = 64


class Visitors:
    """The visitors of one node, the last one to ask something last."""

    def __init__(self, is_needed: Callable[[RemoteNode], bool]) -> None:
        """`is_needed` tells of a keeper whether one of those we met named it."""
        self._is_needed = is_needed
        self._there: dict[RemoteNode, None] = {}

    def __len__(self) -> int:
        return len(self._there)

    def __iter__(self) -> Iterator[RemoteNode]:
        return iter(tuple(self._there))

    def add(self, remote: RemoteNode) -> list[RemoteNode]:
        """Take someone in; return those who have to go for it."""
        self._there[remote] = None
        of_key = [each for each in self._there if each.card.id == remote.card.id]
        leaving = of_key[: max(0, len(of_key) - LINKS_PER_KEY)]
        counted = [each for each in self._there if each not in leaving and not self._is_needed(each)]
        return leaving + counted[: max(0, len(counted) - VISITORS_LIMIT)]

    def asked(self, remote: RemoteNode) -> None:
        """Note that someone asked something just now."""
        if remote in self._there:
            del self._there[remote]
            self._there[remote] = None

    def discard(self, remote: RemoteNode) -> None:
        self._there.pop(remote, None)
