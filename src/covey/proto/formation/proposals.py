"""Proposals of a first view: when a joiner makes one, of which nodes, and its part in deciding those of others.

A full run is proposed at once, any other when no joiner came for `settle`. The joiner with the smallest id proposes;
each next one does so after another `patience`, in case a smaller one hears too few.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from covey.proto.decision import Decision
from covey.proto.formation.joiners import clique, count_hosts, founders, rank_order, wanting
from covey.wire.formation import Answer, Outcome, Propose

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from covey.proto.formation.joiners import JoinerLinks, RemoteJoiner
    from covey.wire.formation import FoundingMember, Standing, Terms
    from covey.wire.versions import Versions

SETTLE: Final = 1.0
"""Seconds without a new joiner after which the present ones form the run."""
MAX_SETTLES: Final = 5
"""Settling ends after this many times SETTLE, however often joiners come and go."""
PROPOSAL_PATIENCE: Final = 2.0
"""Seconds in which a proposal should be decided, or a joiner with a smaller id propose; then another one steps in."""
REPEAT_STANDING_EVERY: Final = 0.3
STAGGER_SHARE: Final = 0.2
"""Share of `patience` between the ballots that members start for the same reason, by rank."""
TELL_ALL: Final = 128
"""In a view of up to this many members, all tell all what they know, so that none depends on another. In a larger one,
where that would be a million messages about a thousand members each, all tell one member, which tells all."""
MOST_HUB_REPEATS: Final = 5
"""How often a member repeats to that one alone what it knows, before it tells all."""
PROPOSALS_LIMIT: Final = 256
"""Proposals whose answer is kept, to repeat it on request; and proposals that wait for an answer."""


class Founding:
    """The nodes that could found a run with this one, and the time to propose it."""

    def __init__(
        self,
        me: FoundingMember,
        terms: Terms,
        links: JoinerLinks,
        *,
        min_hosts: int,
        settle: float,
        patience: float,
        now: float,
    ) -> None:
        self._me, self._terms, self._links = me, terms, links
        self._min_hosts, self._settle, self._patience = min_hosts, settle, patience
        self.propose_at = math.inf
        """When a proposal will be due, if nothing changes."""
        self._lives: tuple[bytes, ...] = ()
        self._changed_at = now
        self._enough_at = math.inf
        self._not_before = now

    def wait(self) -> None:
        """Propose nothing: this node knows of a run that may be going on."""
        self._enough_at = math.inf

    def begin_again(self, now: float, not_before: float) -> None:
        """Settle anew after an aborted proposal."""
        self._changed_at, self._enough_at, self._not_before = now, math.inf, not_before

    def view_due(self, now: float) -> tuple[FoundingMember, ...] | None:
        """Return the view to propose, if it is time and enough nodes hear each other; else note when it will be."""
        others = self._others()
        lives = tuple(peer.life for peer in others)
        if lives != self._lives:
            self._lives, self._changed_at = lives, now
        there = [self._me, *(peer.here.member for peer in others if peer.here is not None)]
        if len(there) < self._terms.smallest or count_hosts(there) < self._min_hosts:
            self._enough_at = math.inf
            return None
        self._enough_at = min(self._enough_at, now)
        smallest, largest = self._terms.smallest, self._terms.largest
        settled_at = min(self._changed_at + self._settle, self._enough_at + MAX_SETTLES * self._settle)
        turn = self._patience * sum(peer.id < self._me.id for peer in others)
        # The clique is searched only when a view may be due: with a thousand nodes that takes a while.
        full_at = min(self._changed_at, settled_at) if len(there) >= largest else settled_at
        if now < (due := max(full_at + turn, self._not_before)):
            self.propose_at = due
            return None
        view = clique(self._me, others, largest, least=smallest)
        if len(view) < largest and now < (due := max(settled_at + turn, self._not_before)):
            self.propose_at = due
        elif len(view) >= smallest and not self.has_too_few_hosts(view):
            return rank_order(view)
        return None

    def has_too_few_hosts(self, members: tuple[FoundingMember, ...] | list[FoundingMember]) -> bool:
        """Tell whether a view of these members would span too few machines."""
        return count_hosts(members) < self._min_hosts

    def waits_for(self) -> str:
        """Return what is missing before a view can be proposed as a keyword (`wire.messages.Wait`)."""
        others, fewest = self._others(), self._terms.smallest
        view = clique(self._me, others, self._terms.largest)
        if len(others) + 1 < fewest or (len(view) >= fewest and self.has_too_few_hosts(view)):
            return "nodes"
        return "links" if len(view) < fewest else "agreement"

    def describe(self) -> str:
        """Describe what is missing before a view can be proposed."""
        return wanting(self._me, self._others(), self._terms, self._min_hosts)

    def _others(self) -> list[RemoteJoiner]:
        return founders(self._links.peers, self._me.life)


class Deciding:
    """Answers proposals, and votes on the accepted one until it has an outcome (`proto.decision`)."""

    def __init__(
        self,
        me: FoundingMember,
        links: JoinerLinks,
        random: random.Random,
        *,
        patience: float,
        settled: Callable[[Decision, float], None],
    ) -> None:
        """Begin without proposals; `settled` is called when the accepted one has an outcome."""
        self._me, self._links, self._random, self._patience = me, links, random, patience
        self._settled = settled
        self.decisions: dict[bytes, Decision] = {}
        """By proposal."""
        self.lock: Decision | None = None
        """The proposal that this node has accepted and that is not decided."""
        self._held: dict[bytes, float] = {}
        """Proposals that cannot be accepted yet, and when each came."""
        self._repeat_at = self._ballot_at = math.inf
        self._repeats = 0
        """How often the accepted proposal was repeated."""

    # Answers

    def accept(
        self, proposal: bytes, members: tuple[FoundingMember, ...], versions: Versions, now: float, *, is_mine: bool
    ) -> None:
        """Accept a proposal; this node is locked on it until it has an outcome. All members speak `versions`."""
        self.lock = lock = self._answer(proposal, members, Answer.ACCEPTED, versions=versions)
        self._ballot_at = now + self._patience + self._stagger(lock)
        self._repeat_at, self._repeats = now + REPEAT_STANDING_EVERY, 0
        lock.advance(all_here=True)
        if is_mine:  # others repeat the proposal itself only if it seems to be lost
            self._propose(lock)
        self._tell(lock)
        self._settle(lock, now)

    def refuse(self, proposal: bytes, members: tuple[FoundingMember, ...], reason: str) -> None:
        """Refuse a proposal, which aborts it."""
        decision = self._answer(proposal, members, Answer.REFUSED, reason)
        decision.advance(all_here=False)
        self._tell(decision)

    def holds(self, proposal: bytes, now: float) -> bool:
        """Tell whether to answer a proposal later: a link may be about to come up. It is repeated meanwhile."""
        if proposal not in self._held and len(self._held) >= PROPOSALS_LIMIT:
            self._held.clear()
        return now < self._held.setdefault(proposal, now) + self._patience / 2

    def _answer(
        self,
        proposal: bytes,
        members: tuple[FoundingMember, ...],
        answer: Answer,
        reason: str = "",
        versions: Versions | None = None,
    ) -> Decision:
        rank = next(rank for rank, member in enumerate(members) if member.id == self._me.id)
        self._held.pop(proposal, None)
        self.decisions[proposal] = decision = Decision(proposal, members, rank, answer, reason, versions)
        if len(self.decisions) > PROPOSALS_LIMIT:
            del self.decisions[next(old for old, it in self.decisions.items() if it.outcome is Outcome.ABORT)]
        return decision

    # The accepted proposal

    def received(self, peer: RemoteJoiner, message: Standing, now: float) -> None:
        """Take what a member of a proposal knows about it."""
        decision = self.decisions.get(message.proposal)
        if decision is None:
            return
        rank = decision.ranks.get(peer.id)
        if rank is None or decision.members[rank].life != peer.life:
            return
        if decision.outcome is Outcome.OPEN:
            decision.heard(rank, message)
            if decision is self.lock:
                self._advance(decision, now)
        elif message.outcome is Outcome.OPEN:
            self._links.send(peer.id, decision.standing())

    def link_up(self, peer_id: bytes, peer_life: bytes, now: float) -> None:
        """Note a new link: if it is with a later life of a member, the life in the proposal is over."""
        lock = self.lock
        if lock is not None and peer_id in lock.ranks and lock.members[lock.ranks[peer_id]].life != peer_life:
            lock.met_later_life(lock.ranks[peer_id])
            self._advance(lock, now)

    def link_down(self, peer_id: bytes, now: float) -> None:
        """Note that a link ended: if it was with a member, start a ballot soon."""
        if self.lock is not None and peer_id in self.lock.ranks:
            self._ballot_at = min(self._ballot_at, now + self._stagger(self.lock))

    def drop(self) -> None:
        """Forget the accepted proposal: its outcome does not matter any more."""
        self.lock, self._repeat_at, self._ballot_at = None, math.inf, math.inf

    def tick(self, now: float) -> None:
        """Start a ballot, and repeat what was said, if it is time."""
        if self.lock is not None and now >= self._ballot_at:
            self._ballot_at = now + self._patience + self._stagger(self.lock)
            if self.lock.start_ballot():
                self._repeat_at = now
                self._advance(self.lock, now)
        if self.lock is not None and now >= self._repeat_at:
            self._repeat(self.lock, now)

    def next_deadline(self) -> float:
        """Return when to call `tick`; inf for never."""
        return min(self._repeat_at, self._ballot_at)

    def _advance(self, lock: Decision, now: float) -> None:
        """Continue with the accepted proposal, now that more is known."""
        promised = lock.rows[lock.rank].promised
        if lock.advance(all_here=all(map(self._links.is_linked, lock.members))):
            self._tell(lock)
        if lock.rows[lock.rank].promised > promised:  # another member has started a ballot: give it time
            self._ballot_at = now + self._patience + self._stagger(lock)
        self._settle(lock, now)

    def _settle(self, lock: Decision, now: float) -> None:
        if lock.outcome is not Outcome.OPEN:
            self.drop()
            self._settled(lock, now)

    def _stagger(self, decision: Decision) -> float:
        """Return how long this member waits for members of lower rank to start a ballot first."""
        before = sum(map(self._links.is_linked, decision.members[: decision.rank]))
        return STAGGER_SHARE * self._patience * (before + self._random.random() / 4)

    # Messages

    def _repeat(self, lock: Decision, now: float) -> None:
        self._repeat_at = now + REPEAT_STANDING_EVERY
        self._repeats += 1
        if self._tells_all(lock):
            self._propose(lock)
        self._tell(lock)

    def _propose(self, lock: Decision) -> None:
        """Send the proposal to the members that have not answered it."""
        proposal = Propose(lock.proposal, lock.members, lock.versions)
        for member, row in zip(lock.members, lock.rows, strict=True):
            if row.answer is Answer.NONE and self._links.is_linked(member):
                self._links.send(member.id, proposal)

    def _tell(self, decision: Decision) -> None:
        standing = decision.standing()
        for member in decision.members if self._tells_all(decision) else [decision.members[decision.hub()]]:
            if member.id != self._me.id and self._links.is_linked(member):
                self._links.send(member.id, standing)

    def _tells_all(self, decision: Decision) -> bool:
        """Tell whether all members have to be told: they are few, or one that would tell them is not there."""
        if len(decision.members) <= TELL_ALL or self._repeats > MOST_HUB_REPEATS:
            return True
        hub = decision.members[decision.hub()]
        return hub.id == self._me.id or not self._links.is_linked(hub)

    def describe(self, lock: Decision) -> str:
        """Describe what the accepted proposal waits for."""
        lost = [member.name for member in lock.members if not self._links.is_linked(member)]
        if not lost:
            return f"agreeing with {', '.join(member.name for member in lock.members if member != self._me)}"
        return (
            f"{', '.join(lost)} went away while the view was being agreed and may have gone ahead with it; "
            "waiting until it is back or started again"
        )
