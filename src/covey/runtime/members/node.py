"""One process in a run: the other processes, a link to each, and the groups they make.

Processes are known by their *seats*: numbers that are given once in a run. Seats of the first generation are its ranks.
Everything that touches a link happens on the control loop; other threads use `tell`, `control.soon`, or wait for a
future. Ranks of a launcher open the links themselves: the higher rank of a pair dials (`LauncherMesh`). In a cluster
the links come from the mesh in which the run was agreed on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

from covey.base.errors import CoveyError
from covey.base.numbers import Seat
from covey.base.text import printable
from covey.runtime import loop as control
from covey.runtime.clocks import ClockOffsets
from covey.runtime.counters import process
from covey.runtime.events import Events
from covey.runtime.fault import Fault
from covey.runtime.lanes.lanes import Lanes
from covey.runtime.lanes.table import lane_key
from covey.runtime.lanes.tuning.path_monitor import PathMonitor
from covey.runtime.lanes.tuning.stream_trials import StreamTrials
from covey.runtime.lanes.tuning.stripes import Stripes
from covey.runtime.members.group_registry import GroupRegistry
from covey.runtime.members.leaving import GOODBYE_SECONDS, leave
from covey.runtime.members.routes import routes_to
from covey.runtime.peers.launcher_mesh import LauncherMesh
from covey.runtime.peers.remote_process import PeerEvent, RemoteProcess
from covey.runtime.report_files import open_sinks
from covey.runtime.report_log import ReportLog
from covey.runtime.state.audit import SILENT, Auditor
from covey.runtime.state.checkpoints import Checkpoints
from covey.runtime.state.store import Stores
from covey.runtime.tasks import Tasks
from covey.runtime.views.departures import DeparturesTold
from covey.runtime.views.generation_table import GenerationTable
from covey.runtime.views.losses import Losses
from covey.runtime.views.newcomers import Newcomers
from covey.wire import messages
from covey.wire.decoding import SkippedMessageError
from covey.wire.versions import OURS, Agreement, fixed_by

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from covey.base.config import GroupConfig
    from covey.runtime.links.acceptor import Acceptor
    from covey.runtime.links.handshake import LinkCredentials, Where
    from covey.runtime.links.link import Link
    from covey.runtime.members.leaving import Closeable
    from covey.runtime.views.generation import Generation
    from covey.wire.membership import Bound, Record
    from covey.wire.reports import MeasuredNetwork

logger = logging.getLogger("covey")

FROM_EXCLUDED: Final = (
    messages.Agreeing, messages.Ping, messages.Pong, messages.Goodbye, messages.Offer, messages.Dial,
)  # fmt: skip
"""Messages that are taken from a process that a view has excluded. Its lanes are refused, and it is told so."""


class Node:
    """This process, in a run of `size` ranks."""

    def __init__(
        self,
        *,
        seat: Seat,
        size: int,
        run: str,
        credentials: LinkCredentials,
        card: messages.Card,
        config: GroupConfig,
        acceptor: Acceptor,
        peers: Mapping[Seat, RemoteProcess],
        objection: Callable[[messages.Card], str] = lambda _card: "",
        keeper: str = "",
        floor: int = 1,
        store: Callable[[Bound], None] | None = None,
        closes: Sequence[Closeable] = (),
        audit: Auditor = SILENT,
        cluster: str = "",
        on_close: Callable[[], None] = lambda: None,
        links_come: bool = False,
    ) -> None:
        """Make the node; `form` or `enter` puts it into the run.

        Args:
            seat: the one of this process, which is its rank in the first generation.
            peers: the other processes, by seat. Where ranks listen may come from rank 0's roster.
            objection: returns why a node may not be in the cluster, or "".
            keeper: the path at which the keeper of all ranks listens.
            floor: no view has fewer members.
            store: makes durable what this node has promised.
            cluster: differs between clusters; empty in a run without one.
            closes: what is closed with this node, besides `acceptor`.
            links_come: the mesh of a cluster finds the other nodes, and hands the links over.
        """
        self.seat, self.size, self.run, self.config = seat, size, run, config
        self.since = time.time()
        """When this process was about to be in the run, in seconds since 1970."""
        self.credentials, self.card = credentials, card
        self.speaks = Agreement(OURS.newest, frozenset(OURS.features))
        """What all members of the run speak, once it is formed."""
        self.objection = objection
        self.host = card.contact.host
        self.acceptor, self.audit, self.cluster = acceptor, audit, cluster
        self._closes: tuple[Closeable, ...] = (acceptor, *closes)
        self._on_close = on_close
        self.peers = dict(peers)
        self.groups = GroupRegistry(self)
        self.lanes = Lanes(self)
        self.stores = Stores(self)
        self.checkpoints = Checkpoints(self)
        self.losses = Losses(self)
        self.departures = DeparturesTold(self)
        self.paths = PathMonitor(self)
        self.stripes = Stripes(self)
        self.stream_trials = StreamTrials(self)
        self._lock = threading.Lock()
        self._tasks = Tasks(f"run {run}")
        self.events = Events()
        self.reports = ReportLog(self.events, open_sinks(os.environ, run, lambda: self.rank))
        self.clocks = ClockOffsets()
        self.generation_table = GenerationTable(self, keeper_path=keeper, floor=floor, store=store)
        self.newcomers = Newcomers(self.generation_table.tell_of_newcomer)
        self.measured: tuple[float, MeasuredNetwork] | None = None
        """What a group of this process has measured last of the links between its ranks, and when: since 1970."""
        self.is_elastic = False
        """Whether the program goes from generation to generation."""
        self.is_draining = False
        """Whether this process wants to leave at the next step."""
        self.wanted_size = 1
        """A generation that has fewer members waits for more."""
        self.most_size = messages.MAX_MEMBERS
        self.on_founded: Callable[[messages.Founded], None] | None = None
        """Called when another generation begins."""
        self.on_ended: Callable[[bytes, bool], None] | None = None
        """Called when the run is over, with its lineage and whether its work is done."""
        self.find_newcomer: Callable[[messages.Card], RemoteProcess | None] | None = None
        """Finds the link with a process that has a seat in a new generation and is not in `newcomers`."""
        self.relayed_ways: Callable[[bytes], list[Where]] = lambda _token: []
        """Returns the ways through relays to the node that has a token."""
        self.relayed_trip: Callable[[Where], float | None] = lambda _way: None
        """Returns the round trip of a way through a relay, if it is known without a probe."""
        self.on_relay_trips: Callable[[RemoteProcess, tuple[messages.RelayTrip, ...]], None] = lambda _peer, _trips: (
            None
        )
        """Called with what a rank says about its relays, in a launcher's run."""
        self.rival = ""
        """Describes an older run of the same name, if this run has to end because of it."""
        self.calls: object = None
        """The calls of this process (`runtime.calls`), held here because the registry of groups does not."""
        self.is_closing = False
        self._is_closed = threading.Event()
        self.launcher_mesh = None if links_come else LauncherMesh(self)
        self._closes += () if self.launcher_mesh is None else (self.launcher_mesh,)
        acceptor.on_lane = self.lanes.acceptor.claim
        _nodes.add(self)
        process.nodes.add(self)

    # Links

    def form(self, timeout: float) -> None:
        """Return once every rank is linked with every other and knows it; see `LauncherMesh.form`."""
        assert self.launcher_mesh is not None
        self.launcher_mesh.form(timeout)

    def linked(self, peer: RemoteProcess, link: Link, card: messages.Card) -> None:
        """Use a new link with another process."""
        before = peer.link
        peer.use(link)
        if before is not None:
            before.abort()  # its other end has given it up
        peer.card = card
        peer.versions = link.there.versions
        self.acceptor.member_ips.add(link.remote_ip)
        self.attach(peer, link)
        if peer.is_ready:
            self.relinked(peer)
        if self.launcher_mesh is not None:
            self.launcher_mesh.settle()

    def attach(self, process: RemoteProcess, link: Link) -> None:
        """Take what comes over a link with a member, or with a process that waits for a seat."""
        link.attach(
            functools.partial(self._heard_frame, process),
            functools.partial(self._link_ended, process, link),
            lambda: self.stores.link_has_room(process.seat),
        )

    def _link_ended(self, peer: RemoteProcess, link: Link) -> None:
        if peer.seat < 0:
            self.newcomers.remove(peer)
            return
        if isinstance(link.error, CoveyError):
            name = self.generation_table.name_of(peer.seat)
            logger.warning("the link with %s was ended: %s", name, printable(str(link.error)))
        if peer.link is link:
            self.losses.link_ended(peer.seat)

    def relinked(self, peer: RemoteProcess) -> None:
        """Go on with a process that has a new link after its last one ended."""
        self.losses.link_up(peer)
        self.lanes.link_up(peer.seat)
        self.stores.link_up(peer.seat)
        self.checkpoints.link_up(peer.seat)
        self.generation_table.link_up(peer.seat, peer.life)

    def exchanged(self, seat: Seat) -> None:
        """Go on with a process whose link was replaced: what was said on the last one may be lost."""
        self.lanes.dialler.link_lost(seat)
        self.relinked(self.peers[seat])

    def ways_to(self, peer: RemoteProcess, kind: str = "") -> list[Where]:
        """Return where to dial `peer`, best first."""
        return routes_to(self, peer, kind)

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
        link = self.peers[seat].link
        if link is not None:
            link.send(messages.encode(message), wakes=wakes)

    def send_vote(self, seat: Seat, message: messages.Control, *, wakes: bool = True) -> None:
        """Send a message about views; a later life of the peer's node may get it instead. On the control loop.

        A link that rests gets it only if the message `wakes`.
        """
        peer = self.peers[seat]
        if peer.link is not None:
            peer.link.send(messages.encode(message), wakes=wakes)
        elif peer.vote is not None:
            peer.vote(message)

    @property
    def run_id(self) -> bytes:
        """What tells this run from others of its name, for files: the start of its lineage, or a hash of its token."""
        if self.credentials.token:
            return hashlib.sha256(b"covey/1/run-id" + self.credentials.token).digest()[:8]
        return b"" if self.generation is None else self.generation.founded.origin[:8]

    def fail(self, reason: str) -> None:
        """Tell all other processes with which error this process's program ends. Returns at once; on any thread.

        The keeper hears of it first, so that it knows the cause when others fail because of it. The leader tells those
        whose links rest.
        """
        self.tell_keeper(messages.Failing(reason))
        self.tell(tuple(self.peers), messages.Failing(reason), wakes=False)

    def tell_keeper(self, message: messages.Control) -> None:
        """Send a message to the keeper, if there is one. Returns at once; on any thread."""
        if self.generation_table.keeper is not None:
            control.soon(self.generation_table.keeper.send, message)

    def _heard_frame(self, peer: RemoteProcess, body: bytes) -> None:
        """Take a frame that came over the link with a process; one without a seat may know of its seat before."""
        if peer.seat < 0:
            peer.keep_early(messages.decode_control(body))
            return
        self.losses.noticed(peer.seat)
        self.heard(peer.seat, messages.decode_control(body))

    def heard_early(self, seat: Seat, message: messages.Control) -> None:
        """Take a message that a process sent before this node knew its seat."""
        with contextlib.suppress(SkippedMessageError):
            self.heard(seat, message)

    def heard(self, seat: Seat, message: messages.Control) -> None:
        """Take a message from a seat of the run; from one that a view has excluded, only what concerns views."""
        peer = self.peers[seat]
        if peer.is_excluded and not isinstance(message, FROM_EXCLUDED):
            return
        match message:
            case messages.Ready():
                peer.note(PeerEvent.READY)
                if self.launcher_mesh is not None:
                    self.launcher_mesh.settle()
            case messages.Roster(contacts):
                if self.launcher_mesh is not None:
                    self.launcher_mesh.told_roster(seat, contacts)
            case messages.Goodbye():
                peer.note(PeerEvent.SAID_GOODBYE)
                self.departures.heard(seat)
            case messages.Failing(reason):
                peer.failure = reason
                self.departures.heard(seat)
                if self.launcher_mesh is not None:
                    self.launcher_mesh.heard_failure(seat, reason)
            case messages.Departures(members):
                self.departures.told(members)
            case messages.Agreeing():
                self.generation_table.agreeing(seat, message)
            case messages.Ping(number):
                self.send(seat, messages.Pong(number, time.time()))
            case messages.Pong(number, clock):
                self.losses.answered(seat, number, clock)
            case messages.Dial():
                self.lanes.dialler.asked(seat, message)
            case messages.Offer():
                self.lanes.acceptor.offered(seat, message)
            case messages.Expect(lane, udp_port):
                self.lanes.dialler.accepted(seat, lane, udp_port)
            case messages.NoLane(group, purpose, reason, attempt):
                self.lanes.dialler.refused(lane_key(group, seat, purpose, attempt), reason)
            case messages.Allowance(rate):
                self.lanes.limit.allowed(seat, rate)
            case messages.MoveLane():
                self.lanes.moves.heard(seat, message)
            case messages.StreamNews():
                self.lanes.resumption.heard(seat, message)
            case messages.RelayTrips(trips):
                self.on_relay_trips(peer, trips)
            case messages.Posting():
                self.stores.heard(seat, message)
            case messages.Past(body):
                self.generation_table.told_past(seat, body)
            case messages.CheckpointNews():
                self.checkpoints.heard(seat, message)
            case messages.Announce() | messages.Position() | messages.Revoke() | messages.Calls():
                self.groups.heard(seat, message)

    # Generations, on the control loop

    @property
    def generation(self) -> Generation | None:
        """The last generation that this node was in."""
        return self.generation_table.current

    @property
    def rank(self) -> int:
        """The rank of this process in its last generation; its seat in a run without generations."""
        return self.seat if self.generation is None else self.generation.rank

    @property
    def next_seat(self) -> Seat:
        """The first seat that no process has had, as far as this node knows."""
        return Seat(1 + max((self.seat, *self.peers)))

    def begin(self, speaks: Agreement, lineage: bytes = b"", tie_breaker: int = 0) -> None:
        """Judge the other ranks and found the first generation, now that the run is formed and all speak the same."""
        self.speaks = speaks
        self.losses.start()
        if self.size <= messages.MAX_MEMBERS:
            self.generation_table.found_first(lineage, tie_breaker)
        else:  # without views
            self.checkpoints.view(0, 0, [Seat(seat) for seat in range(self.size)])
        self.losses.run()
        self.paths.start()

    def seat_member(self, seat: Seat) -> None:
        """Take a member of the generation that this node is about to enter, with its link, if there is one."""
        peer = self.peers[seat]
        peer.note(PeerEvent.READY)
        if (link := peer.link) is not None and link.is_open:
            peer.link = None
            self.linked(peer, link, peer.card)
        else:
            peer.unlink()
            if peer.is_dialled and self.launcher_mesh is not None:
                self.spawn(self.launcher_mesh.redial(peer))

    def enter(self, founded: messages.Founded, record: Record | None = None) -> None:
        """Take this node's seat in a generation of a running run; `record` is what it has promised there."""
        if self.launcher_mesh is not None:
            self.acceptor.on_link = self.launcher_mesh.accept
        self.speaks = fixed_by(founded.versions)
        self.generation_table.meet_keeper()
        self.losses.start()
        self.generation_table.found(founded, record)
        self.losses.run()
        self.paths.start()

    @property
    def knows_change(self) -> bool:
        """Whether the next generation should come soon: a process wants in or out, or too few are left."""
        generation = self.generation
        if not self.is_elastic or generation is None:
            return False
        live = len(generation.view.ranks)
        is_awaited = live < self.most_size and self.newcomers.want_generation
        return self.is_draining or bool(self.rival) or live < self.wanted_size or is_awaited

    def outlived(self, rival: str) -> None:
        """End this run, because `rival`, a run of the same name, is older.

        A program that goes from generation to generation ends after its step, so that it can save its state; others
        fail now. With `quorum="any"` the user has accepted that there are several runs, and this one goes on.
        """
        text = f"{rival}; this one is younger"
        if self.config.quorum == "any":
            logger.warning("%s: %s, and goes on beside it (quorum='any')", self.run, text)
            return
        logger.error("%s: %s, and ends", self.run, text)
        self.rival = text
        if not self.is_elastic:
            for group in self.groups:
                group.fail(Fault("SplitRunError", f"{text}, so it ends here; start again to be in the older one"))

    # The end

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run a coroutine until it ends or the node closes. On the control loop."""
        return self._tasks.spawn(coroutine)

    def close(self) -> None:
        """Say goodbye and free everything. Closing twice is fine."""
        with self._lock:
            is_first, self.is_closing = not self.is_closing, True
        if not is_first:
            self._is_closed.wait(4 * GOODBYE_SECONDS)  # another thread is at it
            return
        try:
            control.finish(leave(self, self._tasks, self._closes), 3 * GOODBYE_SECONDS, self._on_close)
        finally:
            self.lanes.close()
            self.lanes.quic.close()
            self.reports.close()
            self.events.close()
            self.audit.flush()
            _nodes.discard(self)
            process.nodes.discard(self)
            self._is_closed.set()

    def forked(self) -> None:
        """Make this node unusable: this process is a fork of the one that joined."""
        self.is_closing = True
        self._lock, self._is_closed = threading.Lock(), threading.Event()  # threads of the parent may have held them
        self._is_closed.set()
        self.events.forked()
        self.reports.forked()
        self.generation_table.forked()
        self.groups.forked()


_nodes: weakref.WeakSet[Node] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for node in list(_nodes):
        node.forked()
    _nodes.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
