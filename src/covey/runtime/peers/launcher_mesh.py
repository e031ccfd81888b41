"""The mesh of a launcher's run: its members are given. On the control loop.

Nothing is searched for: a launcher says how many ranks there are and where to dial them, or rank 0 does. Two processes
have one link, and the one with the larger seat dials it, so of two links the later one is used. A process without a
seat dials all members; of two that wait, the one with the larger rank dials.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from typing import TYPE_CHECKING, Final, Protocol

from covey.base.errors import AuthError, ConfigError, ConnectError
from covey.base.numbers import Seat
from covey.base.pace import Growing
from covey.base.settings import differences_of
from covey.runtime.backoff import Backoff
from covey.runtime.links.address_race import attempt_seconds, first_of, keep_dialling
from covey.runtime.links.handshake import NO_ANSWER, RefusedError, dial
from covey.runtime.peers.mesh import COMMANDS_LIMIT, LinkListener, LinkMesh, MeshListener
from covey.runtime.peers.peer_table import Routes
from covey.runtime.peers.remote_process import RemoteProcess
from covey.wire import messages
from covey.wire.relay import TOKEN_BYTES
from covey.wire.versions import objection

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.base.config import GroupConfig
    from covey.base.errors import CoveyError
    from covey.net.keys.clusters import Cluster
    from covey.runtime.environment import LaunchedRank
    from covey.runtime.links.handshake import Where
    from covey.runtime.links.link import Link
    from covey.runtime.peers.endpoint import Endpoint
    from covey.runtime.peers.peer_table import PeerTable
    from covey.runtime.peers.relays import Relays
    from covey.wire.versions import Agreement

logger = logging.getLogger("covey")

REDIAL_PAUSES: Final = Growing(0.02, 1.0, 1.5)
"""Between dials of a rank whose link has ended, or on whose link nothing is heard."""
TELL_RELAYS_SECONDS: Final = 2.0
"""How often other ranks are told how far the relays are, if that has changed."""


def first_token(cluster: Cluster, run: str) -> bytes:
    """Return the token of rank 0 at relays: the only rank that others must find there without being told."""
    return cluster.secret.derive(f"relayed-launch/{run}")[:TOKEN_BYTES]


class GivenRun(Protocol):
    """What the mesh asks of the run whose members it links."""

    def speaks(self) -> Agreement | None:
        """Return what all members of the run speak; None before it is formed."""

    def cannot_form(self, error: CoveyError) -> None:
        """Take that a rank was refused which no retry can mend."""


class LauncherMesh(LinkMesh):
    """The links of one rank: with the given members, with processes that wait for a seat, and with commands."""

    def __init__(
        self, launched: LaunchedRank, config: GroupConfig, endpoint: Endpoint, listener: MeshListener | None = None
    ) -> None:
        """Prepare everything; `open` starts it. This process waits for a seat until `seat` gives it one."""
        super().__init__(endpoint, config, listener or MeshListener(), LinkListener(), visitors=COMMANDS_LIMIT)
        self.run, self._rank, self._size = launched.name, launched.rank, launched.size
        self._objection = endpoint.objection
        self.members: PeerTable | None = None
        """The other members, by seat; None while this process waits for a seat."""
        self._given: GivenRun | None = None
        self.met: dict[tuple[bytes, bytes], RemoteProcess] = {}
        """By id and life: linked processes without a seat, as far as this one knows."""
        self._restarted: set[RemoteProcess] = set()
        """Members at whose address another process answers, or refuses this one for good: they come by themselves."""
        self._routes = Routes(self.card, config.interfaces, endpoint.credentials, self)
        self._relays = self._make_relays()

    def _make_relays(self) -> Relays | None:
        cluster = self.endpoint.cluster
        if cluster is None or not cluster.relays:
            return None
        from covey.runtime.peers.relays import Relays  # for ranks that cannot connect

        # Ranks are dialled by number, so the tokens that a relay names are of no use: rank 0's all ranks derive, and
        # its roster has the others.
        return Relays(
            cluster,
            self.card.contact.relay,
            self.endpoint.acceptor,
            found=lambda _token: None,
            spawn=self.spawn,
            is_listed=False,
        )

    def seat(self, members: PeerTable, listener: MeshListener, links: LinkListener, run: GivenRun) -> None:
        """From now on, this process has a seat beside these members. On any thread, if this mesh is not open yet."""
        self.members, self._size, self._given = members, 1 + len(members), run
        self.listener, self.link_listener = listener, links

    def open(self) -> None:
        """Start to listen, and to register with relays."""
        self.endpoint.acceptor.open()
        if self._relays is not None and not self.is_closing:
            self._relays.open()
            self.spawn(self._keep_telling())

    async def _keep_telling(self) -> None:
        while self._relays is not None:
            self._relays.tell(self.all_linked)
            await asyncio.sleep(TELL_RELAYS_SECONDS)

    @property
    def relays(self) -> Relays | None:
        return self._relays

    @property
    def all_linked(self) -> tuple[RemoteProcess, ...]:
        members = () if self.members is None else self.members.values()
        return (*(peer for peer in members if peer.link is not None), *self.met.values(), *self.visitors)

    # Dialling

    def may_dial(self, peer: RemoteProcess) -> bool:
        """Tell whether this end of a pair dials; the other end of it comes by itself."""
        return peer.is_dialled and not peer.has_left

    def is_linked(self, peer: RemoteProcess) -> bool:
        return peer.link is not None

    async def dial(self, peer: RemoteProcess) -> None:
        """Dial a member once, and take the link.

        Raises:
            What `first_of` and `dial` raise; an AuthError, too, if another process answers, or one that is denied.
        """
        (link, welcome, _), where = await first_of(
            self._routes.to(peer),
            lambda where: dial(where, self.endpoint.credentials, self.hello()),
            lambda opened: opened[0].abort(),
        )
        if peer.is_ready and messages.key_of(welcome.card) != peer.key:
            self._restarted.add(peer)
        if problem := self._wrong_peer(peer, welcome):
            link.abort()
            raise AuthError(problem)
        if not isinstance(where, str):
            peer.way = where
        self._use(peer, link, welcome.card, where)

    def _wrong_peer(self, peer: RemoteProcess, welcome: messages.Welcome) -> str:
        """Return why the process that answered is not the one that was dialled, or is denied; "" if it is right."""
        if welcome.rank != peer.seat:  # something on the way led to another process
            return f"rank {welcome.rank} answered where rank {peer.seat} was dialled"
        if peer in self._restarted:
            return f"rank {peer.seat} was started anew"
        objection = self._objection(welcome.card)
        return f"rank {peer.seat} was refused: {objection}" if objection else ""

    async def redial(self, peer: RemoteProcess, is_wanted: Callable[[], bool]) -> None:
        """Dial a member by all its addresses, with growing pauses, while `is_wanted()`."""
        tries = Backoff(f"a link with rank {peer.seat}", REDIAL_PAUSES, level=logging.INFO)  # the events tell of it
        attempt = functools.partial(self._attempt, peer)
        await keep_dialling(attempt, lambda: is_wanted() and peer not in self._restarted, tries)

    async def _attempt(self, peer: RemoteProcess) -> str:
        is_relayed = peer.contact is not None and bool(self.ways(peer.contact.relay))
        try:
            async with asyncio.timeout(attempt_seconds(is_relayed=is_relayed)):
                await self.dial(peer)
        except RefusedError as error:
            if not error.retry:
                self._restarted.add(peer)
            return str(error)
        except (ConnectError, TimeoutError, AuthError) as error:
            return str(error) or NO_ANSWER
        return ""

    async def meet(self, path: str, rank: int) -> RemoteProcess | None:
        """Dial the process that has a rank, while this one waits for a seat; None if that process is to dial.

        Raises:
            What `dial` of `runtime.links.handshake` raises.
        """
        link, welcome, _ = await dial(path, self.endpoint.credentials, self.hello())
        is_newcomer = welcome.purpose == "newcomer"
        if is_newcomer and rank > self._rank:
            link.close()
            return None
        remote = self._met(welcome.card, "newcomer" if is_newcomer else "rank")
        if remote.link is not None and remote.link.is_open:
            link.close()
        else:
            self._use(remote, link, welcome.card, path)
        return remote

    # Links

    def came(self, link: Link, hello: messages.Hello) -> None:
        if hello.purpose == "visitor":
            visitor = RemoteProcess(hello.card, hello.purpose)
            for each in self.visitors.add(visitor):
                self.part(each)
            self._use(visitor, link, hello.card, None)
        elif hello.purpose == "newcomer" or self.members is None:
            self._use(self._met(hello.card, hello.purpose), link, hello.card, None)
        elif (peer := self.members.get(Seat(hello.rank))) is None or peer.is_dialled:
            link.abort()  # this process got its seat, or dialled, since it judged the Hello
        else:
            self._use(peer, link, hello.card, None)

    def _met(self, card: messages.Card, purpose: str) -> RemoteProcess:
        """Return the process without a seat that a card is of."""
        remote = self.met.setdefault(messages.key_of(card), RemoteProcess(card))
        remote.purpose = purpose
        return remote

    def _use(self, remote: RemoteProcess, link: Link, card: messages.Card, way: Where | None) -> None:
        """Use a link with a process from now on; `way` is what this process dialled, if it did."""
        before = remote.unlink()
        remote.links[link] = way
        remote.use(link)
        remote.card, remote.versions, remote.heard_at = card, link.there.versions, time.monotonic()
        for each in before:
            each.abort()  # its other end has given it up
        self.attach(remote, link)
        if remote.purpose != "visitor":
            self.endpoint.acceptor.member_ips.add(link.remote_ip)
            if before:
                self.link_listener.link_replaced(remote)
            self.listener.linked(remote)

    def part(self, remote: RemoteProcess) -> None:
        if remote.link is not None:
            remote.link.abort()

    def note_heard(self, remote: RemoteProcess, link: Link, message: messages.Control) -> None:
        if link is remote.link:
            remote.heard_at = time.monotonic()

    def heard(self, remote: RemoteProcess, link: Link, message: messages.Control) -> None:
        if remote.purpose == "visitor":
            return
        if isinstance(message, messages.RelayTrips) and self._relays is not None and remote.contact is not None:
            self._relays.told(remote.contact.relay, message.trips)
        else:
            self.listener.heard(remote, message)

    def cut_off(self, remote: RemoteProcess, link: Link, reason: str) -> None:
        name = "a process without a seat"
        if self.members is not None and remote.seat >= 0:
            name = self.members.name_of(remote.seat)
        logger.warning("the link with %s was ended: %s", name, reason)

    def ended(self, remote: RemoteProcess, link: Link) -> None:
        self.visitors.discard(remote)
        if self.met.get(remote.key) is remote:
            del self.met[remote.key]
        remote.unlink()
        if remote.purpose != "visitor":
            self.listener.lost(remote)

    # Which processes get a link

    def hello(self) -> messages.Hello:
        waits = self.members is None
        return messages.Hello(
            version=messages.VERSION,
            nonce=secrets.token_bytes(32),
            purpose="newcomer" if waits else "rank",
            run=self.run,
            rank=self._rank if self.members is None else self.members.seat,
            size=self._size,
            lanes=self.config.lanes,
            card=self.card,
            on_loss=self.config.on_loss,
            settings=self.config.agreed(),
        )

    def judge(
        self, hello: messages.Hello, _id: bytes, *, source: str, is_local: bool
    ) -> messages.Welcome | messages.Refusal:
        answer = self._answer(hello, is_local=is_local)
        if isinstance(answer, messages.Refusal) and not answer.retry:  # else it is too early, and it comes again
            self.audit.refused(source, answer.reason, hello.card)
        return answer

    def incompatible(self, hello: messages.Hello, reason: str, *, source: str) -> None:
        self.audit.refused(source, reason, hello.card)
        if hello.purpose == "rank" and hello.run == self.run and self._given is not None:
            self._given.cannot_form(ConfigError(f"rank {hello.rank} cannot join: {reason}"))

    def _answer(self, hello: messages.Hello, *, is_local: bool) -> messages.Welcome | messages.Refusal:
        if objection := self._objection(hello.card):
            return messages.Refusal(objection, retry=False)
        is_newcomer = hello.purpose == "newcomer" and hello.run == self.run
        if self.members is None or self._given is None:
            if is_newcomer:
                return messages.Welcome(-1, self.card, "newcomer")
            return messages.Refusal("this process waits for a seat in the run", retry=True)
        if is_newcomer:
            return self._answer_newcomer(hello, self.members, self._given)
        if hello.purpose == "visitor" and is_local:
            return messages.Welcome(self.members.seat, self.card)
        if hello.purpose != "rank":
            return messages.Refusal(f"{self.run} was started by a launcher, which gives out the ranks", retry=False)
        return self._answer_rank(hello, self.members, self._given)

    def _answer_rank(
        self, hello: messages.Hello, members: PeerTable, run: GivenRun
    ) -> messages.Welcome | messages.Refusal:
        known = members.get(Seat(hello.rank))
        if known is not None and known.is_ready and known.key == messages.key_of(hello.card) and not known.is_dialled:
            return messages.Welcome(members.seat, self.card)  # its last link has ended, here or there
        own = (("run", self.run, hello.run), ("size", self._size, hello.size))
        for what, here, there in (*own, *self._differences(hello)):
            if here != there:
                reason = f"{what} is {there!r} on rank {hello.rank} and {here!r} on rank {members.seat}"
                run.cannot_form(ConfigError(f"{reason}; start all ranks with the same settings"))
                return messages.Refusal(reason, retry=False)
        if known is None or known.is_dialled:
            return messages.Refusal(
                f"rank {hello.rank} must not dial rank {members.seat}; the higher rank of a pair dials", retry=False
            )
        if known.link is not None or known.is_ready:
            return messages.Refusal(f"rank {hello.rank} is already here (process {known.card.pid})", retry=True)
        return messages.Welcome(members.seat, self.card)

    def _answer_newcomer(
        self, hello: messages.Hello, members: PeerTable, run: GivenRun
    ) -> messages.Welcome | messages.Refusal:
        speaks = run.speaks()
        if speaks is None:
            return messages.Refusal("the run has not begun", retry=True)
        fixed = messages.speaker_of(self.card, speaks.fixed())
        if reason := objection(fixed, messages.speaker_of(hello.card, hello.versions, hello.version)):
            return messages.Refusal(f"the run speaks what all its members do: {reason}", retry=False)
        for what, here, there in self._differences(hello):
            if here != there:
                return messages.Refusal(f"{what} is {there!r} there and {here!r} in the run", retry=False)
        key = messages.key_of(hello.card)
        if any(peer.key == key and not peer.is_gone for peer in members.values()):
            return messages.Refusal("you are a member", retry=True)
        return messages.Welcome(members.seat, self.card)

    def _differences(self, hello: messages.Hello) -> tuple[tuple[str, object, object], ...]:
        """Return the settings that all members must share: their names, the values here, and those of a Hello."""
        config = self.config
        return (
            ("lanes", config.lanes, hello.lanes),
            ("on_loss", config.on_loss, hello.on_loss),
            *differences_of(config.agreed(), hello.settings),
        )
