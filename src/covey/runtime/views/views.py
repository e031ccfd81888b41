"""Who is in the run, as this process knows it: the parts of this room, and the keeper that takes part in them.

On the control loop, unless it says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final

from covey.base.numbers import Seat
from covey.proto.replication import KEEPER
from covey.runtime.fault import Fault
from covey.runtime.links.keeper_link import KeeperLink
from covey.runtime.views.generation import RunParts
from covey.runtime.views.generation_table import GenerationTable, Newcomers, Wishes
from covey.runtime.views.health_monitor import ClockOffsets
from covey.runtime.views.losses import DeparturesTold, Losses
from covey.wire import messages
from covey.wire.versions import OURS, Agreement, fixed_by

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from covey.base.config import GroupConfig
    from covey.runtime.events import Events
    from covey.runtime.links.handshake import LinkCredentials
    from covey.runtime.peers.peer_table import Inbox, MemberLinks, PeerTable
    from covey.runtime.peers.remote_process import RemoteProcess
    from covey.runtime.state.audit import Auditor
    from covey.runtime.state.checkpoints import Checkpoints
    from covey.runtime.state.store import Stores
    from covey.runtime.tasks import Tasks
    from covey.runtime.views.generation import Generation, ViewListener
    from covey.wire.membership import Bound, Record

logger = logging.getLogger("covey")

KEEPER_SECONDS: Final = 3.0
"""How long a process waits until its keeper knows it; after a while the keeper takes unknown processes for lost."""


class Views:
    """The members of one run: its generations and views, the health of the others, what happens to their links."""

    def __init__(
        self,
        *,
        run: str,
        size: int,
        config: GroupConfig,
        card: messages.Card,
        peers: PeerTable,
        links: MemberLinks,
        listener: ViewListener,
        floor: int,
        store: Callable[[Bound], None] | None,
        tasks: Tasks,
        events: Events,
        audit: Auditor,
    ) -> None:
        """Begin without a generation; `begin` founds the first one, `enter` takes a seat in a later one.

        Args:
            card: that of this process.
            listener: acts on what follows from views.
            floor: no view has fewer members.
            store: makes durable what this node has promised.
        """
        self._run, self._size, self._config, self._card = run, size, config, card
        self._peers, self._listener, self._tasks, self._events = peers, listener, tasks, events
        self.speaks = Agreement(OURS.newest, frozenset(OURS.features))
        """What all members of the run speak, once it is formed."""
        self.wishes = Wishes()
        self.clocks = ClockOffsets()
        self.newcomers = Newcomers(self._tell_of_newcomer)
        parts = RunParts(run, config, floor, store, peers, links, events, self, listener)
        self.generations = GenerationTable(parts, self.newcomers, card=card, audit=audit)
        self.losses = Losses(
            self.generations,
            peers,
            links,
            listener,
            config=config,
            host=card.contact.host,
            clocks=self.clocks,
            tasks=tasks,
            events=events,
            audit=audit,
        )
        self._departures = DeparturesTold(self.generations, peers, tasks)

    def take_from(self, inbox: Inbox) -> None:
        """Take the messages of members that concern views, health and departures."""
        departures, generations = self._departures, self.generations
        inbox.give(messages.Goodbye, lambda seat, _: departures.said_goodbye(seat))
        inbox.give(messages.Failing, lambda seat, failing: departures.failing(seat, failing.reason))
        inbox.give(messages.Departures, lambda _, told: departures.told(told.members))
        inbox.give(messages.Agreeing, generations.agreeing)
        inbox.give(messages.Past, lambda seat, past: generations.told_past(seat, past.body))
        inbox.give(messages.Ping, self._pinged)
        inbox.give(messages.Pong, self._answered)

    def _pinged(self, seat: Seat, ping: messages.Ping) -> None:
        self._peers.send(seat, messages.Pong(ping.number, time.time()))

    def _answered(self, seat: Seat, pong: messages.Pong) -> None:
        self.losses.answered(seat, pong.number, pong.clock)

    # Generations

    @property
    def generation(self) -> Generation | None:
        """The last generation that this node was in."""
        return self.generations.current

    def begin(self, speaks: Agreement, lineage: bytes = b"", tie_breaker: int = 0) -> None:
        """Judge the other ranks and found the first generation, now that the run is formed and all speak the same."""
        self.speaks = speaks
        self.losses.start()
        if self._size <= messages.MAX_MEMBERS:
            self.generations.found_first(self._size, speaks.fixed(), lineage, tie_breaker)
        else:
            self._listener.without_views([Seat(seat) for seat in range(self._size)])
        self.losses.run()
        self._listener.begun()

    def enter(self, founded: messages.Founded, record: Record | None = None) -> None:
        """Take this node's seat in a generation of a running run; `record` is what it has promised there."""
        self.speaks = fixed_by(founded.versions)
        self.losses.start()
        self.generations.found(founded, record)
        self.losses.run()
        self._listener.begun()

    @property
    def knows_change(self) -> bool:
        """Whether the next generation should come soon. On any thread."""
        generation = self.generation
        return generation is not None and self.wishes.want_change(len(generation.view.ranks), self.newcomers)

    def outlived(self, rival: str) -> None:
        """End this run, because `rival`, a run of the same name, is older.

        A program that goes from generation to generation ends after its step, so that it can save its state; others
        fail now. With `quorum="any"` the user has accepted that there are several runs, and this one goes on.
        """
        text = f"{rival}; this one is younger"
        if self._config.quorum == "any":
            logger.warning("%s: %s, and continues beside it (quorum='any')", self._run, text)
            return
        logger.error("%s: %s, and ends", self._run, text)
        self.wishes.rival = text
        if not self.wishes.is_elastic:
            text = f"{text}, so it ends here; start again to be in the older one"
            self._listener.run_failed(Fault("SplitRunError", text))

    def _tell_of_newcomer(self, card: messages.Card) -> None:
        self.generations.tell_of_newcomer(card)

    # What generations tell

    def watch(self, seats: Sequence[Seat]) -> None:
        """Judge the members of a new generation."""
        self.losses.watch(seats)

    def exclude(self, seat: Seat) -> None:
        """Go on without a process, as a view says."""
        self.losses.exclude(seat)

    # Links

    def relinked(self, peer: RemoteProcess) -> None:
        """Go on with a process that has a new link after its last one ended."""
        self.losses.link_up(peer)
        self._listener.link_up(peer.seat)
        self.generations.link_up(peer.seat, peer.life)

    def exchanged(self, peer: RemoteProcess) -> None:
        """Go on with a process whose link was replaced: what was said on the last one may be lost."""
        self._listener.link_lost(peer.seat)
        self.relinked(peer)

    # The keeper

    def meet_keeper(self, path: str, credentials: LinkCredentials, *, checkpoints: Checkpoints, stores: Stores) -> None:
        """Link with the keeper that listens at `path`, and again when that link ends.

        It may ask for `checkpoints`, and orders the changes of `stores`.
        """

        def up() -> None:
            self.generations.keeper_up()
            if keeper.link is not None:
                stores.keeper_up(keeper.link.agreed.features)

        def heard(message: messages.Control) -> None:
            match message:
                case messages.Inspect():
                    from covey.runtime.metrics.inspection import answer_keeper  # most keepers do not ask

                    answer_keeper(message, keeper.send)
                case messages.Posting():
                    stores.keeper_said(message)
                case messages.RequestCheckpoint():
                    checkpoints.asked(message, keeper.send)
                case messages.Vouch(processes):
                    self.losses.vouched(self._card.keeper, processes)
                case messages.Agreeing():
                    self.generations.keeper_voted(message)
                case _:
                    pass

        keeper = KeeperLink(
            path,
            credentials,
            self._card,
            on_up=up,
            on_down=self.generations.keeper_down,
            on_message=heard,
            on_room=lambda: stores.link_has_room(KEEPER),
        )
        self.generations.use_keeper(keeper)
        stores.use_keeper(keeper)
        self._tasks.spawn(keeper.keep())

    async def await_keeper(self) -> None:
        """Return when the keeper knows this process and its generation, or has not answered for a while."""
        if self.generations.keeper is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KEEPER_SECONDS):
                    await self.generations.keeper.is_up.wait()
