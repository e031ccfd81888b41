"""Performs what a replica wants, in a member or in a keeper. On the control loop.

A link drops what it cannot hold, so messages wait here for its room; without a link nothing is kept, because what
matters is said again on the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import TYPE_CHECKING, Final, Protocol

from covey.net.host.machine import waking_clock
from covey.proto.replication import Answered
from covey.runtime.state.store_link import PieceAssembly, Unsent
from covey.wire import store as wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.proto.replication import Replica, Voting
    from covey.runtime.links.link import Link
    from covey.wire import messages

EXPIRE_EVERY: Final = 1.0
"""Seconds at most between two looks at entries that end after a time: timers stand still while a machine sleeps."""


class StorePeer(Protocol):
    """A process that a replica talks to: a member, or the keeper."""

    @property
    def link(self) -> Link | None: ...

    def send(self, message: messages.Control) -> None: ...


class StoreDriver:
    """Carries the messages of a replica, wakes it when entries end, and passes on the answers to its process."""

    def __init__(
        self,
        replica: Replica,
        find: Callable[[int], StorePeer | None],
        answered: Callable[[Answered], None],
    ) -> None:
        """`find` returns the process of a number that a replica uses, or None if nothing can be sent to it."""
        self._replica, self._find, self._answered = replica, find, answered
        self._unsent: dict[int, Unsent] = {}
        """By process: what its link has no room for yet."""
        self._large_bodies = itertools.count()
        self._assemblies: dict[int, PieceAssembly] = {}
        """By process: the pieces of a message that have come."""
        self._look: asyncio.TimerHandle | None = None
        """Looks for entries whose time is over."""
        self._is_closed = False

    def heard(self, peer: int, posting: messages.Posting) -> None:
        """Take a message of another process."""
        body: wire.Body | None = wire.decode_body(posting.body)
        if isinstance(body, wire.BodyPiece):
            body = self._assemblies.setdefault(peer, PieceAssembly()).add(body)
        if body is not None and not isinstance(body, wire.BodyPiece):
            self._replica.advance(waking_clock())
            self._replica.heard(peer, posting.store, posting.number, body)
            self.perform()

    def link_up(self, peer: int) -> None:
        """Repeat, on the new link with a process, what may be lost with the last one."""
        self._unsent.pop(peer, None)
        self._replica.repeat(peer)
        self.perform()

    def link_has_room(self, peer: int) -> None:
        """Go on with what waits for room on the link with a process."""
        self._send_more(peer)

    def forget(self, peer: int) -> None:
        """Drop what waits for a process, or has come from it in part: it is gone."""
        self._unsent.pop(peer, None)
        self._assemblies.pop(peer, None)

    def configure(
        self,
        config: int,
        members: tuple[int, ...],
        *,
        is_first: bool = False,
        is_kept: bool = False,
        follows: bool = False,
        follower: int | None = None,
        voting: Voting | None = None,
    ) -> None:
        """Take the members of a view, as `Replica.configure` does. What waits is dropped: after a new view, and only
        then, all that matters is said again."""
        self._replica.advance(waking_clock())  # questions that waited for the view begin entries that end after a time
        is_new = self._replica.configure(
            config,
            members,
            is_first=is_first,
            is_kept=is_kept,
            follows=follows,
            follower=follower,
            voting=voting,
        )
        if is_new:
            self._unsent.clear()
        self.perform()

    def perform(self) -> None:
        """Perform the effects of the replica, after any call of it."""
        for effect in self._replica.effects():
            if isinstance(effect, Answered):
                self._answered(effect)
            elif not self._is_closed:
                if (unsent := self._unsent.get(effect.peer)) is None:
                    unsent = self._unsent[effect.peer] = Unsent(self._large_bodies)
                unsent.add(effect)
        for peer in list(self._unsent):
            self._send_more(peer)
        if self._look is None and not self._is_closed and (end := self._replica.next_end()) < math.inf:
            delay = max(0.0, min(end - waking_clock(), EXPIRE_EVERY))
            self._look = asyncio.get_running_loop().call_later(delay, self._end_entries)

    def close(self) -> None:
        """Send nothing more."""
        self._is_closed = True
        self._unsent.clear()
        if self._look is not None:
            self._look.cancel()

    def _end_entries(self) -> None:
        self._look = None
        self._replica.advance(waking_clock())
        self.perform()

    def _send_more(self, number: int) -> None:
        """Give the link with a process what it has room for."""
        unsent, peer = self._unsent.get(number), self._find(number)
        if unsent is None:
            return
        link = None if peer is None else peer.link
        while unsent and peer is not None and link is not None and link.has_room:
            peer.send(unsent.take())
        if link is not None and unsent.is_too_long:
            link.abort()  # the process reads nothing; what it lacks is said again on another link
        if link is None or not unsent or unsent.is_too_long:
            self._unsent.pop(number, None)
