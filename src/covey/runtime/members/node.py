"""One process in a run: who the others are, a link to each, and which groups there are.

Processes are known by their *seats*: numbers that nobody else gets as long as the run lasts. Those of the first
generation are its ranks. Everything that touches a link happens on the control loop; other threads ask for it by `soon`
or wait for a future. A launcher's ranks open the links themselves: the higher rank of a pair dials. In a cluster they
come from the gathering in which the run was agreed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from covey.base.errors import ConnectError, CoveyError
from covey.base.text import printable
from covey.proto.health import Cause, Vouch
from covey.runtime import loop as control
from covey.runtime.events import Events
from covey.runtime.fault import Fault
from covey.runtime.members.audit import SILENT, Auditor
from covey.runtime.members.generation_table import GenerationTable
from covey.runtime.members.health_monitor import HealthMonitor
from covey.runtime.members.lanes import LaneKey, Lanes, lane_key
from covey.runtime.members.launcher_mesh import LauncherMesh
from covey.runtime.members.peers import Lobby, Peer
from covey.runtime.members.store import Stores
from covey.runtime.tasks import Tasks
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from covey.base.config import GroupConfig
    from covey.runtime.links.acceptor import Acceptor
    from covey.runtime.links.handshake import LinkCredentials, Where
    from covey.runtime.links.link import Link
    from covey.runtime.members.generation import Generation
    from covey.runtime.members.peers import Newcomer
    from covey.wire.membership import Bound, Record

logger = logging.getLogger("covey")

CLOSE_SECONDS: Final = 1.0
"""How long goodbyes may take."""
LAST_WORDS_SECONDS: Final = 0.5
"""How long the link of a process that has exited may take to end by itself: a child of it may hold it open."""
LAST_WORDS_KEPT: Final = 1000
GroupTalk: TypeAlias = "messages.Announce | messages.Position | messages.Revoke | messages.Calls"
OF_THE_EXCLUDED: Final = (
    messages.Agreeing, messages.Ping, messages.Pong, messages.Goodbye, messages.Offer, messages.Dial,
)  # fmt: skip
"""What a process may say to the members that go on without it. Lanes are refused to it, and it is told so."""


class Member(Protocol):
    """A group, as its node sees it. Called on the control loop; `peer` is a rank of the run."""

    def heard(self, peer: int, message: GroupTalk) -> None: ...

    def peer_gone(self, peer: int, *, left: bool) -> None: ...

    def end(self, fault: Fault) -> None: ...

    def fail(self, fault: Fault) -> None: ...

    @property
    def generation(self) -> Generation | None: ...

    @property
    def survives(self) -> bool: ...

    @property
    def members(self) -> Collection[int]: ...

    def lane_arrived(self, peer: int, purpose: str, lane: Any) -> bool: ...

    def forked(self) -> None: ...

    def close(self) -> None: ...


class Companion(Protocol):
    """Something that ends with the node."""

    async def close(self) -> None: ...


class Node:
    """This process's place in a run of `size` ranks."""

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        run: str,
        credentials: LinkCredentials,
        card: messages.Card,
        config: GroupConfig,
        acceptor: Acceptor,
        contacts: Mapping[int, messages.Contact],
        objection: Callable[[messages.Card], str] = lambda _card: "",
        keeper: str = "",
        floor: int = 1,
        store: Callable[[Bound], None] | None = None,
        companions: Sequence[Companion] = (),
        audit: Auditor = SILENT,
        on_close: Callable[[], None] = lambda: None,
        seats: Sequence[int] | None = None,
        links_come: bool = False,
    ) -> None:
        """`contacts` of ranks that are missing come from rank 0's roster. `entrance` and `companions` end with us.

        `keeper` is the path at which the keeper of all ranks listens. No view has fewer than `floor` members. `store`
        makes what this node has promised durable. `seats` are those of the generation that this node enters, if that is
        not the first. `links_come`: somebody else finds the others, and hands the links over.
        """
        self.rank, self.size, self.run, self.config = rank, size, run, config
        self.credentials, self.card = credentials, card
        self.objection = objection
        """Tells why a node may not be in the cluster, or nothing."""
        self.host = card.contact.host
        self._socket_folder = os.path.dirname(card.contact.socket)
        self.acceptor, self.audit = acceptor, audit
        self._companions = (acceptor, *companions)
        self._on_close = on_close
        self.peers = {
            peer: Peer(peer, contacts.get(peer), is_dialled=peer < rank)
            for peer in (range(size) if seats is None else seats)
            if peer != rank
        }
        self._last_words: dict[tuple[int, int], messages.Calls] = {}
        """Of groups that do not exist here yet: what ranks called that have closed them already."""
        self._groups: weakref.WeakValueDictionary[int, Member] = weakref.WeakValueDictionary()
        self.lanes = Lanes(self)
        self.stores = Stores(self)
        self._lock = threading.Lock()
        self._tasks = Tasks(f"run {run}")
        self._health_monitor: HealthMonitor | None = None
        self.events = Events()
        self.generation_table = GenerationTable(self, keeper_path=keeper, floor=floor, store=store)
        self.lobby = Lobby()
        self.is_elastic = False
        """Whether the program goes from generation to generation."""
        self.is_draining = False
        """Whether this process wants to leave at the next step."""
        self.wanted_size = 1
        """A generation that has fewer members waits for more."""
        self.most_size = messages.MAX_MEMBERS
        self.on_silent: Callable[[int], None] | None = None
        """Who ends all links with a rank that is given up, where that is not the node."""
        self.on_unheard: Callable[[int], None] | None = None
        """Who looks for another way to a process that is not heard on its link, where that is not the node."""
        self.on_founded: Callable[[messages.Founded], None] | None = None
        """Who else has to know of another generation."""
        self.on_ended: Callable[[bytes, bool], None] | None = None
        """Who else has to know that the run is over: its lineage, and whether its work is done."""
        self.find_newcomer: Callable[[messages.Card], Newcomer | None] | None = None
        """Finds the link with a process that a generation has a seat for, where that is not in the lobby."""
        self.rival = ""
        """What is known of an older run of the same name, if this one has to end because of it."""
        self.is_closing = False
        self._is_closed = threading.Event()
        self.forming = None if links_come else LauncherMesh(self)
        acceptor.on_lane = self.lanes.claim
        _nodes.add(self)

    # Links

    def form(self, timeout: float) -> None:
        """Return once every rank is linked with every other and knows it; see `LauncherMesh.form`."""
        assert self.forming is not None
        self.forming.form(timeout)

    def linked(self, peer: Peer, link: Link, card: messages.Card) -> None:
        """There is a link with another process."""
        before, peer.link = peer.link, link
        if before is not None:
            before.abort()  # its other end has given it up
        peer.introduce(card)
        self.acceptor.member_ips.add(link.remote_ip)
        link.attach(functools.partial(self.heard_frame, peer), functools.partial(self._lost, peer, link))
        if peer.ready:
            self.relinked(peer)
        if self.forming is not None:
            self.forming.settle()

    def relinked(self, peer: Peer) -> None:
        """There is a new link with a process whose last one had ended."""
        if not peer.excluded:
            peer.gone = False
        if self._health_monitor is not None:
            self._health_monitor.link_up(peer)
        self.lanes.link_up(peer.rank)
        self.stores.link_up(peer.rank)
        self.generation_table.link_up(peer.rank, peer.life)

    def exchanged(self, seat: int) -> None:
        """Another link with a process is in use: what was said on the last one may be lost."""
        self.lanes.link_lost(seat)
        self.stores.link_down(seat)
        self.relinked(self.peers[seat])

    def voter_up(self, seat: int, life: bytes, vote: Callable[[messages.Control], None]) -> None:
        """A node was started anew: it is no member any more, but it votes."""
        self.peers[seat].vote = vote
        self.generation_table.tell_of_seat(seat, vote)
        self.generation_table.link_up(seat, life)

    def voter_down(self, seat: int) -> None:
        """A node that was started anew is gone again."""
        peer = self.peers[seat]
        peer.vote = None
        if peer.link is None:
            self.generation_table.link_down(seat)

    def heard_frame(self, peer: Peer, body: bytes) -> None:
        """Take what came over the link with a process."""
        self.noticed(peer.rank)
        self.heard(peer.rank, messages.decode_control(body))

    # Groups

    def register(self, group_id: int, group: Member) -> None:
        """Let `group` hear what is said about it from now on."""
        with self._lock:
            self._groups[group_id] = group
            words = [(key[1], self._last_words.pop(key)) for key in list(self._last_words) if key[0] == group_id]
        for peer, calls in words:
            control.soon(group.heard, peer, calls)

    def groups(self) -> list[Member]:
        """Return the groups that are open."""
        with self._lock:
            return list(self._groups.values())

    def forget(self, group_id: int, sequence: int) -> None:
        """Close what is left of a group, of which `sequence` was the last operation; refuse new lanes for it."""
        with self._lock:
            self._groups.pop(group_id, None)
        self.lanes.forget(group_id, sequence)

    def lane_arrived(self, key: LaneKey, lane: Any) -> bool:
        """Tell the group, if it exists already, that a lane is open; return whether it uses that from now on."""
        group = self._groups.get(key.group)
        return group is not None and group.lane_arrived(key.peer, key.purpose, lane)

    def is_member(self, group_id: int, seat: int) -> bool:
        """Tell whether a process is in a group; of groups that do not exist here yet that is not known."""
        group = self._groups.get(group_id)
        return group is None or seat in group.members

    def tell(self, peers: Iterable[int], message: messages.Control) -> None:
        """Send a control message to some ranks of the run. Returns at once; the dead are skipped."""
        control.soon(self._send_each, tuple(peers), message)

    def _send_each(self, peers: tuple[int, ...], message: messages.Control) -> None:
        for peer in peers:
            self.send(peer, message)

    def send(self, peer: int, message: messages.Control) -> None:
        """Send a control message to a rank of the run; nothing happens if it is gone. On the control loop."""
        link = self.peers[peer].link
        if link is not None:
            link.send(messages.encode(message))

    def fail(self, reason: str) -> None:
        """Tell all others with which error this process's program ends. Returns at once."""
        self.tell(tuple(self.peers), messages.Failing(reason))

    def send_vote(self, seat: int, message: messages.Control) -> None:
        """Send what concerns views; a later life of a node that was started anew may answer it. On the control loop."""
        peer = self.peers[seat]
        if peer.link is not None:
            peer.link.send(messages.encode(message))
        elif peer.vote is not None:
            peer.vote(message)

    # Generations, on the control loop

    @property
    def generation(self) -> Generation | None:
        """The last that this node was in."""
        return self.generation_table.current

    @property
    def hears_quorum(self) -> bool:
        """Whether this node is in a generation, and hears a quorum of it."""
        generation = self.generation
        return generation is not None and not generation.is_over and generation.view_driver.hears_quorum

    def begin(self, lineage: bytes = b"", tie_breaker: int = 0) -> None:
        """The run is formed: watch over the others, and found its first generation."""
        self._health_monitor = HealthMonitor(self, self._silent, self._trusted, self._unheard)
        if self.size <= messages.MAX_MEMBERS:
            self.generation_table.found_first(lineage, tie_breaker)
        self.spawn(self._health_monitor.keep())

    def seat_member(self, member: messages.SeatedMember, link: Link | None, *, is_dialled: bool) -> None:
        """Take a member of the generation that this node is about to enter, and the link with it, if there is one."""
        peer = self.peers[member.seat]
        peer.introduce(member.card)
        peer.is_dialled, peer.ready = is_dialled, True
        if link is not None and link.is_open:
            self.linked(peer, link, member.card)
        elif is_dialled and self.forming is not None:
            self.spawn(self.forming.redial(peer))

    def enter(self, founded: messages.Founded, record: Record | None = None) -> None:
        """Take this node's seat in a generation of a run that goes on; `record` is what it has promised there."""
        if self.forming is not None:
            self.acceptor.on_link = self.forming.greet
        self.generation_table.meet_keeper()
        self._health_monitor = HealthMonitor(self, self._silent, self._trusted, self._unheard)
        self.generation_table.found(founded, record)
        self.spawn(self._health_monitor.keep())

    def watch_over(self, seats: Iterable[int]) -> None:
        """These are the members now."""
        if self._health_monitor is not None:
            for seat in seats:
                if seat != self.rank:
                    self._health_monitor.watch(self.peers[seat])

    @property
    def next_seat(self) -> int:
        """The first number that nobody has had, as far as this node knows."""
        return 1 + max((self.rank, *self.peers))

    @property
    def knows_change(self) -> bool:
        """Whether the next generation should come soon: somebody waits to get in or out, or too few are left."""
        generation = self.generation
        if not self.is_elastic or generation is None:
            return False
        live = len(generation.view.ranks)
        is_awaited = live < self.most_size and self.lobby.is_awaited
        return self.is_draining or bool(self.rival) or live < self.wanted_size or is_awaited

    def outlived(self, rival: str) -> None:
        """Another run of the same name is older: this one stops growing, and ends where its program can save its state.

        A program that goes from generation to generation does so after the step. With `quorum="any"` people have
        accepted that there are several.
        """
        text = f"{rival}; this one is younger"
        if self.config.quorum == "any":
            logger.warning("%s: %s, and goes on beside it (quorum='any')", self.run, text)
            return
        logger.error("%s: %s, and ends", self.run, text)
        self.rival = text
        if not self.is_elastic:
            for group in self.groups():
                group.fail(Fault("SplitRunError", f"{text}, so it ends here; start again to be in the older one"))

    def left_behind(self, origin: bytes, number: int) -> None:
        """A member of this node's generation is in a later one, which has no seat for this node."""
        generation = self.generation
        if generation is not None and generation.founded.origin == origin and number > generation.number:
            generation.left_behind(number)

    def ended(self) -> None:
        """The run is over, as other nodes say."""
        if self.generation is not None and not self.generation.is_over:
            self.generation.over()

    # Losses

    def vouched(self, keeper: bytes, processes: Iterable[tuple[bytes, int]]) -> None:
        """The keeper with this id says how some processes are: it is believed about those that named it."""
        own = {peer.life: peer for peer in self.peers.values() if peer.keeper == keeper and not peer.is_denied}
        for life, value in processes:
            if life in own and self._health_monitor is not None:
                self._health_monitor.vouched(own[life], value)
                if value == Vouch.BUSY:
                    self.generation_table.vouched(own[life].rank)

    def noticed(self, rank: int) -> None:
        """A rank of the run said something."""
        if self._health_monitor is not None:
            self._health_monitor.heard(rank)

    def _unheard(self, seat: int) -> None:
        """A process is not heard on its link: link with it anew, in case only the path of that link is dead."""
        peer = self.peers[seat]
        if self.on_unheard is not None:
            self.on_unheard(seat)
        elif self.forming is not None and peer.link is not None and peer.is_dialled:
            self.spawn(self.forming.dial_anew(peer, peer.link))

    def is_unheard(self, seat: int) -> bool:
        """Tell whether a process is not heard on its link."""
        return self._health_monitor is not None and self._health_monitor.is_unheard(seat)

    def is_suspected(self, seat: int) -> bool:
        """Tell whether a process seems to be gone; the members have not agreed on that yet."""
        return self._health_monitor is not None and self._health_monitor.is_suspected(seat)

    def _silent(self, seat: int, reason: str, cause: Cause) -> None:
        peer = self.peers[seat]
        peer.reason = reason
        self.events.phase("detect")
        if peer.link is not None:
            peer.link.catch_up()
        self.generation_table.judged(seat, is_dead=True)
        if self.config.on_loss == "raise" and not peer.left:
            logger.warning("rank %d is given up: %s", seat, reason)
        if cause is Cause.EXITED and peer.link is not None:
            # The kernel ends the link of a process that has exited, and what it said last may still be on the way.
            asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self._hang_up, peer, peer.link)
        elif peer.link is None:
            if self.config.on_loss == "raise" and not peer.gone:
                self._give_up(peer)
        elif self.config.on_loss == "raise" or cause is Cause.HOST_SILENT:
            # TCP repeats itself less and less often; a new link is there soon after the network is.
            self._hang_up(peer, peer.link)

    def _hang_up(self, peer: Peer, link: Link) -> None:
        """End a link on which nothing more is to be expected."""
        if peer.link is not link or self.is_closing:
            return
        if self.on_silent is not None:
            self.on_silent(peer.rank)
        else:
            link.abort()

    def deny(self, seat: int, reason: str) -> None:
        """Give up a process whose node may not be in the cluster any more, whatever its keeper says of it."""
        peer = self.peers[seat]
        if not peer.is_denied:
            peer.is_denied = True
            self._silent(seat, reason, Cause.HOST_SILENT)
            if self._health_monitor is not None:
                self._health_monitor.forget(seat)

    def _trusted(self, seat: int) -> None:
        self.peers[seat].reason = ""
        self.generation_table.judged(seat, is_dead=False)

    def exclude(self, seat: int) -> None:
        """The members go on without a process: it may live, but what it says about their work is not heard."""
        peer = self.peers[seat]
        peer.excluded = True
        if self._health_monitor is not None:
            self._health_monitor.forget(seat)
        self._give_up(peer)
        self.lanes.part_with(seat)

    def expelled(self, generation: Generation, fault: Fault, *, only_pacts: bool) -> None:
        """This node is in a generation no more: what needs its views ends, or everything of it."""
        for group in self.groups():
            if group.generation is generation and (group.survives or not only_pacts):
                group.end(fault)

    def _give_up(self, peer: Peer) -> None:
        if peer.link is not None:
            peer.link.catch_up()  # it may have left in good order, which is no loss
        if not peer.gone and self.generation is not None:
            number = self.generation.number
            reason = f"its program failed with {peer.failure}" if peer.failure else peer.reason
            self.audit.note("left" if peer.left else "lost", peer.card(), reason=reason, generation=number, once=True)
        peer.gone = True
        self.lanes.abandon(lambda key: key.peer == peer.rank, ConnectError(f"rank {peer.rank} is gone"))
        self.stores.peer_gone(peer.rank)
        for group in self.groups():
            group.peer_gone(peer.rank, left=peer.left)

    def heard(self, rank: int, message: messages.Control) -> None:
        """Take a message from a rank of the run; from one that a view has excluded, only what concerns views."""
        peer = self.peers[rank]
        if peer.excluded and not isinstance(message, OF_THE_EXCLUDED):
            return
        match message:
            case messages.Ready():
                peer.ready = True
                if self.forming is not None:
                    self.forming.settle()
            case messages.Roster(contacts):
                if peer.rank != 0 or len(contacts) != self.size:
                    return
                for other in self.peers.values():
                    if other.contact is None:
                        other.contact = contacts[other.rank]
                        if other.is_dialled and self.forming is not None:
                            self.spawn(self.forming.dial(other))
            case messages.Goodbye():
                peer.left = True
            case messages.Failing(reason):
                peer.failure = reason
            case messages.Agreeing():
                self.generation_table.agreeing(rank, message)
            case messages.Ping(number):
                self.send(rank, messages.Pong(number, time.time()))
            case messages.Pong(number, _):
                if self._health_monitor is not None:
                    self._health_monitor.answered(rank, number)
            case messages.Dial():
                self.lanes.asked(rank, message)
            case messages.Offer():
                self.lanes.offered(rank, message)
            case messages.Expect(lane):
                self.lanes.expected(rank, lane)
            case messages.NoLane(group, purpose, reason, attempt):
                self.lanes.refused(lane_key(group, rank, purpose, attempt), reason)
            case messages.Posting():
                self.stores.heard(rank, message)
            case messages.Announce() | messages.Position() | messages.Revoke() | messages.Calls():
                member = self._groups.get(message.group)
                if member is not None:
                    member.heard(rank, message)
                elif isinstance(message, messages.Calls):
                    with self._lock:
                        self._last_words[message.group, rank] = message
                        while len(self._last_words) > LAST_WORDS_KEPT:
                            del self._last_words[next(iter(self._last_words))]
                elif isinstance(message, messages.Announce) and self.lanes.ended(message.group, message.sequence):
                    text = f"rank {self.rank} of the run has closed the group"
                    self.send(rank, messages.Revoke(message.group, "PeerLostError", text, ()))

    def _lost(self, peer: Peer, link: Link) -> None:
        if isinstance(link.error, CoveyError):
            logger.warning("rank %d sent nonsense and is cut off: %s", peer.rank, printable(str(link.error)))
        if peer.link is link:
            self.lost(peer.rank)

    def lost(self, rank: int) -> None:
        """The link to a rank of the run has ended."""
        peer = self.peers[rank]
        peer.link = None
        if self.is_closing:
            return
        if not peer.ready:  # it never saw the run formed, so it may come again
            if peer.is_dialled and self.forming is not None:
                self.spawn(self.forming.dial(peer))
            return
        self.events.phase("detect")
        self.lanes.link_lost(rank)
        self.stores.link_down(rank)
        if self._health_monitor is not None:
            self._health_monitor.link_lost(rank)
        self.generation_table.link_down(rank)
        if self.config.on_loss == "raise" or self.generation is None:
            self._give_up(peer)
        if self.generation is not None and peer.is_dialled and not peer.left and self.forming is not None:
            self.spawn(self.forming.redial(peer))

    # Small things

    def ways_to(self, peer: Peer, kind: str = "") -> list[Where]:
        """Return where to dial `peer`, best first: a unix socket on one host, unless the lane is to be TCP."""
        contact = peer.contact
        assert contact is not None
        same_host = contact.host == self.host
        by_socket = kind in ("shm", "unix", "memory") or (not kind and self.credentials.tls is None)
        # In a cluster a path is only taken from others if it lies where all nodes of this user on this host listen.
        is_ours = self.credentials.tls is None or self._is_nodes_socket(contact.socket)
        if by_socket and same_host and contact.socket and is_ours:
            return [contact.socket]
        from covey.net.discovery.interfaces import recent_interfaces, to_dial  # of no use to ranks that share memory

        ways: list[Where] = [peer.way] if peer.way is not None else []
        own = recent_interfaces(self.config.interfaces)
        return ways + [way for way in to_dial(own, contact.addresses, same_host) if way not in ways]

    def _is_nodes_socket(self, path: str) -> bool:
        from covey.net.discovery.host_registry import is_nodes_socket  # of no use to ranks that a token holds together

        return is_nodes_socket(path, self._socket_folder)

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run a coroutine for as long as the node lives. On the control loop only."""
        return self._tasks.spawn(coroutine)

    def close(self) -> None:
        """Say goodbye and free everything. Closing twice is fine."""
        with self._lock:
            is_first, self.is_closing = not self.is_closing, True
        if not is_first:
            self._is_closed.wait(4 * CLOSE_SECONDS)  # another thread is at it
            return
        try:
            control.finish(self._close(), 2 * CLOSE_SECONDS, self._on_close)
        finally:
            self.lanes.close()
            self.events.close()
            self.audit.flush()
            _nodes.discard(self)
            self._is_closed.set()

    async def _close(self) -> None:
        self._note_end()
        if self.generation_table.keeper is not None:
            self.generation_table.keeper.send(messages.Goodbye())
        links = [peer.link for peer in self.peers.values() if peer.link is not None]
        for link in links:
            link.send(messages.encode(messages.Goodbye()))
            link.close()
        await self._tasks.close()
        self.lanes.stop_expecting()
        self.stores.close()
        self.generation_table.close()
        for companion in self._companions:
            await companion.close()
        for newcomer in self.lobby:
            newcomer.turn_away()
        came = [peer.link for peer in self.peers.values() if peer.link is not None and peer.link not in links]
        for link in came:  # while the door was still open
            link.close()
        links += came
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.gather(*(link.ended.wait() for link in links))
        for link in links:
            link.abort()

    def _note_end(self) -> None:
        generation = self.generation
        if generation is not None:
            reason = "it left" if generation.fault is None else generation.fault.text
            self.audit.note("ended", self.card, reason=reason, generation=generation.number)
        self.audit.close()

    def forked(self) -> None:
        """This process is a fork of the one that joined: nothing here may be used again."""
        self.is_closing = True
        self._lock, self._is_closed = threading.Lock(), threading.Event()  # others of the parent may have held them
        self._is_closed.set()
        self.events.forked()
        self.generation_table.forked()
        for group in self.groups():
            group.forked()


_nodes: weakref.WeakSet[Node] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for node in list(_nodes):
        node.forked()
    _nodes.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
