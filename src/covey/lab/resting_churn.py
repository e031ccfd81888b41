"""Whole runs that lose members, and whose links rest: `python -m covey.lab.resting_churn --seeds 10000`.

A `RestingPlay` is a `Play` in which a member keeps its link awake with its neighbours in an overlay and with the leader
of its view. Of most faults of the other members it learns when it sends something to them, or from a view.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

from covey.lab.churn import Play, main
from covey.lab.resting import RestingWorld
from covey.proto.changes import Quorum
from covey.proto.overlay import Overlay, Topology

if TYPE_CHECKING:
    from collections.abc import Collection


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
    main(play_of, "resting_churn")
