"""The links with the members of a run, whichever kind of mesh makes them. On the control loop.

What becomes of a link goes to the parts of the run that it concerns, and a lost member is dialled again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from covey.runtime.peers.mesh import LinkListener

if TYPE_CHECKING:
    from covey.base.numbers import Seat
    from covey.runtime.links.handshake import Where
    from covey.runtime.links.link import Link
    from covey.runtime.peers.mesh import LinkMesh
    from covey.runtime.peers.peer_table import Inbox, PeerTable
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.state.checkpoints import Checkpoints
    from covey.runtime.state.store import Stores
    from covey.runtime.tasks import Tasks
    from covey.runtime.views.views import Views
    from covey.wire import messages


class RunLinks(LinkListener):
    """Hands the links of a mesh to the parts of a run. A process without a seat in it concerns none of them."""

    mesh: LinkMesh
    is_serving = False

    def serve_parts(
        self,
        peers: PeerTable,
        views: Views,
        inbox: Inbox,
        *,
        tasks: Tasks,
        stores: Stores,
        checkpoints: Checkpoints,
    ) -> None:
        """Hand the links of this run to its parts from now on."""
        self.is_serving = True
        self.peers, self.views, self.inbox = peers, views, inbox
        self.tasks, self.stores, self.checkpoints = tasks, stores, checkpoints
        self._unheard: set[RemoteProcess] = set()
        """Linked members that are silent and are being dialled."""

    @property
    def is_closing(self) -> bool:
        """Whether this process leaves the run, or has left it."""
        return self.tasks.is_closing

    # What becomes of links

    def is_member(self, remote: RemoteProcess) -> bool:
        """Tell whether a process has a seat in the run whose parts get the links."""
        return self.is_serving and remote.seat >= 0

    def arrived(self, remote: RemoteProcess) -> None:
        if self.is_member(remote):
            self.views.losses.noticed(remote.seat)

    def link_replaced(self, remote: RemoteProcess) -> None:
        if self.is_member(remote) and remote.is_ready:
            self.views.exchanged(remote)

    def link_has_room(self, remote: RemoteProcess) -> None:
        if self.is_member(remote):
            self.stores.link_has_room(remote.seat)

    def hear(self, remote: RemoteProcess, message: messages.Control) -> None:
        """Take a message; one of a process without a seat is kept, since it may have heard of its seat before."""
        if self.is_member(remote):
            self.inbox.heard(remote.seat, message)
        else:
            remote.keep_early(message)

    def deliver_early(self, seat: Seat, peer: RemoteProcess) -> None:
        """Give the parts of the run what a member said before this process knew its seat."""
        for message in peer.early.take():
            self.inbox.heard_early(seat, message)

    # What the run asks for: `MemberLinks`

    def ways(self, token: bytes) -> list[Where]:
        return self.mesh.ways(token)

    def round_trip(self, way: Where) -> float | None:
        return self.mesh.round_trip(way)

    def link_ended(self, peer: RemoteProcess) -> None:
        """Link again with a member whose last link has ended."""
        if self.mesh.may_dial(peer):
            self.mesh.spawn(self._redial(peer))

    async def _redial(self, peer: RemoteProcess) -> None:
        """Dial a member without a link: a link can end although both processes live.

        A member that a view has excluded is dialled too, so that it learns of the view.
        """
        until = time.monotonic() + 2 * self.mesh.config.patience

        def is_wanted() -> bool:
            is_settled = peer.has_left or peer.is_denied or self.is_closing or self.mesh.is_linked(peer)
            return not is_settled and time.monotonic() < until

        await self.mesh.redial(peer, is_wanted)

    def unheard(self, peer: RemoteProcess) -> None:
        """Dial a member whose link is silent by all its addresses: it may be busy, or the path may be dead."""
        if peer.link is not None and self.mesh.may_dial(peer) and peer not in self._unheard:
            self._unheard.add(peer)
            self.mesh.spawn(self._redial_unheard(peer))

    async def _redial_unheard(self, peer: RemoteProcess) -> None:
        silent_since = peer.heard_at

        def is_wanted() -> bool:
            return peer.link is not None and peer.heard_at == silent_since and not self.is_closing

        try:
            await self.mesh.redial(peer, is_wanted)
        finally:
            self._unheard.discard(peer)

    def part(self, peer: RemoteProcess, link: Link) -> None:
        """End all links with a member that is given up."""
        self.mesh.part(peer)
