"""A node on its way into a run: it gathers with others, and votes for what its last life was bound to.

Joins two cores. `proto.formation` finds the founders of a run, or the run that this node has to wait for. A *voter*
(`proto.membership`) answers for the place that an earlier life of this node had in a view: without its vote the members
that are left might be no quorum, and the run could not end either.

What this node is bound to outlives its process: the lineages that it knows of (`Remember`), and its promises (`Bind`).
The effects are to be performed in order, so that both are on disk before anything is said that rests on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from covey.proto.ballot import first_record
from covey.proto.changes import Excluded, Freeze, Persist
from covey.proto.changes import Send as Vote
from covey.proto.formation import PATIENCE, SETTLE, Formation
from covey.proto.lineages import Lineages
from covey.proto.membership import PATIENCE as VIEW_PATIENCE
from covey.proto.membership import RELINK, Membership
from covey.wire.formation import Here
from covey.wire.lineage import Ending
from covey.wire.membership import Bound, Seat, Seated, Successor

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable

    from covey.wire.formation import Formation as Gathering
    from covey.wire.formation import Member, Terms
    from covey.wire.lineage import Remembered
    from covey.wire.membership import Membership as Agreeing
    from covey.wire.membership import Record, View


TELL_AGAIN: Final = 5.0
"""Seconds after which a node that waits is told of its seat again."""


@dataclass(frozen=True, slots=True)
class Remember:
    """Make what this machine knows of the lineages of the run durable."""

    remembered: Remembered


@dataclass(frozen=True, slots=True)
class Bind:
    """Make what this node is bound to durable; None: to nothing any more."""

    bound: Bound | None


@dataclass(frozen=True, slots=True)
class Say:
    """Give a message of the formation to the link with this node, if there is one."""

    peer: bytes
    message: Gathering


@dataclass(frozen=True, slots=True)
class Agree:
    """Give a vote in a generation to the link with this node, if there is one."""

    peer: bytes
    generation: int
    message: Agreeing


Effect: TypeAlias = Remember | Bind | Say | Agree


def founding_record(members: Iterable[Member], lineage: bytes) -> Record:
    """Return what a member of a run that is founded with this proposal is bound to."""
    members = tuple(members)
    tie_breaker = next((rank for rank, member in enumerate(members) if member.breaks_ties), 0)
    return first_record((Seat(member.id, member.life) for member in members), lineage, anchor=tie_breaker)


def seated_for(peer_id: bytes, bound: Bound | None) -> Seated | None:
    """Return what to tell a node that has a seat in the generation that this node is bound to, and may not know."""
    if bound is None or all(seat.id != peer_id for seat in bound.record.members):
        return None
    generation, view = bound.generation, bound.record.view
    if not view.ranks or view.successor is not None:
        return None
    first = Successor(generation, view.lineage, bound.record.members, bound.tie_breaker)
    return Seated(bound.origin, first)


class Candidacy:
    """One node's way into a run. Perform `effects` in order after every call; `tick` at `next_deadline`."""

    def __init__(
        self,
        me: Member,
        terms: Terms,
        random: random.Random,
        now: float,
        *,
        remembered: Remembered | None = None,
        bound: Bound | None = None,
        abandoned: Iterable[bytes] = (),
        is_returning: bool = False,
        is_elastic: bool = False,
        min_hosts: int = 1,
        wall: Callable[[], float] = lambda: 0.0,
        settle: float = SETTLE,
        patience: float = PATIENCE,
        view_patience: float = VIEW_PATIENCE,
        relink: float = RELINK,
    ) -> None:
        """Begin with what is on disk: the lineages that this machine knows of, and what an earlier life was bound to.

        Of the `abandoned` lineages a person wants to hear no more. A node that `is_returning` was in the run, or waited
        for it, just before.
        """
        self._me, self._random = me, random
        self._view_patience, self._relink = view_patience, relink
        self._effects: list[Effect] = []
        self._binds: list[Bind] = []
        """What this node is bound to, one thing after the other; only the last has to be durable."""
        self._seats: list[Effect] = []
        """What to tell later lives of members."""
        self.may_go_on: Callable[[], bool] = lambda: False
        """Tells whether this node hears a quorum of the generation that it is in: then the run is not over."""
        self._tell_again_at: dict[bytes, float] = {}
        self._links: dict[bytes, bytes] = {}
        lineages = Lineages(remembered, abandoned)
        self._voter: Membership | None = None
        self._bound: Bound | None = None
        follows = (bound.origin if bound is not None else lineages.current) if is_returning else b""
        self.formation = Formation(
            me,
            terms,
            random,
            now,
            lineages=lineages,
            follows=follows,
            is_elastic=is_elastic,
            min_hosts=min_hosts,
            wall=wall,
            settle=settle,
            patience=patience,
        )
        self.formation.believes = self._believes
        self._accepted = b""
        if bound is not None:
            self._vote_for(bound, now)
        self._collect(now)

    def may_enter(self, origin: bytes, generation: int) -> bool:
        """Tell whether this node can be a member of a generation: it has not heard that a view excluded it there."""
        bound = self._bound
        if bound is None or (bound.origin, bound.generation) != (origin, generation):
            return True
        return any(bound.record.members[rank].id == self._me.id for rank in bound.record.view.ranks)

    # What happens.

    def link_up(self, peer_id: bytes, peer_life: bytes, now: float) -> bool:
        """There is a new link with this life of a node; False if it is to be refused."""
        is_wanted = self.formation.link_up(peer_id, peer_life, now)
        if is_wanted:
            self._links[peer_id] = peer_life
            if self._voter is not None:
                self._greet_as_voter(self._voter, peer_id, peer_life, now)
        self._collect(now)
        return is_wanted

    def link_down(self, peer_id: bytes, now: float) -> None:
        """The link with a node is gone."""
        if self._links.pop(peer_id, None) is not None:
            self.formation.link_down(peer_id, now)
            if self._voter is not None:
                self._voter.link_down(peer_id, now)
            self._collect(now)

    def heard(self, peer_id: bytes, message: Gathering, now: float) -> None:
        """Take a message of the formation; RemoteProtocolError if no candidate says such a thing."""
        self.formation.received(peer_id, message, now)
        if isinstance(message, Here) and now >= self._tell_again_at.get(peer_id, now):
            self._tell_of_seat(peer_id, now)
        self._collect(now)

    def agreeing(self, peer_id: bytes, generation: int, message: Agreeing, now: float) -> None:
        """Take a vote in a generation; RemoteProtocolError if no member says such a thing."""
        if isinstance(message, Seated):
            if any(seat.id == peer_id for seat in message.generation.members):
                self._heard_of_seat(message, now)
                self._collect(now)
        elif self._voter is not None and self._bound is not None and generation == self._bound.generation:
            self._voter.received(peer_id, message, now)
            self._collect(now)

    def ended(self, ending: Ending, now: float, teller: bytes | None = None) -> None:
        """A lineage of the run is over: this node decided so with others, or the node with the id `teller` says so."""
        self.formation.ended(ending, now, teller)
        self._collect(now)

    def _believes(self, teller: bytes, ending: Ending) -> bool:
        """Tell whether the word of another node counts, that a lineage is over.

        A node that is or was in that run believes its members only, and no node as long as it hears a quorum of them.
        A node that only waits for the run can ask no more.
        """
        formed, bound = self.formation.formed, self._bound
        if formed is not None and formed.lineage == ending.lineage:
            return any(member.id == teller for member in formed.view) and not self.may_go_on()
        if bound is not None and bound.origin == ending.lineage:
            return any(seat.id == teller for seat in bound.record.members)
        return True

    def entered(self, view: tuple[Member, ...], lineage: bytes, generation: int, now: float) -> None:
        """This node is in a generation of the run; from now on that generation has its promises."""
        self._voter = self._bound = None
        self.formation.entered(view, lineage, generation, now)
        self._accepted = lineage
        self._collect(now)

    def tick(self, now: float) -> None:
        """Do what time has brought."""
        if now >= self.formation.next_deadline():
            self.formation.tick(now)
        if self._voter is not None and now >= self._voter.next_deadline():
            self._voter.tick(now)
        self._collect(now)

    def next_deadline(self) -> float:
        """Return when `tick` wants to be called, inf for never."""
        deadline = self.formation.next_deadline()
        return deadline if self._voter is None else min(deadline, self._voter.next_deadline())

    def effects(self) -> list[Effect]:
        """Return what is to be done, in order, and forget it."""
        effects, self._effects = self._effects, []
        return effects

    # Votes of an earlier life.

    def _heard_of_seat(self, seated: Seated, now: float) -> None:
        """Vote in a generation in which this node has a seat that it never heard of.

        A founding that it has not accepted has come to nothing, and never will to anything. It may have forgotten one
        that a person gave up, or that it left for an older run.
        """
        lineages, generation, bound = self.formation.lineages, seated.generation, self._bound
        is_bound = bound is not None and bound.origin == seated.lineage
        is_mine = any(seat.id == self._me.id for seat in generation.members)
        if not is_mine or self.formation.formed is not None or self._accepted == seated.lineage:
            return
        if generation.generation == 0:
            may_be_forgotten = lineages.was_given_up(seated.lineage) or (bound and bound.origin < seated.lineage)
            if not is_bound and not may_be_forgotten:
                self.formation.ended(Ending(seated.lineage, False), now)
        elif seated.lineage == lineages.current and (
            bound is None or (is_bound and bound.generation < generation.generation)
        ):
            self._vote_in(seated.lineage, generation, now)

    def _vote_in(self, origin: bytes, generation: Successor, now: float) -> None:
        record = first_record(generation.members, generation.lineage, anchor=generation.tie_breaker)
        bound = Bound(generation.generation, record, origin, generation.tie_breaker)
        self._binds.append(Bind(bound))
        self._vote_for(bound, now)

    def _greet_as_voter(self, voter: Membership, peer_id: bytes, life: bytes, now: float) -> None:
        """Be linked with a node as a voter, too."""
        voter.link_up(peer_id, life, now)
        self._tell_of_seat(peer_id, now)

    def _tell_of_seat(self, peer_id: bytes, now: float) -> None:
        """Tell a node that has a seat where this one votes about it."""
        if (seated := seated_for(peer_id, self._bound)) is not None:
            self._tell_again_at[peer_id] = now + TELL_AGAIN
            self._seats.append(Agree(peer_id, seated.generation.generation, seated))

    def _vote_for(self, bound: Bound, now: float) -> None:
        """Take up what an earlier life of this node was bound to, as far as that is not over."""
        lineages, record = self.formation.lineages, bound.record
        if not lineages.is_open(bound.origin):
            self._unbind()  # it is over, or a person gave it up, or it was never said to anybody
        elif not record.view.ranks:
            self._unbind()
            self.formation.ended(Ending(bound.origin, record.view.is_finished), now)
        elif record.view.successor is not None:
            self._follow(bound, record.view, now)
        elif any(seat.id == self._me.id for seat in record.members):
            self._bound = bound
            self._voter = Membership(
                record,
                self._me.id,
                self._me.life,
                self._random,
                now,
                patience=self._view_patience,
                relink=self._relink,
                votes_only=True,
            )
            for peer_id, life in self._links.items():
                self._greet_as_voter(self._voter, peer_id, life, now)
        else:
            self._unbind()

    def _follow(self, bound: Bound, view: View, now: float) -> None:
        """Go on voting in the generation that followed, if an earlier life of this node is in it."""
        successor = view.successor
        assert successor is not None
        if any(seat.id == self._me.id for seat in successor.members):
            self._vote_in(bound.origin, successor, now)

    def _unbind(self) -> None:
        self._voter = self._bound = None
        self._binds.append(Bind(None))

    # What follows.

    def _collect(self, now: float) -> None:
        """Gather what both cores want done: what has to be durable first."""
        votes = self._collect_votes(now)
        if self._bound is not None and self.formation.lineages.ending(self._bound.origin) is not None:
            self._unbind()  # before it is bound to what it may have accepted since
        self._write_down_what_was_accepted()
        self._effects += self._durable_in_order()
        self._effects += votes
        self._effects += self._seats
        self._seats = []
        self._effects += [Say(peer, message) for peer, message in self.formation.outgoing()]

    def _durable_in_order(self) -> list[Effect]:
        """Return what has to be durable, in the order in which a crash in between does no harm.

        A node that is bound to a lineage which it does not know of has said nothing about it yet. A node that is bound
        to nothing and does not know that the lineage is over would wait for it, and might vote in it anew.
        """
        lineages, binds = self.formation.lineages, self._binds[-1:]
        self._binds = []
        remembers: list[Effect] = []
        if lineages.is_changed:
            lineages.is_changed = False
            remembers.append(Remember(lineages.remembered))
        if binds and binds[0].bound is None:
            return [*remembers, *binds]
        return [*binds, *remembers]

    def _collect_votes(self, now: float) -> list[Effect]:
        sends: list[Effect] = []
        while self._voter is not None and self._bound is not None and (effects := self._voter.effects()):
            voter, bound = self._voter, self._bound
            for effect in effects:
                match effect:
                    case Vote(peer, message):
                        sends.append(Agree(peer, bound.generation, message))
                    case Persist(record):
                        self._bound = Bound(bound.generation, record, bound.origin, bound.tie_breaker)
                        self._binds.append(Bind(self._bound))
                    case Freeze(number):
                        voter.frozen(number, (), now)
                    case Excluded(view):
                        self._excluded(view, now)
                    case _:
                        pass  # a voter is in no view, and may wait for as long as it takes
        return sends

    def _excluded(self, view: View, now: float) -> None:
        assert self._bound is not None
        bound = self._bound
        if not view.ranks:
            self._unbind()
            self.formation.ended(Ending(bound.origin, view.is_finished), now)
        elif view.successor is not None:
            self._follow(bound, view, now)

    def _write_down_what_was_accepted(self) -> None:
        """Bind this node to a founding that it has accepted; when that comes to nothing, to nothing."""
        formed = self.formation.formed
        accepted = self.formation.accepted if formed is None else (formed.lineage, formed.view)
        if accepted is not None and accepted[0] != self._accepted:
            self._accepted, members = accepted
            record = founding_record(members, self._accepted)
            self._binds.append(Bind(Bound(0, record, self._accepted, record.view.tie_breaker)))
        elif accepted is None and self._accepted:
            self._accepted = b""
            self._binds.append(Bind(None))
