"""The keeper of a run on one host: tells each process how the others are, and decides the views of the run.

On the control loop of the keeper's process. A process is linked with it while it takes part in the run. Whether a
process without a link has ended, the kernel tells (`views/process_table.py`).

`Inspections` are its questions to the processes about their metrics, and the answers.
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
from covey.base.version import __version__
from covey.net.discovery.host_rendezvous import host_token
from covey.proto.health import ProcessState
from covey.proto.keeper import RunFate, without_members
from covey.runtime.keeper.generation_views import GenerationViews
from covey.runtime.keeper.keeper_stores import KeeperStores
from covey.runtime.keeper.service import keeper_path
from covey.runtime.links.acceptor import Acceptor
from covey.runtime.links.handshake import Greeter, LinkCredentials, admit
from covey.runtime.views.process_table import ProcessTable, Rounds
from covey.wire import messages
from covey.wire.formation import LIFE_BYTES
from covey.wire.formation import LINEAGE_BYTES as PROPOSAL_BYTES
from covey.wire.versions import common

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from covey.runtime.links.link import Link
    from covey.runtime.views.view_driver import ViewDriver

logger = logging.getLogger("covey")

FAREWELL_SECONDS: Final = 1.0
REFOUND_SECONDS: Final = 2.0
"""How long further processes may link, before those that wait begin the run anew because no member is left."""
REFOUND_OLD_SECONDS: Final = 10.0
"""The same while all waiting processes were in the run before: a restarted one may be about to link."""
TOO_FEW: Final = (
    "the run lost all its members and cannot begin again: {waiting} of {size} processes are left. Start it anew; a "
    "program that may begin with fewer says so with min_size"
)


class Inspections:
    """The questions that wait for answers. Answers that come too late are dropped."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, list[asyncio.Future[messages.Inspected]]] = {}
        """By life: several may ask the same question at the same time."""

    async def ask(
        self, links: Mapping[bytes, Link], question: messages.Inspect, within: float
    ) -> dict[bytes, messages.Inspected | None]:
        """Ask over all links, by life; return each answer, or None if there was none within so many seconds."""
        asked = {life: asyncio.get_running_loop().create_future() for life in links}
        for life, future in asked.items():
            self._waiting.setdefault(life, []).append(future)
            links[life].send(messages.encode(question))
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=within)
            return {life: future.result() if future.done() else None for life, future in asked.items()}
        finally:
            for life, future in asked.items():
                self._waiting[life].remove(future)
                if not self._waiting[life]:
                    del self._waiting[life]

    def answered(self, life: bytes, answer: messages.Inspected) -> None:
        """Take an answer, for all that wait for it."""
        for future in self._waiting.get(life, ()):
            if not future.done():
                future.set_result(answer)


