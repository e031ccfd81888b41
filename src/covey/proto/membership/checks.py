"""Checks of received messages: each raises RemoteProtocolError for what no correct member sends.

The view after the last one is checked against it, and against the answer that this node gave. A member that lies can
still announce a view that is possible, but was never decided: see "A member checks a view against its own answer" in
docs/design.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from covey.base.errors import RemoteProtocolError
from covey.proto import views
from covey.wire.membership import Accept, Accepted, Prepare, Promise, Pulse, Refuse

if TYPE_CHECKING:
    from covey.proto.membership.state import ViewPosition, ViewRound
    from covey.wire.membership import Membership as Message
    from covey.wire.membership import View

MOST_BALLOTS_AHEAD: Final = 1 << 40
"""How far a ballot may be above all that this node knows. Ballots grow by a few each time, so no member needs more; and
no member can use up the numbers of the others."""


def check_follows(sender: int, view: View, position: ViewPosition, answer: ViewRound) -> None:
    """Check that a view can follow the last installed one, and agrees with the answer of this node."""
    last = position.view
    if not is_sound(view, last):
        raise RemoteProtocolError(f"member {sender} sent a view {view.number} that cannot follow {last}")
    if position.me not in view.ranks or view.number != last.number + 1 or not position.stays:
        return
    # Members of a view have frozen, answered its proposer, and named the generation in which they go on.
    if answer.states is None:
        raise RemoteProtocolError(f"member {sender} sent a view {view.number} for which this member never answered")
    if view.successor not in (None, position.successor_of(view.ranks, answer.wish)):
        raise RemoteProtocolError(f"member {sender} sent a view with a generation that this member never named")
    if not views.rests_on(view, answer.states):
        raise RemoteProtocolError(
            f"member {sender} sent a view {view.number} that contradicts what this member answered"
        )


def is_sound(view: View, last: View) -> bool:
    """Tell whether a view has some members of the last one, each once and in order, and consistent contents."""
    ranks, successor = view.ranks, view.successor
    is_subset = list(ranks) == sorted(set(ranks)) and set(ranks) <= set(last.ranks)
    has_tie_breaker = not ranks or view.tie_breaker in ranks
    groups = {verdict.group for verdict in view.verdicts}
    if successor is not None:
        ids = {member.id for member in successor.members}
        if not ranks or len(ids) < len(successor.members) or successor.tie_breaker >= len(ids):
            return False
    return is_subset and has_tie_breaker and len(groups) == len(view.verdicts)


def check_promise(sender: int, promise: Promise, position: ViewPosition, answer: ViewRound) -> None:
    """Check an answer by itself and against this node's own: proposals are built from answers."""
    accepted, ballot, last = promise.accepted, promise.accepted_ballot, position.view
    is_possible = (ballot < 0) is (accepted is None) and ballot <= promise.ballot
    if accepted is not None:
        is_next = (accepted.lineage, accepted.number) == (last.lineage, last.number + 1)
        is_possible = is_possible and is_next and is_sound(accepted, last)
    states = promise.states or ()
    size = len(position.acceptor.members)
    for state in states:
        is_state = state.sequence <= state.returned + 1 and state.returned < views.MOST_OPERATIONS
        is_possible = is_possible and is_state and all(rank < size for rank in (*state.ranks, state.root))
    is_possible = is_possible and (answer.states is None or views.fits(states, answer.states, last))
    if not is_possible or len({state.group for state in states}) < len(states):
        raise RemoteProtocolError(f"member {sender} sent an impossible answer: {str(promise)[:200]}")


def check_ballot(sender: int, message: Message, position: ViewPosition) -> None:
    """Check that a ballot is not so high that the numbers above it could run out."""
    match message:
        case Prepare() | Accept() | Promise() | Accepted():
            ballot = message.ballot
        case Refuse() | Pulse():
            ballot = message.promised
        case _:
            return
    if ballot > max(position.ballot, position.seen) + MOST_BALLOTS_AHEAD:
        raise RemoteProtocolError(f"member {sender} sent ballot {ballot}, far above all others")


def check_fork(sender: int, view: View, last: View, most_skipped: int) -> None:
    """Check that a member may fork from the last view, with the ranks of `view`, as a lineage of their own."""
    is_after = last.number < view.number <= last.number + 1 + most_skipped
    is_own = sender in view.ranks and view.lineage != last.lineage and view.successor is None
    if not (is_after and is_own and is_sound(view, last)):
        raise RemoteProtocolError(f"member {sender} sent a fork that cannot follow {last}")
