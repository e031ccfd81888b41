"""Linked processes that take part in no run: visitors, keepers, and agents. On the control loop.

Every holder of the secret, or of a run's token, may link, with any number of keys. So the links of each key are
limited, and those of all together. When there are too many, the process that has not asked anything for longest is
dropped. Keepers that a linked node names on its card do not count and are not dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from covey.runtime.peers.remote_process import RemoteProcess

LINKS_PER_KEY: Final = 4
VISITORS_LIMIT: Final = 64
COMMANDS_LIMIT: Final = 8
"""Commands of the same user that may ask a rank of a launcher at a time."""


def is_guest(purpose: str, own: str) -> bool:
    """Tell whether a node with this purpose takes part in nothing that a node with the purpose `own` does.

    Agents are linked with each other, and visitors with agents.
    """
    if purpose == "agent":
        return own not in ("agent", "visitor")
    return purpose == "keeper" or (purpose == "visitor" and own != "visitor")


class Visitors:
    """The visitors of one node, ordered by their last question."""

    def __init__(self, is_needed: Callable[[RemoteProcess], bool], limit: int) -> None:
        """`is_needed` tells whether a node is a keeper that a linked node names; up to `limit` others may stay."""
        self._is_needed, self._limit = is_needed, limit
        self._nodes: dict[RemoteProcess, None] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[RemoteProcess]:
        return iter(tuple(self._nodes))

    def add(self, remote: RemoteProcess) -> list[RemoteProcess]:
        """Add a node; return the nodes that have to be dropped for it."""
        self._nodes[remote] = None
        of_key = [each for each in self._nodes if _key(each) == _key(remote)]
        leaving = of_key[: max(0, len(of_key) - LINKS_PER_KEY)]
        counted = [each for each in self._nodes if each not in leaving and not self._is_needed(each)]
        return leaving + counted[: max(0, len(counted) - self._limit)]

    def asked(self, remote: RemoteProcess) -> None:
        """Note that a node asked something just now."""
        if remote in self._nodes:
            del self._nodes[remote]
            self._nodes[remote] = None

    def discard(self, remote: RemoteProcess) -> None:
        self._nodes.pop(remote, None)


def _key(remote: RemoteProcess) -> bytes:
    """Return the key of a node; commands that hold a token have none, and each counts by itself."""
    return remote.card.id or remote.card.life
