"""Nodes that call each other in virtual time: every call ends once, with the right outcome, whatever is lost or late.

A `World` is a function of its seed. Messages of a pair arrive in order; nodes are lost, callers give up, functions are
slow, raise, run on long after their deadlines, or make streams whose closing takes as long.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections import Counter, deque
from typing import Any

import pytest
from tests.support.in_turn import in_turn
from tests.support.seeds import seeds

from covey.base.errors import RemoteProtocolError
from covey.proto.calling import effects as done
from covey.proto.calling.core import Calling
from covey.proto.calling.effects import CallEnding
from covey.proto.calling.incoming import IncomingCalls
from covey.proto.calling.outgoing import CALLS_LIMIT
from covey.proto.calling.turns import FairQueue, HandlerShares
from covey.wire import calls as wire

NODES = 4
HANDLERS = 5
MEMORY = 1000
STREAM_CREDIT = 4
HANGS = 500.0
"""Seconds for which some functions and closings run on; no deadline is as late."""


class CallWorld:
    """Nodes with their cores, and the messages between them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.hangs = seed % 2 == 1
        """Whether the closing of a stream may take long."""
        self.now = 0.0
        self.cores = {seat: Calling(handlers=HANDLERS, message_bytes=MEMORY) for seat in range(NODES)}
        self.dead: set[int] = set()
        self._events: list[tuple[float, int, Any]] = []
        self._order = itertools.count()
        self._pipes: dict[tuple[int, int], float] = {}
        """When the last message of a pair arrives: they do not overtake each other."""
        self.outcomes: dict[tuple[int, int, int], Any] = {}
        """By caller, peer and number."""
        self.items: dict[tuple[int, int, int], list[bytes]] = {}
        self.ran: Counter[tuple[int, int, int]] = Counter()
        """By callee, caller and number: how often the function was started."""
        self.answers: Counter[tuple[int, int, int]] = Counter()
        """By callee, caller and number: results and failures that were sent."""
        self.running: Counter[int] = Counter()
        """By node: threads that run functions, or close streams."""
        self.left: dict[tuple[int, int, int], int] = {}
        """By callee, caller and number: the items that a stream will still make."""
        self.stopped: set[tuple[int, int, int]] = set()
        self.parts: dict[tuple[int, int, int, bool], deque[Any]] = {}
        """By sender, receiver, number and direction: parts that are neither fetched nor refused."""

    def after(self, seconds: float, action: Any) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action))

    def told(self, seconds: float, seat: int, report: Any) -> None:
        """Report something to a node's core later, and settle it."""

        def act() -> None:
            report()
            self.settle(seat)

        self.after(seconds, act)

    def call(self, caller: int, peer: int, name: str, size: int, seconds: float) -> int:
        payload, parts = self._payload(name.encode(), size)
        credit = STREAM_CREDIT if name.startswith("stream") else 0
        number = self.cores[caller].outgoing.call(
            peer, name, payload, self.now + seconds, self.now, parts=parts, credit=credit
        )
        self.settle(caller)
        return number

    def _payload(self, body: bytes, size: int) -> tuple[wire.CallPayload, Any]:
        return (wire.CallPayload(sizes=(size,)), (size,)) if size else (wire.CallPayload(inline=(body,)), None)

    def settle(self, seat: int) -> None:
        while effects := self.cores[seat].effects():
            for effect in effects:
                self.perform(seat, effect)

    def perform(self, seat: int, effect: done.CallEffect) -> None:
        core = self.cores[seat]
        match effect:
            case done.SendMessage(peer, message, parts):
                if parts is not None:
                    is_answer = not isinstance(message, wire.CallRequest)
                    self.parts.setdefault((seat, peer, message.number, is_answer), deque()).append(parts)  # type: ignore[union-attr]
                if isinstance(message, wire.CallResult | wire.CallFailure):
                    self.answers[seat, peer, message.number] += 1
                at = max(self._pipes.get((seat, peer), 0.0), self.now + self.chance.uniform(0.001, 0.05))
                self._pipes[seat, peer] = at
                self.after(at - self.now, lambda: self.arrive(seat, peer, message))
            case done.FetchParts(peer, number, sizes, is_answer):
                parts = self.parts[peer, seat, number, is_answer].popleft()
                assert parts == sizes
                arrived = functools.partial(core.fetched, peer, number, parts, is_answer=is_answer)
                self.told(self.chance.uniform(0.001, 0.2), seat, lambda: arrived(self.now))
            case done.RefuseParts(peer, number, sizes, is_answer):
                assert self.parts[peer, seat, number, is_answer].popleft() == sizes
            case done.Conclude(peer, number, outcome, parts):
                sizes = outcome.payload.sizes if isinstance(outcome, wire.CallResult) else ()
                assert (parts or ()) == sizes
                assert (seat, peer, number) not in self.outcomes, "a call ended twice"
                self.outcomes[seat, peer, number] = outcome
            case done.DeliverItem(peer, number, payload):
                assert (seat, peer, number) not in self.outcomes
                self.items.setdefault((seat, peer, number), []).append(payload.inline[0])
                seconds = self.chance.choice([0.0, 0.01, 0.5])
                self.told(seconds, seat, functools.partial(core.outgoing.give_credit, peer, number, 1))
            case done.RunHandler(peer, number, request, _, parts):
                assert (parts or ()) == request.payload.sizes
                self.ran[seat, peer, number] += 1
                if request.name.startswith("stream"):
                    self.left[seat, peer, number] = int(request.name[6:])
                self.run(seat, peer, number, request.name)
            case done.StepStream(peer, number):
                self.run(seat, peer, number, "stream")
            case done.StopHandler(peer, number):
                assert self.answers[seat, peer, number] or peer in self.dead, "stopped without an answer"
                self.stopped.add((seat, peer, number))
            case done.CloseStream(peer, number):
                del self.left[seat, peer, number]
                self.run(seat, peer, number, self.chance.choice(["close", "close", "hang" if self.hangs else "close"]))
            case _:
                raise AssertionError(effect)

    def run(self, seat: int, peer: int, number: int, name: str) -> None:
        incoming = self.cores[seat].incoming
        self.running[seat] += 1
        assert incoming.running <= HANDLERS
        assert self.running[seat] <= 2 * HANDLERS, "more threads than twice the handlers"
        assert all(incoming._handlers.of(each) < HANDLERS for each in range(NODES)), "a node has all handlers"
        seconds = HANGS if name == "hang" else self.chance.choice([0.0, 0.02, 0.3])
        self.after(seconds, lambda: self.end(seat, peer, number, name))

    def end(self, seat: int, peer: int, number: int, name: str) -> None:
        if seat in self.dead:
            return
        self.running[seat] -= 1
        incoming = self.cores[seat].incoming
        if left := self.left.get((seat, peer, number)):
            self.left[seat, peer, number] = left - 1
            incoming.yielded(peer, number, wire.CallPayload(inline=(b"item %d" % left,)))
        elif name in ("close", "hang"):
            incoming.finished(peer, number, None)
        elif name == "raise":
            incoming.finished(peer, number, wire.CallFailure(number, wire.RAISED, "E", f"{peer}/{number}"))
        else:
            self.left.pop((seat, peer, number), None)
            size = self.chance.choice([0, 0, 300]) if name == "echo" else 0
            payload, parts = self._payload(f"{peer}/{number}".encode(), size)
            incoming.finished(peer, number, wire.CallResult(number, payload), parts)
        self.settle(seat)

    def arrive(self, source: int, target: int, message: wire.CallMessage) -> None:
        if target not in self.dead and source not in self.dead:
            again = wire.decode_call_message(wire.encode_call_message(message))
            self.cores[target].received(source, again, self.now)
            self.settle(target)

    def kill(self, seat: int) -> None:
        self.dead.add(seat)
        for other in set(range(NODES)) - self.dead:
            self.told(self.chance.uniform(0.0, 1.0), other, lambda other=other: self.cores[other].lost(seat, self.now))

    def play(self) -> None:
        """Go on until nothing happens any more."""
        while True:
            deadlines = [core.next_deadline() for seat, core in self.cores.items() if seat not in self.dead]
            at = min([*deadlines, *(event[0] for event in self._events[:1])])
            if at == float("inf"):
                return
            self.now = max(self.now, at)
            for seat, core in self.cores.items():
                if seat not in self.dead and core.next_deadline() <= self.now:
                    core.tick(self.now)
                    self.settle(seat)
            if self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()


