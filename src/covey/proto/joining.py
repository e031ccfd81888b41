"""A node on its way into a run: it forms or waits for the run, and votes for its earlier life.

Combines two cores. `proto.formation` finds the founders of a run, or the run that this node has to wait for. A *voter*
(`proto.membership`) answers for the rank that an earlier life of this node has in a view: without its vote, the
remaining members might not be a quorum, and the run could not even end.

What this node is bound to outlives its process: the lineages that it knows (`Remember`), and its promises (`Bind`).
Effects are performed in order, so that both are on disk before a message that depends on them is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from covey.proto.ballot import first_record
from covey.proto.changes import Excluded, Freeze, Persist
from covey.proto.changes import SendToNode as Vote
from covey.proto.formation import PROPOSAL_PATIENCE, SETTLE, Formation
from covey.proto.lineages import Lineages
from covey.proto.membership import RELINK, Membership
from covey.proto.membership import VIEW_PATIENCE as VIEW_PATIENCE
from covey.wire.formation import Ending, Here
from covey.wire.membership import Bound, MemberKey, Seated, Successor

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable

    from covey.wire.formation import Formation as FormationMessage
    from covey.wire.formation import FoundingMember, Remembered, Terms
    from covey.wire.membership import Membership as Agreeing
    from covey.wire.membership import Record, View
    from covey.wire.versions import Versions


TELL_AGAIN: Final = 5.0
"""Seconds after which a waiting node is told of its seat again."""


@dataclass(frozen=True, slots=True)
class Remember:
    """Make durable what this machine knows of the lineages of the run."""

    remembered: Remembered


@dataclass(frozen=True, slots=True)
class Bind:
    """Make durable what this node is bound to; None if it is not bound any more."""

    bound: Bound | None


@dataclass(frozen=True, slots=True)
class Say:
    """Send a message of the formation to this node, if there is a link."""

    peer: bytes
    message: FormationMessage


@dataclass(frozen=True, slots=True)
class Agree:
    """Send a vote in a generation to this node, if there is a link."""

    peer: bytes
    generation: int
    message: Agreeing


Effect: TypeAlias = Remember | Bind | Say | Agree


def founding_record(members: Iterable[FoundingMember], lineage: bytes) -> Record:
    """Return the record of a member of a run that this proposal founds."""
    members = tuple(members)
    tie_breaker = next((rank for rank, member in enumerate(members) if member.breaks_ties), 0)
    return first_record((MemberKey(member.id, member.life) for member in members), lineage, anchor=tie_breaker)


def seated_for(peer_id: bytes, bound: Bound | None) -> Seated | None:
    """Return the message for a node with a seat in the generation that this node is bound to; None if it has none."""
    if bound is None or all(seat.id != peer_id for seat in bound.record.members):
        return None
    generation, view = bound.generation, bound.record.view
    if not view.ranks or view.successor is not None:
        return None
    first = Successor(generation, view.lineage, bound.record.members, bound.tie_breaker)
    return Seated(bound.origin, first)


@dataclass(frozen=True, slots=True)
class JoiningPace:
    """How long a node waits on its way into a run, in seconds."""

    settle: float = SETTLE
    proposal_patience: float = PROPOSAL_PATIENCE
    view_patience: float = VIEW_PATIENCE
    relink: float = RELINK


USUAL_PACE: Final = JoiningPace()


class Joining:
    """One node's way into a run. Perform `effects` in order after every call; call `tick` at `next_deadline`."""

    def __init__(
        self,
        me: FoundingMember,
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
        pace: JoiningPace = USUAL_PACE,
    ) -> None:
        """Begin with what is on disk: the lineages that this machine knows, and what an earlier life was bound to.

        The user has given up the `abandoned` lineages. A node that `is_returning` was in the run, or waited for it,
        just before.
        """
        self._me, self._random = me, random
        self._pace = pace
        self._effects: list[Effect] = []
        self._binds: list[Bind] = []
        """What this node is bound to, in order; only the last has to be durable."""
        self._seats: list[Effect] = []
        """Messages to later lives of members about their seats."""
        self.may_go_on: Callable[[], bool] = lambda: False
        """Tells whether this node hears a quorum of its generation: then the run is not over."""
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
            settle=pace.settle,
            patience=pace.proposal_patience,
        )
        self.formation.believes = self._believes
        self._accepted = b""
        if bound is not None:
            self._vote_for(bound, now)
        self._collect(now)

    def may_enter(self, origin: bytes, generation: int) -> bool:
        """Tell whether this node can be a member of a generation: False if it knows that a view excluded it there."""
        bound = self._bound
        if bound is None or (bound.origin, bound.generation) != (origin, generation):
            return True
        return any(bound.record.members[rank].id == self._me.id for rank in bound.record.view.ranks)

    # Inputs

    def link_up(self, peer_id: bytes, peer_life: bytes, now: float) -> bool:
        """Note a new link with this life of a node; False if the link is to be refused."""
        is_wanted = self.formation.link_up(peer_id, peer_life, now)
        if is_wanted:
            self._links[peer_id] = peer_life
            if self._voter is not None:
                self._link_voter(self._voter, peer_id, peer_life, now)
        self._collect(now)
        return is_wanted

    def link_down(self, peer_id: bytes, now: float) -> None:
        """Note that the link with a node ended."""
        if self._links.pop(peer_id, None) is not None:
            self.formation.link_down(peer_id, now)
            if self._voter is not None:
                self._voter.link_down(peer_id, now)
            self._collect(now)

    def heard(self, peer_id: bytes, message: FormationMessage, now: float) -> None:
        """Take a message of the formation; RemoteProtocolError if it breaks the protocol."""
        self.formation.received(peer_id, message, now)
        if isinstance(message, Here) and now >= self._tell_again_at.get(peer_id, now):
            self._tell_of_seat(peer_id, now)
        self._collect(now)

    def agreeing(self, peer_id: bytes, generation: int, message: Agreeing, now: float) -> None:
        """Take a vote in a generation; RemoteProtocolError if it breaks the protocol."""
        if isinstance(message, Seated):
            if any(seat.id == peer_id for seat in message.generation.members):
                self._heard_of_seat(message, now)
                self._collect(now)
        elif self._voter is not None and self._bound is not None and generation == self._bound.generation:
            self._voter.received(peer_id, message, now)
            self._collect(now)

    def ended(self, ending: Ending, now: float, teller: bytes | None = None) -> None:
        """Note that a lineage is over: this node agreed on it, or the node with the id `teller` says so."""
        self.formation.ended(ending, now, teller)
        self._collect(now)

    def _believes(self, teller: bytes, ending: Ending) -> bool:
        """Tell whether to believe another node that a lineage is over.

        A node that is or was in that run believes only its members, and none of them while it hears a quorum. A node
        that only waits for the run cannot ask for more.
        """
        formed, bound = self.formation.formed, self._bound
        if formed is not None and formed.lineage == ending.lineage:
            return any(member.id == teller for member in formed.view) and not self.may_go_on()
        if bound is not None and bound.origin == ending.lineage:
            return any(seat.id == teller for seat in bound.record.members)
        return True

    def entered(
        self,
        view: tuple[FoundingMember, ...],
        lineage: bytes,
        generation: int,
        now: float,
        versions: Versions | None = None,
    ) -> None:
        """Note that this node is in a generation of the run, which holds its promises from now on."""
        self._voter = self._bound = None
        self.formation.entered(view, lineage, generation, now, versions)
        self._accepted = lineage
        self._collect(now)

    def tick(self, now: float) -> None:
        """Act on the deadlines that have passed."""
        if now >= self.formation.next_deadline():
            self.formation.tick(now)
        if self._voter is not None and now >= self._voter.next_deadline():
            self._voter.tick(now)
        self._collect(now)

    def next_deadline(self) -> float:
        """Return when to call `tick`; inf for never."""
        deadline = self.formation.next_deadline()
        return deadline if self._voter is None else min(deadline, self._voter.next_deadline())

    def effects(self) -> list[Effect]:
        """Return the effects to perform, in order, and clear them."""
        effects, self._effects = self._effects, []
        return effects

    # Votes of an earlier life

    def _heard_of_seat(self, seated: Seated, now: float) -> None:
        """Vote in a generation in which this node has a seat that it did not know of.

        A founding that this node has not accepted has failed for good. But this node may have forgotten one that the
        user gave up, or that it left for an older run.
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

    def _link_voter(self, voter: Membership, peer_id: bytes, life: bytes, now: float) -> None:
        """Link the voter with a node, too."""
        voter.link_up(peer_id, life, now)
        self._tell_of_seat(peer_id, now)

    def _tell_of_seat(self, peer_id: bytes, now: float) -> None:
        """Tell a node about its seat in the generation in which this node votes."""
        if (seated := seated_for(peer_id, self._bound)) is not None:
            self._tell_again_at[peer_id] = now + TELL_AGAIN
            self._seats.append(Agree(peer_id, seated.generation.generation, seated))

    def _vote_for(self, bound: Bound, now: float) -> None:
        """Vote for the earlier life of this node, unless its run is over."""
        lineages, record = self.formation.lineages, bound.record
        if not lineages.is_open(bound.origin):
            self._unbind()  # it is over, or the user gave it up, or no message about it was ever sent
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
                patience=self._pace.view_patience,
                relink=self._pace.relink,
                votes_only=True,
            )
            for peer_id, life in self._links.items():
                self._link_voter(self._voter, peer_id, life, now)
        else:
            self._unbind()

    def _follow(self, bound: Bound, view: View, now: float) -> None:
        """Vote in the next generation, if an earlier life of this node is in it."""
        successor = view.successor
        assert successor is not None
        if any(seat.id == self._me.id for seat in successor.members):
            self._vote_in(bound.origin, successor, now)

    def _unbind(self) -> None:
        self._voter = self._bound = None
        self._binds.append(Bind(None))

    # Effects

    def _collect(self, now: float) -> None:
        """Collect the effects of both cores: what has to be durable comes first."""
        votes = self._collect_votes(now)
        if self._bound is not None and self.formation.lineages.ending(self._bound.origin) is not None:
            self._unbind()  # before it is bound to what it may have accepted since
        self._bind_to_accepted()
        self._effects += self._durable_in_order()
        self._effects += votes
        self._effects += self._seats
        self._seats = []
        self._effects += [Say(peer, message) for peer, message in self.formation.outgoing()]

    def _durable_in_order(self) -> list[Effect]:
        """Return what has to be durable, in an order in which a crash in between does no harm.

        A node that is bound to a lineage it does not remember has sent nothing about it yet. A node that is not bound,
        and does not remember that the lineage is over, would wait for it, and might vote in it anew.
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
                        pass  # a voter is in no view, and waits without a limit
        return sends

    def _excluded(self, view: View, now: float) -> None:
        assert self._bound is not None
        bound = self._bound
        if not view.ranks:
            self._unbind()
            self.formation.ended(Ending(bound.origin, view.is_finished), now)
        elif view.successor is not None:
            self._follow(bound, view, now)

    def _bind_to_accepted(self) -> None:
        """Bind this node to a founding that it has accepted; unbind it when the founding fails."""
        formed = self.formation.formed
        accepted = self.formation.accepted if formed is None else (formed.lineage, formed.view)
        if accepted is not None and accepted[0] != self._accepted:
            self._accepted, members = accepted
            record = founding_record(members, self._accepted)
            self._binds.append(Bind(Bound(0, record, self._accepted, record.view.tie_breaker)))
        elif accepted is None and self._accepted:
            self._accepted = b""
            self._binds.append(Bind(None))
