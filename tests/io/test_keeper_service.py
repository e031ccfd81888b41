"""The keeper's ear: real processes that stop and die, links as ranks make them, and views that the keeper decides."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVarTuple

import msgspec
import pytest
from tests.support.waiting import DEADLINE

from covey.base.errors import AuthError, ConfigError, ConnectError
from covey.base.numbers import Seat
from covey.proto.ballot import first_record
from covey.proto.health import ProcessState
from covey.runtime.keeper import local_keeper as local_keeper
from covey.runtime.keeper.service import KeeperService, keeper_path
from covey.runtime.links.handshake import LinkCredentials, RefusedError, dial
from covey.runtime.views import process_table
from covey.runtime.views.view_driver import ViewDriver, rank_id
from covey.wire import messages
from covey.wire import store as store_messages
from covey.wire.membership import MemberKey
from covey.wire.versions import OURS, common, only

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from covey.base.errors import CoveyError
    from covey.proto.changes import QuorumAwaited, QuorumLost
    from covey.runtime.links.link import Link
    from covey.wire.membership import View

Args = TypeVarTuple("Args")
TOKEN, LINEAGE = b"t" * 32, b"l" * 16
CREDENTIALS = LinkCredentials.of_token(TOKEN)
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of stopped processes")


@pytest.fixture
def folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="t-", dir="/tmp")
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def service(folder: str) -> Iterator[KeeperService]:
    service = KeeperService(folder, TOKEN, 3)
    service.start()
    try:
        yield service
    finally:
        service.close()


def run(work: Callable[[contextlib.AsyncExitStack], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE), contextlib.AsyncExitStack() as stack:
            await work(stack)

    asyncio.run(bounded())


class Rank:
    """A process that sleeps, and the link that it would have with its keeper."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        contact = messages.Contact("host", (), "")
        self.card = messages.Card(b"", secrets.token_bytes(16), "wren", "wren", process.pid, contact)
        self.said: list[messages.Control] = []
        self.ends = 0
        self.link: Link
        self.keeper: messages.Card
        self.on_message: Callable[[messages.Control], None] = lambda _message: None
        self._changed = asyncio.Event()

    @classmethod
    def start(cls, stack: contextlib.AsyncExitStack) -> Rank:
        """Start a process that ends with the test."""
        process = subprocess.Popen(["sleep", "1000"])
        stack.callback(process.wait, DEADLINE)
        stack.callback(process.kill)
        return cls(process)

    @classmethod
    async def come(cls, stack: contextlib.AsyncExitStack, service: KeeperService) -> Rank:
        """Start a process, and link with the keeper in its place."""
        rank = cls.start(stack)
        await rank.dial(stack, service)
        return rank

    async def dial(self, stack: contextlib.AsyncExitStack, service: KeeperService, fewest: int = 0) -> Link:
        """`fewest` is the number of processes with which it may begin a run that has no members; 0 for all."""
        self.link, welcome, _ = await dial(service.path, CREDENTIALS, hello(self.card, size=fewest))
        assert (welcome.rank, welcome.purpose, welcome.card.id) == (-1, "keeper", b"")
        self.keeper = welcome.card
        stack.push_async_callback(self.link.ended.wait)
        stack.callback(self.link.abort)
        self.link.attach(self._heard, self._ended)
        return self.link

    def _heard(self, body: bytes) -> None:
        self.said.append(messages.decode_control(body))
        self.on_message(self.said[-1])
        self._changed.set()

    def _ended(self) -> None:
        self.ends += 1
        self._changed.set()

    def send(self, message: messages.Control) -> None:
        self.link.send(messages.encode(message))

    def standing(self, other: Rank) -> int | None:
        """Return what the keeper last said of another rank."""
        vouches = [message for message in self.said if isinstance(message, messages.Vouch)]
        return dict(vouches[-1].processes).get(other.card.life) if vouches else None

    async def until(self, condition: Callable[[*Args], bool], *args: *Args) -> None:
        """Wait until something that was heard makes a condition true."""
        while not condition(*args):
            self._changed.clear()
            await self._changed.wait()


