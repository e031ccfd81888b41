"""The core of calls, step by step: limits, deadlines, cancellation, and what no correct node sends."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.in_turn import in_turn

from covey.base.errors import RemoteProtocolError
from covey.base.numbers import BULK, CRITICAL, REALTIME
from covey.proto.calling import effects as done
from covey.proto.calling.core import Calling
from covey.proto.calling.effects import CallEnding
from covey.proto.calling.outgoing import CALLS_LIMIT
from covey.proto.calling.turns import Deadlines, FairQueue
from covey.wire import calls as wire

NOTHING = wire.CallPayload()
RESULT = wire.CallPayload(inline=(b"r",))


def request(number: int, *, seconds: float = 10.0, payload: wire.CallPayload = NOTHING, credit: int = 0) -> Any:
    return wire.CallRequest(number, "f", seconds, payload, 0, credit)


def kinds(core: Calling) -> list[str]:
    return [type(effect).__name__ for effect in core.effects()]


def sent(core: Calling) -> list[Any]:
    return [effect.message for effect in core.effects() if isinstance(effect, done.SendMessage)]


def test_a_call_is_sent_with_the_seconds_that_are_left_and_ends_with_its_answer() -> None:
    core = Calling()
    number = core.outgoing.call(3, "f", NOTHING, 12.0, 2.0)
    (message,) = sent(core)
    assert (message.number, message.seconds) == (number, 10.0)
    core.received(3, wire.CallResult(number, RESULT), 5.0)
    assert core.effects() == [done.Conclude(3, number, wire.CallResult(number, RESULT))]
    assert (len(core.outgoing), core.next_deadline()) == (0, float("inf"))


def test_calls_beyond_the_limit_wait_here_and_their_time_runs() -> None:
    core = Calling()
    for _ in range(CALLS_LIMIT + 2):
        core.outgoing.call(3, "f", NOTHING, 100.0, 0.0)
    assert len(sent(core)) == CALLS_LIMIT
    assert core.outgoing.cancel(3, CALLS_LIMIT + 1, CallEnding.CANCELLED)
    assert kinds(core) == ["Conclude"], "it was never sent, so nothing is cancelled there"
    core.received(3, wire.CallResult(1, NOTHING), 60.0)
    (message,) = sent(core)
    assert (message.number, message.seconds) == (CALLS_LIMIT + 1, 40.0)


def test_of_the_calls_that_wait_those_of_a_higher_class_are_sent_first_and_each_ends_with_its_own_answer() -> None:
    core = Calling()
    for _ in range(CALLS_LIMIT):
        core.outgoing.call(3, "f", NOTHING, 100.0, 0.0)
    core.effects()
    classes = (BULK, REALTIME, CRITICAL, BULK, CRITICAL)
    mine = {core.outgoing.call(3, "f", NOTHING, 100.0, 0.0, priority=each, credit=1): each for each in classes}
    assert sent(core) == []
    requests = []
    for number in range(1, len(mine) + 1):
        core.received(3, wire.CallResult(number, NOTHING), 1.0)
        requests += sent(core)
    assert [each.priority for each in requests] == sorted(classes)
    assert [each.number for each in requests] == [CALLS_LIMIT + each for each in range(1, 6)], "the other end insists"
    by_class = sorted(mine, key=lambda number: (mine[number], number))
    first = core.outgoing
    first.give_credit(3, by_class[0], 2)
    assert [message.number for message in sent(core)] == [requests[0].number]
    for request_sent, number in zip(requests, by_class, strict=True):
        core.received(3, wire.StreamItem(request_sent.number, NOTHING), 2.0)
        core.received(3, wire.CallResult(request_sent.number, NOTHING), 2.0)
        told = [each.number for each in core.effects() if isinstance(each, done.DeliverItem | done.Conclude)]
        assert told == [number, number]
    assert len(core.outgoing) == CALLS_LIMIT - len(mine)


def test_of_the_calls_that_wait_for_a_handler_those_of_a_higher_class_are_served_first() -> None:
    core = Calling(handlers=1)
    for number, priority in enumerate((BULK, BULK, REALTIME, CRITICAL, BULK, CRITICAL), 1):
        core.received(5, wire.CallRequest(number, "f", 30.0, NOTHING, priority=priority), 0.0)
    served = []
    while runs := [effect.number for effect in core.effects() if isinstance(effect, done.RunHandler)]:
        served += runs
        core.incoming.finished(5, runs[0], wire.CallResult(runs[0], RESULT))
    assert served == [1, 4, 6, 3, 2, 5]
    assert len(core.incoming) == 0


def test_a_caller_past_its_deadline_is_told_at_once_and_the_call_stays_open_until_its_answer() -> None:
    core = Calling()
    number = core.outgoing.call(3, "f", NOTHING, 10.0, 0.0)
    core.effects()
    assert core.next_deadline() == 10.0
    core.tick(10.0)
    assert core.effects() == [
        done.SendMessage(3, wire.CallCancel(number)),
        done.Conclude(3, number, CallEnding.LATE),
    ]
    assert not core.outgoing.cancel(3, number, CallEnding.CANCELLED)
    core.received(3, wire.CallResult(number, wire.CallPayload(sizes=(5,))), 11.0)
    assert core.effects() == [done.RefuseParts(3, number, (5,), is_answer=True)]
    assert len(core.outgoing) == 0


def test_a_function_past_its_deadline_is_stopped_and_gives_its_handler_back_and_its_call_is_answered_once() -> None:
    core = Calling(handlers=1)
    core.received(5, request(1, seconds=1.0), 0.0)
    core.received(5, request(2, seconds=1.0), 0.0)
    assert kinds(core) == ["RunHandler"]
    core.tick(1.0)
    effects = core.effects()
    told = [effect.message for effect in effects if isinstance(effect, done.SendMessage)]
    assert [message.kind for message in told] == [wire.DEADLINE_PASSED] * 2  # type: ignore[union-attr]
    assert done.StopHandler(5, 1) in effects
    assert (core.incoming.running, core.incoming.left_over) == (0, 1), "until it returns"
    core.received(5, request(3, seconds=10.0), 2.0)
    assert kinds(core) == ["RunHandler"]
    core.incoming.finished(5, 1, wire.CallResult(1, RESULT))
    core.incoming.finished(5, 3, None)
    assert [message.number for message in sent(core)] == [3]
    assert (len(core.incoming), core.incoming.running, core.incoming.left_over) == (0, 0, 0)


def test_calls_are_refused_when_all_handlers_are_those_of_functions_whose_calls_have_ended() -> None:
    core = Calling(handlers=1)
    for number in (1, 2):
        core.received(5, request(number, seconds=1.0), float(number))
        core.tick(number + 1.0)
    assert (core.incoming.running, core.incoming.left_over) == (1, 1)
    core.received(6, request(1, seconds=60.0), 3.5)
    assert [message.kind for message in sent(core)] == [wire.DEADLINE_PASSED] * 2, "the functions may return soon"
    core.tick(core.next_deadline())
    (refused,) = sent(core)
    assert (refused.kind, "no further one is started" in refused.text) == (wire.NO_RESULT, True)
    core.incoming.finished(5, 1, None)
    assert (core.incoming.running, core.incoming.left_over) == (0, 1)
    core.received(6, request(2), 5.0)
    assert kinds(core) == ["RunHandler"]


def test_one_peer_never_has_all_handlers_and_another_gets_one_at_once() -> None:
    for handlers in (2, 3, 5, 64, 1000):
        core = Calling(handlers=handlers)
        for peer in (5, 6, 7):
            for number in range(1, 3 * handlers // 2 + 1):
                if number <= CALLS_LIMIT:
                    core.received(peer, request(number), 0.0)
        runs = [effect.peer for effect in core.effects() if isinstance(effect, done.RunHandler)]
        assert 0 < runs.count(5) <= max(1, 3 * handlers // 4)
        assert runs.count(6) > 0
        assert runs.count(7) > 0 or handlers < 4
    core = Calling(handlers=1)
    core.received(5, request(1), 0.0)
    assert kinds(core) == ["RunHandler"]


def test_the_closing_of_a_stream_takes_no_handler_of_functions() -> None:
    core = Calling(handlers=1)
    core.received(5, request(1, credit=1), 0.0)
    core.incoming.yielded(5, 1, RESULT)
    core.received(5, wire.CallCancel(1), 0.0)
    assert kinds(core) == ["RunHandler", "SendMessage", "SendMessage", "CloseStream"]
    assert (core.incoming.running, core.incoming.left_over, core.incoming.unanswered) == (0, 1, 0)
    core.received(5, request(2), 0.0)
    assert kinds(core) == ["RunHandler"]
    core.incoming.finished(5, 1, None)
    core.incoming.finished(5, 2, None)
    assert (len(core.incoming), core.incoming.left_over) == (0, 0)


def test_memory_for_arguments_is_given_in_turn_and_given_back() -> None:
    core = Calling(message_bytes=100)
    large = wire.CallPayload(sizes=(60,))
    core.received(5, request(1, payload=large), 0.0)
    core.received(5, request(2, payload=large), 0.0)
    core.received(6, request(1, payload=large), 0.0)
    assert core.effects() == [done.FetchParts(5, 1, (60,), is_answer=False)]
    core.fetched(5, 1, "parts", 0.0, is_answer=False)
    (run,) = core.effects()
    assert isinstance(run, done.RunHandler)
    assert run.parts == "parts"
    core.incoming.finished(5, 1, wire.CallResult(1, RESULT))
    assert done.FetchParts(5, 2, (60,), is_answer=False) in core.effects()
    core.received(5, wire.CallCancel(2), 0.0)
    assert kinds(core) == ["SendMessage"], "its parts are on the way"
    core.fetched(5, 2, "parts", 0.0, is_answer=False)
    assert core.effects() == [done.FetchParts(6, 1, (60,), is_answer=False)]
    core.received(7, request(1, payload=wire.CallPayload(sizes=(60, 60))), 0.0)
    assert kinds(core) == ["SendMessage", "RefuseParts"]


def test_a_lost_node_frees_all_that_it_held() -> None:
    core = Calling(handlers=1, message_bytes=100)
    core.outgoing.call(5, "f", NOTHING, 10.0, 0.0)
    core.received(5, request(1, credit=1), 0.0)
    core.incoming.yielded(5, 1, RESULT)  # the stream has no credit now
    core.received(5, request(2), 0.0)
    core.received(5, request(3), 0.0)
    core.received(5, request(4, payload=wire.CallPayload(sizes=(60,))), 0.0)
    core.received(5, request(5, payload=wire.CallPayload(sizes=(60,))), 0.0)
    core.effects()
    core.lost(5, 0.0)
    effects = core.effects()
    assert done.Conclude(5, 1, CallEnding.LOST) in effects
    assert done.StopHandler(5, 2) in effects
    assert done.CloseStream(5, 1) in effects
    core.incoming.finished(5, 2, None)
    core.incoming.finished(5, 1, None)
    core.fetched(5, 4, None, 0.0, is_answer=False)
    assert (len(core.incoming), len(core.outgoing), core.incoming.running) == (0, 0, 0)
    core.outgoing.call(5, "f", NOTHING, 10.0, 0.0)
    assert core.effects() == [done.Conclude(5, 2, CallEnding.LOST)]


def test_a_node_that_leaves_answers_all_calls_and_refuses_new_ones() -> None:
    core = Calling(handlers=1)
    core.received(5, request(1), 0.0)
    core.received(5, request(2), 0.0)
    core.outgoing.call(5, "f", NOTHING, 10.0, 0.0)
    core.effects()
    core.close()
    core.received(5, request(3), 0.0)
    effects = core.effects()
    assert [effect.message.kind for effect in effects if isinstance(effect, done.SendMessage)] == [wire.CLOSING] * 3  # type: ignore[union-attr]
    assert done.Conclude(5, 1, CallEnding.CLOSED) in effects


@in_turn(
    messages=[
        [wire.CallResult(1, NOTHING)],
        [wire.CallFailure(1, wire.RAISED, "E", "")],
        [wire.StreamItem(1, NOTHING)],
        [wire.CallCancel(1)],
        [wire.StreamCredit(1, 1)],
        [request(1), request(1)],
        [request(2), request(1)],
        [request(1), wire.StreamCredit(1, 1)],
        [request(1, credit=1024), wire.StreamCredit(1, 1)],
        [request(number) for number in range(1, CALLS_LIMIT + 2)],
        [request(1, payload=wire.CallPayload((b"x",), (1,)))],
    ]
)
def test_what_no_correct_node_sends_is_an_error_of_the_protocol(messages: list[Any]) -> None:
    core = Calling(handlers=1)
    core.received(6, request(1, credit=1), 0.0)  # another node has a stream of this number
    for message in messages[:-1]:
        core.received(5, message, 0.0)
    with pytest.raises(RemoteProtocolError):
        core.received(5, messages[-1], 0.0)


def test_an_item_beyond_the_credit_is_an_error_of_the_protocol() -> None:
    core = Calling()
    number = core.outgoing.call(5, "f", NOTHING, 10.0, 0.0, credit=2)
    for _ in range(2):
        core.received(5, wire.StreamItem(number, NOTHING), 0.0)
    with pytest.raises(RemoteProtocolError, match="not asked for"):
        core.received(5, wire.StreamItem(number, NOTHING), 0.0)


def test_answers_that_cross_the_last_messages_of_a_node_that_leaves_are_passed_over() -> None:
    core = Calling()
    number = core.outgoing.call(5, "f", NOTHING, 10.0, 0.0)
    stream = core.outgoing.call(5, "g", NOTHING, 10.0, 0.0, credit=2)
    core.outgoing.close()
    assert kinds(core).count("Conclude") == 2
    core.received(5, wire.StreamItem(stream, NOTHING), 0.0)
    core.received(5, wire.CallResult(number, NOTHING), 0.0)
    assert kinds(core) == []


def test_deadlines_that_were_discarded_take_no_memory() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.add((1, number), 1000.0 - number % 7)
        deadlines.discard((1, number))
    assert len(deadlines._heap) < 200
    deadlines.add((2, 1), 5.0)
    deadlines.add((2, 2), 4.0)
    assert deadlines.next() == 4.0
    assert deadlines.take_due(5.0) == [(2, 2), (2, 1)]
    assert deadlines.next() == float("inf")


def test_a_fair_queue_serves_one_of_each_peer_in_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.push(ord(item[0]), item)
    queue.remove(ord("a"), "a2")
    served = [queue.pop(lambda peer, item: peer != ord("c")) for _ in range(5)]
    assert served == ["a1", "b1", "a3", "b2", None]
    assert queue.pop(lambda peer, item: True) == "c1"
