"""One process in a run: wires its peers, views, lanes, state and groups, and frees them at the end.

Everything that touches a link happens on the control loop; other threads use `PeerTable.tell`, `control.soon`, or wait
for a future. How links come about is the business of `MemberLinks`: of `LaunchedLinks` if the members were given, and
of `ClusterLinks` in a cluster, where they come from the mesh in which the run was agreed on.

`Consequences` is what follows from views, and from links that end, for the lanes, the state and the groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Final, Protocol

from covey.base.errors import ConnectError
from covey.net.host.store_file import StoreFile
from covey.runtime import loop as control
from covey.runtime.counters import process
from covey.runtime.events import Events
from covey.runtime.group.internals import engine_of
from covey.runtime.lanes.groups import GroupRegistry
from covey.runtime.lanes.lanes import Lanes
from covey.runtime.peers.peer_table import Inbox, PeerTable, Routes
from covey.runtime.pool import PROFILES, pool
from covey.runtime.report_files import open_sinks
from covey.runtime.report_log import ReportLog
from covey.runtime.state.checkpoints import Checkpoints
from covey.runtime.state.store import Stores
from covey.runtime.tasks import Tasks
from covey.runtime.views.views import Views
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from covey.base.config import GroupConfig
    from covey.base.numbers import Seat
    from covey.runtime.calls.functions import FunctionRegistry
    from covey.runtime.calls.serve import AwaitedCalls
    from covey.runtime.fault import Fault
    from covey.runtime.group.group import Group
    from covey.runtime.peers.endpoint import Endpoint
    from covey.runtime.peers.peer_table import MemberLinks
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.views.generation import Generation
    from covey.wire.membership import Bound
    from covey.wire.reports import MeasuredNetwork
    from covey.wire.versions import Agreement

GOODBYE_SECONDS: Final = 1.0
"""How long goodbyes may take, and before them links to wake over which something is to be said."""
WAKE_CHECK_EVERY: Final = 0.01


class Consequences:
    """Passes on to each part what views and links mean for it. On the control loop."""

    def __init__(
        self,
        run: str,
        config: GroupConfig,
        peers: PeerTable,
        *,
        lanes: Lanes,
        stores: Stores,
        checkpoints: Checkpoints,
        groups: GroupRegistry,
        inbox: Inbox,
    ) -> None:
        self._run, self._config, self._peers = run, config, peers
        self._lanes, self._stores, self._checkpoints = lanes, stores, checkpoints
        self._groups, self._inbox = groups, inbox

    def begun(self) -> None:
        self._lanes.paths.start()

    def view(self, generation: int, number: int, seats: Sequence[Seat], tie_breaker: Seat) -> None:
        self._stores.view(generation, number, seats, tie_breaker)
        self._checkpoints.view(generation, number, seats)

    def sealed(self) -> None:
        self._stores.seal()

    def without_views(self, seats: Sequence[Seat]) -> None:
        self._checkpoints.view(0, 0, seats)

    def link_up(self, seat: Seat) -> None:
        self._lanes.link_up(seat)
        self._stores.link_up(seat)
        self._checkpoints.link_up(seat)

    def link_lost(self, seat: Seat) -> None:
        self._lanes.dialler.link_lost(seat)

    def gone(self, peer: RemoteProcess) -> None:
        error = ConnectError(f"{self._peers.name_of(peer.seat)} is gone")
        self._lanes.abandon(lambda key: key.peer == peer.seat, error)
        self._stores.peer_gone(peer.seat)
        self._groups.peer_gone(peer)

    def excluded(self, seat: Seat) -> None:
        self._lanes.part_with(seat)

    def generation_ended(self, generation: Generation, fault: Fault, *, only_surviving: bool) -> None:
        self._groups.end(generation, fault, only_surviving=only_surviving)
        needs_views = self._config.on_loss == "continue"
        if generation.is_current and (needs_views or not only_surviving):
            of_store = fault._replace(text=f"the store of the run cannot be asked: {fault.text}")
            self._stores.end(
                functools.partial(
                    of_store.error, rank=generation.rank, host="", operation="store", sequence=0, group=self._run
                )
            )

    def run_failed(self, fault: Fault) -> None:
        for group in self._groups:
            group.fail(fault)

    def heard_early(self, seat: Seat, message: messages.Control) -> None:
        self._inbox.heard_early(seat, message)


class Closeable(Protocol):
    """Something that is closed with the node."""

    async def close(self) -> None: ...


class NodeParts:
    """The parts of this process in a run of `size` ranks."""

    def __init__(
        self,
        *,
        seat: Seat,
        size: int,
        run: str,
        endpoint: Endpoint,
        card: messages.Card,
        config: GroupConfig,
        peers: Mapping[Seat, RemoteProcess],
        links: MemberLinks,
        floor: int = 1,
        store: Callable[[Bound], None] | None = None,
        closes: Sequence[Closeable] = (),
    ) -> None:
        """Wire the parts; `views.begin` or `views.enter` puts the process into the run.

        Args:
            seat: the one of this process, which is its rank in the first generation.
            endpoint: what this process listens with, and proves itself by; it is left when the node is closed.
            card: the card of the endpoint, with the addresses that this process has now.
            peers: the other processes, by seat. Where ranks listen may come from rank 0's roster.
            links: links this process with the others.
            floor: no view has fewer members.
            store: makes durable what this node has promised.
            closes: what is closed with this node, besides the acceptor of the endpoint.
        """
        self.seat, self.size, self.run, self.config = seat, size, run, config
        pool.profile = PROFILES[config.pool_profile]
        self.since = time.time()
        """When this process was about to be in the run, in seconds since 1970."""
        self.credentials, self.card, self.host = endpoint.credentials, card, card.contact.host
        self.acceptor, self.audit, self.cluster = endpoint.acceptor, endpoint.audit, endpoint.cluster_tag
        self.links = links
        self._closes: tuple[Closeable, ...] = (endpoint.acceptor, *closes)
        self._on_close = endpoint.on_close
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self.tasks = Tasks(f"run {run}")
        self.events = Events()
        self.reports = ReportLog(self.events, open_sinks(os.environ, run, lambda: self.rank))
        self.peers = PeerTable(seat, peers, self.host)
        self.inbox = Inbox(self.peers)
        self.routes = Routes(card, config.interfaces, self.credentials, links)
        self.groups = GroupRegistry(self.peers)
        self.lanes = Lanes(
            config,
            card.contact,
            self.acceptor,
            self.routes,
            peers=self.peers,
            tasks=self.tasks,
            groups=self.groups,
            tell=lambda kind, peer, text: self.generation_table.tell_of_peer(kind, peer, text),
        )
        self.stores = Stores(
            self.peers,
            self.tasks,
            survives_losses=config.on_loss == "continue",
            bytes_limit=config.store_bytes,
            features=lambda: self.views.speaks.features,
            file=StoreFile(config.store_file) if config.store_file else None,
            least=floor,
        )
        self.checkpoints = Checkpoints(self.peers, self.tasks, self.events)
        self.views = Views(
            run=run,
            size=size,
            config=config,
            card=card,
            peers=self.peers,
            links=links,
            listener=Consequences(
                run,
                config,
                self.peers,
                lanes=self.lanes,
                stores=self.stores,
                checkpoints=self.checkpoints,
                groups=self.groups,
                inbox=self.inbox,
            ),
            floor=floor,
            store=store,
            tasks=self.tasks,
            events=self.events,
            audit=self.audit,
        )
        self.generation_table, self.newcomers = self.views.generations, self.views.newcomers
        self.measured: tuple[float, MeasuredNetwork] | None = None
        """What a group of this process has measured last of the links between its ranks, and when: since 1970."""
        self.calls: AwaitedCalls | None = None
        self._take_messages()
        _nodes.add(self)
        process.nodes.add(self)

    def _take_messages(self) -> None:
        """Tell the inbox which part takes which messages of other members."""
        give = self.inbox.give
        self.views.take_from(self.inbox)
        self.lanes.take_from(self.inbox)
        give(messages.Posting, self.stores.heard)
        give(messages.CheckpointNews, self.checkpoints.heard)
        for kind in (messages.Announce, messages.Position, messages.Revoke, messages.Calls):
            give(kind, self.groups.heard)

    # What other rooms read

    @property
    def generation(self) -> Generation | None:
        """The last generation that this node was in."""
        return self.views.generation

    @property
    def rank(self) -> int:
        """The rank of this process in its last generation; its seat in a run without generations."""
        return self.seat if self.generation is None else self.generation.rank

    @property
    def speaks(self) -> Agreement:
        """What all members of the run speak, once it is formed."""
        return self.views.speaks

    @property
    def is_elastic(self) -> bool:
        """Whether the program goes from generation to generation."""
        return self.views.wishes.is_elastic

    @property
    def is_leaving(self) -> bool:
        """Whether this process was asked to leave at the end of this generation."""
        return self.views.wishes.is_draining

    @property
    def knows_change(self) -> bool:
        """Whether the next generation should come soon: a process wants in or out, or too few are left."""
        return self.views.knows_change

    @property
    def run_id(self) -> bytes:
        """What tells this run from others of its name, for files: the start of its lineage, or a hash of its token."""
        if self.credentials.token:
            return hashlib.sha256(b"covey/1/run-id" + self.credentials.token).digest()[:8]
        return b"" if self.generation is None else self.generation.founded.origin[:8]

    # What groups ask for

    def await_calls(self, functions: FunctionRegistry | None = None) -> None:
        """Have calls of other nodes answered from now on, with these functions, if this process registered some."""
        if self.calls is None:
            from covey.runtime.calls.serve import AwaitedCalls

            self.calls = AwaitedCalls(self, functions)

    def fail(self, reason: str) -> None:
        """Tell all other processes with which error this process's program ends. Returns at once; on any thread.

        The keeper hears of it first, so that it knows the cause when others fail because of it. The leader tells those
        whose links rest.
        """
        self.tell_keeper(messages.Failing(reason))
        self.peers.tell(tuple(self.peers), messages.Failing(reason), wakes=False)

    def tell_keeper(self, message: messages.Control) -> None:
        """Send a message to the keeper, if there is one. Returns at once; on any thread."""
        if self.generation_table.keeper is not None:
            control.soon(self.generation_table.keeper.send, message)

    def tell_keeper_of_survival(self) -> None:
        """Tell the keeper that the program goes on although its groups end. Returns at once; on any thread."""
        control.soon(self.generation_table.tell_keeper_of_survival)

    # The end

    @property
    def is_closing(self) -> bool:
        """Whether this process leaves the run, or has left it. On any thread."""
        return self.tasks.is_closing

    def close(self) -> None:
        """Say goodbye and free everything. Closing twice is fine."""
        with self._lock:
            is_first, self.tasks.is_closing = not self.tasks.is_closing, True
        if not is_first:
            self._is_closed.wait(4 * GOODBYE_SECONDS)  # another thread is at it
            return
        try:
            control.finish(self._leave(), 3 * GOODBYE_SECONDS, self._on_close)
        finally:
            self.lanes.close()
            self.stores.keep()
            self.reports.close()
            self.events.close()
            self.audit.flush()
            _nodes.discard(self)
            process.nodes.discard(self)
            self._is_closed.set()

    async def _leave(self) -> None:
        """Say goodbye to all processes, and end the tasks of the node, its parts, and all links."""
        self.generation_table.note_end()
        if self.generation_table.keeper is not None:
            self.generation_table.keeper.send(messages.Goodbye())
        await self._wake()
        links = [peer.link for peer in self.peers.values() if peer.link is not None]
        for link in links:
            link.send(messages.encode(messages.Goodbye()), wakes=False)
            link.close()
        await self.tasks.close()
        self.lanes.acceptor.stop_expecting()
        self.stores.close()
        self.checkpoints.close()
        self.generation_table.close()
        for each in self._closes:
            await each.close()
        came = [peer.link for peer in self.peers.values() if peer.link is not None and peer.link not in links]
        for link in came:  # while the acceptor was still open
            link.close()
        links += came
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_SECONDS):
                await asyncio.gather(*(link.ended.wait() for link in links))
        for link in links:
            link.abort()

    async def _wake(self) -> None:
        """Wait for links that are being woken: others may depend on what waits there, such as the last view."""
        until = asyncio.get_running_loop().time() + GOODBYE_SECONDS
        while any(peer.link is not None and peer.link.has_waiting for peer in self.peers.values()):
            if asyncio.get_running_loop().time() > until:
                return
            await asyncio.sleep(WAKE_CHECK_EVERY)

    def forked(self) -> None:
        """Make this node unusable: this process is a fork of the one that joined."""
        self.tasks.is_closing = True
        self._lock, self._is_closed = threading.Lock(), threading.Event()  # threads of the parent may have held them
        self._is_closed.set()
        self.events.forked()
        self.reports.forked()
        self.generation_table.forked()
        self.groups.forked()


_nodes: weakref.WeakSet[NodeParts] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for node in list(_nodes):
        node.forked()
    _nodes.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def node_of(group: Group) -> NodeParts | None:
    """Return the parts of the run that a group is of; None for a group of one, and in a process that was forked."""
    node = engine_of(group).node
    assert node is None or isinstance(node, NodeParts)
    return node
