"""A candidate of a run: agrees with the others it meets on who is in it, and hands the links to its node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from typing import TYPE_CHECKING, Final

from covey.base.errors import AuthError, ConfigError, DeadlineError
from covey.proto.formation import Formation
from covey.runtime.gathering import Gathering
from covey.runtime.link import printable
from covey.runtime.records import Records
from covey.runtime.voter import Voter
from covey.wire import formation as forming
from covey.wire import messages

if TYPE_CHECKING:
    from collections.abc import Mapping

    from covey.base.config import GroupConfig
    from covey.net.clusters import Cluster
    from covey.proto.formation import Formed
    from covey.runtime.acquaintance import Acquaintance
    from covey.runtime.node import Node
    from covey.runtime.peers import Peer
    from covey.runtime.seat import Seat

logger = logging.getLogger("covey")

FIRST_WORD_SECONDS: Final = 3.0
"""After this much waiting, say what is waited for."""
REMINDER_SECONDS: Final = 30.0
WRONG_KEY_SECONDS: Final = 4.0
"""After this much hanging up by all seeds, believe that the secret is wrong."""
RUNNING_LOOK_SECONDS: Final = 2.0
"""How often the folder of this host is looked at, once the run is going on."""
REDIAL_SECONDS: Final = 1.5
"""How long dialling a member again may take before it is tried anew."""
EARLY_LIMIT_BYTES: Final = 1 << 20
"""Messages for a run that this node has not finished forming."""
MESSAGE_BYTES: Final = 500
"""What a message takes in memory besides its contents."""


class Candidate(Gathering):
    """A node that wants to be in a run."""

    purpose = "candidate"

    def __init__(
        self, cluster: Cluster, config: GroupConfig, seat: Seat, terms: forming.Terms, *, is_elastic: bool = False
    ) -> None:
        """Who `is_elastic` waits outside of a run that goes on without it for as long as the run does."""
        super().__init__(cluster, config, seat)
        self.run = terms.run
        self._is_elastic = is_elastic
        self._founded: asyncio.Future[messages.Founded] = asyncio.get_running_loop().create_future()
        self.records = Records(cluster.name, terms.run, self.card.id)
        bound = self.records.read()
        self._voter: Voter | None = None
        if bound is not None and any(member.id == self.card.id for member in bound.record.members):
            self._voter = Voter(bound, self.card.id, self.card.life, self.records, self._send_to)
        me = forming.Member(self.card.id, self.card.life, self.card.name, self.card.contact.host, b"")
        self._since = time.monotonic()
        self._core = Formation(me, terms, random.Random(secrets.randbits(64)), self._since)
        self._formed: asyncio.Future[Formed] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Event()
        self._node: Node | None = None

    # What the gathering tells

    def met_someone(self, someone: Acquaintance) -> None:
        if not self._core.link_up(someone.card.id, someone.card.life, time.monotonic()):
            self.part(someone)  # a life that has ended
        self._pump()
        if self._voter is not None:
            self._voter.link_up(someone.card.id, someone.card.life)
        if self._node is not None:
            self._recognise(self._node, someone)

    def _recognise(self, node: Node, someone: Acquaintance) -> None:
        """Someone may have been in the run before: it is back; or it can only vote, and hear what was decided.

        That is a member without which the others went on, or a later life of one.
        """
        for seat, peer in node.peers.items():
            if peer.id != someone.card.id:
                continue
            if peer.life == someone.card.life and not peer.excluded:
                someone.rank = seat
                self.switched(someone)
                node.relinked(peer)
            else:
                someone.votes_for = seat
                node.voter_up(seat, someone.card.life, someone.send)

    async def _find_again(self, node: Node, someone: Acquaintance) -> None:
        """Link again with a member whose links have ended; if the others went on without it, it should hear so."""
        peer, contact = node.peers[someone.rank], someone.card.contact
        until, pause = time.monotonic() + 2 * self.config.patience, 0.05
        while not (peer.left or node.is_closing) and time.monotonic() < until:
            if someone.card.id in self.met:
                return
            with contextlib.suppress(TimeoutError):  # a lost first packet is repeated by a new dial sooner than by TCP
                async with asyncio.timeout(REDIAL_SECONDS):
                    await self._dial(contact.addresses, same_host=contact.host == self.card.contact.host)
            await asyncio.sleep(pause)
            pause = min(1.0, 1.5 * pause)

    def _send_to(self, id: bytes, message: messages.Control) -> None:
        someone = self.met.get(id)
        if someone is not None:
            someone.send(message)

    def lost_someone(self, someone: Acquaintance) -> None:
        for name, reason in self._core.report().refused:  # they may not have heard, and come to ask us
            if name == someone.card.name:
                self.refusals[name] = f"{reason} (it has left)"
        self._core.link_down(someone.card.id, time.monotonic())
        self._pump()
        if self._voter is not None:
            self._voter.link_down(someone.card.id)
        if self._node is not None and someone.votes_for >= 0:
            self._node.voter_down(someone.votes_for)
        if self._node is not None and someone.rank >= 0:
            self._node.lost(someone.rank)
            self.spawn(self._find_again(self._node, someone))

    def may_switch(self, someone: Acquaintance) -> bool:
        return someone.rank < 0 and not self._core.is_deciding

    def switched(self, someone: Acquaintance) -> None:
        if self._node is not None and someone.rank >= 0:
            _tell_how_to_reach(self._node.peers[someone.rank], someone)
            generation = self._node.generation
            if generation is not None and generation.number:  # a link may have ended with this news on it
                someone.send(generation.founded)

    def heard(self, someone: Acquaintance, message: messages.Control) -> None:
        if isinstance(message, messages.Forming):
            self._core.received(someone.card.id, forming.decode_formation(message.body), time.monotonic())
            self._pump()
        elif isinstance(message, messages.Founded):
            self._heard_founded(message)
        elif isinstance(message, messages.Vouch):
            self._heard_vouch(someone, message)
        elif self._node is not None and someone.rank >= 0:
            self._node.heard(someone.rank, message)
        elif isinstance(message, messages.Agreeing) and self._node is not None and someone.votes_for >= 0:
            self._node.history.agreeing(someone.votes_for, message)
        elif isinstance(message, messages.Agreeing) and self._is_for_voter(message):
            assert self._voter is not None
            self._voter.received(someone.card.id, message)
        elif someone.rank < 0 and someone.early_bytes < EARLY_LIMIT_BYTES:
            someone.early_bytes += len(messages.encode(message)) + MESSAGE_BYTES
            someone.early.append(message)

    def _is_for_voter(self, message: messages.Agreeing) -> bool:
        return self._node is None and self._voter is not None and message.generation == self._voter.generation

    def _heard_founded(self, founded: messages.Founded) -> None:
        """A generation was founded: it may have a seat for us."""
        is_ours = any(member.card.life == self.card.life for member in founded.members)
        if is_ours and self._node is None and not self._founded.done() and not self._formed.done():
            self._founded.set_result(founded)

    def _heard_vouch(self, keeper: Acquaintance, message: messages.Vouch) -> None:
        """A keeper speaks for its processes, and for no others."""
        if self._node is not None and keeper.purpose == "keeper":
            own = {peer.life for peer in self._node.peers.values() if peer.keeper == keeper.card.id}
            self._node.vouched((life, value) for life, value in message.processes if life in own)

    def noticed(self, someone: Acquaintance) -> None:
        if self._node is not None and someone.rank >= 0:
            self._node.noticed(someone.rank)

    def _give_up(self, rank: int) -> None:
        for someone in list(self.met.values()):
            if someone.rank == rank:
                self.part(someone)

    def turned_down(self, error: AuthError) -> None:
        if not self._formed.done():
            self._formed.set_exception(error)

    def tell(self) -> messages.Tell:
        leader = tie_breaker = b""
        generation = self._node.generation if self._node is not None else None
        if generation is not None:
            leads = generation.council.leader()
            leader = generation.founded.members[leads].card.id if leads is not None else b""
            tie_breaker = generation.founded.members[generation.view.tie_breaker].card.id
        return messages.Tell(
            run=self.run,
            state="running" if self._node is not None else "joining",
            leader=leader,
            tie_breaker=tie_breaker,
            since=time.monotonic() - self._since,
            peers=tuple(self.peer_state(someone, self._lane_kind(someone)) for someone in self.met.values()),
            rank=self._node.rank if self._node is not None else -1,
        )

    def _lane_kind(self, someone: Acquaintance) -> str:
        with contextlib.suppress(ConfigError):
            if self._node is not None and someone.rank >= 0:
                return self._node.lanes.kind(someone.rank)
        return ""

    # Agreeing

    async def form(self, within: float) -> messages.Founded | Formed:
        """Return the agreed view of the run; or the generation that takes us in, if the run was going on.

        Raises:
            DeadlineError: not enough came, or they did not agree in time; says who is here and who was refused.
            AuthError: our secret or our identity is not accepted.
        """
        self.spawn(self._tick())
        self.spawn(self._say_what_is_waited_for())
        self.spawn(self._notice_a_wrong_secret())
        until = time.monotonic() + within
        while True:
            left = until - time.monotonic()
            await asyncio.wait((self._formed, self._founded), timeout=max(0.0, min(1.0, left)),
                               return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
            if self._formed.done():
                return self._formed.result()
            if self._founded.done():
                return self._founded.result()
            if left <= 0 and not (self._is_elastic and self._core.going_on is not None):
                raise DeadlineError(
                    f"no run {self.run!r} in cluster {self.cluster.name!r} within the timeout of {within:g} s: "
                    f"{self.situation()}"
                    ". `covey doctor` looks for the reason."
                )

    def seated(self, seats: Mapping[bytes, int]) -> dict[int, Acquaintance]:
        """Note the seats of those we are linked with, by their lives; return them by seat."""
        by_seat = {}
        for someone in self.met.values():
            if someone.card.life in seats:
                someone.rank = seats[someone.card.life]
                by_seat[someone.rank] = someone
        return by_seat

    def _pump(self) -> None:
        """Send what the core wants to say, and look whether it is done."""
        for peer, message in self._core.outgoing():
            someone = self.met.get(peer)
            if someone is not None:
                someone.send(messages.Forming(messages.encode(message)))
        if self._core.formed is not None and not self._formed.done() and not self._founded.done():
            self._formed.set_result(self._core.formed)
        if self._node is not None:
            self._show_in(self._node)
        self._changed.set()

    def _show_in(self, node: Node) -> None:
        """Let the node know who waits for the next generation, and who does not any more."""
        waiting = {}
        for id in self._core.newcomers():
            if (someone := self.met.get(id)) is not None and someone.rank < 0:
                waiting[someone.card.life] = someone
        for newcomer in node.lobby:
            if newcomer.card.life not in waiting:
                node.lobby.go_away(newcomer)
        for life, someone in waiting.items():
            if life not in node.lobby:
                node.lobby.knock(_Waiting(node, someone))

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
        """Return in words what is waited for, who is here, and who was refused and why."""
        report = self._core.report()
        words = f"{report.waiting}; here: {', '.join(report.here)}"
        refused = [f"{name}: {reason}" for name, reason in (*report.refused, *self.problems().items())]
        if strangers := self.seat.entrance.about_strangers():
            refused.append(strangers)
        return printable(f"{words}; not taken: {'; '.join(refused)}" if refused else words)

    async def _say_what_is_waited_for(self) -> None:
        said, said_at = "", 0.0
        await asyncio.sleep(FIRST_WORD_SECONDS)
        while not self._formed.done() and not self._founded.done():
            words, now = self.situation(), time.monotonic()
            if words != said or now > said_at + REMINDER_SECONDS:
                said, said_at = words, now
                logger.warning("run %r waits since %.0f s: %s", self.run, now - self._since, words)
            await asyncio.sleep(1.0)

    async def _notice_a_wrong_secret(self) -> None:
        while not self._formed.done() and not self._founded.done():
            await asyncio.sleep(0.5)
            seeds, now = self.cluster.seeds, time.monotonic()
            since = [self.hung_up.get(seed, now) for seed in seeds]
            if since and not self.met and now - max(since) > WRONG_KEY_SECONDS:
                self.turned_down(AuthError(
                    f"{', '.join(seeds)} hung up at the door: the secret of cluster {self.cluster.name!r} is "
                    "another one there. Enroll this machine with a join code from there."
                ))  # fmt: skip

    def carry_on(self, node: Node, by_seat: dict[int, Acquaintance], founded: messages.Founded | None) -> None:
        """Hand the links of a run to its node: from now on it hears what is said about the run.

        `founded` is the generation that the node enters, if it is not in the run from its beginning.
        """
        if self._voter is not None:
            self._voter.close()
            self._voter = None
        self._node, self._since = node, time.monotonic()
        self.search.look_seconds = RUNNING_LOOK_SECONDS
        cards = {} if founded is None else {member.seat: member.card for member in founded.members}
        for seat, peer in node.peers.items():
            someone = by_seat.get(seat)
            peer.ready = True
            if someone is not None:
                peer.introduce(someone.card)
                _tell_how_to_reach(peer, someone)
            elif seat in cards:
                peer.introduce(cards[seat])
        node.on_silent = self._give_up
        node.on_founded = self._founded_another
        if founded is None:
            node.begin()
        else:
            self._core.entered(tuple(map(_as_member, founded.members)), time.monotonic())
            node.enter(founded)
        for seat in list(node.peers):
            linked = by_seat.get(seat)
            if linked is None or self.met.get(linked.card.id) is not linked:
                node.lost(seat)
            else:
                for message in linked.early:
                    node.heard(seat, message)
                linked.early = []
        self._pump()

    def _founded_another(self, founded: messages.Founded) -> None:
        """The node is in a generation: keepers want to know, and who waits outside."""
        if founded.generation:
            self._core.entered(tuple(map(_as_member, founded.members)), time.monotonic())
        for keeper in self.keepers:
            self._tell_keeper(keeper)
        self._pump()

    def met_keeper(self, someone: Acquaintance) -> None:
        self._tell_keeper(someone)

    def _tell_keeper(self, keeper: Acquaintance) -> None:
        generation = self._node.generation if self._node is not None else None
        if generation is not None and keeper.card.id == self.card.keeper:
            keeper.send(generation.founded)


class _Waiting:
    """Someone who waits for the next generation."""

    def __init__(self, node: Node, someone: Acquaintance) -> None:
        self._node, self._someone = node, someone

    @property
    def card(self) -> messages.Card:
        return self._someone.card

    def send(self, message: messages.Control) -> None:
        self._someone.send(message)

    def sit_down(self, peer: Peer) -> None:
        self._someone.rank = peer.rank
        _tell_how_to_reach(peer, self._someone)

    def turn_away(self) -> None:
        """Its link ends with all others."""

    def speak(self, peer: Peer) -> None:
        said, self._someone.early = self._someone.early, []
        for message in said:
            self._node.heard(peer.rank, message)


def _as_member(member: messages.SeatedMember) -> forming.Member:
    card = member.card
    return forming.Member(card.id, card.life, card.name[:80], card.contact.host[:64], b"")


def _tell_how_to_reach(peer: Peer, someone: Acquaintance) -> None:
    peer.link, peer.is_dialled = someone.link, someone.is_dialled
    peer.way, peer.round_trip = someone.way, someone.round_trip
    if someone.is_measuring:
        peer.measured.clear()
    else:
        peer.measured.set()
