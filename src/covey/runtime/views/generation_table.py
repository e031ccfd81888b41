"""The generations of a run that this node has been in, and the keeper that votes in them. On the control loop.

`Newcomers` are the processes that wait for the next generation; `Wishes` is what this process wants of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from covey.base.errors import CoveyError, RemoteProtocolError
from covey.base.numbers import Seat
from covey.net.host.run_notes import note_members
from covey.runtime.events import Event
from covey.runtime.peers.remote_process import EarlyMessages, PeerEvent, RemoteProcess
from covey.runtime.views.generation import Generation
from covey.wire import membership as wire
from covey.wire import messages
from covey.wire.decoding import SkippedMessageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from covey.base.numbers import Rank
    from covey.runtime.links.keeper_link import KeeperLink
    from covey.runtime.state.audit import Auditor
    from covey.runtime.views.generation import RunParts
    from covey.runtime.views.view_driver import ViewDriver
    from covey.wire.membership import Record
    from covey.wire.versions import Versions

logger = logging.getLogger("covey")

SETTLE_SECONDS: Final = 0.3
"""A newcomer is a reason for another generation after this time: by then it should have dialled every member."""
DEFER_SECONDS: Final = 10.0
"""A newcomer that some members did not know when a generation was founded is a reason for another after this time."""


class Newcomers:
    """The processes that wait for the next generation. Changed on the control loop, read on any thread."""

    def __init__(self, added: Callable[[messages.Card], None] = lambda _card: None) -> None:
        """`added` is called for each process that begins to wait."""
        self._added = added
        self._waiting: dict[tuple[bytes, bytes], RemoteProcess] = {}
        """By id and life."""
        self._counts_from: dict[tuple[bytes, bytes], float] = {}
        """The time from which a newcomer is a reason for another generation."""

    def __iter__(self) -> Iterator[RemoteProcess]:
        return iter(list(self._waiting.values()))

    def __contains__(self, card: messages.Card) -> bool:
        return messages.key_of(card) in self._waiting

    def add(self, newcomer: RemoteProcess) -> None:
        """Note that a process waits."""
        key = messages.key_of(newcomer.card)
        if key not in self._waiting:
            self._added(newcomer.card)
        self._waiting[key] = newcomer
        self._counts_from.setdefault(key, time.monotonic() + SETTLE_SECONDS)

    def remove(self, newcomer: RemoteProcess) -> None:
        """Note that a process does not wait any more."""
        if self._waiting.get(messages.key_of(newcomer.card)) is newcomer:
            self.admit(newcomer.card)

    def admit(self, card: messages.Card) -> RemoteProcess | None:
        """Remove and return the process that is a member now; None if it does not wait here."""
        key = messages.key_of(card)
        self._counts_from.pop(key, None)
        return self._waiting.pop(key, None)

    def defer(self) -> None:
        """Note that a generation was founded without the remaining newcomers: not all members know them."""
        self._counts_from = dict.fromkeys(list(self._waiting), time.monotonic() + DEFER_SECONDS)

    @property
    def want_generation(self) -> bool:
        """Whether some newcomer is a reason for another generation now."""
        now = time.monotonic()
        return any(now > since for since in list(self._counts_from.values()))


@dataclass
class Wishes:
    """What the program of this process wants of the next generation. Set and read on any thread."""

    is_elastic: bool = False
    """Whether the program goes from generation to generation."""
    is_draining: bool = False
    """Whether this process wants to leave at the next step."""
    wanted_size: int = 1
    """A generation that has fewer members waits for more."""
    most_size: int = messages.MAX_MEMBERS
    rival: str = ""
    """Describes an older run of the same name, if this run has to end because of it."""

    def want_change(self, live: int, newcomers: Newcomers) -> bool:
        """Tell whether a generation with so many live members should end soon.

        That is if a process wants in or out, or too few are left.
        """
        is_awaited = live < self.most_size and newcomers.want_generation
        return self.is_elastic and (self.is_draining or bool(self.rival) or live < self.wanted_size or is_awaited)


class GenerationTable:
    """The generations of a node: the current one, and the one before it, in which peers may still vote."""

    def __init__(
        self,
        parts: RunParts,
        newcomers: Newcomers,
        *,
        card: messages.Card,
        audit: Auditor,
    ) -> None:
        """Begin without a generation; `card` is that of this process."""
        self._parts, self._newcomers, self._card = parts, newcomers, card
        self._peers, self._events, self._listener = parts.peers, parts.events, parts.listener
        self._audit = audit
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
        return self._parts.store is not None

    @property
    def hears_quorum(self) -> bool:
        """Whether this node is in a generation and hears a quorum of it."""
        current = self.current
        return current is not None and not current.is_over and current.view_driver.hears_quorum

    # Events

    def _tell_of_leader(self, generation: Generation) -> None:
        """Add an event if another member leads than before."""
        leader = generation.view_driver.leader()
        if generation is self.current and leader is not None and (generation.number, leader) != self._last_leader:
            self._last_leader = generation.number, leader
            name = generation.founded.members[leader].card.name
            event = Event("leader", time.time(), generation.number, generation.view.number, (leader,), (name,))
            self._events.add(event)

    def _past(self) -> messages.Past:
        from covey.runtime.events import encode_last  # most runs have no newcomers

        return messages.Past(encode_last(self._events))

    def told_past(self, seat: Seat, body: bytes) -> None:
        """Take from a member what happened before this process was in the run. All members tell it; once is enough."""
        if not self._lacks_past:
            return
        from covey.runtime.events import decode_last

        try:
            earlier = decode_last(body)
        except RemoteProtocolError as error:
            logger.warning("what %s told of the run's past cannot be read: %s", self._peers.name_of(seat), error)
            return
        self._lacks_past = False
        self._events.put_before(earlier)

    def tell_of_newcomer(self, card: messages.Card) -> None:
        """Add an event about a process that waits for the next generation. On the control loop."""
        if self.current is not None:
            event = Event("discovered", time.time(), self.current.number, self.current.view.number, (), (card.name,))
            self._events.add(event)

    def tell_of_refusal(self, name: str, reason: str) -> None:
        """Add an event about a node that was refused. On the control loop."""
        number, view = (0, 0) if self.current is None else (self.current.number, self.current.view.number)
        self._events.add(Event("refused", time.time(), number, view, (), (name,), text=reason))

    def tell_of_peer(self, kind: str, peer: RemoteProcess, text: str = "") -> None:
        """Add an event about a peer. On the control loop."""
        generation = self.current
        if generation is not None:
            rank = generation.rank_of(peer.seat)
            ranks = () if rank is None else (rank,)
            self._events.add(
                Event(kind, time.time(), generation.number, generation.view.number, ranks, (peer.card.name,), text=text)
            )

    # Ranks

    def rank_of(self, seat: Seat) -> Rank:
        """Return the rank of a seat in the current generation; NO_RANK if the seat is not in it."""
        return self._peers.rank_of(seat)

    def name_of(self, seat: Seat) -> str:
        """Return how messages name the process in a seat: by its rank in the current generation, if it has one."""
        return self._peers.name_of(seat)

    # Generations

    def found_first(self, size: int, versions: Versions, lineage: bytes, tie_breaker: int) -> None:
        """Found the first generation of the run, of all its `size` ranks, which speak `versions`.

        `lineage` tells the run from others of its name.
        """
        own, config = self._peers.seat, self._parts.config
        cards = [
            self._card if seat == own else messages.as_member(self._peers[seat].card) for seat in map(Seat, range(size))
        ]
        lives = b"".join(card.life for card in cards)
        digest = hashlib.blake2b(lives, digest_size=16, key=self._parts.run.encode()[:64]).digest()
        members = tuple(messages.SeatedMember(Seat(rank), card) for rank, card in enumerate(cards))
        is_kept = self.keeper is not None
        origin = lineage or digest
        self.found(
            messages.Founded(
                0, origin, is_kept, members, config.on_loss, config.patience, origin, tie_breaker, versions
            )
        )

    def found(self, founded: messages.Founded, record: Record | None = None) -> Generation:
        """Begin a generation; newcomers that have a seat in it become peers, and are told.

        `record` is what this node has promised there already.
        """
        before = self.current
        self._lacks_past |= before is None and founded.generation > 0
        strangers = [member for member in founded.members if self._is_new(member)]
        seated = self._seat(strangers, founded)
        if before is not None:
            before.is_current = False
        generation = self.current = self._generations[founded.generation] = Generation(
            self._parts, founded, keeper=self.keeper, record=record
        )
        self._peers.number(generation.ranks)
        for number in [number for number in self._generations if number < founded.generation - 1]:
            self._generations.pop(number).close()
        self._tell_keeper_of(founded)
        self._parts.judge.watch(generation.seats)
        ranks = tuple(map(founded.members.index, strangers))
        names = tuple(member.card.name for member in strangers)
        self._events.add(Event("joined" if ranks else "generation", time.time(), founded.generation, 0, ranks, names))
        cards = [member.card for member in founded.members]
        self._note(cards, generation.rank)
        came = cards if before is None else [member.card for member in strangers]
        self._audit.founded(founded.generation, generation.rank, cards, came, self._card)
        generation.open()
        view = generation.view
        self._listener.view(generation.number, view.number, generation.seats, generation.seats[view.tie_breaker])
        if record is not None and record.accepted is not None:
            self._listener.sealed()
        self._parts.links.founded(founded)
        for newcomer in seated:  # another member may have told it of its seat first
            for message in newcomer.early.take():
                self._listener.heard_early(newcomer.seat, message)
        early, self._early = self._early, {}
        for seat, early_messages in early.items():
            for message in early_messages.take():
                with contextlib.suppress(SkippedMessageError):
                    self.agreeing(seat, message)
        return generation

    def _note(self, cards: Sequence[messages.Card], rank: int) -> None:
        """Note the members of a generation for `covey history`: one process of each machine does so."""
        here = [card.contact.host for card in cards]
        if here.index(here[rank]) == rank:
            by_host = {card.contact.host: card.host_name or card.name for card in reversed(cards)}
            note_members(len(cards), [by_host[host] for host in dict.fromkeys(here)])

    def _is_new(self, member: messages.SeatedMember) -> bool:
        return member.seat != self._peers.seat and member.seat not in self._peers

    def _seat(self, members: Sequence[messages.SeatedMember], founded: messages.Founded) -> list[RemoteProcess]:
        """Make processes peers that a generation has a seat for; tell those that are linked, and return them."""
        seated = []
        past: messages.Past | None = None
        for member in members:
            newcomer = self._newcomers.admit(member.card)
            if newcomer is None:  # it was told by another member first
                newcomer = self._parts.links.find(member.card)
            if newcomer is not None:
                past = past or self._past()
                newcomer.send(past)  # first: it is delivered when the newcomer has its seat
                newcomer.send(founded)
                seated.append(newcomer)
            peer = self._peers[member.seat] = newcomer or RemoteProcess(member.card)
            peer.seat = member.seat
            peer.note(PeerEvent.READY)
        return seated

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

    def voter_up(self, seat: Seat, voter: RemoteProcess) -> None:
        """Let a node that was started anew vote for the seat of its earlier life."""
        self._peers[seat].voter = voter
        self._tell_of_seat(seat, voter)
        self.link_up(seat, voter.life)

    def voter_down(self, seat: Seat) -> None:
        """Note that there is no link any more with a node that was started anew."""
        peer = self._peers[seat]
        peer.voter = None
        if peer.link is None:
            self.link_down(seat)

    def _tell_of_seat(self, seat: Seat, voter: RemoteProcess) -> None:
        """Tell a node about the seat of its earlier life in the current generation, in which it may vote."""
        generation = self.current
        if generation is not None and generation.rank_of(seat) is not None and generation.number:
            seated = wire.encode_membership(generation.seated())
            voter.send(messages.Agreeing(generation.number, seated))

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

    def failed(self, error: CoveyError) -> None:
        """End the current generation with an error of this process."""
        if self.current is not None:
            self.current.failed(error)

    def over(self) -> None:
        """End the current generation: other nodes say that the run is over."""
        if self.current is not None and not self.current.is_over:
            self.current.over()

    def _drivers(self, seat: Seat) -> list[tuple[ViewDriver, Rank]]:
        """Return the view drivers of the generations that a process is in, and its rank in each."""
        found = ((each.view_driver, each.rank_of(seat)) for each in self._generations.values())
        return [(view_driver, rank) for view_driver, rank in found if rank is not None]

    # The keeper

    def use_keeper(self, keeper: KeeperLink) -> None:
        """Take the link with the keeper that started this process; it votes in generations that begin from now on."""
        self.keeper = keeper

    def keeper_up(self) -> None:
        """Tell the keeper, on a new link, of the generations; those that it decides can go on."""
        for _, generation in sorted(self._generations.items()):
            self._tell_keeper_of(generation.founded)
            if generation.founded.is_kept:
                generation.view_driver.link_up(len(generation.seats), b"")

    def keeper_down(self) -> None:
        """Note that the link with the keeper ended."""
        for generation in self._generations.values():
            if generation.founded.is_kept:
                generation.view_driver.link_down(len(generation.seats))

    def keeper_voted(self, message: messages.Agreeing) -> None:
        """Take a message about a view from the keeper."""
        generation = self._generations.get(message.generation)
        if generation is not None and generation.founded.is_kept:
            generation.view_driver.received(len(generation.seats), message.body)

    def tell_keeper_of_survival(self) -> None:
        """Tell the keeper not to stop the other ranks after a loss: the program goes on although its groups end."""
        if self.current is not None:
            self._tell_keeper_of(messages.surviving(self.current.founded))

    def _tell_keeper_of(self, founded: messages.Founded) -> None:
        if self.keeper is not None:
            self.keeper.send(messages.to_keeper(founded, self._parts.config.store_bytes))

    # The end

    def note_end(self) -> None:
        """Write to the audit log that this node leaves its generation, and why."""
        if self.current is not None:
            reason = "it left" if self.current.fault is None else self.current.fault.text
            self._audit.note("ended", self._card, reason=reason, generation=self.current.number)
        self._audit.close()

    def close(self) -> None:
        """Take no more part in any view."""
        for generation in self._generations.values():
            generation.close()

    def forked(self) -> None:
        """Make all generations unusable: this process is a fork of the one that joined."""
        for generation in self._generations.values():
            generation.forked()
