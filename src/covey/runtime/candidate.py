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
from covey.wire import formation as forming
from covey.wire import messages

if TYPE_CHECKING:
    from covey.base.config import GroupConfig
    from covey.net.clusters import Cluster
    from covey.proto.formation import Formed
    from covey.runtime.acquaintance import Acquaintance
    from covey.runtime.node import Node, Peer
    from covey.runtime.seat import Seat

logger = logging.getLogger("covey")

FIRST_WORD_SECONDS: Final = 3.0
"""After this much waiting, say what is waited for."""
REMINDER_SECONDS: Final = 30.0
WRONG_KEY_SECONDS: Final = 4.0
"""After this much hanging up by all seeds, believe that the secret is wrong."""
RUNNING_LOOK_SECONDS: Final = 2.0
"""How often the folder of this host is looked at, once the run is going on."""
EARLY_LIMIT_BYTES: Final = 1 << 20
"""Messages for a run that this node has not finished forming."""
MESSAGE_BYTES: Final = 500
"""What a message takes in memory besides its contents."""


class Candidate(Gathering):
    """A node that wants to be in a run."""

    purpose = "candidate"

    def __init__(self, cluster: Cluster, config: GroupConfig, seat: Seat, terms: forming.Terms) -> None:
        super().__init__(cluster, config, seat)
        self.run = terms.run
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

    def lost_someone(self, someone: Acquaintance) -> None:
        for name, reason in self._core.report().refused:  # they may not have heard, and come to ask us
            if name == someone.card.name:
                self.refusals[name] = f"{reason} (it has left)"
        self._core.link_down(someone.card.id, time.monotonic())
        self._pump()
        if self._node is not None and someone.rank >= 0:
            self._node.lost(someone.rank)

    def may_switch(self, someone: Acquaintance) -> bool:
        return someone.rank < 0 and not self._core.is_deciding

    def switched(self, someone: Acquaintance) -> None:
        if self._node is not None and someone.rank >= 0:
            _tell_how_to_reach(self._node.peers[someone.rank], someone)

    def heard(self, someone: Acquaintance, message: messages.Control) -> None:
        if isinstance(message, messages.Forming):
            self._core.received(someone.card.id, forming.decode_formation(message.body), time.monotonic())
            self._pump()
        elif self._node is not None and someone.rank >= 0:
            self._node.heard(someone.rank, message)
        elif self._node is None and someone.early_bytes < EARLY_LIMIT_BYTES:
            someone.early_bytes += len(messages.encode(message)) + MESSAGE_BYTES
            someone.early.append(message)

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
        first = self._core.formed.view[0].id if self._core.formed is not None else b""
        return messages.Tell(
            run=self.run,
            state="running" if self._node is not None else "joining",
            leader=first,
            tie_breaker=first,
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

    async def form(self, within: float) -> tuple[Formed, dict[int, Acquaintance]]:
        """Return the agreed view of the run, and by rank whom we are linked with.

        Raises:
            DeadlineError: not enough came, or they did not agree in time; says who is here and who was refused.
            AuthError: our secret or our identity is not accepted.
        """
        self.spawn(self._tick())
        self.spawn(self._say_what_is_waited_for())
        self.spawn(self._notice_a_wrong_secret())
        try:
            async with asyncio.timeout(within):
                formed = await self._formed
        except TimeoutError:
            raise DeadlineError(
                f"no run {self.run!r} in cluster {self.cluster.name!r} after {within:g} s: {self.situation()}"
                ". `covey doctor` looks for the reason."
            ) from None
        by_rank = {}
        for rank, member in enumerate(formed.view):
            linked = self.met.get(member.id)
            if linked is not None and linked.card.life == member.life:
                linked.rank = rank
                by_rank[rank] = linked
        return formed, by_rank

    def _pump(self) -> None:
        """Send what the core wants to say, and look whether it is done."""
        for peer, message in self._core.outgoing():
            someone = self.met.get(peer)
            if someone is not None:
                someone.send(messages.Forming(messages.encode(message)))
        if self._core.formed is not None and not self._formed.done():
            self._formed.set_result(self._core.formed)
        self._changed.set()

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
        while not self._formed.done():
            words, now = self.situation(), time.monotonic()
            if words != said or now > said_at + REMINDER_SECONDS:
                said, said_at = words, now
                logger.warning("run %r waits since %.0f s: %s", self.run, now - self._since, words)
            await asyncio.sleep(1.0)

    async def _notice_a_wrong_secret(self) -> None:
        while not self._formed.done():
            await asyncio.sleep(0.5)
            seeds, now = self.cluster.seeds, time.monotonic()
            since = [self.hung_up.get(seed, now) for seed in seeds]
            if since and not self.met and now - max(since) > WRONG_KEY_SECONDS:
                self.turned_down(AuthError(
                    f"{', '.join(seeds)} hung up at the door: the secret of cluster {self.cluster.name!r} is "
                    "another one there. Enroll this machine with a join code from there."
                ))  # fmt: skip

    def carry_on(self, node: Node, by_rank: dict[int, Acquaintance]) -> None:
        """Hand the links of a run to its node: from now on it hears what is said about the run."""
        self._node, self._since = node, time.monotonic()
        self.search.look_seconds = RUNNING_LOOK_SECONDS
        for rank, someone in by_rank.items():
            peer = node.peers[rank]
            peer.introduce(someone.card)
            peer.ready = True
            _tell_how_to_reach(peer, someone)
        for rank, peer in node.peers.items():
            linked = by_rank.get(rank)
            if linked is None or self.met.get(linked.card.id) is not linked:
                peer.ready = True
                node.lost(rank)
            else:
                for message in linked.early:
                    node.heard(rank, message)
                linked.early = []
        node.on_silent = self._give_up
        node.begin()


def _tell_how_to_reach(peer: Peer, someone: Acquaintance) -> None:
    peer.link, peer.is_dialled = someone.link, someone.is_dialled
    peer.way, peer.round_trip = someone.way, someone.round_trip
    if someone.is_measuring:
        peer.measured.clear()
    else:
        peer.measured.set()
