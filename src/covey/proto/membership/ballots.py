"""The two roles of a node in ballots about the next view.

`Answerer` freezes the operations of the node, promises, and accepts. `Proposer` starts a ballot: it asks all members,
waits for their answers, proposes a view, and decides it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from covey.base.errors import RemoteProtocolError
from covey.proto import views
from covey.proto.ballot import Proposal
from covey.proto.changes import Freeze
from covey.proto.membership import checks
from covey.proto.membership.need import REPEAT_EVERY
from covey.wire.membership import Accept, Accepted, Prepare, Promise, Refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from covey.proto.membership.installer import Forks, Installer
    from covey.proto.membership.leader import Leading
    from covey.proto.membership.need import Need
    from covey.proto.membership.state import Outbox, ViewPosition, ViewRound
    from covey.wire.membership import State

CROWD_OF_MEMBERS: Final = 128
"""In a view of more members, a change of what is heard is not told to the proposer at once, but with those that follow:
each answer names all members, and when many are lost, all others would send one for each of them."""
REPEAT_SOON: Final = 0.05
"""Seconds for which changes are collected, for each `CROWD_OF_MEMBERS` members."""
RELINK_VOUCHED: Final = 5.0
"""Like RELINK, while a keeper vouches for the member: then it is only slow. All operations wait meanwhile, and the
network may be cut for long, so this is little more than the time that a silent machine gets. On one host no network can
be cut, and a member has all the time that it has to answer."""


class Answerer:
    """Answers ballots for the next view, of this node too."""

    def __init__(
        self,
        position: ViewPosition,
        outbox: Outbox,
        round: ViewRound,
        need: Need,
        leading: Leading,
        installer: Installer,
        tell_proposer: Callable[[Promise | Accepted, float], None],
    ) -> None:
        """Begin with no answer; `tell_proposer` takes answers to ballots of this node itself."""
        self._position, self._outbox, self._round, self._need = position, outbox, round, need
        self._leading, self._installer, self._tell_proposer = leading, installer, tell_proposer
        self.repeat_at = math.inf
        """When to answer again, because other ranks are heard than before."""

    def prepare(self, rank: int, ballot: int, now: float) -> None:
        """Take the ballot of a rank: freeze, then promise it; or refuse it."""
        position, round = self._position, self._round
        if ballot < position.ballot:
            self._refuse(rank)
            return
        position.seen, round.pending = max(position.seen, ballot), max(round.pending, ballot)
        must_freeze = round.states is None and position.stays
        number = position.view.number + 1
        if must_freeze and round.freeze_number != number:
            round.freeze_number = number
            self._outbox.add(Freeze(number))
        self._need.review(now)
        if rank != position.me:
            self._need.hold(now)
        if not must_freeze:
            self._promise(now)

    def frozen(self, number: int, states: Iterable[State], now: float) -> None:
        """Note that all executors have stopped, in these states. Ignored if a view was installed meanwhile."""
        round = self._round
        if number != round.freeze_number or round.states is not None:
            return
        round.states = mine = tuple(states)
        if round.proposal is not None:
            round.proposal.answers = {
                rank: answer
                for rank, answer in round.proposal.answers.items()
                if views.fits(answer.states or (), mine, self._position.view)
            }  # members whose answers do not fit are asked again
        self._promise(now)

    def repeat(self, now: float) -> None:
        """Answer the promised ballot again, because other ranks are heard than before; in a crowd, soon."""
        if not self._may_repeat():
            return
        if (size := len(self._position.view.ranks)) <= CROWD_OF_MEMBERS:
            self._answer(now)
        else:
            self.repeat_at = min(self.repeat_at, now + REPEAT_SOON * size / CROWD_OF_MEMBERS)

    def tick(self, now: float) -> None:
        """Answer again, if it is time."""
        if now >= self.repeat_at:
            self.repeat_at = math.inf
            if self._may_repeat():
                self._answer(now)

    def _may_repeat(self) -> bool:
        return self._round.answered >= 0 and self._round.answered == self._position.ballot

    def accept(self, rank: int, message: Accept, now: float) -> None:
        """Take a proposal of a rank; RemoteProtocolError if no correct member makes it."""
        position = self._position
        if message.ballot < position.ballot:
            self._refuse(rank)
            return
        if position.owner(message.ballot) != rank:
            raise RemoteProtocolError(f"member {rank} proposed in ballot {message.ballot}, which is not its own")
        checks.check_follows(rank, message.view, position, self._round)
        is_doubtful = not message.view.ranks and rank != position.me and self._installer.hears_quorum
        if position.me not in position.acceptors() or is_doubtful:
            return
        if message.ballot > position.ballot:
            self._leading.promise(message.ballot, now)
        if position.acceptor.accepted_ballot < message.ballot:
            position.acceptor.accept(message.ballot, message.view)
            self._outbox.persist()
        accepted = Accepted(position.view.lineage, position.view.number + 1, message.ballot)
        if rank == position.me:
            self._tell_proposer(accepted, now)
        else:
            self._need.hold(now)
            self._outbox.send(rank, accepted)

    def _refuse(self, rank: int) -> None:
        view = self._position.view
        self._outbox.send(rank, Refuse(view.lineage, view.number + 1, self._position.ballot))

    def _promise(self, now: float) -> None:
        """Promise the highest ballot that was asked for, and answer its owner."""
        round = self._round
        ballot, round.pending = round.pending, -1
        if ballot < self._position.ballot:
            return  # its owner will ask again, and be refused
        if ballot > self._position.ballot:
            self._leading.promise(ballot, now)
        round.answered = ballot
        self._answer(now)

    def _answer(self, now: float) -> None:
        """Report the states of this frozen member, and which ranks it hears, to the owner of the promised ballot."""
        position, round = self._position, self._round
        acceptor, view, me = position.acceptor, position.view, position.me
        promise = Promise(
            view.lineage,
            view.number + 1,
            round.answered,
            position.presence.heard(rank for rank in view.ranks if rank != me),
            round.states if position.stays else None,
            acceptor.accepted_ballot,
            acceptor.accepted,
            me in position.presence.finished,
            round.wish if position.stays else None,
        )
        owner = position.owner(round.answered)
        if owner == me:
            self._tell_proposer(promise, now)
        else:
            self._outbox.send(owner, promise)


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
