"""`Formation`: one joiner's part in agreeing on the first view. It passes every input to the part that it concerns."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, TypeAlias

from covey.base.errors import RemoteProtocolError
from covey.proto.formation.joiners import Announcer, JoinerLinks, going_on, newcomers, rank_order
from covey.proto.formation.proposals import PROPOSAL_PATIENCE, REPEAT_STANDING_EVERY, SETTLE, Deciding, Founding
from covey.proto.lineages import Lineages
from covey.wire import formation as wire
from covey.wire.formation import (
    MAX_OPEN,
    RANDOM_BYTES,
    Ending,
    FoundingMember,
    Here,
    Outcome,
    Phase,
    Propose,
    Standing,
    Terms,
    difference,
    new_lineage,
)
from covey.wire.versions import common

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from covey.proto.decision import Decision
    from covey.proto.formation.joiners import RemoteJoiner
    from covey.wire.versions import Versions

Message: TypeAlias = wire.Formation


@dataclasses.dataclass(frozen=True, slots=True)
class Formed:
    """The agreed view."""

    view: tuple[FoundingMember, ...]
    """By rank."""
    lineage: bytes
    """The lineage of the run: the proposal that founded it."""
    lost: tuple[bytes, ...] = ()
    """Ids of members without a link when the decision became known."""
    generation: int = 0
    versions: Versions | None = None
    """What all members speak; None if that is not known, as to a node that came back to its run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The progress of the formation, for messages to users."""

    here: tuple[str, ...]
    """Names of the nodes that could be in the view, this node among them."""
    refused: tuple[tuple[str, str], ...]
    """Names of the nodes that could not, and why."""
    waiting: str
    """What this node waits for."""
    elsewhere: tuple[str, ...]
    """Names of the members with which the run is already going on, without this node."""
    awaited: tuple[str, ...]
    """Names of the members of a run that this node knows, if it has a link with none of them."""
    in_use: tuple[bytes, ...]
    """Ids of which two lives have links at once: a copied identity."""
    gone: tuple[str, ...] = ()
    """Names of nodes that could have been in the view, and have left: their own time may have been over before."""


class Formation:
    """One joiner's part in agreeing on the view. Drain `outgoing` after every call; call `tick` at `next_deadline`."""

    def __init__(
        self,
        me: FoundingMember,
        terms: Terms,
        random: random.Random,
        now: float,
        *,
        lineages: Lineages | None = None,
        follows: bytes = b"",
        is_elastic: bool = False,
        min_hosts: int = 1,
        wall: Callable[[], float] = lambda: 0.0,
        settle: float = SETTLE,
        patience: float = PROPOSAL_PATIENCE,
    ) -> None:
        """Begin without links.

        `lineages` is what this node knows of runs of this name. A node that comes back to a run `follows` its lineage;
        an elastic node follows the lineage of the members it links with. If that lineage ends because the work is
        done, this node has nothing more to do (`ending`). A first view spans at least `min_hosts` machines. `wall`
        returns the seconds since 1970.
        """
        self.formed: Formed | None = None
        self.lineages = lineages if lineages is not None else Lineages()
        self.ending: Ending | None = None
        """Set when the run that this node is in, or follows, is over."""
        self.rivals: dict[bytes, Here] = {}
        """By lineage: the announcement of a member of another run of the same name, once this node is in a run."""
        self.not_given_up: Here | None = None
        """The announcement of a member of a run that the user gave up, and that is going on all the same."""
        self.unaware: set[bytes] = set()
        """Peers that are members of this node's generation and do not know it yet."""
        self.believes: Callable[[bytes, Ending], bool] = lambda _teller, _ending: True
        """Tells whether to believe the node with this id that a lineage is over."""
        self._followed, self._is_elastic = follows, is_elastic
        self._min_hosts, self._wall = min_hosts, wall
        self._me, self._terms, self._random = me, terms, random
        self._links = JoinerLinks(me)
        self._announcer = Announcer(me, terms, self._links, self.lineages, now)
        self._founding = Founding(
            me, terms, self._links, min_hosts=min_hosts, settle=settle, patience=patience, now=now
        )
        self._deciding = Deciding(me, self._links, random, patience=patience, settled=self._settled)
        if (ending := self.lineages.ending(follows)) is not None and ending.is_finished:
            self.ending = ending
        self._propose_if_due(now)

    @property
    def is_deciding(self) -> bool:
        """Whether a view is being agreed on or is agreed: no link should be replaced now."""
        return self._deciding.lock is not None or self.formed is not None

    @property
    def going_on(self) -> Here | None:
        """The announcement of a member, if the run is going on without this node."""
        return None if self.formed is not None else going_on(self._links.peers, self.lineages.current)

    @property
    def accepted(self) -> tuple[bytes, tuple[FoundingMember, ...]] | None:
        """The undecided proposal that this node has accepted, with its members."""
        lock = self._deciding.lock
        return None if lock is None else (lock.proposal, lock.members)

    def newcomers(self) -> tuple[bytes, ...]:
        """Return the ids of the nodes that wait for a seat in this node's run; none while an older run is known."""
        formed = self.formed
        if formed is None or any(lineage < formed.lineage for lineage in self.rivals):
            return ()
        return tuple(peer.id for peer in newcomers(self._links.peers, self._me.life, formed.lineage))

    def objection_to(self, peer_id: bytes) -> str:
        """Return why a node that asks for this run cannot be in it; empty if it can, or is in another run."""
        peer = self._links.peers.get(peer_id)
        if peer is None or peer.here is None or peer.here.terms.run != self._terms.run:
            return ""
        return peer.objection

    def is_member_of_ours(self, peer_id: bytes, lineage: bytes) -> bool:
        """Tell whether a peer with the same terms says that it is in the run of this lineage."""
        peer = self._links.peers.get(peer_id)
        is_formed = peer is not None and peer.is_in(Phase.FORMED)
        return is_formed and peer is not None and peer.here is not None and peer.here.lineage == lineage

    # Inputs

    def entered(
        self,
        view: tuple[FoundingMember, ...],
        lineage: bytes,
        generation: int,
        now: float,
        versions: Versions | None = None,
    ) -> None:
        """Note that this node is in a generation of the run, with these members, which all speak `versions`."""
        self._deciding.drop()
        self._founding.propose_at = math.inf
        self.lineages.learn(lineage, (member.name for member in view), is_ours=True)
        self.lineages.commit(lineage)
        self.formed = Formed(view, lineage, generation=generation, versions=versions)
        self._fix(versions)
        self._announcer.at = now

    def ended(self, ending: Ending, now: float, teller: bytes | None = None) -> None:
        """Note that a lineage is over: this node agreed on it, or the node with the id `teller` says so."""
        if teller is not None and not self.believes(teller, ending):
            return
        is_ours = ending.lineage == (self._followed if self.formed is None else self.formed.lineage)
        self.lineages.end(ending)
        self.rivals.pop(ending.lineage, None)
        if self.accepted is not None and self.accepted[0] == ending.lineage:
            self._deciding.drop()  # the run that it founded is over already
        if is_ours and (ending.is_finished or self.formed is not None):
            self.ending = ending
        self._announcer.soon(now)
        self._propose_if_due(now)

    def link_up(self, peer_id: bytes, peer_life: bytes, now: float) -> bool:
        """Note a new link with this life of a node; it replaces an older link.

        Return False if the link is to be refused: another life of the node has a link, or a later one had.
        """
        if not self._links.add(peer_id, peer_life):
            return False
        self._deciding.link_up(peer_id, peer_life, now)
        self._links.send(peer_id, self._here(to=peer_life))
        self._announcer.soon(now)
        return True

    def link_down(self, peer_id: bytes, now: float) -> None:
        """Note that the link with a node ended."""
        if self._links.remove(peer_id):
            self._announcer.soon(now)
            self._deciding.link_down(peer_id, now)
            self._propose_if_due(now)

    def received(self, peer_id: bytes, message: Message, now: float) -> None:
        """Take a message that came over the link with this node.

        Raises:
            RemoteProtocolError: the message breaks the protocol; the link should be closed.
        """
        peer = self._links.peers.get(peer_id)
        if peer is None:
            return
        match message:
            case Here():
                self._received_here(peer, message, now)
            case Propose():
                self._received_proposal(peer, message, now)
            case Standing():
                self._deciding.received(peer, message, now)

    def tick(self, now: float) -> None:
        """Act on the deadlines that have passed."""
        if self.formed is None:
            self._propose_if_due(now)
        if now >= self._announcer.at:
            self._announcer.announced(now, is_formed=self.formed is not None)
            here = self._here()
            for peer_id in self._links.peers:
                self._links.send(peer_id, here)
        self._deciding.tick(now)

    def next_deadline(self) -> float:
        """Return when to call `tick`; inf for never."""
        return min(self._announcer.at, self._founding.propose_at, self._deciding.next_deadline())

    def outgoing(self) -> list[tuple[bytes, Message]]:
        """Return the messages to send, each with the id of its receiver, and clear them."""
        return self._links.take_outgoing()

    # Announcements

    def _received_here(self, peer: RemoteJoiner, here: Here, now: float) -> None:
        if (here.member.id, here.member.life) != (peer.id, peer.life):
            raise RemoteProtocolError(f"node {peer.id.hex()[:8]} says that it is {here.member.id.hex()[:8]}")
        known, peer.here = peer.here, here
        if known is None or known.terms != here.terms:
            peer.objection = difference(self._terms, here.terms)
        if here.terms.run == self._terms.run:
            self._heard_of_lineages(here, now)
        if self.formed is None:
            if known != here and (pause := self._announcer.pause()) and not self.is_deciding:
                self._founding.propose_at = min(self._founding.propose_at, now + pause)
            elif known != here:
                self._propose_if_due(now)
        elif here.phase is not Phase.FORMED:
            self._links.send(peer.id, self._here(to=peer.life))
            if any((member.id, member.life) == (peer.id, peer.life) for member in self.formed.view):
                self.unaware.add(peer.id)

    def _heard_of_lineages(self, here: Here, now: float) -> None:
        for ending in here.endings:
            if self.lineages.ending(ending.lineage) is None:
                self.ended(ending, now, here.member.id)
        if here.lineage is None:
            return
        if (over := self.lineages.ending(here.lineage)) is not None:
            if over not in self.lineages.latest_endings():  # those are announced anyway
                self._links.send(here.member.id, self._here(over))
            return
        if self.lineages.is_abandoned(here.lineage) and here.phase is Phase.FORMED:
            self.not_given_up = here
        if self.formed is not None:
            if here.phase is Phase.FORMED and here.lineage != self.formed.lineage:
                _note_rival(self.rivals, here.lineage, here, self.formed.lineage)
                self.lineages.learn(here.lineage, here.names)
            return
        self.lineages.learn(here.lineage, here.names)
        if self._is_elastic and here.phase is Phase.FORMED and here.lineage == self.lineages.current:
            self._followed = here.lineage

    def _here(self, *endings: Ending, to: bytes = b"") -> Here:
        return self._announcer.here(self.formed, *endings, is_locked=self._deciding.lock is not None, to=to)

    # Proposals

    def _propose_if_due(self, now: float) -> None:
        """Propose a view if it is due, or note when it will be."""
        self._founding.propose_at = math.inf
        if self.is_deciding:
            return
        if self.lineages.current:
            self._founding.wait()
        elif (view := self._founding.view_due(now)) is not None:
            lineage = new_lineage(self._wall(), self._random.randbytes(RANDOM_BYTES))
            with contextlib.suppress(ValueError):  # two members have said of themselves what their links belie
                self._accept(lineage, view, self._spoken_by(view), now, is_mine=True)

    def _accept(
        self, proposal: bytes, members: tuple[FoundingMember, ...], versions: Versions, now: float, *, is_mine: bool
    ) -> None:
        self.lineages.accept(proposal, (member.name for member in members))
        self._founding.propose_at = math.inf
        self._announcer.soon(now)
        self._deciding.accept(proposal, members, versions, now, is_mine=is_mine)

    def _spoken_by(self, members: tuple[FoundingMember, ...]) -> Versions:
        """Return what members that this node has met all speak; ValueError if two of them could not talk."""
        heard = (self._links.peers[member.id].here for member in members if member.id != self._me.id)
        return common([self._terms.speaks, *(here.terms.speaks for here in heard if here is not None)]).fixed()

    def _fix(self, versions: Versions | None) -> None:
        """Speak what all members of the run speak; a node that does not is none of its newcomers."""
        if versions is not None and versions != self._terms.versions:
            self._terms = self._announcer.terms = self._terms.fixed(versions)
            for peer in self._links.peers.values():
                if peer.here is not None:
                    peer.objection = difference(self._terms, peer.here.terms)

    def _received_proposal(self, peer: RemoteJoiner, message: Propose, now: float) -> None:
        known = self._deciding.decisions.get(message.proposal)
        if known is not None:
            self._links.send(peer.id, known.standing())
            return
        if peer.here is None or peer.objection:
            return  # its terms are not known yet; it repeats the proposal
        members, terms = message.members, self._terms
        is_in_order = len({member.id for member in members}) == len(members) and members == rank_order(members)
        if not is_in_order or not terms.smallest <= len(members) <= terms.largest:
            raise RemoteProtocolError(f"{peer.name} proposed {len(members)} members that cannot be a view")
        if not any((member.id, member.life) == (self._me.id, self._me.life) for member in members):
            return  # meant for an earlier life of this node, which alone could answer
        refusal = self._refusal(message.proposal, members)
        if not refusal:
            unmet = [member.name for member in members if not self._links.is_met(member)]
            if not unmet:
                try:
                    spoken = self._spoken_by(members)
                except ValueError as error:
                    raise RemoteProtocolError(f"{peer.name} proposed members that cannot be a view: {error}") from None
                if message.versions not in (None, spoken):
                    raise RemoteProtocolError(f"{peer.name} proposed to speak what its members did not agree on")
                self._accept(message.proposal, members, spoken, now, is_mine=False)
                return
            if self._deciding.holds(message.proposal, now):
                return
            refusal = f"{self._me.name} has not met {', '.join(unmet)}"[:256]
        self.lineages.end(Ending(message.proposal, False))
        self._deciding.refuse(message.proposal, members, refusal)

    def _refusal(self, proposal: bytes, members: tuple[FoundingMember, ...]) -> str:
        """Return why this node cannot be in a new view of these members, or ""."""
        if self.formed is not None:
            return f"{self._me.name} is in a view already"
        if self._deciding.lock is not None:
            return f"{self._me.name} has accepted another proposal"
        if self.lineages.current:
            return f"{self._me.name} knows of a run of this name that may be running"
        if self.lineages.ending(proposal) is not None:
            return f"{self._me.name} knows that this founding came to nothing"
        if self._founding.has_too_few_hosts(members):
            return f"{self._me.name} waits for nodes on {self._min_hosts} machines"
        return ""

    def _settled(self, decision: Decision, now: float) -> None:
        """Act on the outcome of the accepted proposal."""
        if decision.outcome is Outcome.COMMIT:
            lost = tuple(member.id for member in decision.members if not self._links.is_linked(member))
            self.lineages.commit(decision.proposal)
            self.formed = Formed(decision.members, decision.proposal, lost, versions=decision.versions)
            self._fix(decision.versions)
            self._announcer.at = now
        else:
            self.lineages.end(Ending(decision.proposal, False))
            self._founding.begin_again(
                now, now + self._random.uniform(REPEAT_STANDING_EVERY, 2 * REPEAT_STANDING_EVERY)
            )
            self._announcer.soon(now)
            self._propose_if_due(now)

    # Messages to users

    def report(self) -> Report:
        """Return which nodes are present, which are refused and why, and what this node waits for."""
        peers = sorted(self._links.peers.values(), key=lambda peer: peer.id)
        other = self.going_on
        return Report(
            here=tuple(sorted([self._me.name, *(peer.name for peer in peers if peer.here and not peer.objection)])),
            refused=tuple((peer.name, peer.objection) for peer in peers if peer.objection),
            waiting=self._waiting(),
            elsewhere=() if other is None else other.names,
            awaited=() if other is not None else self.lineages.names(self.lineages.current),
            in_use=tuple(sorted(self._links.in_use)),
            gone=tuple(sorted(self._links.gone.values())),
        )

    def waits_for(self) -> str:
        """Return what this node waits for as a keyword (`wire.messages.Wait`); "" once the view is agreed."""
        if self.formed is not None:
            return ""
        if self._deciding.lock is not None:
            return "agreement"
        if self.going_on is not None:
            return "run"
        return "earlier-run" if self.lineages.current else self._founding.waits_for()

    def _waiting(self) -> str:
        if self.formed is not None:
            return "nothing: the view is agreed"
        if self._deciding.lock is not None:
            return self._deciding.describe(self._deciding.lock)
        if (other := self.going_on) is not None:
            return f"the run is already running with {', '.join(other.names)}"
        if self.lineages.current:
            names = ", ".join(self.lineages.names(self.lineages.current)) or "unknown nodes"
            return (
                f"a run of this name was begun before, with {names}, and is not known to be over; waiting for "
                "enough of them to be back, or to say that it is (--new gives it up and begins another)"
            )
        return self._founding.describe()


def _note_rival(rivals: dict[bytes, Here], lineage: bytes, here: Here, ours: bytes) -> None:
    """Note another run of the same name. A peer may name any number of them; the oldest are kept."""
    if lineage not in rivals and len(rivals) >= MAX_OPEN:
        if lineage > ours:
            return
        del rivals[max(rivals)]
    rivals[lineage] = here
