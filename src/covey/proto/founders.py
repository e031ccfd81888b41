"""The nodes that could found a run: what each joiner has announced, and which of them could be in one view."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from covey.wire.formation import Here, Member, Phase, Terms

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


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


def rank_order(members: Iterable[Member]) -> tuple[Member, ...]:
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


def clique(me: Member, others: list[RemoteJoiner], most: int, *, least: int = 1) -> list[Member]:
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


def count_hosts(members: Iterable[Member]) -> int:
    """Return how many machines these members are on."""
    return len({member.host for member in members})


def wanting(me: Member, others: list[RemoteJoiner], terms: Terms, min_hosts: int) -> str:
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
