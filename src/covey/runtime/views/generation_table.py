"""The generations of a run that this node has been in, and the keeper that votes in them. On the control loop."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from typing import TYPE_CHECKING, Final

from covey.base.errors import RemoteProtocolError
from covey.base.numbers import NO_RANK, Rank, Seat
from covey.proto.changes import Quorum
from covey.runtime.early_messages import EarlyMessages
from covey.runtime.events import Event
from covey.runtime.links.keeper_link import KeeperLink
from covey.runtime.peers.remote_process import PeerEvent, RemoteProcess
from covey.runtime.views.generation import Generation
from covey.wire import membership as wire
from covey.wire import messages
from covey.wire.decoding import SkippedMessageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.members.node import Node
    from covey.runtime.views.view_driver import ViewDriver
    from covey.wire.membership import Bound, Record

logger = logging.getLogger("covey")

KEEPER_SECONDS: Final = 3.0
"""How long a process waits until its keeper knows it; after a while the keeper takes unknown processes for lost."""


class GenerationTable:
    """The generations of a node: the current one, and the one before it, in which peers may still vote."""

    def __init__(self, node: Node, *, keeper_path: str, floor: int, store: Callable[[Bound], None] | None) -> None:
        """Begin without a generation; `floor` and `store` are as in `Node`."""
        self._node = node
        self._keeper_path, self._store = keeper_path, store
        self.floor = floor
        self.current: Generation | None = None
        self.keeper: KeeperLink | None = None
        self._generations: dict[int, Generation] = {}
        self._early: dict[Seat, EarlyMessages[messages.Agreeing]] = {}
        """By seat: messages about generations that this node has not founded yet."""
        self._last_leader = (-1, -1)
        """The generation and rank of the last leader that was told of."""
        self._lacks_past = False
        """Whether this process came to a run in progress, and no member has told it yet what happened before."""

    @property
    def is_durable(self) -> bool:
        """Whether what this node promises outlives its process."""
        return self._store is not None

    @property
    def hears_quorum(self) -> bool:
        """Whether this node is in a generation and hears a quorum of it."""
        current = self.current
        return current is not None and not current.is_over and current.view_driver.hears_quorum

    # Ranks

    def rank_of(self, seat: Seat) -> Rank:
        """Return the rank of a seat in the current generation; NO_RANK if the seat is not in it."""
        if self.current is None:
            return Rank(seat)  # as it will be in the first generation
        rank = self.current.rank_of(seat)
        return NO_RANK if rank is None else rank

    def _tell_of_leader(self, generation: Generation) -> None:
        """Add an event if another member leads than before."""
        leader = generation.view_driver.leader()
        if generation is self.current and leader is not None and (generation.number, leader) != self._last_leader:
            self._last_leader = generation.number, leader
            name = generation.founded.members[leader].card.name
            event = Event("leader", time.time(), generation.number, generation.view.number, (leader,), (name,))
            self._node.events.add(event)

    def _past(self) -> messages.Past:
        from covey.runtime.past_events import encode_last  # most runs have no newcomers

        return messages.Past(encode_last(self._node.events))

    def told_past(self, seat: Seat, body: bytes) -> None:
        """Take from a member what happened before this process was in the run. All members tell it; once is enough."""
        if not self._lacks_past:
            return
        from covey.runtime.past_events import decode_last

        try:
            earlier = decode_last(body)
        except RemoteProtocolError as error:
            logger.warning("what %s told of the run's past cannot be read: %s", self.name_of(seat), error)
            return
        self._lacks_past = False
        self._node.events.put_before(earlier)

    def tell_of_newcomer(self, card: messages.Card) -> None:
        """Add an event about a process that waits for the next generation. On the control loop."""
        if self.current is not None:
            event = Event("discovered", time.time(), self.current.number, self.current.view.number, (), (card.name,))
            self._node.events.add(event)

    def tell_of_refusal(self, name: str, reason: str) -> None:
        """Add an event about a node that was refused. On the control loop."""
        number, view = (0, 0) if self.current is None else (self.current.number, self.current.view.number)
        self._node.events.add(Event("refused", time.time(), number, view, (), (name,), text=reason))

    def tell_of_peer(self, kind: str, peer: RemoteProcess, text: str = "") -> None:
        """Add an event about a peer. On the control loop."""
        generation = self.current
        if generation is not None:
            rank = generation.rank_of(peer.seat)
            ranks = () if rank is None else (rank,)
            self._node.events.add(
                Event(kind, time.time(), generation.number, generation.view.number, ranks, (peer.card.name,), text=text)
            )

    def name_of(self, seat: Seat) -> str:
        """Return how messages name the process in a seat: by its rank in the current generation, if it has one."""
        rank = self.rank_of(seat)
        return f"rank {rank}" if rank >= 0 else f"seat {seat}"

    # Generations

    def found_first(self, lineage: bytes, tie_breaker: int) -> None:
        """Found the first generation of the run, of all its ranks; `lineage` tells the run from others of its name."""
        node = self._node
        cards = [
            node.card if seat == node.seat else messages.as_member(node.peers[seat].card)
            for seat in map(Seat, range(node.size))
        ]
        lives = b"".join(card.life for card in cards)
        digest = hashlib.blake2b(lives, digest_size=16, key=node.run.encode()[:64]).digest()
        members = tuple(messages.SeatedMember(Seat(rank), card) for rank, card in enumerate(cards))
        is_kept = self.keeper is not None
        origin = lineage or digest
        config = node.config
        versions = node.speaks.fixed()
        self.found(
            messages.Founded(
                0, origin, is_kept, members, config.on_loss, config.patience, origin, tie_breaker, versions
            )
        )

    def found(self, founded: messages.Founded, record: Record | None = None) -> Generation:
        """Begin a generation; newcomers that have a seat in it become peers, and are told.

        `record` is what this node has promised there already.
        """
        node = self._node
        newcomers = []
        seated = []
        is_first = self.current is None
        self._lacks_past |= is_first and founded.generation > 0
        past: messages.Past | None = None
        for member in founded.members:
            if member.seat != node.seat and member.seat not in node.peers:
                newcomers.append(member)
                newcomer = node.newcomers.admit(member.card)
                if newcomer is None and node.find_newcomer is not None:  # it was told by another member first
                    newcomer = node.find_newcomer(member.card)
                if newcomer is not None:
                    past = past or self._past()
                    newcomer.send(past)  # first: it is delivered when the newcomer has its seat
                    newcomer.send(founded)
                    seated.append(newcomer)
                peer = node.peers[member.seat] = newcomer or RemoteProcess(member.card)
                peer.seat = member.seat
                peer.note(PeerEvent.READY)
        generation = self.current = self._generations[founded.generation] = Generation(
            node, founded, patience=node.config.patience, quorum=Quorum(node.config.quorum), min_size=self.floor,
            store=self._store, record=record,
        )  # fmt: skip
        for number in [number for number in self._generations if number < founded.generation - 1]:
            self._generations.pop(number).close()
        if self.keeper is not None:
            self.keeper.send(founded)
        node.losses.watch(generation.seats)
        ranks = tuple(map(founded.members.index, newcomers))
        names = tuple(member.card.name for member in newcomers)
        node.events.add(Event("joined" if ranks else "generation", time.time(), founded.generation, 0, ranks, names))
        rank = generation.rank_of(node.seat)
        cards = [member.card for member in founded.members]
        came = cards if is_first else [member.card for member in newcomers]
        node.audit.founded(founded.generation, -1 if rank is None else rank, cards, came, node.card)
        generation.open()
        node.stores.view(generation.number, generation.view.number, generation.seats)
        node.checkpoints.view(generation.number, generation.view.number, generation.seats)
        if node.on_founded is not None:
            node.on_founded(founded)
        for newcomer in seated:  # another member may have told it of its seat first
            for message in newcomer.early.take():
                node.heard_early(newcomer.seat, message)
        early, self._early = self._early, {}
        for seat, early_messages in early.items():
            for message in early_messages.take():
                with contextlib.suppress(SkippedMessageError):
                    self.agreeing(seat, message)
        return generation

    def agreeing(self, seat: Seat, message: messages.Agreeing) -> None:
        """Take a message about a view from a member, or from a later life of its node that votes for it."""
        number, body = message.generation, message.body
        generation = self._generations.get(number)
        if generation is None:
            newest = max(self._generations, default=-1)
            if newest < number <= newest + 2:
                self._early.setdefault(seat, EarlyMessages()).keep(message, len(body))
            return
        rank = generation.rank_of(seat)
        if rank is not None:
            generation.view_driver.received(rank, body)
            self._tell_of_leader(generation)

    def voter_up(self, seat: Seat, life: bytes, vote: Callable[[messages.Control], None]) -> None:
        """Let a node that was started anew vote for the seat of its earlier life; `vote` sends to it."""
        self._node.peers[seat].vote = vote
        self._tell_of_seat(seat, vote)
        self.link_up(seat, life)

    def voter_down(self, seat: Seat) -> None:
        """Note that there is no link any more with a node that was started anew."""
        peer = self._node.peers[seat]
        peer.vote = None
        if peer.link is None:
            self.link_down(seat)

    def _tell_of_seat(self, seat: Seat, send: Callable[[messages.Control], None]) -> None:
        """Tell a node about the seat of its earlier life in the current generation, in which it may vote."""
        generation = self.current
        if generation is not None and generation.rank_of(seat) is not None and generation.number:
            seated = wire.encode_membership(generation.seated())
            send(messages.Agreeing(generation.number, seated))

    # What view drivers have to know

    def link_up(self, seat: Seat, life: bytes) -> None:
        """Note a link with a process, or with a later life of its node that votes for it."""
        for view_driver, rank in self._drivers(seat):
            view_driver.link_up(rank, life)

    def link_down(self, seat: Seat) -> None:
        """Note that this link ended."""
        for view_driver, rank in self._drivers(seat):
            view_driver.link_down(rank)

    def judged(self, seat: Seat, *, is_dead: bool) -> None:
        """Note that health gave a process up, or trusts it again."""
        for view_driver, rank in self._drivers(seat):
            view_driver.judged(rank, is_dead=is_dead)

    def vouched(self, seat: Seat) -> None:
        """Note that the keeper of a process says that it is alive and not stopped."""
        for generation in self._generations.values():
            if not generation.founded.is_kept and (rank := generation.rank_of(seat)) is not None:
                generation.view_driver.vouched(rank)

    def left_behind(self, origin: bytes, number: int) -> None:
        """End this node's generation if a member of it is in a later one, which has no seat for this node."""
        current = self.current
        if current is not None and current.founded.origin == origin and number > current.number:
            current.left_behind(number)

    def over(self) -> None:
        """End the current generation: other nodes say that the run is over."""
        if self.current is not None and not self.current.is_over:
            self.current.over()

    def _drivers(self, seat: Seat) -> list[tuple[ViewDriver, Rank]]:
        """Return the view drivers of the generations that a process is in, and its rank in each."""
        found = ((each.view_driver, each.rank_of(seat)) for each in self._generations.values())
        return [(view_driver, rank) for view_driver, rank in found if rank is not None]

    # The keeper

    def meet_keeper(self) -> None:
        """Link with the keeper that started this process, if there is one, and again when that link ends."""
        if self._keeper_path:
            self.keeper = KeeperLink(
                self._keeper_path,
                self._node.credentials,
                self._node.card,
                on_up=self._keeper_up,
                on_down=self._keeper_down,
                on_message=self._keeper_said,
            )
            self._node.spawn(self.keeper.keep())

    async def await_keeper(self) -> None:
        """Return when the keeper knows this process and its generation, or has not answered for a while."""
        if self.keeper is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KEEPER_SECONDS):
                    await self.keeper.is_up.wait()

    def _keeper_up(self) -> None:
        for _, generation in sorted(self._generations.items()):
            if self.keeper is not None:
                self.keeper.send(generation.founded)
            if generation.founded.is_kept:
                generation.view_driver.link_up(len(generation.seats), b"")

    def _keeper_down(self) -> None:
        for generation in self._generations.values():
            if generation.founded.is_kept:
                generation.view_driver.link_down(len(generation.seats))

    def _keeper_said(self, message: messages.Control) -> None:
        match message:
            case messages.Inspect():
                self._answer(message)
            case messages.RequestCheckpoint():
                if self.keeper is not None:
                    self._node.checkpoints.asked(message, self.keeper.send)
            case messages.Vouch(processes):
                self._node.losses.vouched(self._node.card.keeper, processes)
            case messages.Agreeing(number, body):
                generation = self._generations.get(number)
                if generation is not None and generation.founded.is_kept:
                    generation.view_driver.received(len(generation.seats), body)
            case _:
                pass

    def _answer(self, question: messages.Inspect) -> None:
        from covey.runtime.metrics.inspection import answer_keeper  # most keepers do not ask

        if self.keeper is not None:
            answer_keeper(question, self.keeper.send)

    def tell_keeper_of_survival(self) -> None:
        """Tell the keeper not to stop the other ranks after a loss: the program goes on although its groups end."""
        if self.keeper is not None and self.current is not None:
            self.keeper.send(messages.surviving(self.current.founded))

    # The end

    def note_end(self) -> None:
        """Write to the audit log that this node leaves its generation, and why."""
        if self.current is not None:
            reason = "it left" if self.current.fault is None else self.current.fault.text
            self._node.audit.note("ended", self._node.card, reason=reason, generation=self.current.number)
        self._node.audit.close()

    def close(self) -> None:
        """Take no more part in any view."""
        for generation in self._generations.values():
            generation.close()

    def forked(self) -> None:
        """Make all generations unusable: this process is a fork of the one that joined."""
        for generation in self._generations.values():
            generation.forked()
