"""Pairing, simulated: machines that know the code get in, and nobody else does, whatever is on the network.

One machine shows codes. People read them and type them on others, now and then a wrong one or one that is no longer
good. Messages are slow, and connections break. Strangers guess, stall, replay what they have recorded, send back what
they hear, sit in the middle and change what they pass on, or answer in place of the machine that shows the code.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.support.seeds import batches, seeds

from covey.base.errors import CoveyError
from covey.proto import pairing
from covey.proto.pairing import (
    FAILED_TRIES,
    TRIES_FOR_CODE,
    AdmitMachine,
    EndPairing,
    MachinePaired,
    PairingApplicant,
    PairingInviter,
    PairingMachine,
    RefusedPairingError,
    SendPairing,
)
from covey.wire.pairing import Grant, PairingKeys, PairingRequest, decode_pairing, encode_pairing
from covey.wire.signed import public_half

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 40
SECRET = "covey1-the-secret-of-the-cluster"


def key_of(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)


class Machine:
    """A machine with its key; what a person types on it, and what came of it."""

    def __init__(self, number: int, name: str) -> None:
        self.private = key_of(number)
        self.own = PairingMachine(public_half(self.private), name, "0.3", f"192.0.2.{number}")
        self.grant: Grant | None = None
        self.typed = ""
        self.met: bytes = b""
        """Whose machine gave it what it got."""


class Dialogue:
    """One try of a machine: a program that takes messages and says what to send, until it is over."""

    def __init__(self, play: Play, machine: Machine, code: str) -> None:
        self.play, self.machine, self.code = play, machine, code
        self.core = PairingApplicant(machine.own, machine.private.sign, random=play.random.randbytes)
        self.step = 0
        self.refusal: RefusedPairingError | None = None
        self.is_over = False

    def heard(self, body: bytes) -> bytes | None:
        """Return the answer to a message; None at the end."""
        try:
            self.step += 1
            if self.step == 1:
                self.met = self.core.heard_hello(body).id
                return self.core.request(self.code)
            if self.step == 2:
                return self.core.answered(body)
            self.machine.grant, self.machine.met = self.core.granted(body), self.met
            self.is_over = True
            return self.core.stored()
        except RefusedPairingError as error:
            self.refusal = error
        except CoveyError:
            pass
        self.is_over = True
        return None


class Play:
    """One course of events, which a seed decides."""

    def __init__(
        self, seed: int, inviter: Callable[..., PairingInviter] = PairingInviter, *, is_hostile: bool | None = None
    ) -> None:
        self.random = draw = random.Random(seed)
        self.is_hostile = draw.random() < 0.7 if is_hostile is None else is_hostile
        self.now, self._events, self._order = 0.0, list[Any](), itertools.count()
        self._connections = itertools.count(1)
        self.ends: dict[int, Callable[[bytes | None], None]] = {}
        """By connection: takes a message at the other end; None: the connection has ended."""
        self.inviter_machine = Machine(1, "north-aaaa")
        count = draw.choice((0, 0, 1, 3))
        own, sign = self.inviter_machine.own, self.inviter_machine.private.sign
        self.core = inviter(own, sign, random=draw.randbytes, now=0.0, machines=count)
        self.machines = [Machine(10 + at, f"south-{at}") for at in range(draw.randint(1, 4) if count != 1 else 1)]
        self.stranger = Machine(99, "stranger")
        self.admitted: list[tuple[PairingMachine, float]] = []
        self.paired: list[MachinePaired] = []
        self.story: list[str] = []
        self.codes: list[str] = []
        """All that were shown, in order."""
        self.failed: dict[str, int] = {}
        self.spent: dict[str, int] = {}
        self.recorded: list[bytes] = []
        """All that honest machines have sent."""
        self.tries = 0
        self.settle()
        for machine in self.machines:
            self.after(draw.uniform(0.5, 60), self.person_types, machine)
        if self.is_hostile:
            kinds = STRANGERS if draw.random() < 0.8 else (guess,)
            for _ in range(draw.randint(1, 12) if kinds is STRANGERS else 40):
                self.after(draw.uniform(0, 60), draw.choice(kinds), self)

    # Time and the network

    def after(self, seconds: float, then: Callable[..., object], *args: Any) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), then, args))

    def delay(self) -> float:
        return self.random.expovariate(100)

    def run(self, until: float = 400.0) -> None:
        while (at := min(self.core.next_deadline(), self._events[0][0] if self._events else math.inf)) <= until:
            if self._events and self._events[0][0] == at:
                self.now, _, then, args = heapq.heappop(self._events)
                then(*args)
            else:
                self.now = max(self.now, at)
                self.core.tick(self.now)
            self.settle()
        self.now = max(self.now, until)

    def connect(self, source: str, hear: Callable[[bytes | None], None]) -> int:
        number = next(self._connections)
        self.ends[number] = hear
        self.after(self.delay(), lambda: self.core.came(number, source, self.now))
        return number

    def send(self, connection: int, body: bytes) -> None:
        self.after(self.delay(), lambda: self.core.received(connection, body, self.now))

    def hang_up(self, connection: int) -> None:
        self.ends.pop(connection, None)
        self.after(self.delay(), lambda: self.core.gone(connection))

    def settle(self) -> None:
        while effects := self.core.effects():
            for effect in effects:
                self.perform(effect)
        state = self.core.state()
        if state.code and (not self.codes or self.codes[-1] != state.code):
            assert state.code not in self.codes[-1:]
            self.codes.append(state.code)
        assert len(state.code) in (0, 6)
        assert not (state.code and state.over)
        if state.code:
            assert state.failed < TRIES_FOR_CODE, self.tell("a code is shown that was tried too often")

    def perform(self, effect: object) -> None:
        match effect:
            case SendPairing(connection, message):
                assert SECRET.encode() not in message, self.tell("the secret was sent in clear text")
                self.after(self.delay(), self.deliver, connection, message)
            case EndPairing(connection):
                self.after(self.delay(), self.deliver, connection, None)
            case AdmitMachine(connection, machine):
                self.story.append(f"{self.now:.2f} {machine.name} has proved the code")
                self.admitted.append((machine, self.now))
                self.after(self.random.uniform(0, 2), self.admit, connection)
            case MachinePaired():
                self.paired.append(effect)

    def admit(self, connection: int) -> None:
        self.core.admitted(connection, Grant(SECRET), self.now)

    def deliver(self, connection: int, message: bytes | None) -> None:
        end = self.ends.get(connection)
        if message is None:
            self.ends.pop(connection, None)
        if end is not None:
            end(message)

    # People

    def person_types(self, machine: Machine) -> None:
        """Type a code: mostly the one that is shown, sometimes another, sometimes the one of a while ago."""
        if machine.grant is not None or not self.codes or self.tries > 60:
            return
        self.tries += 1
        luck = self.random.random()
        shown = self.core.state().code or self.codes[-1]
        code = shown if luck < 0.8 else self.random.choice(self.codes) if luck < 0.9 else "000000"
        machine.typed = code
        self.start(machine, code)

    def start(self, machine: Machine, code: str) -> None:
        dialogue = Dialogue(self, machine, code)
        breaks_at = self.random.randint(1, 6) if self.is_hostile else 0  # a break at 4 or later comes too late
        heard = itertools.count(1)

        def hear(body: bytes | None) -> None:
            if body is None:
                if not dialogue.is_over or machine.grant is None:
                    self.after(self.random.uniform(1, 15), self.person_types, machine)
                return
            answer = dialogue.heard(body)
            if next(heard) == breaks_at and self.random.random() < 0.3:
                self.hang_up(number)
                self.after(self.random.uniform(1, 15), self.person_types, machine)
            elif answer is not None:
                self.recorded.append(answer)
                self.send(number, answer)

        number = self.connect(machine.own.source, hear)

    # What must be true in the end

    def tell(self, what: str) -> str:
        return "\n".join([what, *self.story])

    def check(self) -> None:
        honest = {machine.own.id for machine in self.machines}
        for known, _ in self.admitted:
            assert known.id in honest, self.tell(f"{known.name} was let in")
            assert known.name == next(each.own.name for each in self.machines if each.own.id == known.id)
        for machine in self.machines:
            if machine.grant is not None:
                assert machine.grant.join_code == SECRET, self.tell("a machine was given something else")
                assert machine.met == self.inviter_machine.own.id, self.tell("a machine was given it by a stranger")
                assert machine.own.id in {each.id for each, _ in self.admitted}
        assert self.stranger.grant is None, self.tell("a stranger has the secret")
        assert self.core._failed_in_all <= FAILED_TRIES
        if not self.is_hostile and self.core.state().over not in (pairing.TOO_MANY_CODES,):
            wanted = len(self.machines) if self.core._machines == 0 else min(self.core._machines, len(self.machines))
            got = sum(machine.grant is not None for machine in self.machines)
            assert got == wanted, self.tell(f"{got} of {wanted} machines are in")
            assert sum(each.has_stored for each in self.paired) == wanted


# Strangers


def guess(play: Play) -> None:
    """Try a code that is not the right one."""
    wrong = next(code for code in ("111111", "222222") if code != play.core.state().code)
    dialogue = Dialogue(play, play.stranger, wrong)

    def hear(body: bytes | None) -> None:
        if body is not None and (answer := dialogue.heard(body)) is not None:
            play.send(number, answer)

    number = play.connect("192.0.2.99", hear)


def stall(play: Play) -> None:
    """Begin an attempt, or only connect, and say no more."""
    dialogue = Dialogue(play, play.stranger, "111111")
    most = play.random.randint(0, 1)

    def hear(body: bytes | None) -> None:
        if body is not None and dialogue.step < most and (answer := dialogue.heard(body)) is not None:
            play.send(number, answer)

    number = play.connect("192.0.2.99", hear)


def replay(play: Play) -> None:
    """Send what honest machines have sent before."""

    def hear(body: bytes | None) -> None:
        if body is not None and play.recorded:
            play.send(number, play.random.choice(play.recorded))

    number = play.connect("192.0.2.99", hear)
    for at in range(min(3, len(play.recorded))):
        play.after(0.2 * at, play.send, number, play.recorded[-1 - at])


def reflect(play: Play) -> None:
    """Send every message back; of a hello, its fresh bytes and its key in a request."""

    def hear(body: bytes | None) -> None:
        if body is not None:
            play.send(number, body)

    number = play.connect("192.0.2.99", hear)


def garble(play: Play) -> None:
    """Send nonsense."""

    def hear(body: bytes | None) -> None:
        if body is not None:
            play.send(number, play.random.randbytes(play.random.randint(0, 200)))

    number = play.connect("192.0.2.99", hear)


def stand_between(play: Play) -> None:
    """Pass on what a machine and the inviter say, and change it: a bit, or the key of the machine for one's own."""
    machine = play.random.choice(play.machines)
    if machine.grant is not None:
        return
    dialogue = Dialogue(play, machine, play.core.state().code or "000000")
    changes_at, kind = play.random.randint(0, 5), play.random.choice(("bit", "key", "share"))
    passed = itertools.count()

    def changed(body: bytes) -> bytes:
        if next(passed) != changes_at:
            return body
        if kind == "bit":
            at = play.random.randrange(8 * len(body))
            return bytes(byte ^ (1 << at % 8 if where == at // 8 else 0) for where, byte in enumerate(body))
        try:
            message = decode_pairing(body)
        except CoveyError:
            return body
        if isinstance(message, PairingRequest):
            versions, nonce, _, name, release, share = (getattr(message, each) for each in message.__struct_fields__)
            mine = play.stranger.own.id if kind == "key" else message.machine
            other = play.random.randbytes(32) if kind == "share" else share
            return encode_pairing(PairingRequest(versions, nonce, mine, name, release, other))
        return body

    def hear(body: bytes | None) -> None:
        if body is None:
            return
        answer = dialogue.heard(changed(body))
        if answer is not None:
            play.send(number, changed(answer))

    number = play.connect("192.0.2.99", hear)


def pose(play: Play) -> None:
    """Answer a machine in place of the inviter, with its key and name, and a code that is not the right one."""
    machine = play.random.choice(play.machines)
    if machine.grant is not None:
        return
    false = Forgiving(
        play.inviter_machine.own, play.stranger.private.sign, random=play.random.randbytes, now=play.now, machines=0
    )
    if false.state().code == play.core.state().code:
        return
    dialogue = Dialogue(play, machine, play.core.state().code or "000000")
    false.came(1, "192.0.2.10", play.now)
    for _ in range(6):
        for effect in false.effects():
            if isinstance(effect, SendPairing) and (answer := dialogue.heard(effect.message)) is not None:
                false.received(1, answer, play.now)
            elif isinstance(effect, AdmitMachine):
                false.admitted(1, Grant("covey1-a-false-cluster"), play.now)


STRANGERS = (guess, guess, stall, replay, reflect, garble, stand_between, pose)


def play(seed: int, inviter: Callable[..., PairingInviter] = PairingInviter, **terms: Any) -> Play:
    course = Play(seed, inviter, **terms)
    course.run()
    course.check()
    return course


@pytest.mark.parametrize("batch", batches(20))
def test_machines_that_know_the_code_get_in_and_nobody_else_does(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        try:
            play(seed)
        except AssertionError as error:
            error.add_note(f"seed={seed}")
            raise


def test_the_courses_have_what_they_are_to_have() -> None:
    """Machines get in, also with strangers about; codes are tried wrongly, replaced, and shown no more."""
    courses = [play(seed) for seed in seeds(40)]
    hostile = [course for course in courses if course.is_hostile]
    assert any(each.has_stored for course in hostile for each in course.paired)
    assert any(not each.has_stored for course in hostile for each in course.paired)
    assert any(course.core.state().over == pairing.TOO_MANY_CODES for course in hostile)
    assert any(course.core.state().over == pairing.ALL_IN for course in courses)
    assert any(len(course.codes) > 3 for course in courses)


# Mutants: each lacks a rule, and must be caught.


class Forgiving(PairingInviter):
    """Does not look at what proves the code."""

    def _check(self, connection: int, caller: Any, proof: Any, now: float) -> None:
        attempt = self._attempt
        assert attempt is not None
        attempt.is_proved, attempt.until = True, now + pairing.KEEPING_SECONDS
        self._effects.append(AdmitMachine(connection, attempt.machine))


class Hasty(PairingInviter):
    """Lets a machine in as soon as it asks."""

    def _begin(self, connection: int, caller: Any, request: Any, body: bytes, now: float) -> None:
        super()._begin(connection, caller, request, body, now)
        if self._attempt is not None and self._attempt.connection == connection:
            self._effects.append(AdmitMachine(connection, self._attempt.machine))


class Uncounting(PairingInviter):
    """Shows the same code however often it was tried."""

    def _renew(self, now: float, why: str = "") -> None:
        if not self._code:
            super()._renew(now, why)


class Trusting(PairingInviter):
    """Takes the key that a machine names for its own."""

    def _check(self, connection: int, caller: Any, proof: Any, now: float) -> None:
        attempt = self._attempt
        assert attempt is not None
        attempt.machine = attempt.machine._replace(name="")
        super()._check(connection, caller, proof, now)


class Open(PairingInviter):
    """Sends what is secret as it is."""

    def admitted(self, connection: int, grant: Grant, now: float) -> None:
        self._effects.append(SendPairing(connection, grant.join_code.encode()))


@pytest.mark.parametrize("mutant", [Forgiving, Hasty, Uncounting, Trusting, Open])
def test_a_mutant_is_caught(mutant: type[PairingInviter]) -> None:
    for seed in seeds(200):
        try:
            play(seed, mutant)
        except AssertionError:
            return
    pytest.fail(f"{mutant.__name__} was not caught")


def test_an_exchange_without_its_proofs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in the middle puts its own key in place of the applicant's, if no proof and no signature covers it."""
    monkeypatch.setattr(PairingKeys, "is_confirmed", lambda *_: True)
    monkeypatch.setattr(pairing, "is_signed", lambda *_: True)
    monkeypatch.setattr(PairingKeys, "open", lambda *_: bytes(64))
    for seed in seeds(200):
        try:
            play(seed, is_hostile=True)
        except AssertionError:
            return
    pytest.fail("one in the middle was not caught")


# Single rules


def test_a_code_is_replaced_after_three_wrong_tries_and_no_more_are_shown_after_nine() -> None:
    course = Play(0, is_hostile=False)
    course._events.clear()
    shown = []
    for _ in range(12):
        shown.append(course.core.state())
        guess(course)
        course.run(course.now + 20)
    codes = [state.code for state in shown]
    assert len({*codes[:3]}) == len({*codes[3:6]}) == len({*codes[6:9]}) == 1
    assert len({codes[0], codes[3], codes[6]}) == 3
    assert [state.failed for state in shown[:9]] == [0, 1, 2] * 3
    assert [state.replaced for state in shown[:9:3]] == ["", pairing.TRIED, pairing.TRIED]
    assert codes[9:] == ["", "", ""]
    assert course.core.state().over == pairing.TOO_MANY_CODES
    assert course.core.state().failed_from == "192.0.2.99"


def test_a_code_ends_after_minutes_and_pairing_after_half_an_hour() -> None:
    course = Play(1, is_hostile=False)
    course._events.clear()
    course.run(pairing.CODE_SECONDS * 2.5)
    assert len(course.codes) == 3
    assert course.core.state().replaced == pairing.TOO_OLD
    course.run(pairing.PAIRING_SECONDS + 1)
    assert course.core.state().over == pairing.TOO_LONG
    assert course.core.next_deadline() == float("inf")
