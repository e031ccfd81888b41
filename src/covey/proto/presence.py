"""Whom a member hears: links, what health believes, who leaves, who went elsewhere."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from covey.wire.membership import Seat

WORD_LASTS: Final = 3.0
"""Seconds for which a keeper's word that a process is alive and not stopped counts: six times as long as it takes the
keeper to say so again."""


class Presence:
    """The other places of a run, as heard from `me`. Places are the ranks of view 0; the keeper's comes after them."""

    def __init__(self, members: tuple[Seat, ...], me: int, now: float) -> None:
        self._lives = [member.life for member in members]
        self._me = me
        self._links: dict[int, bytes] = {}
        self._changed_at = dict.fromkeys(range(len(members) + 1), now)
        self._vouched_at = dict.fromkeys(range(len(members) + 1), -math.inf)
        self._dead: set[int] = set()
        self.parted: set[int] = set()
        """Those that went on as another lineage."""
        self.leaving: set[int] = set()
        """Those that want to be in no view any more."""
        self.finished: set[int] = set()
        """Those of them whose program has ended."""

    def link_up(self, place: int, life: bytes, now: float) -> None:
        """There is a link with a life of the node in this place: the member's, or a later one that only votes."""
        self._links[place], self._changed_at[place] = life, now

    def link_down(self, place: int, now: float) -> bool:
        """The link is gone; return whether there was one."""
        was_up = self._links.pop(place, None) is not None
        if was_up:
            self._changed_at[place] = now
        return was_up

    def believe(self, place: int, *, is_dead: bool) -> None:
        """Follow health."""
        if is_dead:
            self._dead.add(place)
        else:
            self._dead.discard(place)

    def vouch(self, place: int, now: float) -> None:
        """A keeper says that the process in this place is alive, and not stopped."""
        self._vouched_at[place] = now

    def vouched_until(self, place: int) -> float:
        """Return until when a keeper's last word for the process in this place counts."""
        return self._vouched_at[place] + WORD_LASTS

    def is_linked(self, place: int) -> bool:
        """Tell whether something can be said to this place."""
        return place in self._links

    def is_well(self, place: int) -> bool:
        """Tell whether a member is heard, in the life that is in the view."""
        if place == self._me:
            return True
        if place not in self._links or place in self._dead or place in self.parted:
            return False
        return place == len(self._lives) or self._links[place] == self._lives[place]

    def has_ended(self, place: int) -> bool:
        """Tell whether the member of this place is known to be no more: a later life of its node is here."""
        return place in self._links and place < len(self._lives) and self._links[place] != self._lives[place]

    def heard(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return those of `ranks` that are well."""
        return tuple(filter(self.is_well, ranks))

    def expected_until(
        self, place: int, asked_at: float, *, answer_within: float, relink: float, relink_vouched: float
    ) -> float:
        """Return until when an answer of a place may come: -inf for one that is dead, was started anew or is elsewhere.

        Who is well is believed for `answer_within`. One whose link ended may be back within `relink`; if a keeper goes
        on vouching for it, within `relink_vouched`.
        """
        since = max(self._changed_at[place], asked_at)
        if self.is_well(place):
            return since + answer_within
        is_away = place not in self._links and place not in self._dead and place not in self.parted
        if not is_away:
            return -math.inf
        return max(self._changed_at[place] + relink, min(self.vouched_until(place), since + relink_vouched))
