"""Which ranks a member hears: links, the opinion of health, ranks that leave, and ranks that forked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from covey.wire.membership import MemberKey

WORD_LASTS: Final = 3.0
"""Seconds for which a keeper's word counts that a process is alive and not stopped: six times the interval at which the
keeper repeats it."""


class Presence:
    """The other ranks of view 0, as heard from `me`. The keeper has the rank after the last member's."""

    def __init__(self, members: tuple[MemberKey, ...], me: int, now: float) -> None:
        self._lives = [member.life for member in members]
        self._me = me
        self._links: dict[int, bytes] = {}
        self._changed_at = dict.fromkeys(range(len(members) + 1), now)
        self._vouched_at = dict.fromkeys(range(len(members) + 1), -math.inf)
        self._dead: set[int] = set()
        self._well = {me}
        """Ranks with a link in the life that the view contains, and not dead; this one among them."""
        self.parted: set[int] = set()
        """Ranks that went on as another lineage."""
        self.leaving: set[int] = set()
        """Ranks that want to be in no further view."""
        self.finished: set[int] = set()
        """Ranks among `leaving` whose program has ended."""

    def link_up(self, rank: int, life: bytes, now: float) -> None:
        """Note a link with a life of this rank's node: the member's, or a later one that only votes."""
        self._links[rank], self._changed_at[rank] = life, now
        self._note(rank)

    def link_down(self, rank: int, now: float) -> bool:
        """Note that the link ended; return whether there was one."""
        was_up = self._links.pop(rank, None) is not None
        if was_up:
            self._changed_at[rank] = now
            self._note(rank)
        return was_up

    def believe(self, rank: int, *, is_dead: bool) -> None:
        """Take over the opinion of health."""
        if is_dead:
            self._dead.add(rank)
        else:
            self._dead.discard(rank)
        self._note(rank)

    def vouch(self, rank: int, now: float) -> None:
        """Note that a keeper says that the process of this rank is alive and not stopped."""
        self._vouched_at[rank] = now

    def vouched_until(self, rank: int) -> float:
        """Return until when the keeper's last word for the process of this rank counts."""
        return self._vouched_at[rank] + WORD_LASTS

    def is_linked(self, rank: int) -> bool:
        """Tell whether there is a link with this rank."""
        return rank in self._links

    def is_well(self, rank: int) -> bool:
        """Tell whether a member is heard, in the life that the view contains."""
        return rank in self._well and (rank not in self.parted or rank == self._me)

    def has_ended(self, rank: int) -> bool:
        """Tell whether the member of this rank has ended for sure: there is a link with a later life of its node."""
        return rank in self._links and rank < len(self._lives) and self._links[rank] != self._lives[rank]

    def heard(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return those of `ranks` that are well."""
        if self.parted:
            return tuple(filter(self.is_well, ranks))
        return tuple(filter(self._well.__contains__, ranks))

    def expected_until(
        self, rank: int, asked_at: float, *, answer_within: float, relink: float, relink_vouched: float
    ) -> float:
        """Return until when to wait for an answer of a rank; -inf if it is dead, was started anew, or has forked.

        A rank that is well has `answer_within`. A rank whose link ended has `relink` to link again, or
        `relink_vouched` while a keeper vouches for it.
        """
        since = max(self._changed_at[rank], asked_at)
        if self.is_well(rank):
            return since + answer_within
        is_away = rank not in self._links and rank not in self._dead and rank not in self.parted
        if not is_away:
            return -math.inf
        return max(self._changed_at[rank] + relink, min(self.vouched_until(rank), since + relink_vouched))

    def _note(self, rank: int) -> None:
        """Find out anew whether a rank is well: with a thousand ranks, all cannot be asked after every change."""
        life = self._links.get(rank)
        is_member = life is not None and (rank == len(self._lives) or life == self._lives[rank])
        if rank == self._me or (is_member and rank not in self._dead):
            self._well.add(rank)
        else:
            self._well.discard(rank)
