"""The answers of a node to ballots: it freezes its operations, promises, and accepts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from covey.base.errors import RemoteProtocolError
from covey.proto import views
from covey.proto.changes import Freeze
from covey.proto.membership import checks
from covey.wire.membership import Accepted, Promise, Refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from covey.proto.membership.installer import Installer
    from covey.proto.membership.leading import Leading
    from covey.proto.membership.need import Need
    from covey.proto.membership.outbox import Outbox
    from covey.proto.membership.position import ViewPosition
    from covey.proto.membership.round import ViewRound
    from covey.wire.membership import Accept, State


CROWD: Final = 128
"""In a view of more members, a change of what is heard is not told to the proposer at once, but with those that follow:
each answer names all members, and when many are lost, all others would send one for each of them."""
REPEAT_SOON: Final = 0.05
"""Seconds for which changes are collected, for each `CROWD` members."""


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
        if (size := len(self._position.view.ranks)) <= CROWD:
            self._answer(now)
        else:
            self.repeat_at = min(self.repeat_at, now + REPEAT_SOON * size / CROWD)

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
