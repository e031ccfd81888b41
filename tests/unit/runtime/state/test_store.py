"""What stores have to say waits for room on a link: a copy of any size does, and other things up to a limit."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from covey.base.numbers import Seat
from covey.proto.replication import NO_COPY, Replica
from covey.runtime.peers.peer_table import PeerTable
from covey.runtime.state import store
from covey.runtime.tasks import Tasks
from covey.wire import messages
from covey.wire import store as wire

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
    monkeypatch.setattr(store, "UNSENT_LIMIT", 50)
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
        newcomer.heard(ME, posting.store, posting.number, body)
        links.room = 1
        links.stores.link_has_room(NEWCOMER)
        assert len(links.sent) == 1
    assert not links.is_aborted
    copy = newcomer._copy
    assert copy is not None
    assert copy.stores[0].queued() == [("queue", b"%d" % number) for number in range(200)]


def test_a_process_that_reads_nothing_and_for_which_too_much_waits_loses_its_link(links: Links) -> None:
    links.meet()
    asked = 0
    while not links.is_aborted:
        links.ask(wire.Count())
        asked += 1
    assert 40 < asked <= 50


def test_a_process_that_asks_for_copies_and_reads_none_loses_its_link(links: Links) -> None:
    links.meet()
    for _ in range(store.WAITING_COPIES_LIMIT):
        assert not links.is_aborted
        links.hear(wire.Last(TOGETHER, NO_COPY))
    assert links.is_aborted
