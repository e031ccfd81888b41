"""Whether a new view is needed, and when this node starts a ballot, repeats what it said, warns, and gives up.

Members that need a view for the same reason start their ballots one after the other, in a line that begins with the
leader. A member whose turn has passed postpones its ballot while another member's goes on.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from covey.proto.changes import QuorumAwaited, QuorumLost
from covey.wire.membership import Trouble

if TYPE_CHECKING:
    import random

    from covey.proto.membership.state import Outbox, ViewPosition, ViewRound

VIEW_PATIENCE: Final = 30.0
"""Seconds after which a member that needs a new view, and gets none, gives up."""
RELINK: Final = 1.0
"""Seconds in which a member whose link ended may link again. A reset can be forged, so it does not exclude a member at
once; the exit of a process is reported by its keeper."""
STAGGER: Final = 0.15
"""Seconds between the ballots that members start for the same reason: longer than one takes on a local network."""
MOST_TURNS: Final = 8
"""A member waits for at most this many others to start a ballot first."""
REPEAT_EVERY: Final = 0.3
FINISH_TOGETHER: Final = 0.5
"""Seconds that members whose program has ended wait for the others to end too. Then all learn that the run is over, and
none is taken for one that left early."""


class Need:
    """One node's need for the next view, and the deadlines that follow from it. All are inf while there is none."""

    def __init__(
        self,
        position: ViewPosition,
        outbox: Outbox,
        round: ViewRound,
        random: random.Random,
        *,
        patience: float,
        relink: float,
        finish_together: float,
    ) -> None:
        self._position, self._outbox, self._round, self._random = position, outbox, round, random
        self.patience, self.relink = patience, relink
        self._finish_together = 0.0 if position.keeper is not None else finish_together
        self.since = math.inf
        """The time since which a new view is needed."""
        self.ballot_at = math.inf
        """When to start a ballot."""
        self.consider_at = math.inf
        """When to propose a view with the answers that are there."""
        self.repeat_at = math.inf
        self._warn_at = math.inf
        self._is_unhurried = False
        """Whether the next view can wait a little: some members have finished, and there is no other reason for it."""

    @property
    def is_there(self) -> bool:
        """Whether a new view is needed."""
        return self.since < math.inf

    @property
    def give_up_at(self) -> float:
        """When a member gives up; inf for a node that only votes."""
        return math.inf if self._position.votes_only else self.since + self.patience

    def next_deadline(self) -> float:
        """Return the first of these deadlines."""
        return min(self.give_up_at, self.ballot_at, self.repeat_at, self.consider_at, self._warn_at)

    def review(self, now: float) -> None:
        """Decide whether a new view is needed, and when to propose one."""
        position, presence = self._position, self._position.presence
        leaving = presence.leaving & set(position.view.ranks)
        is_urgent = self._is_urgent(leaving)
        is_ours = position.may_propose or position.is_member or position.is_leaving
        if position.is_excluded or position.is_last or not is_ours or not (is_urgent or leaving):
            self.calm()
        elif not self.is_there:
            self.since, self.repeat_at = now, now + REPEAT_EVERY
            self._warn_at = now + self.relink if position.is_member and position.keeper is None else math.inf
            self._is_unhurried = not is_urgent
            if position.may_propose:
                self.ballot_at = now + self._turn() + (0.0 if is_urgent else self._finish_together)
            else:
                self.tell()
        elif self._is_unhurried and is_urgent:
            self._is_unhurried = False
            self.hurry(now)
        if position.may_end and self._round.proposal is None and self.is_there:
            self.ballot_at = self._end_at(now)

    def _is_urgent(self, leaving: set[int]) -> bool:
        """Tell whether there is a reason for a view besides members of the view that have finished."""
        position, round = self._position, self._round
        return (
            round.is_wanted
            or round.wish is not None
            or round.freeze_number > position.view.number
            or round.proposal is not None
            or position.may_end
            or position.heard() != position.view.ranks
            or not leaving <= position.presence.finished
            or leaving == set(position.view.ranks)
        )

    def calm(self) -> None:
        """End all deadlines: no view is needed."""
        self.since = self.ballot_at = self.repeat_at = self.consider_at = self._warn_at = math.inf

    # Ballots

    def hurry(self, now: float) -> None:
        """Start a ballot as soon as it is this member's turn, if it has not planned one before."""
        self.ballot_at = min(self.ballot_at, now + self._turn())

    def lost(self, rank: int, now: float) -> None:
        """Note that a rank was given up: if it was the leader, its ballot will not come."""
        is_ours = self._position.may_propose and self._round.proposal is None and self.is_there
        if is_ours and rank == self._position.owner(self._position.ballot):
            self.hurry(now)

    def retry(self, now: float) -> None:
        """Start another ballot in this member's turn, because one was refused for a member that is not well."""
        self.ballot_at = now + self._turn() + STAGGER * self._random.random()

    def hold(self, now: float) -> None:
        """Postpone this member's own ballot while another member's goes on, but not for ever."""
        if not self._position.may_propose or self._round.proposal is not None:
            return
        if self.ballot_at == math.inf or now < self.since + self.patience / 2 + 2 * self.relink:
            self.ballot_at = now + 2 * self.relink + self._turn() + STAGGER * self._random.random()

    def drop_proposal(self, now: float) -> None:
        """Give up this member's own ballot for a later one."""
        self._round.proposal, self.consider_at = None, math.inf
        self.hold(now)

    def _turn(self) -> float:
        """Return how long this member waits for members before it in line to start a ballot."""
        position = self._position
        here = position.heard()
        if position.me not in here:
            return 0.0
        owner, leaving = position.owner(position.ballot), position.presence.leaving
        before = sorted(here, key=lambda rank: (rank in leaving, rank != owner, rank)).index(position.me)
        return STAGGER * min(before, MOST_TURNS) * (1 + self._random.random() / 4)

    def _end_at(self, now: float) -> float:
        """Return when this voter starts a ballot: once voters are a quorum, and no member can still be alive.

        A living member of the view proposes views itself; it has `patience` to be heard.
        """
        position, presence = self._position, self._position.presence
        ranks = position.view.ranks
        here = [rank for rank in ranks if rank == position.me or presence.is_linked(rank)]
        if not position.is_quorum(here):
            return math.inf
        may_live = any(rank != position.me and not presence.has_ended(rank) for rank in ranks)
        due = self.since + self.patience if may_live else now
        return max(now, due) + STAGGER * here.index(position.me) * (1 + self._random.random() / 4)

    # Messages and effects

    def tell(self) -> None:
        """Ask the other members for a view, if this node has a reason that they may not know."""
        position, presence = self._position, self._position.presence
        if self._round.is_wanted or position.is_leaving or position.keeper not in (None, position.me):
            is_finished = position.me in presence.finished
            trouble = Trouble(position.view.lineage, position.view.number, position.is_leaving, is_finished)
            # Only the acceptors can act on Trouble; but every member has to know that another leaves.
            for rank in position.audience() if position.is_leaving else position.acceptors():
                self._outbox.send(rank, trouble)

    def heard(self, rank: int, trouble: Trouble) -> None:
        """Note that a member asks for a view."""
        if trouble.leaves:
            self._position.presence.leaving.add(rank)
            if trouble.is_finished:
                self._position.presence.finished.add(rank)
        else:
            self._round.is_wanted = True

    def warn(self, now: float) -> None:
        """Report that a quorum is missing, if it is time: once for each new view that is needed."""
        if now < self._warn_at:
            return
        self._warn_at = math.inf
        position = self._position
        if not position.is_quorum(position.heard()):
            self._outbox.add(QuorumAwaited(position.missing(), position.view.tie_breaker, self.give_up_at - now))

    def give_up(self) -> None:
        """End this node's membership: there was no view within the patience. It goes on as a voter that leaves."""
        position = self._position
        self._outbox.add(QuorumLost(position.missing(), position.heard(), position.view.tie_breaker))
        position.votes_only = True
        position.presence.leaving.add(position.me)
        self._round.proposal, self.ballot_at, self.consider_at = None, math.inf, math.inf