def hello(card: messages.Card, **changes: Any) -> messages.Hello:
    fields = {"version": messages.VERSION, "nonce": secrets.token_bytes(32), "purpose": "kept", "run": "", "rank": 0}
    return messages.Hello(**{**fields, "size": 3, "lanes": "auto", "card": card, **changes})


def founded(ranks: list[Rank], generation: int = 1, **changes: Any) -> messages.Founded:
    members = tuple(messages.SeatedMember(Seat(10 + rank), each.card) for rank, each in enumerate(ranks))
    return messages.Founded(**{
        "generation": generation, "lineage": LINEAGE, "is_kept": True, "members": members, "patience": 2 * DEADLINE,
        **changes,
    })  # fmt: skip


class Member:
    """One rank's part in a generation: its view driver talks to the others in memory, and to the keeper by its link."""

    def __init__(self, ranks: list[Rank], index: int, generation: int = 1) -> None:
        self.index, self._ranks = index, ranks
        self.others: dict[int, Member] = {}
        self.views: list[View] = []
        self.lost: list[tuple[int, ...]] = []
        self.is_excluded = False
        seats = [MemberKey(rank_id(rank), each.card.life) for rank, each in enumerate(ranks)]
        record = first_record(seats, LINEAGE, has_keeper=True)
        # No view comes because a member has waited long enough.
        self.view_driver = ViewDriver(
            generation, record, index, ranks[index].card.life, self, has_keeper=True, patience=2 * DEADLINE
        )
        ranks[index].on_message = self.heard

    def open(self, members: list[Member]) -> None:
        self.others = {member.index: member for member in members if member is not self}
        for index in self.others:
            self.view_driver.link_up(index, self._ranks[index].card.life)
        self.view_driver.link_up(len(self._ranks), self._ranks[self.index].keeper.life)

    def gone(self) -> None:
        """This rank is dead: the others lose their links with it."""
        self.view_driver.close()
        for other in self.others.values():
            del other.others[self.index]
            other.view_driver.link_down(self.index)

    def heard(self, message: messages.Control) -> None:
        if isinstance(message, messages.Agreeing) and message.generation == self.view_driver.generation:
            self.view_driver.received(len(self._ranks), message.body)

    def send(self, rank: int, message: messages.Control, *, wakes: bool) -> None:
        assert isinstance(message, messages.Agreeing)
        if rank == len(self._ranks):
            self._ranks[self.index].send(message)
        elif (other := self.others.get(rank)) is not None:
            asyncio.get_running_loop().call_soon(other.view_driver.received, self.index, message.body)

    def freeze(self, number: int) -> None:
        asyncio.get_running_loop().call_soon(self.view_driver.frozen, number, ())

    def accepted(self) -> None:
        pass

    def installed(self, view: View, lost: tuple[int, ...]) -> None:
        self.views.append(view)
        self.lost.append(lost)

    def excluded(self, view: View) -> None:
        self.is_excluded = True

    def waiting(self, effect: QuorumAwaited) -> None: ...

    def quorum_lost(self, effect: QuorumLost) -> None:
        raise AssertionError(f"a keeper can always decide: {effect}")

    def failed(self, error: CoveyError) -> None:
        raise error


