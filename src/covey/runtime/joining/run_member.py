"""This node as a member of the run: hands links to its `Node`, and redials lost members. On the control loop."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

from covey.base.errors import ConfigError
from covey.base.text import printable
from covey.runtime.peers.redial import redial
from covey.runtime.views.awake_links import AwakeLinks
from covey.wire import membership, messages
from covey.wire.lineage import Ending, founded_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.base.errors import AuthError
    from covey.base.numbers import Seat
    from covey.proto.joining import Joining
    from covey.runtime.members.node import Node
    from covey.runtime.peers.mesh import Mesh
    from covey.runtime.peers.remote_process import RemoteProcess

logger = logging.getLogger("covey")


class RunMember:
    """Connects the `Node` of a run with the mesh: its links, its newcomers, and the nodes that wait for the run."""

    def __init__(
        self,
        mesh: Mesh,
        node: Node,
        core: Joining,
        *,
        entered: Callable[[messages.Founded], None],
        settle: Callable[[], None],
    ) -> None:
        """`entered` is called with each later generation; `settle` performs the effects of `core`."""
        self._mesh, self.node, self._core, self._formation = mesh, node, core, core.formation
        self._entered, self._settle = entered, settle
        self._rivals_logged: set[bytes] = set()
        self._redialled: set[RemoteProcess] = set()
        """Linked members that are silent and are being dialled."""
        self.awake = AwakeLinks(node)
        mesh.search.slow_down()
        mesh.spawn(mesh.resting.keep())
        core.may_go_on = lambda: node.generation_table.hears_quorum
        node.losses.on_silent = self._part_with
        node.losses.on_unheard = self._redial_silent
        node.on_founded = self._generation_founded
        node.on_ended = self._run_ended
        node.find_newcomer = self._find_newcomer
        node.relayed_ways, node.relayed_trip = mesh.relays.ways, mesh.relays.round_trip
        mesh.problems.on_refused = node.generation_table.tell_of_refusal

    # Links

    def deliver_early(self) -> None:
        """Give the node what members said before it had its seat; redial members without a link."""
        for seat, peer in list(self.node.peers.items()):
            if self._mesh.met.get(peer.id) is not peer:
                self.node.losses.link_ended(seat)
                self._redial_lost(peer)
            else:
                for message in peer.early.take():
                    self.node.heard_early(seat, message)

    def recall(self, card: messages.Card) -> RemoteProcess | None:
        """Return the member that a card is of; None if it is of none, or of one that a view has excluded."""
        key = messages.key_of(card)
        return next((peer for peer in self.node.peers.values() if peer.key == key and not peer.is_excluded), None)

    def recognise(self, remote: RemoteProcess) -> None:
        """Find the seat of a node that is linked again, or the seat for which a later life of it votes.

        A node that only votes is a member that a view excluded, or a later life of one.
        """
        for seat, peer in self.node.peers.items():
            if peer is remote:
                self.link_changed(remote)
                self.node.relinked(peer)
            elif peer.id == remote.id:
                self._let_vote(remote, seat)

    def _let_vote(self, remote: RemoteProcess, seat: Seat) -> None:
        """Let a node vote for the seat that it, or an earlier life of it, had."""
        remote.votes_for = seat
        self.node.generation_table.voter_up(seat, remote.card.life, remote.send)

    def link_changed(self, remote: RemoteProcess) -> None:
        """Note the link in use with a member."""
        if remote.seat >= 0:
            before, remote.told = remote.told, remote.link
            if before is not None and before is not remote.link:  # what is on the old link may be lost or late
                self.node.stores.link_up(remote.seat)
            generation = self.node.generation
            if generation is not None and generation.number:  # the old link may have ended with this message on it
                remote.send(generation.founded)

    def link_woke(self, remote: RemoteProcess) -> None:
        """Note that the link with a member, which rested, has a connection again."""
        if remote.seat >= 0:
            remote.told = remote.link
            self.node.losses.link_up(remote)
            self.node.stores.link_has_room(remote.seat)

    def lost(self, remote: RemoteProcess) -> None:
        """Note that the last link with a node has ended, and redial a member."""
        if remote.votes_for >= 0:
            self.node.generation_table.voter_down(remote.votes_for)
        if remote.seat >= 0:
            self.node.losses.link_ended(remote.seat)
            self._redial_lost(remote)

    def _redial_lost(self, peer: RemoteProcess) -> None:
        if peer.card.contact.addresses or peer.card.contact.relay:
            self._mesh.spawn(self._redial(peer))

    async def _redial(self, peer: RemoteProcess) -> None:
        """Dial a member without a link; if a view has excluded it, it should learn so."""
        until = time.monotonic() + 2 * self._mesh.config.patience

        def is_wanted() -> bool:
            is_settled = peer.has_left or self.node.is_closing or peer.id in self._mesh.met or peer.is_denied
            return not is_settled and time.monotonic() < until

        await redial(self._mesh, peer.card.contact, is_wanted)

    def _redial_silent(self, seat: Seat) -> None:
        """Dial a member whose link is silent by all its addresses: it may be busy, or the path may be dead."""
        remote = next((each for each in self._mesh.met.values() if each.seat == seat), None)
        if remote is not None and remote not in self._redialled:
            self._redialled.add(remote)
            self._mesh.spawn(self._redial_until_heard(remote))

    async def _redial_until_heard(self, remote: RemoteProcess) -> None:
        def is_wanted() -> bool:
            return remote.link is not None and remote.is_silent() and not self._mesh.is_closing

        try:
            await redial(self._mesh, remote.card.contact, is_wanted)
        finally:
            self._redialled.discard(remote)

    def _part_with(self, seat: Seat) -> None:
        for remote in list(self._mesh.met.values()):
            if remote.seat == seat:
                self._mesh.part(remote)

    # Nodes that are not members

    def heard_vote(self, remote: RemoteProcess, message: messages.Agreeing) -> None:
        """Take a message about views from a node that is no member of this node's generation."""
        if remote.votes_for >= 0:
            self.node.generation_table.agreeing(remote.votes_for, message)
        else:
            self._tell_generation(remote, message.generation)
            remote.keep_early(message)

    def _tell_generation(self, remote: RemoteProcess, number: int) -> None:
        """Answer a node that believes to be a member of generation `number`, and is none as far as this node knows."""
        generation = self.node.generation
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
            self.node.generation_table.over()

    def _update_newcomers(self) -> None:
        """Tell the node which nodes wait for the next generation, and which no longer do."""
        node, waiting = self.node, {}
        for id in self._formation.newcomers():
            remote = self._mesh.met.get(id)
            if remote is not None and remote.seat >= 0 and node.peers[remote.seat].is_excluded:
                # It got a seat in a generation and was excluded by a view before it heard of either.
                seat, remote = remote.seat, self._mesh.begin_anew(remote)
                self._let_vote(remote, seat)
            if remote is not None and remote.seat < 0:
                waiting[messages.key_of(remote.card)] = remote
        for newcomer in node.newcomers:
            if messages.key_of(newcomer.card) not in waiting:
                node.newcomers.remove(newcomer)
        for remote in waiting.values():
            if remote.card not in node.newcomers:
                node.newcomers.add(remote)

    def _inform_members(self) -> None:
        """Tell members of the generation that still wait for a seat, because a message was lost, that they have one."""
        unaware, generation = self._formation.unaware, self.node.generation
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
                self.node.outlived(f"an older run of the name {run!r} is going on with {names}, since {began}")
            else:
                logger.warning("a second run of the name %r, younger than this one, goes on with %s since %s; it was "
                               "begun where this one could not be heard, and ends", run, names, began)  # fmt: skip

    def _find_newcomer(self, card: messages.Card) -> RemoteProcess | None:
        """Return a node that a generation has a seat for, if there is a link with it."""
        remote = self._mesh.met.get(card.id)
        return remote if remote is not None and remote.key == messages.key_of(card) and remote.seat < 0 else None

    # Generations

    def _generation_founded(self, founded: messages.Founded) -> None:
        """Note that the node is in a generation, tell keepers, and redial members without a link."""
        if founded.generation:
            self._entered(founded)
        for keeper in self._mesh.keepers:
            self.tell_keeper(keeper)
        for member in founded.members:
            peer = self.node.peers.get(member.seat)
            if peer is not None and peer.link is None:
                self._redial_lost(peer)
        self._settle()

    def tell_keeper(self, keeper: RemoteProcess) -> None:
        """Tell the keeper of this process which generation the process is in."""
        generation = self.node.generation
        if generation is not None and keeper.card.id == self._mesh.card.keeper:
            keeper.send(generation.founded)

    def _run_ended(self, lineage: bytes, is_finished: bool) -> None:
        """Tell waiting nodes and keepers that the members have decided that the run is over."""
        self._core.ended(Ending(lineage, is_finished), time.monotonic())
        self._settle()
        for remote in (*self._mesh.met.values(), *self._mesh.keepers):
            remote.send(messages.Ended(self._mesh.run, lineage, is_finished), wakes=False)

    def fail(self, error: AuthError | ConfigError) -> None:
        """End the generation that the node is in with an error."""
        if self.node.generation is not None:
            self.node.generation.failed(error)

    # What commands ask

    def leaders(self) -> tuple[bytes, bytes]:
        """Return the ids of the node that leads the view and of the one that breaks ties; empty if there is none."""
        generation = self.node.generation
        if generation is None:
            return b"", b""
        leads, members = generation.view_driver.leader(), generation.founded.members
        leader = members[leads].card.id if leads is not None else b""
        return leader, members[generation.view.tie_breaker].card.id

    def lane_kind(self, remote: RemoteProcess) -> str:
        """Return the kind of lane to a member, or ""."""
        with contextlib.suppress(ConfigError):
            if remote.seat >= 0:
                return self.node.lanes.kind(remote.seat)
        return ""
