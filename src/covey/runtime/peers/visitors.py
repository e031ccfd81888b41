"""Linked nodes that take part in no run: visitors, keepers, and agents. On the control loop.

Every holder of the secret may link, with any number of keys. So the links of each key are limited, and those of all
together. When there are too many, the node that has not asked anything for longest is dropped. Keepers that a linked
node names on its card do not count and are not dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.runtime.peers.remote_process import RemoteProcess

LINKS_PER_KEY: Final = 4
VISITORS_LIMIT: Final = 64


def is_guest(purpose: str, own: str) -> bool:
    """Tell whether a node with this purpose takes part in nothing that a node with the purpose `own` does.

    Agents are linked with each other, and visitors with agents.
    """
    if purpose == "agent":
        return own not in ("agent", "visitor")
    return purpose == "keeper" or (purpose == "visitor" and own != "visitor")


class Visitors:
    """The visitors of one node, ordered by their last question."""

    def __init__(self, is_needed: Callable[[RemoteProcess], bool]) -> None:
        """`is_needed` tells whether a node is a keeper that a linked node names."""
        self._is_needed = is_needed
        self._nodes: dict[RemoteProcess, None] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[RemoteProcess]:
        return iter(tuple(self._nodes))

    def add(self, remote: RemoteProcess) -> list[RemoteProcess]:
        """Add a node; return the nodes that have to be dropped for it."""
        self._nodes[remote] = None
        of_key = [each for each in self._nodes if each.card.id == remote.card.id]
        leaving = of_key[: max(0, len(of_key) - LINKS_PER_KEY)]
        counted = [each for each in self._nodes if each not in leaving and not self._is_needed(each)]
        return leaving + counted[: max(0, len(counted) - VISITORS_LIMIT)]

    def asked(self, remote: RemoteProcess) -> None:
        """Note that a node asked something just now."""
        if remote in self._nodes:
            del self._nodes[remote]
            self._nodes[remote] = None

    def discard(self, remote: RemoteProcess) -> None:
        self._nodes.pop(remote, None)
