"""The links with the members of a run in a cluster: they come from the mesh in which the run was agreed on.

On the control loop.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

from covey.base.errors import ConfigError
from covey.base.text import printable
from covey.proto.overlay import Overlay
from covey.runtime.joining.run_links import RunLinks
from covey.runtime.peers.remote_process import PeerState
from covey.wire import membership, messages
from covey.wire.formation import Ending, founded_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.base.errors import AuthError
    from covey.base.numbers import Seat
    from covey.proto.joining import Joining
    from covey.runtime.lanes.lanes import Lanes
    from covey.runtime.peers.cluster_mesh import ClusterMesh
    from covey.runtime.peers.peer_table import Inbox, PeerTable
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.state.checkpoints import Checkpoints
    from covey.runtime.state.store import Stores
    from covey.runtime.tasks import Tasks
    from covey.runtime.views.generation import Generation
    from covey.runtime.views.views import Views

logger = logging.getLogger("covey")


class ClusterLinks(RunLinks):
    """Connects one run with the mesh of its cluster: its links, its newcomers, and the nodes that wait for the run."""

    can_rest = True

    def __init__(
        self, core: Joining, *, entered: Callable[[messages.Founded], None], settle: Callable[[], None]
    ) -> None:
        """`entered` is called with each later generation; `settle` performs the effects of `core`."""
        self._core, self._formation = core, core.formation
        self._entered, self._settle = entered, settle
        self._rivals_logged: set[bytes] = set()

    def serve(
        self,
        mesh: ClusterMesh,
        peers: PeerTable,
        views: Views,
        inbox: Inbox,
        *,
        tasks: Tasks,
        stores: Stores,
        checkpoints: Checkpoints,
        lanes: Lanes,
    ) -> None:
        """Hand the links of this run to its parts from now on."""
        self.mesh = self._mesh = mesh
        self.serve_parts(peers, views, inbox, tasks=tasks, stores=stores, checkpoints=checkpoints)
        self._lanes = lanes
        self.awake = AwakeLinks(views, peers, tasks)
        mesh.search.slow_down()
        mesh.spawn(mesh.resting.keep())
        self._core.may_go_on = lambda: views.generations.hears_quorum

    # Links

    def deliver_all_early(self) -> None:
        """Give the node what members said before it had its seat; redial members without a link."""
        for seat, peer in list(self.peers.items()):
            if self._mesh.met.get(peer.id) is not peer:
                self.views.losses.link_ended(seat)
            else:
                self.deliver_early(seat, peer)

    def recall(self, card: messages.Card) -> RemoteProcess | None:
        """Return the member that a card is of; None if it is of none, or of one that a view has excluded."""
        key = messages.key_of(card)
        return next((peer for peer in self.peers.values() if peer.key == key and not peer.is_excluded), None)

    def recognise(self, remote: RemoteProcess) -> None:
        """Find the seat of a node that is linked again, or the seat for which a later life of it votes.

        A node that only votes is a member that a view excluded, or a later life of one.
        """
        for seat, peer in self.peers.items():
            if peer is remote:
                self.link_changed(remote)
                self.views.relinked(peer)
            elif peer.id == remote.id:
                self._let_vote(remote, seat)

    def _let_vote(self, remote: RemoteProcess, seat: Seat) -> None:
        """Let a node vote for the seat that it, or an earlier life of it, had."""
        remote.votes_for = seat
        self.views.generations.voter_up(seat, remote)

    def link_changed(self, remote: RemoteProcess) -> None:
        """Note the link in use with a member."""
        if self.is_member(remote):
            before, remote.told = remote.told, remote.link
            if before is not None and before is not remote.link:  # what is on the old link may be lost or late
                self.stores.link_up(remote.seat)
            generation = self.views.generation
            if generation is not None and generation.number:  # the old link may have ended with this message on it
                remote.send(generation.founded)

    def link_woke(self, remote: RemoteProcess) -> None:
        """Note that the link with a member, which rested, has a connection again."""
        if self.is_member(remote):
            remote.told = remote.link
            self.views.losses.link_up(remote)
            self.stores.link_has_room(remote.seat)

    def lost(self, remote: RemoteProcess) -> None:
        """Note that the last link with a node has ended, and redial a member."""
        if remote.votes_for >= 0:
            self.views.generations.voter_down(remote.votes_for)
        if remote.seat >= 0:
            self.views.losses.link_ended(remote.seat)

    def link_rests(self, remote: RemoteProcess) -> None:
        if self.is_member(remote):
            self.views.losses.link_rests(remote.seat)

    def may_rest(self, remote: RemoteProcess) -> bool:
        return self.is_member(remote) and self.awake.may_rest(remote.seat)

    def wants_awake(self, remote: RemoteProcess) -> bool:
        return self.is_member(remote) and self.awake.wants(remote.seat)

    def may_change_link(self, remote: RemoteProcess) -> bool:
        return remote.seat < 0 and not self._formation.is_deciding

    # Nodes that are not members

    def heard_vote(self, remote: RemoteProcess, message: messages.Agreeing) -> None:
        """Take a message about views from a node that is no member of this node's generation."""
        if remote.votes_for >= 0:
            self.views.generations.agreeing(remote.votes_for, message)
        else:
            self._tell_generation(remote, message.generation)
            remote.keep_early(message)

    def _tell_generation(self, remote: RemoteProcess, number: int) -> None:
        """Answer a node that believes to be a member of generation `number`, and is none as far as this node knows."""
        generation = self.views.generation
        if generation is None or number > generation.number:
            return
        if number == generation.number:
            decided = membership.encode_membership(membership.Decided(generation.view))
            remote.send(messages.Agreeing(number, decided))
        else:
            remote.send(generation.founded)

    def update(self) -> None:
        """Pass on what the core has found out: newcomers, uninformed members, rival runs, and the end of the run."""
        self._update_newcomers()
        self._inform_members()
        self._report_rivals()
        if self._formation.ending is not None:
            self.views.generations.over()

    def _update_newcomers(self) -> None:
        """Tell the node which nodes wait for the next generation, and which no longer do."""
        waiting, newcomers = {}, self.views.newcomers
        for id in self._formation.newcomers():
            remote = self._mesh.met.get(id)
            if remote is not None and remote.seat >= 0 and self.peers[remote.seat].is_excluded:
                # It got a seat in a generation and was excluded by a view before it heard of either.
                seat, remote = remote.seat, self._mesh.begin_anew(remote)
                self._let_vote(remote, seat)
            if remote is not None and remote.seat < 0:
                waiting[messages.key_of(remote.card)] = remote
        for newcomer in newcomers:
            if messages.key_of(newcomer.card) not in waiting:
                newcomers.remove(newcomer)
        for remote in waiting.values():
            if remote.card not in newcomers:
                newcomers.add(remote)

    def _inform_members(self) -> None:
        """Tell members of the generation that still wait for a seat, because a message was lost, that they have one."""
        unaware, generation = self._formation.unaware, self.views.generation
        for id in sorted(unaware):
            remote = self._mesh.met.get(id)
            rank = generation.rank_of(remote.seat) if generation is not None and remote is not None else None
            if generation is not None and remote is not None and rank in generation.view.ranks:
                remote.send(generation.founded)
        unaware.clear()

    def _report_rivals(self) -> None:
        """Report that there is another run of this name; the younger of the two ends."""
        formed, run = self._formation.formed, self._mesh.run
        for lineage, here in self._formation.rivals.items():
            if formed is None or lineage in self._rivals_logged:
                continue
            self._rivals_logged.add(lineage)
            names = printable(", ".join(here.names))
            began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(founded_at(lineage)))
            if lineage < formed.lineage:
                self.views.outlived(f"an older run of the name {run!r} is running with {names}, since {began}")
            else:
                logger.warning("a second run of the name %r, younger than this one, continues with %s since %s; it was "
                               "begun where this one could not be heard, and ends", run, names, began)  # fmt: skip

    def find(self, card: messages.Card) -> RemoteProcess | None:
        """Return a node that a generation has a seat for, if there is a link with it."""
        remote = self._mesh.met.get(card.id)
        return remote if remote is not None and remote.key == messages.key_of(card) and remote.seat < 0 else None

    # Generations

    def founded(self, founded: messages.Founded) -> None:
        """Note that the node is in a generation, tell keepers, and redial members without a link."""
        if founded.generation:
            self._entered(founded)
        for keeper in self._mesh.keepers:
            self.tell_keeper(keeper)
        for member in founded.members:
            peer = self.peers.get(member.seat)
            if peer is not None and peer.link is None:
                self.link_ended(peer)
        self._settle()

    def tell_keeper(self, keeper: RemoteProcess) -> None:
        """Tell the keeper of this process which generation the process is in."""
        generation = self.views.generation
        if generation is not None and keeper.card.id == self._mesh.card.keeper:
            keeper.send(generation.founded)

    def run_ended(self, lineage: bytes, *, is_finished: bool) -> None:
        """Tell waiting nodes and keepers that the members have decided that the run is over."""
        self._core.ended(Ending(lineage, is_finished), time.monotonic())
        self._settle()
        for remote in (*self._mesh.met.values(), *self._mesh.keepers):
            remote.send(messages.Ended(self._mesh.run, lineage, is_finished), wakes=False)

    def fail(self, error: AuthError | ConfigError) -> None:
        """End the generation that the node is in with an error."""
        self.views.generations.failed(error)

    # What commands ask

    def leaders(self) -> tuple[bytes, bytes]:
        """Return the ids of the node that leads the view and of the one that breaks ties; empty if there is none."""
        generation = self.views.generation
        if generation is None:
            return b"", b""
        leads, members = generation.view_driver.leader(), generation.founded.members
        leader = members[leads].card.id if leads is not None else b""
        return leader, members[generation.view.tie_breaker].card.id

    def lane_kind(self, remote: RemoteProcess) -> str:
        """Return the kind of lane to a member, or ""."""
        with contextlib.suppress(ConfigError):
            if remote.seat >= 0:
                return self._lanes.kind(remote.seat)
        return ""


