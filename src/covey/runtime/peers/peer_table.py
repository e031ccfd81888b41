"""The other processes of a run by seat: where to dial them, and the messages that are sent to them and come from them.

Processes are known by their *seats*: numbers that are given once in a run. Seats of the first generation are its ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, Protocol

from covey.base.lane_kinds import LANE_KINDS
from covey.base.numbers import NO_RANK, Rank, Seat
from covey.runtime import loop as control
from covey.runtime.peers.remote_process import NOWHERE, RemoteProcess
from covey.wire import messages
from covey.wire.decoding import SkippedMessageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from covey.runtime.links.handshake import LinkCredentials, Where
    from covey.runtime.links.link import Link

FROM_EXCLUDED: Final = (
    messages.Agreeing, messages.Ping, messages.Pong, messages.Goodbye, messages.Offer, messages.Dial,
)  # fmt: skip
"""Messages that are taken from a process that a view has excluded. Its lanes are refused, and it is told so."""


class PeerTable(dict[Seat, RemoteProcess]):
    """The other processes of one run, by seat. Changed on the control loop, read on any thread."""

    def __init__(self, seat: Seat, peers: Mapping[Seat, RemoteProcess], host: str = "") -> None:
        """`seat` is that of this process, which is not in the table, and `host` its own."""
        super().__init__(peers)
        self.seat, self.host = seat, host
        self._ranks: Mapping[Seat, Rank] | None = None

    @property
    def next_seat(self) -> Seat:
        """The first seat that no process has had, as far as this node knows."""
        return Seat(1 + max((self.seat, *self)))

    def is_here(self, seat: Seat) -> bool:
        """Tell whether a process runs on this host."""
        return self[seat].is_on(self.host)

    @property
    def here(self) -> list[RemoteProcess]:
        """The other processes on this host."""
        return [peer for peer in self.values() if peer.is_on(self.host)]

    # Ranks

    def number(self, ranks: Mapping[Seat, Rank]) -> None:
        """Take the ranks of the current generation."""
        self._ranks = ranks

    def rank_of(self, seat: Seat) -> Rank:
        """Return the rank of a seat in the current generation; NO_RANK if the seat is not in it."""
        if self._ranks is None:
            return Rank(seat)  # as it will be in the first generation
        return self._ranks.get(seat, NO_RANK)

    def name_of(self, seat: Seat) -> str:
        """Return how messages name the process in a seat: by its rank in the current generation, if it has one."""
        rank = self.rank_of(seat)
        return f"rank {rank}" if rank >= 0 else f"seat {seat}"

    # Messages

    def tell(self, seats: Iterable[Seat], message: messages.Control, *, wakes: bool = True) -> None:
        """Send a control message to some seats, skipping those without a link. Returns at once; on any thread.

        Links that rest get it only if the message `wakes`.
        """
        control.soon(self._send_each, tuple(seats), message, wakes)

    def _send_each(self, seats: tuple[Seat, ...], message: messages.Control, wakes: bool) -> None:
        for seat in seats:
            self.send(seat, message, wakes=wakes)

    def send(self, seat: Seat, message: messages.Control, *, wakes: bool = True) -> None:
        """Send a control message to a seat; do nothing if it has no link. On the control loop.

        A link that rests gets it only if the message `wakes`.
        """
        self[seat].send(message, wakes=wakes)

    def send_vote(self, seat: Seat, message: messages.Control, *, wakes: bool = True) -> None:
        """Send a message about views; a later life of the peer's node may get it instead. On the control loop.

        A link that rests gets it only if the message `wakes`.
        """
        peer = self[seat]
        if peer.link is not None:
            peer.send(message, wakes=wakes)
        elif peer.voter is not None:
            peer.voter.send(message)


def ranks_of(size: int, own: int, contacts: Mapping[Seat, messages.Contact]) -> dict[Seat, RemoteProcess]:
    """Return the other ranks of a launcher's run that begins, by seat: of each pair, the higher one dials.

    `contacts` are those that are known; rank 0 tells the others.
    """
    blank = messages.Card(b"", b"", "", "", 0, NOWHERE)
    others = [Seat(rank) for rank in range(size) if rank != own]
    return {
        rank: RemoteProcess(
            messages.reached_at(blank, contacts.get(rank, NOWHERE)), "rank", seat=rank, is_dialled=rank < own
        )
        for rank in others
    }


class Inbox:
    """Gives each message of a member to the parts that take messages of its type. On the control loop."""

    def __init__(self, peers: PeerTable) -> None:
        self._peers = peers
        self._takers: defaultdict[type, list[Callable[[Seat, Any], None]]] = defaultdict(list)

    def give(self, kind: type, taker: Callable[[Seat, Any], None]) -> None:
        """Call `taker(seat, message)` for each message of this type from now on, after those that were named before."""
        self._takers[kind].append(taker)

    def heard(self, seat: Seat, message: messages.Control) -> None:
        """Take a message from a seat of the run; from one that a view has excluded, only what concerns views."""
        if self._peers[seat].is_excluded and not isinstance(message, FROM_EXCLUDED):
            return
        for taker in self._takers.get(type(message), ()):
            taker(seat, message)

    def heard_early(self, seat: Seat, message: messages.Control) -> None:
        """Take a message that a process sent before this node knew its seat."""
        with contextlib.suppress(SkippedMessageError):
            self.heard(seat, message)


class RelayWays(Protocol):
    """What is known of relays. On any thread."""

    def ways(self, token: bytes) -> list[Where]:
        """Return the ways through relays to the process that has a token."""

    def round_trip(self, way: Where) -> float | None:
        """Return the round trip of a way through a relay, if it is known without a probe."""


class MemberLinks(RelayWays, Protocol):
    """How the links with the members of a run come about, and come back: a mesh, as the run sees it.

    On the control loop.
    """

    @property
    def can_rest(self) -> bool:
        """Whether members may agree that the link between two of them rests."""

    def link_ended(self, peer: RemoteProcess) -> None:
        """Link again with a process whose link has ended, if this end dials."""

    def unheard(self, peer: RemoteProcess) -> None:
        """Dial a process that is not heard on its link by other ways: perhaps only the path of that link is dead."""

    def part(self, peer: RemoteProcess, link: Link) -> None:
        """End the links with a process that is given up; `link` is the one in use."""

    def find(self, card: messages.Card) -> RemoteProcess | None:
        """Return a process that a generation has a seat for, if there is a link with it."""

    def founded(self, founded: messages.Founded) -> None:
        """Take the generation that this process is in from now on."""

    def run_ended(self, lineage: bytes, *, is_finished: bool) -> None:
        """Take that the members have decided that the run is over, and whether its work is done."""


class Routes:
    """Where this process can dial others of its run, for links and lanes, and with which credentials. On any thread."""

    def __init__(self, card: messages.Card, interfaces: str, credentials: LinkCredentials, links: RelayWays) -> None:
        """`card` is that of this process, `interfaces` the setting, and `links` knows the relays."""
        self._contact, self.interfaces, self.credentials = card.contact, interfaces, credentials
        self._is_clear, self._links = credentials.tls is None, links

    def to(self, peer: RemoteProcess, kind: str = "") -> list[Where]:
        """Return where to dial `peer`, best first: a unix socket on one host, unless the lane has to be TCP.

        Else addresses, and then relays.
        """
        contact, own = peer.contact, self._contact
        assert contact is not None
        is_same_host = contact.host == own.host
        by_socket = not LANE_KINDS[kind].is_of_network if kind else self._is_clear
        if by_socket and is_same_host and contact.socket and (self._is_clear or self._is_nodes_socket(contact.socket)):
            return [contact.socket]
        from covey.net.discovery.interfaces import recent_interfaces, to_dial  # of no use to ranks that share memory

        ways: list[Where] = [peer.way] if peer.way is not None else []
        interfaces = recent_interfaces(self.interfaces)
        relayed = [] if is_same_host else self._links.ways(contact.relay)
        found = (*to_dial(interfaces, contact.addresses, is_same_host), *relayed)
        return ways + [way for way in found if way not in ways]

    def round_trip(self, way: Where) -> float | None:
        """Return the round trip of a way through a relay, if it is known without a probe."""
        return self._links.round_trip(way)

    def _is_nodes_socket(self, path: str) -> bool:
        """Tell whether a path that another node names is where all nodes of this user on this host listen."""
        from covey.net.discovery.host_registry import is_nodes_socket  # of no use to ranks that a token holds together

        return is_nodes_socket(path, os.path.dirname(self._contact.socket))
