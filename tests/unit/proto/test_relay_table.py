"""The table of a relay: which nodes are registered, which calls wait, and what each connection is told."""

from __future__ import annotations

import itertools
import random

import pytest
from tests.support.in_turn import in_turn
from tests.support.seeds import seeds

from covey.proto import relay_table
from covey.proto.relay_table import CloseConnection, JoinConnections, RelayTable, SendTo
from covey.wire.relay import (
    LISTED_TOKENS_LIMIT,
    CallJoined,
    IncomingCall,
    ListedTokens,
    RelayRefusal,
    StillThere,
    TokenRegistered,
)

LAB, HOME = b"L" * 32, b"H" * 32
ONE, OTHER = b"1" * 16, b"2" * 16


def new_table() -> RelayTable:
    numbers = itertools.count(1)
    return RelayTable(lambda: next(numbers).to_bytes(16, "big"))


def call_in(table: RelayTable) -> tuple[int, bytes]:
    """Return the one registration that was told of a call, and the call."""
    (effect,) = table.effects()
    assert isinstance(effect, SendTo)
    assert isinstance(effect.message, IncomingCall)
    return effect.connection, effect.message.call


def test_a_call_is_told_to_the_registration_and_joined_with_the_connection_that_takes_it() -> None:
    table = new_table()
    table.registered(1, LAB, ONE, is_listed=True, now=0.0)
    assert table.effects() == [SendTo(1, TokenRegistered())]
    table.called(2, LAB, ONE, 1.0)
    told, call = call_in(table)
    assert told == 1
    table.taken(3, call)
    assert table.effects() == [SendTo(2, CallJoined()), SendTo(3, CallJoined()), JoinConnections(2, 3)]
    assert (table.registrations, table.waiting) == (1, 0)


@pytest.mark.parametrize("cluster", [LAB, HOME])
def test_a_call_for_a_token_that_its_cluster_has_not_registered_is_refused(cluster: bytes) -> None:
    table = new_table()
    table.registered(1, HOME if cluster == LAB else LAB, ONE, is_listed=True, now=0.0)
    table.effects()
    table.called(2, cluster, ONE, 1.0)
    assert table.effects() == [SendTo(2, RelayRefusal(relay_table.UNKNOWN_TOKEN)), CloseConnection(2)]


def test_a_call_is_taken_once_and_only_with_its_id() -> None:
    table = new_table()
    table.registered(1, LAB, ONE, is_listed=True, now=0.0)
    table.effects()
    table.called(2, LAB, ONE, 1.0)
    _, call = call_in(table)
    refused = [SendTo(3, RelayRefusal(relay_table.OVER)), CloseConnection(3)]
    table.taken(3, bytes(16))
    assert table.effects() == refused
    table.taken(4, call)
    table.effects()
    table.taken(3, call)
    assert table.effects() == refused


def test_a_call_that_is_not_taken_in_time_is_refused() -> None:
    table = new_table()
    table.registered(1, LAB, ONE, is_listed=True, now=0.0)
    table.called(2, LAB, ONE, 1.0)
    table.called(3, LAB, ONE, 2.0)
    table.effects()
    assert table.next_deadline() == 1.0 + relay_table.WAITING_CALL_SECONDS
    table.tick(1.0 + relay_table.WAITING_CALL_SECONDS)
    assert table.effects() == [SendTo(2, RelayRefusal(relay_table.UNANSWERED)), CloseConnection(2)]
    assert table.waiting == 1


def test_calls_that_wait_for_one_node_are_bounded_and_do_not_affect_another() -> None:
    table = new_table()
    table.registered(1, LAB, ONE, is_listed=True, now=0.0)
    table.registered(2, LAB, OTHER, is_listed=True, now=0.0)
    for caller in range(3, 3 + relay_table.WAITING_CALLS_LIMIT):
        table.called(caller, LAB, ONE, 1.0)
    table.effects()
    table.called(1000, LAB, ONE, 1.0)
    assert table.effects() == [SendTo(1000, RelayRefusal(relay_table.BUSY)), CloseConnection(1000)]
    table.called(1001, LAB, OTHER, 1.0)
    assert call_in(table)[0] == 2
    table.closed(3)
    table.called(1002, LAB, ONE, 1.0)
    assert call_in(table)[0] == 1


def test_a_later_registration_of_a_token_replaces_the_earlier_one() -> None:
    table = new_table()
    table.registered(1, LAB, ONE, is_listed=True, now=0.0)
    table.effects()
    table.registered(2, LAB, ONE, is_listed=True, now=1.0)
    assert table.effects() == [CloseConnection(1), SendTo(2, TokenRegistered())]
    table.closed(1)
    table.called(3, LAB, ONE, 2.0)
    assert call_in(table)[0] == 2


