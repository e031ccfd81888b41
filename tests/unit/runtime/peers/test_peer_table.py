"""How error messages name the process in a seat, and which part of a run gets which message."""

from __future__ import annotations

from covey.base.numbers import NO_RANK, Rank, Seat
from covey.runtime.peers.peer_table import Inbox, PeerTable, ranks_of
from covey.runtime.peers.remote_process import PeerEvent
from covey.wire import messages
from covey.wire.decoding import SkippedMessageError


def test_messages_name_a_process_by_its_rank_in_the_current_generation() -> None:
    peers = PeerTable(Seat(2), {})
    assert peers.name_of(Seat(3)) == "rank 3", "before the first generation, whose ranks are the seats"
    peers.number({Seat(1): Rank(0), Seat(3): Rank(1)})
    assert [peers.name_of(Seat(seat)) for seat in (1, 3)] == ["rank 0", "rank 1"]
    assert peers.name_of(Seat(0)) == "seat 0", "it is not in this generation"
    assert peers.rank_of(Seat(0)) == NO_RANK


def test_the_next_seat_is_above_all_that_were_given() -> None:
    assert PeerTable(Seat(5), ranks_of(3, 0, {})).next_seat == 6
    assert PeerTable(Seat(0), ranks_of(3, 0, {})).next_seat == 3


def test_a_message_goes_to_each_part_that_takes_its_type_in_order() -> None:
    inbox, heard = Inbox(PeerTable(Seat(0), ranks_of(2, 0, {}))), list[str]()
    inbox.give(messages.Ping, lambda seat, ping: heard.append(f"first {seat} {ping.number}"))
    inbox.give(messages.Ping, lambda seat, ping: heard.append(f"second {seat} {ping.number}"))
    inbox.heard(Seat(1), messages.Ping(7))
    inbox.heard(Seat(1), messages.Goodbye())  # which nobody takes
    assert heard == ["first 1 7", "second 1 7"]


def test_of_an_excluded_process_only_what_concerns_views_is_taken() -> None:
    peers, heard = PeerTable(Seat(0), ranks_of(2, 0, {})), list[object]()
    inbox, revoke = Inbox(peers), messages.Revoke(1, "PeerLostError", "", ())
    for kind in (messages.Goodbye, messages.Revoke):
        inbox.give(kind, lambda _, message: heard.append(message))
    peers[Seat(1)].note(PeerEvent.EXCLUDED)
    inbox.heard(Seat(1), revoke)
    inbox.heard(Seat(1), messages.Goodbye())
    assert heard == [messages.Goodbye()]


def test_an_early_message_of_a_later_release_is_skipped() -> None:
    inbox = Inbox(PeerTable(Seat(0), ranks_of(2, 0, {})))

    def skip(_seat: Seat, _message: messages.Control) -> None:
        raise SkippedMessageError("of a later release")

    inbox.give(messages.Ping, skip)
    inbox.heard_early(Seat(1), messages.Ping(1))