class AwakeLinks:
    """Tells which links of one node stay awake in its present view: those with its neighbours, and all of the leader.

    The leader tells all members several times a second that it leads, and hears from them. So each member is heard by
    the leader and by a few neighbours in the overlay, and any of them notices when it is lost.
    """

    def __init__(self, views: Views, peers: PeerTable, tasks: Tasks) -> None:
        self._views, self._peers, self._tasks = views, peers, tasks
        self._view = (-1, -1)
        self._ranks: frozenset[int] = frozenset()
        self._neighbours: frozenset[int] = frozenset()

    def wants(self, seat: Seat) -> bool:
        """Tell whether the link with a seat is to be awake, and to be woken if it rests.

        So is that of a node which is no member any more: if the node lives, it has to learn that; if not, the link
        ends, and a later life of the node gets one.
        """
        generation = self._generation()
        if generation is None or not generation.is_sparse:
            return generation is not None
        return not self._are_members(generation, seat) or self._are_near(generation, seat)

    def may_rest(self, seat: Seat) -> bool:
        """Tell whether the link with a seat may rest: not while it is open which members there are, or which leads."""
        generation = self._generation()
        if generation is None or not generation.is_sparse or not self._are_members(generation, seat):
            return False
        is_calm = generation.view_driver.leader() is not None and self._peers[seat].state is PeerState.ACTIVE
        return is_calm and not self._are_near(generation, seat)

    def _generation(self) -> Generation | None:
        """Return the generation that this node is in, with its members and neighbours noted."""
        generation = self._views.generation
        if generation is None or generation.is_over or self._tasks.is_closing:
            return None
        if (number := (generation.number, generation.view.number)) != self._view:
            self._view, self._ranks, self._neighbours = number, frozenset(generation.view.ranks), frozenset()
            if generation.is_sparse and generation.rank in self._ranks:
                overlay = Overlay(generation.topology, len(generation.seats), self._ranks)
                self._neighbours = overlay.neighbours(generation.rank)
        return generation

    def _are_members(self, generation: Generation, seat: Seat) -> bool:
        """Tell whether this node and that of a seat are in the view."""
        return generation.rank in self._ranks and generation.rank_of(seat) in self._ranks

    def _are_near(self, generation: Generation, seat: Seat) -> bool:
        """Tell whether the node of a seat is a neighbour, or one of the two leads."""
        rank, leader = generation.rank_of(seat), generation.view_driver.leader()
        return rank in self._neighbours or leader in (rank, generation.rank)
