"""Links the ranks of a launcher with each other: at the start, again when a link ends, and with newcomers.

The higher rank of a pair dials until it is answered. The run is formed once every rank has said that it is linked with
every other. On the control loop.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import secrets
import socket
import time
from typing import TYPE_CHECKING, Final

from covey.base.errors import AuthError, ConfigError, ConnectError, CoveyError, DeadlineError
from covey.base.numbers import Seat
from covey.base.pace import Growing
from covey.base.settings import differences_of
from covey.base.text import printable
from covey.runtime.backoff import Backoff
from covey.runtime.joining.node import Node
from covey.runtime.links.acceptor import remote_ip
from covey.runtime.links.address_race import dial_any
from covey.runtime.links.handshake import SILENCE, Greeter, HungUpError, RefusedError, admit
from covey.runtime.peers.rank_visitors import RankVisitors
from covey.runtime.peers.remote_process import PeerEvent, RemoteProcess
from covey.wire import messages
from covey.wire.versions import OURS, common, objection

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from covey.base.config import GroupConfig
    from covey.runtime.environment import LaunchedRank
    from covey.runtime.links.handshake import Where
    from covey.runtime.links.link import Link
    from covey.runtime.peers.endpoint import Endpoint
    from covey.runtime.peers.launched_relays import LaunchedRelays
    from covey.runtime.peers.peer_table import Inbox, PeerTable
    from covey.runtime.state.checkpoints import Checkpoints
    from covey.runtime.state.store import Stores
    from covey.runtime.tasks import Tasks
    from covey.runtime.views.views import Views
    from covey.wire.membership import Record

logger = logging.getLogger("covey")

HANG_UPS: Final = 5
"""Times in a row that the other end hangs up before a rank concludes that its own key is wrong: an end that dies also
hangs up, but once."""
HANG_UP_SECONDS: Final = 1.0
"""And for how long: while all ranks dial rank 0 at once, it hangs up on some."""
REDIAL_SECONDS: Final = 1.5
"""How long one dial of a rank may take before the next: TCP repeats a lost first packet later than that."""
DIAL_PAUSES: Final = Growing(0.005, 0.1, 1.5)
REDIAL_PAUSES: Final = Growing(0.02, 0.5, 1.5)
ANEW_PAUSES: Final = Growing(0.1, 1.0)
"""Between dials of a rank: at the start of the run, after its link ended, and while nothing is heard on its link."""
RELAY_SECONDS: Final = 2.5
"""How much longer a dial may take that tries relays after the addresses: a relay needs more round trips."""


class LauncherMesh:
    """The links of one rank with the others."""

    may_rest = False

    def __init__(self, launched: LaunchedRank, size: int, config: GroupConfig, endpoint: Endpoint) -> None:
        """Prepare what this rank says and whom it accepts, in a run of `size` ranks; `serve` gives it the run."""
        self._run, self._size, self._keeper_path = launched.name, size, launched.keeper
        self._config, self._endpoint = config, endpoint
        self._card, self._credentials, self._audit = endpoint.card, endpoint.credentials, endpoint.audit
        self._acceptor, self._objection = endpoint.acceptor, endpoint.objection
        self._formed: asyncio.Future[None] | None = None
        self._complaint: CoveyError | None = None
        self._refusal = ""
        self._reasons: dict[Seat, str] = {}
        """By rank: why it could not be dialled the last time."""
        self._relays: LaunchedRelays | None = None

    def serve(
        self,
        peers: PeerTable,
        views: Views,
        inbox: Inbox,
        *,
        tasks: Tasks,
        stores: Stores,
        checkpoints: Checkpoints,
        routes: Callable[[RemoteProcess], list[Where]],
    ) -> None:
        """Link the processes of this run from now on; `routes` returns where to dial one. On any thread."""
        self._peers, self._views, self._inbox = peers, views, inbox
        self._tasks, self._stores, self._checkpoints, self._routes = tasks, stores, checkpoints, routes
        self._tells_roster = peers.seat == 0 and any(peer.contact is None for peer in peers.values())
        """Ranks of one host know each other's sockets from the start."""
        self._visitors = RankVisitors(checkpoints)
        inbox.give(messages.Ready, lambda seat, _: self._ready(seat))
        inbox.give(messages.Roster, lambda seat, roster: self._told_roster(seat, roster.contacts))
        inbox.give(messages.Failing, lambda seat, failing: self._heard_failure(seat, failing.reason))
        cluster = self._endpoint.cluster
        if cluster is not None and cluster.relays:  # for ranks that cannot connect
            from covey.runtime.peers.launched_relays import LaunchedRelays

            self._relays = LaunchedRelays(cluster, self._card, self._acceptor, peers, tasks)
            inbox.give(messages.RelayTrips, self._relays.heard)

    async def form(self, *, within: float) -> None:
        """Return once every rank is linked with every other and knows it.

        Raises:
            DeadlineError: some ranks were not linked in time; says which.
            ConfigError: another rank has different settings.
        """
        self._formed = asyncio.get_running_loop().create_future()
        self._open_relays()
        self._acceptor.give_links(self._accept)
        self._acceptor.open()
        self._meet_keeper()
        for peer in self._peers.values():
            if peer.is_dialled and peer.contact is not None:
                self._tasks.spawn(self._dial(peer))
        self._tasks.spawn(self._log_missing())
        try:
            async with asyncio.timeout(within):
                await self._formed
        except TimeoutError:
            missing = ", ".join(map(str, self._missing()))
            strangers = self._acceptor.about_strangers()
            raise DeadlineError(
                f"rank {self._peers.seat} of {self._size} waited in {self._run} for rank {missing} until the timeout "
                f"of {within:g} s ended. "
                f"Is it running, and with the same job id, address, or MASTER_ADDR and MASTER_PORT?{self._refusal}"
                + self._last_reason()
                + (f" Here {strangers}." if strangers else "")
                + self._rendezvous_clause(),
                late=tuple(self._missing()),
            ) from None
        await self._views.await_keeper()

    def enter(self, founded: messages.Founded, record: Record | None = None) -> None:
        """Take this process's seat in a generation of a run in progress, with the links that its members have."""
        self._open_relays()
        for peer in self._peers.values():
            self._seat_member(peer)
        self._acceptor.give_links(self._accept)
        self._meet_keeper()
        self._views.enter(founded, record)

    def _open_relays(self) -> None:
        if self._relays is not None:
            self._relays.open()

    def _meet_keeper(self) -> None:
        if self._keeper_path:
            self._views.meet_keeper(self._keeper_path, self._credentials, self._checkpoints)

    def _seat_member(self, peer: RemoteProcess) -> None:
        """Take a member of the generation that this process is about to enter, with its link, if there is one."""
        peer.note(PeerEvent.READY)
        if (link := peer.link) is not None and link.is_open:
            peer.link = None
            self._linked(peer, link, peer.card)
        else:
            peer.unlink()
            if peer.is_dialled:
                self._tasks.spawn(self._redial(peer))

    # The run is formed

    def _missing(self) -> list[Seat]:
        return [peer.seat for peer in self._peers.values() if not peer.is_ready]

    async def _log_missing(self) -> None:
        for pause in (5.0, *(30.0,) * 1000):
            await asyncio.sleep(pause)
            if self._formed is None or self._formed.done():
                return
            logger.warning("rank %d of %d waits for rank %s of %s.%s", self._peers.seat, self._size,
                           ", ".join(map(str, self._missing())), self._run,
                           self._last_reason() + self._rendezvous_clause())  # fmt: skip

    def _last_reason(self) -> str:
        """Return a clause about the last dial of a missing rank; empty if this rank dials none of them."""
        for seat in self._missing():
            if reason := self._reasons.get(seat, ""):
                return f" The last dial of rank {seat} failed: {reason}."
        return ""

    def _rendezvous_clause(self) -> str:
        """Return a sentence about the folder in which the ranks meet, if they do that in a folder."""
        if self._credentials.tls is not None or any(peer.contact is None for peer in self._peers.values()):
            return ""
        from covey.net.discovery.host_rendezvous import about_rendezvous  # only needed when ranks do not meet

        return f" {about_rendezvous(self._card.contact.socket)}".rstrip()

    def _ready(self, seat: Seat) -> None:
        """Take from a rank that it is linked with every rank."""
        self._peers[seat].note(PeerEvent.READY)
        self._settle()

    def _settle(self) -> None:
        """Take the next possible step towards the formed run."""
        if self._formed is None or self._formed.done():
            return
        if self._complaint is not None:
            self._formed.set_exception(self._complaint)
            return
        linked = all(peer.link is not None or peer.is_ready for peer in self._peers.values())
        if linked:
            self._tell_ready()
        if linked and not self._missing():
            try:
                speaks = common((OURS, *(peer.versions for peer in self._peers.values())))
            except ValueError as error:
                self._complain(ConfigError(str(error)))
                return
            self._formed.set_result(None)
            self._views.begin(speaks)

    def _tell_ready(self) -> None:
        """Tell every peer, once on each link, that this rank is linked with every rank."""
        for peer in self._peers.values():
            if peer.link is not None and peer.link is not peer.told:
                peer.told = peer.link
                if self._tells_roster:
                    self._peers.send(peer.seat, self._roster())
                self._peers.send(peer.seat, messages.Ready())

    def _roster(self) -> messages.Roster:
        contacts = [self._card.contact, *(self._peers[Seat(rank)].contact for rank in range(1, self._size))]
        return messages.Roster(tuple(contact for contact in contacts if contact is not None))

    def _told_roster(self, seat: Seat, contacts: tuple[messages.Contact, ...]) -> None:
        """Take from rank 0 where the other ranks listen, and dial those that this rank has to dial."""
        if seat != 0 or len(contacts) != self._size:
            return
        for peer in self._peers.values():
            if peer.contact is None:
                peer.listens_at(contacts[peer.seat])
                if peer.is_dialled:
                    self._tasks.spawn(self._dial(peer))

    async def _dial(self, peer: RemoteProcess) -> None:
        """Dial a rank until it is linked or `form` has ended; an error that no retry can mend makes `form` raise."""
        hang_ups, hung_up_at = 0, 0.0
        tries = Backoff(f"rank {peer.seat}", DIAL_PAUSES, level=logging.DEBUG)  # `_log_missing` tells
        while peer.link is None and not peer.is_ready and not self._tasks.is_closing:
            try:
                link, welcome, where = await self._call(peer)
            except HungUpError as error:
                tries.failed(error)
                hang_ups += 1
                hung_up_at = hung_up_at or time.monotonic()
                if hang_ups >= HANG_UPS and time.monotonic() - hung_up_at > HANG_UP_SECONDS:
                    self._complain(AuthError(str(error)))
                    return
            except (ConnectError, TimeoutError) as error:
                tries.failed(str(error) or SILENCE)
                hang_ups, hung_up_at = 0, 0.0  # not there yet
            except RefusedError as error:
                tries.failed(error)
                self._refusal = f" Rank {peer.seat} says: {printable(str(error))}."
                if not error.retry:
                    self._complain(ConfigError(f"rank {peer.seat} refused this rank: {printable(str(error))}"))
                    return
            except CoveyError as error:
                self._complain(error)
                return
            else:
                if problem := self._wrong_peer(peer, welcome):
                    link.abort()
                    self._complain(AuthError(problem))
                    return
                self._reached(peer, link, welcome, where)
                return
            self._reasons[peer.seat] = tries.reason
            await tries.rest()

    def _dial_seconds(self, peer: RemoteProcess) -> float:
        """Return how long one dial of a rank may take before the next."""
        is_relayed = peer.contact is not None and self.ways(peer.contact.relay)
        return REDIAL_SECONDS + (RELAY_SECONDS if is_relayed else 0.0)

    async def _call(self, peer: RemoteProcess) -> tuple[Link, messages.Welcome, Where]:
        link, welcome, _, where = await dial_any(self._routes(peer), self._credentials, self._hello())
        return link, welcome, where

    def _wrong_peer(self, peer: RemoteProcess, welcome: messages.Welcome) -> str:
        """Return why the process that answered is not the one that was dialled, or is denied; "" if it is right."""
        if welcome.rank != peer.seat:  # something on the way led to another process
            return f"rank {welcome.rank} answered where rank {peer.seat} was dialled"
        objection = self._objection(welcome.card)
        return f"rank {peer.seat} was refused: {objection}" if objection else ""

    def _complain(self, error: CoveyError) -> None:
        """Make `form` raise, here and on the ranks that are linked: the run cannot form with what is wrong."""
        if self._complaint is None and isinstance(error, ConfigError) and not self._is_formed:
            for peer in self._peers.values():
                if peer.link is not None:
                    self._peers.send(peer.seat, messages.Failing(str(error)))
        self._complaint = self._complaint or error
        self._settle()

    def _heard_failure(self, seat: Seat, reason: str) -> None:
        """Take from a rank that the run cannot form."""
        if not self._is_formed:
            self._complain(ConfigError(f"rank {seat} gave up: {printable(reason)}"))

    @property
    def _is_formed(self) -> bool:
        return self._formed is not None and self._formed.done()

    async def _redial(self, peer: RemoteProcess) -> None:
        """Link again with a process: a connection can end although both ends live.

        A process that a view has excluded is dialled too, so that it learns of the view.
        """
        tries = self._redials(peer, REDIAL_PAUSES, within=2 * self._config.patience)
        while peer.link is None and not (peer.has_left or self._tasks.is_closing or tries.is_over):
            try:
                async with asyncio.timeout(self._dial_seconds(peer)):
                    link, welcome, where = await self._call(peer)
                if messages.key_of(welcome.card) != (peer.id, peer.life):
                    link.abort()
                    return  # started anew: it comes by itself, as a newcomer
                self._reached(peer, link, welcome, where)
                return
            except (ConnectError, TimeoutError, RefusedError, AuthError) as error:
                tries.failed(str(error) or SILENCE)
            await tries.rest()

    async def _dial_anew(self, peer: RemoteProcess, silent: Link) -> None:
        """Link with a process anew while nothing is heard on its link, in case only the path of that link is dead."""
        tries = self._redials(peer, ANEW_PAUSES)
        while peer.link is silent and self._views.losses.is_unheard(peer.seat) and not self._tasks.is_closing:
            try:
                async with asyncio.timeout(self._dial_seconds(peer)):
                    link, welcome, where = await self._call(peer)
                if messages.key_of(welcome.card) != (peer.id, peer.life) or peer.link is not silent:
                    link.abort()
                    return
                self._reached(peer, link, welcome, where)
                return
            except (ConnectError, TimeoutError, RefusedError, AuthError) as error:
                tries.failed(str(error) or SILENCE)
            await tries.rest()

    def _redials(self, peer: RemoteProcess, pauses: Growing, within: float = math.inf) -> Backoff:
        """Return the pace at which a lost rank is dialled. The events tell of a rank that is not heard."""
        tries = Backoff(f"a link with rank {peer.seat}", pauses, within=within, level=logging.INFO)
        tries.begin()
        return tries

    def _reached(self, peer: RemoteProcess, link: Link, welcome: messages.Welcome, where: Where) -> None:
        """Use the link with a process that has answered at `where`."""
        if not isinstance(where, str):
            peer.way = where
        self._linked(peer, link, welcome.card)

    async def _accept(self, sock: socket.socket, said: bytes) -> None:
        """Take a connection that has passed the door: another rank, a newcomer, or a command of this user."""
        is_local, ip = sock.family == socket.AF_UNIX, remote_ip(sock)
        greeter = Greeter(
            self._card,
            functools.partial(self._judge, source=ip, is_local=is_local),
            functools.partial(self._audit.refused_key, ip),
            functools.partial(self._incompatible, source=ip),
        )
        admitted = await admit(sock, self._credentials, said, greeter)
        if admitted is not None:
            link, hello, _ = admitted
            if hello.purpose == "visitor":
                self._visitors.add(link)
            elif hello.purpose == "newcomer":
                newcomer = RemoteProcess(hello.card, hello.purpose)
                newcomer.use(link)
                self._attach(newcomer, link)
                self._views.newcomers.add(newcomer)
            else:
                self._linked(self._peers[Seat(hello.rank)], link, hello.card)

    def _linked(self, peer: RemoteProcess, link: Link, card: messages.Card) -> None:
        """Use a new link with another process."""
        before = peer.link
        peer.use(link)
        if before is not None:
            before.abort()  # its other end has given it up
        peer.card = card
        peer.versions = link.there.versions
        self._acceptor.member_ips.add(link.remote_ip)
        self._attach(peer, link)
        if peer.is_ready:
            self._views.relinked(peer)
        self._settle()

    def _attach(self, process: RemoteProcess, link: Link) -> None:
        """Take what comes over a link with a member, or with a process that waits for a seat."""
        link.attach(
            functools.partial(self._heard, process),
            functools.partial(self._link_ended, process, link),
            lambda: self._stores.link_has_room(process.seat),
        )

    def _heard(self, peer: RemoteProcess, body: bytes) -> None:
        """Take a frame that came over the link with a process; one without a seat may know of its seat before."""
        if peer.seat < 0:
            peer.keep_early(messages.decode_control(body))
            return
        self._views.losses.noticed(peer.seat)
        self._inbox.heard(peer.seat, messages.decode_control(body))

    def _link_ended(self, peer: RemoteProcess, link: Link) -> None:
        if peer.seat < 0:
            self._views.newcomers.remove(peer)
            return
        if isinstance(link.error, CoveyError):
            name = self._peers.name_of(peer.seat)
            logger.warning("the link with %s was ended: %s", name, printable(str(link.error)))
        if peer.link is link:
            self._views.losses.link_ended(peer.seat)

    # What the run asks for

    def link_ended(self, peer: RemoteProcess) -> None:
        """Link again with a process whose link has ended, if this end dials."""
        if peer.is_dialled and not peer.is_ready:
            self._tasks.spawn(self._dial(peer))
        elif peer.is_dialled and not peer.has_left and self._views.generation is not None:
            self._tasks.spawn(self._redial(peer))

    def unheard(self, peer: RemoteProcess) -> None:
        """Dial a process that is not heard on its link, in case only the path of that link is dead."""
        if peer.link is not None and peer.is_dialled:
            self._tasks.spawn(self._dial_anew(peer, peer.link))

    def part(self, peer: RemoteProcess, link: Link) -> None:
        """End the link with a process that is given up."""
        link.abort()

    def find(self, card: messages.Card) -> RemoteProcess | None:
        """Return None: the link of each newcomer is known."""
        return None

    def founded(self, founded: messages.Founded) -> None:
        """Do nothing: the ranks of a launcher know each other."""

    def run_ended(self, lineage: bytes, *, is_finished: bool) -> None:
        """Do nothing: the keeper knows."""

    def ways(self, token: bytes) -> list[Where]:
        """Return the ways through relays to the rank that has a token."""
        return [] if self._relays is None else self._relays.ways(token)

    def round_trip(self, way: Where) -> float | None:
        """Return the round trip of a way through a relay, if it is known."""
        return None if self._relays is None else self._relays.round_trip(way)

    async def close(self) -> None:
        """End the links with commands and with newcomers; the node ends those with other ranks."""
        self._visitors.close()
        for newcomer in self._views.newcomers:
            if newcomer.link is not None:
                newcomer.link.abort()

    def _judge(
        self, hello: messages.Hello, _id: bytes, *, source: str = "", is_local: bool = True
    ) -> messages.Welcome | messages.Refusal:
        answer = self._answer(hello, is_local=is_local)
        if isinstance(answer, messages.Refusal) and not answer.retry:  # else it is too early, and it comes again
            self._audit.refused(source, answer.reason, hello.card)
        return answer

    def _incompatible(self, hello: messages.Hello, reason: str, *, source: str) -> None:
        """Note that a process was refused because it speaks no version that this one speaks."""
        self._audit.refused(source, reason, hello.card)
        if hello.purpose == "rank" and hello.run == self._run:
            self._complain(ConfigError(f"rank {hello.rank} cannot join: {reason}"))

    def _answer(self, hello: messages.Hello, *, is_local: bool) -> messages.Welcome | messages.Refusal:
        if objection := self._objection(hello.card):
            return messages.Refusal(objection, retry=False)
        if hello.purpose == "newcomer" and hello.run == self._run:
            return self._judge_newcomer(hello)
        if hello.purpose == "visitor" and is_local:
            return messages.Welcome(self._peers.seat, self._card)
        if hello.purpose != "rank":
            return messages.Refusal(f"{self._run} was started by a launcher, which gives out the ranks", retry=False)
        known = self._peers.get(Seat(hello.rank))
        is_known = known is not None and (known.id, known.life) == messages.key_of(hello.card)
        if known is not None and known.is_ready and is_known:
            return messages.Welcome(self._peers.seat, self._card)  # its last link has ended, here or there
        for what, here, there in (
            ("run", self._run, hello.run),
            ("size", self._size, hello.size),
            ("lanes", self._config.lanes, hello.lanes),
            ("on_loss", self._config.on_loss, hello.on_loss),
            *differences_of(self._config.agreed(), hello.settings),
        ):
            if here != there:
                reason = f"{what} is {there!r} on rank {hello.rank} and {here!r} on rank {self._peers.seat}"
                self._complain(ConfigError(f"{reason}; start all ranks with the same settings"))
                return messages.Refusal(reason, retry=False)
        peer = self._peers.get(Seat(hello.rank))
        if peer is None or peer.is_dialled:
            return messages.Refusal(
                f"rank {hello.rank} must not dial rank {self._peers.seat}; the higher rank of a pair dials", retry=False
            )
        if peer.link is not None or peer.is_ready:
            return messages.Refusal(f"rank {hello.rank} is already here (process {peer.card.pid})", retry=True)
        return messages.Welcome(self._peers.seat, self._card)

    def _hello(self) -> messages.Hello:
        """Return what this rank says first on a link that it dials."""
        return messages.Hello(
            version=messages.VERSION,
            nonce=secrets.token_bytes(32),
            purpose="rank",
            run=self._run,
            rank=self._peers.seat,
            size=self._size,
            lanes=self._config.lanes,
            card=self._card,
            on_loss=self._config.on_loss,
            settings=self._config.agreed(),
        )

    def _judge_newcomer(self, hello: messages.Hello) -> messages.Welcome | messages.Refusal:
        if self._views.generation is None:
            return messages.Refusal("the run has not begun", retry=True)
        fixed = messages.speaker_of(self._card, self._views.speaks.fixed())
        if reason := objection(fixed, messages.speaker_of(hello.card, hello.versions, hello.version)):
            return messages.Refusal(f"the run speaks what all its members do: {reason}", retry=False)
        config = self._config
        for what, here, there in (
            ("lanes", config.lanes, hello.lanes),
            ("on_loss", config.on_loss, hello.on_loss),
            *differences_of(config.agreed(), hello.settings),
        ):
            if here != there:
                return messages.Refusal(f"{what} is {there!r} there and {here!r} in the run", retry=False)
        key = messages.key_of(hello.card)
        if any((peer.id, peer.life) == key and not peer.is_gone for peer in self._peers.values()):
            return messages.Refusal("you are a member", retry=True)
        return messages.Welcome(self._peers.seat, self._card)


def launched_node(
    launched: LaunchedRank,
    config: GroupConfig,
    endpoint: Endpoint,
    peers: Mapping[Seat, RemoteProcess],
    *,
    seat: Seat | None = None,
) -> tuple[Node, LauncherMesh]:
    """Return the node of a rank of a launcher, and the mesh that links it; `seat` is its rank unless it is given."""
    size = 1 + len(peers)
    mesh = LauncherMesh(launched, size, config, endpoint)
    node = Node(
        seat=Seat(launched.rank) if seat is None else seat,
        size=size,
        run=launched.name,
        config=config,
        credentials=endpoint.credentials,
        card=endpoint.card,
        acceptor=endpoint.acceptor,
        audit=endpoint.audit,
        cluster=endpoint.cluster_tag,
        peers=peers,
        links=mesh,
        closes=(mesh,),
        on_close=endpoint.on_close,
    )
    mesh.serve(
        node.peers,
        node.views,
        node.inbox,
        tasks=node.tasks,
        stores=node.stores,
        checkpoints=node.checkpoints,
        routes=node.routes.to,
    )
    return node, mesh
