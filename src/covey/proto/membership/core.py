"""`Membership`: one node's part in the views of a generation. It passes every input to the part that it concerns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

from covey.proto.changes import Effect, Quorum
from covey.proto.membership import checks
from covey.proto.membership.ballots import Answerer, Proposer
from covey.proto.membership.installer import Forks, Installer
from covey.proto.membership.leader import Leading
from covey.proto.membership.need import FINISH_TOGETHER, RELINK, VIEW_PATIENCE, Need
from covey.proto.membership.state import Outbox, ViewPosition, ViewRound
from covey.wire import membership as wire
from covey.wire.membership import Accept, Accepted, Decided, Fork, Prepare, Promise, Pulse, Refuse, Trouble

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterable

    from covey.wire.membership import Record, State, Successor, View

Message: TypeAlias = wire.Membership


class Membership:
    """One node's part in a run's views. Perform `effects` in order after every call; `tick` at `next_deadline`."""

    def __init__(
        self,
        record: Record,
        id: bytes,
        life: bytes,
        random: random.Random,
        now: float,
        *,
        keeper: bytes | None = None,
        min_size: int = 1,
        quorum: Quorum = Quorum.MAJORITY,
        patience: float = VIEW_PATIENCE,
        relink: float = RELINK,
        finish_together: float = FINISH_TOGETHER,
        votes_only: bool = False,
    ) -> None:
        """Begin at a record: that of view 0, or the one that an earlier life of this node made durable.

        With `votes_only` the node is not a member, even if the record names its present life.
        """
        self._position = position = ViewPosition(record, id, life, keeper, votes_only, now)
        self._presence = position.presence
        self._outbox = outbox = Outbox(position)
        self._round = round = ViewRound()
        self._need = need = Need(
            position, outbox, round, random, patience=patience, relink=relink, finish_together=finish_together
        )
        self._leading = leading = Leading(position, outbox, round, need, now)
        self._installer = installer = Installer(position, outbox, round, need, leading)
        self._forks = forks = Forks(position, outbox, round, installer, random, quorum)
        self._answerer = Answerer(position, outbox, round, need, leading, installer, self._answered_itself)
        self._proposer = Proposer(position, outbox, round, need, installer, forks, self._answerer, min_size)
        need.review(now)

    # State

    @property
    def view(self) -> View:
        """The last installed view."""
        return self._position.view

    @property
    def ids(self) -> tuple[bytes, ...]:
        """The nodes of view 0 by rank, then the keeper, if there is one."""
        return self._position.ids

    @property
    def is_member(self) -> bool:
        """Whether this node is in the view, and not a voter, a keeper, or excluded."""
        return self._position.is_member

    @property
    def is_last(self) -> bool:
        """Whether no view can follow: the generation has a successor, or the run is over."""
        return self._position.is_last

    @property
    def hears_quorum(self) -> bool:
        """Whether this node hears a quorum of members that stay in the view: then the run is not over."""
        return self._installer.hears_quorum

    @property
    def is_electing(self) -> bool:
        """Whether a ballot about the next view holds up the operations of this node."""
        return self._round.freeze_number > self._position.view.number

    @property
    def ballot(self) -> int:
        """The highest promised ballot."""
        return self._position.ballot

    @property
    def leaving(self) -> Collection[int]:
        """The members that said that they leave."""
        return self._presence.leaving

    @property
    def finished(self) -> Collection[int]:
        """The members that leave because their programs have ended."""
        return self._presence.finished

    def leader(self, now: float) -> int | None:
        """Return the leading rank, as far as this node knows; at most one node at a time returns its own."""
        return self._leading.leader(now)

    def expected_leader(self, now: float) -> int | None:
        """Return the leading rank, or the one that leads when the lease of an earlier leader has ended."""
        return self._leading.expected(now, hears_quorum=self.hears_quorum)

    def next_deadline(self) -> float:
        """Return when to call `tick`; inf for never."""
        return min(self._need.next_deadline(), self._leading.next_deadline(), self._answerer.repeat_at)

    def effects(self) -> list[Effect]:
        """Return the effects to perform, in order, and clear them."""
        return self._outbox.take()

    # Inputs

    def link_up(self, peer_id: bytes, peer_life: bytes, now: float) -> bool:
        """Note a new link with this life of a node; False if the node is not in the generation."""
        position = self._position
        rank = position.ranks.get(peer_id)
        if rank is None or rank == position.me:
            return False
        self._presence.link_up(rank, peer_life, now)
        if position.keeper in (None, rank, position.me):  # members under a keeper learn of missed views from it
            self._outbox.send(rank, position.pulse())
        self._proposer.ask(rank)
        self._heard_news(now)
        return True

    def link_down(self, peer_id: bytes, now: float) -> None:
        """Note that the link with a node ended: a reason to propose a view, but no proof that the node is lost."""
        rank = self._position.ranks.get(peer_id)
        if rank is not None and self._presence.link_down(rank, now):
            self._heard_news(now)
            self._need.lost(rank, now)

    def judged(self, peer_id: bytes, now: float, *, is_dead: bool) -> None:
        """Note that health gave a node up, or trusts it again. Until then it is not well even if it answers."""
        if (rank := self._position.ranks.get(peer_id)) is None:
            return
        self._presence.believe(rank, is_dead=is_dead)
        self._heard_news(now)
        if is_dead:
            self._need.lost(rank, now)

    def vouched(self, peer_id: bytes, now: float) -> None:
        """Note that a keeper says that the process of a node is alive and not stopped; repeat while it is so."""
        if (rank := self._position.ranks.get(peer_id)) is not None:
            self._presence.vouch(rank, now)

    def disturbed(self, number: int, now: float) -> None:
        """Ask for a new view because, in attempt `number`, a lane broke, or an operation is late."""
        if number == self.view.number and not self._position.is_excluded and not self._round.is_wanted:
            self._round.is_wanted = True
            self._need.tell()
            self._need.review(now)

    def leave(self, now: float, *, is_finished: bool = False) -> None:
        """Ask for a view without this member, whose operations are over; it votes until `Excluded`.

        With `is_finished`, the other members get a moment to finish too.
        """
        self._presence.leaving.add(self._position.me)
        if is_finished:
            self._presence.finished.add(self._position.me)
        if self.is_last and not self._position.is_excluded:
            self._installer.exclude(self.view)
            return
        self._need.tell()
        self._heard_news(now)

    def succeed(self, successor: Successor, now: float) -> None:
        """Ask for the view that ends this generation and names `successor`; all members compute the same one."""
        if not self.is_last and not self._position.is_excluded:
            self._round.wish = successor
            self._heard_news(now)

    def frozen(self, number: int, states: Iterable[State], now: float) -> None:
        """Note that all executors have stopped, in these states. Ignored if a view was installed meanwhile."""
        self._answerer.frozen(number, states, now)

    def received(self, peer_id: bytes, message: Message, now: float) -> None:
        """Take a message that came over the link with a node.

        Raises:
            RemoteProtocolError: the message breaks the protocol; the link should be closed.
        """
        position = self._position
        rank = position.ranks.get(peer_id)
        if rank is None or not self._presence.is_linked(rank):
            return
        if _lineage(message) != self.view.lineage:
            # The sender of a Fork is in that lineage already: answers would go back and forth for ever.
            if self._forks.met(rank, message.view.lineage if isinstance(message, Fork) else _lineage(message)):
                self._heard_news(now)
            return
        checks.check_ballot(rank, message, position)
        number, is_current = self.view.number, rank == position.keeper or rank in self.view.ranks
        match message:
            case Pulse() if message.number < number:
                self._installer.send_view(rank, message.number + 1)
            case Trouble() if message.number < number + self.is_last:
                if message.leaves:  # for good: whichever view it knew, and also if a view is without it already
                    self._need.heard(rank, message)
                    self._need.review(now)
                self._installer.send_view(rank, message.number + 1)
            case Prepare() | Accept() if not self._installer.is_next(rank, _number(message)):
                pass
            case _ if not is_current:
                pass  # a view excluded it: it only learns what was decided
            case Pulse() if message.number > number:
                self._outbox.send(rank, position.pulse())
            case Pulse():
                self._leading.received(rank, message, now)
            case Decided():
                self._installer.received(rank, message.view, now)
            case Trouble() if message.number == number and not position.is_excluded:
                self._need.heard(rank, message)
                self._installer.reconsider_end(now)
                self._need.review(now)
            case Fork() if self._forks.are_allowed and message.number == number:
                self._forks.received(rank, message, now)
            case Prepare():
                self._answerer.prepare(rank, message.ballot, now)
            case Accept():
                self._answerer.accept(rank, message, now)
            case Promise() | Accepted() | Refuse() if message.number == number + 1:
                if isinstance(message, Promise):
                    checks.check_promise(rank, message, position, self._round)
                self._proposer.received(rank, message, now)

    def tick(self, now: float) -> None:
        """Act on the deadlines that have passed."""
        need = self._need
        if now >= need.give_up_at:
            need.give_up()
            self._heard_news(now)
        if now >= need.ballot_at:
            self._proposer.start_ballot(now)
        if now >= need.consider_at:
            need.consider_at = math.inf
            self._proposer.consider(now)
        if now >= need.repeat_at:
            self._proposer.repeat(now)
        need.warn(now)
        self._leading.tick(now)
        self._answerer.tick(now)

    # Helpers

    def _answered_itself(self, message: Promise | Accepted, now: float) -> None:
        self._proposer.received(self._position.me, message, now)

    def _heard_news(self, now: float) -> None:
        """React to a change in the set of members that are heard."""
        self._answerer.repeat(now)
        self._proposer.consider(now)
        self._installer.reconsider_end(now)
        self._need.review(now)


def _number(message: Prepare | Accept) -> int:
    return message.view.number if isinstance(message, Accept) else message.number


def _lineage(message: Message) -> bytes:
    match message:
        case Accept() | Decided():
            return message.view.lineage
        case Fork():
            return message.parent
    return message.lineage
