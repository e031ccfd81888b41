"""When a joiner proposes a view, and of which nodes.

A full run is proposed at once, any other when no joiner came for `settle`. The joiner with the smallest id proposes;
each next one does so after another `patience`, in case a smaller one hears too few.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from covey.proto.founders import clique, count_hosts, founders, rank_order, wanting

if TYPE_CHECKING:
    from covey.proto.formation.links import JoinerLinks
    from covey.proto.founders import RemoteJoiner
    from covey.wire.formation import Member, Terms

SETTLE: Final = 1.0
"""Seconds without a new joiner after which the present ones form the run."""
MAX_SETTLES: Final = 5
"""Settling ends after this many times SETTLE, however often joiners come and go."""


class Founding:
    """The nodes that could found a run with this one, and the time to propose it."""

    def __init__(
        self,
        me: Member,
        terms: Terms,
        links: JoinerLinks,
        *,
        min_hosts: int,
        settle: float,
        patience: float,
        now: float,
    ) -> None:
        self._me, self._terms, self._links = me, terms, links
        self._min_hosts, self._settle, self._patience = min_hosts, settle, patience
        self.propose_at = math.inf
        """When a proposal will be due, if nothing changes."""
        self._lives: tuple[bytes, ...] = ()
        self._changed_at = now
        self._enough_at = math.inf
        self._not_before = now

    def wait(self) -> None:
        """Propose nothing: this node knows of a run that may be going on."""
        self._enough_at = math.inf

    def begin_again(self, now: float, not_before: float) -> None:
        """Settle anew after an aborted proposal."""
        self._changed_at, self._enough_at, self._not_before = now, math.inf, not_before

    def view_due(self, now: float) -> tuple[Member, ...] | None:
        """Return the view to propose, if it is time and enough nodes hear each other; else note when it will be."""
        others = self._others()
        lives = tuple(peer.life for peer in others)
        if lives != self._lives:
            self._lives, self._changed_at = lives, now
        there = [self._me, *(peer.here.member for peer in others if peer.here is not None)]
        if len(there) < self._terms.smallest or count_hosts(there) < self._min_hosts:
            self._enough_at = math.inf
            return None
        self._enough_at = min(self._enough_at, now)
        smallest, largest = self._terms.smallest, self._terms.largest
        settled_at = min(self._changed_at + self._settle, self._enough_at + MAX_SETTLES * self._settle)
        turn = self._patience * sum(peer.id < self._me.id for peer in others)
        # The clique is searched only when a view may be due: with a thousand nodes that takes a while.
        full_at = min(self._changed_at, settled_at) if len(there) >= largest else settled_at
        if now < (due := max(full_at + turn, self._not_before)):
            self.propose_at = due
            return None
        view = clique(self._me, others, largest, least=smallest)
        if len(view) < largest and now < (due := max(settled_at + turn, self._not_before)):
            self.propose_at = due
        elif len(view) >= smallest and not self.has_too_few_hosts(view):
            return rank_order(view)
        return None

    def has_too_few_hosts(self, members: tuple[Member, ...] | list[Member]) -> bool:
        """Tell whether a view of these members would span too few machines."""
        return count_hosts(members) < self._min_hosts

    def waits_for(self) -> str:
        """Return what is missing before a view can be proposed as a keyword (`wire.messages.Wait`)."""
        others, fewest = self._others(), self._terms.smallest
        view = clique(self._me, others, self._terms.largest)
        if len(others) + 1 < fewest or (len(view) >= fewest and self.has_too_few_hosts(view)):
            return "nodes"
        return "links" if len(view) < fewest else "agreement"

    def describe(self) -> str:
        """Describe what is missing before a view can be proposed."""
        return wanting(self._me, self._others(), self._terms, self._min_hosts)

    def _others(self) -> list[RemoteJoiner]:
        return founders(self._links.peers, self._me.life)
