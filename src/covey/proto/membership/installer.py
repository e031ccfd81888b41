"""How a view begins for a node: by a decision, or by a fork; the exclusion of the node, and the end of the run.

Under quorum="any" members that are not a quorum continue as a lineage of their own: `Forks` begins it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from covey.proto import views
from covey.proto.changes import Excluded, Installed, Quorum
from covey.proto.membership import checks
from covey.wire.membership import Decided, Fork, View

if TYPE_CHECKING:
    import random

    from covey.proto.membership.leader import Leading
    from covey.proto.membership.need import Need
    from covey.proto.membership.state import Outbox, ViewPosition, ViewRound

PAST_VIEWS: Final = 64
"""Views that are kept for members that missed them. Only a member that installed a view can be in the next one, so a
member that lacks more views is in none of them."""
MOST_SKIPPED: Final = 1 << 20
"""A fork skips a random count of view numbers, at most this many, so that bytes of one lineage are never taken for an
attempt of another."""


class Installer:
    """Installs views in order, and keeps the last ones for peers that are behind."""

    def __init__(self, position: ViewPosition, outbox: Outbox, round: ViewRound, need: Need, leading: Leading) -> None:
        self._position, self._outbox, self._round, self._need, self._leading = position, outbox, round, need, leading
        self._past = {position.view.number: position.view}
        self._parted_with: tuple[int, ...] = ()
        """Ranks that a fork left behind; the next view reports them as lost."""
        self._reported_end: View | None = None
        """An end of the run that some members report although a quorum seems to stay in it."""
        self._tellers: set[int] = set()
        """The members that report it."""

    @property
    def hears_quorum(self) -> bool:
        """Whether this node hears a quorum of members that stay in the view: then the run is not over."""
        return self._position.hears_quorum(apart_from=self._tellers)

    # Peers at other views

    def is_next(self, rank: int, number: int) -> bool:
        """Tell whether a view is the next one; help a peer that is behind, or ask one that is ahead."""
        position = self._position
        last = position.view.number
        if number <= last or position.is_last:
            self.send_view(rank, number)
        elif number > last + 1:
            self._outbox.send(rank, position.pulse())
        return number == last + 1 and not position.is_excluded and not position.is_last

    def send_view(self, rank: int, number: int) -> None:
        """Send a peer the view of this number, or the last one if that is gone."""
        self._outbox.send(rank, Decided(self._past.get(number, self._position.view)))

    # Decided views

    def decided(self, view: View, now: float) -> None:
        """Announce a view that this node has decided, and install it."""
        for rank in self._position.audience():
            self._outbox.send(rank, Decided(view))
        self.install(view, now)

    def received(self, rank: int, view: View, now: float) -> None:
        """Take a view that a member says was decided; RemoteProtocolError if it cannot be."""
        position = self._position
        last = position.view.number
        if view.number <= last or position.is_excluded or position.is_last:
            return
        checks.check_follows(rank, view, position, self._round)
        if not view.ranks:
            self._told_of_end(rank, view, now)
        elif view.number == last + 1:
            self.install(view, now)
        elif position.me not in view.ranks and position.me != position.keeper:
            self._end(view, now)  # ranks never come back, so the views in between do not matter
        else:
            self._outbox.send(rank, position.pulse())

    def install(self, view: View, now: float) -> None:
        """Begin the next view, or end here if this node is not in it."""
        position = self._position
        lost = tuple(rank for rank in position.view.ranks if rank not in view.ranks) + self._parted_with
        self._parted_with = ()
        self._begin(view, now)
        self._round.resume()
        if view.successor is not None:
            self._round.wish = None
        self._past[view.number] = view
        self._past.pop(view.number - PAST_VIEWS, None)
        is_over_here = position.me not in view.ranks or (position.is_voter and view.successor is not None)
        if is_over_here and position.me != position.keeper:
            self.exclude(view)
            return
        if position.is_member:
            self._outbox.add(Installed(view, lost))
        self._need.review(now)

    def install_fork(self, view: View, now: float) -> None:
        """Begin another lineage at its first view, frozen as this node is: the view after it decides the operations."""
        self._parted_with += tuple(rank for rank in self._position.view.ranks if rank not in view.ranks)
        self._past = {view.number: view}
        self._position.presence.parted.clear()
        self._begin(view, now)
        self._round.freeze_number = view.number + 1
        self._need.review(now)

    def exclude(self, view: View) -> None:
        """End this node's part in the views: it is not in `view`, or only voted until it."""
        self._position.is_excluded = True
        self._outbox.add(Excluded(view))
        self._need.review(math.inf)

    def _begin(self, view: View, now: float) -> None:
        self._position.acceptor.install(view)
        self._outbox.persist()
        self._round.forget_ballots()
        self._reported_end = None
        self._tellers.clear()
        self._need.calm()
        self._leading.begun(now)

    def _end(self, view: View, now: float) -> None:
        self._begin(view, now)
        self._past[view.number] = view
        self.exclude(view)

    # The end of the run

    def _told_of_end(self, rank: int, end: View, now: float) -> None:
        """Take the run for over, unless a quorum seems to stay in it, not counting the members that report the end.

        So one member alone cannot end a run for the others. If it is over, the others say so when they are asked.
        """
        self._reported_end = end
        self._tellers.add(rank)
        self.reconsider_end(now)
        if self._reported_end is not None:
            for other in self._position.audience():
                if other not in self._tellers:
                    self._outbox.send(other, self._position.pulse())

    def reconsider_end(self, now: float) -> None:
        """Believe a reported end of the run once no quorum is heard any more."""
        end, position = self._reported_end, self._position
        if end is not None and not self.hears_quorum:
            self._reported_end = None
            if end.number > position.view.number and not (position.is_excluded or position.is_last):
                self._end(end, now)


