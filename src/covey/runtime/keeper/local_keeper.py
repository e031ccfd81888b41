"""The keeper of a run on one host: tells each process how the others are, and decides the views of the run.

On the control loop of the keeper's process. A process is linked with it while it takes part in the run. Whether a
process without a link has ended, the kernel tells (`members/process_table.py`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from covey.base.errors import CoveyError, RemoteProtocolError
from covey.base.numbers import Seat
from covey.base.text import printable
from covey.net.discovery.host_rendezvous import host_token
from covey.proto.ballot import first_record
from covey.proto.health import Vouch
from covey.runtime.keeper.inspections import Inspections
from covey.runtime.keeper.service import keeper_path
from covey.runtime.links.acceptor import Acceptor
from covey.runtime.links.handshake import LinkCredentials, admit
from covey.runtime.members.process_table import ProcessTable, Rounds
from covey.runtime.members.view_driver import ViewDriver, member_keys
from covey.wire import messages
from covey.wire.formation import ID_BYTES, LIFE_BYTES
from covey.wire.lineage import ID_BYTES as PROPOSAL_BYTES

if TYPE_CHECKING:
    import socket

    from covey.proto.changes import QuorumLost, Waiting
    from covey.runtime.links.link import Link
    from covey.wire.membership import View

logger = logging.getLogger("covey")

FOUNDING_SECONDS: Final = 3.0
"""How long living members of a new generation may take to link; after that, views are decided without waiting."""
FAREWELL_SECONDS: Final = 1.0
REFOUND_SECONDS: Final = 2.0
"""How long waiting processes may link, before they found the run anew because no member is left."""
REFOUND_OLD_SECONDS: Final = 10.0
"""The same while all waiting processes were in the run before: a restarted one may be about to link."""


class _Generation:
    """A generation whose views the keeper decides; it has a view driver once its members are linked."""

    def __init__(self, founded: messages.Founded, now: float) -> None:
        """Check the members; RemoteProtocolError if their cards are malformed."""
        cards = [member.card for member in founded.members]
        self.number, self.lineage, self.is_kept = founded.generation, founded.lineage, founded.is_kept
        self.lives = [card.life for card in cards]
        self.keys = member_keys(founded)
        self.rank_of = {card.life: rank for rank, card in enumerate(cards)}
        are_whole = all(len(key.id) == ID_BYTES and len(key.life) == LIFE_BYTES for key in self.keys)
        if not are_whole or len(self.rank_of) < len(cards) or len(founded.lineage) != PROPOSAL_BYTES:
            raise RemoteProtocolError(
                f"generation {founded.generation}, as a process announced it, has malformed members"
            )
        self.told_by: set[bytes] = set()
        """The lives that announced it, and so understand messages about it."""
        self.patience = founded.patience
        self.open_by = now + FOUNDING_SECONDS
        self.view_driver: ViewDriver | None = None
        self.given_up: set[int] = set()
        """The ranks that the view driver was told are lost."""

    def agrees_with(self, other: _Generation) -> bool:
        """Tell whether two members announced the same generation."""
        return (self.lineage, self.is_kept, self.keys) == (other.lineage, other.is_kept, other.keys)


class LocalKeeper:
    """Links with the processes of a run, vouches for them, and decides the views of their generations."""

    def __init__(self, listener: socket.socket, folder: str, token: bytes) -> None:
        """Take ownership of the listener."""
        self.survives: bool | None = None
        """Whether the run goes on when a member is lost; None until a member has said so. May be read on any thread."""
        self._credentials = LinkCredentials.of_token(token)
        contact = messages.Contact(host_token(Path(folder)), (), keeper_path(folder))
        self._card = messages.Card(b"", secrets.token_bytes(LIFE_BYTES), "keeper", "", os.getpid(), contact)
        self._acceptor = Acceptor([listener], self._credentials.door_key, "the keeper")
        self._acceptor.on_link = self._accept
        self._process_table = ProcessTable()
        self.rounds = Rounds(self._process_table, self._vouch, self._judge_all)
        self._links: dict[bytes, Link] = {}
        """By life."""
        self._generations: dict[int, _Generation] = {}
        """The latest, and the one before it: a member may still have operations in that one."""
        self._cards: dict[bytes, messages.Card] = {}
        """The cards of linked processes, by life."""
        self._left: set[bytes] = set()
        """Lives that said goodbye."""
        self._last_in: dict[bytes, int] = {}
        """By life: the last generation of each process that was a member and has not exited."""
        self._next_seat = 0
        self._memberless_since = math.inf
        """Since when no member lives while other processes wait for a seat."""
        self._inspections = Inspections()
        self._is_closing = False

    async def open(self) -> None:
        """Start to accept links, and to check the processes."""
        self._acceptor.open()
        self.rounds.look()

    async def close(self) -> None:
        """End all links."""
        self._is_closing = True
        self.rounds.close()
        for number in list(self._generations):
            self._end(number)
        await self._acceptor.close()
        links = list(self._links.values())
        for link in links:
            link.close()
        if links:
            await asyncio.wait([asyncio.ensure_future(link.ended.wait()) for link in links], timeout=FAREWELL_SECONDS)
        for link in links:
            link.abort()

    async def inspect(self, question: messages.Inspect, within: float) -> dict[int, messages.Inspected | None]:
        """Ask all members of the latest generation; return the answers by rank, None for those that did not come."""
        generation = self._generations[max(self._generations)] if self._generations else None
        links = {life: link for life, link in self._links.items() if generation and life in generation.rank_of}
        answers = await self._inspections.ask(links, question, within)
        return {} if generation is None else {generation.rank_of[life]: answer for life, answer in answers.items()}

    def request_checkpoint(self) -> None:
        """Have a member of the latest generation ask the others for a checkpoint."""
        generation = self._generations[max(self._generations)] if self._generations else None
        link = (
            next((self._links[life] for life in generation.lives if life in self._links), None) if generation else None
        )
        if link is not None:
            link.send(messages.encode(messages.RequestCheckpoint("", "")))

    # Links with processes

    async def _accept(self, sock: socket.socket, said: bytes) -> None:
        admitted = await admit(sock, self._credentials, said, self._judge)
        if admitted is not None:
            link, hello, _ = admitted
            if self._is_closing:
                link.abort()
            else:
                self._link_up(link, hello.card)

    def _judge(self, hello: messages.Hello, _id: bytes) -> messages.Welcome | messages.Refusal:
        if hello.version != messages.VERSION:
            reason = f"you speak version {hello.version} of covey's protocol, and your keeper {messages.VERSION}"
        elif hello.purpose != "kept":
            reason = "a keeper only talks to the processes of its run"
        elif len(hello.card.life) != LIFE_BYTES:
            reason = "the card is not filled in"
        elif self._process_table.get(hello.card.life) is None and self._process_table.is_full():
            reason = "your keeper has too many processes already"
        elif self._process_table.watch(hello.card, time.monotonic()).state is Vouch.EXITED:
            reason = f"your keeper sees no process {hello.card.pid}"
        else:
            return messages.Welcome(-1, self._card, "keeper")
        return messages.Refusal(reason, retry=False)

    def _link_up(self, link: Link, card: messages.Card) -> None:
        life = card.life
        before = self._links.get(life)
        self._links[life], self._cards[life] = link, card
        if before is not None:
            self._lost_link(life)
            before.abort()
        for view_driver, rank in self._view_drivers_of(life):
            view_driver.link_up(rank, life)
        link.send(messages.encode(self._process_table.vouch()))
        link.attach(functools.partial(self._heard, life, link), functools.partial(self._ended, life, link))

    def _ended(self, life: bytes, link: Link) -> None:
        if isinstance(link.error, CoveyError):
            process = self._process_table.get(life)
            pid = process.pid if process is not None else "unknown"
            logger.warning("process %s was cut off by its keeper: %s", pid, printable(str(link.error)))
        if self._links.get(life) is not link or self._is_closing:
            return
        del self._links[life], self._cards[life]
        self._lost_link(life)
        self.rounds.look_closely(life)

    def _lost_link(self, life: bytes) -> None:
        for view_driver, rank in self._view_drivers_of(life):
            view_driver.link_down(rank)

    def _view_drivers_of(self, life: bytes) -> list[tuple[ViewDriver, int]]:
        """Return the view drivers of the generations that a process is in, each with its rank there."""
        generations = [generation for generation in self._generations.values() if life in generation.rank_of]
        return [(each.view_driver, each.rank_of[life]) for each in generations if each.view_driver is not None]

    def _vouch(self, vouch: messages.Vouch) -> None:
        body = messages.encode(vouch)
        for link in list(self._links.values()):
            link.send(body)

    # Generations

    def _heard(self, life: bytes, link: Link, body: bytes) -> None:
        message = messages.decode_control(body)
        if self._links.get(life) is not link:
            return  # the process has a newer link
        match message:
            case messages.Ping(number):
                link.send(messages.encode(messages.Pong(number, time.time())))
            case messages.Founded():
                self._founded(life, message)
            case messages.Agreeing(number, said):
                self._agreeing(life, number, said)
            case messages.Goodbye():
                self._left.add(life)
            case messages.Inspected():
                self._inspections.answered(life, message)
            case _:
                pass  # not for a keeper

    def _founded(self, life: bytes, founded: messages.Founded) -> None:
        now, told = time.monotonic(), _Generation(founded, time.monotonic())
        if life not in told.rank_of:
            raise RemoteProtocolError(f"a process announced generation {told.number}, which it is not in")
        if told.number > max(self._generations, default=-1):
            for number in [number for number in self._generations if number < told.number - 1]:
                self._end(number)
            self._generations[told.number] = told
            self._next_seat = max(self._next_seat, *(member.seat + 1 for member in founded.members))
            for member in founded.members:
                self._process_table.watch(member.card, now)  # it may never link
                self._last_in[member.card.life] = told.number
        generation = self._generations.get(told.number)
        if generation is None:
            return  # it is over
        if not generation.agrees_with(told):
            rank = told.rank_of[life]
            logger.warning("rank %d announced another generation %d than the other ranks", rank, told.number)
            return
        self.survives = bool(self.survives) or founded.on_loss == "continue"
        generation.told_by.add(life)
        generation.patience = min(generation.patience, told.patience)
        self._judge_members(generation, now)

    def _agreeing(self, life: bytes, number: int, said: bytes) -> None:
        generation = self._generations.get(number)
        if generation is None:
            return  # it is over
        if life not in generation.rank_of:
            raise RemoteProtocolError(f"a process votes in generation {number}, which it is not in")
        if generation.view_driver is not None:  # else the process repeats it
            generation.view_driver.received(generation.rank_of[life], said)

    def _judge_all(self, now: float) -> None:
        for generation in list(self._generations.values()):
            self._judge_members(generation, now)
        if self.survives and self._generations:
            self._refound(self._generations[max(self._generations)], now)

    def _refound(self, last: _Generation, now: float) -> None:
        """If no member is left to give waiting processes a seat, end the run, or let them found it anew."""
        ranks = range(len(last.lives)) if last.view_driver is None else last.view_driver.view.ranks
        members = [last.lives[rank] for rank in ranks]
        waiting = [life for life in self._links if life not in last.rank_of]
        if not last.is_kept or not waiting or any(self._lives(life) for life in members):
            self._memberless_since = math.inf
            return
        self._memberless_since = min(self._memberless_since, now)
        if any(life in self._left for life in members):
            for life in waiting:
                self._links[life].send(messages.encode(messages.Goodbye()))
            return
        # A process that lost its seat has an older state of the run. Rank 0 gives its state to all, so it should be a
        # restarted process, which begins with the initial state or has read a checkpoint.
        last_in = {life: self._was_last_in(life) for life in waiting}
        waiting.sort(key=lambda life: (last_in[life] >= 0, -last_in[life]))
        are_old = last_in[waiting[0]] >= 0
        if now >= self._memberless_since + (REFOUND_OLD_SECONDS if are_old else REFOUND_SECONDS):
            self._memberless_since = now  # start again if this attempt fails
            if are_old:
                logger.warning(
                    "no member is left, and no process was restarted: the run goes back to the state that process "
                    "%d had when it lost its seat in generation %d",
                    *(self._cards[waiting[0]].pid, last_in[waiting[0]]),
                )
            seated = tuple(
                messages.SeatedMember(Seat(self._next_seat + number), self._cards[life])
                for number, life in enumerate(waiting)
            )
            lineage = secrets.token_bytes(PROPOSAL_BYTES)
            founded = messages.Founded(last.number + 1, lineage, True, seated, "continue", last.patience, lineage)
            for life in waiting:
                self._links[life].send(messages.encode(founded))

    def _was_last_in(self, life: bytes) -> int:
        """Return the last generation in which an earlier life of the same process was a member; -1 for none."""
        process_table = {old: self._process_table.get(old) for old in self._last_in}
        for old in [old for old, process in process_table.items() if process is None or process.state is Vouch.EXITED]:
            del self._last_in[old], process_table[old]
        pid = self._cards[life].pid
        return max(
            (self._last_in[old] for old, process in process_table.items() if process and process.pid == pid), default=-1
        )

    def _lives(self, life: bytes) -> bool:
        process = self._process_table.get(life)
        return life not in self._left and process is not None and process.state is not Vouch.EXITED

    def _judge_members(self, generation: _Generation, now: float) -> None:
        """Open the view driver once all living members are linked; tell it which members are lost, and which back."""
        if not generation.is_kept:
            return
        process_table = [self._process_table.get(life) for life in generation.lives]
        lost = {rank for rank, process in enumerate(process_table) if process is None or process.is_lost(now)}
        if generation.view_driver is None:
            here = {generation.rank_of[life] for life in generation.told_by if life in self._links}
            if len(lost | here) < len(process_table) and now < generation.open_by:
                return
            generation.view_driver = self._open_view_driver(generation)
        for rank, process in enumerate(process_table):
            if process is not None and process.state is Vouch.BUSY:
                generation.view_driver.vouched(rank)
        for rank in sorted(lost ^ generation.given_up):
            generation.view_driver.judged(rank, is_dead=rank in lost)
        generation.given_up = lost

    def _open_view_driver(self, generation: _Generation) -> ViewDriver:
        record = first_record(generation.keys, generation.lineage, has_keeper=True)
        view_host = _ViewHost(self._links, generation.lives)
        view_driver = ViewDriver(
            generation.number,
            record,
            len(generation.keys),
            self._card.life,
            view_host,
            has_keeper=True,
            patience=generation.patience,
        )
        for rank, life in enumerate(generation.lives):
            if life in self._links:
                view_driver.link_up(rank, life)
        return view_driver

    def _end(self, number: int) -> None:
        if (view_driver := self._generations.pop(number).view_driver) is not None:
            view_driver.close()


class _ViewHost:
    """The host of a keeper's view driver: it sends messages; a keeper has no operations to freeze."""

    def __init__(self, links: dict[bytes, Link], lives: list[bytes]) -> None:
        """`lives` are those of the members, by rank."""
        self._links, self._lives = links, lives

    def send(self, rank: int, message: messages.Control, *, wakes: bool) -> None:
        if (link := self._links.get(self._lives[rank])) is not None:
            link.send(messages.encode(message))

    def freeze(self, number: int) -> None:
        """Do nothing: a keeper runs no operations."""

    def installed(self, view: View, lost: tuple[int, ...]) -> None:
        """Do nothing: the view driver tells the members."""

    def excluded(self, view: View) -> None:
        """Do nothing: a keeper is in no view."""

    def waiting(self, effect: Waiting) -> None:
        """Do nothing: a keeper needs no quorum."""

    def quorum_lost(self, effect: QuorumLost) -> None:
        """Do nothing: all members were silent for too long; if one comes back, the next loss starts a new ballot."""

    def failed(self, error: CoveyError) -> None:
        """Do nothing: a keeper writes no promises to disk."""