NAMES = ["echo", "raise", "stream0", "stream3", "stream20"]


@in_turn(seed=seeds(21))
def test_every_call_ends_once_with_its_own_outcome_and_nothing_stays_behind(seed: int) -> None:
    play(seed)


def play(seed: int) -> None:
    """Let nodes call each other, one of which may be killed; AssertionError if a call does not end as it has to."""
    world = CallWorld(seed)
    chance = world.chance
    names = [*NAMES, *["hang"] * world.hangs]
    made: dict[tuple[int, int, int], tuple[str, float, float]] = {}

    def call(caller: int, peer: int) -> None:
        if caller in world.dead:
            return
        name, size = chance.choice(names), chance.choice([0, 0, 0, 100, 900, 5000])
        seconds = chance.choice([0.2, 5.0, 60.0])
        number = world.call(caller, peer, name, size, seconds)
        made[caller, peer, number] = name, size, world.now + seconds
        if chance.random() < 0.2:
            world.after(chance.uniform(0, 0.5), lambda: cancel(caller, peer, number))

    def cancel(caller: int, peer: int, number: int) -> None:
        world.cores[caller].outgoing.cancel(peer, number, CallEnding.CANCELLED)
        world.settle(caller)

    for _ in range(400):
        caller, peer = chance.sample(range(NODES), 2)
        world.after(chance.uniform(0, 3), lambda caller=caller, peer=peer: call(caller, peer))
    victim = chance.randrange(NODES) if seed % 3 else None
    if victim is not None:
        world.after(chance.uniform(0, 4), lambda: world.kill(victim))
    world.play()

    assert all(count == 1 for count in world.ran.values()), "a function ran twice"
    for (caller, peer, number), (name, size, _deadline) in made.items():
        if caller == victim:
            continue
        if peer != victim and (peer, caller, number) in world.ran:
            assert world.answers[peer, caller, number] == 1, "a function ran, and its call has not one answer"
        outcome = world.outcomes[caller, peer, number]
        if isinstance(outcome, CallEnding):
            assert outcome is not CallEnding.LOST or peer == victim
            continue
        ran = world.ran[peer, caller, number]
        if size > MEMORY:
            assert isinstance(outcome, wire.CallFailure)
            assert (outcome.kind, ran) == (wire.TOO_LARGE, 0)
        elif isinstance(outcome, wire.CallFailure):
            assert outcome.kind in (wire.RAISED, wire.DEADLINE_PASSED, wire.NO_RESULT)
            assert outcome.kind != wire.RAISED or (name == "raise" and outcome.text == f"{caller}/{number}")
            assert outcome.kind != wire.NO_RESULT or world.hangs, "it was refused, and no function hangs"
        else:
            assert ran == 1
            assert outcome.payload.sizes or outcome.payload.inline == (f"{caller}/{number}".encode(),)
            if name.startswith("stream"):
                count = int(name[6:])
                assert world.items.get((caller, peer, number), []) == [
                    b"item %d" % left for left in range(count, 0, -1)
                ]
    for seat, core in world.cores.items():
        if seat not in world.dead:
            incoming = core.incoming
            assert (len(core.outgoing), len(incoming), incoming.running, incoming.left_over) == (0, 0, 0, 0)
    assert set(world.left.values()) <= {0} or victim is not None, "a stream was neither finished nor closed"
    unclaimed = {key for key, waiting in world.parts.items() if waiting and not {key[0], key[1]} & world.dead}
    assert unclaimed == set(), "a sender would wait forever for its parts to be taken"


