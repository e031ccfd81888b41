"""A hostile member calls: numbers, sizes, credits and names that cannot be, floods, and objects it was never given.

The node that is called cuts it off or refuses the call, serves the others all the while, and takes no memory for what
is only claimed.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.attackers import resident_bytes
from tests.support.waiting import DEADLINE

import covey
from covey.base.numbers import REALTIME, Seat
from covey.proto.calling.outgoing import CALLS_LIMIT
from covey.proto.calling.tags import parts_tag
from covey.runtime.calls.lane_transport import LaneTransport
from covey.runtime.group.internals import seat_of
from covey.runtime.joining.node import node_of
from covey.testing import run_threads
from covey.wire import calls as wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.runtime.calls.service import CallService

VICTIM, HOSTILE, HONEST = range(3)
GROWTH = 100 << 20
NOTHING = wire.CallPayload(inline=(b"\x92\x90\x80",))
"""Arguments of a function that takes none."""


def request(
    number: int, name: str = "five", payload: wire.CallPayload = NOTHING, *, target: int = 0, credit: int = 0
) -> wire.CallRequest:
    return wire.CallRequest(number, name, 30.0, payload, target, credit)


class Attacker:
    """Sends what it likes to the victim."""

    def __init__(self, group: covey.Group) -> None:
        service = service_of(group)
        transport = service._transport
        assert isinstance(transport, LaneTransport)
        self.transport, self.victim = transport, seat_of(group, VICTIM)  # type: ignore[arg-type]
        self.answers: list[wire.CallMessage] = []
        self.is_cut_off = threading.Event()
        transport.listener = self

    def say(self, *messages: Any) -> None:
        for message in messages:
            data = message if isinstance(message, bytes) else wire.encode_call_message(message)
            self.transport.send([(self.victim, data)])

    def send_part(self, size: int, *, claimed: int) -> None:
        self.say(request(1, payload=wire.CallPayload(sizes=(claimed,))))
        self.transport.send_parts(self.victim, parts_tag(1, is_answer=False), [bytes(size)], REALTIME)

    def heard(self, messages: list[tuple[Seat, bytes]]) -> None:
        self.answers += [wire.decode_call_message(data) for _, data in messages]

    def lost(self, peer: Seat) -> None:
        if peer == self.victim:
            self.is_cut_off.set()

    def ended(self, fault: object) -> None:
        pass

    def broke_protocol(self, peer: Seat, error: Exception) -> None:
        raise AssertionError(error)

    def close(self) -> None:
        self.transport.shut()

    def forked(self) -> None:
        raise AssertionError("no process forks here")

    def await_answers(self, count: int) -> list[wire.CallMessage]:
        deadline = time.monotonic() + DEADLINE
        while len(self.answers) < count:
            assert time.monotonic() < deadline, self.answers
            time.sleep(0.005)
        return self.answers


def service_of(group: covey.Group) -> CallService:
    node = node_of(group)
    assert node is not None
    assert node.calls is not None
    return node.calls.service()


def attacked(attack: Callable[[Attacker], None], *, is_cut_off: bool) -> CallService:
    """Let one rank attack another while a third one uses it; return the calls of the victim."""
    before = resident_bytes()
    services = {}

    def body(group: covey.Group) -> None:
        node = group.node
        calls = 0

        @node.rpc
        def five() -> int:
            return 5

        node.register("takes", lambda value: None)

        @node.rpc
        def wait() -> None:
            caller = node.caller()
            while not caller.is_cancelled:
                time.sleep(0.01)

        @node.rpc
        def numbers() -> Any:
            yield from range(100_000)

        services[group.rank] = service_of(group)
        group.barrier()
        together.wait()
        if group.rank == HOSTILE:
            attacker = Attacker(group)
            attack(attacker)
            if is_cut_off:
                assert attacker.is_cut_off.wait(DEADLINE)
            over.set()
        elif group.rank == HONEST:
            while not over.is_set() or not calls:
                assert node.call(VICTIM, "five", timeout=DEADLINE) == 5
                calls += 1
        else:
            assert over.wait(2 * DEADLINE)
            assert node.call(HONEST, "five", timeout=DEADLINE) == 5
            if is_cut_off:
                with pytest.raises(covey.PeerLostError, match=f"rank {HOSTILE}"):
                    node.call(HOSTILE, "five", timeout=DEADLINE)
        done.wait()

    over, together, done = (
        threading.Event(),
        threading.Barrier(3, timeout=DEADLINE),
        threading.Barrier(3, timeout=DEADLINE),
    )
    run_threads(3, body, lanes="unix", timeout=DEADLINE)
    assert resident_bytes() - before < GROWTH
    return services[VICTIM]


HUGE = wire.CallPayload(sizes=(1 << 45, 1 << 45))
ATTACKS: dict[str, Callable[[Attacker], None]] = {
    "bytes that are no message": lambda it: it.say(b"\xff" * 100),
    "a number again": lambda it: it.say(request(1), request(1)),
    "a lower number": lambda it: it.say(request(5), request(3)),
    "an answer to nothing": lambda it: it.say(wire.CallResult(1, NOTHING)),
    "a failure of nothing": lambda it: it.say(wire.CallFailure(7, wire.RAISED, "E", "x")),
    "an item of nothing": lambda it: it.say(wire.StreamItem(1, NOTHING)),
    "a cancellation of what was never called": lambda it: it.say(wire.CallCancel(1)),
    "credit for what was never called": lambda it: it.say(wire.StreamCredit(1, 1)),
    "credit for a call that is no stream": lambda it: it.say(request(1, "wait"), wire.StreamCredit(1, 1)),
    "credit beyond the limit": lambda it: it.say(
        request(1, "numbers", credit=wire.CREDIT_LIMIT - 10), *[wire.StreamCredit(1, wire.CREDIT_LIMIT)] * 200
    ),
    "a payload with parts and sizes": lambda it: it.say(request(1, payload=wire.CallPayload((b"",), (5,)))),
    "handles it never had": lambda it: it.say(wire.ReferenceRelease(1, 1)),
    "arguments that are none": lambda it: it.say(request(1, payload=wire.CallPayload(inline=(b"\xc1",)))),
    "a flood of calls": lambda it: it.say(*(request(number, "wait") for number in range(1, CALLS_LIMIT + 3))),
    "a part of another size": lambda it: it.send_part(90_000, claimed=100_000),
    "a message that is too long": lambda it: it.say(bytes(1 << 20)),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_member_that_breaks_the_protocol_of_calls_is_cut_off_and_the_others_are_served(name: str) -> None:
    victim, deadline = attacked(ATTACKS[name], is_cut_off=True), time.monotonic() + DEADLINE
    while victim._core.incoming.running:  # functions look from time to time whether they are cancelled
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_flood_is_bounded_by_the_number_of_handlers() -> None:
    most = 0

    def attack(it: Attacker) -> None:
        nonlocal most
        it.say(*(request(number, "wait") for number in range(1, CALLS_LIMIT + 1)))
        for _ in range(20):
            most = max(most, sum("handler" in thread.name for thread in threading.enumerate()))
            time.sleep(0.01)
        it.say(*(wire.CallCancel(number) for number in range(1, CALLS_LIMIT + 1)))
        answers = it.await_answers(CALLS_LIMIT)
        assert {each.kind for each in answers if isinstance(each, wire.CallFailure)} == {wire.CANCELLED}

    attacked(attack, is_cut_off=False)
    assert most <= 64 + 8


def test_huge_claims_are_refused_before_memory_is_taken() -> None:
    def attack(it: Attacker) -> None:
        it.say(request(1, payload=HUGE), request(2, payload=wire.CallPayload(sizes=((1 << 30) + 1,))))
        for answer in it.await_answers(2):
            assert isinstance(answer, wire.CallFailure)
            assert answer.kind == wire.TOO_LARGE

    attacked(attack, is_cut_off=False)


def test_parts_that_are_announced_and_never_sent_hold_no_handler() -> None:
    def attack(it: Attacker) -> None:
        large = wire.CallPayload(sizes=(200_000,))
        it.say(*(request(number, payload=large) for number in range(1, CALLS_LIMIT)), request(CALLS_LIMIT))
        answers = it.await_answers(1)
        assert isinstance(answers[0], wire.CallResult)
        it.say(*(wire.CallCancel(number) for number in range(1, CALLS_LIMIT)))
        it.await_answers(CALLS_LIMIT)

    attacked(attack, is_cut_off=False)


def test_only_what_was_exported_to_a_member_can_be_called_by_it() -> None:
    class Safe:
        def open(self) -> str:
            return "open"

    def body(group: covey.Group) -> list[wire.CallMessage] | None:
        kept = []

        @group.node.rpc
        def safe() -> covey.Handle:
            kept.append(group.node.export(Safe()))
            return kept[-1]

        group.barrier()
        if group.rank == HONEST:
            handle = group.node.call(VICTIM, "safe")
            assert handle.open() == "open"
        group.barrier()
        answers = None
        if group.rank == HOSTILE:
            it = Attacker(group)
            it.say(wire.ReferenceShare(1, Seat(HOSTILE)), wire.ReferenceShare(1, Seat(1 << 20)))
            it.say(wire.ReferenceClaim(1, Seat(HONEST), bytes(16)), wire.ReferenceClaim(7, Seat(HONEST), bytes(16)))
            guess = wire.PassedHandle(Seat(VICTIM), 1, bytes(16))
            for number, (target, method) in enumerate([(1, "open"), (2, "open"), (1, "__init__"), (1, "__class__")], 1):
                it.say(request(number, method, target=target, payload=wire.CallPayload(NOTHING.inline, (), (guess,))))
            answers = it.await_answers(4)
        over.wait()
        return answers

    over = threading.Barrier(3, timeout=DEADLINE)
    answers = run_threads(3, body, lanes="unix", timeout=DEADLINE)[HOSTILE]
    assert answers is not None
    for answer in answers:
        assert isinstance(answer, wire.CallFailure)
        assert answer.kind == wire.UNKNOWN_FUNCTION
        assert "not exported to this node" in answer.text


def test_a_member_that_names_takers_and_givers_that_do_not_exist_takes_no_memory_for_them() -> None:
    def body(group: covey.Group) -> int | None:
        @group.node.rpc
        def thing() -> covey.Handle:
            return group.node.export([])

        group.barrier()
        entries = None
        if group.rank == HOSTILE:
            handle = group.node.call(VICTIM, "thing")
            it = Attacker(group)
            for number in range(1000):
                nobody = Seat((1 << 20) + number)
                it.say(
                    wire.ReferenceShare(handle._target, nobody),
                    wire.ReferenceClaim(handle._target, nobody, handle._key),
                )
            it.say(wire.ReferenceShare(handle._target, Seat(3)))  # which a newcomer may have
            it.say(request(50, "five"))  # is answered after what was sent before it was read
            it.await_answers(1)
            told.append(handle._target)
        over.wait()
        if group.rank == VICTIM:
            counts = service_of(group).exported._counts._objects[told[0]]
            entries = len(counts.on_way)
            assert counts.held[Seat(HOSTILE)] == 1001, "each claim is a handle that the claimer has to drop"
        over.wait()
        return entries

    told: list[int] = []
    over = threading.Barrier(3, timeout=DEADLINE)
    assert run_threads(3, body, lanes="unix", timeout=DEADLINE)[VICTIM] == 1


def test_texts_of_a_member_are_shown_without_control_characters() -> None:
    def body(group: covey.Group) -> str:
        @group.node.rpc
        def rude() -> None:
            raise ValueError("\x1b[31mred\n\x07" + "x" * 20_000)

        group.barrier()
        with pytest.raises(covey.RemoteCallError) as caught:
            group.node.call(1 - group.rank, "rude")
        group.barrier()
        assert caught.value.traceback.replace("\n", "").isprintable()
        return str(caught.value)

    for text in run_threads(2, body, lanes="unix", timeout=DEADLINE):
        assert text.isprintable()
        assert len(text) < 8000


def test_arrays_that_do_not_fit_their_bytes_are_refused() -> None:
    claim = bytes((0, 12, 1)) + (1 << 40).to_bytes(8, "little")
    packed = b"\x92\x91\xc7" + bytes((len(claim),)) + b"\x01" + claim + b"\x80"
    attacked(lambda it: it.say(request(1, "takes", wire.CallPayload(inline=(packed,)))), is_cut_off=True)
