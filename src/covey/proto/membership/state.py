"""The state of a node in its view, which the parts of a membership share.

`Presence`: which ranks it hears. `ViewPosition`: what it is in the last installed view, which ballots it knows, and
which ranks decide the next view. `ViewRound`: its progress towards the next view. `Outbox`: effects to be performed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from covey.proto import views
from covey.proto.ballot import PaxosAcceptor, without
from covey.proto.changes import Effect, Persist, SendToNode
from covey.wire.membership import Pulse

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from covey.proto.ballot import Proposal
    from covey.wire.membership import MemberKey, Record, State, Successor, View
    from covey.wire.membership import Membership as Message

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


class ViewPosition:
    """One node among the ranks of view 0: a member, a voter for its earlier life, or the keeper; or excluded."""

    def __init__(self, record: Record, id: bytes, life: bytes, keeper: bytes | None, votes_only: bool, now: float):
        """Begin at a record; with `votes_only` the node is not a member, even if the record names its present life."""
        self.acceptor = PaxosAcceptor(record)
        self.ids = (*(seat.id for seat in record.members), *(() if keeper is None else (keeper,)))
        """By rank of view 0; the keeper has the rank after them."""
        self.ranks = {known: rank for rank, known in enumerate(self.ids)}
        self.me = self.ranks[id]
        self.keeper = None if keeper is None else len(record.members)
        is_keeper = self.me == self.keeper
        self.is_voter = not is_keeper and (votes_only or record.members[self.me].life != life)
        """Whether it votes for an earlier life of its node, which was a member."""
        self.votes_only = is_keeper or self.is_voter
        self.is_excluded = self.me not in (*record.view.ranks, self.keeper)
        self.presence = Presence(record.members, self.me, now)
        self.seen = record.promised
        """The highest known ballot."""

    # The view

    @property
    def view(self) -> View:
        """The last installed view."""
        return self.acceptor.view

    @property
    def is_last(self) -> bool:
        """Whether no view can follow: the generation has a successor, or the run is over."""
        return self.view.successor is not None or not self.view.ranks

    @property
    def is_member(self) -> bool:
        """Whether this node is in the view, and not a voter, a keeper, or excluded."""
        return not self.votes_only and not self.is_excluded

    @property
    def is_leaving(self) -> bool:
        """Whether this node wants to be in no further view."""
        return self.me in self.presence.leaving

    @property
    def stays(self) -> bool:
        """Whether this node can be in the next view."""
        return self.is_member and not self.is_leaving

    @property
    def may_end(self) -> bool:
        """Whether this node votes for its earlier life, and so may propose that the run is over."""
        return self.is_voter and self.me in self.view.ranks and not self.is_excluded and self.keeper is None

    @property
    def may_propose(self) -> bool:
        """Whether this node may start ballots."""
        if self.me == self.keeper:
            return True
        return self.keeper is None and not self.is_last and (self.is_member or self.may_end)

    # Ballots

    @property
    def ballot(self) -> int:
        """The highest promised ballot."""
        return self.acceptor.promised

    @property
    def claims(self) -> bool:
        """Whether the highest promised ballot is this node's own."""
        return self.may_propose and self.owner(self.ballot) == self.me

    def owner(self, ballot: int) -> int:
        """Return the rank that a ballot belongs to."""
        return ballot % (len(self.acceptor.members) + 1)

    def next_ballot(self) -> int:
        """Return the lowest ballot of this node above all that it knows; from now on it knows this one."""
        above = max(self.ballot, self.seen) + 1
        self.seen = above + (self.me - above) % (len(self.acceptor.members) + 1)
        return self.seen

    def pulse(self, echo: float = 0.0) -> Pulse:
        """Return the message that says how far this node is."""
        return Pulse(self.view.lineage, self.view.number, self.ballot, echo=echo)

    # Ranks

    def is_quorum(self, ranks: Collection[int]) -> bool:
        """Tell whether these ranks can decide the next view; under a keeper, the keeper alone can."""
        return views.is_quorum(self.view, ranks) if self.keeper is None else self.keeper in ranks

    def is_quorum_with_me(self, ranks: Collection[int]) -> bool:
        """Tell whether these ranks and this node can decide the next view."""
        return self.is_quorum({*ranks, self.me})

    def hears_quorum(self, apart_from: Collection[int]) -> bool:
        """Tell whether this node hears a quorum of members that stay in the view, without counting some ranks."""
        heard = [rank for rank in self.view.ranks if rank != self.me and self.presence.is_well(rank)]
        staying = set(heard) - self.presence.leaving - set(apart_from)
        return not self.is_last and self.is_quorum({*staying, self.me} if self.stays else staying)

    def acceptors(self) -> Collection[int]:
        """Return the ranks that accept proposals."""
        return self.view.ranks if self.keeper is None else [self.keeper]

    def audience(self) -> list[int]:
        """Return the other members and acceptors of the next view."""
        return sorted({*self.view.ranks, *self.acceptors()} - {self.me})

    def heard(self) -> tuple[int, ...]:
        """Return the members of the view that are well."""
        return self.presence.heard(self.view.ranks)

    def missing(self) -> tuple[int, ...]:
        """Return the members of the view that are not well."""
        here = self.heard()
        return tuple(rank for rank in self.view.ranks if rank not in here)

    def successor_of(self, ranks: Collection[int], wish: Successor | None) -> Successor | None:
        """Return the wished generation without the members that are not in `ranks`; None without a wish."""
        if wish is None:
            return None
        members = self.acceptor.members
        return without(wish, [members[rank] for rank in range(len(members)) if rank not in ranks])


class ViewRound:
    """What a node has done towards one view. An installed view begins the next round."""

    def __init__(self) -> None:
        self.is_wanted = False
        """Whether a member has asked for a view because a lane broke, or an operation is late."""
        self.wish: Successor | None = None
        """The generation that this member wants the next view to name."""
        self.freeze_number = -1
        """The view for which the operations were asked to freeze."""
        self.states: tuple[State, ...] | None = None
        """The states in which the operations were frozen."""
        self.pending = -1
        """The highest ballot whose answer waits for the freeze."""
        self.answered = -1
        """The last ballot that this node has answered."""
        self.proposal: Proposal | None = None
        """The ballot of this node, if it has started one."""

    def forget_ballots(self) -> None:
        """Begin the ballots anew: a view is installed, or this node forks."""
        self.proposal, self.pending, self.answered = None, -1, -1

    def resume(self) -> None:
        """End the freeze, because a view is installed."""
        self.freeze_number, self.states = -1, None
        self.is_wanted = False


class Outbox:
    """Collects effects until the driver takes them."""

    def __init__(self, position: ViewPosition) -> None:
        self._position = position
        self._effects: list[Effect] = []

    def add(self, effect: Effect) -> None:
        """Perform an effect after those that are here already."""
        self._effects.append(effect)

    def send(self, rank: int, message: Message) -> None:
        """Send a message to a rank, if there is a link."""
        if self._position.presence.is_linked(rank):
            self._effects.append(SendToNode(self._position.ids[rank], message))

    def persist(self) -> None:
        """Make what this node is bound to durable before any later effect."""
        self._effects.append(Persist(self._position.acceptor.record))

    def take(self) -> list[Effect]:
        """Return the effects, and clear them."""
        effects, self._effects = self._effects, []
        return effects
