"""Room for visitors: a few links of each key, so many in all; keepers that a node named are not displaced."""

from __future__ import annotations

from covey.runtime.peers.mesh import LINKS_PER_KEY, VISITORS_LIMIT, Visitors
from covey.runtime.peers.remote_process import RemoteProcess
from covey.wire import messages

NAMED = b"keeper".ljust(32)


def remote(id: bytes, purpose: str = "visitor") -> RemoteProcess:
    return RemoteProcess(messages.Card(id.ljust(32), b"", "n", "h", 1, messages.Contact("h", (), "")), purpose)


def visitors() -> Visitors:
    return Visitors(lambda each: each.purpose == "keeper" and each.card.id == NAMED, VISITORS_LIMIT)


def take(room: Visitors, each: RemoteProcess) -> list[RemoteProcess]:
    leaving = room.add(each)
    for other in leaving:
        room.discard(other)
    return leaving


def test_of_one_key_the_oldest_link_goes() -> None:
    room = visitors()
    links = [remote(b"one") for _ in range(LINKS_PER_KEY + 1)]
    assert [take(room, link) for link in links[:-1]] == [[]] * LINKS_PER_KEY
    assert take(room, links[-1]) == [links[0]]
    assert list(room) == links[1:]


def test_however_many_keys_come_there_are_so_many_and_the_one_that_asked_last_stays() -> None:
    room = visitors()
    guests = [remote(b"%d" % n) for n in range(10 * VISITORS_LIMIT)]
    left = []
    for guest in guests:
        left += take(room, guest)
        room.asked(guests[0])
    assert len(room) == VISITORS_LIMIT
    assert guests[0] not in left
    assert left == guests[1 : 1 + len(left)]


def test_a_keeper_that_a_node_named_is_not_displaced_and_one_that_no_node_named_is() -> None:
    room = visitors()
    keeper, pretender = remote(NAMED, "keeper"), remote(b"pretender", "keeper")
    left = take(room, keeper) + take(room, pretender)
    for n in range(10 * VISITORS_LIMIT):
        left += take(room, remote(b"%d" % n))
    assert keeper not in left
    assert pretender in left
    assert len(room) == VISITORS_LIMIT + 1
