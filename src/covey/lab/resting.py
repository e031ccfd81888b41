"""Simulated runs whose idle links close: two nodes have no connection while they have nothing to say to each other.

`python -m covey.lab.resting --seeds 10000` simulates whole runs that lose members on such a network.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

from covey.lab.churn import Play, main
from covey.lab.world import SimulatedLink, SimulatedNode, SimulatedWorld, pair_of
from covey.proto.changes import Quorum
from covey.proto.overlay import Overlay, Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

REVIEW_EVERY = 0.25
REDIAL_EVERY = 0.2


class RestingLink(SimulatedLink):
    """A link that may rest."""

    def __init__(self, one: SimulatedNode, other: SimulatedNode, now: float) -> None:
        super().__init__(one, other)
        self.is_resting = False
        self.used_at = now
        self.queues: dict[bytes, list[Any]] = {one.id: [], other.id: []}
        """By sender: the messages that wait until the link is awake."""
        self.waking: set[bytes] = set()
        """The ends that dial."""

    def other_end(self, here: SimulatedNode) -> SimulatedNode:
        """Return the incarnation at the other end."""
        one, other = self.ends
        return one if here is other else other


class RestingWorld(SimulatedWorld):
    """A world in which a link rests once it is idle, unless one of its ends wants it awake.

    A link of which only one end has learned that it is down stays up for the other end, as a resting one, until that
    end sends something or is dialled.
    """

    def __init__(
        self,
        seed: int,
        *,
        wants_awake: Callable[[bytes], Collection[bytes]],
        rest_after: float,
        wake_within: float,
        dial: float,
        streams_wake: bool,
        **faults: Any,
    ) -> None:
        """Make an empty world.

        `wants_awake` returns the nodes with which a node wants its link to stay awake. A link rests after `rest_after`
        seconds without a message. Waking takes at most `dial`, or fails after `wake_within`. Streams have connections
        of their own; with `streams_wake`, a message on one of them wakes the link all the same.
        """
        super().__init__(seed, **faults)
        self._wants_awake = wants_awake
        self._rest_after, self._wake_within, self._dial_takes = rest_after, wake_within, dial
        self._streams_wake = streams_wake
        self.wakes = 0
        """How often an end dialled to wake a link."""
        self.failed_wakes = 0
        self.at(REVIEW_EVERY, self._review)

    def is_awake(self, one: bytes, other: bytes) -> bool:
        """Tell whether a node has a link with another one that does not rest."""
        link = self.nodes[one].links.get(other) if one in self.nodes else None
        return isinstance(link, RestingLink) and not link.is_resting

    def rest(self) -> None:
        """Let all links rest at once that no end wants awake."""
        wanted = {frozenset((id, peer)) for id in self.nodes for peer in self._wants_awake(id)}
        for pair, link in self._links.items():
            if frozenset(pair) not in wanted:
                assert isinstance(link, RestingLink)
                link.is_resting = True

    # Faults that the ends of a resting link do not notice.

    def crash(self, id: bytes, *, silently: bool = False) -> None:
        if id in self.nodes:
            for peer in sorted(self.nodes):
                if (link := self._resting(id, peer)) is not None:
                    link.is_broken, link.carries = True, False
                    del self._links[pair_of(id, peer)]
        super().crash(id, silently=silently)

    def flap(self, one: bytes, other: bytes) -> None:
        if self._resting(one, other) is None:
            super().flap(one, other)

    def cut(self, source: bytes, target: bytes) -> None:
        if self._resting(source, target) is None:
            super().cut(source, target)
        else:
            self._cuts.add((source, target))

    def _resting(self, one: bytes, other: bytes) -> RestingLink | None:
        link = self._links.get(pair_of(one, other))
        return link if isinstance(link, RestingLink) and link.is_resting else None

    # Rest

    def _connect(self, one: SimulatedNode, other: SimulatedNode) -> SimulatedLink:
        link = self._links[pair_of(one.id, other.id)] = RestingLink(one, other, self.now)
        self._look_later(link)
        return link

    def _look_later(self, link: RestingLink) -> None:
        self.at(max(link.used_at, self.now) + self._rest_after, self._rest_if_idle, link)

    def _rest_if_idle(self, link: RestingLink) -> None:
        one, other = link.ends
        pair = pair_of(one.id, other.id)
        if self._links.get(pair) is not link or link.is_resting:
            return
        is_idle = self.now >= link.used_at + self._rest_after
        is_agreed = all(
            here.backlog is None and here.links.get(there.id) is link and there.id not in self._wants_awake(here.id)
            for here, there in (link.ends, link.ends[::-1])
        )
        if is_idle and is_agreed:
            self.tell(f"the link {self._names[one.id]}-{self._names[other.id]} rests")
            link.is_resting = True
        else:
            link.used_at = max(link.used_at, self.now) if is_idle else link.used_at
            self._look_later(link)

    def _review(self) -> None:
        """Wake the links that an end wants awake, because the view has changed."""
        for id, node in sorted(self.nodes.items()):
            for peer in sorted(self._wants_awake(id)) if node.backlog is None else ():
                link = node.links.get(peer)
                if isinstance(link, RestingLink) and link.is_resting:
                    self._wake(node, link)
        self.at(self.now + REVIEW_EVERY, self._review)

    # Waking

    def _send(self, source: SimulatedNode, target: bytes, link: SimulatedLink, message: Any) -> None:
        assert isinstance(link, RestingLink)
        is_streamed = type(message) in self.streamed
        if link.is_resting and (self._streams_wake or not is_streamed):
            link.queues[source.id].append(message)
            self._wake(source, link)
            return
        if not is_streamed:
            link.used_at = self.now
        super()._send(source, target, link, message)

    def _wake(self, here: SimulatedNode, link: RestingLink) -> None:
        if here.id not in link.waking:
            link.waking.add(here.id)
            self.wakes += 1
            at = self.now + self._dial_takes * self.random.random()
            self.at(at, self._try_to_wake, here, link, self.now + self._wake_within)

    def _try_to_wake(self, here: SimulatedNode, link: RestingLink, until: float) -> None:
        there = link.other_end(here)
        is_here = self.nodes.get(here.id) is here and here.links.get(there.id) is link
        if not is_here or not link.is_resting:
            return
        if here.backlog is not None:
            here.backlog.append((self._try_to_wake, (here, link, until)))
            return
        found = self.nodes.get(there.id)
        is_cut = bool(self._cuts & {(here.id, there.id), (there.id, here.id)})
        if found is there and found.backlog is None and not is_cut:
            self._woken(link)
        elif (found is not None and found is not there and not is_cut) or self.now >= until:
            # Another incarnation answers, or none does.
            self._lose(here, link)
        else:
            self.at(self.now + REDIAL_EVERY, self._try_to_wake, here, link, until)

    def _lose(self, here: SimulatedNode, link: RestingLink) -> None:
        """Let one end know that its link is down. The other one does not notice it."""
        there = link.other_end(here)
        pair = pair_of(here.id, there.id)
        self.tell(f"{self._names[here.id]} cannot wake the link with {self._names[there.id]}")
        if self._links.get(pair) is link:
            del self._links[pair]
        self.failed_wakes += 1
        link.waking.discard(here.id)
        link.queues[here.id].clear()
        self._down(here, there, link)
        self._dial_soon(here.id, there.id)

    def _woken(self, link: RestingLink) -> None:
        one, other = link.ends
        self.tell(f"the link {self._names[one.id]}-{self._names[other.id]} is awake")
        link.is_resting, link.used_at = False, self.now
        link.waking.clear()
        self._links[pair_of(one.id, other.id)] = link
        self._look_later(link)
        for here, there in (link.ends, link.ends[::-1]):
            if here.links.get(there.id) is link:
                self._send_waiting(here, there, link, link)
            else:  # it has learned that the link was down
                self.at(self.now + self.delay * self.random.random(), self._up, here, there, link)

    def _send_waiting(self, here: SimulatedNode, there: SimulatedNode, link: RestingLink, on: SimulatedLink) -> None:
        waiting, link.queues[here.id] = link.queues[here.id], []
        for message in waiting:
            self._send(here, there.id, on, message)

    def _dial(self, one: bytes, other: bytes) -> None:
        pair = pair_of(one, other)
        if not self.nodes.keys() >= {one, other} or pair in self._links or self._cuts & {pair, pair[::-1]}:
            return
        ends = self.nodes[one], self.nodes[other]
        if any(end.backlog is not None for end in ends):
            self._dial_soon(one, other)
            return
        for here, there in (ends, ends[::-1]):
            link = here.links.get(there.id)
            if isinstance(link, RestingLink) and link.is_resting:
                # The dialled end believes that its link rests: it is awake, or down if another incarnation dials.
                if there in link.ends:
                    self._woken(link)
                    return
                self._down(here, link.other_end(here), link)
        super()._dial(one, other)


class RestingPlay(Play):
    """One run whose links rest."""

    world: RestingWorld
    sizes = (3, 8)
    topologies = ("kregular", "hypercube", "ring", "ring")
    """A ring has a link from each member to the next one only: so most links of a few members rest, too."""

    def _make_world(self, **faults: Any) -> RestingWorld:
        chance = random.Random(f"rest {self.seed}")
        self.topology = chance.choice(self.topologies)
        self.rests_at_once = chance.random() < 0.9
        self.voters_rest = chance.random() < 0.5
        return RestingWorld(
            self.seed,
            wants_awake=self._wants_awake,
            rest_after=chance.choice([0.05, 0.05, 0.3, 2.0]),
            wake_within=chance.choice([0.5, 1.0, 3.0]),
            dial=chance.choice([2 * faults["delay"], 0.3]),
            streams_wake=chance.random() < 0.3,
            **faults,
        )

    def _wants_awake(self, id: bytes) -> Collection[bytes]:
        core = self.workers[id].core
        rank, ranks = self.ids.index(id), core.view.ranks
        if not self.voters_rest and not core.is_member:
            return self.ids
        if rank not in ranks:
            return ()
        if self.topology == "ring":
            after = {ranks[(ranks.index(rank) + 1) % len(ranks)]}
        else:
            after = set(Overlay(cast("Topology", self.topology), len(self.ids), ranks).neighbours(rank))
        leader = core.leader(self._clock(id))
        return {self.ids[other] for other in after | {rank if leader is None else leader} if other != rank}

    def _judge_all(self, id: bytes, is_dead: bool) -> None:
        """Let only those judge a member that have an awake link with it: the others do not ping it."""
        for judge in sorted(self.world.nodes):
            if self.world.is_awake(judge, id):
                self._judge(judge, id, is_dead)

    def count(self) -> Counter[str]:
        """Return what happened, in numbers."""
        woken = {
            "links that were woken": self.world.wakes - self.world.failed_wakes,
            "links that could not be woken": self.world.failed_wakes,
        }
        return super().count() + Counter(woken)

    def _introduce(self) -> None:
        super()._introduce()
        if self.rests_at_once:
            self.world.rest()


def play_of(seed: int) -> RestingPlay:
    """Return the play of a seed: most are about a majority, some about lineages."""
    return RestingPlay(seed, quorum=Quorum.ANY if seed % 8 == 7 else Quorum.MAJORITY)


if __name__ == "__main__":
    main(play_of, "resting")
