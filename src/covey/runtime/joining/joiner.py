"""A node that wants to be in a run: it agrees with other nodes on the first view, or waits for a running generation.

`proto.joining` decides; this module performs its effects in order, so that promises are on disk before they are sent.
Once the node has a seat, `ClusterLinks` hands the links to the parts of its run. On the control loop.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from typing import TYPE_CHECKING, Final

from covey.base.errors import AuthError, ClosedError, ConfigError, DeadlineError, RemoteProtocolError
from covey.base.numbers import NO_RANK, Seat
from covey.base.text import printable
from covey.net.host.run_notes import FailedWait, forget_wait, keep_wait
from covey.proto.joining import Agree, Bind, Joining, JoiningPace, Remember, Say
from covey.runtime.joining import situation
from covey.runtime.joining.cluster_links import ClusterLinks
from covey.runtime.joining.node import NodeParts
from covey.runtime.joining.records import Records
from covey.runtime.joining.situation import Situation
from covey.runtime.loop import aside
from covey.runtime.peers.cluster_mesh import ClusterMesh
from covey.runtime.peers.mesh import MeshListener
from covey.runtime.peers.remote_process import PeerEvent, RemoteProcess
from covey.runtime.tasks import CoreDriver
from covey.wire import formation as forming
from covey.wire import membership, messages
from covey.wire.formation import LINEAGE_BYTES as LINEAGE_BYTES
from covey.wire.formation import Ending
from covey.wire.versions import OURS, Disagreement, agree, fixed_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from covey.base.config import GroupConfig
    from covey.net.keys.clusters import Cluster
    from covey.proto.formation import Formed
    from covey.runtime.peers.endpoint import Endpoint

WRONG_SECRET_SECONDS: Final = 4.0
"""If all seeds close connections at the door's challenge for this long, the secret is wrong."""
OUTCOME_CHECK_SECONDS: Final = 0.2
"""How often `form` checks for outcomes that no future reports."""


