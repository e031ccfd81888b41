"""What follows when a peer is silent, its link ends, it says that it leaves, or a view excludes it.

On the control loop. Health (`HealthMonitor`) has an opinion, a link ends, a keeper reports an exit: each moves the
state of the peer, and is passed on to the views of its generations. Under `on_loss="raise"` the groups are told at
once, otherwise once a view goes on without the peer.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import TYPE_CHECKING, Final

from covey.proto.health import Cause, ProcessState
from covey.runtime.peers.remote_process import PeerEvent
from covey.runtime.views.health_monitor import HealthMonitor
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Iterable

    from covey.base.config import GroupConfig
    from covey.base.numbers import Seat
    from covey.runtime.events import Events
    from covey.runtime.links.link import Link
    from covey.runtime.peers.peer_table import MemberLinks, PeerTable
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.state.audit import Auditor
    from covey.runtime.tasks import Tasks
    from covey.runtime.views.generation import ViewListener
    from covey.runtime.views.generation_table import GenerationTable
    from covey.runtime.views.health_monitor import ClockOffsets

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

    def __init__(
        self,
        generations: GenerationTable,
        peers: PeerTable,
        links: MemberLinks,
        listener: ViewListener,
        *,
        config: GroupConfig,
        host: str,
        clocks: ClockOffsets,
        tasks: Tasks,
        events: Events,
        audit: Auditor,
    ) -> None:
        """Begin without an opinion; `start` lets health have one."""
        self._generations, self._peers, self._links, self._listener = generations, peers, links, listener
        self._config, self._host, self._clocks = config, host, clocks
        self._tasks, self._events, self._audit = tasks, events, audit
        self._monitor: HealthMonitor | None = None

    # Health

    def start(self) -> None:
        """Begin to judge peers."""
        self._monitor = HealthMonitor(
            self._peers,
            self._host,
            self._config,
            self,
            tell_of_peer=self._generations.tell_of_peer,
            clocks=self._clocks,
            tasks=self._tasks,
        )

    def run(self) -> None:
        """Ask quiet peers and act on opinions, until the node closes."""
        assert self._monitor is not None
        self._tasks.spawn(self._monitor.keep())

    def watch(self, seats: Iterable[Seat]) -> None:
        """Judge the members of a new generation."""
        if self._monitor is not None:
            for seat in seats:
                if seat != self._peers.seat:
                    self._monitor.watch(self._peers[seat])

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
        peers = self._peers.values()
        own = {peer.life: peer for peer in peers if peer.card.keeper == keeper and not peer.is_denied}
        for life, value in processes:
            if life in own and self._monitor is not None:
                self._monitor.vouched(own[life], value)
                if value == ProcessState.BUSY:
                    self._generations.vouched(own[life].seat)

    def is_unheard(self, seat: Seat) -> bool:
        """Tell whether a peer is not heard on its link."""
        return self._monitor is not None and self._monitor.is_unheard(seat)

    def unheard(self, seat: Seat) -> None:
        """Link with a peer anew that is not heard on its link."""
        self._links.unheard(self._peers[seat])

    def trusted(self, seat: Seat) -> None:
        """Note that a peer that was to be given up is heard again."""
        self._peers[seat].reason = ""
        self._generations.judged(seat, is_dead=False)

    def silent(self, seat: Seat, reason: str, cause: Cause) -> None:
        """Act on the opinion of health that a peer should be given up."""
        peer, ends_group = self._peers[seat], self._config.on_loss == "raise"
        peer.reason = reason
        self._events.phase("detect")
        if peer.link is not None:
            peer.link.catch_up()
        self._generations.judged(seat, is_dead=True)
        if ends_group and not peer.has_left:
            logger.warning("%s is given up: %s", self._peers.name_of(seat), reason)
        if cause is Cause.EXITED and peer.link is not None:
            # The kernel ends the link of a process that has exited; its last messages may still be on the way.
            asyncio.get_running_loop().call_later(LAST_MESSAGES_SECONDS, self._end_link, peer, peer.link)
        elif peer.link is None:
            if ends_group and not peer.is_gone:
                self._give_up(peer)
        elif ends_group or cause is Cause.HOST_SILENT:
            # TCP retransmits less and less often; a new link is up soon after the network is.
            self._end_link(peer, peer.link)

    def _end_link(self, peer: RemoteProcess, link: Link) -> None:
        """End a link on which nothing more is expected, unless another has replaced it."""
        if peer.link is link and not self._tasks.is_closing:
            self._links.part(peer, link)

    def deny(self, seat: Seat, reason: str) -> None:
        """Give up a process whose node may not be in the cluster any more, whatever its keeper says of it."""
        peer = self._peers[seat]
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
        peer = self._peers[seat]
        peer.unlink()
        ended = peer.ended_link
        may_be_path = ended is not None and tells_of_its_path(ended, self._config.on_loss)
        if self._tasks.is_closing:
            return
        if peer.is_ready:  # else it never saw the run formed, and may come again
            self._events.phase("detect")
            self._listener.link_lost(seat)
            if self._monitor is not None:
                self._monitor.link_lost(seat)
            if may_be_path and not peer.has_left and not peer.reason:
                asyncio.get_running_loop().call_later(UNLINKED_SECONDS, self._remains_unlinked, peer)
            else:
                self._unlinked(peer)
        self._links.link_ended(peer)

    def _remains_unlinked(self, peer: RemoteProcess) -> None:
        """Take a peer for unlinked whose link ended a while ago, because of its path, unless it has another one."""
        if peer.link is None and not peer.is_gone and not self._tasks.is_closing:
            self._unlinked(peer)

    def _unlinked(self, peer: RemoteProcess) -> None:
        """Tell the views that there is no link with a peer; without views, take it for lost."""
        self._generations.link_down(peer.seat)
        if self._config.on_loss == "raise" or self._generations.current is None:
            self._give_up(peer)

    # Views

    def exclude(self, seat: Seat) -> None:
        """Go on without a peer, as a view says. The process may live; what it says about operations is ignored."""
        peer = self._peers[seat]
        is_news = not peer.is_gone
        peer.note(PeerEvent.EXCLUDED)
        if self._monitor is not None:
            self._monitor.forget(seat)
        if peer.link is not None:
            peer.link.catch_up()  # it may have said goodbye, and then it is not lost
            if peer.has_left and peer.link.is_resting:  # no connection is there to end by itself
                asyncio.get_running_loop().call_soon(peer.link.give_up)
        self._tell_gone(peer, is_news=is_news)
        self._listener.excluded(seat)

    def _give_up(self, peer: RemoteProcess) -> None:
        if peer.link is not None:
            peer.link.catch_up()  # as above
        is_news = not peer.is_gone
        peer.note(PeerEvent.GIVEN_UP)
        self._tell_gone(peer, is_news=is_news)

    def _tell_gone(self, peer: RemoteProcess, *, is_news: bool) -> None:
        generation = self._generations.current
        if is_news and generation is not None:
            reason = f"its program failed with {peer.failure}" if peer.failure else peer.reason
            kind = "left" if peer.has_left else "lost"
            card = messages.as_member(peer.card)
            self._audit.note(kind, card, reason=reason, generation=generation.number, once=True)
        self._listener.gone(peer)


class DeparturesTold:
    """What members say as they leave, passed on by the leader of the view.

    A member says goodbye on the links that are awake. In a run of many nodes, most of its links rest; the leader, whose
    links do not, tells the others before the view comes that goes on without the member. It decides nothing: it only
    makes the others call the member one that left, or name the error of its program.
    """

    def __init__(self, generations: GenerationTable, peers: PeerTable, tasks: Tasks) -> None:
        self._generations, self._peers, self._tasks = generations, peers, tasks
        self._untold: set[Seat] = set()

    def said_goodbye(self, seat: Seat) -> None:
        """Take from a member that it leaves."""
        self._peers[seat].note(PeerEvent.SAID_GOODBYE)
        self._heard(seat)

    def failing(self, seat: Seat, reason: str) -> None:
        """Take from a member with which error its program ends."""
        self._peers[seat].failure = reason
        self._heard(seat)

    def _heard(self, seat: Seat) -> None:
        """Tell the others soon, together with those that follow, if this node leads."""
        generation = self._generations.current
        if generation is None or not generation.is_sparse or generation.view_driver.leader() != generation.rank:
            return
        if not self._untold:
            asyncio.get_running_loop().call_soon(self._tell)
        self._untold.add(seat)

    def _tell(self) -> None:
        seats, self._untold = sorted(self._untold), set()
        generation = self._generations.current
        if generation is None or self._tasks.is_closing:
            return
        peers = [self._peers[seat] for seat in seats]
        members = tuple(messages.Departure(peer.seat, peer.has_left, peer.failure) for peer in peers)
        for rank in generation.view.ranks:
            seat = generation.seats[rank]
            if seat != self._peers.seat and seat not in seats:
                self._peers.send(seat, messages.Departures(members))

    def told(self, members: Iterable[messages.Departure]) -> None:
        """Take what the leader passes on."""
        for said in members:
            peer = self._peers.get(said.seat)
            if peer is not None and not peer.is_excluded:
                peer.failure = peer.failure or said.reason
                if said.has_left:
                    peer.note(PeerEvent.SAID_GOODBYE)
