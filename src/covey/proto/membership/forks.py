"""Lineages under quorum="any": members that are not a quorum go on as a lineage of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from covey.proto import views
from covey.proto.changes import Quorum
from covey.proto.membership import checks
from covey.wire.membership import Fork, View

if TYPE_CHECKING:
    import random

    from covey.proto.membership.installer import Installer
    from covey.proto.membership.outbox import Outbox
    from covey.proto.membership.position import ViewPosition
    from covey.proto.membership.round import ViewRound

MOST_SKIPPED: Final = 1 << 20
"""A fork skips a random count of view numbers, at most this many, so that bytes of one lineage are never taken for an
attempt of another."""


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
