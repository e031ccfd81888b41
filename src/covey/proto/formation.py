"""Agreement of nodes that find each other one by one on the first view of a run: the same members in the same order.

Every joiner sends its terms, and the lives it hears, to all nodes that it has a link with (`Here`). Of the joiners that
hear each other, the one with the smallest id proposes the view: at once if the run is full, otherwise when no joiner
came for `settle`. A joiner that accepts a proposal is *locked* on it until it is decided (`proto.decision`), and
refuses all others meanwhile. A committed proposal is the view; after an aborted one all joiners begin again.

A joiner that knows of a *lineage* of this run that may be going on founds no other (`proto.lineages`): it says so in
its `Here`, proposes and accepts nothing, and waits for a seat as a newcomer. It knows lineages from its disk and from
its peers; an accepted proposal is on disk before the answer is sent. When members of two lineages of one run link with
each other, both learn it (`rivals`): the younger one has to end.

Invariants, held in the simulation whatever the network does:

1. If a node returns a view, no member of it ever returns another (unless all that returned the first have died).
2. The view has the same order everywhere: `rank_order`.
3. A view keeps the limits of the terms.
4. Once the network is good, all joiners that hear each other form within a bounded time, or learn that the run is
   already going on. A smallest joiner that hears too few does not delay the others: each next one proposes after
   another `patience`.
5. No joiner waits for what cannot come: lost links and silence end a proposal, and a flapping link prolongs settling
   only to a limit. One exception is unavoidable: a joiner that accepted a view whose quorum has died cannot know
   whether the others went ahead. `report` says so, and it is free again when they are back or were started anew.
6. No member of a founded run knew of an earlier one that was not over.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Final, TypeAlias

from covey.base.errors import RemoteProtocolError
from covey.proto.decision import Decision
from covey.proto.founders import RemoteJoiner, clique, count_hosts, founders, going_on, newcomers, rank_order, wanting
from covey.proto.lineages import Lineages
from covey.wire import formation as wire
from covey.wire.formation import Answer, Here, Member, Outcome, Phase, Propose, Standing, Terms, difference
from covey.wire.lineage import MAX_OPEN, RANDOM_BYTES, Ending, new_lineage

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

SETTLE: Final = 1.0
"""Seconds without a new joiner after which the present ones form the run."""
MAX_SETTLES: Final = 5
"""Settling ends after this many times SETTLE, however often joiners come and go."""
PATIENCE: Final = 2.0
"""Seconds in which a proposal should be decided, or a joiner with a smaller id propose; then another one steps in."""
HERE_EVERY: Final = 0.5
REPEAT_EVERY: Final = 0.3
HERE_SOON: Final = 0.05
"""Changes within this time are announced together: links come up in dozens."""
STAGGER: Final = 0.2
"""Share of `patience` between the ballots that members start for the same reason, by rank."""
REMEMBERED: Final = 256
"""Proposals whose answer is kept, to repeat it on request; and proposals that wait for an answer."""
MOST_PAST_LIVES: Final = 4096
"""Lives that are known to be over. A member that starts anew very often makes a node forget the first of them."""

Message: TypeAlias = wire.Formation


@dataclasses.dataclass(frozen=True, slots=True)
class Formed:
    """The agreed view."""

    view: tuple[Member, ...]
    """By rank."""
    lineage: bytes
    """The lineage of the run: the proposal that founded it."""
    lost: tuple[bytes, ...] = ()
    """Ids of members without a link when the decision became known."""
    generation: int = 0


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


class Formation:
    """One joiner's part in agreeing on the view. Drain `outgoing` after every call; call `tick` at `next_deadline`."""

    def __init__(
        self,
        me: Member,
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
        patience: float = PATIENCE,
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
        self._settle, self._patience = settle, patience
        self._peers: dict[bytes, RemoteJoiner] = {}
        self._past_lives: dict[tuple[bytes, bytes], None] = {}
        """Id and life: lives that a later one has replaced."""
        self._last_life: dict[bytes, bytes] = {}
        self._in_use: set[bytes] = set()
        self._outgoing: list[tuple[bytes, Message]] = []
        self._decisions: dict[bytes, Decision] = {}
        self._lock: Decision | None = None
        """The proposal that this node has accepted and that is not decided."""
        self._held: dict[bytes, float] = {}
        """Proposals that cannot be accepted yet, and when each came."""
        self._founders: tuple[bytes, ...] = ()
        self._changed_at = now
        self._enough_at = math.inf
        self._not_before = now
        self._propose_at = math.inf
        self._here_at = now
        self._repeat_at = math.inf
        self._ballot_at = math.inf
        if (ending := self.lineages.ending(follows)) is not None and ending.is_finished:
            self.ending = ending
        self._gather(now)

    @property
    def is_deciding(self) -> bool:
        """Whether a view is being agreed on or is agreed: no link should be replaced now."""
        return self._lock is not None or self.formed is not None

    @property
    def going_on(self) -> Here | None:
        """The announcement of a member, if the run is going on without this node."""
        return None if self.formed is not None else going_on(self._peers, self.lineages.current)

    @property
    def accepted(self) -> tuple[bytes, tuple[Member, ...]] | None:
        """The undecided proposal that this node has accepted, with its members."""
        return None if self._lock is None else (self._lock.proposal, self._lock.members)

    def newcomers(self) -> tuple[bytes, ...]:
        """Return the ids of the nodes that wait for a seat in this node's run."""
        if self.formed is None or self._has_older_rival:
            return ()
        return tuple(peer.id for peer in newcomers(self._peers, self._me.life, self.formed.lineage))

    def is_member_of_ours(self, peer_id: bytes, lineage: bytes) -> bool:
        """Tell whether a peer with the same terms says that it is in the run of this lineage."""
        peer = self._peers.get(peer_id)
        is_formed = peer is not None and peer.is_in(Phase.FORMED)
        return is_formed and peer is not None and peer.here is not None and peer.here.lineage == lineage

    @property
    def _has_older_rival(self) -> bool:
        return self.formed is not None and any(lineage < self.formed.lineage for lineage in self.rivals)

    # Inputs

    def entered(self, view: tuple[Member, ...], lineage: bytes, generation: int, now: float) -> None:
        """Note that this node is in a generation of the run, with these members."""
        self._lock, self._repeat_at, self._ballot_at = None, math.inf, math.inf
        self._propose_at = math.inf
        self.lineages.learn(lineage, (member.name for member in view), is_ours=True)
        self.lineages.commit(lineage)
        self.formed = Formed(view, lineage, generation=generation)
        self._here_at = now

    def ended(self, ending: Ending, now: float, teller: bytes | None = None) -> None:
        """Note that a lineage is over: this node agreed on it, or the node with the id `teller` says so."""
        if teller is not None and not self.believes(teller, ending):
            return
        is_ours = ending.lineage == (self._followed if self.formed is None else self.formed.lineage)
        self.lineages.end(ending)
        self.rivals.pop(ending.lineage, None)
        if self._lock is not None and self._lock.proposal == ending.lineage:
            self._lock, self._repeat_at, self._ballot_at = (
                None,
                math.inf,
                math.inf,
            )  # the run that it founded is over already
        if is_ours and (ending.is_finished or self.formed is not None):
            self.ending = ending
        self._announce_soon(now)
        self._gather(now)

    def link_up(self, peer_id: bytes, peer_life: bytes, now: float) -> bool:
        """Note a new link with this life of a node; it replaces an older link.

        Return False if the link is to be refused: another life of the node has a link, or a later one had.
        """
        known = self._peers.get(peer_id)
        if peer_id == self._me.id or (known is not None and known.life != peer_life):
            self._in_use.add(peer_id)
            return False
        if (peer_id, peer_life) in self._past_lives:
            return False
        self._in_use.discard(peer_id)
        if known is None:
            self._peers[peer_id] = RemoteJoiner(peer_id, peer_life)
        last = self._last_life.setdefault(peer_id, peer_life)
        if last != peer_life:
            self._past_lives[peer_id, last] = None
            if len(self._past_lives) > MOST_PAST_LIVES:
                del self._past_lives[next(iter(self._past_lives))]
            self._last_life[peer_id] = peer_life
        lock = self._lock
        if lock is not None and peer_id in lock.ranks and lock.members[lock.ranks[peer_id]].life != peer_life:
            lock.met_later_life(lock.ranks[peer_id])
            self._advance(now)
        self._send(peer_id, self._here())
        self._announce_soon(now)
        return True

    def link_down(self, peer_id: bytes, now: float) -> None:
        """Note that the link with a node ended."""
        if self._peers.pop(peer_id, None) is None:
            return
        self._announce_soon(now)
        if self._lock is not None and peer_id in self._lock.ranks:
            self._ballot_at = min(self._ballot_at, now + self._stagger(self._lock))
        self._gather(now)

    def received(self, peer_id: bytes, message: Message, now: float) -> None:
        """Take a message that came over the link with this node.

        Raises:
            RemoteProtocolError: the message breaks the protocol; the link should be closed.
        """
        peer = self._peers.get(peer_id)
        if peer is None:
            return
        match message:
            case Here():
                self._received_here(peer, message, now)
            case Propose():
                self._received_proposal(peer, message, now)
            case Standing():
                self._received_standing(peer, message, now)

    def tick(self, now: float) -> None:
        """Act on the deadlines that have passed."""
        if self.formed is None:
            self._gather(now)
        if now >= self._here_at:
            self._here_at = now + HERE_EVERY if self.formed is None else math.inf
            here = self._here()
            for peer_id in self._peers:
                self._send(peer_id, here)
        if self._lock is not None and now >= self._ballot_at:
            self._ballot_at = now + self._patience + self._stagger(self._lock)
            if self._lock.start_ballot():
                self._repeat_at = now
                self._advance(now)
        if self._lock is not None and now >= self._repeat_at:
            self._repeat(self._lock, now)

    def next_deadline(self) -> float:
        """Return when to call `tick`; inf for never."""
        return min(self._here_at, self._propose_at, self._repeat_at, self._ballot_at)

    def outgoing(self) -> list[tuple[bytes, Message]]:
        """Return the messages to send, each with the id of its receiver, and clear them."""
        messages, self._outgoing = self._outgoing, []
        return messages

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
            if known != here:
                self._gather(now)
        elif here.phase is not Phase.FORMED:
            self._send(peer.id, self._here())
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
                self._send(here.member.id, self._here(over))
            return
        if self.lineages.is_abandoned(here.lineage) and here.phase is Phase.FORMED:
            self.not_given_up = here
        if self.formed is not None:
            if here.phase is Phase.FORMED and here.lineage != self.formed.lineage:
                self._note_rival(here.lineage, here, self.formed.lineage)
                self.lineages.learn(here.lineage, here.names)
            return
        self.lineages.learn(here.lineage, here.names)
        if self._is_elastic and here.phase is Phase.FORMED and here.lineage == self.lineages.current:
            self._followed = here.lineage

    def _note_rival(self, lineage: bytes, here: Here, ours: bytes) -> None:
        """Note another run of the same name. A peer may name any number of them; the oldest are kept."""
        if lineage not in self.rivals and len(self.rivals) >= MAX_OPEN:
            if lineage > ours:
                return
            del self.rivals[max(self.rivals)]
        self.rivals[lineage] = here

    def _here(self, *endings: Ending) -> Here:
        hears = tuple(sorted(peer.life for peer in self._peers.values()))[: wire.MAX_LINKS]
        endings = (*endings, *self.lineages.latest_endings())[: wire.MAX_ENDINGS]
        if (formed := self.formed) is not None:
            names = tuple(member.name for member in formed.view)
            return Here(self._terms, self._me, hears, Phase.FORMED, names, formed.lineage, formed.generation, endings)
        phase = Phase.JOINING if self._lock is None else Phase.LOCKED
        lineage = self.lineages.current
        names = self.lineages.names(lineage)
        return Here(self._terms, self._me, hears, phase, names, lineage or None, endings=endings)

    def _announce_soon(self, now: float) -> None:
        self._here_at = min(self._here_at, now + HERE_SOON)

    # Proposing

    def _gather(self, now: float) -> None:
        """Propose a view if it is due, or note when it will be."""
        self._propose_at = math.inf
        if self._lock is not None or self.formed is not None:
            return
        if self.lineages.current:
            self._enough_at = math.inf
            return
        others = founders(self._peers, self._me.life)
        lives = tuple(peer.life for peer in others)
        if lives != self._founders:
            self._founders, self._changed_at = lives, now
        there = [self._me, *(peer.here.member for peer in others if peer.here is not None)]
        if len(there) < self._terms.smallest or count_hosts(there) < self._min_hosts:
            self._enough_at = math.inf
            return
        self._enough_at = min(self._enough_at, now)
        view = clique(self._me, others, self._terms.largest)
        smaller = sum(peer.id < self._me.id for peer in others)
        if len(view) == self._terms.largest:
            due = self._changed_at
        else:
            due = min(self._changed_at + self._settle, self._enough_at + MAX_SETTLES * self._settle)
        due = max(due + smaller * self._patience, self._not_before)
        if now < due:
            self._propose_at = due
        elif len(view) >= self._terms.smallest and count_hosts(view) >= self._min_hosts:
            lineage = new_lineage(self._wall(), self._random.randbytes(RANDOM_BYTES))
            self._lock_on(lineage, rank_order(view), now, is_mine=True)

    # Answering

    def _received_proposal(self, peer: RemoteJoiner, message: Propose, now: float) -> None:
        known = self._decisions.get(message.proposal)
        if known is not None:
            self._send(peer.id, known.standing())
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
            unmet = [member.name for member in members if not self._is_met(member)]
            if not unmet:
                self._lock_on(message.proposal, members, now, is_mine=False)
                return
            if message.proposal not in self._held and len(self._held) >= REMEMBERED:
                self._held.clear()
            if now < self._held.setdefault(message.proposal, now) + self._patience / 2:
                return  # a link may be about to come up, a message may be lost; the proposal is repeated
            refusal = f"{self._me.name} has not met {', '.join(unmet)}"[:256]
        decision = self._answer(message.proposal, members, Answer.REFUSED, refusal)
        decision.advance(all_here=False)
        self.lineages.end(Ending(message.proposal, False))
        self._tell(decision)

    def _refusal(self, proposal: bytes, members: tuple[Member, ...]) -> str:
        """Return why this node cannot be in a new view of these members, or ""."""
        if self.formed is not None:
            return f"{self._me.name} is in a view already"
        if self._lock is not None:
            return f"{self._me.name} has accepted another proposal"
        if self.lineages.current:
            return f"{self._me.name} knows of a run of this name that may be going on"
        if self.lineages.ending(proposal) is not None:
            return f"{self._me.name} knows that this founding came to nothing"
        if count_hosts(members) < self._min_hosts:
            return f"{self._me.name} waits for nodes on {self._min_hosts} machines"
        return ""

    def _is_met(self, member: Member) -> bool:
        peer = self._peers.get(member.id)
        is_known = peer is not None and peer.here is not None and not peer.objection and peer.here.lineage is None
        return member.id == self._me.id or (is_known and self._is_linked(member))

    def _lock_on(self, proposal: bytes, members: tuple[Member, ...], now: float, *, is_mine: bool) -> None:
        self._lock = self._answer(proposal, members, Answer.ACCEPTED)
        self.lineages.accept(proposal, (member.name for member in members))
        self._ballot_at = now + self._patience + self._stagger(self._lock)
        self._propose_at = math.inf
        self._announce_soon(now)
        self._repeat_at = now + REPEAT_EVERY
        self._lock.advance(all_here=True)
        if is_mine:
            self._repeat(self._lock, now)
        else:  # the proposal itself is repeated only if it seems to be lost
            self._tell(self._lock)
        self._settle_outcome(self._lock, now)

    def _answer(self, proposal: bytes, members: tuple[Member, ...], answer: Answer, reason: str = "") -> Decision:
        rank = next(rank for rank, member in enumerate(members) if member.id == self._me.id)
        self._held.pop(proposal, None)
        self._decisions[proposal] = decision = Decision(proposal, members, rank, answer, reason)
        if len(self._decisions) > REMEMBERED:
            del self._decisions[next(old for old, it in self._decisions.items() if it.outcome is Outcome.ABORT)]
        return decision

    # Deciding

    def _received_standing(self, peer: RemoteJoiner, message: Standing, now: float) -> None:
        decision = self._decisions.get(message.proposal)
        if decision is None:
            return
        rank = decision.ranks.get(peer.id)
        if rank is None or decision.members[rank].life != peer.life:
            return
        if decision.outcome is Outcome.OPEN:
            decision.heard(rank, message)
            if decision is self._lock:
                self._advance(now)
        elif message.outcome is Outcome.OPEN:
            self._send(peer.id, decision.standing())

    def _advance(self, now: float) -> None:
        """Continue with the accepted proposal, now that more is known."""
        lock = self._lock
        if lock is None:
            return
        promised = lock.rows[lock.rank].promised
        if lock.advance(all_here=all(self._is_linked(member) for member in lock.members)):
            self._tell(lock)
        if lock.rows[lock.rank].promised > promised:  # another member has started a ballot: give it time
            self._ballot_at = now + self._patience + self._stagger(lock)
        self._settle_outcome(lock, now)

    def _settle_outcome(self, lock: Decision, now: float) -> None:
        """Act on the outcome, if there is one."""
        if lock.outcome is Outcome.OPEN:
            return
        self._lock, self._repeat_at, self._ballot_at = None, math.inf, math.inf
        if lock.outcome is Outcome.COMMIT:
            lost = tuple(member.id for member in lock.members if not self._is_linked(member))
            self.lineages.commit(lock.proposal)
            self.formed = Formed(lock.members, lock.proposal, lost)
            self._here_at = now
        else:
            self.lineages.end(Ending(lock.proposal, False))
            self._changed_at, self._enough_at = now, math.inf
            self._not_before = now + self._random.uniform(REPEAT_EVERY, 2 * REPEAT_EVERY)
            self._announce_soon(now)
            self._gather(now)

    def _is_linked(self, member: Member) -> bool:
        peer = self._peers.get(member.id)
        return member.id == self._me.id or (peer is not None and peer.life == member.life)

    def _stagger(self, decision: Decision) -> float:
        """Return how long this member waits for members of lower rank to start a ballot first."""
        before = sum(self._is_linked(member) for member in decision.members[: decision.rank])
        return STAGGER * self._patience * (before + self._random.random() / 4)

    def _repeat(self, lock: Decision, now: float) -> None:
        self._repeat_at = now + REPEAT_EVERY
        proposal = Propose(lock.proposal, lock.members)
        for member, row in zip(lock.members, lock.rows, strict=True):
            if row.answer is Answer.NONE and self._is_linked(member):
                self._send(member.id, proposal)
        self._tell(lock)

    def _tell(self, decision: Decision) -> None:
        standing = decision.standing()
        for member in decision.members:
            if member.id != self._me.id and self._is_linked(member):
                self._send(member.id, standing)

    def _send(self, peer_id: bytes, message: Message) -> None:
        self._outgoing.append((peer_id, message))

    # Messages to users

    def report(self) -> Report:
        """Return which nodes are present, which are refused and why, and what this node waits for."""
        peers = sorted(self._peers.values(), key=lambda peer: peer.id)
        other = self.going_on
        return Report(
            here=tuple(sorted([self._me.name, *(peer.name for peer in peers if peer.here and not peer.objection)])),
            refused=tuple((peer.name, peer.objection) for peer in peers if peer.objection),
            waiting=self._waiting(),
            elsewhere=() if other is None else other.names,
            awaited=() if other is not None else self.lineages.names(self.lineages.current),
            in_use=tuple(sorted(self._in_use)),
        )

    def waits_for(self) -> str:
        """Return what this node waits for as a keyword (`wire.messages.Wait`); "" once the view is agreed."""
        if self.formed is not None:
            return ""
        if self._lock is not None:
            return "agreement"
        if self.going_on is not None:
            return "run"
        if self.lineages.current:
            return "earlier-run"
        others, fewest = founders(self._peers, self._me.life), self._terms.smallest
        view = clique(self._me, others, self._terms.largest)
        if len(others) + 1 < fewest or (len(view) >= fewest and count_hosts(view) < self._min_hosts):
            return "nodes"
        return "links" if len(view) < fewest else "agreement"

    def _waiting(self) -> str:
        if self.formed is not None:
            return "nothing: the view is agreed"
        if self._lock is not None:
            return self._waiting_locked(self._lock)
        if (other := self.going_on) is not None:
            return f"the run is already going on with {', '.join(other.names)}"
        if self.lineages.current:
            names = ", ".join(self.lineages.names(self.lineages.current)) or "unknown nodes"
            return (
                f"a run of this name was begun before, with {names}, and is not known to be over; waiting for "
                "enough of them to be back, or to say that it is (--new gives it up and begins another)"
            )
        return wanting(self._me, founders(self._peers, self._me.life), self._terms, self._min_hosts)

    def _waiting_locked(self, lock: Decision) -> str:
        lost = [member.name for member in lock.members if not self._is_linked(member)]
        if not lost:
            return f"agreeing with {', '.join(member.name for member in lock.members if member != self._me)}"
        return (
            f"{', '.join(lost)} went away while the view was being agreed and may have gone ahead with it; "
            "waiting until it is back or started again"
        )
