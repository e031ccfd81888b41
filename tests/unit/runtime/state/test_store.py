"""What stores have to say waits for room on a link: a copy of any size does, and other things up to a limit."""

from __future__ import annotations

import asyncio
import math
import random
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from covey.base.errors import ConfigError, RemoteProtocolError
from covey.base.numbers import Seat
from covey.net.host.store_file import StoreFile
from covey.proto.replication import KEEPER, NO_COPY, Replica, SendToReplica
from covey.proto.store_copy import UNACKNOWLEDGED_LIMIT
from covey.runtime.peers.peer_table import PeerTable
from covey.runtime.state import store, store_driver, store_link
from covey.runtime.tasks import Tasks
from covey.wire import messages
from covey.wire import store as wire
from covey.wire.versions import FEATURES, QUORUM_STORE

if TYPE_CHECKING:
    from pathlib import Path

ME, NEWCOMER = Seat(0), Seat(1)
ALONE, TOGETHER = 0, 1
"""The configurations: that of the first view, and that of the view with the newcomer."""


class Links:
    """The link with the newcomer, as `Stores` sees it: it takes a message for each `room`."""

    def __init__(self) -> None:
        self.room, self.is_aborted = 0, False
        self.sent: list[messages.Posting] = []
        newcomer: Any = SimpleNamespace(link=self, is_excluded=False, send=self.send)
        peers = PeerTable(ME, {NEWCOMER: newcomer})
        self.stores = store.Stores(peers, Tasks("a test"), survives_losses=True)

    @property
    def has_room(self) -> bool:
        return self.room > 0

    def send(self, posting: messages.Posting) -> None:
        assert self.has_room, "the link would drop it"
        self.room -= 1
        self.sent.append(posting)

    def abort(self) -> None:
        self.is_aborted = True

    def ask(self, question: wire.Question) -> Future[wire.Done]:
        outcome: Future[wire.Done] = Future()
        self.stores.ask(0, question, outcome)
        return outcome

    def hear(self, body: wire.Replication) -> None:
        self.stores.heard(NEWCOMER, messages.Posting(0, 0, wire.encode_body(body)))

    def meet(self) -> None:
        """Let the newcomer come, and say that it has no copy."""
        self.stores.view(0, TOGETHER, [ME, NEWCOMER])
        self.room = 1  # for the question
        self.stores.link_has_room(NEWCOMER)
        self.hear(wire.Last(TOGETHER, NO_COPY))


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Links:
    monkeypatch.setattr(store_link, "UNSENT_LIMIT", 50)
    links = Links()
    links.stores.view(0, ALONE, [ME])
    for number in range(200):
        assert links.ask(wire.Push("queue", b"%d" % number)).result(0) == wire.Done()
    return links


def test_a_copy_of_more_parts_than_may_wait_otherwise_arrives_whole(links: Links) -> None:
    links.meet()
    assert len(links.sent) == 1
    newcomer = Replica(NEWCOMER)
    newcomer.configure(TOGETHER, (ME, NEWCOMER))
    while not newcomer.has_copy:
        posting = links.sent.pop(0)
        body = wire.decode_body(posting.body)
        assert not isinstance(body, wire.BodyPiece)
        newcomer.heard(ME, posting.store, posting.number, body)
        links.room = 1
        links.stores.link_has_room(NEWCOMER)
        assert len(links.sent) == 1
    assert not links.is_aborted
    copy = newcomer._copy
    assert copy is not None
    assert copy.stores[0].queued() == [("queue", b"%d" % number) for number in range(200)]


def test_a_view_that_is_told_again_drops_nothing_that_waits(links: Links) -> None:
    """The member does not ask again: it knows the view."""
    links.meet()
    sent = len(links.sent)
    links.stores.view(0, TOGETHER, [ME, NEWCOMER])
    links.room = 1
    links.stores.link_has_room(NEWCOMER)
    assert len(links.sent) == sent + 1


def test_an_entry_that_was_asked_for_long_before_the_first_view_lasts_from_that_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(store, "waking_clock", lambda: now)
    monkeypatch.setattr(store_driver, "waking_clock", lambda: now)
    stores = store.Stores(PeerTable(ME, {}), Tasks("a test"), survives_losses=True)
    loop = asyncio.new_event_loop()

    async def ask() -> list[int]:
        nonlocal now
        stores.ask(0, wire.Put((("a", b""),), milliseconds=5000), Future())
        now += 60
        stores.view(0, ALONE, [ME])
        found = []
        for _ in range(2):
            stores.ask(0, wire.HasKeys(("a",)), outcome := Future[wire.Done]())
            found.append(outcome.result(0).number)
            now += 5
        stores.close()
        return found

    try:
        assert loop.run_until_complete(ask()) == [1, 0]
    finally:
        loop.close()


