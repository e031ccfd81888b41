"""What a joiner announces to every node that it has a link with, and when."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from covey.wire import formation as wire
from covey.wire.formation import Here, Phase

if TYPE_CHECKING:
    from covey.proto.formation.core import Formed
    from covey.proto.formation.links import JoinerLinks
    from covey.proto.lineages import Lineages
    from covey.wire.formation import Member, Terms
    from covey.wire.lineage import Ending

HERE_EVERY: Final = 0.5
HERE_SOON: Final = 0.05
"""Changes within this time are announced together: links come up in dozens."""
CROWD: Final = 128
"""With more peers than this, both times grow with their number: every announcement names all links, and all peers send
theirs, so what a node sends and receives in a second would grow with the square of their number. And the announcement
to one peer, when its link is new, does not name the others: all peers get the next one, soon."""


class Announcer:
    """Says when to send `Here` to all peers, and what it contains."""

    def __init__(self, me: Member, terms: Terms, links: JoinerLinks, lineages: Lineages, now: float) -> None:
        self._me, self.terms, self._links, self._lineages = me, terms, links, lineages
        self.at = now
        """When to announce."""

    def soon(self, now: float) -> None:
        """Announce a change, with others that may come."""
        self.at = min(self.at, now + HERE_SOON * max(1.0, self._crowd()))

    def announced(self, now: float, *, is_formed: bool) -> None:
        """Note that all peers were sent a `Here`; a node in a run repeats it only after a change."""
        self.at = math.inf if is_formed else now + HERE_EVERY * max(1.0, self._crowd())

    def here(self, formed: Formed | None, *endings: Ending, is_locked: bool, to: bytes = b"") -> Here:
        """Return the announcement; it names the latest endings of lineages, and before them `endings`.

        With many peers, one that is meant for one life only (`to`) names the link with it, not all links.
        """
        hears = (to,) if to and self._crowd() > 1.0 else tuple(self._links.lives[: wire.MAX_LINKS])
        endings = (*endings, *self._lineages.latest_endings())[: wire.MAX_ENDINGS]
        if formed is not None:
            names = tuple(member.name for member in formed.view)
            return Here(self.terms, self._me, hears, Phase.FORMED, names, formed.lineage, formed.generation, endings)
        phase = Phase.LOCKED if is_locked else Phase.JOINING
        lineage = self._lineages.current
        names = self._lineages.names(lineage)
        return Here(self.terms, self._me, hears, phase, names, lineage or None, endings=endings)

    def pause(self) -> float:
        """Return how long to wait for more announcements before acting on one: not at all if there are few peers."""
        return HERE_SOON * self._crowd() if self._crowd() > 1.0 else 0.0

    def _crowd(self) -> float:
        return len(self._links.peers) / CROWD
