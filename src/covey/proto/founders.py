"""Who of a run is here: what candidates have said of themselves, and which of them could be in one view."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covey.wire.formation import Here, Member, Phase, Terms

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Peer:
    """A node there is a link with."""

    def __init__(self, id: bytes, life: bytes) -> None:
        self.id, self.life = id, life
        self.here: Here | None = None
        """The last it said of itself."""
        self.objection = ""
        """How its terms differ from ours."""

    @property
    def name(self) -> str:
        """What people call it."""
        return self.id.hex()[:8] if self.here is None else self.here.member.name

    def hears(self, life: bytes) -> bool:
        """Tell whether it has a link with this life, by its own word."""
        return self.here is not None and life in self.here.hears

    def is_in(self, phase: Phase) -> bool:
        """Tell whether it is of our run and at this point."""
        return self.here is not None and not self.objection and self.here.phase is phase


def rank_order(members: Iterable[Member]) -> tuple[Member, ...]:
    """Order members as ranks: those of one host adjacent, hosts and the members in them by smallest id."""
    ordered = sorted(members, key=lambda member: member.id)
    first: dict[str, bytes] = {}
    for member in ordered:
        first.setdefault(member.host, member.id)
    return tuple(sorted(ordered, key=lambda member: (first[member.host], member.id)))


def founders(peers: Mapping[bytes, Peer], life: bytes) -> list[Peer]:
    """Return the peers that could found a run with the node of this life, by id: they know of none that goes on."""
    return [peer for peer in _gathering(peers, life) if peer.here is not None and peer.here.lineage is None]


def newcomers(peers: Mapping[bytes, Peer], life: bytes, lineage: bytes) -> list[Peer]:
    """Return the peers that wait to be taken into the run of this lineage by the node of this life, by id."""
    return [peer for peer in _gathering(peers, life) if peer.here is not None and peer.here.lineage == lineage]


def _gathering(peers: Mapping[bytes, Peer], life: bytes) -> list[Peer]:
    found = (peer for peer in peers.values() if peer.is_in(Phase.GATHERING) and peer.hears(life))
    return sorted(found, key=lambda peer: peer.id)


def going_on(peers: Mapping[bytes, Peer], lineage: bytes) -> Here | None:
    """Return what a member says that is in a view of this lineage already; its terms may be others than ours."""
    formed = [
        peer
        for peer in peers.values()
        if peer.here is not None and peer.here.phase is Phase.FORMED and peer.here.lineage == lineage
    ]
    return min(formed, key=lambda peer: peer.id).here if formed and lineage else None


def clique(me: Member, others: list[Peer], most: int) -> list[Member]:
    """Return `me` and those of `others` that all hear each other, `most` in all; other hosts before our own."""
    kept: list[Peer] = []
    for peer in sorted(others, key=lambda peer: (peer.here is not None and peer.here.member.host == me.host, peer.id)):
        if len(kept) + 1 == most:
            break
        if all(hear_each_other(peer, other) for other in kept):
            kept.append(peer)
    return [me, *(peer.here.member for peer in kept if peer.here is not None)]


def hear_each_other(one: Peer, other: Peer) -> bool:
    """Tell whether two peers have a link, by the word of both."""
    return one.hears(other.life) and other.hears(one.life)


def count_hosts(members: Iterable[Member]) -> int:
    """Return on how many machines these members are."""
    return len({member.host for member in members})


def wanting(me: Member, others: list[Peer], terms: Terms, min_hosts: int) -> str:
    """Say what is missing before a view can be proposed; others are the founders beside `me`."""
    count = len(others) + 1
    if count < terms.smallest:
        return f"{count} of {terms.smallest} nodes so far"
    if len(clique(me, others, terms.largest)) < terms.smallest:
        pairs = ((one, other) for index, one in enumerate(others) for other in others[index + 1 :])
        deaf = [f"{one.name} and {other.name}" for one, other in pairs if not hear_each_other(one, other)]
        return f"{terms.smallest} nodes that all hear each other; there is no link between {', '.join(deaf)}"
    if count_hosts(clique(me, others, terms.largest)) < min_hosts:
        return f"{count} nodes so far, all on this machine; waiting for another one (--min {count} begins without it)"
    return f"{count} nodes are here; forming the group"