class LocalKeeper:
    """Links with the processes of a run, vouches for them, and decides the views of their generations."""

    def __init__(self, listener: socket.socket, folder: str, token: bytes, size: int) -> None:
        """Take ownership of the listener; the run was started with `size` processes."""
        self.survives: bool | None = None
        """Whether the run goes on when a member is lost; None until a member has said so. May be read on any thread."""
        self._has_finished = False
        """Whether a member finished its program: the run does not begin again."""
        self.expected = size
        """How many processes run or will be restarted. May be set on any thread."""
        self._size = size
        self._blamed: dict[bytes, None] = {}
        """Lives of processes that failed, or whose loss made others fail, in the order of the reports."""
        self._fewest: dict[bytes, int] = {}
        """By life: with how many processes a linked one may begin the run anew; 0 for all."""
        self._credentials = LinkCredentials.of_token(token)
        contact = messages.Contact(host_token(Path(folder)), (), keeper_path(folder))
        life = secrets.token_bytes(LIFE_BYTES)
        self._card = messages.Card(b"", life, "keeper", "covey run", os.getpid(), contact, version=__version__)
        self._acceptor = Acceptor([listener], self._credentials.door_key, "the keeper")
        self._acceptor.give_links(self._accept)
        self._process_table = ProcessTable()
        self.rounds = Rounds(self._process_table, self._vouch, self._judge_all)
        self._links: dict[bytes, Link] = {}
        """By life."""
        self._generations: dict[int, GenerationViews] = {}
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
        self._stores = KeeperStores()
        self._is_closing = False

    async def open(self) -> None:
        """Start to accept links, and to check the processes."""
        self._acceptor.open()
        self.rounds.look()

    async def close(self) -> None:
        """End all links."""
        self._is_closing = True
        self.rounds.close()
        self._stores.close()
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

    def culprits(self) -> list[int]:
        """Return the ids of processes that failed by themselves or made others fail, the first first. On any thread."""
        known = (self._process_table.get(life) for life in list(self._blamed))
        return [process.pid for process in known if process is not None]

    # Links with processes

    async def _accept(self, sock: socket.socket, said: bytes) -> None:
        greeter = Greeter(self._card, self._judge, on_incompatible=self._incompatible)
        admitted = await admit(sock, self._credentials, said, greeter)
        if admitted is not None:
            link, hello, _ = admitted
            if self._is_closing:
                link.abort()
            else:
                self._fewest[hello.card.life] = hello.size
                self._link_up(link, hello.card)

    def _judge(self, hello: messages.Hello, _id: bytes) -> messages.Welcome | messages.Refusal:
        if hello.purpose != "kept":
            reason = "a keeper only talks to the processes of its run"
        elif len(hello.card.life) != LIFE_BYTES:
            reason = "the card is not filled in"
        elif self._process_table.get(hello.card.life) is None and self._process_table.is_full():
            reason = "your keeper has too many processes already"
        elif self._process_table.watch(hello.card, time.monotonic()).state is ProcessState.EXITED:
            reason = f"your keeper sees no process {hello.card.pid}"
        else:
            return messages.Welcome(-1, self._card, "keeper")
        return messages.Refusal(reason, retry=False)

    def _incompatible(self, hello: messages.Hello, reason: str) -> None:
        logger.warning("process %d is not kept: %s", hello.card.pid, reason)

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
        self._stores.link_up(life, link)
        link.attach(
            functools.partial(self._heard, life, link),
            functools.partial(self._ended, life, link),
            functools.partial(self._stores.link_has_room, life),
        )

    def _ended(self, life: bytes, link: Link) -> None:
        if isinstance(link.error, CoveyError):
            process = self._process_table.get(life)
            pid = process.pid if process is not None else "unknown"
            logger.warning("process %s was cut off by its keeper: %s", pid, printable(str(link.error)))
        if self._links.get(life) is not link or self._is_closing:
            return
        del self._links[life], self._cards[life], self._fewest[life]
        self._lost_link(life)
        self.rounds.look_closely(life)

    def _lost_link(self, life: bytes) -> None:
        self._stores.link_down(life)
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
            case messages.Posting():
                self._stores.heard(life, message)
            case messages.Goodbye():
                self._left.add(life)
            case messages.Failing(_, cause):
                if self._process_table.get(cause or life) is not None:
                    self._blamed.setdefault(cause or life)
            case messages.Inspected():
                self._inspections.answered(life, message)
            case _:
                pass  # not for a keeper

    def _founded(self, life: bytes, founded: messages.Founded) -> None:
        now, told = time.monotonic(), GenerationViews(founded, time.monotonic(), self._stores.view)
        if life not in told.rank_of:
            raise RemoteProtocolError(
                f"process {life.hex()[:8]} announced generation {told.number} but is not a member of it"
            )
        if self._generations and self._begins_again(told):
            for number in list(self._generations):
                self._end(number)
            self._has_finished = False
        if told.number > max(self._generations, default=-1):
            for number in [number for number in self._generations if number < told.number - 1]:
                self._end(number)
            self._generations[told.number] = told
            self._stores.founded(founded, self._links)
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
        generation.judge(self._process_table, self._links, self._left, self._card.life, now)

    def _begins_again(self, told: GenerationViews) -> bool:
        """Tell whether the processes have all left the run, and formed it anew: their programs join more than once."""
        latest = self._generations[max(self._generations)]
        if told.number or not latest.rank_of.keys().isdisjoint(told.rank_of):
            return False
        for link in [self._links[life] for life in latest.lives if life in self._links]:
            link.catch_up()  # each has said goodbye before it joined again, over another link
        return not any(self._lives(life) and life in self._links for life in latest.lives)

    def _agreeing(self, life: bytes, number: int, said: bytes) -> None:
        generation = self._generations.get(number)
        if generation is None:
            return  # it is over
        if life not in generation.rank_of:
            raise RemoteProtocolError(
                f"process {life.hex()[:8]} sent a vote for generation {number} but is not a member of it"
            )
        if generation.view_driver is not None:  # else the process repeats it
            generation.view_driver.received(generation.rank_of[life], said)
            self._has_finished = self._has_finished or generation.view_driver.has_finished

    def _judge_all(self, now: float) -> None:
        for generation in list(self._generations.values()):
            generation.judge(self._process_table, self._links, self._left, self._card.life, now)
        if self.survives and self._generations:
            self._refound(self._generations[max(self._generations)], now)

    def _refound(self, last: GenerationViews, now: float) -> None:
        """If no member is left to give waiting processes a seat, end the run, or let them begin it anew."""
        ranks = range(len(last.lives)) if last.view_driver is None else last.view_driver.view.ranks
        waiting = [life for life in self._links if life not in last.rank_of]
        if not last.is_kept or not waiting or any(self._lives(last.lives[rank]) for rank in ranks):
            self._memberless_since = math.inf
            return
        self._memberless_since = min(self._memberless_since, now)
        # A process that lost its seat has an older state of the run. Rank 0 gives its state to all, so it should be a
        # restarted process, which begins with the initial state or has read a checkpoint.
        last_in = {life: self._was_last_in(life) for life in waiting}
        waiting.sort(key=lambda life: (last_in[life] >= 0, -last_in[life]))
        are_old = last_in[waiting[0]] >= 0
        outcome = without_members(
            has_finished=self._has_finished,
            size=self._size,
            expected=self.expected,
            fewest=[self._fewest[life] for life in waiting],
            is_late=now >= self._memberless_since + (REFOUND_OLD_SECONDS if are_old else REFOUND_SECONDS),
        )
        match outcome:
            case RunFate.OVER:
                self._dismiss(waiting, "")
            case RunFate.HOPELESS:
                self._dismiss(waiting, TOO_FEW.format(waiting=len(waiting), size=self._size))
            case RunFate.BEGIN:
                self._memberless_since = now  # start again if this attempt fails
                if are_old:
                    logger.warning(
                        "no member is left, and no process was restarted: the run goes back to the state that process "
                        "%d had when it lost its seat in generation %d",
                        *(self._cards[waiting[0]].pid, last_in[waiting[0]]),
                    )
                self._begin_anew(waiting, last)

    def _dismiss(self, waiting: list[bytes], reason: str) -> None:
        for life in waiting:
            self._links[life].send(messages.encode(messages.Goodbye(reason)))

    def _begin_anew(self, waiting: list[bytes], last: GenerationViews) -> None:
        """Give each waiting process a seat in a new generation of a new lineage."""
        seated = tuple(
            messages.SeatedMember(Seat(self._next_seat + number), self._cards[life])
            for number, life in enumerate(waiting)
        )
        lineage = secrets.token_bytes(PROPOSAL_BYTES)
        try:
            versions = common(self._links[life].there.versions for life in waiting).fixed()
        except ValueError as error:
            self._dismiss(waiting, str(error))
            return
        founded = messages.Founded(
            last.number + 1, lineage, True, seated, "continue", last.patience, lineage, versions=versions
        )
        for life in waiting:
            self._links[life].send(messages.encode(founded))

    def _was_last_in(self, life: bytes) -> int:
        """Return the last generation in which an earlier life of the same process was a member; -1 for none."""
        process_table = {old: self._process_table.get(old) for old in self._last_in}
        for old in [
            old for old, process in process_table.items() if process is None or process.state is ProcessState.EXITED
        ]:
            del self._last_in[old], process_table[old]
        pid = self._cards[life].pid
        return max(
            (self._last_in[old] for old, process in process_table.items() if process and process.pid == pid), default=-1
        )

    def _lives(self, life: bytes) -> bool:
        process = self._process_table.get(life)
        return life not in self._left and process is not None and process.state is not ProcessState.EXITED

    def _end(self, number: int) -> None:
        if (view_driver := self._generations.pop(number).view_driver) is not None:
            view_driver.close()
