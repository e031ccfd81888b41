"""The ballots that a node starts: it asks all members, waits for their answers, proposes a view, and decides it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from covey.proto.ballot import Proposal
from covey.proto.membership.need import REPEAT_EVERY
from covey.wire.membership import Accept, Accepted, Prepare, Promise, Refuse

if TYPE_CHECKING:
    from collections.abc import Iterable

    from covey.proto.membership.answerer import Answerer
    from covey.proto.membership.forks import Forks
    from covey.proto.membership.installer import Installer
    from covey.proto.membership.need import Need
    from covey.proto.membership.outbox import Outbox
    from covey.proto.membership.position import ViewPosition
    from covey.proto.membership.round import ViewRound

RELINK_VOUCHED: Final = 5.0
"""Like RELINK, while a keeper vouches for the member: then it is only slow. All operations wait meanwhile, and the
network may be cut for long, so this is little more than the time that a silent machine gets. On one host no network can
be cut, and a member has all the time that it has to answer."""


class Proposer:
    """Proposes the next view in ballots of this node."""

    def __init__(
        self,
        position: ViewPosition,
        outbox: Outbox,
        round: ViewRound,
        need: Need,
        installer: Installer,
        forks: Forks,
        answerer: Answerer,
        min_size: int,
    ) -> None:
        self._position, self._outbox, self._round, self._need = position, outbox, round, need
        self._installer, self._forks, self._answerer = installer, forks, answerer
        self._min_size = min_size

    def start_ballot(self, now: float) -> None:
        """Ask all members to freeze and to report their states."""
        position = self._position
        ballot = position.next_ballot()
        self._round.proposal = Proposal(ballot, position.view, now, position.presence.is_well)
        self._ask(self._round.proposal, position.audience())
        self._need.ballot_at, self._need.repeat_at = math.inf, now + REPEAT_EVERY
        self._answerer.prepare(position.me, ballot, now)

    def ask(self, rank: int) -> None:
        """Ask a rank whose link is new."""
        if self._round.proposal is not None:
            self._ask(self._round.proposal, [rank])

    def repeat(self, now: float) -> None:
        """Ask the ranks that have not answered again; and ask for a view again."""
        self._need.repeat_at = now + REPEAT_EVERY
        if self._round.proposal is not None:
            self._ask(self._round.proposal, self._position.audience())
        self._need.tell()

    def received(self, rank: int, message: Promise | Accepted | Refuse, now: float) -> None:
        """Take the answer of a rank to a ballot of this node."""
        position, proposal = self._position, self._round.proposal
        if isinstance(message, Refuse):
            position.seen = max(position.seen, message.promised)
            if proposal is not None and message.promised > proposal.ballot:
                self._need.drop_proposal(now)
                if not position.presence.is_well(position.owner(message.promised)):
                    self._need.retry(now)
        elif proposal is None or message.ballot != proposal.ballot:
            return
        elif isinstance(message, Promise):
            if proposal.view is None:
                proposal.answered(rank, message, now)
                self.consider(now)
        elif proposal.view is not None:
            proposal.accepted_by.add(rank)
            if position.is_quorum(proposal.accepted_by):
                self._installer.decided(proposal.view, now)

    def consider(self, now: float) -> None:
        """Propose a view if enough members have answered and no further answer is expected."""
        proposal = self._round.proposal
        if proposal is None:
            return
        self._need.consider_at = math.inf
        if proposal.view is not None or not proposal.answers:
            return
        position = self._position
        has_quorum = position.is_quorum(proposal.answers)
        found = proposal.found if has_quorum else None
        if found is None:
            if now < (settled_at := self._settled_at(proposal, now)):
                self._need.consider_at = settled_at
                return
            clique = proposal.clique()
            if clique and len(clique) < self._min_size:
                return
            if not has_quorum:
                if self._forks.are_allowed and position.me in clique:
                    self._forks.start(clique, now)
                return
            found = proposal.value(clique, position.successor_of(clique, proposal.wish_of(clique)))
        proposal.view = found
        self._ask(proposal, position.audience())
        if position.me in position.acceptors():
            self._answerer.accept(position.me, Accept(proposal.ballot, found), now)

    def _ask(self, proposal: Proposal, ranks: Iterable[int]) -> None:
        """Send the current phase of a proposal to the ranks that have not answered it."""
        if proposal.view is not None:
            accept = Accept(proposal.ballot, proposal.view)
            acceptors = self._position.acceptors()
            for rank in ranks:
                if rank in acceptors and rank not in proposal.accepted_by:
                    self._outbox.send(rank, accept)
        else:
            view = self._position.view
            for rank in ranks:
                if rank not in proposal.answers:
                    self._outbox.send(rank, Prepare(view.lineage, view.number + 1, proposal.ballot))

    def _settled_at(self, proposal: Proposal, now: float) -> float:
        """Return until when to wait for answers, and for links between members that answered; or an earlier time.

        This is asked after every answer, of which there may be a thousand, so it ends with the first reason to wait.
        """
        position, presence, need = self._position, self._position.presence, self._need
        answer_within = need.patience / 2
        if position.may_end:
            away = [rank for rank in position.view.ranks if rank not in proposal.answers]
            may_live = [rank for rank in away if not presence.has_ended(rank)]
            return need.since + need.patience if may_live else -math.inf
        relink_vouched = answer_within if position.keeper is not None else min(answer_within, RELINK_VOUCHED)
        # A member that answered, but whose link has ended since, would not be in the view either.
        settled_at = -math.inf
        for rank in position.view.ranks:
            if rank not in proposal.answers or not presence.is_well(rank):
                expected_until = presence.expected_until(
                    rank, need.since, answer_within=answer_within, relink=need.relink, relink_vouched=relink_vouched
                )
                if (settled_at := max(settled_at, expected_until)) > now:
                    return settled_at
        if proposal.awaits_wishes():  # the others are about to name the same generation
            settled_at = max(settled_at, proposal.changed_at + answer_within)
        if left_out := proposal.left_out():
            relinked_at = min(proposal.changed_at + need.relink, need.since + answer_within)
            vouched_until = min(max(map(presence.vouched_until, left_out)), need.since + relink_vouched)
            settled_at = max(settled_at, relinked_at, vouched_until)
        return settled_at
