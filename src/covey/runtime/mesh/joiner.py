"""A candidate of a run: agrees with the others it meets on who is in it, and hands the links to its node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from typing import TYPE_CHECKING, Final

from covey.base.errors import AuthError, ClosedError, ConfigError, DeadlineError, RemoteProtocolError
from covey.base.pace import Seldom
from covey.base.text import printable
from covey.proto.candidacy import Agree, Bind, Candidacy, Remember, Say
from covey.runtime.members.peers import PeerEvent
from covey.runtime.mesh import waiting
from covey.runtime.mesh.mesh import Mesh
from covey.runtime.mesh.records import Records
from covey.wire import formation as forming
from covey.wire import membership, messages
from covey.wire.lineage import ID_BYTES as LINEAGE_BYTES
from covey.wire.lineage import Ending, founded_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from covey.base.config import GroupConfig
    from covey.net.keys.clusters import Cluster
    from covey.proto.formation import Formed
    from covey.runtime.members.node import Node
    from covey.runtime.members.peers import Newcomer, Peer
    from covey.runtime.mesh.endpoint import Endpoint
    from covey.runtime.mesh.remote_node import RemoteNode

logger = logging.getLogger("covey")

FIRST_WORD_SECONDS: Final = 3.0
"""After this much waiting, say what is waited for."""
NEXT_WORD_SECONDS: Final = 5.0
"""How soon it is said that something has changed: strangers can change it all the time."""
REMINDER_SECONDS: Final = 30.0
TOLD_LIMIT: Final = 8
"""Nodes that were refused, of which it is told why."""
SITUATION_LIMIT: Final = 4000
"""Characters in which it is told what is waited for."""
WRONG_KEY_SECONDS: Final = 4.0
"""After this much hanging up by all seeds, believe that the secret is wrong."""
RUNNING_LOOK_SECONDS: Final = 2.0
"""How often the folder of this host is looked at, once the run is going on."""
FIRST_REDIAL_PAUSE: Final = 0.05
REDIAL_SECONDS: Final = 1.5
"""How long dialling a member again may take before it is tried anew."""
EARLY_LIMIT_BYTES: Final = 1 << 20
"""Messages for a run that this node has not finished forming."""
MESSAGE_BYTES: Final = 500
"""What a message takes in memory besides its contents."""


class Joiner(Mesh):
    """A node that wants to be in a run."""

    purpose = "candidate"

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
        """Read what this machine knows of the run.

        An elastic process waits until the running generation ends, for as long as the run lasts. One that
        `is_returning` was in the run before, or waited for it. The first view spans at least `min_hosts` machines.
        `abandoned` are lineages that a person gave up.
        """
        super().__init__(cluster, config, endpoint)
        self.run = terms.run
        self._terms, self._is_elastic = terms, is_elastic
        self._founded: asyncio.Future[messages.Founded] = asyncio.get_running_loop().create_future()
        self.records = Records(cluster.tag, terms.run, self.card.id)
        name, host = self.card.name, self.card.contact.host
        me = forming.Member(self.card.id, self.card.life, name, host, b"", self.card.breaks_ties)
        self._since = time.monotonic()
        self._core = Candidacy(
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
            view_patience=config.patience,
        )
        self._formation = self._core.formation
        self._formed: asyncio.Future[Formed] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Event()
        self._node: Node | None = None
        self._rivals_told: set[bytes] = set()
        self._sought: set[RemoteNode] = set()
        """Members that are not heard and are dialled by other ways."""

    @property
    def _is_decided(self) -> bool:
        return self._formed.done() or self._founded.done()

    # What the gathering tells

    def met_someone(self, remote: RemoteNode) -> None:
        if not self._core.link_up(remote.card.id, remote.card.life, time.monotonic()):
            self.part(remote)  # a life that has ended
        elif self._node is not None:
            self._recognise(self._node, remote)
        self._pump()

    def _recognise(self, node: Node, remote: RemoteNode) -> None:
        """Find the seat of a node that this one is linked with again, or that a later life of it votes for.

        A node that votes is a member that a view excluded, or a later life of one.
        """
        for seat, peer in node.peers.items():
            if peer.id != remote.card.id:
                continue
            if peer.life == remote.card.life and not peer.is_excluded:
                remote.rank = seat
                self.switched(remote)
                node.relinked(peer)
            else:
                self._let_vote(node, remote, seat)

    def _let_vote(self, node: Node, remote: RemoteNode, seat: int) -> None:
        """Take a node for one that only votes for a seat, which it had, or an earlier life of it."""
        remote.votes_for = seat
        node.generation_table.voter_up(seat, remote.card.life, remote.send)

    async def _find_again(self, node: Node, peer: Peer, contact: messages.Contact) -> None:
        """Link again with a member to which there is no link; if a view has excluded it, it should hear so."""
        until = time.monotonic() + 2 * self.config.patience

        def is_wanted() -> bool:
            is_settled = peer.has_left or node.is_closing or peer.id in self.met or peer.is_denied
            return not is_settled and time.monotonic() < until

        await self._dial_while(is_wanted, contact)

    async def _dial_while(self, is_wanted: Callable[[], bool], contact: messages.Contact) -> None:
        """Dial a member again and again, by every way there is."""
        pause = FIRST_REDIAL_PAUSE
        while is_wanted():
            with contextlib.suppress(TimeoutError):  # a lost first packet is repeated by a new dial sooner than by TCP
                async with asyncio.timeout(REDIAL_SECONDS):
                    await self._dial(contact.addresses, same_host=contact.host == self.card.contact.host)
            await asyncio.sleep(pause)
            pause = min(1.0, 1.5 * pause)

    def lost_someone(self, remote: RemoteNode) -> None:
        for name, reason in self._formation.report().refused:  # they may not have heard, and come to ask us
            if name == remote.card.name:
                self.refusals[name] = f"{reason} (it has left)"
        self._core.link_down(remote.card.id, time.monotonic())
        if self._node is not None and remote.votes_for >= 0:
            self._node.generation_table.voter_down(remote.votes_for)
        if self._node is not None and remote.rank >= 0:
            self._node.losses.link_ended(remote.rank)
            peer = self._node.peers[remote.rank]
            self.spawn(self._find_again(self._node, peer, remote.card.contact))
        self._pump()

    def may_switch(self, remote: RemoteNode) -> bool:
        return remote.rank < 0 and not self._formation.is_deciding

    def switched(self, remote: RemoteNode) -> None:
        if self._node is not None and remote.rank >= 0:
            _tell_how_to_reach(self._node.peers[remote.rank], remote)
            generation = self._node.generation
            if generation is not None and generation.number:  # a link may have ended with this news on it
                remote.send(generation.founded)

    def exchanged(self, remote: RemoteNode) -> None:
        if self._node is not None and remote.rank >= 0:
            self._node.exchanged(remote.rank)

    def _unheard(self, seat: int) -> None:
        """A member is not heard on its link: dial it by every way there is. It may be busy, or the path may be dead."""
        remote = next((each for each in self.met.values() if each.rank == seat), None)
        if remote is not None and remote not in self._sought:
            self._sought.add(remote)
            self.spawn(self._seek(remote))

    async def _seek(self, remote: RemoteNode) -> None:
        def is_wanted() -> bool:
            return remote.link is not None and remote.is_silent() and not self.is_closing

        try:
            await self._dial_while(is_wanted, remote.card.contact)
        finally:
            self._sought.discard(remote)

    def heard(self, remote: RemoteNode, message: messages.Control) -> None:
        match message:
            case messages.Forming(body):
                self._core.heard(remote.card.id, forming.decode_formation(body), time.monotonic())
                self._pump()
            case messages.Founded():
                self._heard_founded(remote, message)
            case messages.Ended(run, lineage, is_finished):
                if run == self.run and len(lineage) == LINEAGE_BYTES:
                    # Our keeper passes on what members told it.
                    teller = self.card.id if remote.card.id == self.card.keeper else remote.card.id
                    self._core.ended(Ending(lineage, is_finished), time.monotonic(), teller)
                    self._pump()
            case messages.Vouch():
                self._heard_vouch(remote, message)
            case _ if self._node is not None and remote.rank >= 0:
                self._node.heard(remote.rank, message)
            case messages.Agreeing():
                self._heard_vote(remote, message)
            case _ if remote.early_bytes < EARLY_LIMIT_BYTES:
                self._keep_for_later(remote, message)

    def _heard_vote(self, remote: RemoteNode, message: messages.Agreeing) -> None:
        """Take what a node says about views that is no member of this node's generation."""
        if self._node is None:
            vote = membership.decode_membership(message.body)
            self._core.agreeing(remote.card.id, message.generation, vote, time.monotonic())
            self._keep_for_later(remote, message)
            self._pump()
        elif remote.votes_for >= 0:
            self._node.generation_table.agreeing(remote.votes_for, message)
        else:
            self._tell_where_the_run_is(remote, message.generation)
            self._keep_for_later(remote, message)  # it may be a newcomer that heard of its seat before this node did

    def _tell_where_the_run_is(self, remote: RemoteNode, number: int) -> None:
        """Answer a node that takes itself for a member of a generation, and is none as far as this node knows."""
        generation = self._node.generation if self._node is not None else None
        if generation is None or number > generation.number:
            return
        if number == generation.number:
            decided = membership.encode_membership(membership.Decided(generation.view))
            remote.send(messages.Agreeing(number, decided))
        else:
            remote.send(generation.founded)

    def _keep_for_later(self, remote: RemoteNode, message: messages.Control) -> None:
        if remote.rank < 0 and remote.early_bytes < EARLY_LIMIT_BYTES:
            remote.early_bytes += len(messages.encode(message)) + MESSAGE_BYTES
            remote.early.append(message)

    def _heard_founded(self, remote: RemoteNode, founded: messages.Founded) -> None:
        """A member tells of its generation, which may have a seat for this node, or be later than the one it is in.

        It is believed if it said, under our terms, that it is in the run that this node waits for, and is a member of
        that generation itself.
        """
        mine, theirs = messages.key_of(self.card), messages.key_of(remote.card)
        keys = [messages.key_of(member.card) for member in founded.members]
        if self._node is not None and mine not in keys and theirs in keys and remote.rank >= 0:
            self._node.generation_table.left_behind(founded.origin, founded.generation)
        if self._node is not None or self._is_decided or mine not in keys:
            return
        is_ours = founded.origin == self._formation.lineages.current and self._formation.is_member_of_ours(
            remote.card.id, founded.origin
        )
        if not is_ours or theirs not in keys or founded.generation < 1:
            return
        # A generation of an elastic run may have lost members that the next one waits for.
        check_founded(founded, 1 if self._is_elastic else self._terms.smallest, self._terms.largest)
        if self._core.may_enter(founded.origin, founded.generation):
            self._founded.set_result(founded)

    def _heard_vouch(self, keeper: RemoteNode, message: messages.Vouch) -> None:
        """A keeper speaks for its processes, and for no others."""
        if self._node is not None and keeper.purpose == "keeper":
            self._node.losses.vouched(keeper.card.id, message.processes)

    def noticed(self, remote: RemoteNode) -> None:
        if self._node is not None and remote.rank >= 0:
            self._node.losses.noticed(remote.rank)

    def _give_up(self, rank: int) -> None:
        for remote in list(self.met.values()):
            if remote.rank == rank:
                self.part(remote)

    def turned_out(self, remote: RemoteNode, reason: str) -> None:
        if self._node is not None and remote.rank >= 0:
            self._node.losses.deny(remote.rank, reason)

    def turned_down(self, error: AuthError) -> None:
        self._fail(error)

    def cast_out(self, error: AuthError) -> None:
        if self._node is not None and self._node.generation is not None:
            self._node.generation.failed(error)
        if not self.rules.is_waiting(self.card):  # else it may be approved in time
            self._fail(error)

    def _fail(self, error: AuthError | ConfigError) -> None:
        if not self._formed.done():
            self._formed.set_exception(error)

    def tell(self) -> messages.Tell:
        leader = tie_breaker = b""
        generation = self._node.generation if self._node is not None else None
        if generation is not None:
            leads = generation.view_driver.leader()
            leader = generation.founded.members[leads].card.id if leads is not None else b""
            tie_breaker = generation.founded.members[generation.view.tie_breaker].card.id
        return messages.Tell(
            run=self.run,
            state="running" if self._node is not None else "joining",
            leader=leader,
            tie_breaker=tie_breaker,
            since=time.monotonic() - self._since,
            peers=tuple(self.peer_report(remote, self._lane_kind(remote)) for remote in self.met.values()),
            rank=self._node.rank if self._node is not None else -1,
            wait=self._wait(),
        )

    def _wait(self) -> messages.Wait | None:
        if self._node is not None:
            return waiting.of_member(self._node)
        return waiting.of_candidate(self._formation, self._terms, self.problems(), self.cluster.seeds)

    def _lane_kind(self, remote: RemoteNode) -> str:
        with contextlib.suppress(ConfigError):
            if self._node is not None and remote.rank >= 0:
                return self._node.lanes.kind(remote.rank)
        return ""

    # Agreeing

    async def form(self, within: float) -> messages.Founded | Formed:
        """Return the agreed view of the run; or the generation that takes us in, if the run was going on.

        Raises:
            DeadlineError: not enough came, or they did not agree in time; says who is here and who was refused.
            ClosedError: the run that this process waited for is over, because its work is done.
            AuthError: our secret or our identity is not accepted.
        """
        self.spawn(self._tick())
        self.spawn(self._say_what_is_waited_for())
        self.spawn(self._notice_a_wrong_secret())
        until = time.monotonic() + within
        while True:
            left = until - time.monotonic()
            await asyncio.wait((self._formed, self._founded), timeout=max(0.0, min(0.2, left)),
                               return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
            if self._formed.done():
                return self._formed.result()
            if self._founded.done():
                return self._founded.result()
            if (other := self._formation.not_given_up) is not None:
                raise ConfigError(
                    f"run {self.run!r}, which --new or new=True was to replace, is going on with "
                    f"{printable(', '.join(other.names))}; end it first, or give the new run another name"
                )
            if self._formation.ending is not None:
                raise ClosedError(f"run {self.run!r} ended before it took this process in: its work is done")
            if left <= 0 and not (self._is_elastic and self._formation.going_on is not None):
                raise DeadlineError(
                    f"no run {self.run!r} in cluster {self.cluster.name!r} within the timeout of {within:g} s: "
                    f"{self.situation()}. `covey doctor` looks for the reason."
                )

    def record_of(self, founded: messages.Founded) -> membership.Record | None:
        """Return what this node has promised in a generation before it knew that it has a seat there."""
        bound = self.records.read()
        is_it = bound is not None and (bound.origin, bound.generation) == (founded.origin, founded.generation)
        return bound.record if bound is not None and is_it else None

    def _pump(self) -> None:
        """Do what the core wants, in its order, and look whether it is done."""
        try:
            for effect in self._core.effects():
                self._do(effect)
        except ConfigError as error:  # what has to be on disk cannot be: then nothing may be said that rests on it
            if self._node is not None and self._node.generation is not None:
                self._node.generation.failed(error)
            self._fail(error)
            return
        if self._formation.formed is not None and not self._is_decided:
            self._formed.set_result(self._formation.formed)
        if self._node is not None:
            self._show_in(self._node)
            self._tell_the_unaware(self._node)
            self._look_at_rivals(self._node)
            if self._formation.ending is not None:
                self._node.generation_table.over()
        self._changed.set()

    def _do(self, effect: Remember | Bind | Say | Agree) -> None:
        match effect:
            case Remember(remembered):
                self.records.remember(remembered)
            case Bind(bound):
                self.records.write(bound)
            case Say(peer, message):
                self._send_to(peer, messages.Forming(messages.encode(message)))
            case Agree(peer, generation, vote):
                self._send_to(peer, messages.Agreeing(generation, membership.encode_membership(vote)))

    def _send_to(self, id: bytes, message: messages.Control) -> None:
        remote = self.met.get(id)
        if remote is not None:
            remote.send(message)

    def _show_in(self, node: Node) -> None:
        """Let the node know which nodes wait for the next generation, and which do not any more."""
        waiting = {}
        for id in self._formation.newcomers():
            remote = self.met.get(id)
            if remote is not None and remote.rank >= 0 and node.peers[remote.rank].is_excluded:
                # A generation took it in, and a view excluded it, before it heard of either.
                self._let_vote(node, remote, remote.rank)
                remote.rank = -1
            if remote is not None and remote.rank < 0:
                waiting[messages.key_of(remote.card)] = remote
        for newcomer in node.newcomers:
            if messages.key_of(newcomer.card) not in waiting:
                node.newcomers.remove(newcomer)
        for remote in waiting.values():
            if remote.card not in node.newcomers:
                node.newcomers.add(_Waiting(node, remote))

    def _tell_the_unaware(self, node: Node) -> None:
        """Tell members of the generation that wait outside, because they missed the news, that they are in it."""
        unaware, generation = self._formation.unaware, node.generation
        for id in sorted(unaware):
            remote = self.met.get(id)
            rank = generation.rank_of(remote.rank) if generation is not None and remote is not None else None
            if generation is not None and remote is not None and rank in generation.view.ranks:
                remote.send(generation.founded)
        unaware.clear()

    def _look_at_rivals(self, node: Node) -> None:
        """Say aloud that there is another run of this name; the younger of the two ends."""
        formed = self._formation.formed
        for lineage, here in self._formation.rivals.items():
            if formed is None or lineage in self._rivals_told:
                continue
            self._rivals_told.add(lineage)
            names = printable(", ".join(here.names))
            began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(founded_at(lineage)))
            if lineage < formed.lineage:
                node.outlived(f"an older run of the name {self.run!r} is going on with {names}, since {began}")
            else:
                logger.warning("a second run of the name %r, younger than this one, goes on with %s since %s; it was "
                               "begun where this one could not be heard, and ends", self.run, names, began)  # fmt: skip

    async def _tick(self) -> None:
        while True:
            self._changed.clear()
            now = time.monotonic()
            if now >= self._core.next_deadline():
                self._core.tick(now)
                self._pump()
                self._changed.clear()
            pause = max(0.005, min(1.0, self._core.next_deadline() - time.monotonic()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._changed.wait()

    def situation(self) -> str:
        """Return in words what is waited for, which nodes are here, and which were refused and why."""
        waiting, refused = self._waiting_for()
        if (more := len(refused) - TOLD_LIMIT) > 0:
            refused = [*refused[:TOLD_LIMIT], f"and {more} more"]
        if strangers := self.endpoint.acceptor.about_strangers():
            refused.append(strangers)
        return printable(f"{waiting}; refused: {'; '.join(refused)}" if refused else waiting, SITUATION_LIMIT)

    def _waiting_for(self) -> tuple[str, list[str]]:
        """Return what is waited for with the nodes that are here, and a text for each node that is not, in order."""
        report = self._formation.report()
        reasons = {**self.problems(), **dict(report.refused)}
        waiting = f"{report.waiting}; here: {', '.join(report.here)}"
        return waiting, sorted(f"{name}: {reason}" for name, reason in reasons.items())

    async def _say_what_is_waited_for(self) -> None:
        """Log what is waited for: at first, when that changes, when another node is refused, and now and then."""
        said, told, said_at, seldom = "", set[str](), 0.0, Seldom(NEXT_WORD_SECONDS)
        await asyncio.sleep(FIRST_WORD_SECONDS)
        while not self._is_decided:
            (waiting, refused), now = self._waiting_for(), time.monotonic()
            if now > said_at + REMINDER_SECONDS:
                told.clear()
            is_news = not told.issuperset(refused) or waiting != said or now > said_at + REMINDER_SECONDS
            if is_news and seldom.may(now):
                said, said_at = waiting, now
                told.update(refused)
                logger.warning("waiting for run %r (%.0f s): %s", self.run, now - self._since, self.situation())
            await asyncio.sleep(1.0)

    async def _notice_a_wrong_secret(self) -> None:
        while not self._is_decided:
            await asyncio.sleep(0.5)
            seeds, now = self.cluster.seeds, time.monotonic()
            since = [self.hung_up.get(seed, now) for seed in seeds]
            if since and not self.met and now - max(since) > WRONG_KEY_SECONDS:
                self.turned_down(AuthError(
                    f"{', '.join(seeds)} hung up at the door: the secret of cluster {self.cluster.name!r} is "
                    "another one there. Enroll this machine with a join code from there."
                ))  # fmt: skip

    def seated(self, seats: Mapping[tuple[bytes, bytes], int]) -> dict[int, RemoteNode]:
        """Note the seats of the nodes that this one is linked with, by id and life; return these nodes by seat."""
        by_seat = {}
        for remote in self.met.values():
            if (key := messages.key_of(remote.card)) in seats:
                remote.rank = seats[key]
                by_seat[remote.rank] = remote
        return by_seat

    def carry_on(self, node: Node, by_seat: dict[int, RemoteNode], formed: messages.Founded | Formed) -> None:
        """Hand the links of a run to its node: from now on it hears what is said about the run.

        `formed` is the view that the node is in from the run's beginning, or the generation that it enters.
        """
        self._node, self._since = node, time.monotonic()
        self.search.look_seconds = RUNNING_LOOK_SECONDS
        founded = formed if isinstance(formed, messages.Founded) else None
        cards = {} if founded is None else {member.seat: member.card for member in founded.members}
        for seat, peer in node.peers.items():
            remote = by_seat.get(seat)
            peer.note(PeerEvent.READY)
            if remote is not None:
                peer.introduce(remote.card)
                _tell_how_to_reach(peer, remote)
            elif seat in cards:
                peer.introduce(cards[seat])
        self._core.may_go_on = lambda: node.generation_table.hears_quorum
        node.losses.on_silent = self._give_up
        node.losses.on_unheard = self._unheard
        node.on_founded = self._founded_another
        node.on_ended = self._run_ended
        node.find_newcomer = self._find_newcomer
        if isinstance(formed, messages.Founded):
            record = self.record_of(formed)
            self._enter(formed)
            node.enter(formed, record)
        else:
            tie_breaker = next((rank for rank, member in enumerate(formed.view) if member.breaks_ties), 0)
            node.begin(formed.lineage, tie_breaker)
        for seat in list(node.peers):
            linked = by_seat.get(seat)
            if linked is None or self.met.get(linked.card.id) is not linked:
                node.losses.link_ended(seat)
                self._look_for(node, node.peers[seat])
            else:
                said, linked.early = linked.early, []
                for message in said:
                    node.heard(seat, message)
        self._pump()

    def _enter(self, founded: messages.Founded) -> None:
        """Be in a generation: what is known of the run is on disk before any promise in it is made."""
        members = tuple(map(_as_member, founded.members))
        self._core.entered(members, founded.origin, founded.generation, time.monotonic())
        self._pump()

    def _founded_another(self, founded: messages.Founded) -> None:
        """The node is in a generation: keepers want to know, and the nodes that wait outside."""
        if founded.generation:
            self._enter(founded)
        for keeper in self.keepers:
            self._tell_keeper(keeper)
        if self._node is not None:
            for member in founded.members:
                peer = self._node.peers.get(member.seat)
                if peer is not None and peer.link is None:
                    self._look_for(self._node, peer)
        self._pump()

    def _look_for(self, node: Node, peer: Peer) -> None:
        if peer.contact is not None:
            self.spawn(self._find_again(node, peer, peer.contact))

    def _find_newcomer(self, card: messages.Card) -> Newcomer | None:
        """Return a node that a generation has a seat for, if there is a link with it."""
        remote, node = self.met.get(card.id), self._node
        if remote is None or node is None or messages.key_of(remote.card) != messages.key_of(card):
            return None
        return _Waiting(node, remote)

    def _run_ended(self, lineage: bytes, is_finished: bool) -> None:
        """The members have decided that the run is over: tell the nodes that wait for it, and keepers."""
        self._core.ended(Ending(lineage, is_finished), time.monotonic())
        self._pump()
        for remote in (*self.met.values(), *self.keepers):
            remote.send(messages.Ended(self.run, lineage, is_finished))

    def met_keeper(self, remote: RemoteNode) -> None:
        self._tell_keeper(remote)

    def _tell_keeper(self, keeper: RemoteNode) -> None:
        generation = self._node.generation if self._node is not None else None
        if generation is not None and keeper.card.id == self.card.keeper:
            keeper.send(generation.founded)


class _Waiting:
    """Someone who waits for the next generation."""

    def __init__(self, node: Node, remote: RemoteNode) -> None:
        self._node, self._remote = node, remote

    @property
    def card(self) -> messages.Card:
        return self._remote.card

    def send(self, message: messages.Control) -> None:
        self._remote.send(message)

    def take_seat(self, peer: Peer) -> None:
        self._remote.rank = peer.rank
        _tell_how_to_reach(peer, self._remote)

    def turn_away(self) -> None:
        """Its link ends with all others."""

    def deliver_early(self, peer: Peer) -> None:
        said, self._remote.early = self._remote.early, []
        for message in said:
            self._node.heard(peer.rank, message)


def check_founded(founded: messages.Founded, least: int, most: int) -> None:
    """Raise RemoteProtocolError for a generation that cannot be, whatever a member says."""
    cards = [member.card for member in founded.members]
    whole = all(len(card.id) == forming.ID_BYTES and len(card.life) == forming.LIFE_BYTES for card in cards)
    counts = (len({member.seat for member in founded.members}), len({card.id for card in cards}))
    is_sound = whole and counts == (len(cards), len(cards)) and least <= len(cards) <= most
    if not is_sound or founded.tie_breaker >= len(cards) or len(founded.lineage) != LINEAGE_BYTES or founded.is_kept:
        raise RemoteProtocolError(f"generation {founded.generation} cannot be as it was told of")


def _as_member(member: messages.SeatedMember) -> forming.Member:
    card = member.card
    return forming.Member(card.id, card.life, card.name[:80], card.contact.host[:64], b"")


def _tell_how_to_reach(peer: Peer, remote: RemoteNode) -> None:
    peer.link, peer.is_dialled = remote.link, remote.is_dialled
    peer.way, peer.round_trip = remote.way, remote.round_trip
    if remote.is_measuring:
        peer.measured.clear()
    else:
        peer.measured.set()
