"""The joiners that a node knows: which it has links with, which could found a run, and what it announces to them."""

from __future__ import annotations

import bisect
import math
from typing import TYPE_CHECKING, Final

from covey.wire import formation as wire
from covey.wire.formation import FoundingMember, Here, Phase, Terms

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from covey.proto.formation.core import Formed
    from covey.proto.lineages import Lineages
    from covey.wire.formation import Ending
    from covey.wire.formation import Formation as Message

MOST_PAST_LIVES: Final = 4096
"""Lives that are known to be over. A member that starts anew very often makes a node forget the first of them."""
MOST_GONE: Final = 16
"""Nodes that were here and are named when a run was not formed in time."""
HERE_EVERY: Final = 0.5
HERE_SOON: Final = 0.05
"""Changes within this time are announced together: links come up in dozens."""
CROWD_OF_JOINERS: Final = 128
"""With more peers than this, both times grow with their number: every announcement names all links, and all peers send
theirs, so what a node sends and receives in a second would grow with the square of their number. And the announcement
to one peer, when its link is new, does not name the others: all peers get the next one, soon."""


class RemoteJoiner:
    """A node with a link, as the formation knows it."""

    __slots__ = ("here", "id", "life", "objection")

    def __init__(self, id: bytes, life: bytes) -> None:
        self.id, self.life = id, life
        self.here: Here | None = None
        """Its last announcement."""
        self.objection = ""
        """How its terms differ from this node's, or ""."""

    @property
    def heard(self) -> frozenset[bytes]:
        """The lives that it says it has a link with. Not kept: a thousand such sets of a thousand lives need 64 MiB."""
        return frozenset(() if self.here is None else self.here.hears)

    @property
    def name(self) -> str:
        """Its name, or the start of its id if the name is not known."""
        return self.id.hex()[:8] if self.here is None else self.here.member.name

    def hears(self, life: bytes) -> bool:
        """Tell whether it says that it has a link with this life."""
        hears = () if self.here is None else self.here.hears
        index = bisect.bisect_left(hears, life)  # they are in order, unless the peer is a strange one
        return (index < len(hears) and hears[index] == life) or life in hears

    def is_in(self, phase: Phase) -> bool:
        """Tell whether it has the same terms and is in this phase."""
        return self.here is not None and not self.objection and self.here.phase is phase


def rank_order(members: Iterable[FoundingMember]) -> tuple[FoundingMember, ...]:
    """Order members as ranks: members of one host adjacent, hosts and the members in them by smallest id."""
    ordered = sorted(members, key=lambda member: member.id)
    first: dict[str, bytes] = {}
    for member in ordered:
        first.setdefault(member.host, member.id)
    return tuple(sorted(ordered, key=lambda member: (first[member.host], member.id)))


def founders(peers: Mapping[bytes, RemoteJoiner], life: bytes) -> list[RemoteJoiner]:
    """Return the peers that could found a run with the node of this life, by id: they know of no run that goes on."""
    return [peer for peer in _linked(peers, life) if peer.here is not None and peer.here.lineage is None]


def newcomers(peers: Mapping[bytes, RemoteJoiner], life: bytes, lineage: bytes) -> list[RemoteJoiner]:
    """Return the peers that wait for a seat in the run of this lineage and hear the node of this life, by id."""
    return [peer for peer in _linked(peers, life) if peer.here is not None and peer.here.lineage == lineage]


def _linked(peers: Mapping[bytes, RemoteJoiner], life: bytes) -> list[RemoteJoiner]:
    found = (peer for peer in peers.values() if peer.is_in(Phase.JOINING) and peer.hears(life))
    return sorted(found, key=lambda peer: peer.id)


def going_on(peers: Mapping[bytes, RemoteJoiner], lineage: bytes) -> Here | None:
    """Return the announcement of a peer that is in a view of this lineage already; its terms may differ."""
    formed = [
        peer
        for peer in peers.values()
        if peer.here is not None and peer.here.phase is Phase.FORMED and peer.here.lineage == lineage
    ]
    return min(formed, key=lambda peer: peer.id).here if formed and lineage else None


