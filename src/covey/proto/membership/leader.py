"""The leader of a view: the owner of the highest promised ballot, while a quorum echoes its claims.

The owner claims (`Pulse`) and the other members echo the time of the claim; the echoes of a quorum are a lease of LEASE
seconds from the claim. A member that promises a later ballot does not echo any more. A new leader waits a little longer
than a lease after its first quorum before it leads, so there is at most one leader at any time if clocks run at nearly
the same rate. Proposing views does not wait for this.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from covey.proto.membership.need import STAGGER
from covey.wire.membership import Pulse

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from covey.proto.membership.need import Need
    from covey.proto.membership.state import Outbox, ViewPosition, ViewRound

LEASE: Final = 2.0
"""Seconds that a claim lasts. A longer lease delays a new leader; a shorter one needs more pulses."""
CLOCK_DRIFT: Final = 1.1
"""How much longer a lease may be by another clock."""
PULSE_EVERY: Final = LEASE / 4
LEADERLESS: Final = 3 * LEASE
"""Seconds without a leader after which a member claims to lead."""


class Lease:
    """One member's claim to lead, while the highest ballot it knows is its own."""

    def __init__(self, title_at: float = math.inf) -> None:
        self._title_at = title_at
        """When this member may begin to lead."""
        self._echoes: dict[int, float] = {}

    def echoed(self, rank: int, stamp: float, is_quorum: Callable[[Collection[int]], bool], now: float) -> None:
        """Note the echo of a claim; `is_quorum` tells whether some ranks, with this member, are a quorum."""
        self._echoes[rank] = max(stamp, self._echoes.get(rank, -math.inf))
        if self._title_at == math.inf and self._until(is_quorum) > now:
            self._title_at = now + LEASE * CLOCK_DRIFT

    def lost(self) -> None:
        """Give up the lease: a later ballot was promised."""
        self._title_at, self._echoes = math.inf, {}

    def is_held(self, is_quorum: Callable[[Collection[int]], bool], now: float) -> bool:
        """Tell whether this member leads."""
        return self._title_at <= now < self._until(is_quorum)

    def _until(self, is_quorum: Callable[[Collection[int]], bool]) -> float:
        """Return when the lease ends: LEASE seconds after the last claim that a quorum echoed."""
        if is_quorum(()):
            return math.inf
        ranks = sorted(self._echoes, key=lambda rank: -self._echoes[rank])
        for count in range(1, len(ranks) + 1):
            if is_quorum(ranks[:count]):
                return self._echoes[ranks[count - 1]] + LEASE
        return -math.inf


class Leading:
    """Promises ballots, whose owners lead; claims the lead for this node, or echoes the claims of the leader."""

    def __init__(self, position: ViewPosition, outbox: Outbox, round: ViewRound, need: Need, now: float) -> None:
        self._position, self._outbox, self._round, self._need = position, outbox, round, need
        is_first = position.view.number == 0 and position.owner(position.ballot) == position.me
        self._lease = Lease(now if is_first else math.inf)
        self._leader_heard_at = now
        self._pulse_at = now

    def leader(self, now: float) -> int | None:
        """Return the leading rank, as far as this node knows; at most one node at a time returns its own."""
        position = self._position
        owner = position.owner(position.ballot)
        if not position.view.ranks:
            return None
        if owner == position.me:
            is_leading = position.claims and self._lease.is_held(position.is_quorum_with_me, now)
        else:
            is_leading = now < self._leader_heard_at + LEASE
        if owner == position.keeper:
            owner = position.view.ranks[0]
        return owner if is_leading and owner in position.view.ranks else None

    def expected(self, now: float, *, hears_quorum: bool) -> int | None:
        """Return the leading rank, or the one that leads next: it is known as soon as a view begins.

        A new leader waits for the lease of an earlier one to end. If the owner of the highest ballot is not in the
        view, the first member claims to lead.
        """
        position = self._position
        leader, owner = self.leader(now), position.owner(position.ballot)
        if leader is not None or not hears_quorum or not position.view.ranks or owner == position.keeper:
            return leader
        if owner == position.me:
            return owner if position.claims else None
        return None if owner in position.view.ranks else position.view.ranks[0]

    def promise(self, ballot: int, now: float) -> None:
        """Promise a ballot: nothing in an earlier one is accepted any more, and its owner leads."""
        self._position.acceptor.promised = ballot
        self._outbox.persist()
        self._lease.lost()  # even if the ballot is this member's own: another may have led by one in between
        if self._round.proposal is not None and self._round.proposal.ballot < ballot:
            self._need.drop_proposal(now)

    def begun(self, now: float) -> None:
        """Note that a view begins: its leader has a while to be heard."""
        self._leader_heard_at = now

    def received(self, rank: int, pulse: Pulse, now: float) -> None:
        """Take the claim of a leader, or the echo of this node's own claim, in the present view."""
        position = self._position
        if pulse.claims:
            is_due = pulse.promised > position.ballot and not self._need.is_there
            if is_due and position.owner(pulse.promised) == rank:
                self.promise(pulse.promised, now)
            if pulse.promised == position.ballot:
                self._leader_heard_at = now
            self._outbox.send(rank, position.pulse(pulse.stamp))
        else:
            position.seen = max(position.seen, pulse.promised)
            if position.claims and pulse.promised == position.ballot and 0 < pulse.echo <= now:
                self._lease.echoed(rank, pulse.echo, position.is_quorum_with_me, now)

    def next_deadline(self) -> float:
        """Return when to call `tick`; inf for never."""
        return self._pulse_at if self._position.claims else self._claim_at()

    def tick(self, now: float) -> None:
        """Repeat the claim of this node, or begin to claim if there was no leader for long."""
        if self._position.claims:
            if now >= self._pulse_at:
                self._claim(now)
        elif now >= self._claim_at():
            self.promise(self._position.next_ballot(), now)
            self._claim(now)

    def _claim_at(self) -> float:
        position = self._position
        if not position.is_member or position.keeper is not None or self._need.is_there or position.is_last:
            return math.inf
        return self._leader_heard_at + LEADERLESS + 2 * STAGGER * position.view.ranks.index(position.me)

    def _claim(self, now: float) -> None:
        position = self._position
        self._pulse_at = now + PULSE_EVERY
        claim = Pulse(position.view.lineage, position.view.number, position.ballot, claims=True, stamp=now)
        for rank in position.audience():
            self._outbox.send(rank, claim)