def test_calls_beyond_the_limit_wait_and_one_peers_backlog_delays_no_other() -> None:
    world = CallWorld(1)
    for _ in range(CALLS_LIMIT + 50):
        world.call(0, 1, "echo", 0, 600.0)
    world.after(0.2, lambda: world.call(2, 1, "echo", 0, 600.0))
    turns: list[int] = []
    perform = world.perform

    def note(seat: int, effect: done.CallEffect) -> None:
        if isinstance(effect, done.RunHandler):
            turns.append(effect.peer)
        perform(seat, effect)

    world.perform = note  # type: ignore[method-assign]
    world.play()
    assert len(turns) == CALLS_LIMIT + 51
    assert turns.index(2) < 50, "a call of another peer came after the backlog"
    assert all(isinstance(outcome, wire.CallResult) for outcome in world.outcomes.values())


def hanging_functions(world: CallWorld, calls: int, seconds: float) -> None:
    """Let node 0 call functions of node 1 that hang, with this timeout; play until they run."""
    for _ in range(calls):
        world.call(0, 1, "hang", 0, seconds)


def outcomes_of(world: CallWorld, caller: int) -> list[Any]:
    return [outcome for (by, _, _), outcome in sorted(world.outcomes.items()) if by == caller]


def beside_hanging_functions() -> None:
    """One node holds all the handlers that it gets for long: calls of others are served."""
    world = CallWorld(1)
    hanging_functions(world, 4 * HANDLERS, HANGS / 2)
    for number in range(20):
        world.after(1.0 + number / 10, lambda: world.call(2, 1, "echo", 0, 5.0))
    world.play()
    assert [type(each) for each in outcomes_of(world, 2)] == [wire.CallResult] * 20