async def only_news_are_told(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the keeper tell how its processes are only after a change, from now on."""
    monkeypatch.setattr(process_table, "REPORT_EVERY", 2 * DEADLINE)
    rank.said.clear()
    await rank.until(lambda: messages.Vouch in map(type, rank.said))  # the report that was due by then


async def found(stack: contextlib.AsyncExitStack, ranks: list[Rank], generation: int = 1) -> list[Member]:
    """Found a generation as its members do: a view driver each, then a word to the keeper."""
    members = [Member(ranks, index, generation) for index in range(len(ranks))]
    for member in members:
        stack.callback(member.view_driver.close)
        member.open(members)
    for rank in ranks:
        rank.send(founded(ranks, generation))
    return members


def test_a_killed_process_is_told_of_as_exited_at_once(service: KeeperService, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        ranks = [await Rank.come(stack, service) for _ in range(3)]
        await asyncio.gather(
            *(rank.until(lambda rank: rank.standing(ranks[2]) == ProcessState.BUSY, rank) for rank in ranks)
        )
        await only_news_are_told(ranks[0], monkeypatch)
        ranks[1].process.kill()
        known = [rank.until(lambda rank: rank.standing(ranks[1]) == ProcessState.EXITED, rank) for rank in ranks]
        await asyncio.gather(*known)  # the dead one's link is kept by us, so it is told as well
        assert [ranks[0].standing(rank) for rank in ranks] == [
            ProcessState.BUSY,
            ProcessState.EXITED,
            ProcessState.BUSY,
        ]
        with pytest.raises(RefusedError, match=f"sees no process {ranks[1].process.pid}"):
            await ranks[1].dial(stack, service)

    run(work)


@linux
def test_a_stopped_process_is_told_of_and_so_is_its_going_on(
    service: KeeperService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        one, other = [await Rank.come(stack, service) for _ in range(2)]
        await one.until(lambda: one.standing(other) == ProcessState.BUSY)
        await only_news_are_told(one, monkeypatch)
        other.process.send_signal(signal.SIGSTOP)
        await one.until(lambda: one.standing(other) == ProcessState.STOPPED)
        assert one.standing(one) == ProcessState.BUSY
        other.process.send_signal(signal.SIGCONT)
        await one.until(lambda: one.standing(other) == ProcessState.BUSY)

    run(work)


def test_every_process_hears_every_half_second_that_the_others_are_well(
    service: KeeperService, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, reports = 0, list[int]()
    look, vouch = process_table.ProcessTable.look, process_table.ProcessTable.vouch

    def count(table: process_table.ProcessTable, now: float) -> bool:
        nonlocal looks
        looks += 1
        return look(table, now)

    def note(table: process_table.ProcessTable) -> messages.Vouch:
        reports.append(looks)
        return vouch(table)

    monkeypatch.setattr(process_table.ProcessTable, "look", count)
    monkeypatch.setattr(process_table.ProcessTable, "vouch", note)

    async def work(stack: contextlib.AsyncExitStack) -> None:
        at = time.monotonic()
        rank = await Rank.come(stack, service)
        rank.send(messages.Ping(77))
        await rank.until(lambda: len([each for each in rank.said if isinstance(each, messages.Vouch)]) >= 4)
        assert time.monotonic() - at > 1.4
        pauses = [later - earlier for earlier, later in itertools.pairwise(reports)]
        assert max(pauses) <= 6, "so many looks, each a tenth of a second after the last"
        assert [each.number for each in rank.said if isinstance(each, messages.Pong)] == [77]

    run(work)


def test_a_link_that_ends_is_no_death_and_a_second_one_takes_its_place(service: KeeperService) -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        one, other = [await Rank.come(stack, service) for _ in range(2)]
        first = other.link
        first.abort()
        await other.until(lambda: other.ends == 1)
        one.said.clear()
        await one.until(lambda: one.standing(other) == ProcessState.BUSY)
        second = await other.dial(stack, service)
        other.said.clear()
        await other.dial(stack, service)
        await other.until(lambda: other.ends == 2)
        assert second.ended.is_set()
        await other.until(lambda: other.standing(one) == ProcessState.BUSY)
        other.process.kill()
        await one.until(lambda: one.standing(other) == ProcessState.EXITED)

    run(work)


def test_a_process_that_is_not_of_the_run_is_refused(service: KeeperService) -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        rank = await Rank.come(stack, service)
        cases: list[tuple[dict[str, Any], str]] = [
            ({"purpose": "rank"}, "only talks to the processes of its run"),
            ({"versions": only(99)}, "speaks protocol 99 .*, covey run speaks"),
            ({"card": messages.Card(b"", b"short", "", "", 1, rank.card.contact)}, "not filled in"),
            ({"card": messages.Card(b"", b"l" * 16, "", "", 1 << 40, rank.card.contact)}, "sees no process"),
        ]
        for changes, reason in cases:
            with pytest.raises(RefusedError, match=reason):
                await dial(service.path, CREDENTIALS, hello(**{"card": rank.card, **changes}))
        with pytest.raises((AuthError, ConnectError)):
            await dial(service.path, LinkCredentials.of_token(b"x" * 32), hello(rank.card))
        assert rank.link.is_open

    run(work)


def test_nonsense_cuts_off_the_process_that_sends_it_and_no_other(
    service: KeeperService, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        ranks = [await Rank.come(stack, service) for _ in range(3)]
        await found(stack, ranks)
        twins = (messages.SeatedMember(Seat(1), ranks[0].card), messages.SeatedMember(Seat(2), ranks[0].card))
        for body in [
            b"\xff",
            messages.encode(founded(ranks, 2, members=twins)),
            messages.encode(founded(ranks, 2, lineage=b"short")),
            messages.encode(founded(ranks[:1], 2)),
            messages.encode(messages.Agreeing(1, b"\xff")),
        ]:
            ends = ranks[2].ends
            ranks[2].link.send(body)
            await ranks[2].until(lambda ends: ranks[2].ends == ends + 1, ends)
            await ranks[2].dial(stack, service)
        ranks[2].send(messages.Agreeing(99, b"\xff"))  # of a generation that the keeper has never heard of
        ranks[2].send(messages.Ping(5))
        await ranks[2].until(lambda: messages.Pong in map(type, ranks[2].said))
        assert (ranks[0].ends, ranks[1].ends) == (0, 0)

    with caplog.at_level(logging.WARNING, logger="covey"):
        run(work)
    assert sum("was cut off by its keeper" in record.getMessage() for record in caplog.records) == 5


def test_the_keeper_decides_views_until_one_is_left(service: KeeperService) -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        ranks = [await Rank.come(stack, service) for _ in range(4)]
        members = await found(stack, ranks)
        await ranks[0].until(lambda: members[0].view_driver.leader() is not None)
        assert [member.views for member in members] == [[]] * 4  # no member was in trouble on the way
        alive = [0, 1, 2, 3]
        for number, victim in enumerate((1, 0, 3), start=1):
            ranks[victim].process.kill()
            ranks[victim].link.abort()
            members[victim].gone()
            alive.remove(victim)
            for index in alive:
                await ranks[index].until(lambda index, number: len(members[index].views) == number, index, number)
                view = members[index].views[-1]
                assert (view.number, view.ranks, members[index].lost[-1]) == (number, tuple(alive), (victim,))

    run(work)


@linux
def test_a_stopped_member_is_excluded_soon_and_hears_so_when_it_wakes(service: KeeperService) -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        ranks = [await Rank.come(stack, service) for _ in range(3)]
        members = await found(stack, ranks)
        asleep, deliver = list[messages.Control](), ranks[1].on_message
        ranks[1].on_message = asleep.append  # what a stopped process does not read
        ranks[1].process.send_signal(signal.SIGSTOP)
        for index in (0, 2):
            await ranks[index].until(lambda index: len(members[index].views) == 1, index)
            assert members[index].views[0].ranks == (0, 2)
        ranks[1].process.send_signal(signal.SIGCONT)
        for message in asleep:
            deliver(message)
        ranks[1].on_message = deliver
        await ranks[1].until(lambda: members[1].is_excluded)

    run(work)


def test_a_member_that_is_slow_to_come_to_the_keeper_is_not_lost(service: KeeperService) -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        early = [await Rank.come(stack, service) for _ in range(2)]
        ranks = [*early, Rank.start(stack)]
        members = [Member(ranks, index) for index in range(3)]
        for member in members:
            stack.callback(member.view_driver.close)
        for rank in early:
            rank.send(founded(ranks))
        await early[0].until(lambda: sum(isinstance(each, messages.Vouch) for each in early[0].said) >= 4)  # 1.5 s
        assert early[0].standing(ranks[2]) == ProcessState.BUSY  # it is known from the founding
        await ranks[2].dial(stack, service)
        for member in members:
            member.open(members)
        ranks[2].send(founded(ranks))
        await ranks[2].until(lambda: any(isinstance(each, messages.Agreeing) for each in ranks[2].said))
        await ranks[0].until(lambda: members[0].view_driver.leader() == 0)
        assert [member.views for member in members] == [[]] * 3

    run(work)


def test_a_member_that_dies_before_it_ever_came_is_lost_all_the_same(service: KeeperService) -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        early = [await Rank.come(stack, service) for _ in range(2)]
        ranks = [early[0], Rank.start(stack), early[1]]
        ranks[1].process.kill()
        ranks[1].process.wait(DEADLINE)
        members = [Member(ranks, index) for index in range(3)]
        for member in (members[0], members[2]):
            stack.callback(member.view_driver.close)
            member.open(members)
        members[1].others = {0: members[0], 2: members[2]}
        members[1].gone()
        for rank in early:
            rank.send(founded(ranks))
        for index in (0, 2):
            await ranks[index].until(lambda index: len(members[index].views) == 1, index)
            assert members[index].views[0].ranks == (0, 2)

    run(work)


def test_the_last_two_generations_have_views_and_a_member_that_contradicts_is_not_believed(
    service: KeeperService, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        ranks = [await Rank.come(stack, service) for _ in range(3)]
        await found(stack, ranks[:2], 0)
        before = Member(ranks, 0), Member(ranks, 1), Member(ranks, 2)
        for member in before:
            stack.callback(member.view_driver.close)
            member.open(list(before))
        for rank in ranks:
            rank.send(founded(ranks))
        await found(stack, ranks[1:], 2)
        ranks[1].send(founded(ranks[::-1], 2))
        ranks[1].send(founded(ranks[:2], 0))  # of no interest any more
        ranks[1].send(messages.Agreeing(0, b"\xff"))
        for index, rank in enumerate(ranks):  # those of generation 1 are still in it
            rank.on_message = before[index].heard
        ranks[2].process.kill()
        ranks[2].link.abort()
        before[2].gone()
        for index in (0, 1):
            await ranks[index].until(lambda index: len(before[index].views) == 1, index)
            assert before[index].views[0].ranks == (0, 1)
        await ranks[1].until(lambda: any(_tells_of(2, message) for message in ranks[1].said))

    with caplog.at_level(logging.WARNING, logger="covey"):
        run(work)
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1 announced another generation 2 than the other ranks"
    ]


def _tells_of(generation: int, message: messages.Control) -> bool:
    return isinstance(message, messages.Agreeing) and message.generation == generation


def test_a_run_survives_once_a_member_said_so(service: KeeperService) -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        assert service.survives is False
        ranks = [await Rank.come(stack, service) for _ in range(2)]
        await asyncio.to_thread(service.catch_up)
        assert service.survives is None
        ranks[0].send(founded(ranks, is_kept=False))
        await asyncio.to_thread(service.catch_up)
        assert service.survives is False
        ranks[1].send(founded(ranks, 2, is_kept=False, on_loss="continue"))
        ranks[1].link.abort()
        await asyncio.to_thread(service.catch_up)
        assert service.survives

    run(work)
    service.close()
    assert service.survives  # asked when all is over


async def all_members_lost_but_one(
    stack: contextlib.AsyncExitStack, service: KeeperService, *, has_finished: bool = False, fewest: int = 0
) -> Rank:
    """Return the process of a member that left, in its next life: it waits outside, and no member is left."""
    ranks = [await Rank.come(stack, service) for _ in range(3)]
    members = [Member(ranks, index) for index in range(3)]
    for member in members:
        stack.callback(member.view_driver.close)
        member.open(members)
    for rank in ranks:
        rank.send(founded(ranks, on_loss="continue"))
    evicted = ranks[0]
    await evicted.until(lambda: any(isinstance(each, messages.Agreeing) for each in evicted.said))
    members[0].view_driver.leave(is_finished=has_finished)
    await evicted.until(lambda: members[0].is_excluded)
    evicted.send(messages.Goodbye())
    again = Rank(evicted.process)
    await again.dial(stack, service, fewest)
    for rank, member in zip(ranks[1:], members[1:], strict=True):
        member.gone()
        rank.process.kill()
    return again


def anew(rank: Rank) -> messages.Founded:
    return next(each for each in rank.said if isinstance(each, messages.Founded))


@linux
def test_a_run_that_lost_all_members_begins_with_what_a_process_has_that_was_started_again(
    service: KeeperService,
) -> None:
    """And not with the older state of one that had lost its place, though that one came first."""

    async def work(stack: contextlib.AsyncExitStack) -> None:
        again = await all_members_lost_but_one(stack, service)
        new = [await Rank.come(stack, service) for _ in range(2)]
        await again.until(lambda: any(isinstance(each, messages.Founded) for each in again.said))
        told = anew(again)
        assert (told.generation, told.is_kept) == (2, True)
        assert [member.card.life for member in told.members] == [*(each.card.life for each in new), again.card.life]

    run(work)


@linux
def test_a_run_in_which_a_member_finished_does_not_begin_again(service: KeeperService) -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        again = await all_members_lost_but_one(stack, service, has_finished=True, fewest=1)
        new = [await Rank.come(stack, service) for _ in range(2)]
        for rank in (again, *new):
            await rank.until(lambda rank: messages.Goodbye() in rank.said, rank)
            assert messages.Founded not in map(type, rank.said)

    run(work)


@linux
def test_processes_that_are_too_few_to_begin_a_run_again_are_told(service: KeeperService) -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        again = await all_members_lost_but_one(stack, service)
        service.will_not_return()
        new = await Rank.come(stack, service)
        for rank in (again, new):
            await rank.until(lambda rank: messages.Goodbye in map(type, rank.said), rank)
            told = next(each for each in rank.said if isinstance(each, messages.Goodbye))
            assert "2 of 3 processes are left. Start it anew" in told.reason
            assert messages.Founded not in map(type, rank.said)

    run(work)


@linux
def test_the_last_member_is_not_excluded_while_its_process_exists(
    service: KeeperService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_table, "STOPPED_SILENCE", 0.0)
    monkeypatch.setattr(process_table, "REPORT_EVERY", 0.0)

    async def work(stack: contextlib.AsyncExitStack) -> None:
        one, other = ranks = [await Rank.come(stack, service) for _ in range(2)]
        members = await found(stack, ranks)
        members[1].gone()
        other.process.kill()
        await one.until(lambda: [view.ranks for view in members[0].views] == [(0,)])
        one.process.send_signal(signal.SIGSTOP)
        await one.until(lambda: one.standing(one) == ProcessState.STOPPED)
        looks = len(one.said) + 5  # the keeper judges its processes after each of these reports
        await one.until(lambda: len(one.said) > looks)
        one.process.send_signal(signal.SIGCONT)
        await one.until(lambda: one.standing(one) == ProcessState.BUSY)
        assert [view.ranks for view in members[0].views] == [(0,)]
        assert not members[0].is_excluded

    run(work)


@linux
def test_a_run_whose_processes_have_all_lost_their_places_says_that_it_goes_back(
    service: KeeperService, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_keeper, "REFOUND_OLD_SECONDS", 3.0)

    async def work(stack: contextlib.AsyncExitStack) -> None:
        again = await all_members_lost_but_one(stack, service, fewest=1)
        began = time.monotonic()
        await again.until(lambda: any(isinstance(each, messages.Founded) for each in again.said))
        assert time.monotonic() - began > 2.0  # one that was started again had time to come
        assert [member.card.life for member in anew(again).members] == [again.card.life]
        said = f"the state that process {again.process.pid} had when it lost its seat in generation 1"
        assert said in caplog.text

    run(work)


def test_closing_ends_every_link_and_leaves_nothing(folder: str) -> None:
    async def work(stack: contextlib.AsyncExitStack) -> None:
        service = KeeperService(folder, TOKEN, 3)
        service.start()
        stack.callback(service.close)
        ranks = [await Rank.come(stack, service) for _ in range(2)]
        await found(stack, ranks)
        sock, _ = await asyncio.open_unix_connection(service.path)  # a connection that never answers at the door
        await asyncio.gather(*(asyncio.to_thread(service.close) for _ in range(3)))
        await asyncio.gather(*(rank.until(lambda rank: rank.ends == 1, rank) for rank in ranks))
        with contextlib.suppress(ConnectionResetError):  # if the service was closed before it accepted
            while await sock.read(100):
                pass
        _.close()

    threads = threading.active_count()
    run(work)
    assert list(Path(folder).iterdir()) == []
    assert "covey-keeper" not in {thread.name for thread in threading.enumerate()}
    assert threading.active_count() <= threads + 1  # the control loop's, if this was its first use


def test_a_keeper_service_without_clients_costs_nothing(folder: str) -> None:
    code = f"""
        import sys
        from covey.runtime.keeper.service import KeeperService
        service = KeeperService({folder!r}, b"t" * 32, 3)
        service.start()
        print("asyncio" in sys.modules, "msgspec" in sys.modules, service.survives)
        service.catch_up()
        service.close()
        service.close()
    """
    lines = "\n".join(line.strip() for line in code.splitlines())
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=DEADLINE, check=True)
    assert done.stdout.split() == ["False", "False", "False"]
    assert list(Path(folder).iterdir()) == []


def test_a_folder_that_others_may_enter_or_that_has_a_keeper_is_refused(folder: str, service: KeeperService) -> None:
    with pytest.raises(ConfigError, match="cannot listen at"):
        KeeperService(folder, TOKEN, 3).start()
    shared = Path(folder) / "shared"
    shared.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="0700"):
        KeeperService(str(shared), TOKEN, 3).start()
    assert keeper_path(folder) == service.path


@pytest.mark.parametrize("keeps_store", [False, True], ids=["no file", "file"])
def test_a_question_waits_for_what_the_file_of_the_first_member_has(service: KeeperService, keeps_store: bool) -> None:
    put = store_messages.Put((("a", b"1"),))
    facts = {"versions": common([OURS]).fixed(), "store_bytes": 1 << 20}

    def ask(rank: Rank, number: int, body: store_messages.Body) -> None:
        rank.send(messages.Posting(0, number, store_messages.encode_body(body)))

    def answers(rank: Rank) -> list[store_messages.Body]:
        return [store_messages.decode_body(each.body) for each in rank.said if isinstance(each, messages.Posting)]

    async def work(stack: contextlib.AsyncExitStack) -> None:
        first, other = [await Rank.come(stack, service) for _ in range(2)]
        first.card = msgspec.structs.replace(first.card, keeps_store=keeps_store)
        other.send(founded([first, other], 0, **facts))
        ask(other, 1, store_messages.Submit(0, 1, store_messages.Names()))
        other.send(messages.Ping(7))
        await other.until(lambda: any(isinstance(each, messages.Pong) and each.number == 7 for each in other.said))
        assert answers(other) == [] if keeps_store else [store_messages.Done()]
        first.send(founded([first, other], 0, **facts))
        ask(first, 1, store_messages.Submit(0, 1, put))
        ask(first, 0, store_messages.Last(0, -1))
        await other.until(lambda: len(answers(other)) == 1)
        assert answers(other) == [store_messages.Done((b"a",) if keeps_store else ())]

    run(work)