class Forks:
    """Begins lineages, and tells members about the one that this node is in."""

    def __init__(
        self,
        position: ViewPosition,
        outbox: Outbox,
        round: ViewRound,
        installer: Installer,
        random: random.Random,
        quorum: Quorum,
    ) -> None:
        self._position, self._outbox, self._round, self._installer = position, outbox, round, installer
        self._random, self._quorum = random, quorum
        self._fork: Fork | None = None
        """How this node's lineage began, if by a fork."""

    @property
    def are_allowed(self) -> bool:
        """Whether members that are not a quorum may go on."""
        return self._quorum is Quorum.ANY

    def start(self, ranks: tuple[int, ...], now: float) -> None:
        """Go on with these ranks as a new lineage."""
        last = self._position.view
        number = last.number + 1 + self._random.randrange(1, MOST_SKIPPED)
        base = View(self._random.randbytes(16), number, ranks, views.next_tie_breaker(last, ranks))
        fork = Fork(last.lineage, last.number, base)
        self._enter(fork, now)
        for rank in self._position.audience():
            self._outbox.send(rank, fork)

    def received(self, rank: int, fork: Fork, now: float) -> None:
        """Take the fork of a member from the present view; RemoteProtocolError if it cannot be one."""
        checks.check_fork(rank, fork.view, self._position.view, MOST_SKIPPED)
        self._enter(fork, now)

    def _enter(self, fork: Fork, now: float) -> None:
        position = self._position
        if position.me in fork.view.ranks and position.is_member and self._round.states is not None:
            self._fork = fork
            self._installer.install_fork(fork.view, now)

    def met(self, rank: int, lineage: bytes) -> bool:
        """Take a message of a lineage; return whether its sender has parted from this node's lineage.

        A member of this node's fork that is still in the parent lineage is told about the fork.
        """
        fork = self._fork
        if lineage == self._position.view.lineage:
            return False
        if fork is not None and lineage == fork.parent and rank in fork.view.ranks:
            self._outbox.send(rank, fork)
            return False
        if self.are_allowed:
            self._position.presence.parted.add(rank)
        return self.are_allowed
