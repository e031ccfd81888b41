"""The progress of a node towards the next view: what it wants, how it answered, and the ballot that it started."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from covey.proto.ballot import Proposal
    from covey.wire.membership import State, Successor


class ViewRound:
    """What a node has done towards one view. An installed view begins the next round."""

    def __init__(self) -> None:
        self.is_wanted = False
        """Whether a member has asked for a view because a lane broke, or an operation is late."""
        self.wish: Successor | None = None
        """The generation that this member wants the next view to name."""
        self.freeze_number = -1
        """The view for which the operations were asked to freeze."""
        self.states: tuple[State, ...] | None = None
        """The states in which the operations were frozen."""
        self.pending = -1
        """The highest ballot whose answer waits for the freeze."""
        self.answered = -1
        """The last ballot that this node has answered."""
        self.proposal: Proposal | None = None
        """The ballot of this node, if it has started one."""

    def forget_ballots(self) -> None:
        """Begin the ballots anew: a view is installed, or this node forks."""
        self.proposal, self.pending, self.answered = None, -1, -1

    def resume(self) -> None:
        """End the freeze, because a view is installed."""
        self.freeze_number, self.states = -1, None
        self.is_wanted = False
