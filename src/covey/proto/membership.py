"""Agreement of a generation's members on the next view, when one is lost, leaves, or a lane breaks.

View v + 1 is one consensus among the members of view v (`proto.ballot`). A member that needs a new view starts a
ballot, after a delay that depends on its rank. Each member that is asked *freezes* its operations, then promises and
reports its state in every group. The proposer proposes the largest set of members that answered and hear each other,
and with it the fate of every operation (`proto.views.judge`). Only an installed view ends the freeze, so nothing that
happens later can change a decided fate.

A generation also ends by a view: one that names the next generation (`successor`), or one without ranks, when no member
stays or none is left; then the run is over. No view follows either.

Invariants, held in the simulation whatever the network does:

1. A view number has one value, and every member installs a prefix of the same sequence of views.
2. Only members that answered are in a view, and their operations have not moved since.
3. A quorum is counted over all of the last view, whatever is believed of its members; `min_size` must be met as well.
4. At most one member leads at a time (`proto.lease`), and only by its own ballot.
5. When the network is good, there is a view of all well members within a bounded time. A member that cannot be in it
   learns so: `Excluded`, or `QuorumLost` after `patience`.
6. A generation has one successor, or the run has one end: never both, and never a view after them.

A node that was started anew is not a member any more, but its disk holds what it was bound to. It goes on as a *voter*:
it answers, but cannot be in the next view, until a view excludes it. A member that leaves or gave up does the same. If
voters are a quorum, they end the run once all other members of the view were started anew too, or were not heard for
`patience`.

Messages are checked against what this node knows: a view must follow from the last one, come from a member of it, and
contain this node only if this node answered. Any other message ends the link it came on.

If one keeper started all members, no partition is possible: the keeper alone proposes and accepts. With `quorum="any"`,
members that are not a quorum `Fork`: they go on as a lineage of their own, and never merge again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, TypeAlias

from covey.base.errors import RemoteProtocolError
from covey.proto import views
from covey.proto.ballot import PaxosAcceptor, Proposal, without
from covey.proto.changes import Effect, Excluded, Freeze, Installed, Persist, Quorum, QuorumLost, Send, Waiting
from covey.proto.lease import LEASE, Lease
from covey.proto.presence import Presence
from covey.wire import membership as wire
from covey.wire.membership import Accept, Accepted, Decided, Fork, Prepare, Promise, Pulse, Refuse, Trouble, View

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Iterable

    from covey.wire.membership import Record, State, Successor

PATIENCE: Final = 30.0
"""Seconds after which a member that needs a new view, and gets none, gives up."""
RELINK: Final = 1.0
"""Seconds in which a member whose link ended may link again. A reset can be forged, so it does not exclude a member at
once; the exit of a process is reported by its keeper."""
RELINK_VOUCHED: Final = 5.0
"""The same while its keeper vouches for it: then it is only slow. All operations wait meanwhile, and the network may be
cut for long, so this is little more than the time that a silent machine gets. On one host no network can be cut, and a
member has all the time that it has to answer."""
STAGGER: Final = 0.15
"""Seconds between the ballots that members start for the same reason: longer than one takes on a local network."""
MOST_TURNS: Final = 8
"""A member waits for at most this many others to start a ballot first."""
REPEAT_EVERY: Final = 0.3
FINISH_TOGETHER: Final = 0.5
"""Seconds that members whose program has ended wait for the others to end too. Then all learn that the run is over, and
none is taken for one that left early."""
PULSE_EVERY: Final = LEASE / 4
LEADERLESS: Final = 3 * LEASE
"""Seconds without a leader after which a member claims to lead."""
PAST_VIEWS: Final = 64
"""Views that are kept for members that missed them. Only a member that installed a view can be in the next one, so a
member that lacks more views is in none of them."""
MOST_AHEAD: Final = 1 << 40
"""How far a ballot may be above all that this node knows. Ballots grow by a few each time, so no member needs more; and
no member can use up the numbers of the others."""
MOST_SKIPPED: Final = 1 << 20
"""A fork skips a random count of view numbers, at most this many, so that bytes of one lineage are never taken for an
attempt of another."""

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
        patience: float = PATIENCE,
        relink: float = RELINK,
        finish_together: float = FINISH_TOGETHER,
        votes_only: bool = False,
    ) -> None:
        """Begin at a record: that of view 0, or the one that an earlier life of this node made durable.

        With `votes_only` the node is not a member, even if the record names its present life.
        """
        self._acceptor = PaxosAcceptor(record)
        self._ids = [seat.id for seat in record.members] + ([] if keeper is None else [keeper])
        self._ranks = {known: rank for rank, known in enumerate(self._ids)}
        """By id: ranks of view 0; the keeper has the one after them."""
        self._me = self._ranks[id]
        self._keeper = None if keeper is None else len(record.members)
        self._random, self._quorum, self._min_size = random, quorum, min_size
        self._patience, self._relink = patience, relink
        self._finish_together = 0.0 if keeper is not None else finish_together
        is_keeper = self._me == self._keeper
        self._is_voter = not is_keeper and (votes_only or record.members[self._me].life != life)
        """Whether it votes for an earlier life of its node, which was a member."""
        self._votes_only = is_keeper or self._is_voter
        self._effects: list[Effect] = []
        self._past_views = {record.view.number: record.view}
        self._fork: Fork | None = None
        self._parted_with: tuple[int, ...] = ()
        """Ranks that a fork left behind; the next view reports them as lost."""
        self._presence = Presence(record.members, self._me, now)
        # Progress towards the next view.
        self._is_wanted = False
        self._wish: Successor | None = None
        """The generation that this member wants the next view to name."""
        self._doubted: View | None = None
        """An end of the run that some members report although a quorum seems to stay in it."""
        self._tellers: set[int] = set()
        """The members that report it."""
        self._freeze_number = -1
        self._states: tuple[State, ...] | None = None
        """The states in which the operations were frozen."""
        self._pending = -1
        """The highest ballot whose answer waits for the freeze."""
        self._answered = -1
        self._proposal: Proposal | None = None
        self._seen = record.promised
        """The highest known ballot."""
        self._is_excluded = self._me not in (*record.view.ranks, self._keeper)
        # Deadlines.
        self._trouble_at = math.inf
        """The time since which a new view is needed."""
        self._ballot_at = self._repeat_at = self._consider_at = self._warn_at = math.inf
        self._is_unhurried = False
        """Whether the next view can wait a little: some members have finished, and there is no other reason for it."""
        is_first = record.view.number == 0 and self._owner(record.promised) == self._me
        self._lease = Lease(now if is_first else math.inf)
        self._leader_heard_at = now
        self._pulse_at = now
        self._review(now)

    # State

    @property
    def view(self) -> View:
        """The last installed view."""
        return self._acceptor.view

    @property
    def ids(self) -> tuple[bytes, ...]:
        """The nodes of view 0 by rank, then the keeper, if there is one."""
        return tuple(self._ids)

    @property
    def is_member(self) -> bool:
        """Whether this node is in the view, and not a voter, a keeper, or excluded."""
        return not self._votes_only and not self._is_excluded

    @property
    def is_last(self) -> bool:
        """Whether no view can follow: the generation has a successor, or the run is over."""
        return self.view.successor is not None or not self.view.ranks

    @property
    def hears_quorum(self) -> bool:
        """Whether this node hears a quorum of members that stay in the view: then the run is not over."""
        heard = [rank for rank in self.view.ranks if rank != self._me and self._presence.is_well(rank)]
        staying = set(heard) - self._presence.leaving - self._tellers
        return not self.is_last and self._is_quorum({*staying, self._me} if self._stays else staying)

    @property
    def ballot(self) -> int:
        """The highest promised ballot."""
        return self._acceptor.promised

    @property
    def leaving(self) -> Collection[int]:
        """The members that said that they leave."""
        return self._presence.leaving

    def leader(self, now: float) -> int | None:
        """Return the leading rank, as far as this node knows; at most one node at a time returns its own."""
        owner = self._owner(self.ballot)
        if not self.view.ranks:
            return None
        if owner == self._me:
            is_leading = self._claims and self._lease.is_held(self._is_quorum_with_me, now)
        else:
            is_leading = now < self._leader_heard_at + LEASE
        if owner == self._keeper:
            owner = self.view.ranks[0]
        return owner if is_leading and owner in self.view.ranks else None

    def next_deadline(self) -> float:
        """Return when to call `tick`; inf for never."""
        pulse_at = self._pulse_at if self._claims else self._claim_at()
        return min(self._give_up_at(), self._ballot_at, self._repeat_at, self._consider_at, self._warn_at, pulse_at)

    def effects(self) -> list[Effect]:
        """Return the effects to perform, in order, and clear them."""
        effects, self._effects = self._effects, []
        return effects

    # Inputs

    def link_up(self, peer_id: bytes, peer_life: bytes, now: float) -> bool:
        """Note a new link with this life of a node; False if the node is not in the generation."""
        rank = self._ranks.get(peer_id)
        if rank is None or rank == self._me:
            return False
        self._presence.link_up(rank, peer_life, now)
        if self._keeper in (None, rank, self._me):  # members under a keeper learn of missed views from it
            self._send(rank, self._pulse())
        if self._proposal is not None:
            self._ask(self._proposal, [rank])
        self._heard_news(now)
        return True

    def link_down(self, peer_id: bytes, now: float) -> None:
        """Note that the link with a node ended: a reason to propose a view, but no proof that the node is lost."""
        rank = self._ranks.get(peer_id)
        if rank is not None and self._presence.link_down(rank, now):
            self._given_up(rank, now)

    def judged(self, peer_id: bytes, now: float, *, is_dead: bool) -> None:
        """Note that health gave a node up, or trusts it again. Until then it is not well even if it answers."""
        if (rank := self._ranks.get(peer_id)) is None:
            return
        self._presence.believe(rank, is_dead=is_dead)
        if is_dead:
            self._given_up(rank, now)
        else:
            self._heard_news(now)

    def vouched(self, peer_id: bytes, now: float) -> None:
        """Note that a keeper says that the process of a node is alive and not stopped; repeat while it is so."""
        if (rank := self._ranks.get(peer_id)) is not None:
            self._presence.vouch(rank, now)

    def disturbed(self, number: int, now: float) -> None:
        """Ask for a new view because, in attempt `number`, a lane broke, or an operation is late."""
        if number == self.view.number and not self._is_excluded and not self._is_wanted:
            self._is_wanted = True
            self._tell_trouble()
            self._review(now)

    def leave(self, now: float, *, is_finished: bool = False) -> None:
        """Ask for a view without this member, whose operations are over; it votes until `Excluded`.

        With `is_finished`, the other members get a moment to finish too.
        """
        self._presence.leaving.add(self._me)
        if is_finished:
            self._presence.finished.add(self._me)
        if self.is_last and not self._is_excluded:
            self._exclude(self.view)
            return
        self._tell_trouble()
        self._heard_news(now)

    def succeed(self, successor: Successor, now: float) -> None:
        """Ask for the view that ends this generation and names `successor`; all members compute the same one."""
        if not self.is_last and not self._is_excluded:
            self._wish = successor
            self._heard_news(now)

    def frozen(self, number: int, states: Iterable[State], now: float) -> None:
        """Note that all executors have stopped, in these states. Ignored if a view was installed meanwhile."""
        if number == self._freeze_number and self._states is None:
            self._states = tuple(states)
            if self._proposal is not None:
                self._proposal.answers = {
                    rank: answer
                    for rank, answer in self._proposal.answers.items()
                    if views.fits(answer.states or (), self._states, self.view)
                }  # members whose answers do not fit are asked again
            self._promise(now)

    def received(self, peer_id: bytes, message: Message, now: float) -> None:
        """Take a message that came over the link with a node.

        Raises:
            RemoteProtocolError: the message breaks the protocol; the link should be closed.
        """
        rank = self._ranks.get(peer_id)
        if rank is None or not self._presence.is_linked(rank):
            return
        is_current = rank == self._keeper or rank in self.view.ranks
        if _lineage(message) != self.view.lineage:
            # The sender of a Fork is in that lineage already: answers would go back and forth for ever.
            self._received_elsewhere(
                rank, message.view.lineage if isinstance(message, Fork) else _lineage(message), now
            )
            return
        self._check_ballot(rank, message)
        match message:
            case Pulse() if is_current or message.number < self.view.number:
                self._received_pulse(rank, message, now)
            case Trouble() if message.number < self.view.number + self.is_last:
                if message.leaves and rank not in self.view.ranks:
                    self._presence.leaving.add(rank)  # why a view is without it: the view came first, on another link
                self._send(rank, Decided(self._past_views.get(message.number + 1, self.view)))
            case Prepare() | Accept() if not self._is_next(rank, _number(message)):
                pass
            case _ if not is_current:
                pass  # a view excluded it: it only learns what was decided
            case Decided():
                self._received_decided(rank, message.view, now)
            case Trouble() if message.number == self.view.number and not self._is_excluded:
                self._received_trouble(rank, message, now)
            case Fork() if self._quorum is Quorum.ANY and message.number == self.view.number:
                self._check_fork(rank, message.view)
                self._received_fork(message, now)
            case Prepare():
                self._received_prepare(rank, message.ballot, now)
            case Accept():
                self._received_accept(rank, message, now)
            case Promise() | Accepted() | Refuse() if message.number == self.view.number + 1:
                if isinstance(message, Promise):
                    self._check_promise(rank, message)
                self._received_answer(rank, message, now)

    def _received_trouble(self, rank: int, trouble: Trouble, now: float) -> None:
        if trouble.leaves:
            self._presence.leaving.add(rank)
            if trouble.is_finished:
                self._presence.finished.add(rank)
        else:
            self._is_wanted = True
        self._reconsider_end(now)
        self._review(now)

    def tick(self, now: float) -> None:
        """Act on the deadlines that have passed."""
        if now >= self._give_up_at():
            self._give_up(now)
        if now >= self._ballot_at:
            self._start_ballot(now)
        if now >= self._consider_at:
            self._consider(now)
        if now >= self._repeat_at:
            self._repeat(now)
        if now >= self._warn_at:
            self._warn(now)
        if self._claims:
            if now >= self._pulse_at:
                self._pulse_all(now)
        elif now >= self._claim_at():
            self._promise_to(self._next_ballot(), now)
            self._pulse_all(now)

    # Whether a new view is needed

    @property
    def _stays(self) -> bool:
        """Whether this node can be in the next view."""
        return self.is_member and self._me not in self._presence.leaving

    @property
    def _may_propose(self) -> bool:
        if self._me == self._keeper:
            return True
        return self._keeper is None and not self.is_last and (self.is_member or self._may_end)

    @property
    def _may_end(self) -> bool:
        """Whether this node votes for its earlier life, and so may propose that the run is over."""
        return self._is_voter and self._me in self.view.ranks and not self._is_excluded and self._keeper is None

    @property
    def _claims(self) -> bool:
        return self._may_propose and self._owner(self.ballot) == self._me

    def _owner(self, ballot: int) -> int:
        return ballot % (len(self._acceptor.members) + 1)

    def _next_ballot(self) -> int:
        above = max(self.ballot, self._seen) + 1
        self._seen = above + (self._me - above) % (len(self._acceptor.members) + 1)
        return self._seen

    def _is_quorum(self, ranks: Collection[int]) -> bool:
        return views.is_quorum(self.view, ranks) if self._keeper is None else self._keeper in ranks

    def _is_quorum_with_me(self, ranks: Collection[int]) -> bool:
        return self._is_quorum({*ranks, self._me})

    def _acceptors(self) -> Collection[int]:
        return self.view.ranks if self._keeper is None else [self._keeper]

    def _audience(self) -> list[int]:
        """Return the other members and acceptors of the next view."""
        return sorted({*self.view.ranks, *self._acceptors()} - {self._me})

    def _heard_news(self, now: float) -> None:
        """React to a change in the set of members that are heard."""
        if self._answered >= 0 and self._answered == self.ballot:
            self._answer(now)
        if self._proposal is not None:
            self._consider(now)
        self._reconsider_end(now)
        self._review(now)

    def _given_up(self, rank: int, now: float) -> None:
        self._heard_news(now)
        is_ours = self._may_propose and self._proposal is None and self._trouble_at < math.inf
        if is_ours and rank == self._owner(self.ballot):
            self._ballot_at = min(self._ballot_at, now + self._turn())

    def _review(self, now: float) -> None:
        """Decide whether a new view is needed, and when to propose one."""
        leaving = self._presence.leaving & set(self.view.ranks)
        is_urgent = (
            self._is_wanted
            or self._wish is not None
            or self._freeze_number > self.view.number
            or self._proposal is not None
            or self._may_end
            or self._presence.heard(self.view.ranks) != self.view.ranks
            or not leaving <= self._presence.finished
            or leaving == set(self.view.ranks)
        )
        is_ours = self._may_propose or self.is_member or self._me in self._presence.leaving
        if self._is_excluded or self.is_last or not is_ours or not (is_urgent or leaving):
            self._be_calm()
        elif self._trouble_at == math.inf:
            self._trouble_at, self._repeat_at = now, now + REPEAT_EVERY
            self._warn_at = now + self._relink if self.is_member and self._keeper is None else math.inf
            self._is_unhurried = not is_urgent
            if self._may_propose:
                self._ballot_at = now + self._turn() + (0.0 if is_urgent else self._finish_together)
            else:
                self._tell_trouble()
        elif self._is_unhurried and is_urgent:
            self._is_unhurried = False
            self._ballot_at = min(self._ballot_at, now + self._turn())
        if self._may_end and self._proposal is None and self._trouble_at < math.inf:
            self._ballot_at = self._end_at(now)

    def _be_calm(self) -> None:
        self._trouble_at = self._ballot_at = self._repeat_at = self._consider_at = self._warn_at = math.inf

    def _end_at(self, now: float) -> float:
        """Return when this voter starts a ballot: once voters are a quorum, and no member can still be alive.

        A living member of the view proposes views itself; it has `patience` to be heard.
        """
        ranks = self.view.ranks
        here = [rank for rank in ranks if rank == self._me or self._presence.is_linked(rank)]
        if not self._is_quorum(here):
            return math.inf
        may_live = any(rank != self._me and not self._presence.has_ended(rank) for rank in ranks)
        due = self._trouble_at + self._patience if may_live else now
        return max(now, due) + STAGGER * here.index(self._me) * (1 + self._random.random() / 4)

    def _turn(self) -> float:
        """Return how long this member waits for members before it in line to start a ballot."""
        here = self._presence.heard(self.view.ranks)
        if self._me not in here:
            return 0.0
        owner = self._owner(self.ballot)
        before = sorted(here, key=lambda rank: (rank in self._presence.leaving, rank != owner, rank)).index(self._me)
        return STAGGER * min(before, MOST_TURNS) * (1 + self._random.random() / 4)

    def _drop_proposal(self, now: float) -> None:
        self._proposal, self._consider_at = None, math.inf
        self._hold(now)

    def _hold(self, now: float) -> None:
        """Postpone this member's own ballot while another member's goes on, but not for ever."""
        if not self._may_propose or self._proposal is not None:
            return
        if self._ballot_at == math.inf or now < self._trouble_at + self._patience / 2 + 2 * self._relink:
            self._ballot_at = now + 2 * self._relink + self._turn() + STAGGER * self._random.random()

    def _give_up_at(self) -> float:
        return math.inf if self._votes_only else self._trouble_at + self._patience

    def _warn(self, now: float) -> None:
        """Report that a quorum is missing, once for each new view that is needed."""
        self._warn_at = math.inf
        here = self._presence.heard(self.view.ranks)
        if not self._is_quorum(here):
            missing = tuple(rank for rank in self.view.ranks if rank not in here)
            self._effects.append(Waiting(missing, self.view.tie_breaker, self._give_up_at() - now))

    def _give_up(self, now: float) -> None:
        here = self._presence.heard(self.view.ranks)
        missing = tuple(rank for rank in self.view.ranks if rank not in here)
        self._effects.append(QuorumLost(missing, here, self.view.tie_breaker))
        self._votes_only = True
        self._presence.leaving.add(self._me)
        self._proposal, self._ballot_at, self._consider_at = None, math.inf, math.inf
        self._heard_news(now)

    # Proposing

    def _start_ballot(self, now: float) -> None:
        ballot = self._next_ballot()
        self._proposal = Proposal(ballot, self.view, now, self._presence.is_well)
        self._ask(self._proposal, self._audience())
        self._ballot_at, self._repeat_at = math.inf, now + REPEAT_EVERY
        self._received_prepare(self._me, ballot, now)

    def _ask(self, proposal: Proposal, ranks: Iterable[int]) -> None:
        """Send the current phase of a proposal to the ranks that have not answered it."""
        if proposal.view is not None:
            accept = Accept(proposal.ballot, proposal.view)
            acceptors = self._acceptors()
            for rank in ranks:
                if rank in acceptors and rank not in proposal.accepted_by:
                    self._send(rank, accept)
        else:
            for rank in ranks:
                if rank not in proposal.answers:
                    self._send(rank, Prepare(self.view.lineage, self.view.number + 1, proposal.ballot))

    def _repeat(self, now: float) -> None:
        self._repeat_at = now + REPEAT_EVERY
        if self._proposal is not None:
            self._ask(self._proposal, self._audience())
        self._tell_trouble()

    def _tell_trouble(self) -> None:
        is_leaving = self._me in self._presence.leaving
        is_finished = self._me in self._presence.finished
        if self._is_wanted or is_leaving or self._keeper not in (None, self._me):
            trouble = Trouble(self.view.lineage, self.view.number, is_leaving, is_finished)
            # Only the acceptors can act on Trouble; but every member has to know that another leaves.
            for rank in self._audience() if is_leaving else self._acceptors():
                self._send(rank, trouble)

    def _received_answer(self, rank: int, message: Promise | Accepted | Refuse, now: float) -> None:
        proposal = self._proposal
        if isinstance(message, Refuse):
            self._seen = max(self._seen, message.promised)
            if proposal is not None and message.promised > proposal.ballot:
                self._drop_proposal(now)
                if not self._presence.is_well(self._owner(message.promised)):
                    self._ballot_at = now + self._turn() + STAGGER * self._random.random()
        elif proposal is None or message.ballot != proposal.ballot:
            return
        elif isinstance(message, Promise):
            if proposal.view is None:
                proposal.answered(rank, message, now)
                self._consider(now)
        elif proposal.view is not None:
            proposal.accepted_by.add(rank)
            if self._is_quorum(proposal.accepted_by):
                self._decided(proposal.view, now)

    def _consider(self, now: float) -> None:
        """Propose a view if enough members have answered and no further answer is expected."""
        proposal, self._consider_at = self._proposal, math.inf
        if proposal is None or proposal.view is not None or not proposal.answers:
            return
        has_quorum = self._is_quorum(proposal.answers)
        found = proposal.found if has_quorum else None
        if found is None:
            if now < (settled_at := self._settled_at(proposal)):
                self._consider_at = settled_at
                return
            clique = proposal.clique()
            if clique and len(clique) < self._min_size:
                return
            if not has_quorum:
                if self._quorum is Quorum.ANY and self._me in clique:
                    self._start_fork(clique, now)
                return
            found = proposal.value(clique, self._successor_of(clique, proposal.wish_of(clique)))
        proposal.view = found
        self._ask(proposal, self._audience())
        if self._me in self._acceptors():
            self._received_accept(self._me, Accept(proposal.ballot, found), now)

    def _successor_of(self, clique: Collection[int], wish: Successor | None) -> Successor | None:
        """Return the wished generation without the members that are not in `clique`; None without a wish."""
        if wish is None:
            return None
        members = self._acceptor.members
        return without(wish, [members[rank] for rank in range(len(members)) if rank not in clique])

    def _settled_at(self, proposal: Proposal) -> float:
        """Return until when to wait for answers, and for links between members that answered."""
        presence, answer_within = self._presence, self._patience / 2
        if self._may_end:
            away = [rank for rank in self.view.ranks if rank not in proposal.answers]
            may_live = [rank for rank in away if not presence.has_ended(rank)]
            return self._trouble_at + self._patience if may_live else -math.inf
        relink_vouched = answer_within if self._keeper is not None else min(answer_within, RELINK_VOUCHED)
        # A member that answered, but whose link has ended since, would not be in the view either.
        awaited = [rank for rank in self.view.ranks if rank not in proposal.answers or not presence.is_well(rank)]
        settled_at = max(
            (
                presence.expected_until(
                    rank,
                    self._trouble_at,
                    answer_within=answer_within,
                    relink=self._relink,
                    relink_vouched=relink_vouched,
                )
                for rank in awaited
            ),
            default=-math.inf,
        )
        if proposal.awaits_wishes():  # the others are about to name the same generation
            settled_at = max(settled_at, proposal.changed_at + answer_within)
        if left_out := proposal.left_out():
            relinked_at = min(proposal.changed_at + self._relink, self._trouble_at + answer_within)
            vouched_until = min(max(map(presence.vouched_until, left_out)), self._trouble_at + relink_vouched)
            settled_at = max(settled_at, relinked_at, vouched_until)
        return settled_at

    def _decided(self, view: View, now: float) -> None:
        for rank in self._audience():
            self._send(rank, Decided(view))
        self._install(view, now)

    # Answering

    def _is_next(self, rank: int, number: int) -> bool:
        """Tell whether a view is the next one; help a peer that is behind, or ask one that is ahead."""
        if number <= self.view.number or self.is_last:
            self._send(rank, Decided(self._past_views.get(number, self.view)))
        elif number > self.view.number + 1:
            self._send(rank, self._pulse())
        return number == self.view.number + 1 and not self._is_excluded and not self.is_last

    def _received_prepare(self, rank: int, ballot: int, now: float) -> None:
        if ballot < self.ballot:
            self._send(rank, Refuse(self.view.lineage, self.view.number + 1, self.ballot))
            return
        self._seen, self._pending = max(self._seen, ballot), max(self._pending, ballot)
        must_freeze = self._states is None and self._stays
        if must_freeze and self._freeze_number != self.view.number + 1:
            self._freeze_number = self.view.number + 1
            self._effects.append(Freeze(self._freeze_number))
        self._review(now)
        if rank != self._me:
            self._hold(now)
        if not must_freeze:
            self._promise(now)

    def _promise(self, now: float) -> None:
        """Promise the highest ballot that was asked for, and answer its owner."""
        ballot, self._pending = self._pending, -1
        if ballot < self.ballot:
            return  # its owner will ask again, and be refused
        if ballot > self.ballot:
            self._promise_to(ballot, now)
        self._answered = ballot
        self._answer(now)

    def _promise_to(self, ballot: int, now: float) -> None:
        self._acceptor.promised = ballot
        self._effects.append(Persist(self._acceptor.record))
        self._lease.lost()  # even if the ballot is this member's own: another may have led by one in between
        if self._proposal is not None and self._proposal.ballot < ballot:
            self._drop_proposal(now)

    def _answer(self, now: float) -> None:
        """Report the states of this frozen member, and which ranks it hears, to the owner of the promised ballot."""
        acceptor, view = self._acceptor, self.view
        promise = Promise(
            view.lineage,
            view.number + 1,
            self._answered,
            self._presence.heard(rank for rank in view.ranks if rank != self._me),
            self._states if self._stays else None,
            acceptor.accepted_ballot,
            acceptor.accepted,
            self._me in self._presence.finished,
            self._wish if self._stays else None,
        )
        owner = self._owner(self._answered)
        if owner == self._me:
            self._received_answer(self._me, promise, now)
        else:
            self._send(owner, promise)

    def _received_accept(self, rank: int, message: Accept, now: float) -> None:
        if message.ballot < self.ballot:
            self._send(rank, Refuse(self.view.lineage, self.view.number + 1, self.ballot))
            return
        if self._owner(message.ballot) != rank:
            raise RemoteProtocolError(f"member {rank} proposed in ballot {message.ballot}, which is not its own")
        self._check_follows(rank, message.view)
        is_doubtful = not message.view.ranks and rank != self._me and self.hears_quorum
        if self._me not in self._acceptors() or is_doubtful:
            return
        if message.ballot > self.ballot:
            self._promise_to(message.ballot, now)
        if self._acceptor.accepted_ballot < message.ballot:
            self._acceptor.accept(message.ballot, message.view)
            self._effects.append(Persist(self._acceptor.record))
        accepted = Accepted(self.view.lineage, self.view.number + 1, message.ballot)
        if rank == self._me:
            self._received_answer(rank, accepted, now)
        else:
            self._hold(now)
            self._send(rank, accepted)

    # Checks and installation of views

    def _check_follows(self, rank: int, view: View) -> None:
        """Raise RemoteProtocolError unless a view that a member sent can follow the last installed one."""
        if not self._is_sound(view):
            raise RemoteProtocolError(f"member {rank} sent a view {view.number} that cannot follow {self.view}")
        if self._me not in view.ranks or view.number != self.view.number + 1 or not self._stays:
            return
        # Members of a view have frozen, answered its proposer, and named the generation in which they go on.
        if self._states is None:
            raise RemoteProtocolError(f"member {rank} sent a view {view.number} for which this member never answered")
        if view.successor not in (None, self._successor_of(view.ranks, self._wish)):
            raise RemoteProtocolError(f"member {rank} sent a view with a generation that this member never named")
        if not views.rests_on(view, self._states):
            raise RemoteProtocolError(
                f"member {rank} sent a view {view.number} that contradicts what this member answered"
            )

    def _is_sound(self, view: View) -> bool:
        """Tell whether a view has some members of the last one, each once and in order, and consistent contents."""
        ranks, successor = view.ranks, view.successor
        is_subset = list(ranks) == sorted(set(ranks)) and set(ranks) <= set(self.view.ranks)
        has_tie_breaker = not ranks or view.tie_breaker in ranks
        groups = {verdict.group for verdict in view.verdicts}
        if successor is not None:
            ids = {member.id for member in successor.members}
            if not ranks or len(ids) < len(successor.members) or successor.tie_breaker >= len(ids):
                return False
        return is_subset and has_tie_breaker and len(groups) == len(view.verdicts)

    def _check_promise(self, rank: int, promise: Promise) -> None:
        """Raise RemoteProtocolError for an answer that no correct member gives: proposals are built from answers."""
        accepted, ballot = promise.accepted, promise.accepted_ballot
        is_sound = (ballot < 0) is (accepted is None) and ballot <= promise.ballot
        if accepted is not None:
            is_next = (accepted.lineage, accepted.number) == (self.view.lineage, self.view.number + 1)
            is_sound = is_sound and is_next and self._is_sound(accepted)
        states = promise.states or ()
        size = len(self._acceptor.members)
        for state in states:
            is_state = state.sequence <= state.returned + 1 and state.returned < views.MOST_OPERATIONS
            is_sound = is_sound and is_state and all(rank < size for rank in (*state.ranks, state.root))
        is_sound = is_sound and (self._states is None or views.fits(states, self._states, self.view))
        if not is_sound or len({state.group for state in states}) < len(states):
            raise RemoteProtocolError(f"member {rank} sent an impossible answer: {str(promise)[:200]}")

    def _check_ballot(self, rank: int, message: Message) -> None:
        """Raise RemoteProtocolError for a ballot so high that numbers above it could run out."""
        match message:
            case Prepare() | Accept() | Promise() | Accepted():
                ballot = message.ballot
            case Refuse() | Pulse():
                ballot = message.promised
            case _:
                return
        if ballot > max(self.ballot, self._seen) + MOST_AHEAD:
            raise RemoteProtocolError(f"member {rank} sent ballot {ballot}, far above all others")

    def _check_fork(self, rank: int, view: View) -> None:
        """Raise RemoteProtocolError unless a member may fork with these ranks as a lineage of their own."""
        is_after = self.view.number < view.number <= self.view.number + 1 + MOST_SKIPPED
        is_own = rank in view.ranks and view.lineage != self.view.lineage and view.successor is None
        if not (is_after and is_own and self._is_sound(view)):
            raise RemoteProtocolError(f"member {rank} sent a fork that cannot follow {self.view}")

    def _received_decided(self, rank: int, view: View, now: float) -> None:
        if view.number <= self.view.number or self._is_excluded or self.is_last:
            return
        self._check_follows(rank, view)
        if not view.ranks:
            self._told_of_end(rank, view, now)
        elif view.number == self.view.number + 1:
            self._install(view, now)
        elif self._me not in view.ranks and self._me != self._keeper:
            self._begin_after(view, now)  # ranks never come back, so the views in between do not matter
            self._past_views[view.number] = view
            self._exclude(view)
        else:
            self._send(rank, self._pulse())

    def _told_of_end(self, rank: int, end: View, now: float) -> None:
        """Take the run for over, unless a quorum seems to stay in it, not counting the members that report the end.

        So one member alone cannot end a run for the others. If it is over, the others say so when they are asked.
        """
        self._doubted = end
        self._tellers.add(rank)
        self._reconsider_end(now)
        if self._doubted is not None:
            for other in self._audience():
                if other not in self._tellers:
                    self._send(other, self._pulse())

    def _reconsider_end(self, now: float) -> None:
        end = self._doubted
        if end is not None and not self.hears_quorum:
            self._doubted = None
            if end.number > self.view.number and not (self._is_excluded or self.is_last):
                self._begin_after(end, now)
                self._past_views[end.number] = end
                self._exclude(end)

    def _install(self, view: View, now: float) -> None:
        lost = tuple(rank for rank in self.view.ranks if rank not in view.ranks) + self._parted_with
        self._parted_with = ()
        self._begin_after(view, now)
        self._freeze_number, self._states = -1, None
        self._is_wanted = False
        if view.successor is not None:
            self._wish = None
        self._past_views[view.number] = view
        self._past_views.pop(view.number - PAST_VIEWS, None)
        is_over_here = self._me not in view.ranks or (self._is_voter and view.successor is not None)
        if is_over_here and self._me != self._keeper:
            self._exclude(view)
            return
        if self.is_member:
            self._effects.append(Installed(view, lost))
        self._review(now)

    def _begin_after(self, view: View, now: float) -> None:
        self._acceptor.install(view)
        self._effects.append(Persist(self._acceptor.record))
        self._proposal, self._pending, self._answered = None, -1, -1
        self._doubted = None
        self._tellers.clear()
        self._be_calm()
        self._leader_heard_at = now

    def _exclude(self, view: View) -> None:
        self._is_excluded = True
        self._effects.append(Excluded(view))
        self._review(math.inf)

    # Lineages

    def _start_fork(self, clique: tuple[int, ...], now: float) -> None:
        number = self.view.number + 1 + self._random.randrange(1, MOST_SKIPPED)
        base = View(self._random.randbytes(16), number, clique, views.next_tie_breaker(self.view, clique))
        fork = Fork(self.view.lineage, self.view.number, base)
        self._received_fork(fork, now)
        for rank in self._audience():
            self._send(rank, fork)

    def _received_fork(self, fork: Fork, now: float) -> None:
        if self._me in fork.view.ranks and self.is_member and self._states is not None:
            self._fork = fork
            self._parted_with += tuple(rank for rank in self.view.ranks if rank not in fork.view.ranks)
            self._past_views = {fork.view.number: fork.view}
            self._presence.parted.clear()
            self._begin_after(fork.view, now)
            self._freeze_number = fork.view.number + 1
            self._review(now)

    def _received_elsewhere(self, rank: int, lineage: bytes, now: float) -> None:
        """React to another lineage: the parent, if the sender does not know of the fork, or one that went elsewhere."""
        fork = self._fork
        if lineage == self.view.lineage:
            return
        if fork is not None and lineage == fork.parent and rank in fork.view.ranks:
            self._send(rank, fork)
        elif self._quorum is Quorum.ANY:
            self._presence.parted.add(rank)
            self._heard_news(now)

    # Leading

    def _received_pulse(self, rank: int, pulse: Pulse, now: float) -> None:
        if pulse.number < self.view.number:
            self._send(rank, Decided(self._past_views.get(pulse.number + 1, self.view)))
        elif pulse.number > self.view.number:
            self._send(rank, self._pulse())
        elif pulse.claims:
            is_calm = self._trouble_at == math.inf
            if pulse.promised > self.ballot and is_calm and self._owner(pulse.promised) == rank:
                self._promise_to(pulse.promised, now)
            if pulse.promised == self.ballot:
                self._leader_heard_at = now
            self._send(rank, self._pulse(pulse.stamp))
        else:
            self._seen = max(self._seen, pulse.promised)
            if self._claims and pulse.promised == self.ballot and 0 < pulse.echo <= now:
                self._lease.echoed(rank, pulse.echo, self._is_quorum_with_me, now)

    def _claim_at(self) -> float:
        if not self.is_member or self._keeper is not None or self._trouble_at < math.inf or self.is_last:
            return math.inf
        return self._leader_heard_at + LEADERLESS + 2 * STAGGER * self.view.ranks.index(self._me)

    def _pulse(self, echo: float = 0.0) -> Pulse:
        return Pulse(self.view.lineage, self.view.number, self.ballot, echo=echo)

    def _pulse_all(self, now: float) -> None:
        self._pulse_at = now + PULSE_EVERY
        claim = Pulse(self.view.lineage, self.view.number, self.ballot, claims=True, stamp=now)
        for rank in self._audience():
            self._send(rank, claim)

    def _send(self, rank: int, message: Message) -> None:
        if self._presence.is_linked(rank):
            self._effects.append(Send(self._ids[rank], message))


def _number(message: Prepare | Accept) -> int:
    return message.view.number if isinstance(message, Accept) else message.number


def _lineage(message: Message) -> bytes:
    match message:
        case Accept() | Decided():
            return message.view.lineage
        case Fork():
            return message.parent
    return message.lineage
