"""The mesh of a cluster: this node finds the others, and links with every holder of the secret. On the control loop.

A remote node is known only after TLS has proved its key and its Hello was accepted. Of several links with one node one
remains, whichever side dialled it. The side that dialled it also dials their lanes, because it is known to reach the
other.

A `ClusterMesh` alone is a visitor: it links with every node, asks and answers, and takes part in no run. A `Joiner`
and a `ClusterKeeper` listen to theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from typing import TYPE_CHECKING, Final

from covey.base import pace
from covey.base.errors import AuthError, ConfigError, CoveyError
from covey.net.discovery.interfaces import advertised, usable_interfaces
from covey.net.keys import clusters
from covey.runtime.links.limits import DialLimits
from covey.runtime.loop import aside
from covey.runtime.peers.admission import Admission
from covey.runtime.peers.dialer import BetterWays, Dialer, has_loopback_ip
from covey.runtime.peers.hints import Hint, HintFollower, Origin
from covey.runtime.peers.mesh import LinkListener, LinkMesh, MeshListener, is_guest
from covey.runtime.peers.node_links import NodeLinks
from covey.runtime.peers.problems import Problems
from covey.runtime.peers.reach import ReachAnswers
from covey.runtime.peers.relays import Relays
from covey.runtime.peers.remote_process import RemoteProcess
from covey.runtime.peers.resting_links import RestingLinks
from covey.runtime.peers.rules import Rules, SecretChanges, secrets_of
from covey.runtime.peers.search import Search
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.base.config import GroupConfig
    from covey.net.keys.clusters import Cluster
    from covey.runtime.links.handshake import Where
    from covey.runtime.links.link import Link
    from covey.runtime.peers.endpoint import Endpoint

PING_SECONDS: Final = 2.0
VISITOR_SECONDS: Final = 20.0
"""A visitor that does not answer for so long has gone."""
CARDS_AT_ONCE: Final = 100
"""Cards in one message: with all their addresses they must fit into a frame."""
TOLD_AGAIN_SECONDS: Final = 30.0
"""A node that repeats the card of another node within this time causes no dial."""
UNUSED: Final = (messages.Ping, messages.Pong, messages.Rest)
"""Messages on a link of which there is no other use."""


class ClusterMesh(LinkMesh):
    """This node and the nodes of the cluster that it is linked with."""

    def __init__(
        self,
        cluster: Cluster,
        config: GroupConfig,
        endpoint: Endpoint,
        listener: MeshListener | None = None,
        links: LinkListener | None = None,
        *,
        purpose: str = "visitor",
        run: str = "",
        announce: bool = True,
    ) -> None:
        """Prepare everything; `open` starts it. Without `announce`, this node finds others but is not found."""
        super().__init__(endpoint, config, listener or MeshListener(), links or LinkListener())
        self.purpose, self.run = purpose, run
        self.rules = Rules(cluster, endpoint.card.name, self._rules_changed, self.spawn)
        self.met: dict[bytes, RemoteProcess] = {}
        """By node id: the nodes that take part in something; for a visitor, every node."""
        self.problems = Problems(cluster.seeds, self.card.contact.host, endpoint.audit, self.listener.refused)
        limits = DialLimits()
        self._admission = Admission(self, self.rules, self.problems, purpose=purpose, run=run, lanes=config.lanes)
        self._relays = Relays(
            cluster,
            self.card.contact.relay,
            endpoint.acceptor,
            found=lambda token: self.follower.found(Hint((), relay=token), Origin.RELAY),
            spawn=self.spawn,
            is_listed=announce,
        )
        admission, problems = self._admission, self.problems
        self._dialer = Dialer(endpoint, config.interfaces, admission, problems, self._linked, self._relays.ways)
        self.dial = self._dialer.dial
        self._links = NodeLinks(
            endpoint,
            self.link_listener,
            self._tasks,
            limits,
            ways=self._ways_to,
            attach=self.attach,
            is_shorter=self.relays.is_shorter,
        )
        self._better_ways = BetterWays(
            self.card,
            self.relays,
            self._dialer,
            self.link_listener,
            self._tasks,
            tells_log=purpose == "candidate",
        )
        self.resting = RestingLinks(
            self.met, self._links, self._dialer, self.link_listener, endpoint, self._tasks, limits, ways=self._ways_to
        )
        self.follower = HintFollower(functools.partial(self.dial, limits=limits), self._is_linked, self.spawn)
        assert endpoint.host_registry is not None
        self.search = Search(
            cluster,
            self.card,
            config.interfaces,
            endpoint.host_registry,
            found=self.follower.found,
            try_seed=self._dial_seed,
            needs_seeds=lambda: not self.met,
            announce=announce,
        )
        self._secret_changes = SecretChanges(self.rules, endpoint, self.search, self.relays, self._tasks)
        self._told = pace.Buckets(1 / TOLD_AGAIN_SECONDS, 1.0)
        self._reach_answers = ReachAnswers(endpoint, config.interfaces, limits, self.spawn)

    @property
    def relays(self) -> Relays:
        """The relays of this node."""
        return self._relays

    @property
    def cluster(self) -> Cluster:
        """What is known of the cluster now."""
        return self.rules.cluster

    @property
    def all_linked(self) -> tuple[RemoteProcess, ...]:
        """Every node that this one is linked with."""
        return (*self.met.values(), *self.visitors)

    @property
    def keepers(self) -> list[RemoteProcess]:
        """The keepers that this node is linked with."""
        return [remote for remote in self.visitors if remote.purpose == "keeper"]

    async def open(self) -> None:
        """Start to listen, to announce this node and to search for others."""
        self.endpoint.acceptor.open()
        self.spawn(self.search.run())
        self.relays.open()
        self.spawn(self._update_addresses())
        self.spawn(self.follower.keep_following())
        self.spawn(self._ping_all())
        self.spawn(self.rules.watch())
        if self.cluster.previous is not None:
            self._secret_changes.apply()

    def report_problems(self) -> dict[str, str]:
        """Return which nodes and addresses this node knows of and is not linked with, and why."""
        return {**self.problems.report(self.all_linked), **self.search.problems, **self.relays.problems}

    def identity_refused(self, error: AuthError) -> None:
        """Note that this node cannot be in the cluster, because another process uses its identity."""
        self.problems.refusals["this node"] = str(error)
        self.listener.identity_refused(error)

    # Finding nodes

    async def _update_addresses(self) -> None:
        """Advertise the addresses that this machine has now: a laptop changes networks."""
        while True:
            await asyncio.sleep(PING_SECONDS)
            with contextlib.suppress(ConfigError, OSError):  # such as no free descriptor: the next try may work
                addresses = advertised(usable_interfaces(self.config.interfaces), self.card.contact.addresses[0].port)
                addresses = (*addresses[: messages.ADDRESSES_LIMIT - 1], *self.endpoint.mapped())
                if addresses and addresses != self.card.contact.addresses:
                    self.card = messages.moved(self.card, addresses)
                    self.follower.moved()
                    for remote in self.all_linked:
                        remote.send(messages.Known((self.card,)))

    async def _dial_seed(self, seed: str, addresses: tuple[messages.Address, ...]) -> None:
        hint = Hint(addresses)
        if not self._is_linked(hint):  # an agent may be there, which is no node of a run
            await self.dial(hint, seed=seed)

    def _ways_to(self, card: messages.Card) -> list[Where]:
        same_host = self._is_on_this_host(card)
        relayed = [] if same_host else self.relays.ways(card.contact.relay)
        return self._dialer.ways(card.contact.addresses, same_host) + relayed

    def _is_linked(self, hint: Hint) -> bool:
        return any(hint.is_of(each.card.contact, self.card.contact.host) for each in self.all_linked)

    def _is_on_this_host(self, card: messages.Card) -> bool:
        return card.contact.host == self.card.contact.host

    def _follow(self, card: messages.Card) -> None:
        """Dial a node, as soon as the follower has room."""
        same_host = self._is_on_this_host(card)
        addresses = card.contact.addresses
        if not same_host:  # loopback addresses would be this host's
            addresses = tuple(address for address in addresses if not has_loopback_ip(address))
        self.follower.found(Hint(addresses, same_host, relay=card.contact.relay), Origin.MEMBER)

    # Links

    def hello(self) -> messages.Hello:
        return self._admission.hello()

    def judge(
        self, hello: messages.Hello, _id: bytes, *, source: str, is_local: bool
    ) -> messages.Welcome | messages.Refusal:
        return self._admission.judge(hello, source=source)

    def incompatible(self, hello: messages.Hello, reason: str, *, source: str) -> None:
        self._admission.incompatible(hello, reason, source=source)

    def came(self, link: Link, hello: messages.Hello) -> None:
        if self._admission.is_this_process(hello.card):
            link.close()
        else:
            self._linked(hello.card, hello.purpose, link, None)

    def may_dial(self, peer: RemoteProcess) -> bool:
        return bool(peer.card.contact.addresses or peer.card.contact.relay)

    def is_linked(self, peer: RemoteProcess) -> bool:
        return peer.id in self.met

    async def redial(self, peer: RemoteProcess, is_wanted: Callable[[], bool]) -> None:
        await self._dialer.redial(peer.card.contact, is_wanted)

    def _linked(self, card: messages.Card, purpose: str, link: Link, way: Where | None) -> None:
        """Take a link whose two ends have accepted each other."""
        if is_guest(purpose, self.purpose):
            self._visited(RemoteProcess(card, purpose), link, way)
            return
        known = self.met.get(card.id)
        if known is not None and known.card.life == card.life:
            known.card = card  # its addresses may have changed
            self._links.add(known, link, way)
            self._better_ways.seek(known)
            return
        if known is not None:
            self.part(known)
        remote = self.listener.recall(card)
        if remote is None:
            remote = RemoteProcess(card, purpose)
        else:
            remote.meet_again(card)
        self.met[card.id] = remote
        self.problems.linked(remote)
        self._links.use(remote, link, way)
        self._tell_acceptor_members()
        if self.met.get(card.id) is not remote:  # the link has ended already
            return
        if purpose != "visitor":
            self.spawn(self._remember(card))
        if self.purpose == "candidate":  # a keeper is linked with the same nodes as its processes
            how = f"relayed by {link.relay}" if link.relay else ""
            self.audit.note_paced("met", card.id, card, address=link.remote_ip, reason=how, once=True)
        self._better_ways.seek(remote)
        self._take_offer(card, link)
        self._introduce_others_to(remote)
        for each in self.all_linked:
            if each is not remote:  # those whose links rest hear it from others, and the node itself dials all
                each.send(messages.Known((card,)), wakes=False)
        remote.ping()
        self.listener.linked(remote)

    def _visited(self, remote: RemoteProcess, link: Link, way: Where | None) -> None:
        """Take a link with a node that takes part in nothing."""
        for each in self.visitors.add(remote):
            self.part(each)
        ip = link.remote_ip
        self.audit.note_paced("visited", ip, remote.card, address=ip, reason=remote.purpose, once=True)
        self._links.use(remote, link, way)
        self._introduce_others_to(remote)
        if remote.purpose == "agent":
            self._take_offer(remote.card, link)
        if remote.purpose == "keeper":
            self.listener.keeper_linked(remote)

    def _take_offer(self, card: messages.Card, link: Link) -> None:
        """Use the relay that the machine of a node offers, if it is another one and linked directly."""
        if not link.relay and card.contact.host != self.card.contact.host:
            self.relays.offered(card.id, link.remote_ip, card.contact.relay_port)

    def is_named_keeper(self, remote: RemoteProcess) -> bool:
        """Tell whether a node is the keeper of this process, or of a linked one."""
        named = (self.card.keeper, *(each.card.keeper for each in self.met.values()))
        return remote.purpose == "keeper" and remote.card.id in named

    def own_keeper(self) -> RemoteProcess | None:
        """Return the keeper of this process, if it is a node that is linked."""
        return next((remote for remote in self.keepers if remote.card.id == self.card.keeper), None)

    def _introduce_others_to(self, remote: RemoteProcess) -> None:
        cards = [each.card for each in self.met.values() if each is not remote]
        for start in range(0, len(cards), CARDS_AT_ONCE):
            remote.send(messages.Known(tuple(cards[start : start + CARDS_AT_ONCE])))

    def _tell_acceptor_members(self) -> None:
        links = (link for remote in self.met.values() for link in remote.links if not link.relay)
        self.endpoint.acceptor.member_ips = {link.remote_ip for link in links}

    async def _remember(self, card: messages.Card) -> None:
        """Write the node's name to disk, so that `covey deny` accepts it."""
        with contextlib.suppress(CoveyError, OSError):  # a secret from the environment has no file
            await aside(clusters.remember, self.cluster.name, card.id, card.name, card.machine)

    def part(self, remote: RemoteProcess, *, at_once: bool = True) -> None:
        """Close the links with a node; unless `at_once`, messages that wait to be sent are sent first."""
        self._links.close(remote, at_once=at_once)
        self.visitors.discard(remote)
        if remote.purpose == "agent" and not any(each.card.id == remote.card.id for each in self.visitors):
            self.relays.withdrawn(remote.card.id)
        if remote.purpose == "visitor":
            self.problems.depart(remote)
            self.follower.forget(lambda hint: self.problems.has_departed(hint.addresses))
        self._tell_acceptor_members()
        if self.met.get(remote.card.id) is remote:
            del self.met[remote.card.id]
            self.relays.withdrawn(remote.card.id)
            self.relays.forget(remote.card.contact.relay)
            if not self.is_closing:
                self.listener.lost(remote)

    def begin_anew(self, excluded: RemoteProcess) -> RemoteProcess:
        """Return the process of a member that was excluded, as one that was never in the run, with the same links."""
        remote = self.met[excluded.id] = RemoteProcess(excluded.card, excluded.purpose)
        self._links.hand_over(excluded, remote)
        return remote

    def cut_off(self, remote: RemoteProcess, link: Link, reason: str) -> None:
        self.problems.refuse(remote.card, f"the link was ended: {reason}", link.remote_ip)

    def ended(self, remote: RemoteProcess, link: Link) -> None:
        if not self._links.remove(remote, link):
            self.part(remote)

    async def _ping_all(self) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            self.relays.tell(self.all_linked)
            for remote in self.all_linked:
                remote.ping()
            for remote in self.visitors:  # a visitor may vanish without closing its link
                if remote.unanswered_seconds() > VISITOR_SECONDS:
                    self.part(remote)

    # Messages

    def note_heard(self, remote: RemoteProcess, link: Link, message: messages.Control) -> None:
        self._links.heard(remote, link)
        if not isinstance(message, UNUSED):
            remote.used_at = time.monotonic()

    def heard(self, remote: RemoteProcess, link: Link, message: messages.Control) -> None:
        match message:
            case messages.Rest(is_agreed):
                self.resting.heard(remote, link, is_agreed=is_agreed)
            case messages.Known(cards):
                for card in cards:
                    if remote.take_addresses(card):
                        self.link_listener.link_changed(remote)
                    is_new = card.id not in self.met and card.id != self.card.id
                    if is_new and self._told.take((remote.card.id, card.life), time.monotonic()):
                        self._follow(card)
            case messages.Ping(number):
                remote.send(messages.Pong(number, time.time()))
            case messages.Pong(number, clock) if number in remote.pings:
                remote.pong(number, clock)
            case messages.Ask():
                self.visitors.asked(remote)
                remote.send(self.describe())
            case messages.Reach():
                self.visitors.asked(remote)
                self._reach_answers.asked(remote, message, self._linked_from(remote.card.id))
            case messages.NewSecret():
                self._secret_changes.receive(remote, message)
            case (
                messages.Tell()
                | messages.Reached()
                | messages.SecretKept()
                | messages.Inspected()
                | messages.CheckpointProgress()
            ):
                remote.answered(message)
            case messages.RelayTrips(trips):
                self.relays.told(remote.card.contact.relay, trips)
            case messages.Charter():
                self.rules.heard(message, remote.card.name)
            case _:
                self.listener.heard(remote, message)

    def describe(self) -> messages.Tell:
        """Return how this node sees its run, what its acceptor has counted, and which charter it follows."""
        tell = self.listener.describe()
        if tell is None:
            peers = tuple(remote.report() for remote in self.met.values())
            tell = messages.Tell(self.run, self.purpose, b"", b"", 0.0, peers)
        acceptor = self.endpoint.acceptor
        serial = self.rules.charter.serial if self.rules.charter is not None else 0
        return messages.counted(tell, acceptor.turned_away, acceptor.arrivals.refused, serial, self.rules.waiting())

    def _linked_from(self, id: bytes) -> set[str]:
        """Return the addresses from which a node's links come."""
        return {
            link.remote_ip for each in self.all_linked if each.card.id == id for link in each.links if not link.relay
        }

    # Which nodes may be in the cluster

    def _rules_changed(self, before: Cluster) -> None:
        """Apply a new secret; pass a new charter on; close links with nodes that may no longer be in the cluster."""
        if secrets_of(self.cluster) != secrets_of(before):
            self._secret_changes.apply()
        linked = self.all_linked
        if (charter := self.rules.charter) is not None and charter != before.charter:
            self.audit.note("charter", reason=f"number {charter.serial}")
            for remote in linked:  # also to a node that the charter denies, so that it learns the reason
                remote.send(charter)
        for remote in linked:
            if reason := self.rules.objection(remote.card):
                self.problems.refuse(remote.card, reason, remote.link.remote_ip if remote.link is not None else "")
                self.part(remote, at_once=False)
                self.listener.expelled(remote, reason)
        for card in self.rules.take_approved():
            if not self.rules.objection(card):
                self._follow(card)
        self.problems.refusals.pop("this node", None)
        if reason := self.rules.objection(self.card):
            self.problems.refusals["this node"] = reason
            name = self.cluster.name
            self.listener.access_lost(AuthError(f"this node may not be in cluster {name!r}: {reason}"))

    async def close(self) -> None:
        """Stop listening and announcing, and close every link. Closing twice is fine."""
        if not self.is_closing:
            self.follower.close()
            self.audit.close()
        await super().close()