def test_an_owner_that_recovers_is_not_woken_for_entries_that_it_cannot_end_yet() -> None:
    owner = Replica(1)
    owner.configure(0, (0, 1))
    owner.heard(0, 0, 0, wire.Load(0, wire.Open(), index=1))
    owner.heard(0, 0, 0, wire.Load(0, wire.Put((("a", b""),), milliseconds=1), versions=(1,), part=1, index=1))
    owner.heard(0, 0, 0, wire.Loaded(0, 1, 2))
    owner.configure(1, (1, 2))
    owner.advance(10.0)
    assert owner.next_end() == math.inf
    owner.heard(2, 0, 0, wire.Last(1, NO_COPY))
    assert owner.next_end() == math.inf
    owner.heard(2, 0, 0, wire.Ack(1, 2))  # what it begins with is committed
    assert owner.next_end() <= 10.0
    owner.advance(10.0)
    assert owner.next_end() == math.inf


def test_a_process_that_reads_nothing_and_for_which_too_much_waits_loses_its_link(links: Links) -> None:
    links.meet()
    links.hear(wire.Ack(TOGETHER, 201))  # all that it lacked
    asked = 0
    while not links.is_aborted:
        asked += 1
        links.stores.heard(
            NEWCOMER, messages.Posting(0, asked, wire.encode_body(wire.Submit(TOGETHER, 0, wire.Count())))
        )
        links.hear(wire.Ack(TOGETHER, 201 + asked))
    assert 20 < asked <= 50  # each is an entry and an answer


@pytest.mark.parametrize("features", [FEATURES, tuple(each for each in FEATURES if each != QUORUM_STORE)])
def test_a_read_waits_for_no_other_member_if_all_know_how_reads_are_confirmed(features: tuple[str, ...]) -> None:
    newcomer: Any = SimpleNamespace(link=None, is_excluded=False)
    stores = store.Stores(
        PeerTable(ME, {NEWCOMER: newcomer}), Tasks("a test"), survives_losses=True, features=lambda: features
    )
    stores.view(0, ALONE, [ME, NEWCOMER], ME)
    for body in (wire.Last(ALONE, NO_COPY), wire.Ack(ALONE, 1)):
        stores.heard(NEWCOMER, messages.Posting(0, 0, wire.encode_body(body)))
    stores.ask(0, wire.HasKeys(("a",)), outcome := Future[wire.Done]())
    assert outcome.done() is (features == FEATURES)  # this member is the tie-breaker
    stores.seal()
    stores.ask(0, wire.HasKeys(("a",)), outcome := Future[wire.Done]())
    assert not outcome.done()


def test_a_process_that_asks_for_copies_and_reads_none_loses_its_link(links: Links) -> None:
    links.meet()
    for _ in range(store_link.WAITING_COPIES_LIMIT):
        assert not links.is_aborted
        links.hear(wire.Last(TOGETHER, NO_COPY))
    assert links.is_aborted


def test_a_large_value_travels_in_pieces_between_which_the_link_is_free(links: Links) -> None:
    links.meet()
    newcomer, assembly, value = (
        Replica(NEWCOMER),
        store_link.PieceAssembly(),
        random.Random(1).randbytes(wire.VALUE_LIMIT),
    )
    newcomer.configure(TOGETHER, (ME, NEWCOMER))
    set_it = links.ask(wire.Put((("large", value), ("other", b"small"))))
    sizes = []
    while not set_it.done():
        posting = links.sent.pop(0)
        sizes.append(len(posting.body))
        body: wire.Body | None = wire.decode_body(posting.body)
        if isinstance(body, wire.BodyPiece):
            late = wire.BodyPiece(body.body - 1, body.at, body.size, body.data)
            assert assembly.add(late) is None  # over a link that was replaced
            body = assembly.add(body)
        if body is not None and not isinstance(body, wire.BodyPiece):
            newcomer.heard(ME, posting.store, posting.number, body)
        for effect in newcomer.effects():
            assert isinstance(effect, SendToReplica)
            links.hear(effect.body)  # type: ignore[arg-type]
        links.room = 1  # nothing more is sent before the link has room again
        links.stores.link_has_room(NEWCOMER)
        assert len(links.sent) <= 1
    assert len(sizes) > wire.VALUE_LIMIT // wire.BODY_PIECE_BYTES
    assert max(sizes) <= wire.BODY_PIECE_BYTES + 100
    copy = newcomer._copy
    assert copy is not None
    assert dict(entry[:2] for entry in copy.stores[0].entries()) == {"large": value, "other": b"small"}


class Keeper:
    """The keeper of a run, and a member of it with a file: each hears the other when the test says so."""

    def __init__(self, path: Path, me: Seat = ME) -> None:
        self.me = me
        self.replica = Replica(KEEPER)
        self.sent: list[messages.Posting] = []
        self.link: Any = SimpleNamespace(has_room=True)
        self.stores = store.Stores(PeerTable(me, {}), survives_losses=True, file=StoreFile(path))
        self.stores.use_keeper(self)

    def send(self, message: messages.Control) -> None:
        assert isinstance(message, messages.Posting)
        self.sent.append(message)

    def decide(self, number: int, members: tuple[Seat, ...]) -> None:
        self.replica.configure(number, members, is_kept=True)
        self.stores.view(0, number, members)

    def hear(self) -> None:
        """Take all that was said so far."""
        sent, self.sent = self.sent, []
        for posting in sent:
            body = wire.decode_body(posting.body)
            assert not isinstance(body, wire.BodyPiece)
            self.replica.heard(self.me, posting.store, posting.number, body)

    def answer(self) -> None:
        """Say all that it has to say."""
        for effect in self.replica.effects():
            assert isinstance(effect, SendToReplica)
            self.stores.keeper_said(messages.Posting(effect.store, effect.number, wire.encode_body(effect.body)))


