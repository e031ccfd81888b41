"""What a `Mesh` reports to its owner: a joiner, a keeper, or none for a visit. On the control loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from covey.base.errors import AuthError
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.wire import messages


class MeshListener:
    """Receives what happens in a mesh. Every method does nothing by default."""

    def linked(self, remote: RemoteProcess) -> None:
        """Called after the first link with a node that takes part in something."""

    def recall(self, card: messages.Card) -> RemoteProcess | None:
        """Return the process that a card is of, if the owner has known it since an earlier link."""
        return None

    def lost(self, remote: RemoteProcess) -> None:
        """Called after the last link with such a node has ended."""

    def keeper_linked(self, remote: RemoteProcess) -> None:
        """Called after a link with a keeper: a node that reports on its processes and takes part in no run."""

    def link_changed(self, remote: RemoteProcess) -> None:
        """Called when another link with a node is in use, or a better way to it was found."""

    def link_replaced(self, remote: RemoteProcess) -> None:
        """Called when a silent link was replaced. Messages on the old link may be lost."""

    def link_rests(self, remote: RemoteProcess) -> None:
        """Called when the link with a node begins to rest."""

    def link_woke(self, remote: RemoteProcess) -> None:
        """Called when a link that rested was replaced by another; nothing is lost."""

    def link_has_room(self, remote: RemoteProcess) -> None:
        """Called when the link in use with a node, which was full, has room again."""

    def may_rest(self, remote: RemoteProcess) -> bool:
        """Tell whether the link with a node may rest."""
        return False

    def wants_awake(self, remote: RemoteProcess) -> bool:
        """Tell whether the link with a node is to be woken if it rests."""
        return False

    def may_change_link(self, remote: RemoteProcess) -> bool:
        """Tell whether the link in use may be changed now: messages on the old one may be overtaken."""
        return True

    def arrived(self, remote: RemoteProcess) -> None:
        """Called for every message of a node, before the message is handled."""

    def heard(self, remote: RemoteProcess, message: messages.Control) -> None:
        """Called for a message that the mesh does not handle itself."""

    def expelled(self, remote: RemoteProcess, reason: str) -> None:
        """Called after the links with a node were closed because it may no longer be in the cluster."""

    def identity_refused(self, error: AuthError) -> None:
        """Called when this node cannot be in the cluster, because another process uses its identity."""

    def access_lost(self, error: AuthError) -> None:
        """Called when this node may not be in the cluster any more, or is not approved yet."""

    def refused(self, name: str, reason: str) -> bool:
        """Called when a node is refused for the first time, or for another reason; return whether it was noted."""
        return False

    def describe(self) -> messages.Tell | None:
        """Return how this node sees its run; None if it is in none."""
        return None