def after_their_deadlines() -> None:
    """Functions run on after their deadlines: those called later begin all the same, also of the same node."""
    world = CallWorld(2)
    hanging_functions(world, HANDLERS - 2, 1.0)
    for number in range(20):
        world.after(2.0 + number, lambda: world.call(0, 1, "echo", 0, 5.0))
    world.play()
    hung, served = outcomes_of(world, 0)[: HANDLERS - 2], outcomes_of(world, 0)[HANDLERS - 2 :]
    assert [getattr(each, "kind", each) for each in hung] == [CallEnding.LATE] * (HANDLERS - 2)
    assert [type(each) for each in served] == [wire.CallResult] * 20


def too_many_of_them() -> None:
    """So many functions of one node run on that it is refused, at once and with the reason; others are served."""
    world = CallWorld(3)
    for turn in range(4):
        world.after(turn * 2.0, lambda: hanging_functions(world, HANDLERS, 1.0))
    for number in range(10):
        world.after(20.0 + number, lambda: world.call(0, 1, "echo", 0, 5.0))
        world.after(20.5 + number, lambda: world.call(2, 1, "echo", 0, 5.0))
    world.after(HANGS + 60.0, lambda: world.call(0, 1, "echo", 0, 5.0))
    world.play()
    assert [type(each) for each in outcomes_of(world, 2)] == [wire.CallResult] * 10
    *_, last = mine = outcomes_of(world, 0)[-11:]
    assert [getattr(each, "kind", each) for each in mine[:-1]] == [wire.NO_RESULT] * 10
    assert "still run though their calls have ended" in mine[0].text
    assert isinstance(last, wire.CallResult), "the functions have returned"


@pytest.mark.parametrize("story", [beside_hanging_functions, after_their_deadlines, too_many_of_them])
def test_functions_that_do_not_return(story: Any) -> None:
    story()


def without_share(shares: HandlerShares, peer: int) -> bool:
    if shares.taken >= shares.limit:
        return False
    shares.taken += 1
    shares._of[peer] = shares.of(peer) + 1
    return True


def without_closing(queue: FairQueue[Any], peer: int, item: Any) -> None:
    """Drop a stream that waits for its closing."""
    if item.state.name != "UNCLOSED":
        queue.lines.setdefault(peer, deque()).append(item)


def answer_twice(incoming: IncomingCalls, served: Any, kind: int, text: str) -> None:
    incoming._effects.append(done.SendMessage(served.peer, wire.CallFailure(served.number, kind, "", text)))
    incoming._answer(served, wire.CallFailure(served.number, kind, "", text))


def keep_handler(incoming: IncomingCalls, served: Any) -> None:
    """Keep the handler of a function that runs on after its call was answered."""


MUTANTS: dict[str, tuple[type, str, Any]] = {
    "gives one node all handlers": (HandlerShares, "take", without_share),
    "does not close streams": (FairQueue, "push", without_closing),
    "answers twice if a call fails": (IncomingCalls, "_fail", answer_twice),
    "keeps the handlers of functions past their deadlines": (IncomingCalls, "_free_handler", keep_handler),
    "never refuses calls that cannot begin": (IncomingCalls, "_refuse_hopeless", lambda incoming: False),
}


def play_all() -> None:
    for story in (beside_hanging_functions, after_their_deadlines, too_many_of_them):
        story()
    for seed in range(50):
        play(seed)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_simulation_notices_a_node_that(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, rule = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, rule)
    with pytest.raises((AssertionError, RemoteProtocolError)):  # the second: a peer notices
        play_all()