def clique(me: FoundingMember, others: list[RemoteJoiner], most: int, *, least: int = 1) -> list[FoundingMember]:
    """Return `me` and those of `others` that all hear each other, `most` in all; other hosts before this one.

    The search ends with fewer than `least` once there cannot be more.
    """
    chosen: list[RemoteJoiner] = []
    lives: set[bytes] = set()
    common: frozenset[bytes] = frozenset()  # the lives that all of the chosen ones hear
    spare = 1 + len(others) - least
    for peer in sorted(others, key=lambda peer: (peer.here is not None and peer.here.member.host == me.host, peer.id)):
        if len(chosen) + 1 == most:
            break
        heard = peer.heard
        if lives <= heard and (not chosen or peer.life in common):
            common = common & heard if chosen else heard
            chosen.append(peer)
            lives.add(peer.life)
        elif (spare := spare - 1) < 0:
            break
    return [me, *(peer.here.member for peer in chosen if peer.here is not None)]


def count_hosts(members: Iterable[FoundingMember]) -> int:
    """Return how many machines these members are on."""
    return len({member.host for member in members})


def wanting(me: FoundingMember, others: list[RemoteJoiner], terms: Terms, min_hosts: int) -> str:
    """Describe what is missing before a view can be proposed; `others` are the founders besides `me`."""
    count = len(others) + 1
    if count < terms.smallest:
        return f"{count} of {terms.smallest} nodes so far"
    if len(clique(me, others, terms.largest)) < terms.smallest:
        heard = [peer.heard for peer in others]
        deaf = [
            f"{one.name} and {other.name}"
            for index, one in enumerate(others)
            for at, other in enumerate(others[index + 1 :], index + 1)
            if other.life not in heard[index] or one.life not in heard[at]
        ]
        return f"{terms.smallest} nodes that all hear each other; there is no link between {', '.join(deaf)}"
    if count_hosts(clique(me, others, terms.largest)) < min_hosts:
        return f"{count} nodes so far, all on this machine; waiting for another one (--min {count} begins without it)"
    return f"{count} nodes are here; agreeing on the group"


class JoinerLinks:
    """The nodes that one joiner has a link with: one life of each."""

    def __init__(self, me: FoundingMember) -> None:
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

    def is_linked(self, member: FoundingMember) -> bool:
        """Tell whether there is a link with this life of a node, or it is this node."""
        peer = self.peers.get(member.id)
        return member.id == self._me.id or (peer is not None and peer.life == member.life)

    def is_met(self, member: FoundingMember) -> bool:
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


class Announcer:
    """Says when to send `Here` to all peers, and what it contains."""

    def __init__(self, me: FoundingMember, terms: Terms, links: JoinerLinks, lineages: Lineages, now: float) -> None:
        self._me, self.terms, self._links, self._lineages = me, terms, links, lineages
        self.at = now
        """When to announce."""

    def soon(self, now: float) -> None:
        """Announce a change, with others that may come."""
        self.at = min(self.at, now + HERE_SOON * max(1.0, self._crowd()))

    def announced(self, now: float, *, is_formed: bool) -> None:
        """Note that all peers were sent a `Here`; a node in a run repeats it only after a change."""
        self.at = math.inf if is_formed else now + HERE_EVERY * max(1.0, self._crowd())

    def here(self, formed: Formed | None, *endings: Ending, is_locked: bool, to: bytes = b"") -> Here:
        """Return the announcement; it names the latest endings of lineages, and before them `endings`.

        With many peers, one that is meant for one life only (`to`) names the link with it, not all links.
        """
        hears = (to,) if to and self._crowd() > 1.0 else tuple(self._links.lives[: wire.MAX_LINKS])
        endings = (*endings, *self._lineages.latest_endings())[: wire.MAX_ENDINGS]
        if formed is not None:
            names = tuple(member.name for member in formed.view)
            return Here(self.terms, self._me, hears, Phase.FORMED, names, formed.lineage, formed.generation, endings)
        phase = Phase.LOCKED if is_locked else Phase.JOINING
        lineage = self._lineages.current
        names = self._lineages.names(lineage)
        return Here(self.terms, self._me, hears, phase, names, lineage or None, endings=endings)

    def pause(self) -> float:
        """Return how long to wait for more announcements before acting on one: not at all if there are few peers."""
        return HERE_SOON * self._crowd() if self._crowd() > 1.0 else 0.0

    def _crowd(self) -> float:
        return len(self._links.peers) / CROWD_OF_JOINERS
