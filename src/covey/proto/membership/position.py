"""What a node is in the last installed view, which ballots it knows, and which ranks decide the next view."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.proto import views
from covey.proto.ballot import PaxosAcceptor, without
from covey.proto.presence import Presence
from covey.wire.membership import Pulse

if TYPE_CHECKING:
    from collections.abc import Collection

    from covey.wire.membership import Record, Successor, View


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
