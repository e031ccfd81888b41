"""Lets machines into a cluster that know a code of six digits: one end of each side, without I/O.

`PairingInviter` shows the code and answers machines that want in; `PairingApplicant` is one of these. Connections are
numbers that the owner of the inviter chooses. Time is that of a clock that also runs while the machine sleeps.

Invariants of the inviter:
- Nothing secret is sent on a connection before its other end has proved the code and the key of its machine.
- At most one attempt is under way, and one that does not go on ends within CODE_ATTEMPT_SECONDS.
- A code is tried wrongly at most TRIES_FOR_CODE times; then it is another one. After FAILED_TRIES in all it is over.
- A code that has let in as many machines as it is for, that is too old, or that was replaced, lets none in.
- After a failed try, the next attempt waits: a second at first, and longer each time.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from covey.base.errors import CoveyError, RemoteProtocolError
from covey.base.pace import Growing
from covey.wire.pairing import (
    CODE_DIGITS,
    PAIRING_NONCE_BYTES,
    PAIRING_SPEAKS,
    Grant,
    PairingGrant,
    PairingHello,
    PairingKeys,
    PairingProof,
    PairingRefusal,
    PairingRequest,
    PairingShare,
    PairingStored,
    decode_pairing,
    encode_pairing,
    exchange_for,
    open_grant,
    pairing_objection,
    seal_grant,
)
from covey.wire.signed import SIGNATURE_BYTES, is_signed

if TYPE_CHECKING:
    from collections.abc import Callable

    from covey.wire.pairing import CodeExchange, PairingMessage, RefusalKind

CODE_SECONDS: Final = 300.0
"""How long a code is good."""
PAIRING_SECONDS: Final = 1800.0
"""How long codes are shown while no machine gets in."""
TRIES_FOR_CODE: Final = 3
FAILED_TRIES: Final = 9
"""Wrong tries after which no further code is shown: a stranger guesses one with a probability of 9 in a million."""
RESTS: Final = Growing(1.0, 8.0)
"""Pauses after failed tries."""
GUEST_SECONDS: Final = 5.0
"""How long a connection may take to say what it wants."""
CODE_ATTEMPT_SECONDS: Final = 5.0
"""How long an attempt may take until the code is proved."""
KEEPING_SECONDS: Final = 20.0
"""How long both machines may take to store what they have to."""
CONNECTIONS_LIMIT: Final = 16
CONNECTIONS_OF_SOURCE: Final = 4
ADMITTED_LIMIT: Final = 1000
"""Machines that one code may let in."""
ALL_IN: Final = "all machines are in"
ENDED: Final = "it was ended"
TOO_LONG: Final = "no machine has joined for half an hour"
TOO_OLD: Final = "was too old"
TRIED: Final = "was tried wrongly three times"
"""Why a code is replaced by another one."""
TOO_MANY_CODES: Final = f"{FAILED_TRIES} wrong codes were tried: a machine on this network is guessing them"


class PairingMachine(NamedTuple):
    """One of the two machines."""

    id: bytes
    """The first key of the machine."""
    name: str
    """As it calls itself."""
    release: str
    """Release of covey."""
    source: str = ""
    """Where it connects from."""


class SendPairing(NamedTuple):
    """Send a message on a connection."""

    connection: int
    message: bytes


class EndPairing(NamedTuple):
    """Close a connection, when all that was sent on it is on its way."""

    connection: int


class AdmitMachine(NamedTuple):
    """A machine has proved the code: approve it, and call `admitted` or `turned_away`."""

    connection: int
    machine: PairingMachine


class MachinePaired(NamedTuple):
    """A machine was given the secret."""

    machine: PairingMachine
    grant: Grant
    has_stored: bool
    """Whether it has said that it has stored it."""


class PairingChanged(NamedTuple):
    """What is shown has changed: see `PairingInviter.state`."""


PairingEffect = SendPairing | EndPairing | AdmitMachine | MachinePaired | PairingChanged


class PairingState(NamedTuple):
    """What a person sees."""

    code: str
    """Empty when it is over."""
    until: float
    """When the code ends, by the clock of the caller."""
    machines: int
    """How many machines the code still lets in."""
    failed: int
    """Wrong tries of this code."""
    failed_from: str
    """Where the last wrong try came from."""
    over: str
    """Why no code is shown any more, or empty."""
    replaced: str
    """Why the code before this one was given up; empty if it has let its machines in."""


@dataclass
class _Caller:
    """A connection."""

    source: str
    since: float
    hello: bytes
    nonce: bytes


@dataclass
class _Attempt:
    """The one attempt that is under way."""

    connection: int
    machine: PairingMachine
    keys: PairingKeys
    until: float
    is_proved: bool = False
    given: Grant | None = None
    """What was sent, once it was."""


class PairingInviter:
    """Shows codes, and gives the secret to machines that prove one."""

    def __init__(
        self,
        own: PairingMachine,
        sign: Callable[[bytes], bytes],
        *,
        random: Callable[[int], bytes],
        now: float,
        machines: int = 1,
    ) -> None:
        """Show a code from `now` on, for `machines`; `sign` signs with the key of this machine.

        When they are in, it is over, unless `machines` is 0: then each code is for one machine, and another follows.
        """
        self._own, self._sign, self._random = own, sign, random
        self._machines = machines
        self._left = max(1, machines)
        self._code, self._until = "", -math.inf
        self._failed = self._failed_in_all = 0
        self._failed_from = self._over = self._replaced = ""
        self._since, self._rests_until = now, -math.inf
        self._callers: dict[int, _Caller] = {}
        self._attempt: _Attempt | None = None
        self._effects: list[PairingEffect] = []
        self._renew(now)

    # What is shown

    def state(self) -> PairingState:
        """Return what is shown now."""
        over = self._over if self._attempt is None else ""  # the last machine is about to get in
        return PairingState(self._code, self._until, self._left, self._failed, self._failed_from, over, self._replaced)

    def effects(self) -> list[PairingEffect]:
        """Return the effects to perform, in order, and clear them."""
        effects, self._effects = self._effects, []
        return effects

    def next_deadline(self) -> float:
        """Return when to call `tick`."""
        ends = [each.since + GUEST_SECONDS for number, each in self._callers.items() if not self._is_trying(number)]
        if self._attempt is not None:
            ends.append(self._attempt.until)
        elif not self._over:
            ends += [self._until, self._since + PAIRING_SECONDS]
        return min(ends, default=math.inf)

    def tick(self, now: float) -> None:
        """End what has lasted too long."""
        for number, caller in list(self._callers.items()):
            if not self._is_trying(number) and now >= caller.since + GUEST_SECONDS:
                self._end(number)
        if self._attempt is not None and now >= self._attempt.until:
            self._end(self._attempt.connection)
        if self._over or self._attempt is not None:
            return
        if now >= self._since + PAIRING_SECONDS:
            self._finish(TOO_LONG)
        elif now >= self._until:
            self._renew(now, TOO_OLD)

    def close(self) -> None:
        """Show no code any more."""
        if not self._over:
            self._finish(ENDED)

    # Connections

    def came(self, connection: int, source: str, now: float) -> None:
        """Take a connection from an address, and name this machine."""
        nonce = self._random(PAIRING_NONCE_BYTES)
        hello = PairingHello(PAIRING_SPEAKS, nonce, self._own.id, self._own.name, self._own.release)
        self._callers[connection] = _Caller(source, now, encode_pairing(hello), nonce)
        self._make_room()
        if connection not in self._callers:
            return
        if self._over:
            self._refuse(connection, "no-code", self._over)
        else:
            self._effects.append(SendPairing(connection, self._callers[connection].hello))

    def received(self, connection: int, body: bytes, now: float) -> None:
        """Take a message; whatever is wrong with it ends the connection."""
        caller = self._callers.get(connection)
        if caller is None:
            return
        try:
            message = decode_pairing(body)
            match message:
                case PairingRequest() if not self._is_trying(connection):
                    self._begin(connection, caller, message, body, now)
                case PairingProof() if self._is_trying(connection, is_proved=False):
                    self._check(connection, caller, message, now)
                case PairingStored() if self._is_trying(connection, is_proved=True):
                    self._note_stored(connection, message)
                case _:
                    raise RemoteProtocolError(f"{type(message).__name__} comes out of turn")
        except CoveyError:
            self._end(connection)

    def gone(self, connection: int) -> None:
        """Note that a connection has ended."""
        self._end(connection)

    # An attempt

    def admitted(self, connection: int, grant: Grant, now: float) -> None:
        """Give the join code to the machine of an `AdmitMachine`, which may be in the cluster now."""
        attempt = self._attempt
        if attempt is None or attempt.connection != connection or not attempt.is_proved or attempt.given:
            return
        attempt.given, attempt.until = grant, now + KEEPING_SECONDS
        self._effects.append(SendPairing(connection, encode_pairing(seal_grant(attempt.keys, grant, self._sign))))

    def turned_away(self, connection: int, reason: str) -> None:
        """Refuse the machine of an `AdmitMachine`: it may not be in the cluster, or cannot be approved."""
        if self._is_trying(connection, is_proved=True):
            self._refuse(connection, "refused", reason)

    def _begin(self, connection: int, caller: _Caller, request: PairingRequest, body: bytes, now: float) -> None:
        hello = decode_pairing(caller.hello)
        assert isinstance(hello, PairingHello)
        if problem := pairing_objection(hello, request):
            return self._refuse(connection, "versions", problem)
        self.tick(now)  # the code may have ended
        if self._over:
            return self._refuse(connection, "no-code", self._over)
        if self._attempt is not None or now < self._rests_until:
            until = self._rests_until if self._attempt is None else self._attempt.until
            return self._refuse(connection, "later", seconds=min(max(0.1, until - now), 60.0))
        if request.machine == self._own.id:
            return self._refuse(connection, "refused", "this is the machine that shows the code")
        exchange = exchange_for(self._code, hello, request.nonce, request.machine, self._random)
        keys = PairingKeys(exchange, caller.hello, body, exchange.share, is_inviter=True)
        machine = PairingMachine(request.machine, request.name, request.release, caller.source)
        self._attempt = _Attempt(connection, machine, keys, now + CODE_ATTEMPT_SECONDS)
        self._effects.append(SendPairing(connection, encode_pairing(PairingShare(exchange.share))))

    def _check(self, connection: int, caller: _Caller, proof: PairingProof, now: float) -> None:
        attempt = self._attempt
        assert attempt is not None
        if not attempt.keys.is_confirmed("applicant", proof.confirmation):
            return self._fail(connection, caller.source, now)
        signature = attempt.keys.open("applicant", PairingProof, proof.sealed)
        if len(signature) != SIGNATURE_BYTES or not is_signed(
            attempt.machine.id, attempt.keys.words("applicant"), signature
        ):
            return self._fail(connection, caller.source, now)
        attempt.is_proved, attempt.until = True, now + KEEPING_SECONDS
        self._spend(now)
        self._effects.append(AdmitMachine(connection, attempt.machine))

    def _note_stored(self, connection: int, message: PairingStored) -> None:
        attempt = self._attempt
        assert attempt is not None
        if attempt.given is None or attempt.keys.open("applicant", PairingStored, message.sealed):
            raise RemoteProtocolError("it has kept what it was not given")
        self._attempt = None
        self._effects.append(MachinePaired(attempt.machine, attempt.given, has_stored=True))
        self._end(connection)

    def _fail(self, connection: int, source: str, now: float) -> None:
        """Count a wrong code, and show another one after too many."""
        self._failed += 1
        self._failed_in_all += 1
        self._failed_from = source
        self._rests_until = now + RESTS.after(self._failed_in_all)
        self._attempt = None
        self._refuse(connection, "wrong-code", tries_left=max(0, TRIES_FOR_CODE - self._failed))
        self._effects.append(PairingChanged())
        if self._failed_in_all >= FAILED_TRIES:
            self._finish(TOO_MANY_CODES)
        elif self._failed >= TRIES_FOR_CODE:
            self._renew(now, TRIED)

    # Codes

    def _renew(self, now: float, why: str = "") -> None:
        """Show another code; `why` the last one is given up, if it is."""
        self._replaced = why
        before, self._code = self._code, ""
        while self._code in ("", before):
            number = int.from_bytes(self._random(16), "big") % 10**CODE_DIGITS
            self._code = f"{number:0{CODE_DIGITS}d}"
        self._until, self._failed, self._left = now + CODE_SECONDS, 0, max(self._left, 1)
        self._effects.append(PairingChanged())

    def _spend(self, now: float) -> None:
        """Note that the code has let a machine in: it is good for no more of them than it was made for."""
        self._left -= 1
        self._since = now
        if self._left > 0:
            self._effects.append(PairingChanged())
        elif self._machines:
            self._finish(ALL_IN)
        else:
            self._renew(now)

    def _finish(self, why: str) -> None:
        """Show no code, and end the connections that are not about to get the secret."""
        self._over, self._code, self._until = why, "", math.inf
        for number in list(self._callers):
            if not self._is_trying(number, is_proved=True):
                self._refuse(number, "no-code", why)
        self._effects.append(PairingChanged())

    # Ends of connections

    def _is_trying(self, connection: int, *, is_proved: bool | None = None) -> bool:
        attempt = self._attempt
        if attempt is None or attempt.connection != connection:
            return False
        return is_proved is None or attempt.is_proved is is_proved

    def _refuse(
        self, connection: int, kind: RefusalKind, text: str = "", *, seconds: float = 0.0, tries_left: int = 0
    ) -> None:
        if connection in self._callers:
            refusal = encode_pairing(PairingRefusal(kind, text, seconds, tries_left))
            self._effects.append(SendPairing(connection, refusal))
            self._end(connection)

    def _end(self, connection: int) -> None:
        """Forget a connection. A machine that was given the secret and has not said that it has it is told of."""
        attempt = self._attempt
        if attempt is not None and attempt.connection == connection:
            self._attempt = None
            if attempt.given is not None:
                self._effects.append(MachinePaired(attempt.machine, attempt.given, has_stored=False))
        if self._callers.pop(connection, None) is not None:
            self._effects.append(EndPairing(connection))

    def _make_room(self) -> None:
        """End the oldest connection of a source that has too many, or of that which has most."""
        waiting = {number: each for number, each in self._callers.items() if not self._is_trying(number)}
        counts = Counter(each.source for each in waiting.values())
        source, most = counts.most_common(1)[0] if counts else ("", 0)
        if most > CONNECTIONS_OF_SOURCE or len(self._callers) > CONNECTIONS_LIMIT:
            self._end(next(number for number, each in waiting.items() if each.source == source))


class RefusedPairingError(CoveyError):
    """The machine that shows the code does not go on; the refusal says why, and whether another try may help."""

    def __init__(self, refusal: PairingRefusal) -> None:
        super().__init__(refusal.text or refusal.kind)
        self.refusal = refusal


class PairingApplicant:
    """One attempt of a machine to get into a cluster: each method takes what has come, and returns what to send.

    All raise a RefusedPairingError if the other end refuses, and a RemoteProtocolError if it sends something else.
    """

    def __init__(self, own: PairingMachine, sign: Callable[[bytes], bytes], *, random: Callable[[int], bytes]) -> None:
        """`sign` signs with the key of this machine."""
        self._own, self._sign, self._random = own, sign, random
        self._hello_body = self._request = b""
        self._hello: PairingHello | None = None
        self._exchange: CodeExchange | None = None
        self._keys: PairingKeys | None = None

    def heard_hello(self, body: bytes) -> PairingMachine:
        """Take the first message; return which machine shows a code, which nothing proves yet."""
        hello = _expected(PairingHello, body)
        self._hello_body, self._hello = body, hello
        return PairingMachine(hello.machine, hello.name, hello.release)

    def request(self, code: str) -> bytes:
        """Return the request to get in with a code."""
        assert self._hello is not None
        nonce = self._random(PAIRING_NONCE_BYTES)
        self._exchange = exchange_for(code, self._hello, nonce, self._own.id, self._random)
        request = PairingRequest(
            PAIRING_SPEAKS, nonce, self._own.id, self._own.name, self._own.release, self._exchange.share
        )
        if problem := pairing_objection(request, self._hello):
            raise RefusedPairingError(PairingRefusal("versions", problem))
        self._request = encode_pairing(request)
        return self._request

    def answered(self, body: bytes) -> bytes:
        """Take the share of the other end; return the proof that this one knows the code.

        Raises:
            AuthError: the share is not valid.
        """
        assert self._exchange is not None
        share = _expected(PairingShare, body).share
        keys = PairingKeys(self._exchange, self._hello_body, self._request, share, is_inviter=False)
        signature = keys.seal("applicant", PairingProof, self._sign(keys.words("applicant")))
        self._keys = keys
        return encode_pairing(PairingProof(keys.confirmation("applicant"), signature))

    def granted(self, body: bytes) -> Grant:
        """Take the secret.

        Raises:
            AuthError: the other end has not proved the code, or not the key of its machine.
        """
        assert self._keys is not None
        assert self._hello is not None
        return open_grant(self._keys, _expected(PairingGrant, body), self._hello.machine)

    def stored(self) -> bytes:
        """Return what says that the secret is stored."""
        assert self._keys is not None
        return encode_pairing(PairingStored(self._keys.seal("applicant", PairingStored, b"")))


_MessageT = TypeVar("_MessageT", bound="PairingMessage")


def _expected(kind: type[_MessageT], body: bytes) -> _MessageT:
    message = decode_pairing(body)
    if isinstance(message, PairingRefusal):
        raise RefusedPairingError(message)
    if not isinstance(message, kind):
        raise RemoteProtocolError(f"{type(message).__name__} came where {kind.__name__} was expected")
    return message