def test_a_file_stays_as_it_is_until_its_process_has_all_that_belongs_there(tmp_path: Path) -> None:
    StoreFile(path := tmp_path / "store").write(0, (("a", b"1"), ("b", b"2")))

    async def leave_early() -> None:
        keeper = Keeper(path)
        keeper.decide(0, (ME,))
        keeper.stores.keeper_up(FEATURES)
        keeper.stores.keep()
        assert StoreFile(path).read() == (("a", b"1"), ("b", b"2"))
        keeper.sent, later = keeper.sent[:2], keeper.sent[2:]  # that the process has no entry, and its first one
        keeper.hear()
        keeper.answer()
        keeper.stores.keep()
        assert StoreFile(path).read() == (("a", b"1"), ("b", b"2"))
        keeper.sent += later
        while keeper.sent:
            keeper.hear()
            keeper.answer()
        keeper.stores.ask(0, wire.Delete("a"), Future())
        keeper.hear()
        keeper.answer()
        keeper.stores.keep()
        assert StoreFile(path).read() == (("b", b"2"),)
        keeper.stores.close()

    asyncio.run(leave_early())


def test_all_entries_of_a_file_are_set_however_many_they_are(tmp_path: Path) -> None:
    entries = tuple((f"{number:05}", b"%d" % number) for number in range(UNACKNOWLEDGED_LIMIT + 1000))
    StoreFile(path := tmp_path / "store").write(0, (*entries, ("large", bytes(wire.PLAIN_VALUE_LIMIT + 1))))

    async def begin() -> None:
        keeper = Keeper(path)
        keeper.decide(0, (ME,))
        keeper.stores.keeper_up(FEATURES)
        while keeper.sent:
            keeper.hear()
            keeper.answer()
        assert keeper.replica.lasting(0) == [*entries, ("large", bytes(wire.PLAIN_VALUE_LIMIT + 1))]
        keeper.stores.close()

    asyncio.run(begin())


def test_a_process_that_begins_to_write_the_file_has_first_what_the_keeper_has(tmp_path: Path) -> None:
    async def follow() -> None:
        keeper = Keeper(path := tmp_path / "store", NEWCOMER)
        keeper.stores.keeper_up(FEATURES)
        keeper.decide(0, (ME, NEWCOMER))
        keeper.replica.heard(ME, 0, 1, wire.Submit(0, 0, wire.Put((("a", b"1"),))))
        keeper.replica.effects()
        keeper.decide(1, (NEWCOMER,))
        keeper.stores.keep()
        assert not path.exists()
        keeper.hear()
        keeper.answer()
        keeper.stores.keep()
        assert StoreFile(path).read() == (("a", b"1"),)
        keeper.stores.close()

    asyncio.run(follow())


@pytest.mark.parametrize("bad", ["too long", "not a message", "a piece"])
def test_pieces_that_make_no_message_are_an_error(bad: str) -> None:
    inner = wire.encode_body(wire.BodyPiece(0, 0, 1, b"x")) if bad == "a piece" else b"\x91\xff"
    body = wire.encode_body(wire.Ack(0, 0)) if bad == "too long" else inner
    with pytest.raises(RemoteProtocolError):
        store_link.PieceAssembly().add(wire.BodyPiece(0, 0, len(body) - (bad == "too long"), body))


def test_a_run_with_a_member_of_an_earlier_release_refuses_what_that_one_does_not_know() -> None:
    stores = store.Stores(features=lambda: ())
    outcome: Future[wire.Done] = Future()
    for question in (
        wire.Read(("a",)), wire.Scan("a"), wire.Names(None, "a"), wire.Put((("a", bytes(wire.PLAIN_VALUE_LIMIT + 1)),)),
        wire.Put((("a", b""),), milliseconds=1), wire.Swap("a", b"", b"", ends_with_member=True),
        wire.Append("a", bytes(wire.PLAIN_VALUE_LIMIT + 1)), wire.HasKeys(("k" * 1000,) * 300),
        wire.Put(tuple((f"{number}", bytes(wire.PLAIN_VALUE_LIMIT)) for number in range(5))),
    ):  # fmt: skip
        stores.ask(0, question, outcome := Future())
        with pytest.raises(ConfigError, match="update covey on all machines"):
            outcome.result(0)
    stores.ask(0, wire.Put((("a", bytes(wire.PLAIN_VALUE_LIMIT)),)), outcome := Future())
    assert outcome.result(0) == wire.Done()
