"""Nodes of a cluster that look for each other and stay in touch. On the control loop.

A node is somebody after TLS has proved its key and its Hello was welcomed. Between two nodes one link remains, whoever
dialled it; that one also dials their lanes, because it is known to reach the other.

A plain `Mesh` is a visitor: it meets everyone who is there, asks and answers, and takes part in nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any, Final

from covey.base import pace
from covey.base.errors import AuthError, ConfigError, CoveyError
from covey.base.text import printable
from covey.net.descriptors import is_exhausted
from covey.net.discovery.interfaces import (
    advertised,
    describe,
    is_loopback,
    recent_interfaces,
    to_dial,
    usable_interfaces,
)
from covey.net.keys import clusters, rotation
from covey.net.keys.identity import LIFE_BYTES, short_id
from covey.runtime.links.acceptor import remote_ip
from covey.runtime.links.dial_limits import DialLimits
from covey.runtime.links.handshake import (
    HungUpError,
    RefusedError,
    ScarceError,
    admit,
    dial_any,
    spell,
)
from covey.runtime.links.link import HANDSHAKE_SECONDS
from covey.runtime.links.probe import best_way
from covey.runtime.log_limiter import LimitedLog
from covey.runtime.loop import aside
from covey.runtime.mesh.follower import Follower, Outcome
from covey.runtime.mesh.hints import Hint, Origin
from covey.runtime.mesh.reach import Reaching
from covey.runtime.mesh.remote_node import RemoteNode
from covey.runtime.mesh.rules import Rules
from covey.runtime.mesh.search import Search
from covey.runtime.mesh.visitors import Visitors
from covey.wire import messages

if TYPE_CHECKING:
    import socket

    from covey.base.config import GroupConfig
    from covey.net.keys.clusters import Cluster
    from covey.runtime.links.handshake import Where
    from covey.runtime.links.link import Link
    from covey.runtime.mesh.endpoint import Endpoint

logger = logging.getLogger("covey")

PING_SECONDS: Final = 2.0
STILL_THERE_SECONDS: Final = 1.0
"""How long an old life of a node has to answer, when a new one comes."""
TOLD_SECONDS: Final = 10.0
"""The log tells at most this often of nodes that were refused."""
VISITOR_SECONDS: Final = 20.0
"""A visitor that does not answer for so long has gone."""
RETIRE_SECONDS: Final = 2.0
"""How long a link that is not used any more is listened to."""
LINKS_LIMIT: Final = 4
"""Links with one node at a time; further ones are closed at once."""
PINGS_LIMIT: Final = 100
PROBLEMS_LIMIT: Final = 64
"""Nodes that were refused, and addresses that were not reached, of which the last are remembered."""
DEPARTED_LIMIT: Final = 256
"""Places of visitors that have left, of which the last are remembered."""
CARDS_AT_ONCE: Final = 100
"""Cards in one message: with all their addresses they must fit into a frame."""
NEAR_SECONDS: Final = 2.0
"""How soon what was announced on a network has to answer there; TCP repeats a lost first packet after one."""
TOLD_AGAIN_SECONDS: Final = 30.0
"""What the same member tells of the same node within this time is no news."""


class Mesh:
    """One node's side of meeting the others of its cluster."""

    purpose = "visitor"
    run = ""

    def __init__(self, cluster: Cluster, config: GroupConfig, endpoint: Endpoint, *, announce: bool = True) -> None:
        """Take a seat. Without `announce`, the others are found but do not find us."""
        self.config, self.endpoint = config, endpoint
        self.card, self.audit = endpoint.card, endpoint.audit
        self.rules = Rules(cluster, endpoint.card.name, self._rules_changed, self.spawn)
        self.met: dict[bytes, RemoteNode] = {}
        """By node id: those who take part in something; to a visitor, everyone."""
        self.refusals: dict[str, str] = {}
        """Nodes that were refused, and why."""
        self._log = LimitedLog(TOLD_SECONDS)
        self._failures: dict[str, tuple[str, tuple[messages.Address, ...]]] = {}
        """What came of dialling seeds and hints: why, and where."""
        self.hung_up: dict[str, float] = {}
        """Seeds that hang up on us at the door, and since when."""
        self._follower = Follower(self._dial_hint, self._is_met, self.spawn)
        assert endpoint.host_registry is not None
        self.search = Search(
            cluster,
            self.card,
            config.interfaces,
            endpoint.host_registry,
            found=self._follower.found,
            try_seed=self._dial_seed,
            needs_seeds=lambda: not self.met,
            announce=announce,
        )
        self._visitors = Visitors(self._is_named_keeper)
        """Those who take part in nothing: other visitors, and keepers."""
        self._departed: dict[tuple[str, int], None] = {}
        """Where visitors listened that have left: that nothing answers there is no problem."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._allowance = DialLimits()
        self._news = pace.Buckets(1 / TOLD_AGAIN_SECONDS, 1.0)
        self._reaching = Reaching(endpoint, config.interfaces, self._allowance, self.spawn)
        self.is_closing = False
        endpoint.acceptor.on_link = self._greet

    @property
    def cluster(self) -> Cluster:
        """What is known of the cluster now."""
        return self.rules.cluster

    async def open(self) -> None:
        """Start to listen, to announce and to look around."""
        self.endpoint.acceptor.open()
        self.spawn(self.search.run())
        self.spawn(self._keep_addresses_true())
        self.spawn(self._follower.keep_following())
        self.spawn(self._ping_everyone())
        self.spawn(self.rules.watch())
        if self.cluster.previous is not None:
            self._follow_secret()

    # What else a node may do with those it meets

    def met_someone(self, remote: RemoteNode) -> None:
        """There is a first link with someone."""

    def lost_someone(self, remote: RemoteNode) -> None:
        """The last link with someone has ended."""

    def switched(self, remote: RemoteNode) -> None:
        """Another link with someone is in use, or a better way was found."""

    def exchanged(self, remote: RemoteNode) -> None:
        """Another link with someone is in use, because nothing was heard on the last one."""

    def may_switch(self, remote: RemoteNode) -> bool:
        """Tell whether the link with someone may be exchanged for another now: what is on its way may be lost."""
        return True

    def heard(self, remote: RemoteNode, message: messages.Control) -> None:
        """Someone said something that a visitor has no use for."""

    def noticed(self, remote: RemoteNode) -> None:
        """Someone said something, whatever it was."""

    def met_keeper(self, remote: RemoteNode) -> None:
        """There is a link with somebody who speaks for processes of its own; it takes part in no run."""

    def turned_out(self, remote: RemoteNode, reason: str) -> None:
        """The links with someone have ended because it may not be in the cluster any more."""

    def turned_down(self, error: AuthError) -> None:
        """This node cannot be in the cluster."""
        self.refusals["this node"] = str(error)

    def cast_out(self, error: AuthError) -> None:
        """This node may not be in the cluster any more, or not yet."""

    def tell(self) -> messages.Tell:
        """Return how this node sees its run."""
        return messages.Tell(self.run, self.purpose, b"", b"", 0.0, tuple(map(self.peer_report, self.met.values())))

    # Looking

    async def _keep_addresses_true(self) -> None:
        """Tell others by which addresses we can be reached now: a laptop changes networks."""
        while True:
            await asyncio.sleep(PING_SECONDS)
            with contextlib.suppress(ConfigError, OSError):  # out of descriptors, say: the next look may work
                addresses = advertised(usable_interfaces(self.config.interfaces), self.card.contact.addresses[0].port)
                if addresses and addresses != self.card.contact.addresses:
                    self.card = messages.moved(self.card, addresses)
                    self._follower.moved()

    async def _dial_seed(self, seed: str, addresses: tuple[messages.Address, ...]) -> None:
        await self._dial(addresses, seed=seed)

    def _is_met(self, hint: Hint) -> bool:
        places = {(address.ip, address.port) for address in hint.addresses}
        return any(places & self._places_of(each, hint.same_host) for each in (*self.met.values(), *self._visitors))

    def _places_of(self, remote: RemoteNode, same_host: bool) -> set[tuple[str, int]]:
        contact = remote.card.contact
        if not same_host:
            return {(address.ip, address.port) for address in contact.addresses}
        is_here = contact.host == self.card.contact.host
        return {("127.0.0.1", address.port) for address in contact.addresses if is_here}

    async def _dial_hint(self, hint: Hint) -> Outcome:
        return await self._dial(
            hint.addresses, same_host=hint.same_host, interface=hint.interface, allowance=self._allowance
        )

    async def _dial(
        self,
        addresses: tuple[messages.Address, ...],
        *,
        same_host: bool = False,
        seed: str = "",
        interface: str = "",
        allowance: DialLimits | None = None,
    ) -> Outcome:
        """Try to make a link with the node at these addresses, by one interface or by any."""
        where = seed or ", ".join(spell((address.ip, address.port)) for address in addresses)
        try:
            is_here = same_host or any(_is_loopback(address.ip) for address in addresses)
            ways = self._ways(addresses, is_here, interface)
            within = NEAR_SECONDS if interface else HANDSHAKE_SECONDS
            link, welcome, _, way = await dial_any(ways, self.endpoint.credentials, self._hello(), allowance, within)
        except HungUpError as error:
            self._failed(where, str(error), addresses)
            self.audit.note_paced("rejected", where, address=where, reason=f"secret: {error}")
            if seed:
                self.hung_up.setdefault(seed, time.monotonic())
            return Outcome.NOBODY
        except (RefusedError, CoveyError, OSError) as error:
            self.hung_up.pop(seed, None)
            said = "says" if isinstance(error, RefusedError) else "cannot be reached"
            text = str(error) if isinstance(error, AuthError) else f"{said}: {error}"
            self._failed(where, printable(text), addresses)
            if isinstance(error, RefusedError | AuthError):
                self.audit.note_paced("rejected", where, address=where, reason=text)
            return Outcome.SCARCE if isinstance(error, ScarceError) or is_exhausted(error) else Outcome.NOBODY
        self.hung_up.pop(seed, None)
        self._failures.pop(where, None)
        if welcome.card.id == self.card.id and welcome.card.life == self.card.life:
            link.abort()
            return Outcome.OURSELVES
        self._heard_charter(welcome)
        if self._objection(welcome.card, link.remote_ip):
            link.abort()
            return Outcome.NOBODY
        self._meet(welcome.card, welcome.purpose, link, way)
        return Outcome.MET

    def _ways(self, addresses: tuple[messages.Address, ...], same_host: bool, interface: str) -> list[Where]:
        """Return what to dial; what was heard on one interface, by that one only."""
        if interface and is_loopback(interface):
            return [(address.ip, address.port) for address in addresses]
        own = recent_interfaces(self.config.interfaces)
        return list(to_dial([each for each in own if interface in ("", each.name)], addresses, same_host))

    def _hello(self) -> messages.Hello:
        return messages.Hello(
            version=messages.VERSION,
            nonce=secrets.token_bytes(32),
            purpose=self.purpose,
            run=self.run,
            rank=-1,
            size=0,
            lanes=self.config.lanes,
            card=self.card,
            charter=self.rules.charter,
        )

    # Meeting

    async def _greet(self, sock: socket.socket, said: bytes) -> None:
        judge = functools.partial(self._judge, source=remote_ip(sock))
        admitted = await admit(sock, self.endpoint.credentials, said, judge)
        if admitted is not None:
            link, hello, _ = admitted
            if messages.key_of(hello.card) == messages.key_of(self.card):
                link.close()
            else:
                self._meet(hello.card, hello.purpose, link, None)

    def _judge(self, hello: messages.Hello, _id: bytes, *, source: str) -> messages.Welcome | messages.Refusal:
        if hello.version != messages.VERSION:
            reason = f"it speaks version {hello.version} of covey's protocol, and we speak {messages.VERSION}"
            self._note_refusal(hello.card, reason, source)
            return messages.Refusal(f"you speak version {hello.version}, and we {messages.VERSION}", retry=False)
        if hello.card.id == self.card.id and hello.card.life == self.card.life:
            return messages.Welcome(-1, self.card, self.purpose)  # ourselves: the dialler notices
        self._heard_charter(hello)
        if reason := self._objection(hello.card, source):
            return messages.Refusal(reason, retry=False)
        if hello.purpose == "rank":
            return messages.Refusal("nodes agree on their ranks here; a launcher has no say", retry=False)
        return messages.Welcome(-1, self.card, self.purpose, self.rules.charter)

    def _objection(self, card: messages.Card, source: str) -> str:
        """Return why we want nothing to do with a node that holds the secret, or nothing; `source` is its address."""
        if reason := self.rules.objection(card):
            pass
        elif not card.contact.addresses or len(card.life) != LIFE_BYTES:
            reason = "the card is not filled in"
        elif card.id == self.card.id:
            reason = self._same_identity(card)
        elif (old := self.met.get(card.id)) is not None and old.card.life != card.life:
            unanswered = min(old.pings.values(), default=time.monotonic())
            if card.life > old.card.life and time.monotonic() - unanswered > STILL_THERE_SECONDS:
                self.part(old)  # it does not answer any more: the newer life has taken its place
            else:
                self._ping(old)
                reason = _in_use(old.card)
        if reason:
            self._note_refusal(card, reason, source)
        return reason

    def _same_identity(self, card: messages.Card) -> str:
        """Two living nodes have one key: a copied folder. The one that came later has to go."""
        if card.life < self.card.life:
            self.turned_down(AuthError(
                f"this node's identity is in use by process {card.pid} on {card.host_name} "
                f"({card.contact.addresses[0].ip}). Was the configuration folder copied from there? Remove the "
                "`identities` folder in this copy, and a new identity is made."
            ))  # fmt: skip
        return _in_use(card if card.life < self.card.life else self.card)

    def _failed(self, where: str, reason: str, addresses: tuple[messages.Address, ...]) -> None:
        self._failures.pop(where, None)
        if where not in self.cluster.seeds and self._was_a_visitors(addresses):
            return
        self._failures[where] = reason, addresses
        if len(self._failures) > PROBLEMS_LIMIT:
            del self._failures[next(iter(self._failures))]

    def problems(self) -> dict[str, str]:
        """Return whom we heard of and are not linked with, and why."""
        failures = {
            where: reason
            for where, (reason, addresses) in self._failures.items()
            if not any(self._is_at(addresses, remote) for remote in (*self.met.values(), *self._visitors))
        }
        return {**self.refusals, **failures, **self.search.problems}

    def _note_departure(self, visitor: RemoteNode) -> None:
        """Look for a visitor no more that has left, and do not report that nothing answers where it listened."""
        for place in self._places_of(visitor, True) | self._places_of(visitor, False):
            self._departed.pop(place, None)
            self._departed[place] = None
        while len(self._departed) > DEPARTED_LIMIT:
            del self._departed[next(iter(self._departed))]
        self._follower.forget(lambda hint: self._was_a_visitors(hint.addresses))
        for where, (_, addresses) in list(self._failures.items()):
            if where not in self.cluster.seeds and self._was_a_visitors(addresses):
                del self._failures[where]

    def _was_a_visitors(self, addresses: tuple[messages.Address, ...]) -> bool:
        return any((each.ip, each.port) in self._departed for each in addresses)  # they are one node's

    def _is_at(self, addresses: tuple[messages.Address, ...], remote: RemoteNode) -> bool:
        places = {(address.ip, address.port) for address in addresses}
        return bool(places & (self._places_of(remote, True) | self._places_of(remote, False)))

    def _note_refusal(self, card: messages.Card, reason: str, source: str) -> None:
        name = _spell_card(card)
        self.audit.refused(source, reason, card)
        is_news = self.refusals.get(name) != reason
        self.refusals[name] = reason
        if len(self.refusals) > PROBLEMS_LIMIT:
            del self.refusals[next(iter(self.refusals))]
        if is_news:
            self._log.log(logging.WARNING, "%s was refused: %s", name, reason)

    def _meet(self, card: messages.Card, purpose: str, link: Link, way: Where | None) -> None:
        """A link stands."""
        if purpose == "keeper" or (purpose == "visitor" and self.purpose != "visitor"):
            remote = RemoteNode(card, purpose)
            for each in self._visitors.add(remote):
                self.part(each)
            self.audit.note_paced("visited", link.remote_ip, card, address=link.remote_ip, reason=purpose, once=True)
            self._use(remote, link, way)
            self._introduce_others_to(remote)
            if purpose == "keeper":
                self.met_keeper(remote)
            return
        known = self.met.get(card.id)
        if known is not None and known.card.life == card.life:
            self._choose(known, card, link, way)
            return
        if known is not None:
            self.part(known)
        remote = self.met[card.id] = RemoteNode(card, purpose)
        for place in self._places_of(remote, True) | self._places_of(remote, False):
            self._departed.pop(place, None)
        self.refusals.pop(_spell_card(card), None)
        self._use(remote, link, way)
        self._know_members()
        if self.met.get(card.id) is not remote:  # it went as quickly as it came
            return
        if purpose != "visitor":
            self.spawn(self._remember(card))
        if self.purpose == "candidate":  # a keeper meets the same nodes as its processes
            self.audit.note_paced("met", card.id, card, address=link.remote_ip, once=True)
        self._introduce_others_to(remote)
        for each in (*self.met.values(), *self._visitors):
            if each is not remote:
                each.send(messages.Known((card,)))
        self._ping(remote)
        self.met_someone(remote)

    @property
    def keepers(self) -> list[RemoteNode]:
        """Those we are linked with who speak for processes of their own."""
        return [remote for remote in self._visitors if remote.purpose == "keeper"]

    def _is_named_keeper(self, remote: RemoteNode) -> bool:
        """Tell whether someone is the keeper of this process, or of one that we met."""
        named = (self.card.keeper, *(each.card.keeper for each in self.met.values()))
        return remote.purpose == "keeper" and remote.card.id in named

    def _introduce_others_to(self, remote: RemoteNode) -> None:
        cards = [each.card for each in self.met.values() if each is not remote]
        for start in range(0, len(cards), CARDS_AT_ONCE):
            remote.send(messages.Known(tuple(cards[start : start + CARDS_AT_ONCE])))

    def _know_members(self) -> None:
        links = (link for remote in self.met.values() for link in remote.links)
        self.endpoint.acceptor.member_ips = {link.remote_ip for link in links}

    async def _remember(self, card: messages.Card) -> None:
        """Write down whom we met, so that people can name them in `covey deny`."""
        with contextlib.suppress(CoveyError, OSError):  # a secret from the environment belongs to no file
            await aside(clusters.remember, self.cluster.name, card.id, card.name, card.machine)

    def _choose(self, remote: RemoteNode, card: messages.Card, link: Link, way: Where | None) -> None:
        """There is a second link to someone. Nothing changes while a run is decided on: messages could overtake.

        But a link on which nothing is heard is given up at once: its path may be dead, and the new one is not.
        """
        remote.card = card  # it may have moved, and is known by its addresses
        if remote.is_silent():
            self._exchange(remote, link, way)
        elif self.card.id > remote.card.id:
            self._listen_to(remote, link, way)  # and answer there when it speaks there
        elif way is not None and not remote.is_dialled and self.may_switch(remote):
            old = list(remote.links)
            self._use(remote, link, way)
            self._ping(remote)  # it answers there from now on
            for each in old:
                self._retire(each)
        elif len(remote.links) < LINKS_LIMIT:
            remote.links = {link: way, **remote.links}
            self._attach(remote, link)
            self._retire(link)
        else:
            link.close()

    def _exchange(self, remote: RemoteNode, link: Link, way: Where | None) -> None:
        """Use another link instead of one that fell silent. What was said there may never arrive."""
        silent, remote.links = list(remote.links), {}
        remote.heard_at = time.monotonic()
        self._use(remote, link, way)
        self._ping(remote)
        for each in silent:
            asyncio.get_running_loop().call_later(RETIRE_SECONDS, each.abort)
        self.exchanged(remote)

    def _retire(self, link: Link) -> None:
        """Close a link when nothing can be on its way any more: the other side hears on another one which is in use."""
        asyncio.get_running_loop().call_later(RETIRE_SECONDS, link.close)

    def _use(self, remote: RemoteNode, link: Link, way: Where | None) -> None:
        remote.links[link] = way
        remote.link = link
        self._listen_to(remote, link, way)

    def _listen_to(self, remote: RemoteNode, link: Link, way: Where | None) -> None:
        idle = [each for each in remote.links if each is not remote.link]
        for each in idle[: max(0, len(remote.links) + 1 - LINKS_LIMIT)]:
            del remote.links[each]
            each.abort()
        remote.links[link] = way
        remote.is_measuring = remote.is_measuring or way is not None
        self.switched(remote)
        self._attach(remote, link)
        if way is not None:
            self.spawn(self._find_best_way(remote, way))

    def _attach(self, remote: RemoteNode, link: Link) -> None:
        link.attach(functools.partial(self._heard_frame, remote, link), functools.partial(self._ended, remote, link))

    def part(self, remote: RemoteNode, *, at_once: bool = True) -> None:
        """Let go of someone, and hear nothing more of it; unless `at_once`, what was said to it is sent first."""
        links, remote.links, remote.link = list(remote.links), {}, None
        for link in links:
            if not at_once:
                link.close()
                asyncio.get_running_loop().call_later(RETIRE_SECONDS, link.abort)
            else:
                link.abort()
        self._visitors.discard(remote)
        if remote.purpose == "visitor":
            self._note_departure(remote)
        self._know_members()
        if self.met.get(remote.card.id) is remote:
            del self.met[remote.card.id]
            if not self.is_closing:
                self.lost_someone(remote)

    def _ended(self, remote: RemoteNode, link: Link) -> None:
        if link not in remote.links:
            return
        if isinstance(link.error, CoveyError):
            reason = f"it sent nonsense: {printable(str(link.error))}"
            self._note_refusal(remote.card, reason, link.remote_ip)
        del remote.links[link]
        if not remote.links:
            self.part(remote)
        elif remote.link is link:
            remote.link = next(reversed(remote.links))
            self.switched(remote)

    async def _find_best_way(self, remote: RemoteNode, known: Where) -> None:
        """Measure every way to a node that we dial, and take the shortest for lanes."""
        contact = remote.card.contact
        try:
            ways = self._ways(contact.addresses, contact.host == self.card.contact.host, "")
            way, round_trip = await best_way(ways, self.endpoint.credentials, known, self._allowance)
            if way is not None:
                remote.way, remote.round_trip = way, round_trip
        except (ConfigError, OSError) as error:  # the way that is known works
            logger.info("the ways to %s could not be compared: %s", remote.card.name, error)
        finally:
            remote.is_measuring = False
        self.switched(remote)

    # What is said on links

    def _heard_frame(self, remote: RemoteNode, link: Link, body: bytes) -> None:
        message = messages.decode_control(body)
        if link is remote.link:
            remote.heard_at = time.monotonic()
        self.noticed(remote)
        if link is not remote.link and link in remote.links and self.card.id > remote.card.id:
            remote.link = link
            self.switched(remote)
        match message:
            case messages.Known(cards):
                for card in cards:
                    if card.id not in self.met and card.id != self.card.id:
                        self._heard_of(card, remote)
            case messages.Ping(number):
                remote.send(messages.Pong(number, time.time()))
            case messages.Pong(number, clock) if number in remote.pings:
                taken = time.monotonic() - remote.pings[number]
                remote.pings.clear()
                remote.clock_offset = clock + taken / 2 - time.time()
                if remote.round_trip < 0 or not remote.is_dialled:
                    remote.round_trip = taken if remote.round_trip < 0 else min(taken, remote.round_trip)
            case messages.Ask():
                self._visitors.asked(remote)
                remote.send(self._with_counts(self.tell()))
            case messages.Reach():
                self._visitors.asked(remote)
                self._reaching.asked(remote, message, self._linked_from(remote.card.id))
            case messages.NewSecret():
                if not remote.is_changing_secret:  # one at a time: each is written to disk
                    remote.is_changing_secret = True
                    self.spawn(self._answer_new_secret(remote, message))
            case messages.Tell() | messages.Reached() | messages.SecretKept():
                remote.answered(message)
            case messages.Charter():
                self.rules.heard(message, remote.card.name)
            case _:
                self.heard(remote, message)

    def _heard_of(self, card: messages.Card, teller: RemoteNode) -> None:
        """A member says that it is linked with another node."""
        if self._news.take((teller.card.id, card.life), time.monotonic()):
            self._follow(card)

    def _follow(self, card: messages.Card) -> None:
        """Dial a node, as soon as it may be."""
        same_host = card.contact.host == self.card.contact.host
        addresses = card.contact.addresses
        if not same_host:  # loopback would be ours
            addresses = tuple(address for address in addresses if not _is_loopback(address.ip))
        self._follower.found(Hint(addresses, same_host), Origin.MEMBER)

    async def _ping_everyone(self) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            for remote in (*self.met.values(), *self._visitors):
                self._ping(remote)
            for remote in list(self._visitors):  # they may vanish without a word
                if time.monotonic() - min(remote.pings.values(), default=time.monotonic()) > VISITOR_SECONDS:
                    self.part(remote)

    def _ping(self, remote: RemoteNode) -> None:
        if len(remote.pings) < PINGS_LIMIT:
            number = secrets.randbits(32)
            remote.pings[number] = time.monotonic()
            remote.send(messages.Ping(number))

    def peer_report(self, remote: RemoteNode, lane: str = "") -> messages.PeerReport:
        """Return how someone is reached; `lane` is the kind of lane to it."""
        link = remote.link
        assert link is not None
        there = spell(remote.way) if remote.way is not None else link.address
        return messages.PeerReport(
            card=remote.card,
            rank=remote.rank,
            lane=lane,
            local=link.local_ip,
            remote=there,
            interface=describe(link.local_ip),
            round_trip=remote.round_trip,
            clock_offset=remote.clock_offset,
        )

    def _with_counts(self, tell: messages.Tell) -> messages.Tell:
        """Add what this node's door has seen, and which charter it goes by."""
        acceptor = self.endpoint.acceptor
        serial = self.rules.charter.serial if self.rules.charter is not None else 0
        return messages.counted(tell, acceptor.turned_away, acceptor.arrivals.refused, serial, self.rules.waiting())

    def _linked_from(self, id: bytes) -> set[str]:
        """Return the addresses from which a node's links come."""
        of_key = (each for each in (*self.met.values(), *self._visitors) if each.card.id == id)
        return {link.remote_ip for each in of_key for link in each.links}

    async def _answer_new_secret(self, remote: RemoteNode, message: messages.NewSecret) -> None:
        problem = ""
        try:
            kept = await aside(rotation.keep, self.cluster, self.card.id, message)
            self.rules.saved(kept)
        except (CoveyError, OSError) as error:
            problem = str(error)
            self._log.log(logging.WARNING, "a new secret from %s was refused: %s", remote.card.name, problem)
        else:
            logger.warning("the secret of cluster %r was changed by its owner", self.cluster.name)
        finally:
            remote.is_changing_secret = False
        reason = f"not kept: {problem}" if problem else "kept"
        address = remote.link.remote_ip if remote.link is not None else ""
        self.audit.note_paced("secret-received", remote.card.id, remote.card, address=address, reason=reason)
        remote.send(messages.SecretKept(problem))

    # Which nodes may be here

    def _heard_charter(self, greeting: messages.Hello | messages.Welcome) -> None:
        if greeting.charter is not None:
            self.rules.heard(greeting.charter, greeting.card.name)

    def _rules_changed(self, before: Cluster) -> None:
        """Follow a new secret; pass a new charter on, and part with nodes that may not be here any more."""
        if _secrets(self.cluster) != _secrets(before):
            self._follow_secret()
        everyone = (*self.met.values(), *self._visitors)
        if (charter := self.rules.charter) is not None and charter != before.charter:
            self.audit.note("charter", reason=f"number {charter.serial}")
            for remote in everyone:  # also a node that is denied by it: it should know why
                remote.send(charter)
        for remote in everyone:
            if reason := self.rules.objection(remote.card):
                self._note_refusal(remote.card, reason, remote.link.remote_ip if remote.link is not None else "")
                self.part(remote, at_once=False)
                self.turned_out(remote, reason)
        for card in self.rules.take_approved():
            if not self.rules.objection(card):
                self._follow(card)
        self.refusals.pop("this node", None)
        if reason := self.rules.objection(self.card):
            self.refusals["this node"] = reason
            self.cast_out(AuthError(f"this node may not be in cluster {self.cluster.name!r}: {reason}"))

    def _follow_secret(self) -> None:
        """Use the cluster's secret as it is now for new connections; those that stand go on."""
        self.endpoint.follow(self.cluster)
        try:
            self.search.follow(self.cluster)
        except CoveyError as error:
            logger.warning("nodes of this host that hold the new secret of the cluster are not found: %s", error)
        left = self.cluster.previous_until - time.time()
        if self.cluster.earlier(time.time()) is not None:
            self.spawn(self._forget_earlier_secret(left))

    async def _forget_earlier_secret(self, left: float) -> None:
        await asyncio.sleep(left)
        self._follow_secret()

    # The end

    def spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of the gathering failed", exc_info=error)

    async def close(self) -> None:
        """Leave: stop listening and announcing, and close every link."""
        if self.is_closing:
            return
        self.is_closing = True
        self._follower.close()
        self.audit.close()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.endpoint.acceptor.close()
        links = [link for remote in (*self.met.values(), *self._visitors) for link in remote.links]
        for link in links:
            link.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.gather(*(link.ended.wait() for link in links))
        for link in links:
            link.abort()


def _secrets(cluster: Cluster) -> tuple[object, ...]:
    return cluster.secret, cluster.previous, cluster.previous_until


def _is_loopback(ip: str) -> bool:
    return ip.startswith("127.") or ip == "::1"


def _spell_card(card: messages.Card) -> str:
    return f"{card.name} ({card.contact.addresses[0].ip if card.contact.addresses else '?'})"


def _in_use(card: messages.Card) -> str:
    where = card.contact.addresses[0].ip if card.contact.addresses else "?"
    return f"identity {short_id(card.id)} is in use by process {card.pid} on {card.host_name} ({where})"