def test_a_stream_whose_reader_is_slow_holds_no_handler() -> None:
    core = Calling(handlers=1)
    core.received(1, wire.CallRequest(1, "slow", 60.0, wire.CallPayload(), 0, 1), 0.0)
    core.incoming.yielded(1, 1, wire.CallPayload())
    core.received(1, wire.CallRequest(2, "other", 60.0, wire.CallPayload()), 0.0)
    ran = [effect for effect in core.effects() if isinstance(effect, done.RunHandler | done.StepStream)]
    assert [effect.number for effect in ran] == [1, 2]
    core.incoming.finished(1, 2, wire.CallResult(2, wire.CallPayload()))
    core.received(1, wire.StreamCredit(1, 1), 0.0)
    assert done.StepStream(1, 1) in core.effects()


@in_turn(seed=seeds(15))
def test_whatever_one_node_sends_the_core_raises_only_that_and_keeps_a_bounded_amount(seed: int) -> None:
    """A hostile node, cut off at its first impossible message as a driver does it, and an honest one beside it."""
    chance, now = random.Random(seed), 0.0
    core = Calling(handlers=HANDLERS, message_bytes=MEMORY)
    running: list[tuple[int, int]] = []
    closing: list[tuple[int, int]] = []
    concluded: list[tuple[int, int]] = []
    fetching: list[done.FetchParts] = []
    peer = 0

    def settle() -> None:
        for effect in core.effects():
            match effect:
                case done.RunHandler(source, number) | done.StepStream(source, number):
                    running.append((source, number))
                case done.CloseStream(source, number):
                    closing.append((source, number))
                case done.Conclude(source, number):
                    concluded.append((source, number))
                case done.FetchParts():
                    fetching.append(effect)

    sizes: list[tuple[int, ...]] = [(50, 60), (10**9,)]
    payloads = [wire.CallPayload(), wire.CallPayload((b"x",)), *(wire.CallPayload((), each) for each in sizes)]

    def anything() -> wire.CallMessage:
        number, payload = chance.choice([1, 2, 3, chance.randint(1, 60)]), chance.choice(payloads)
        messages: list[wire.CallMessage] = [
            wire.CallRequest(number, "f", chance.choice([0.0, 0.5, 100.0]), payload, 0, chance.choice([0, 0, 1, 5])),
            wire.CallResult(number, payload),
            wire.CallFailure(number, 1, "E", "t"),
            wire.CallCancel(number),
            wire.StreamItem(number, payload),
            wire.StreamCredit(number, chance.choice([1, 1024])),
            wire.ReferenceRelease(1, 1),
        ]
        return chance.choice(messages)

    honest, made = 10_000, 0
    for _ in range(2000):
        now += chance.choice([0.0, 0.001, 0.3])
        if core.next_deadline() <= now:
            core.tick(now)
        try:
            core.received(peer, anything(), now)
        except RemoteProtocolError:
            core.lost(peer, now)
            peer += 1  # it comes back as another process
        if chance.random() < 0.2:
            core.outgoing.call(peer, "f", wire.CallPayload(), now + 1.0, now, credit=chance.choice([0, 2]))
        if chance.random() < 0.1:
            made += 1
            core.received(honest, wire.CallRequest(made, "f", 1e6, wire.CallPayload()), now)
        settle()
        if running and chance.random() < 0.8:
            source, number = running.pop(0)
            if chance.random() < 0.3 and source != honest:
                core.incoming.yielded(source, number, wire.CallPayload())
            else:
                core.incoming.finished(source, number, wire.CallResult(number, wire.CallPayload()))
        if fetching and chance.random() < 0.5:
            fetch = fetching.pop(0)
            core.fetched(fetch.peer, fetch.number, chance.choice([None, "parts"]), now, is_answer=fetch.is_answer)
        if closing and chance.random() < 0.5:
            core.incoming.finished(*closing.pop(0), None)
        settle()
        assert core.incoming.running <= HANDLERS
        assert core.incoming.running + core.incoming.left_over == len(running) + len(closing) <= 2 * HANDLERS
        assert len(core.incoming) <= 2 * CALLS_LIMIT + len(fetching)
    assert len(concluded) == len(set(concluded)), "a caller got two outcomes"
    for source in range(peer + 1):
        core.lost(source, now)
    while running or closing or fetching or len(core.incoming):
        settle()
        if closing:
            core.incoming.finished(*closing.pop(0), None)
        if running:
            core.incoming.finished(*running.pop(0), wire.CallResult(1, wire.CallPayload()))
        if fetching:
            fetch = fetching.pop(0)
            core.fetched(fetch.peer, fetch.number, None, now, is_answer=fetch.is_answer)
        settle()
    assert (len(core.outgoing), len(core.incoming), core.incoming.running) == (0, 0, 0)
