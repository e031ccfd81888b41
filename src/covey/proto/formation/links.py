"""The joiners that a node has links with, and the lives of nodes that are known to be over."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Final

from covey.proto.founders import RemoteJoiner

if TYPE_CHECKING:
    from covey.wire.formation import Formation as Message
    from covey.wire.formation import Member

MOST_PAST_LIVES: Final = 4096
"""Lives that are known to be over. A member that starts anew very often makes a node forget the first of them."""

MOST_GONE: Final = 16
"""Nodes that were here and are named when a run was not formed in time."""


class JoinerLinks:
    """The nodes that one joiner has a link with: one life of each."""

    def __init__(self, me: Member) -> None:
        self._me = me
        self.peers: dict[bytes, RemoteJoiner] = {}
        """By id."""
        self.lives: list[bytes] = []
        """Their lives, in order."""
        self.in_use: set[bytes] = set()
        """Ids of which two lives had links at once: a copied identity."""
        self.gone: dict[bytes, str] = {}
        """By id: the names of nodes that could have been in the view, and whose links have ended."""
        self._outgoing: list[tuple[bytes, Message]] = []
        self._last_life: dict[bytes, bytes] = {}
        self._past_lives: dict[tuple[bytes, bytes], None] = {}
        """Id and life: lives that a later one has replaced."""

    def add(self, peer_id: bytes, peer_life: bytes) -> bool:
        """Note a new link; False if it is to be refused: another life of the node has a link, or a later one had."""
        known = self.peers.get(peer_id)
        if peer_id == self._me.id or (known is not None and known.life != peer_life):
            self.in_use.add(peer_id)
            return False
        if (peer_id, peer_life) in self._past_lives:
            return False
        self.in_use.discard(peer_id)
        self.gone.pop(peer_id, None)
        if known is None:
            self.peers[peer_id] = RemoteJoiner(peer_id, peer_life)
            bisect.insort(self.lives, peer_life)
        last = self._last_life.setdefault(peer_id, peer_life)
        if last != peer_life:
            self._past_lives[peer_id, last] = None
            if len(self._past_lives) > MOST_PAST_LIVES:
                del self._past_lives[next(iter(self._past_lives))]
            self._last_life[peer_id] = peer_life
        return True

    def remove(self, peer_id: bytes) -> bool:
        """Note that a link ended; return whether there was one."""
        if (peer := self.peers.pop(peer_id, None)) is None:
            return False
        del self.lives[bisect.bisect_left(self.lives, peer.life)]
        if peer.here and not peer.objection:
            self.gone[peer_id] = peer.name
            if len(self.gone) > MOST_GONE:
                del self.gone[next(iter(self.gone))]
        return True

    def is_linked(self, member: Member) -> bool:
        """Tell whether there is a link with this life of a node, or it is this node."""
        peer = self.peers.get(member.id)
        return member.id == self._me.id or (peer is not None and peer.life == member.life)

    def is_met(self, member: Member) -> bool:
        """Tell whether a linked node announced that it could found a run under the same terms."""
        peer = self.peers.get(member.id)
        is_known = peer is not None and peer.here is not None and not peer.objection and peer.here.lineage is None
        return member.id == self._me.id or (is_known and self.is_linked(member))

    def send(self, peer_id: bytes, message: Message) -> None:
        """Send a message on the link with a node."""
        self._outgoing.append((peer_id, message))

    def take_outgoing(self) -> list[tuple[bytes, Message]]:
        """Return the messages to send, each with the id of its receiver, and clear them."""
        messages, self._outgoing = self._outgoing, []
        return messages
