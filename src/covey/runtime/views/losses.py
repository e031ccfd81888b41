"""What follows when a peer is silent, its link ends, or a view excludes it. On the control loop.

Health (`HealthMonitor`) has an opinion, a link ends, a keeper reports an exit: each moves the state of the peer, and is
passed on to the views of its generations. Under `on_loss="raise"` the groups are told at once, otherwise once a view
goes on without the peer.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import TYPE_CHECKING, Final

from covey.base.errors import ConnectError
from covey.proto.health import Cause, ProcessState
from covey.runtime.peers.remote_process import PeerEvent
from covey.runtime.views.health_monitor import HealthMonitor
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from covey.base.numbers import Seat
    from covey.runtime.links.link import Link
    from covey.runtime.members.node import Node
    from covey.runtime.peers.remote_process import RemoteProcess

logger = logging.getLogger("covey")

LAST_MESSAGES_SECONDS: Final = 0.5
"""How long the link of a process that has exited may take to end by itself: a child of the process may hold it open."""
UNLINKED_SECONDS: Final = 5.0
"""How long a process may be without a link whose last one ended because of its path (`tells_of_its_path`). The process
may be well, and is linked again over another path, or through another relay, which takes more round trips. If it has
exited, its keeper says so."""
PATH_ERRORS: Final = frozenset({
    errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ENETRESET,
    errno.ECONNABORTED, errno.EADDRNOTAVAIL,
})  # fmt: skip
"""What a connection ends with if its path has died. The kernel of a process that has exited ends it in order, or resets
it."""


def tells_of_its_path(link: Link, on_loss: str) -> bool:
    """Tell whether the end of a link says something of its path, and nothing of the process at its other end.

    The end of a link through a relay says that the relay has ended, or one of the two ways to it. With
    `on_loss="continue"` the members decide how long they wait for another direct link.
    """
    has_path_error = isinstance(link.error, OSError) and link.error.errno in PATH_ERRORS
    return bool(link.relay) or (on_loss == "raise" and has_path_error)


class Losses:
    """Notices that peers of one node are lost, and acts on it."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._monitor: HealthMonitor | None = None
        self.on_silent: Callable[[Seat], None] | None = None
        """Ends all links with a seat that is given up; None if the peer's own link is the only one."""
        self.on_unheard: Callable[[Seat], None] | None = None
        """Dials a process that is not heard on its link by other ways; None if the launcher's mesh does so."""

    # Health

    def start(self) -> None:
        """Begin to judge peers."""
        self._monitor = HealthMonitor(self._node, self.silent, self._trusted, self._unheard)

    def run(self) -> None:
        """Ask quiet peers and act on opinions, until the node closes."""
        assert self._monitor is not None
        self._node.spawn(self._monitor.keep())

    def watch(self, seats: Iterable[Seat]) -> None:
        """Judge the members of a new generation."""
        if self._monitor is not None:
            for seat in seats:
                if seat != self._node.seat:
                    self._monitor.watch(self._node.peers[seat])

    def noticed(self, seat: Seat) -> None:
        """Note that a peer sent something."""
        if self._monitor is not None:
            self._monitor.heard(seat)

    def answered(self, seat: Seat, number: int, clock: float) -> None:
        """Note that a peer answered a ping, and what its clock was."""
        if self._monitor is not None:
            self._monitor.answered(seat, number, clock)

    def vouched(self, keeper: bytes, processes: Iterable[tuple[bytes, int]]) -> None:
        """Take what the keeper with this id says of processes; it counts for processes that named this keeper."""
        peers = self._node.peers.values()
        own = {peer.life: peer for peer in peers if peer.card.keeper == keeper and not peer.is_denied}
        for life, value in processes:
            if life in own and self._monitor is not None:
                self._monitor.vouched(own[life], value)
                if value == ProcessState.BUSY:
                    self._node.generation_table.vouched(own[life].seat)

    def is_unheard(self, seat: Seat) -> bool:
        """Tell whether a peer is not heard on its link."""
        return self._monitor is not None and self._monitor.is_unheard(seat)

    def _unheard(self, seat: Seat) -> None:
        """Link with a peer anew that is not heard on its link: perhaps only the path of that link is dead."""
        peer, mesh = self._node.peers[seat], self._node.launcher_mesh
        if self.on_unheard is not None:
            self.on_unheard(seat)
        elif mesh is not None and peer.link is not None and peer.is_dialled:
            self._node.spawn(mesh.dial_anew(peer, peer.link))

    def _trusted(self, seat: Seat) -> None:
        self._node.peers[seat].reason = ""
        self._node.generation_table.judged(seat, is_dead=False)

    def silent(self, seat: Seat, reason: str, cause: Cause) -> None:
        """Act on the opinion of health that a peer should be given up."""
        node, peer = self._node, self._node.peers[seat]
        peer.reason = reason
        node.events.phase("detect")
        if peer.link is not None:
            peer.link.catch_up()
        node.generation_table.judged(seat, is_dead=True)
        if node.config.on_loss == "raise" and not peer.has_left:
            logger.warning("%s is given up: %s", node.generation_table.name_of(seat), reason)
        if cause is Cause.EXITED and peer.link is not None:
            # The kernel ends the link of a process that has exited; its last messages may still be on the way.
            asyncio.get_running_loop().call_later(LAST_MESSAGES_SECONDS, self._end_link, peer, peer.link)
        elif peer.link is None:
            if node.config.on_loss == "raise" and not peer.is_gone:
                self._give_up(peer)
        elif node.config.on_loss == "raise" or cause is Cause.HOST_SILENT:
            # TCP retransmits less and less often; a new link is up soon after the network is.
            self._end_link(peer, peer.link)

    def _end_link(self, peer: RemoteProcess, link: Link) -> None:
        """End a link on which nothing more is expected, unless another has replaced it."""
        if peer.link is not link or self._node.is_closing:
            return
        if self.on_silent is not None:
            self.on_silent(peer.seat)
        else:
            link.abort()

    def deny(self, seat: Seat, reason: str) -> None:
        """Give up a process whose node may not be in the cluster any more, whatever its keeper says of it."""
        peer = self._node.peers[seat]
        if not peer.is_denied:
            peer.is_denied = True
            self.silent(seat, reason, Cause.HOST_SILENT)
            if self._monitor is not None:
                self._monitor.forget(seat)

    # Links

    def link_up(self, peer: RemoteProcess) -> None:
        """Take a peer for active again: it has a new link."""
        peer.note(PeerEvent.RELINKED)
        if self._monitor is not None:
            self._monitor.link_up(peer)

    def link_rests(self, seat: Seat) -> None:
        """Expect nothing of a peer whose link rests: its neighbours and the leader notice if it is lost."""
        if self._monitor is not None:
            self._monitor.link_rests(seat)

    def link_ended(self, seat: Seat) -> None:
        """Act on the end of a peer's link: dial it again, and under `on_loss="raise"` take it for lost."""
        node, peer = self._node, self._node.peers[seat]
        peer.unlink()
        ended = peer.ended_link
        may_be_path = ended is not None and tells_of_its_path(ended, node.config.on_loss)
        if node.is_closing:
            return
        if not peer.is_ready:  # it never saw the run formed, so it may come again
            if peer.is_dialled and node.launcher_mesh is not None:
                node.spawn(node.launcher_mesh.dial(peer))
            return
        node.events.phase("detect")
        node.lanes.dialler.link_lost(seat)
        if self._monitor is not None:
            self._monitor.link_lost(seat)
        if may_be_path and not peer.has_left and not peer.reason:
            asyncio.get_running_loop().call_later(UNLINKED_SECONDS, self._remains_unlinked, peer)
        else:
            self._unlinked(peer)
        if node.generation is not None and peer.is_dialled and not peer.has_left and node.launcher_mesh is not None:
            node.spawn(node.launcher_mesh.redial(peer))

    def _remains_unlinked(self, peer: RemoteProcess) -> None:
        """Take a peer for unlinked whose link ended a while ago, because of its path, unless it has another one."""
        if peer.link is None and not peer.is_gone and not self._node.is_closing:
            self._unlinked(peer)

    def _unlinked(self, peer: RemoteProcess) -> None:
        """Tell the views that there is no link with a peer; without views, take it for lost."""
        self._node.generation_table.link_down(peer.seat)
        if self._node.config.on_loss == "raise" or self._node.generation is None:
            self._give_up(peer)

    # Views

    def exclude(self, seat: Seat) -> None:
        """Go on without a peer, as a view says. The process may live; what it says about operations is ignored."""
        peer = self._node.peers[seat]
        is_news = not peer.is_gone
        peer.note(PeerEvent.EXCLUDED)
        if self._monitor is not None:
            self._monitor.forget(seat)
        if peer.link is not None:
            peer.link.catch_up()  # it may have said goodbye, and then it is not lost
            if peer.has_left and peer.link.is_resting:  # no connection is there to end by itself
                asyncio.get_running_loop().call_soon(peer.link.give_up)
        self._tell_gone(peer, is_news=is_news)
        self._node.lanes.part_with(seat)

    def _give_up(self, peer: RemoteProcess) -> None:
        if peer.link is not None:
            peer.link.catch_up()  # as above
        is_news = not peer.is_gone
        peer.note(PeerEvent.GIVEN_UP)
        self._tell_gone(peer, is_news=is_news)

    def _tell_gone(self, peer: RemoteProcess, *, is_news: bool) -> None:
        node = self._node
        if is_news and node.generation is not None:
            number = node.generation.number
            reason = f"its program failed with {peer.failure}" if peer.failure else peer.reason
            kind = "left" if peer.has_left else "lost"
            node.audit.note(kind, messages.as_member(peer.card), reason=reason, generation=number, once=True)
        gone = ConnectError(f"{node.generation_table.name_of(peer.seat)} is gone")
        node.lanes.abandon(lambda key: key.peer == peer.seat, gone)
        node.stores.peer_gone(peer.seat)
        node.groups.peer_gone(peer)