def test_nodes_are_told_of_listed_tokens_of_their_own_cluster() -> None:
    table = new_table()
    table.registered(1, LAB, b"a" * 16, is_listed=True, now=0.0)
    table.registered(2, LAB, b"b" * 16, is_listed=False, now=0.0)
    table.registered(3, HOME, b"c" * 16, is_listed=True, now=0.0)
    table.effects()
    table.registered(4, LAB, b"d" * 16, is_listed=True, now=1.0)
    assert table.effects() == [
        SendTo(4, TokenRegistered()),
        SendTo(4, ListedTokens((b"a" * 16,))),
        SendTo(1, ListedTokens((b"d" * 16,))),
        SendTo(2, ListedTokens((b"d" * 16,))),
    ]


def test_a_list_of_tokens_is_bounded() -> None:
    table = new_table()
    for number in range(LISTED_TOKENS_LIMIT + 10):
        table.registered(number, LAB, number.to_bytes(16, "big"), is_listed=True, now=0.0)
    table.effects()
    table.registered(5000, LAB, ONE, is_listed=False, now=0.0)
    _, listed = table.effects()
    assert isinstance(listed, SendTo)
    assert listed.message == ListedTokens(
        tuple(each.to_bytes(16, "big") for each in range(10, LISTED_TOKENS_LIMIT + 10))
    )


def test_news_of_tokens_are_bounded_and_a_new_node_hears_of_all() -> None:
    table = new_table()
    table.registered(1, LAB, ONE, is_listed=True, now=0.0)
    table.effects()
    many, told = int(relay_table.NEWS_BURST) + 20, 0
    for number in range(many):
        table.registered(2, LAB, number.to_bytes(16, "big"), is_listed=True, now=1.0)
        told += sum(effect == SendTo(1, ListedTokens((number.to_bytes(16, "big"),))) for effect in table.effects())
        table.closed(2)
    assert told == relay_table.NEWS_BURST
    table.registered(3, HOME, OTHER, is_listed=True, now=1.0)
    table.registered(4, HOME, ONE, is_listed=True, now=1.0)
    assert table.effects()[-1] == SendTo(3, ListedTokens((ONE,)))
    table.registered(5, LAB, OTHER, is_listed=True, now=1.0)
    assert table.effects() == [SendTo(5, TokenRegistered()), SendTo(5, ListedTokens((ONE,)))]


def test_a_registration_is_asked_whether_it_is_there_and_closed_if_it_says_nothing() -> None:
    table = new_table()
    table.registered(1, LAB, ONE, is_listed=True, now=0.0)
    table.registered(2, LAB, OTHER, is_listed=True, now=0.0)
    table.effects()
    for asked in (15.0, 30.0):
        assert table.next_deadline() == asked
        table.tick(asked)
        assert table.effects() == [SendTo(1, StillThere()), SendTo(2, StillThere())]
        table.heard(2, asked)
    table.tick(45.0)
    assert table.effects() == [CloseConnection(1), SendTo(2, StillThere())]
    assert table.registrations == 1


@in_turn(seed=seeds(20))
def test_whatever_happens_in_whatever_order_no_connection_has_two_roles_and_nothing_remains(seed: int) -> None:
    chance, table, now = random.Random(seed), new_table(), 0.0
    numbers, idle, joined, calls = itertools.count(), set[int](), set[int](), list[bytes]()
    tokens = [bytes([each]) * 16 for each in range(4)]
    for _ in range(400):
        now += chance.random()
        connection = next(numbers)
        match chance.randrange(5):
            case 0:
                cluster, token = chance.choice((LAB, HOME)), chance.choice(tokens)
                table.registered(connection, cluster, token, is_listed=chance.random() < 0.5, now=now)
                idle.add(connection)
            case 1:
                table.called(connection, chance.choice((LAB, HOME)), chance.choice(tokens), now)
                idle.add(connection)
            case 2 if calls:
                table.taken(connection, chance.choice(calls))
                idle.add(connection)
            case 3 if idle:
                gone = chance.choice(sorted(idle))
                table.closed(gone)
                idle.discard(gone)
            case _:
                table.tick(now)
        for effect in table.effects():
            match effect:
                case JoinConnections(caller, taker):
                    assert {caller, taker} <= idle
                    assert not {caller, taker} & joined
                    joined |= {caller, taker}
                    idle -= {caller, taker}
                case CloseConnection(closed):
                    assert closed not in joined
                    idle.discard(closed)
                    table.closed(closed)
                case SendTo(_, IncomingCall(call)):
                    calls.append(call)
                case SendTo(told):
                    assert told in idle
    for connection in sorted(idle):
        table.closed(connection)
    assert (table.registrations, table.clusters, table.waiting) == (0, 0, 0)
    assert table.next_deadline() == float("inf")