class Joiner(MeshListener):
    """A node that wants to be in a run, and its part in agreeing on the run's first view."""

    def __init__(
        self,
        cluster: Cluster,
        config: GroupConfig,
        endpoint: Endpoint,
        terms: forming.Terms,
        *,
        is_elastic: bool = False,
        is_returning: bool = False,
        min_hosts: int = 1,
        abandoned: Iterable[bytes] = (),
    ) -> None:
        """Read from disk what this machine knows of the run.

        An elastic process waits until the running generation ends, for as long as the run lasts. A process that
        `is_returning` was in the run before, or waited for it. The first view spans at least `min_hosts` machines.
        `abandoned` are lineages that a person gave up.
        """
        self.endpoint, self.run = endpoint, terms.run
        self._terms, self._is_elastic = terms, is_elastic
        card = endpoint.card
        self.records = Records(cluster.tag, terms.run, card.id)
        me = forming.FoundingMember(card.id, card.life, card.name, card.contact.host, b"", card.breaks_ties)
        self._since = time.monotonic()
        self._core = Joining(
            me,
            terms,
            random.Random(secrets.randbits(64)),
            self._since,
            remembered=self.records.lineages(),
            bound=self.records.read(),
            abandoned=abandoned,
            is_returning=is_returning,
            is_elastic=is_elastic,
            min_hosts=min_hosts,
            wall=time.time,
            pace=JoiningPace(view_patience=config.patience),
        )
        self._driver = CoreDriver(self._core, self, is_ticking=False)
        self._formation = self._core.formation
        self.links = ClusterLinks(self._core, entered=self._enter, settle=self._driver.settle)
        """The links of the run, once `take_seat` has handed them over; before, no process has a seat."""
        self.mesh = ClusterMesh(cluster, config, endpoint, self, self.links, purpose="candidate", run=terms.run)
        self._situation = Situation(self.mesh, self._formation)
        loop = asyncio.get_running_loop()
        self._formed: asyncio.Future[Formed] = loop.create_future()
        """The first view, which this node is in."""
        self._founded: asyncio.Future[messages.Founded] = loop.create_future()
        """A later generation, which has a seat for this node."""
        self.member: ClusterLinks | None = None
        """Set once this node has a seat."""

    @property
    def card(self) -> messages.Card:
        """This node's card, with the addresses that it has now."""
        return self.mesh.card

    async def form(self, within: float) -> messages.Founded | Formed:
        """Return the agreed first view of the run, or the generation of a running one that has a seat for this node.

        Raises:
            DeadlineError: too few nodes came, or they did not agree in time; lists present and refused nodes.
            ClosedError: the run that this process waited for is over, because its work is done.
            AuthError: the secret or the identity of this node is not accepted.
        """
        self.mesh.spawn(self._driver.run())
        self.mesh.spawn(self._situation.keep_logging(lambda: self._is_decided))
        self.mesh.spawn(self._notice_a_wrong_secret())
        until = time.monotonic() + within
        while True:
            left = until - time.monotonic()
            await asyncio.wait((self._formed, self._founded), timeout=max(0.0, min(OUTCOME_CHECK_SECONDS, left)),
                               return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
            if self._is_decided:
                formed = self._formed.result() if self._formed.done() else self._founded.result()
                self.mesh.spawn(aside(forget_wait, self.run, self.mesh.cluster.name))
                return formed
            if (other := self._formation.not_given_up) is not None:
                raise ConfigError(
                    f"run {self.run!r}, which --new or new=True was to replace, is running with "
                    f"{printable(', '.join(other.names))}; end it first, or give the new run another name"
                )
            if self._formation.ending is not None:
                raise ClosedError(f"run {self.run!r} ended before it took this process in: its work is done")
            if left <= 0 and not (self._is_elastic and self._formation.going_on is not None):
                await self._keep_wait(within)
                raise DeadlineError(
                    f"no run {self.run!r} in cluster {self.mesh.cluster.name!r} within the timeout of {within:g} s: "
                    f"{self.situation()}. `covey doctor` looks for the reason."
                )

    async def _keep_wait(self, seconds: float) -> None:
        """Write down what this process waited for, for `covey doctor`."""
        if (wait := self._wait()) is not None:
            cluster, run, name = self.mesh.cluster.name, self.run, self.card.name
            failed = FailedWait(run=run, cluster=cluster, at=time.time(), seconds=seconds, node=name, wait=wait)
            await aside(keep_wait, failed)

    @property
    def _is_decided(self) -> bool:
        return self._formed.done() or self._founded.done()

    def situation(self) -> str:
        """Return in words what is waited for, which nodes are here, and which were refused and why."""
        return self._situation.text()

    async def _notice_a_wrong_secret(self) -> None:
        mesh = self.mesh
        while not self._is_decided:
            await asyncio.sleep(0.5)
            seeds, now = mesh.cluster.seeds, time.monotonic()
            since = [mesh.problems.hung_up.get(seed, now) for seed in seeds]
            if since and not mesh.met and now - max(since) > WRONG_SECRET_SECONDS:
                self._fail(AuthError(
                    f"{', '.join(seeds)} closed the connection at the door: the secret of cluster "
                    f"{mesh.cluster.name!r} differs there. Type `covey pair` there and `covey enroll` here."
                ))  # fmt: skip

    def _fail(self, error: AuthError | ConfigError) -> None:
        if not self._formed.done():
            self._formed.set_exception(error)

    # The node takes its seat

    def take_seat(self, formed: messages.Founded | Formed, config: GroupConfig, *, floor: int) -> NodeParts:
        """Return this process in the run, whose first view or generation `formed` has a seat for it.

        The parts of the run receive the messages about it from now on. No view has fewer than `floor` members.
        """
        links, cards, peers = self.links, _cards_of(formed), self.seated(formed)
        node = NodeParts(
            seat=next(seat for seat in cards if seat not in peers),
            size=len(cards),
            run=self.run,
            endpoint=self.endpoint,
            card=self.card,
            config=config,
            peers=peers,
            links=links,
            floor=floor,
            store=self.records.write,
            closes=(self.mesh,),
        )
        links.serve(
            self.mesh,
            node.peers,
            node.views,
            node.inbox,
            tasks=node.tasks,
            stores=node.stores,
            checkpoints=node.checkpoints,
            lanes=node.lanes,
        )
        self._since = time.monotonic()
        self.member = links
        if isinstance(formed, messages.Founded):
            record = self.record_of(formed)
            self._enter(formed)
            node.views.enter(formed, record)
        else:
            tie_breaker = next((rank for rank, each in enumerate(formed.view) if each.breaks_ties), 0)
            node.views.begin(fixed_by(formed.versions), formed.lineage, tie_breaker)
        links.deliver_all_early()
        self._driver.settle()
        return node

    def seated(self, formed: messages.Founded | Formed) -> dict[Seat, RemoteProcess]:
        """Give the other members of the first view, or of a generation, their seats; return them by seat."""
        by_seat = {}
        for seat, card in _cards_of(formed).items():
            if card.id != self.card.id:
                met = self.mesh.met.get(card.id)
                process = met if met is not None and met.key == messages.key_of(card) else RemoteProcess(card)
                process.seat = seat
                process.note(PeerEvent.READY)
                by_seat[seat] = process
        return by_seat

    def record_of(self, founded: messages.Founded) -> membership.Record | None:
        """Return what this node promised in a generation before it knew of its seat there."""
        bound = self.records.read()
        is_it = bound is not None and (bound.origin, bound.generation) == (founded.origin, founded.generation)
        return bound.record if bound is not None and is_it else None

    def _enter(self, founded: messages.Founded) -> None:
        """Note that this node is in a generation; this is on disk before any promise in the generation is made."""
        members = tuple(map(_as_member, founded.members))
        self._core.entered(members, founded.origin, founded.generation, time.monotonic(), founded.versions)
        self._driver.settle()

    # Effects of the core

    def perform(self, effect: Remember | Bind | Say | Agree) -> None:
        """Perform one effect of the core."""
        match effect:
            case Remember(remembered):
                self.records.remember(remembered)
            case Bind(bound):
                self.records.write(bound)
            case Say(peer, message):
                is_worth_waking = not isinstance(message, forming.Here)  # members know each other's situation
                self._send_to(peer, messages.Forming(messages.encode(message)), wakes=is_worth_waking)
            case Agree(peer, generation, vote):
                self._send_to(peer, messages.Agreeing(generation, membership.encode_membership(vote)))

    def _send_to(self, id: bytes, message: messages.Control, *, wakes: bool = True) -> None:
        remote = self.mesh.met.get(id)
        if remote is not None:
            remote.send(message, wakes=wakes)

    def settled(self) -> None:
        """Note whether the run has formed."""
        if self._formation.formed is not None and not self._is_decided:
            self._formed.set_result(self._formation.formed)
        if self.member is not None:
            self.member.update()

    def failed(self, error: ConfigError) -> None:
        """Give up: a promise cannot be written to disk, so nothing that rests on it may be sent."""
        if self.member is not None:
            self.member.fail(error)
        self._fail(error)

    # What the mesh reports

    def linked(self, remote: RemoteProcess) -> None:
        if not self._core.link_up(remote.card.id, remote.card.life, time.monotonic()):
            self.mesh.part(remote)  # a life that has ended
        elif self.member is not None:
            self.member.recognise(remote)
        self._driver.settle()

    def recall(self, card: messages.Card) -> RemoteProcess | None:
        return None if self.member is None else self.member.recall(card)

    def lost(self, remote: RemoteProcess) -> None:
        refusals = self.mesh.problems.refusals
        for name, reason in self._formation.report().refused:  # it may come again without having heard the reason
            if name == remote.card.name:
                refusals[name] = f"{reason} (it has left)"
        self._core.link_down(remote.card.id, time.monotonic())
        if self.member is not None:
            self.member.lost(remote)
        self._driver.settle()

    def keeper_linked(self, remote: RemoteProcess) -> None:
        if self.member is not None:
            self.member.tell_keeper(remote)

    def asked_for_checkpoint(
        self, request: messages.RequestCheckpoint, send: Callable[[messages.CheckpointProgress], None]
    ) -> None:
        if self.member is not None:
            self.member.checkpoints.asked(request, send)
        else:
            super().asked_for_checkpoint(request, send)

    def expelled(self, remote: RemoteProcess, reason: str) -> None:
        if self.member is not None and remote.seat >= 0:
            self.member.views.losses.deny(remote.seat, reason)

    def refused(self, name: str, reason: str) -> bool:
        if self.member is not None:
            self.member.views.generations.tell_of_refusal(name, reason)
        return self.member is not None

    def identity_refused(self, error: AuthError) -> None:
        self._fail(error)

    def access_lost(self, error: AuthError) -> None:
        if self.member is not None:
            self.member.fail(error)
        if not self.mesh.rules.is_waiting(self.card):  # else it may be approved in time
            self._fail(error)

    def heard(self, remote: RemoteProcess, message: messages.Control) -> None:
        match message:
            case messages.Forming(body):
                before = self._formation.objection_to(remote.card.id)
                self._core.heard(remote.card.id, forming.decode_formation(body), time.monotonic())
                objection = self._formation.objection_to(remote.card.id)
                if objection and objection != before:
                    ip = remote.link.remote_ip if remote.link is not None else ""
                    self.mesh.audit.refused(ip, objection, remote.card)
                self._driver.settle()
            case messages.Founded():
                self._heard_founded(remote, message)
            case messages.Ended(run, lineage, is_finished):
                if run == self.run and len(lineage) == LINEAGE_BYTES:
                    # The keeper of this process passes on what members told it.
                    teller = self.card.id if remote.card.id == self.card.keeper else remote.card.id
                    self._core.ended(Ending(lineage, is_finished), time.monotonic(), teller)
                    self._driver.settle()
            case messages.Vouch():
                if self.member is not None and remote.purpose == "keeper":
                    self.member.views.losses.vouched(remote.card.id, message.processes)
            case _ if self.member is not None and remote.seat >= 0:
                self.member.inbox.heard(remote.seat, message)
            case messages.Agreeing() if self.member is not None:
                self.member.heard_vote(remote, message)
            case messages.Agreeing():
                vote = membership.decode_membership(message.body)
                self._core.agreeing(remote.card.id, message.generation, vote, time.monotonic())
                remote.keep_early(message)
                self._driver.settle()
            case _:
                remote.keep_early(message)

    def _heard_founded(self, remote: RemoteProcess, founded: messages.Founded) -> None:
        """Take a generation that a member announces: it may have a seat for this node, or follow the node's own.

        A seat is believed if the member is in that generation itself and said, under the same terms, that it is in the
        run that this node waits for.
        """
        own, theirs = messages.key_of(self.card), messages.key_of(remote.card)
        keys = [messages.key_of(member.card) for member in founded.members]
        if self.member is not None:
            if own not in keys and theirs in keys and remote.seat >= 0:
                self.member.views.generations.left_behind(founded.origin, founded.generation)
            return
        if self._is_decided or own not in keys:
            return
        is_ours = founded.origin == self._formation.lineages.current and self._formation.is_member_of_ours(
            remote.card.id, founded.origin
        )
        if not is_ours or theirs not in keys or founded.generation < 1:
            return
        # A generation of an elastic run may have lost members that the next one waits for.
        check_founded(founded, 1 if self._is_elastic else self._terms.smallest, self._terms.largest)
        if founded.versions is not None and isinstance(agree(OURS, founded.versions), Disagreement):
            raise RemoteProtocolError(f"generation {founded.generation} speaks what this node said it does not")
        if self._core.may_enter(founded.origin, founded.generation):
            self._founded.set_result(founded)

    def describe(self) -> messages.Tell:
        member = self.member
        leader, tie_breaker = member.leaders() if member is not None else (b"", b"")
        met = self.mesh.met.values()
        if member is not None:
            peers = [each.report(member.lane_kind(each), member.peers.rank_of(each.seat)) for each in met]
        else:
            peers = [each.report() for each in met]
        return messages.Tell(
            run=self.run,
            state="running" if member is not None else "joining",
            leader=leader,
            tie_breaker=tie_breaker,
            since=time.monotonic() - self._since,
            peers=tuple(peers),
            rank=member.peers.rank_of(member.peers.seat) if member is not None else NO_RANK,
            wait=self._wait(),
            versions=OURS if member is None else member.views.speaks.fixed(),
        )

    def _wait(self) -> messages.Wait | None:
        if (member := self.member) is not None:
            return None if member.is_closing else situation.of_member(member.views, member.peers)
        problems, seeds = self.mesh.report_problems(), self.mesh.cluster.seeds
        return situation.of_joiner(self._formation, self._terms, problems, seeds)


def check_founded(founded: messages.Founded, least: int, most: int) -> None:
    """Raise RemoteProtocolError for a generation that no honest member announces."""
    cards = [member.card for member in founded.members]
    whole = all(len(card.id) == forming.ID_BYTES and len(card.life) == forming.LIFE_BYTES for card in cards)
    counts = (len({member.seat for member in founded.members}), len({card.id for card in cards}))
    is_sound = whole and counts == (len(cards), len(cards)) and least <= len(cards) <= most
    if not is_sound or founded.tie_breaker >= len(cards) or len(founded.lineage) != LINEAGE_BYTES or founded.is_kept:
        raise RemoteProtocolError(f"generation {founded.generation}, as a member announced it, contradicts itself")


def _cards_of(formed: messages.Founded | Formed) -> dict[Seat, messages.Card]:
    """Return the cards of all members, by seat; of the members of a first view, what is known without a link."""
    if isinstance(formed, messages.Founded):
        return {member.seat: member.card for member in formed.members}
    return {
        Seat(rank): messages.Card(each.id, each.life, each.name, "", 0, messages.Contact(each.host, (), ""))
        for rank, each in enumerate(formed.view)
    }


def _as_member(member: messages.SeatedMember) -> forming.FoundingMember:
    card = member.card
    return forming.FoundingMember(card.id, card.life, card.name[:80], card.contact.host[:64], b"")
