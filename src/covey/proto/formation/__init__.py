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

The modules: `joiners` knows which joiners have a link, which of them could found a run, and what each `Here` says;
`proposals` when to propose a view, and which proposals were made. `core` is `Formation`, which passes every input to
them.
"""

from __future__ import annotations

from covey.proto.formation.core import Formation, Formed, Report
from covey.proto.formation.joiners import MOST_PAST_LIVES
from covey.proto.formation.proposals import PROPOSAL_PATIENCE, PROPOSALS_LIMIT, SETTLE

__all__ = ["MOST_PAST_LIVES", "PROPOSALS_LIMIT", "PROPOSAL_PATIENCE", "SETTLE", "Formation", "Formed", "Report"]
