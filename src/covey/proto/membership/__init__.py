"""Agreement of a generation's members on the next view, when one is lost, leaves, or a lane breaks.

View v + 1 is one consensus among the members of view v (`proto.ballot`). A member that needs a new view starts a
ballot, after a delay that depends on its rank. Each member that is asked *freezes* its operations, then promises and
reports its state in every group. The proposer proposes the largest set of members that answered and hear each other,
and with it the fate of every operation (`proto.views.judge`). Only an installed view ends the freeze, so nothing that
happens later can change a decided fate.

A generation also ends by a view: one that names the next generation (`successor`), or one without ranks, when no member
stays or none is left; then the run is over. No view follows either.

Invariants, held in the simulation whatever the network does:

1. A view number has one value, and every member installs a prefix of the same sequence of views.
2. Only members that answered are in a view, and their operations have not moved since.
3. A quorum is counted over all of the last view, whatever is believed of its members; `min_size` must be met as well.
4. At most one member leads at a time (`proto.membership.leader`), and only by its own ballot.
5. When the network is good, there is a view of all well members within a bounded time. A member that cannot be in it
   learns so: `Excluded`, or `QuorumLost` after `patience`.
6. A generation has one successor, or the run has one end: never both, and never a view after them.

A node that was started anew is not a member any more, but its disk holds what it was bound to. It goes on as a *voter*:
it answers, but cannot be in the next view, until a view excludes it. A member that leaves or gave up does the same. If
voters are a quorum, they end the run once all other members of the view were started anew too, or were not heard for
`patience`.

Messages are checked against what this node knows: a view must follow from the last one, come from a member of it, and
contain this node only if this node answered. Any other message ends the link it came on.

If one keeper started all members, no partition is possible: the keeper alone proposes and accepts. With `quorum="any"`,
members that are not a quorum `Fork`: they go on as a lineage of their own, and never merge again.

The modules, each below the next:

- `state`: what this node is in the last view, which ranks it hears and needs, its progress towards the next view, and
  the effects to be performed.
- `checks`: what no correct member sends.
- `need`: whether a new view is needed, and the deadlines that follow.
- `leader`: promised ballots, and the lease of the leader.
- `installer`: the beginning of a view, an exclusion, the end of a run, another lineage.
- `ballots`: the two roles in a ballot.
- `core`: `Membership`, which passes every input to them.
"""

from __future__ import annotations

from covey.proto.membership.checks import MOST_BALLOTS_AHEAD
from covey.proto.membership.core import Membership
from covey.proto.membership.installer import MOST_SKIPPED, PAST_VIEWS
from covey.proto.membership.need import FINISH_TOGETHER, RELINK, VIEW_PATIENCE

__all__ = [
    "FINISH_TOGETHER",
    "MOST_BALLOTS_AHEAD",
    "MOST_SKIPPED",
    "PAST_VIEWS",
    "RELINK",
    "VIEW_PATIENCE",
    "Membership",
]
