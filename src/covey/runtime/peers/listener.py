"""What a mesh reports to its owners. On the control loop.

A `MeshListener` (a joiner, a keeper, an agent, a launcher's run) hears which processes there are and what they say; a
`LinkListener` (the run that this process has a seat in) hears what becomes of the links with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.base.errors import AuthError
    from covey.runtime.peers.remote_process import RemoteProcess


class MeshListener:
    """Receives what happens in a mesh. Every method does nothing by default."""

    def linked(self, remote: RemoteProcess) -> None:
        """Called after the first link with a process that takes part in something, and after the next first one."""

    def recall(self, card: messages.Card) -> RemoteProcess | None:
        """Return the process that a card is of, if the owner has known it since an earlier link."""
        return None

    def lost(self, remote: RemoteProcess) -> None:
        """Called after the last link with such a process has ended."""

    def keeper_linked(self, remote: RemoteProcess) -> None:
        """Called after a link with a keeper: a node that reports on its processes and takes part in no run."""

    def heard(self, remote: RemoteProcess, message: messages.Control) -> None:
        """Called for a message that the mesh does not handle itself."""

    def asked_for_checkpoint(
        self, request: messages.RequestCheckpoint, send: Callable[[messages.CheckpointProgress], None]
    ) -> None:
        """Called when a command asks for a checkpoint, or how one is; `send` takes the answer."""
        send(messages.CheckpointProgress(request.id, "refused", "this process is in no run"))

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


class LinkListener:
    """Receives what becomes of links, and says which may rest. Every method does nothing by default."""

    def arrived(self, remote: RemoteProcess) -> None:
        """Called for every message of a process, before the message is handled."""

    def link_changed(self, remote: RemoteProcess) -> None:
        """Called when another link with a process is in use, or a better way to it was found."""

    def link_replaced(self, remote: RemoteProcess) -> None:
        """Called when another link is used instead of one that its owner gave up: messages on that may be lost."""

    def link_rests(self, remote: RemoteProcess) -> None:
        """Called when the link with a process begins to rest."""

    def link_woke(self, remote: RemoteProcess) -> None:
        """Called when a link that rested was replaced by another; nothing is lost."""

    def link_has_room(self, remote: RemoteProcess) -> None:
        """Called when the link in use with a process, which was full, has room again."""

    def may_rest(self, remote: RemoteProcess) -> bool:
        """Tell whether the link with a process may rest."""
        return False

    def wants_awake(self, remote: RemoteProcess) -> bool:
        """Tell whether the link with a process is to be woken if it rests."""
        return False

    def may_change_link(self, remote: RemoteProcess) -> bool:
        """Tell whether the link in use may be changed now: messages on the old one may be overtaken."""
        return True
